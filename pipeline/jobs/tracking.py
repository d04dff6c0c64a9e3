"""Trackers, which send a run's metrics to TensorBoard event files, Weights & Biases, MLflow, Trackio, or a user's own
class.

`tracking.tracker = "wandb"`, "mlflow" or "trackio" writes through that package. Project or experiment is called
staleflow unless the package's own environment variable names another. Without an account, wandb writes into the run's
folder, for `wandb sync`; without MLFLOW_TRACKING_URI, mlflow writes mlflow.db beside the runs. A resumed run continues
its earlier run there.

A user's tracker is a class, named in the job file (`tracking.tracker = "mine.py:Tracker"`), with three methods:

    class Tracker:
        def __init__(self, run_dir: str, job: dict): ...      # job: the resolved job file
        def step(self, step: int, metrics: dict[str, float]): ...
        def close(self): ...

`step` is also called at the version of each evaluation, with its metrics alone, such as `evaluation/held-out/sampled`.
Trackers are called in the driver's event loop, so a slow one slows the run. One that raises is logged and not called
again; the run continues.
"""

from __future__ import annotations

import contextlib
import logging
import netrc
import os
import time
import tomllib
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from staleflow.pipeline.config import knob_tree, user_files
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.runtime.evaluation_results import Evaluation
from staleflow.pipeline.runtime.run_report import RunListener
from staleflow.stores.errors import ConfigError
from staleflow.stores.files import replace_text
from staleflow.stores.metrics import (
    EVALUATION_METRICS,
    EVALUATION_PREFIX,
    REWARD_PART_PREFIX,
    SOURCE_METRICS,
    SOURCE_PREFIX,
    STEP_METRICS,
)
from staleflow.tasks.settings import user_code

logger = logging.getLogger(__name__)

PROJECT = "staleflow"
"""Project or experiment that runs are tracked in unless the package's environment variable names another."""
CONNECT_TIMEOUT_S = 30.0
"""Seconds that a tracker's service may take to answer at the start."""
MLFLOW_BATCH_SIZE, MLFLOW_MAX_LENGTH = 100, 500
"""MLflow's limits: parameters per call, and characters per parameter."""


class Tracker(Protocol):
    """Interface of trackers; see the module."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """TensorBoard event files in the run folder: `tensorboard --logdir runs`."""

    def __init__(self, run_dir: str, job: Mapping[str, Any]) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(f"{run_dir}/tensorboard")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            description = STEP_METRICS[name].help if name in STEP_METRICS else ""
            if name.startswith(EVALUATION_PREFIX):
                description = EVALUATION_METRICS[name.rpartition("/")[2]].help
            if name.startswith(REWARD_PART_PREFIX):
                description = f"mean of part {name.removeprefix(REWARD_PART_PREFIX)} of the reward"
            if name.startswith(SOURCE_PREFIX):
                description = SOURCE_METRICS[name.rpartition("/")[2]].help
            self._writer.add_scalar(name, value, step, summary_description=description)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases; offline if nobody is logged in."""

    def __init__(self, run_dir: str, job: Mapping[str, Any]) -> None:
        import wandb

        self._latest_step = 0
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if _has_wandb_account() else "offline")
        with _suppress_output():
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT), name=job["name"], id=get_tracker_id(run_dir, "wandb"),
                resume="allow", dir=run_dir, config=dict(job), mode=mode,
                settings=wandb.Settings(silent=True, init_timeout=CONNECT_TIMEOUT_S),
            )  # fmt: skip

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._latest_step = max(
            self._latest_step, step
        )  # wandb rejects earlier steps, and an evaluation ends some steps after its version
        self._run.log(dict(metrics), step=self._latest_step)

    def close(self) -> None:
        with _suppress_output():
            self._run.finish()


