"""Trackers: every step is tracked once, TensorBoard files are readable, and a user tracker cannot fail a run."""

from __future__ import annotations

import logging
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from staleflow.pipeline.config import loading, user_files
from staleflow.pipeline.config.user_files import collect_code
from staleflow.pipeline.jobs.tracking import Tracking
from staleflow.stores.errors import ConfigError

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
    """Return (step, value) of the records in TensorBoard event files."""
    from tensorboardX.proto.event_pb2 import Event

    results = []
    for file in folder.glob("events.*"):
        data = file.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + size])
            results += [(event.step, value) for value in event.summary.value]
            data = data[12 + size + 4 :]
    return results


def scalars(folder: Path) -> list[tuple[int, str, float]]:
    return [(step, value.tag, value.simple_value) for step, value in values(folder)]


def test_a_scalar_has_a_description_and_its_unit(job: Path, tmp_path: Path) -> None:
    tracking = Tracking(loading.load(job), tmp_path)
    tracking.on_step_stored({"step": 0.0, "staleness_max": 1.0, "of_mine": 2.0}, "")
    tracking.close()
    messages = {value.tag: value.metadata.summary_description for _, value in values(tmp_path / "tensorboard")}
    assert messages == {"staleness_max": "largest step - v_traj of the batch; at most eta, versions", "of_mine": ""}


def track(tracking: Tracking, steps: list[dict[str, float]]) -> None:
    for step in steps:
        tracking.on_step_stored(step, "")


