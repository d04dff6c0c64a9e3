"""The records of a run's starts for its summary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from staleflow.pipeline.config import loading
from staleflow.pipeline.jobs.starts import Start, StartRecorder, read_start_records
from staleflow.pipeline.jobs.summary import write_summary
from staleflow.pipeline.runtime.run_report import RunReport
from staleflow.stores.errors import ActorLost, StoreError

PHASES = {
    "wall_s": 30.0, "train_s": 9.0, "decide_s": 1.0, "driver_cpu_s": 3.0, "rollout_busy_s": 5.0, "tokens_sampled": 70.0,
}  # fmt: skip


def test_losses_and_commands_of_all_starts_are_counted(tmp_path: Path) -> None:
    killed = RunReport(lost_actors=["3.0 s: rollout-0 is gone"], alarms=["drift"],
                       command_counts={"Route": 4, "Pull": 1},
                       seconds_by_activity={**PHASES, "wall_s": 8.0})  # fmt: skip
    first = StartRecorder(tmp_path, 0, 0.0)
    first.on_status(None, killed)
    killed.command_counts["Route"] = 99  # after its last step or loss: not known if its driver is killed

    lost = RunReport(command_counts={"Route": 2}, seconds_by_activity={**PHASES, "wall_s": 12.0})
    second = StartRecorder(tmp_path, 3, 10.0)
    second.on_status(None, lost)
    with pytest.raises(ActorLost), second.record_end():
        raise ActorLost("server is gone")

    last = RunReport(
        lost_actors=["20.0 s: reward-0 is gone"],
        command_counts={"Route": 1, "Train": 5},
        seconds_by_activity=dict(PHASES),
    )
    third = StartRecorder(tmp_path, 4, 12.0)
    with third.record_end():
        third.on_status(None, last)
    assert [(item.version, item.end) for item in read_start_records(tmp_path)] == [
        (0, ""), (3, "failed: server is gone"), (4, "done"),
    ]  # fmt: skip
    assert [item.phases["wall_s"] for item in read_start_records(tmp_path)] == [8.0, 2.0, 18.0]

    summary = write_summary(loading.from_tree({"rollout": {"engine": {"name": "emulated"}}}), last, tmp_path)
    assert summary["losses"] == ["3.0 s: rollout-0 is gone", "20.0 s: reward-0 is gone"]
    assert summary["alarms"] == ["drift"]
    assert summary["commands"] == {"Route": 7, "Pull": 1, "Train": 5}
    assert summary["seconds"] == {"wall_s": 30.0, "train_s": 9.0, "decide_s": 3.0, "driver_cpu_s": 9.0,
                                  "rollout_busy_s": 15.0, "rollout_assigned_s": 0.0,
                                  "rollout_idle_with_work_s": 0.0}  # fmt: skip
    assert [item["end"] for item in json.loads((tmp_path / "summary.json").read_text())["starts"]] == [
        "", "failed: server is gone", "done",
    ]  # fmt: skip


def test_a_stop_is_recorded(tmp_path: Path) -> None:
    recorder = StartRecorder(tmp_path, 0, 0.0)
    with recorder.record_end():
        recorder.on_status(None, RunReport(stop_reason="cancelled"))
    with pytest.raises(KeyboardInterrupt), StartRecorder(tmp_path, 0, 0.0).record_end():
        raise KeyboardInterrupt
    with pytest.raises(OSError, match="disk"), StartRecorder(tmp_path, 0, 0.0).record_end():
        raise OSError("disk")  # before the driver is made
    assert [item.end for item in read_start_records(tmp_path)] == [
        "stopped: cancelled",
        "stopped at once",
        "failed: disk",
    ]


def test_a_new_run_has_no_starts_and_a_corrupt_file_is_named(tmp_path: Path) -> None:
    assert read_start_records(tmp_path) == []
    for content in ("{", "[3]", '[{"version": "one"}]', "7"):
        (tmp_path / "starts.json").write_text(content)
        with pytest.raises(
            StoreError, match=r"starts.json: cannot be read: .*; remove it to continue without earlier losses"
        ):
            read_start_records(tmp_path)


def test_starts_are_written_once_per_step_and_at_most_twice_a_second(tmp_path: Path) -> None:
    starts, outcomes = StartRecorder(tmp_path, 0, 0.0), RunReport()
    outcomes.command_counts["Route"] = 1
    starts.on_status(None, outcomes)
    assert read_start_records(tmp_path) == [Start(0)]
    outcomes.steps.append({"step": 0.0})
    starts.on_status(None, outcomes)
    assert read_start_records(tmp_path) == [Start(0, commands={"Route": 1})]
