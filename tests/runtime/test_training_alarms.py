"""Alarms about training steps: once each, with a remedy, in the log and the summary of the run."""

from __future__ import annotations

import pytest

from staleflow.pipeline.jobs.summary import summarize
from staleflow.pipeline.runtime.step_records import AVERAGED_STEPS, MIN_ESS, TrainingAlarms
from tests.support.bodies import Body
from tests.support.scripted import World


def test_a_low_ess_for_several_steps_raises_one_alarm() -> None:
    watch = TrainingAlarms()
    values = [0.9, 0.1, 0.1, 0.8, *[0.1] * 10]
    results = [(step, alarm) for step, ess in enumerate(values) for alarm in watch.observe(step, {"ess": ess})]
    ((step, alarm),) = results
    assert step == 4 + AVERAGED_STEPS - 1
    assert f"step {step}: the effective sample size of the importance ratios is 0.1 of the tokens" in alarm
    assert f"below {MIN_ESS:g}" in alarm
    assert "lower staleness.eta or training.learning_rate" in alarm
    assert "\n" not in alarm


def test_a_low_ess_within_its_standard_error_is_no_alarm() -> None:
    """With few rows it may be caused by one large ratio."""
    near = {"ess": 0.2, "ess_stderr": 0.12}
    watch, sure = TrainingAlarms(), TrainingAlarms()
    assert not any(watch.observe(step, near) for step in range(2))
    assert not watch.observe(2, near), "2 x .12 / sqrt(3) is more than .1"
    (alarm,) = [a for step in range(3) for a in sure.observe(step, {"ess": 0.2, "ess_stderr": 0.06})]
    assert "is 0.2 of the tokens, averaged over 3 steps (standard error 0.03), below 0.3" in alarm


def test_a_low_ess_in_a_single_step_is_no_alarm() -> None:
    watch = TrainingAlarms()
    assert not any(watch.observe(step, {"ess": ess}) for step, ess in enumerate([0.9, 0.0, 0.9, 0.9, 0.01, 0.9]))


def test_steps_without_ess_raise_no_alarm() -> None:
    assert not any(TrainingAlarms().observe(step, {}) for step in range(10))


def test_dropped_updates_raise_one_alarm() -> None:
    watch = TrainingAlarms()
    alarms = [watch.observe(step, {"updates_dropped": float(step)}) for step in range(4)]
    assert [len(a) for a in alarms] == [0, 1, 0, 0]
    assert "step 1: updates dropped because their gradient was not finite: 1; lower" in alarms[1][0]


def test_a_run_logs_and_stores_its_alarms(body: Body, caplog: pytest.LogCaptureFixture) -> None:
    def figures(step: int) -> dict[str, float]:
        return {"ess": 0.2, "entropy": 1.0 - 0.1 * step, "updates_dropped": float(step == 1), "clip_share": 0.25}

    run = body.checked_run("steps=4", world=World(figures=figures))
    assert [alarm.partition(":")[0] for alarm in run.outcomes.alarms] == ["step 1", "step 2"]
    for alarm in run.outcomes.alarms:
        assert sum(r.getMessage() == alarm for r in caplog.records) == 1
    summary = summarize(run.config, run.outcomes, run.config.run_dir)
    assert summary["alarms"] == run.outcomes.alarms
    assert summary["training"] == {
        "ess_least": pytest.approx(0.2), "entropy_first": 1.0, "entropy_last": pytest.approx(0.7),
        "clip_share_mean": 0.25, "updates_dropped": 1,
    }  # fmt: skip
