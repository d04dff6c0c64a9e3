"""`make bench` runs every benchmark in its quick form."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import ablation, agentic, model_matrix, time_to_quality
from benchmarks.__main__ import COMMANDS
from benchmarks.simulated import Row, best, fluid_step_s, job, page, ratio
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import Fate
from tests.support.simulated_store import stored_simulation

NO_SCRIPTS = {"__init__", "__main__", "admission_rules", "planted_causes", "routing_rules"}
SCRIPTS = sorted(p for p in Path("benchmarks").glob("*.py") if p.stem not in NO_SCRIPTS)


def test_bench_runs_every_benchmark() -> None:
    assert {p.stem for p in SCRIPTS} == set(COMMANDS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_each_benchmark_has_a_quick_form(script: Path) -> None:
    assert '"--quick"' in script.read_text()


@pytest.mark.parametrize("name", ["ledger", "coordinator", "shares"])
def test_small_benchmarks_run(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--quick"])
    runpy.run_path(f"benchmarks/{name}.py", run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) >= 2


def test_agents_in_virtual_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["agentic", "--quick", "--out", str(tmp_path)])
    agentic.main()
    assert capsys.readouterr().out.startswith((tmp_path / "agentic.md").read_text())
    parsed = json.loads((tmp_path / "agentic.json").read_text())
    assert {r["part"] for r in parsed} == {
        "lock_step", "redundancy", "asynchronous", "prefix", "queue", "replication",
    }  # fmt: skip
    assert all(r["bound_kept"] for r in parsed if r["part"] == "asynchronous")
    assert all(r["ratio"] > 1 for r in parsed if r["part"] == "lock_step")


def test_pages_of_stored_results_are_reproducible() -> None:
    assert agentic.page(json.loads(Path("docs/agentic.json").read_text())) == Path("docs/agentic.md").read_text()
    models = json.loads(Path("docs/models.json").read_text())
    assert model_matrix.page(models) == Path("docs/models.md").read_text()
    simulated = json.loads(Path("docs/simulated.json").read_text())
    assert page(simulated, ablation.stored(Path("docs"))) == Path("docs/simulated.md").read_text()


def test_the_fluid_limit_is_the_training_or_the_longest_response() -> None:
    """Where only reading weights takes time, a step of the longest response's limit takes (its time + training) / 4."""
    free = tuple(f"rollout.cost.{name}=0" for name in ("k1", "k3", "b", "prefill"))
    config = job("7B", "lognormal", 4, Row("staleflow", "", 3, (*free, "simulation.pull_s=0")), steps=2)
    train_s, decode_step_s = config.simulation.train_s, config.rollout.cost.k2 + config.rollout.cost.k4
    responses = np.ones((2 * 32, 8, 4))
    assert fluid_step_s(config, responses) == train_s
    responses[[0, 32], 3, 0] = 7 * train_s / decode_step_s  # eight trainings, less that of the last step
    responses[[0, 32], 3, 3] = 0.0
    assert fluid_step_s(config, responses) == pytest.approx(2 * train_s, rel=2e-3)
    responses[[0, 32], 3, 3] = 4 * train_s  # seconds of its tools
    assert fluid_step_s(config, responses) == pytest.approx(3 * train_s, rel=2e-3)


