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

If the run fails, `fail` is called in place of `close`, where the class has it. `step` is also called at the version of
each evaluation, with its metrics alone, such as `evaluation/held-out/sampled`. Steps that a resumed run trains again
are sent again.

A run's trackers have a thread of their own, so a slow one, or an outage of its service, does not delay the steps. If a
user's tracker cannot be constructed, the run does not begin. Any other tracker that raises is logged and not called
again; the run continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import netrc
import os
import queue
import sys
import threading
import time
import tomllib
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from staleflow.pipeline.config import knob_tree, user_files
from staleflow.pipeline.config.schema import TRACKERS, RunConfig
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
CLOSE_LIMIT_S = 60.0
"""Most seconds that a run waits at its end until its trackers have sent all steps."""
MLFLOW_BATCH_SIZE = 100
"""MLflow's limit of parameters per call."""
MLFLOW_MAX_LENGTH = 500
"""Characters kept of a parameter: the limit of older MLflow servers; newer ones allow 6000."""


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
    """A run of Weights & Biases; offline if nobody is logged in. Its x axis is the metric `step`, since wandb's own
    step cannot go back: an evaluation ends some steps after its version, and a resumed run repeats steps."""

    def __init__(self, run_dir: str, job: Mapping[str, Any]) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or ("online" if _has_wandb_account() else "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=job["name"],
            id=read_or_create_run_id(run_dir, "wandb"), resume="allow", dir=run_dir, config=dict(job), mode=mode,
            reinit="create_new", settings=wandb.Settings(silent=True),
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        self._run.finish()

    def fail(self) -> None:
        self._run.finish(exit_code=1)


class Mlflow:
    """A run of MLflow's tracking server, or of a database beside the runs. Its parameters are those of the run's first
    start, since MLflow does not let them change."""

    def __init__(self, run_dir: str, job: Mapping[str, Any]) -> None:
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow.store.db").setLevel(logging.WARNING)  # each table of a new database is a line
        self._metric = Metric
        database = f"sqlite:///{Path(run_dir).resolve().parent / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI", database))
        run = self._resume_or_create(run_dir, job["name"])
        self._id = str(run.info.run_id)
        parameters = [
            Param(key, str(value)[:MLFLOW_MAX_LENGTH]) for key, value in _flatten(job) if key not in run.data.params
        ]
        for first in range(0, len(parameters), MLFLOW_BATCH_SIZE):
            self._client.log_batch(self._id, params=parameters[first : first + MLFLOW_BATCH_SIZE])

    def _resume_or_create(self, run_dir: str, name: str) -> Any:
        client, tag = self._client, read_or_create_run_id(run_dir, "mlflow")
        experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = client.get_experiment_by_name(experiment_name)
        experiment_id = client.create_experiment(experiment_name) if experiment is None else experiment.experiment_id
        if runs := client.search_runs([experiment_id], f"tags.`staleflow.run` = '{tag}'"):
            client.update_run(runs[0].info.run_id, status="RUNNING")
            return runs[0]
        return client.create_run(experiment_id, run_name=name, tags={"staleflow.run": tag})

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        values = [self._metric(name, value, now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values)

    def close(self) -> None:
        self._client.set_terminated(self._id)

    def fail(self) -> None:
        self._client.set_terminated(self._id, "FAILED")


class Trackio:
    """A run of Trackio, in its own folder or space."""

    def __init__(self, run_dir: str, job: Mapping[str, Any]) -> None:
        import trackio

        for name, module in tuple(sys.modules.items()):
            if name.partition(".")[0] == "trackio":  # its lines would disturb the live display and --json
                vars(module)["print"] = lambda *_, **__: None
        self._package = trackio
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{job['name']}-{read_or_create_run_id(run_dir, 'trackio')}", resume="allow", config=dict(job),
            embed=False, auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._package.finish()  # ends the run in the package too, which would end it again at exit


TRACKERS_BY_NAME: dict[str, Callable[[str, Mapping[str, Any]], Tracker]] = dict(
    zip(("tensorboard", *TRACKERS), (TensorBoard, Wandb, Mlflow, Trackio), strict=True)
)


def read_or_create_run_id(run_dir: str, tracker: str) -> str:
    """Id of a run at a tracker, generated once and kept in the run folder. Raises StoreError."""
    file = Path(run_dir) / f"{tracker}.id"
    if not file.is_file():
        replace_text(file, f"{uuid.uuid4().hex[:12]}\n", "free space or move runs_dir")
    return file.read_text("utf-8").strip()


def _has_wandb_account() -> bool:
    """Whether wandb has credentials, so that it does not prompt for them."""
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        if netrc.netrc().authenticators(host):
            return True
    return bool(os.environ.get("WANDB_API_KEY"))


def _flatten(job: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables, by key with dots."""
    for name, value in job.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


class Tracking(RunListener):
    """Passes a run's steps and evaluations to its trackers, in a thread of their own; see `track`."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        self._config = config
        self._run_dir = str(run_dir)
        self._trackers: list[Tracker] = []
        self._calls: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        """Methods of the trackers to call, with their arguments."""
        self._is_abandoned = False
        self._loop = asyncio.get_running_loop()
        self.constructed: Future[None] = Future()
        """Ends when the trackers are constructed, or a user's tracker cannot be."""
        self._thread = threading.Thread(target=self._run, name="trackers", daemon=True)
        self._thread.start()

    def on_step_stored(self, step: Mapping[str, float], bottleneck: str) -> None:
        self._calls.put(("step", int(step["step"]), {name: value for name, value in step.items() if name != "step"}))

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Track an evaluation at its version."""
        values = {
            f"{EVALUATION_PREFIX}{evaluation.name}/{name}": getattr(evaluation, name) for name in EVALUATION_METRICS
        }
        self._calls.put(("step", evaluation.version, {k: float(v) for k, v in values.items() if v is not None}))

    async def end(self, method: str) -> None:
        """Call the trackers' last method, close or fail, and wait up to CLOSE_LIMIT_S until all calls are done."""
        self._calls.put((method,))
        await asyncio.to_thread(self._thread.join, CLOSE_LIMIT_S)
        if self._thread.is_alive():
            self._is_abandoned = True
            logger.error("trackers have not stored the last steps within %g s; the run ends", CLOSE_LIMIT_S)

    def _run(self) -> None:
        """Construct the trackers and call them until their last method."""
        try:
            self._construct()
            self.constructed.set_result(None)
        except Exception as error:  # noqa: BLE001  raised in the driver's thread
            self.constructed.set_exception(error)
        method = ""
        while method not in ("close", "fail"):
            method, *arguments = self._calls.get()
            for tracker in tuple(self._trackers):
                if self._is_abandoned:  # the run may have been resumed
                    return
                try:
                    getattr(tracker, method, tracker.close)(*arguments)
                except (Exception, SystemExit) as error:  # noqa: BLE001  user code
                    self._trackers.remove(tracker)
                    if method == "step":
                        with contextlib.suppress(Exception, SystemExit):
                            tracker.close()
                    self._log_error("tracker %s failed and is not called again: %r", type(tracker).__name__, error)

    def _construct(self) -> None:
        """Construct the trackers. Raises ConfigError if a user's tracker cannot be."""
        tracking, job = self._config.tracking, tomllib.loads(knob_tree.to_toml(self._config))
        for name in ["tensorboard"] * tracking.tensorboard + [tracking.tracker] * bool(tracking.tracker):
            tracker_class = TRACKERS_BY_NAME.get(name) or user_code.load(name, "tracking.tracker")
            try:
                tracker = tracker_class(self._run_dir, job)
            except (Exception, SystemExit) as error:  # of a tracking service, or user code
                reason = f"{type(error).__name__}: {user_code.error_text(error)}"
                if name not in TRACKERS_BY_NAME:
                    raise ConfigError(f"tracking.tracker = {name!r}: cannot be constructed: {reason}") from error
                self._log_error("tracker %s cannot be reached, the run continues without it: %s", name, reason)
                continue
            user_files.require_tracker_methods(tracker, name)
            self._trackers.append(tracker)

    def _log_error(self, *message: object) -> None:
        """Log in the driver's thread, whose messages its listeners show."""
        with contextlib.suppress(RuntimeError):  # the run has ended
            self._loop.call_soon_threadsafe(lambda: logger.error(*message))


@contextlib.asynccontextmanager
async def track(config: RunConfig, run_dir: Path) -> AsyncIterator[Tracking]:
    """Context manager: yields the listener that tracks a run. Raises ConfigError if a user's tracker cannot be
    constructed."""
    tracking, last_method = Tracking(config, run_dir), "close"
    try:
        if config.tracking.tracker not in TRACKERS:  # their services may not answer for minutes
            await asyncio.shield(asyncio.wrap_future(tracking.constructed))
        yield tracking
    except Exception:
        last_method = "fail"
        raise
    finally:
        await tracking.end(last_method)