def test_a_failing_tracker_is_not_called_again(job: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    config = loading.load(job, (f"tracking.tracker={tmp_path}/mine.py:Mine",))
    tracking = Tracking(config, tmp_path)
    with caplog.at_level(logging.WARNING):
        track(tracking, [*STEPS, {"step": 2.0, "reward": 1.0}, {"step": 3.0, "reward": 1.0}])
    tracking.close()
    assert (tmp_path / "mine.txt").read_text() == "job 0:0.5 1:0.75 closed"
    assert caplog.messages == ["tracker Mine failed and is not called again: RuntimeError('no network')"]
    assert scalars(tmp_path / "tensorboard") == [(i, "reward", r) for i, r in enumerate((0.5, 0.75, 1.0, 1.0))]


def test_a_missing_tracker_gives_a_one_line_error_and_an_existing_one_is_packed(job: Path, tmp_path: Path) -> None:
    for named, message in (("none.py:T", "cannot be loaded: none.py: no such file"), ("T", "expected file.py:NAME")):
        with pytest.raises(ConfigError, match=message):
            Tracking(loading.load(job, (f"tracking.tracker={named}",)), tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    config, code = collect_code(loading.load(job, (f"tracking.tracker={tmp_path}/mine.py:Mine",)))
    assert config.tracking.tracker == "tracking_mine.py:Mine"
    assert code == {"tracking_mine.py": MINE}


def test_a_tracker_that_cannot_be_constructed_gives_a_one_line_error(job: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    def __init__(self, run_dir, job):\n        raise OSError('no\\nnet')\n"
    )
    config = loading.load(job, (f"tracking.tracker={tmp_path}/mine.py:Mine", "tracking.tensorboard=false"))
    with pytest.raises(ConfigError, match=r"Mine': cannot be constructed: OSError: no net$"):
        Tracking(config, tmp_path)
    (tmp_path / "made.py").write_text("def tracker(run_dir, job):\n    return {}\n")
    with pytest.raises(ConfigError, match=r"made.py:tracker': has no method step and no close"):
        Tracking(loading.load(job, (f"tracking.tracker={tmp_path}/made.py:tracker",)), tmp_path)
    missing = loading.load(job, (f"tracking.tracker={tmp_path}/mine.py:Other",))
    with pytest.raises(ConfigError, match="has no function Other"):
        user_files.check_strategies(missing)


# -- trackers by the name of their package, as they work without network -----------------------------------------


def use_offline(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a package write below a folder without an account."""
    monkeypatch.setenv("TRACKIO_DIR", str(folder / "trackio"))
    pytest.importorskip(name)
    if name == "trackio":  # it has read the variable if it was imported before
        for module in ("utils", "sqlite_storage"):
            monkeypatch.setattr(f"trackio.{module}.TRACKIO_DIR", folder / "trackio")
    for variable in ("WANDB_API_KEY", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def tracked_rewards(name: str, folder: Path) -> list[dict[int, float]]:
    """Return the runs in a package's folder as rewards by step."""
    if name == "mlflow":
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=f"sqlite:///{folder.parent / 'mlflow.db'}")
        experiment = client.get_experiment_by_name("staleflow")
        runs = client.search_runs([experiment.experiment_id])
        assert [r.data.params["batch.group_size"] for r in runs] == ["4"] * len(runs)
        return [{m.step: m.value for m in client.get_metric_history(r.info.run_id, "reward")} for r in runs]
    if name == "trackio":
        from trackio.sqlite_storage import SQLiteStorage

        names = SQLiteStorage.get_runs("staleflow")
        logs = [SQLiteStorage.get_logs("staleflow", name) for name in names]
        return [{row["step"]: row["reward"] for row in rows} for rows in logs]
    rewards: dict[str, dict[int, float]] = {}
    for file in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb")):
        # Not by the folder: of two that begin in the same second, the second one's name has a number at its end.
        rewards.setdefault(file.stem, {}).update(wandb_rewards(file))
    return list(rewards.values())


def wandb_rewards(file: Path) -> dict[int, float]:
    """Return rewards by step from the records of an offline run. Waits for the last record, which the package may write
    after the run has finished."""
    end = time.monotonic() + 60
    while True:
        found, whole = read_wandb(file.read_bytes())
        if whole or time.monotonic() > end:
            return found
        time.sleep(0.05)


def read_wandb(data: bytes) -> tuple[dict[int, float], bool]:
    """Return rewards by step, and whether the end record is present, from LevelDB's log format after a header of seven
    bytes."""
    from wandb.proto import wandb_internal_pb2

    at, found, whole = 7, dict[int, float](), False
    while at + 7 <= len(data):
        if at % 32768 > 32768 - 7:  # the rest of a block is too short for a record
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + size > len(data):
            break
        if kind == 1:  # whole; larger ones, of the settings, are in parts
            record = wandb_internal_pb2.Record.FromString(data[at + 7 : at + 7 + size])
            values = {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
            if "reward" in values:
                found[int(values["_step"])] = float(values["reward"])
            whole |= record.WhichOneof("record_type") == "exit"
        at += 7 + size
    return found, whole


@pytest.mark.filterwarnings("ignore")  # of the packages
@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_package_tracks_each_step_once_and_a_resumed_run_continues_there(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    use_offline(name, tmp_path, monkeypatch)
    config = loading.load(job, (f"tracking.tracker={name}", "tracking.tensorboard=false"))
    (run_dir := tmp_path / "runs" / "job").mkdir(parents=True)
    for steps in (STEPS, [{"step": 2.0, "reward": 1.0}]):
        tracking = Tracking(config, run_dir)
        track(tracking, steps)
        tracking.close()
    assert tracked_rewards(name, run_dir) == [{0: 0.5, 1: 0.75, 2: 1.0}]


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_failing_tracker_package_gives_one_warning(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    config = loading.load(job, (f"tracking.tracker={name}", "tracking.tensorboard=false"))

    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr("staleflow.tasks.settings.source_kinds.importlib.util.find_spec", lambda named: named)
    monkeypatch.setattr("staleflow.pipeline.jobs.tracking.TRACKERS_BY_PACKAGE", {name: refuse})
    with caplog.at_level(logging.WARNING):
        tracking = Tracking(config, tmp_path)
        track(tracking, STEPS)
        tracking.close()
    assert caplog.messages == [
        f"tracking.tracker = {name!r}: cannot be reached, the run continues without it: ConnectionError('no network')"
    ]


def test_a_tracker_package_that_is_not_installed_gives_a_one_line_error(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda named: None)
    config = loading.load(job, ("tracking.tracker=trackio",))
    with pytest.raises(ConfigError, match=r"the package is not installed; pip install 'staleflow\[trackio\]'"):
        user_files.check_strategies(config)