class Mlflow:
    """A run of MLflow's tracking server, or of a database beside the runs."""

    def __init__(self, run_dir: str, job: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        database = f"sqlite:///{Path(run_dir).resolve().parent / 'mlflow.db'}"
        with _suppress_output():
            self._client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI", database))
            self._id = self._resume_or_create(run_dir, job["name"])
            parameters = [Param(key, str(value)[:MLFLOW_MAX_LENGTH]) for key, value in _flatten(job)]
            for first in range(0, len(parameters), MLFLOW_BATCH_SIZE):
                self._client.log_batch(self._id, params=parameters[first : first + MLFLOW_BATCH_SIZE])

    def _resume_or_create(self, run_dir: str, name: str) -> str:
        client, mlflow_id = self._client, get_tracker_id(run_dir, "mlflow")
        experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = client.get_experiment_by_name(experiment_name)
        experiment_id = client.create_experiment(experiment_name) if experiment is None else experiment.experiment_id
        if runs := client.search_runs([experiment_id], f"tags.`staleflow.run` = '{mlflow_id}'"):
            run_id = str(runs[0].info.run_id)
            client.update_run(run_id, status="RUNNING")
            return run_id
        return str(client.create_run(experiment_id, run_name=name, tags={"staleflow.run": mlflow_id}).info.run_id)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        values = [self._metric(name, value, now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class Trackio:
    """A run of Trackio, in its own folder or space."""

    def __init__(self, run_dir: str, job: Mapping[str, Any]) -> None:
        import trackio

        self._package = trackio
        name = f"{job['name']}-{get_tracker_id(run_dir, 'trackio')}"
        with _suppress_output():
            self._run = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", PROJECT), name=name, resume="allow", config=dict(job),
                embed=False, auto_log_gpu=False, auto_log_cpu=False,
            )  # fmt: skip

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        with _suppress_output():
            self._package.finish()  # ends the run in the package too, which would end it again at exit


TRACKERS_BY_PACKAGE: dict[str, Callable[[str, Mapping[str, Any]], Tracker]] = {
    "wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio,
}  # fmt: skip
"""Trackers by the name of their package."""


def get_tracker_id(run_dir: str, tracker: str) -> str:
    """Id of a run at a tracker, generated once and kept in the run folder. Raises StoreError."""
    file = Path(run_dir) / f"{tracker}.id"
    if not file.is_file():
        replace_text(file, f"{uuid.uuid4().hex[:12]}\n", "free space or move runs_dir")
    return file.read_text("utf-8").strip()


def _has_wandb_account() -> bool:
    """Whether wandb has credentials, so that it does not prompt for them."""
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        if netrc.netrc().authenticators("api.wandb.ai"):
            return True
    return bool(os.environ.get("WANDB_API_KEY"))


@contextlib.contextmanager
def _suppress_output() -> Iterator[None]:
    """Context manager: discards printed output, which would disturb the live display."""
    with (
        open(os.devnull, "w", encoding="utf-8") as null_file,
        contextlib.redirect_stdout(null_file),
        contextlib.redirect_stderr(null_file),
    ):
        yield


def _flatten(job: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables, by key with dots."""
    for name, value in job.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


class Tracking(RunListener):
    """The trackers of one run. Each receives every step once."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        job = tomllib.loads(knob_tree.to_toml(config))
        self._trackers: list[Tracker] = [TensorBoard(str(run_dir), job)] if config.tracking.tensorboard else []
        tracker = config.tracking.tracker
        if tracker in TRACKERS_BY_PACKAGE:
            user_files.check_tracker(tracker)
            try:
                self._trackers.append(TRACKERS_BY_PACKAGE[tracker](str(run_dir), job))
            except Exception as error:  # noqa: BLE001  of a tracking service
                logger.error(
                    "tracking.tracker = %r: cannot be reached, the run continues without it: %r", tracker, error
                )
        elif tracker:
            tracker_class = user_code.load(tracker, "tracking.tracker")
            try:
                self._trackers.append(tracker_class(str(run_dir), job))
            except (Exception, SystemExit) as error:  # user code
                reason = f"{type(error).__name__}: {user_code.error_text(error)}"
                raise ConfigError(f"tracking.tracker = {tracker!r}: cannot be constructed: {reason}") from error
            user_files.require_tracker_methods(self._trackers[-1], tracker)

    def on_step_stored(self, step: Mapping[str, float], bottleneck: str) -> None:
        self._call_trackers("step", int(step["step"]), {name: value for name, value in step.items() if name != "step"})

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Track an evaluation at its version."""
        values = {
            f"{EVALUATION_PREFIX}{evaluation.name}/{name}": getattr(evaluation, name) for name in EVALUATION_METRICS
        }
        self._call_trackers("step", evaluation.version, {name: float(v) for name, v in values.items() if v is not None})

    def close(self) -> None:
        self._call_trackers("close")

    def _call_trackers(self, method: str, *arguments: Any) -> None:
        for tracker in tuple(self._trackers):
            try:
                getattr(tracker, method)(*arguments)
            except Exception as error:  # noqa: BLE001  a user's code
                self._trackers.remove(tracker)
                if method != "close":
                    with contextlib.suppress(Exception):
                        tracker.close()
                logger.error("tracker %s failed and is not called again: %r", type(tracker).__name__, error)
