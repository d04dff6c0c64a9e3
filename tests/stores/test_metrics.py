"""Metrics: each is declared once and displayed as declared; tokens per second is the same everywhere."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from docs import metrics_page
from staleflow.pipeline.config import loading
from staleflow.pipeline.jobs import summary
from staleflow.pipeline.jobs.summary import summarize
from staleflow.pipeline.runtime.run_report import RunReport
from staleflow.pipeline.simulator.analysis import Trace, TrainedStep, compute_stats, steady_tokens_per_s
from staleflow.stores import metrics
from staleflow.tasks.actors.trainer import Trainer
from staleflow.tasks.training.batches import batch_metrics
from staleflow.tasks.training.emulated_trainer import EmulatedTrainerSettings
from staleflow.tasks.training.loss import Sft
from staleflow.tasks.training.microbatches import Row
from staleflow.tasks.training.step_metrics import mismatch_metrics
from staleflow.tasks.training.trainer_settings import TrainingConfig
from tests.runtime.test_teachers import TAUGHT
from tests.stores.store_conformance import ended
from tests.support.bodies import Body
from tests.tasks.branching import branching_row
from tests.tasks.test_numerics import trainer

STEPS = [
    {"step": 0.0, "response_tokens": 300.0, "elapsed_s": 10.0, "wait_s": 6.0, "train_s": 1.0, "publish_s": 1.0},
    {"step": 1.0, "response_tokens": 100.0, "elapsed_s": 12.0, "wait_s": 0.0, "train_s": 1.0, "publish_s": 0.5},
    {"step": 2.0, "response_tokens": 600.0, "elapsed_s": 20.0, "wait_s": 5.0, "train_s": 1.0, "publish_s": 1.0},
]
"""Steps that took longer than waiting, training and publishing, because batches are also fetched."""


def test_the_duration_of_a_step_starts_at_the_end_of_the_previous_one() -> None:
    rated = metrics.steps_with_tokens_per_s(STEPS)
    assert [s["tokens_per_s"] for s in rated] == [30.0, 50.0, 75.0]
    assert [s["step"] for s in rated] == [0.0, 1.0, 2.0]
    assert metrics.step_with_tokens_per_s(STEPS[2], rated[1]) == rated[2]
    assert metrics.steps_with_tokens_per_s(rated) == rated
    assert metrics.tokens_per_s(STEPS) == 1000 / 20
    assert metrics.tokens_per_s([]) == 0.0
    assert (
        metrics.step_with_tokens_per_s({"step": 4.0}, None)["tokens_per_s"] == 0.0
    )  # of a store that did not keep the time


def simulated() -> Trace:
    """Return a trace with the same steps in virtual time."""
    return Trace(
        steps=[
            TrainedStep(
                step=int(s["step"]), ready_s=s["elapsed_s"] - 2, finished_s=s["elapsed_s"],
                tokens=int(s["response_tokens"]), min_prefill_tokens=1, context_tokens=1000.0, longest_tokens=9,
                longest_s=1.0, staleness={0: 1},
            )
            for s in STEPS
        ],
        finished_s=21.0,
    )  # fmt: skip


def test_summary_and_simulation_report_the_same_metrics(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("")
    config = loading.load(tmp_path / "job.toml", ("model.path=x", "steps=3", "staleness.eta=0"))
    steps = [
        {**dict.fromkeys((m.name for m in metrics.STEP_METRICS.values()), 0.0), **s}
        for s in metrics.steps_with_tokens_per_s(STEPS)
    ]
    steps[0] |= {"prefilled_tokens": 30.0, "cached_tokens": 70.0, "branches": 4.0}
    steps[2]["branches"] = 3.0
    del steps[1]["cached_tokens"], steps[1]["branches"]  # of an earlier version
    outcomes = RunReport(steps=steps, seconds_by_activity={"wall_s": 33.0})  # until the last commit was stored
    summary = summarize(config, outcomes, tmp_path / "none")
    assert [summary[name] for name in ("tokens_per_s", "prefilled_tokens", "cached_tokens")] == [50.0, 30, 70]
    assert summary["branches"] == 7
    measures = compute_stats(config, simulated())
    assert measures.tokens_per_s == 50.0
    assert measures.steady_tokens_per_s == steady_tokens_per_s(STEPS, 0) == 700 / 10


def test_the_metrics_page_in_docs_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text() == metrics_page.page(), "run `make generated`"


def test_metric_names_are_unique_and_charts_have_one_unit() -> None:
    assert len({(m.kind, m.name) for m in metrics.METRICS}) == len(metrics.METRICS)
    exported = [m.prometheus_name for m in metrics.METRICS if m.prometheus_name]
    assert len(set(exported)) == len(exported)
    assert metrics.axis_title("staleness", "staleness_mean", "staleness_max") == "staleness, versions"
    assert metrics.axis_title("reward", "reward") == "reward"
    with pytest.raises(ValueError, match="too many values"):
        metrics.axis_title("both", "staleness_mean", "response_mean")
    for series in (summary.STALENESS_LINES, summary.LENGTH_LINES):
        assert metrics.axis_title("picture", *series)
        assert all(metrics.STEP_METRICS[name].label for name in series)


def test_steps_record_exactly_the_declared_metrics(tmp_path: Path) -> None:
    """Metrics of server, trainer and driver in a run over in-process actors, and those of the policy trainer, which
    also compares logprobs."""
    run = Body(tmp_path / "runs").run(*TAUGHT)
    recorded = {name for record in run.records for name in record.metrics}
    shown = {name for step in run.outcomes.steps for name in step}
    settings = EmulatedTrainerSettings(train_s=0.0, s_per_token=0.0, time_scale=1.0)
    trainer = Trainer(settings, str(tmp_path / "weights"), 1, 9.0, str(tmp_path / "points"), 0)
    reported = trainer._train(
        0, [Row.of(ended(np.random.default_rng(0), 1, 1))], {"fetch_s": 0.5, "resume_wait_s": 0.0}
    ).metrics
    asyncio.run(trainer.close())
    fresh = replace(Row.of(ended(np.random.default_rng(0), 1, 1)), staleness=0)
    compared = {*mismatch_metrics([fresh], {0: fresh.behaviour}), "kl_reference", "sft_loss", "sft_tokens"}
    assert recorded | reported.keys() | compared == metrics.STEP_METRICS.keys() - metrics.DERIVED_METRICS
    assert shown - recorded == metrics.DERIVED_METRICS | {"step"}


def test_an_emulated_step_counts_the_tokens_that_its_loss_trains() -> None:
    row = replace(Row.of(ended(np.random.default_rng(0), 1, 1)), advantage=0.0)

    def tokens_trained(training: TrainingConfig) -> float:
        settings = EmulatedTrainerSettings(train_s=0.0, s_per_token=0.0, time_scale=1.0, training=training)
        return settings.build(1).step(0, [row])["tokens_trained"]

    assert tokens_trained(TrainingConfig()) == 0.0
    assert tokens_trained(TrainingConfig(loss=Sft())) == row.num_sampled > 0


def test_both_trainers_report_the_same_metrics(tiny_model: Path) -> None:
    rows = [Row.of(ended(np.random.default_rng(0), 1, 1))]
    row = replace(rows[0], prompt=np.asarray([3, 4], np.int32), response=np.asarray([5, 6], np.int32))
    row = replace(row, behaviour=np.asarray([-1.0, -1.0], np.float32), sampled=np.ones(2, bool), lags=None)
    emulated = EmulatedTrainerSettings(train_s=0.0, s_per_token=0.0, time_scale=1.0).build(1)
    assert emulated.step(0, [row]).keys() == trainer(tiny_model).step(0, [row]).keys()


def test_batch_metrics_count_turns_tool_time_and_sampled_tokens() -> None:
    rows = [ended(np.random.default_rng(0), i, 1) for i in range(4)]  # 1 has three turns, with 1.5 and .25 s between
    found = batch_metrics(rows, 2)
    assert (found["turns_mean"], found["turns_max"], found["tool_s"]) == (1.5, 3.0, 1.75 / 4)
    lengths = [sum(len(s.tokens) for s in r.trajectory.segments) for r in rows]
    assert found["response_tokens"] == sum(lengths)
    assert found["given_tokens"] == sum(len(r.trajectory.response_tokens) for r in rows) - sum(lengths) > 0


def test_branches_are_counted_over_the_batch() -> None:
    linear = [ended(np.random.default_rng(0), i, 1) for i in range(2)]
    assert batch_metrics(linear, 2)["branches"] == 0
    branching = branching_row()
    assert len(branching.trajectory.branches) == 3
    assert batch_metrics([branching, linear[0], branching, linear[1]], 2)["branches"] == 6


def test_reward_parts_are_metrics_by_name() -> None:
    """Means over scored responses that have the part."""
    rows = [ended(np.random.default_rng(0), i, 1) for i in range(4)]  # 0 and 3 could not be scored
    parts = ({"a": 9.0}, {"a": 1.0, "b": 0.5}, {"a": 2.0}, {"c": 9.0})
    rows = [replace(r, trajectory=replace(r.trajectory, reward_parts=p)) for r, p in zip(rows, parts, strict=True)]
    found = batch_metrics(rows, 2)
    assert {k: v for k, v in found.items() if k.startswith(metrics.REWARD_PART_PREFIX)} == {
        "reward/a": 1.5,
        "reward/b": 0.5,
    }
