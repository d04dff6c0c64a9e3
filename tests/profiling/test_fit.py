"""Fits from measurements: the cost model and the rate of a run."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import tomllib
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from staleflow.cli.simulate import profile
from staleflow.pipeline.config import knob_tree, loading
from staleflow.pipeline.coordination import journal
from staleflow.pipeline.coordination.commands import FetchPrompts, Pull, Score, Train
from staleflow.pipeline.coordination.events import (
    GroupsArrived,
    PullFinished,
    Tick,
    TrajectorySampled,
    TrajectoryScored,
    VersionPublished,
)
from staleflow.pipeline.coordination.journal import Journal
from staleflow.pipeline.profiling import fit as fitting
from staleflow.pipeline.profiling.fit import StepPoint, fit_cost_model
from staleflow.pipeline.profiling.run_profile import profile_run, split_train_time
from staleflow.pipeline.profiling.time_breakdown import TimeTracker
from staleflow.stores.errors import ConfigError
from staleflow.stores.in_flight.in_flight_state import NewGroup
from staleflow.stores.trajectory import GroupId, InstanceId, PolicyVersion, TrajectoryId
from staleflow.tasks.emulation.cost_model import CostModel
from tests.support.simulated_store import stored_simulation

PUBLISHED = {
    "7B": CostModel(k1=3.35e-08, k2=0.0064, b=0.0027, k3=0.0001231, k4=0.0028, prefill=0.0),
    "32B": CostModel(k1=6.3e-08, k2=0.0250194, b=0.0183826, k3=0.0002446, k4=2e-10, prefill=0.0),
    "no floor": CostModel(k1=2e-7, k2=0.0, b=0.003, k3=0.00012, k4=0.0, prefill=0.0),
    "all floor": CostModel(k1=1e-7, k2=0.02, b=0.0, k3=0.0, k4=0.0, prefill=0.0),
}


def points_of(model: CostModel, rng: np.random.Generator, noise: float) -> list[StepPoint]:
    grid = itertools.product((1, 2, 4, 8, 16, 32, 64, 128), (200, 2000, 8000), range(2))
    return [
        StepPoint(running=n, kv_tokens=n * c, step_s=model.step_s(n, n * c) * math.exp(noise * rng.standard_normal()))
        for n, c, _ in grid
    ]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_fit_predicts_unseen_loads(name: str) -> None:
    model, rng = PUBLISHED[name], np.random.default_rng(0)
    fit = fit_cost_model(points_of(model, rng, noise=0.02))
    assert fit.error_median < 0.03
    assert fit.error_p90 < 0.06
    for n, context in ((3, 500), (48, 3000), (100, 7000)):
        assert fit.model.step_s(n, n * context) == pytest.approx(model.step_s(n, n * context), rel=0.05)
    assert min(fit.model.k1, fit.model.k2, fit.model.k3, fit.model.k4, fit.model.b) >= 0


def test_outliers_do_not_change_the_fit() -> None:
    model, rng = PUBLISHED["7B"], np.random.default_rng(1)
    points = points_of(model, rng, noise=0.01)
    spoiled = [StepPoint(running=p.running, kv_tokens=p.kv_tokens, step_s=p.step_s * 8) for p in points[::9]]
    fit = fit_cost_model([*points, *spoiled])
    for n, context in ((3, 500), (48, 3000), (100, 7000)):
        assert fit.model.step_s(n, n * context) == pytest.approx(model.step_s(n, n * context), rel=0.06)


def test_too_few_points_are_rejected() -> None:
    with pytest.raises(ValueError, match="3 measured steps; at least 8"):
        fit_cost_model([StepPoint(running=1, kv_tokens=1.0, step_s=1.0)] * 3)


def test_ratio_to_compares_the_step_times_of_two_models() -> None:
    model, rng = PUBLISHED["7B"], np.random.default_rng(2)
    points = points_of(model, rng, 0.02)
    twice = [StepPoint(running=p.running, kv_tokens=p.kv_tokens, step_s=2 * p.step_s) for p in points]
    assert fit_cost_model(points).ratio_to(model) == pytest.approx(1.0, rel=0.03)
    assert fit_cost_model(twice).ratio_to(model) == pytest.approx(2.0, rel=0.03)


# -- the command -------------------------------------------------------------------------------------------------


def test_an_invalid_profile_file_is_named(tmp_path: Path) -> None:
    job, profile = tmp_path / "job.toml", tmp_path / "x.json"
    job.write_text('[rollout.engine]\nname = "emulated"\n')
    for text, message in (
        ("{}", "not a profile"),
        ("nonsense", "not a profile"),
        (
            '{"coefficients": {"k1": -1, "k2": 1, "k3": 0, "k4": 0, "b": 0, "prefill": 0, "verify_share": 1}}',
            "k1 = -1.0 is out of range",
        ),
        (
            '{"coefficients": {"k1": "a", "k2": 1, "k3": 0, "k4": 0, "b": 0, "prefill": 0, "verify_share": 1}}',
            "k1 must be a number",
        ),
    ):
        profile.write_text(text)
        with pytest.raises(ConfigError, match=message):
            loading.load(job, (f"profile={profile}",))
    with pytest.raises(ConfigError, match="cannot be read"):
        loading.load(job, (f"profile={tmp_path / 'y.json'}",))


def finished_run(folder: Path) -> Path:
    """Write the files of a run that profile reads: one step of one trajectory with the durations below."""
    folder.mkdir()
    (folder / "config.toml").write_text('name = "ran"\n')
    (folder / "summary.json").write_text("{}")
    book = Journal(folder / "events.jsonl")
    first, second = TrajectoryId(0), TrajectoryId(1)
    book.append(0.0, Tick(), [FetchPrompts(num_groups=1)])
    book.append(0.5, GroupsArrived(groups=(NewGroup(group=GroupId(0), prompt_tokens=5),)), [])
    book.append(2.0, TrajectorySampled(trajectory=first, route_number=1, tokens=9), [Score(trajectory=first)])
    book.append(2.1, TrajectorySampled(trajectory=second, route_number=1, tokens=9), [Score(trajectory=second)])
    book.append(2.4, TrajectoryScored(trajectory=second, reward=1.0), [])
    train = Train(step=0, trajectories=(first, second), versions=(PolicyVersion(0), PolicyVersion(0)))
    book.append(2.5, TrajectoryScored(trajectory=first, reward=1.0), [train])
    pull = Pull(instance=InstanceId("a"), version=PolicyVersion(1))
    book.append(9.5, VersionPublished(version=PolicyVersion(1)), [pull])
    book.append(9.7, PullFinished(instance=InstanceId("a"), version=PolicyVersion(1)), [])
    book.append(9.8, TrajectoryScored(trajectory=first, reward=1.0), [])  # without a request: left out
    book.close()
    return folder


def test_a_finished_run_is_used_as_a_profile(tmp_path: Path) -> None:
    run, out = stored_simulation(tmp_path, "steps=10"), tmp_path / "p.json"
    result = CliRunner().invoke(profile, [str(run), "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0
    assert "train_s" in result.output
    assert "on steps left out of the fit the error is" in result.output
    value = json.loads(out.read_text())
    assert set(value) == {
        "source", "coefficients", "latencies", "held_out_error", "range", "num_points", "acceptance_rate",
    }  # fmt: skip
    assert value["acceptance_rate"] is None
    job = loading.load(run / "config.toml")
    again = loading.load(run / "config.toml", (f"profile={out}", "simulation.train_s=1.0"))
    assert dataclasses.asdict(again.rollout.cost) == value["coefficients"]
    assert loading.from_tree(tomllib.loads(knob_tree.to_toml(again))) == again  # and needs the file no more
    assert again.rollout.cost.step_s(8, 2000) == pytest.approx(job.rollout.cost.step_s(8, 2000), rel=0.1)


def test_latencies_are_measured_between_commands_and_their_events(tmp_path: Path) -> None:
    watch = TimeTracker(PUBLISHED["7B"], 2)
    for entry in journal.JournalReader(finished_run(tmp_path / "ran") / "events.jsonl"):
        watch.observe(entry.now, entry.event, entry.commands)
    means = watch.latency_tracker.means
    names = ("fetch_prompts_s", "reward_s", "train_s", "pull_s")
    assert [means[name] for name in names] == pytest.approx([0.5, 0.4, 7.0, 0.2])


def test_an_unwritable_output_is_reported_before_the_fit(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    run = str(finished_run(tmp_path / "run"))
    with pytest.raises(ConfigError, match="choose another folder"):
        CliRunner().invoke(profile, [run, "--out", str(file / "p.json")], catch_exceptions=False)


def test_an_unfinished_or_too_short_run_is_rejected_as_a_profile(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too few decode steps"):
        profile_run(finished_run(tmp_path / "short"))
    with pytest.raises(ConfigError, match="no finished run"):
        profile_run(tmp_path)


def plain_non_negative(design: fitting.Array, target: fitting.Array) -> fitting.Array:
    """Return non-negative least squares by trying every subset of coefficients."""
    count = design.shape[1]
    best, best_loss = np.zeros(count), float(target @ target)
    for size in range(1, count + 1):
        for chosen in map(list, itertools.combinations(range(count), size)):
            solved, *_ = np.linalg.lstsq(design[:, chosen], target, rcond=None)
            loss = float(np.square(design[:, chosen] @ solved - target).sum())
            if (solved >= 0).all() and loss < best_loss:
                best_loss, best = loss, np.zeros(count)
                best[chosen] = solved
    return best


@pytest.mark.parametrize("seed", range(60))
def test_coefficients_are_the_best_non_negative_subset(seed: int) -> None:
    """Columns are non-negative as in measurements, some are correlated, zero or equal."""
    rng = np.random.default_rng(seed)
    rows, count = int(rng.integers(6, 60)), int(rng.integers(4, 7))
    design = rng.random((rows, count)) * 10 ** rng.uniform(-1, 1, count)
    if seed % 3 == 0:
        design[:, rng.integers(count)] = 0.0
    if seed % 4 == 0:
        design[:, 0] = 2 * design[:, 1]
    target = design @ rng.normal(size=count) + rng.normal(0, 0.1, rows) * (seed % 2)
    best, expected = fitting._solve_non_negative(design, target), plain_non_negative(design, target)
    assert (best >= 0).all()
    assert np.linalg.norm(design @ best - target) == pytest.approx(np.linalg.norm(design @ expected - target), rel=1e-9)
    if seed % 4:
        np.testing.assert_allclose(best, expected, rtol=1e-6, atol=1e-9)


def test_training_time_is_split_by_the_tokens_of_steps() -> None:
    tokens = [900.0, 1000.0, 1100.0, 950.0, 1050.0]
    proportional = split_train_time(2.0, [(n, 0.002 * n) for n in tokens])
    assert proportional == pytest.approx({"train_s": 0.0, "train_s_per_token": 0.002}, abs=1e-9)
    both = split_train_time(3.0, [(n, 1.0 + 0.002 * n) for n in tokens])
    assert both == pytest.approx({"train_s": 1.0, "train_s_per_token": 0.002})
    constant = split_train_time(4.0, [(n, 2.0 + 0.001 * (-1) ** i) for i, n in enumerate(tokens)])
    assert constant["train_s"] == pytest.approx(4.0, rel=0.02)
    # Without a slope that can be measured, all of it is proportional.
    for unknown in ([(n, 2.0 + 0.5 * (-1) ** i) for i, n in enumerate(tokens)], [(1000.0, 2.0)] * 5, [(1000.0, 2.0)]):
        assert split_train_time(2.0, unknown) == pytest.approx({"train_s": 0.0, "train_s_per_token": 0.002})
    assert split_train_time(2.0, []) == {"train_s": 2.0, "train_s_per_token": 0.0}


def test_the_constant_seconds_of_a_training_step_are_not_negative_by_rounding() -> None:
    splits = [split_train_time(0.01 * i, [(97.0 + i, 1.0), (1.0 + 7 * i, 1.0)]) for i in range(1, 500)]
    assert min(split["train_s"] for split in splits) == 0
