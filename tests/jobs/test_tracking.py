"""Trackers: every step is tracked once, TensorBoard's files are readable, a user's tracker cannot harm a run."""

from __future__ import annotations

import logging
import struct
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import loading, user_files
from pipeline.config.user_files import with_code
from pipeline.jobs.tracking import Tracking
from stores.errors import ConfigError

STEPS = [{"step": 0.0, "reward": 0.5}, {"step": 1.0, "reward": 0.75}]
MINE = """
class Mine:
    def __init__(self, run_dir, job):
        self.lines = open(run_dir + "/mine.txt", "a")
        self.lines.write(job["name"])

    def step(self, step, metrics):
        if step == 2:
            raise RuntimeError("no network")
        self.lines.write(f" {step}:{metrics['reward']}")
        self.lines.flush()

    def close(self):
        self.lines.write(" closed")
        self.lines.close()
"""


def values(folder: Path) -> list[tuple[int, Any]]:
    """(step, what TensorBoard would show), read from its event files' records."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for file in folder.glob("events.*"):
        data = file.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + size])
            found += [(event.step, value) for value in event.summary.value]
            data = data[12 + size + 4 :]
    return found


def scalars(folder: Path) -> list[tuple[int, str, float]]:
    return [(step, value.tag, value.simple_value) for step, value in values(folder)]


def test_a_scalar_says_what_it_is_in_which_unit(job: Path, tmp_path: Path) -> None:
    tracking = Tracking(loading.load(job), tmp_path)
    tracking.steps([{"step": 0.0, "staleness_max": 1.0, "of_mine": 2.0}])
    tracking.close()
    said = {value.tag: value.metadata.summary_description for _, value in values(tmp_path / "tensorboard")}
    assert said == {"staleness_max": "largest step - v_traj of the batch; at most eta, versions", "of_mine": ""}


def test_every_step_is_tracked_once(job: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    config = loading.load(job, (f"tracking.tracker={tmp_path}/mine.py:Mine",))
    tracking = Tracking(config, tmp_path)
    tracking.steps(STEPS[:1])
    tracking.steps(STEPS)
    tracking.steps(STEPS)
    with caplog.at_level(logging.WARNING):
        tracking.steps([*STEPS, {"step": 2.0, "reward": 1.0}, {"step": 3.0, "reward": 1.0}])
    tracking.close()
    assert (tmp_path / "mine.txt").read_text() == "job 0:0.5 1:0.75 closed"
    assert caplog.messages == ["Mine failed and is not called again: RuntimeError('no network')"]
    assert scalars(tmp_path / "tensorboard") == [(i, "reward", r) for i, r in enumerate((0.5, 0.75, 1.0, 1.0))]


def test_a_resumed_run_tracks_what_is_new(job: Path, tmp_path: Path) -> None:
    tracking = Tracking(loading.load(job), tmp_path, first=1)
    tracking.steps(STEPS)
    tracking.close()
    assert scalars(tmp_path / "tensorboard") == [(1, "reward", 0.75)]


def test_a_tracker_that_is_not_there_is_one_line_and_one_that_is_travels(job: Path, tmp_path: Path) -> None:
    for named, message in (("none.py:T", "cannot be loaded: none.py: no such file"), ("T", "expected file.py:NAME")):
        with pytest.raises(ConfigError, match=message):
            Tracking(loading.load(job, (f"tracking.tracker={named}",)), tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    config, code = with_code(loading.load(job, (f"tracking.tracker={tmp_path}/mine.py:Mine",)))
    assert config.tracking.tracker == "tracking_mine.py:Mine"
    assert code == {"tracking_mine.py": MINE}


def test_a_tracker_that_cannot_be_constructed_is_one_line(job: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    def __init__(self, run_dir, job):\n        raise OSError('no\\nnet')\n"
    )
    config = loading.load(job, (f"tracking.tracker={tmp_path}/mine.py:Mine", "tracking.tensorboard=false"))
    with pytest.raises(ConfigError, match=r"Mine': cannot be constructed: OSError: no net$"):
        Tracking(config, tmp_path)
    missing = loading.load(job, (f"tracking.tracker={tmp_path}/mine.py:Other",))
    with pytest.raises(ConfigError, match="has no function Other"):
        user_files.check(missing)