def test_the_model_matrix_continues_with_missing_families(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Results are written after each family; other versions of the libraries start again."""

    def results(*families: str, until: str = "") -> list[str]:
        tried = list[str]()

        def try_in_process(family: str, *, quick: bool) -> dict[str, str]:
            if family == until:
                raise KeyboardInterrupt
            tried.append(family)
            return {"engine": "yes", "train": f"{model_matrix.PADDED}layers have windows", "LoRA": "no target"}

        monkeypatch.setattr(sys, "argv", ["model_matrix", *families, "--quick", "--out", str(tmp_path)])
        monkeypatch.setattr(model_matrix, "in_process", try_in_process)
        try:
            model_matrix.main()
        except KeyboardInterrupt:
            assert until
        return tried

    assert results(until="gemma3_text") == ["llama", "qwen3_moe"]
    row = "| `llama`, `qwen3_moe` | train padded: layers have windows; no LoRA: no target; recompute, bfloat16, resume,"
    assert row in (tmp_path / "models.md").read_text()
    assert results() == ["gemma3_text", "qwen3_5_text", "gpt_oss"]
    assert results() == []
    assert results("llama") == ["llama"]
    monkeypatch.setattr(model_matrix, "present_versions", lambda: {"transformers": "9", "processor": "x"})
    assert results() == list(model_matrix.QUICK)
    assert "transformers 9; x processor" in (tmp_path / "models.md").read_text()


def test_settings_are_compared_over_common_seeds() -> None:
    """One seed gives higher rates for all settings; a setting run with this seed only must not win."""
    rates = {
        ("synchronous", "", 0): {1: 1200.0, 2: 1000.0, 3: 1000.0},
        ("synchronous", "redundancy", 0): {1: 1188.0},
        ("staleflow", "", 3): {1: 3000.0, 2: 2500.0, 3: 2500.0},
        ("credits", "alpha 1", 1): {1: 1500.0},
        ("credits", "alpha 3", 3): {1: 1800.0, 2: 1500.0, 3: 1500.0},
    }
    base, setting = best(rates, "synchronous")
    assert (setting, sum(base.values())) == ("", 3200.0)
    assert ratio(best(rates, "staleflow", 3)[0], base) == pytest.approx(2.5)
    assert best(rates, "credits")[1] == "alpha 3"
    assert ratio(best(rates, "credits", 1)[0], base) == pytest.approx(1.25)
    assert best(rates, "backlog") == ({}, "")


def make_run(bound: int, reward: list[float], step_s: float) -> dict[str, Any]:
    elapsed_s = [step_s * (i + 1) for i in range(len(reward))]
    lags = {"lag": float(bound), "inter": [1.0], "intra": [0.0] * bound + [1.0]}
    return {"bound": bound, "seed": 1, "elapsed_s": elapsed_s, "reward": reward, "tokens_per_s": 10.0, **lags}


def test_time_to_quality_uses_the_smoothed_reward() -> None:
    synchronous = make_run(0, [0.1 * min(i, 8) for i in range(40)], 10.0)
    assert time_to_quality.plateau([synchronous]) == pytest.approx(0.8)
    assert time_to_quality.first_within(synchronous, 0.785) == 170.0, "of ten batches one is below 0.8 then"
    peak = make_run(2, [1.0, *[0.1] * 39], 5.0)
    assert time_to_quality.first_within(peak, 0.78) is None, "one batch is not enough"
    quick = make_run(2, [0.1 * min(i, 8) for i in range(40)], 5.0)
    lines = time_to_quality.table([synchronous, quick, peak], 0.02)
    assert "| 0 | 1 | 10 | 0.00 | 0.00 | 0.00 | 170 s | 0.800 |" in lines
    assert "| 2 | 2 | 10 | 2.00 | 0.00 | 2.00 | 85 s (1 of 2) | 0.450 |" in lines


def test_the_lag_is_read_from_the_store(tmp_path: Path) -> None:
    run = stored_simulation(tmp_path, "name=lag", "steps=6", "staleness.eta=2")
    store = VersionedStore.open(run / "store")
    result = time_to_quality.lags(store.displayed_columns())
    staleness = [row.staleness for row in store.trajectories() if row.fate is Fate.CONSUMED]
    assert result["lag"] == pytest.approx(sum(staleness) / len(staleness))
    assert result["lag"] > 0
    assert [sum(result["inter"]), sum(result["intra"])] == pytest.approx([1.0, 1.0], abs=1e-3)
    time_to_quality.draw([make_run(0, [0.5], 1.0) | result, make_run(1, [0.5, 0.6], 1.0)], tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
