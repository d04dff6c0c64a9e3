"""Trackers: every step is tracked once, TensorBoard files are readable, and a user tracker cannot fail a run."""

from __future__ import annotations

import asyncio
import logging
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from staleflow.pipeline.config import loading, user_files
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.config.user_files import collect_code
from staleflow.pipeline.jobs import tracking
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


async def track(config: RunConfig, run_dir: Path, steps: Sequence[dict[str, float]] = ()) -> None:
    async with tracking.track(config, run_dir) as listener:
        for step in steps:
            listener.on_step_stored(step, "")


async def test_a_scalar_has_a_description_and_its_unit(job: Path, tmp_path: Path) -> None:
    await track(loading.load(job), tmp_path, [{"step": 0.0, "staleness_max": 1.0, "of_mine": 2.0}])
    messages = {value.tag: value.metadata.summary_description for _, value in values(tmp_path / "tensorboard")}
    assert messages == {"staleness_max": "largest step - v_traj of the batch; at most eta, versions", "of_mine": ""}


async def test_a_failing_tracker_is_not_called_again(
    job: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    config = loading.load(job, (f"tracking.tracker={tmp_path}/mine.py:Mine",))
    with caplog.at_level(logging.WARNING):
        await track(config, tmp_path, [*STEPS, {"step": 2.0, "reward": 1.0}, {"step": 3.0, "reward": 1.0}])
    assert (tmp_path / "mine.txt").read_text() == "job 0:0.5 1:0.75 closed"
    assert caplog.messages == ["tracker Mine failed and is not called again: RuntimeError('no network')"]
    assert caplog.records[0].thread == threading.get_ident()  # whose messages a run's handle shows
    assert scalars(tmp_path / "tensorboard") == [(i, "reward", r) for i, r in enumerate((0.5, 0.75, 1.0, 1.0))]


@pytest.mark.parametrize(
    ("error", "expected"),
    [(None, "0 closed"), (OSError("disk"), "0 failed"), (asyncio.CancelledError(), "0 closed")],
)
async def test_a_tracker_is_told_whether_its_run_failed(
    job: Path, tmp_path: Path, error: BaseException | None, expected: str
) -> None:
    code = MINE + "\n    def fail(self):\n        self.lines.write(' failed')\n"
    (tmp_path / "mine.py").write_text(code + "        self.lines.close()\n")
    config = loading.load(job, (f"tracking.tracker={tmp_path}/mine.py:Mine",))

    async def run() -> None:
        async with tracking.track(config, tmp_path) as listener:
            listener.on_step_stored({"step": 0.0, "reward": 0}, "")
            if error is not None:
                raise error

    (result,) = await asyncio.gather(asyncio.ensure_future(run()), return_exceptions=True)
    assert type(result) is type(error)
    assert (tmp_path / "mine.txt").read_text() == f"job 0:{expected}"


async def test_a_slow_tracker_delays_no_step(job: Path, tmp_path: Path) -> None:
    lines = [
        "import pathlib, time",
        "class Slow:",
        "    def __init__(self, run_dir, job):",
        "        self.folder = pathlib.Path(run_dir)",
        "    def step(self, step, metrics):",
        "        while not (self.folder / 'go').exists():",
        "            time.sleep(0.01)",
        "        raise SystemExit('no more steps')",
        "    def close(self):",
        "        (self.folder / 'closed').touch()",
    ]
    (tmp_path / "slow.py").write_text("\n".join(lines))
    async with tracking.track(loading.load(job, (f"tracking.tracker={tmp_path}/slow.py:Slow",)), tmp_path) as listener:
        listener.on_step_stored(STEPS[0], "")
        assert not (tmp_path / "closed").exists()
        (tmp_path / "go").touch()
    assert (tmp_path / "closed").exists()


async def test_a_run_does_not_wait_for_a_tracker_without_limit(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    can_end = threading.Event()

    class Outage:
        def __init__(self, run_dir: str, job: Any) -> None:
            can_end.wait()

    monkeypatch.setattr(tracking, "TRACKERS_BY_NAME", {"mlflow": Outage})
    monkeypatch.setattr(tracking, "CLOSE_LIMIT_S", 0.05)
    config = loading.load(job, ("tracking.tracker=mlflow", "tracking.tensorboard=false"))
    try:
        await track(config, tmp_path, STEPS)
    finally:
        can_end.set()
    assert caplog.messages == ["trackers have not stored the last steps within 0.05 s; the run ends"]


async def test_a_missing_tracker_gives_a_one_line_error_and_an_existing_one_is_packed(
    job: Path, tmp_path: Path
) -> None:
    for named, message in (("none.py:T", "cannot be loaded: none.py: no such file"), ("T", "expected file.py:NAME")):
        with pytest.raises(ConfigError, match=message):
            await track(loading.load(job, (f"tracking.tracker={named}",)), tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    config, code = collect_code(loading.load(job, (f"tracking.tracker={tmp_path}/mine.py:Mine",)))
    assert config.tracking.tracker == "tracking_mine.py:Mine"
    assert code == {"tracking_mine.py": MINE}


async def test_a_tracker_that_cannot_be_constructed_gives_a_one_line_error(job: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    def __init__(self, run_dir, job):\n        raise OSError('no\\nnet')\n"
    )
    config = loading.load(job, (f"tracking.tracker={tmp_path}/mine.py:Mine", "tracking.tensorboard=false"))
    with pytest.raises(ConfigError, match=r"Mine': cannot be constructed: OSError: no net$"):
        await track(config, tmp_path)
    (tmp_path / "made.py").write_text("def tracker(run_dir, job):\n    return {}\n")
    with pytest.raises(ConfigError, match=r"made.py:tracker': has no method step and no close"):
        await track(loading.load(job, (f"tracking.tracker={tmp_path}/made.py:tracker",)), tmp_path)
    missing = loading.load(job, (f"tracking.tracker={tmp_path}/mine.py:Other",))
    with pytest.raises(ConfigError, match="has no function Other"):
        user_files.check_user_code(missing)


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
    """Return the runs in a package's folder as rewards by step, the latest one of each step."""
    if name == "mlflow":
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=f"sqlite:///{folder.parent / 'mlflow.db'}")
        experiment = client.get_experiment_by_name("staleflow")
        runs = client.search_runs([experiment.experiment_id])
        assert [(r.data.params["batch.group_size"], r.data.params["steps"]) for r in runs] == [("4", "3")]
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
                found[int(values["step"])] = float(values["reward"])
            whole |= record.WhichOneof("record_type") == "exit"
        at += 7 + size
    return found, whole


@pytest.mark.filterwarnings("ignore")  # of the packages
@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
async def test_a_package_tracks_each_step_and_a_resumed_run_continues_there(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    use_offline(name, tmp_path, monkeypatch)
    (run_dir := tmp_path / "runs" / "job").mkdir(parents=True)
    for num_steps, steps in (3, STEPS), (9, [{"step": 1.0, "reward": 0.8}, {"step": 2.0, "reward": 1.0}]):
        changes = (f"tracking.tracker={name}", "tracking.tensorboard=false", f"steps={num_steps}")
        await track(loading.load(job, changes), run_dir, steps)
    assert tracked_rewards(name, run_dir) == [{0: 0.5, 1: 0.8, 2: 1.0}]
    assert capfd.readouterr() == ("", "")  # printed lines would disturb the live display and --json


async def test_two_runs_of_a_process_are_two_runs_of_wandb(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_offline("wandb", tmp_path, monkeypatch)
    config = loading.load(job, ("tracking.tracker=wandb", "tracking.tensorboard=false"))
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    async with tracking.track(config, folders[0]) as first:
        await asyncio.wrap_future(first.constructed)
        async with tracking.track(config, folders[1]) as second:
            first.on_step_stored({"step": 0.0, "reward": 0.25}, "")
            second.on_step_stored({"step": 0.0, "reward": 0.75}, "")
    assert [tracked_rewards("wandb", folder) for folder in folders] == [[{0: 0.25}], [{0: 0.75}]]


@pytest.mark.filterwarnings("ignore")  # of the package
async def test_a_failed_run_is_a_failed_run_of_mlflow(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_offline("mlflow", tmp_path, monkeypatch)
    (run_dir := tmp_path / "runs" / "job").mkdir(parents=True)
    config = loading.load(job, ("tracking.tracker=mlflow", "tracking.tensorboard=false"))
    with pytest.raises(OSError, match="disk"):
        async with tracking.track(config, run_dir):
            raise OSError("disk")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run_dir.parent / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("staleflow").experiment_id])
    assert run.info.status == "FAILED"


@pytest.mark.parametrize("host", ["api.wandb.ai", "wandb.example.com"])
def test_wandb_is_online_if_its_server_has_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    (tmp_path / ".netrc").write_text("machine wandb.example.com login user password key\n")
    (tmp_path / ".netrc").chmod(0o600)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", f"https://{host}:8080/")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert tracking._has_wandb_account() == (host == "wandb.example.com")


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
async def test_a_failing_tracker_package_gives_one_warning(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    tracker = "" if name == "tensorboard" else name
    config = loading.load(job, (f"tracking.tracker={tracker}", f"tracking.tensorboard={str(not tracker).lower()}"))

    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(tracking, "TRACKERS_BY_NAME", {name: refuse})
    with caplog.at_level(logging.WARNING):
        await track(config, tmp_path, STEPS)
    assert caplog.messages == [
        f"tracker {name} cannot be reached, the run continues without it: ConnectionError: no network"
    ]


def test_a_tracker_package_that_is_not_installed_gives_a_one_line_error(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda named: None)
    config = loading.load(job, ("tracking.tracker=trackio",))
    with pytest.raises(ConfigError, match=r"the package is not installed; pip install 'staleflow\[trackio\]'"):
        user_files.check_user_code(config)
