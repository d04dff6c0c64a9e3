"""Trackers, which send a run's metrics to TensorBoard event files, Weights & Biases, MLflow, Trackio, or a user's own
class.

`tracking.tracker = "wandb"`, "mlflow" or "trackio" writes through that package. Project or experiment is called
staleflow unless the package's own environment variable names another. Without an account, wandb writes into the run's
folder, for `wandb sync`; without MLFLOW_TRACKING_URI, mlflow writes mlflow.db beside the runs. A resumed run goes on in
the run it began with there.

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
from staleflow.pipeline.runtime.run_listener import RunListener
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
START_S = 30.0
"""Seconds that a tracker's service may take to answer at the start."""
MLFLOW_BATCH, MLFLOW_LONGEST = 100, 500
"""MLflow's limits: parameters in one call, and characters of one."""


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
            about = STEP_METRICS[name].help if name in STEP_METRICS else ""
            if name.startswith(EVALUATION_PREFIX):
                about = EVALUATION_METRICS[name.rpartition("/")[2]].help
            if name.startswith(REWARD_PART_PREFIX):
                about = f"mean of part {name.removeprefix(REWARD_PART_PREFIX)} of the reward"
            if name.startswith(SOURCE_PREFIX):
                about = SOURCE_METRICS[name.rpartition("/")[2]]
            self._writer.add_scalar(name, value, step, summary_description=about)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases; offline if nobody is logged in."""

    def __init__(self, run_dir: str, job: Mapping[str, Any]) -> None:
        import wandb

        self._latest = 0
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if _logged_in() else "offline")
        with _quiet():
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT), name=job["name"], id=own_id(run_dir, "wandb"),
                resume="allow", dir=run_dir, config=dict(job), mode=mode,
                settings=wandb.Settings(silent=True, init_timeout=START_S),
            )  # fmt: skip

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._latest = max(self._latest, step)  # an evaluation ends some steps after its version; earlier is not taken
        self._run.log(dict(metrics), step=self._latest)

    def close(self) -> None:
        with _quiet():
            self._run.finish()


class Mlflow:
    """A run of MLflow's tracking server, or of a database beside the runs."""

    def __init__(self, run_dir: str, job: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        database = f"sqlite:///{Path(run_dir).resolve().parent / 'mlflow.db'}"
        with _quiet():
            self._client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI", database))
            self._id = self._resumed_or_new(run_dir, job["name"])
            parameters = [Param(key, str(value)[:MLFLOW_LONGEST]) for key, value in _flat(job)]
            for first in range(0, len(parameters), MLFLOW_BATCH):
                self._client.log_batch(self._id, params=parameters[first : first + MLFLOW_BATCH])

    def _resumed_or_new(self, run_dir: str, name: str) -> str:
        client, mlflow_id = self._client, own_id(run_dir, "mlflow")
        called = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = client.get_experiment_by_name(called)
        where = client.create_experiment(called) if experiment is None else experiment.experiment_id
        if runs := client.search_runs([where], f"tags.`staleflow.run` = '{mlflow_id}'"):
            run_id = str(runs[0].info.run_id)
            client.update_run(run_id, status="RUNNING")
            return run_id
        return str(client.create_run(where, run_name=name, tags={"staleflow.run": mlflow_id}).info.run_id)

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
        name = f"{job['name']}-{own_id(run_dir, 'trackio')}"
        with _quiet():
            self._run = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", PROJECT), name=name, resume="allow", config=dict(job),
                embed=False, auto_log_gpu=False, auto_log_cpu=False,
            )  # fmt: skip

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        with _quiet():
            self._package.finish()  # it knows of it too, and would end it again at exit


PACKAGES: dict[str, Callable[[str, Mapping[str, Any]], Tracker]] = {
    "wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio,
}  # fmt: skip
"""Trackers by the name of their package."""


def own_id(run_dir: str, tracker: str) -> str:
    """Id of a run at a tracker, generated once and kept in the run folder. Raises StoreError."""
    file = Path(run_dir) / f"{tracker}.id"
    if not file.is_file():
        replace_text(file, f"{uuid.uuid4().hex[:12]}\n", "free space or move runs_dir")
    return file.read_text().strip()


def _logged_in() -> bool:
    """Whether wandb would find an account; if not it would ask for one."""
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        if netrc.netrc().authenticators("api.wandb.ai"):
            return True
    return bool(os.environ.get("WANDB_API_KEY"))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Discard what a package prints meanwhile: it would be written across the live view."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


def _flat(job: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables, by key with dots."""
    for name, value in job.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


class Tracking(RunListener):
    """The trackers of one run. Each receives every step once. first: number of steps that are tracked already.
    evaluations: number of evaluations that are."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        job = tomllib.loads(knob_tree.to_toml(config))
        self._trackers: list[Tracker] = [TensorBoard(str(run_dir), job)] if config.tracking.tensorboard else []
        tracker = config.tracking.tracker
        if tracker in PACKAGES:
            user_files.check_tracker(tracker)
            try:
                self._trackers.append(PACKAGES[tracker](str(run_dir), job))
            except Exception as error:  # noqa: BLE001  a service's
                logger.error("tracking.tracker = %r: cannot be reached, the run goes on without it: %r", tracker, error)
        elif tracker:
            make = user_code.load(tracker, "tracking.tracker")
            try:
                self._trackers.append(make(str(run_dir), job))
            except (Exception, SystemExit) as error:  # user code
                reason = f"{type(error).__name__}: {user_code.error_text(error)}"
                raise ConfigError(f"tracking.tracker = {tracker!r}: cannot be constructed: {reason}") from error
            user_files.require_tracker(self._trackers[-1], tracker)

    def step_stored(self, step: Mapping[str, float], limit: str) -> None:
        self._each("step", int(step["step"]), {name: value for name, value in step.items() if name != "step"})

    def evaluated(self, evaluation: Evaluation) -> None:
        """Track an evaluation at its version."""
        values = {
            f"{EVALUATION_PREFIX}{evaluation.name}/{name}": getattr(evaluation, name) for name in EVALUATION_METRICS
        }
        self._each("step", evaluation.version, {name: float(v) for name, v in values.items() if v is not None})

    def close(self) -> None:
        self._each("close")

    def _each(self, method: str, *arguments: Any) -> None:
        for tracker in tuple(self._trackers):
            try:
                getattr(tracker, method)(*arguments)
            except Exception as error:  # noqa: BLE001  a user's code
                self._trackers.remove(tracker)
                if method != "close":
                    with contextlib.suppress(Exception):
                        tracker.close()
                logger.error("tracker %s failed and is not called again: %r", type(tracker).__name__, error)
