"""Comparison of runs: seeds of a job as one series, curves, and differences on the same prompts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import staleflow
from staleflow.pipeline.config import knob_tree, loading
from staleflow.pipeline.recovery import source_fingerprints
from staleflow.pipeline.runtime.evaluation_figures import PromptRewards
from staleflow.pipeline.stored_runs import reward_rescoring, run_facts
from staleflow.pipeline.stored_runs.comparison import TRAINING_PROMPTS, EvaluationFacts, RunFacts, compare
from staleflow.pipeline.stored_runs.run_facts import read_run_facts
from staleflow.stores.errors import ConfigError
from staleflow.stores.metrics import STEP_METRICS
from staleflow.stores.reward_statistics import paired_difference
from tests.commands import command, error_line


def run(name: str, rewards: list[float], *, rate: str = "0.1", **facts: Any) -> RunFacts:
    steps = [
        {"reward": reward, "tokens_trained": 10.0 * (i + 1), "elapsed_s": 2.0 * (i + 1), "wait_s": 0.5, "train_s": 1.0,
         "publish_s": 0.1, "overhead_s": 0.2, "response_tokens": 20.0}
        for i, reward in enumerate(rewards)
    ]  # fmt: skip
    settings = {"name": f'"{name}"', "seed": name[-1], "training.learning_rate": rate}
    return RunFacts(name=name, settings=settings, steps=steps, **facts)


def evaluation_of(version: int, rewards: dict[str, float], function: str = "f") -> EvaluationFacts:
    prompts = {prompt: PromptRewards(sampled=(reward, reward), greedy=()) for prompt, reward in rewards.items()}
    mean = sum(rewards.values()) / len(rewards)
    return EvaluationFacts(
        set="held-out",
        version=version,
        reward=mean,
        stderr=0.25,
        reward_fingerprint=function,
        rewards_by_prompt=prompts,
    )


def test_seeds_of_a_job_are_one_series_and_another_setting_is_another() -> None:
    comparison = compare([run("a1", [0, 1, 0, 1]), run("a2", [1, 1, 0, 0]), run("b1", [1, 1, 1, 1], rate="0.2")])
    assert comparison.jobs == {"a1 (2 runs)": ("a1", "a2"), "b1": ("b1",)}
    assert [(s.key, s.values) for s in comparison.settings] == [
        ("training.learning_rate", {"a1 (2 runs)": "0.1", "b1": "0.2"})
    ]
    steps = [p for p in comparison.rewards if p.axis == "steps"]
    assert [(p.end, p.reward, p.stderr, p.num_runs) for p in steps if p.job != "b1"] == [
        (1, 0.5, 0.5, 2), (2, 1.0, 0.0, 2), (3, 0.0, 0.0, 2), (4, 0.5, 0.5, 2),
    ]  # fmt: skip
    assert [(p.end, p.reward, p.stderr) for p in steps if p.job == "b1"] == [(e, 1.0, None) for e in (1, 2, 3, 4)]


def test_a_curve_has_the_mean_of_the_steps_in_each_interval() -> None:
    """Steps of run a end at 10, 30 and 60 tokens and those of b at up to 100: intervals of 25 tokens."""
    comparison = compare([run("a", [0, 1, 0.5]), run("b", [1, 0, 0, 1], rate="0.2")])
    points = {(p.job, p.axis, p.end): p.reward for p in comparison.rewards}
    assert {(job, end): value for (job, axis, end), value in points.items() if axis == "tokens"} == {
        ("a", 25.0): 0.0, ("a", 50.0): 1.0, ("a", 75.0): 0.5,
        ("b", 25.0): 1.0, ("b", 50.0): 0.0, ("b", 75.0): 0.0, ("b", 100.0): 1.0,
    }  # fmt: skip
    assert points["b", "seconds", 8.0] == 1.0
    long = compare([run("a", [float(i) for i in range(100)]), run("b", [0.0] * 100, rate="0.2")])
    assert [p.reward for p in long.rewards if (p.job, p.axis) == ("a", "steps")] == [4.5 + 10 * i for i in range(10)]


def test_held_out_prompts_are_compared_at_versions_that_both_runs_evaluated() -> None:
    base = {f"p{i}": i % 2 / 1.0 for i in range(20)}
    better = {f"p{i}": 1.0 for i in range(5, 25)}
    first = run("a", [0] * 4, evaluations=[evaluation_of(0, base), evaluation_of(4, base)])
    second = run("b", [0] * 4, rate="0.2", evaluations=[evaluation_of(2, better), evaluation_of(4, better)])
    comparison = compare([first, second])
    (row,) = [d for d in comparison.differences if d.set == "held-out"]
    assert (row.base, row.job, row.responses, row.version) == ("a", "b", "sampled", 4)
    expected = paired_difference({p: [r] for p, r in base.items()}, {p: [r] for p, r in better.items()})
    assert row.difference == expected and expected is not None and expected.num_prompts == 15
    assert [(e.job, e.version, e.tokens, e.seconds, e.stderr) for e in comparison.evaluations] == [
        ("a", 0, 0, 0, 0.25), ("a", 4, 100, 8, 0.25), ("b", 2, 30, 4, 0.25), ("b", 4, 100, 8, 0.25),
    ]  # fmt: skip

    other = dataclasses.replace(second, evaluations=[evaluation_of(4, better, "g")])
    few = dataclasses.replace(second, evaluations=[evaluation_of(4, {"p1": 1.0, "x": 0.0})])
    for changed, reason in ((other, "other reward functions"), (few, "1 prompts in common; an interval needs 10")):
        row = compare([first, changed]).differences[0]
        assert (row.difference, row.reason) == (None, reason)


def test_training_prompts_are_compared_by_row_if_the_data_are_the_same() -> None:
    facts: dict[str, Any] = {"data_fingerprint": "rows", "reward_fingerprint": "f"}
    low = {f"0:{i}": [0.0, 1.0] for i in range(12)}
    high = {f"0:{i}": [1.0] for i in range(12)}
    runs = [
        run("a1", [0], training_rewards=low, **facts), run("a2", [0], training_rewards=high, **facts),
        run("b", [0], rate="0.2", training_rewards=high, **facts),
    ]  # fmt: skip
    (row,) = compare(runs).differences
    assert (row.set, row.responses, row.version) == (TRAINING_PROMPTS, "trained", -1)
    assert row.difference is not None and row.difference.mean == pytest.approx(1 / 3)
    for changes, reason in (
        ({"data_fingerprint": "others"}, "other data, or unknown"),
        ({"reward_fingerprint": "g"}, "other reward functions"),
        ({"training_rewards": {}}, "the rows of the prompts are not stored"),
    ):
        (row,) = compare([*runs[:2], dataclasses.replace(runs[2], **changes)]).differences
        assert (row.difference, row.reason) == (None, reason)


def test_trainer_times_add_up() -> None:
    comparison = compare([run("a", [0, 1]), run("b", [], rate="0.2")])
    use, none = comparison.times
    assert use.seconds.keys() - {"rest_s"} <= STEP_METRICS.keys()
    assert sum(use.seconds.values()) == pytest.approx(use.elapsed_s) == 4.0
    assert (use.tokens, use.tokens_per_s) == (30.0, 10.0)
    assert (none.elapsed_s, none.tokens_per_s) == (0.0, 0.0)


def seeds_of(job: Path, folder: Path, source: str = "jsonl:{run}/rows.jsonl", **changed: str) -> dict[str, Any]:
    """The jobs of two seeds whose code and rows are in the folder of each run; `changed` files differ in the second."""
    runs = []
    for seed in (1, 2):
        run_dir = folder / f"seed-{seed}"
        (run_dir / "code").mkdir(parents=True)
        texts = {"rows.jsonl": '{"prompt": "a", "answer": 1}\n', "code/mine.py": "score = source = route = len\n"}
        for file, text in texts.items():
            (run_dir / file).write_text(text + (changed.get(file, "") if seed == 2 else ""))
        config = loading.load(job, (
            f"runs_dir={folder}", f"name=seed-{seed}", f"seed={seed}", f"task.source={source.format(run=run_dir)}",
            f"reward.function={run_dir}/code/mine.py:score",
        ))  # fmt: skip
        (run_dir / "config.toml").write_text(knob_tree.to_toml(config))
        source_fingerprints.write(run_dir, source_fingerprints.compute(config))
        runs.append(read_run_facts(run_dir, None, f"seed-{seed}", {}))
    comparison = compare([dataclasses.replace(facts, steps=[{"reward": 0.5}]) for facts in runs])
    return {"jobs": len(comparison.jobs), "settings": [row.key for row in comparison.settings]}


def test_runs_with_copies_of_the_same_code_and_rows_are_seeds_of_a_job(job: Path, tmp_path: Path) -> None:
    assert seeds_of(job, tmp_path / "rows") == {"jobs": 1, "settings": []}
    assert seeds_of(job, tmp_path / "code", "{run}/code/mine.py:source") == {"jobs": 1, "settings": []}


@pytest.mark.parametrize(
    ("file", "parts"),
    [("rows.jsonl", ["data"]), ("code/mine.py", ["reward", "user code"])],
)
def test_runs_with_other_code_or_rows_are_not_seeds_of_a_job(
    job: Path, tmp_path: Path, file: str, parts: list[str]
) -> None:
    settings = [f"fingerprint of {part}" for part in parts]
    assert seeds_of(job, tmp_path, **{file: "\n"}) == {"jobs": 2, "settings": settings}


def test_training_rewards_are_by_name_of_the_source() -> None:
    """The same sources in another order have other numbers."""
    columns = {"fate": ["consumed"] * 3, "loss_mask": [True, True, False], "rewarded_s": [1.0] * 3,
               "reward": [1.0, 0.5, 0.0], "source": [0, 1, 0], "dataset_row": [7, 7, 7]}  # fmt: skip
    store: Any = SimpleNamespace(displayed_columns=lambda names: {name: np.array(columns[name]) for name in names})
    assert run_facts._training_rewards(store, ["x", "y"]) == {"x:7": [1.0], "y:7": [0.5]}


def test_fewer_than_two_runs_are_rejected() -> None:
    for runs in ([run("a", [0])], [run("a", [0]), run("a", [0])], []):
        with pytest.raises(ConfigError, match="name at least two runs, each once"):
            compare(runs)


def test_a_run_and_its_branch_are_compared(stored: Path) -> None:
    reward_rescoring.rescore(stored, f"{stored.parent.parent}/mine.py:length", "compared", workers=1)
    comparison = staleflow.compare([staleflow.open_run(stored), f"{stored}@compared"])
    assert repr(comparison) == "<Comparison of 2 runs: job, job@compared>"
    assert [s.key for s in comparison.settings] == ["branch"]
    assert [d.reason for d in comparison.differences] == ["other reward functions"]
    printed = command("compare", stored, f"{stored}@compared")
    assert printed.returncode == 0, printed.stderr
    for title in ("Settings that differ", "Reward of batches over tokens", "Where the trainer's time went"):
        assert title in printed.stdout
    as_json = command("compare", stored, f"{stored}@compared", "--json")
    assert json.loads(as_json.stdout) == json.loads(json.dumps(dataclasses.asdict(comparison)))
    early = staleflow.compare([staleflow.open_run(stored), staleflow.open_run(stored, at_step=1)])
    assert list(early.jobs) == ["job", "job@1"]
    for arguments, message in (
        ([stored], "name at least two runs"),
        ([stored, f"{stored}@none"], "no branch 'none'"),
        ([stored, stored / "none"], "no such run"),
    ):
        assert message in error_line("compare", *arguments)
