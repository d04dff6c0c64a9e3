"""Metrics: tokens per second is one number wherever it is shown."""

from __future__ import annotations

from pathlib import Path

from pipeline.config import loading
from pipeline.jobs.summary import summarize
from pipeline.runtime.outcomes import Outcomes
from pipeline.simulator.measure import measure, steady_tokens_per_s
from pipeline.simulator.trace import Trace, TrainedStep
from stores import metrics

STEPS = [
    {"step": 0.0, "response_tokens": 300.0, "elapsed_s": 10.0, "wait_s": 6.0, "train_s": 1.0, "publish_s": 1.0},
    {"step": 1.0, "response_tokens": 100.0, "elapsed_s": 12.0, "wait_s": 0.0, "train_s": 1.0, "publish_s": 0.5},
    {"step": 2.0, "response_tokens": 600.0, "elapsed_s": 20.0, "wait_s": 5.0, "train_s": 1.0, "publish_s": 1.0},
]
"""Steps that took longer than waiting, training and publishing: batches are fetched, too."""


def test_a_step_counts_from_the_end_of_the_one_before() -> None:
    rated = metrics.with_rates(STEPS)
    assert [s["tokens_per_s"] for s in rated] == [30.0, 50.0, 75.0]
    assert [s["step"] for s in rated] == [0.0, 1.0, 2.0]
    assert metrics.with_rate(STEPS[2], rated[1]) == rated[2]
    assert metrics.with_rates(rated) == rated
    assert metrics.tokens_per_s(STEPS) == 1000 / 20
    assert metrics.tokens_per_s([]) == 0.0
    assert metrics.with_rate({"step": 4.0}, None)["tokens_per_s"] == 0.0  # of a store that did not keep the time


def simulated() -> Trace:
    """The same steps in virtual time."""
    return Trace(
        steps=[
            TrainedStep(
                step=int(s["step"]), ready_s=s["elapsed_s"] - 2, finished_s=s["elapsed_s"],
                tokens=int(s["response_tokens"]), prefilled=1, context_tokens=1000.0, longest_tokens=9, longest_s=1.0,
                staleness={0: 1},
            )
            for s in STEPS
        ],
        finished_s=21.0,
    )  # fmt: skip


def test_summary_and_simulation_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("")
    config = loading.load(tmp_path / "job.toml", ("model.path=x", "steps=3", "staleness.eta=0"))
    steps = [{**dict.fromkeys((m.name for m in metrics.METRICS), 0.0), **s} for s in metrics.with_rates(STEPS)]
    outcomes = Outcomes(steps=steps, phases={"wall_s": 33.0})  # until the last commit was stored
    assert summarize(config, outcomes, tmp_path / "none")["tokens_per_s"] == 50.0
    measures = measure(config, simulated())
    assert measures.tokens_per_s == 50.0
    assert measures.steady_tokens_per_s == steady_tokens_per_s(STEPS, 0) == 700 / 10
