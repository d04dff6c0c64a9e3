"""Trackers, which write a run's metrics elsewhere than its store: TensorBoard event files, or a user's own class.

A tracker is a class, named in the job file (`tracking.tracker = "mine.py:Tracker"`), with three methods:

    class Tracker:
        def __init__(self, run_dir: str, job: dict): ...      # job: the resolved job file
        def step(self, step: int, metrics: dict[str, float]): ...
        def close(self): ...

They are called in the driver's event loop, so a slow tracker slows the run. One that raises is logged and not called
again; the run continues.
"""

from __future__ import annotations

import contextlib
import logging
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pipeline.config import fields
from pipeline.config.schema import RunConfig
from stores.errors import ConfigError
from stores.metrics import REWARD_PART, STEP
from tasks import user_code

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """See the module's docstring."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run's folder: `tensorboard --logdir runs`."""

    def __init__(self, run_dir: str, job: Mapping[str, Any]) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(f"{run_dir}/tensorboard")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            about = STEP[name].help if name in STEP else ""
            if name.startswith(REWARD_PART):
                about = f"mean of part {name.removeprefix(REWARD_PART)} of the reward"
            self._writer.add_scalar(name, value, step, summary_description=about)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Tracking:
    """The trackers of one run; each receives every step once. first: steps before it are already tracked."""

    def __init__(self, config: RunConfig, run_dir: Path, first: int = 0) -> None:
        job = tomllib.loads(fields.to_toml(config))
        self._trackers: list[Tracker] = [TensorBoard(str(run_dir), job)] if config.tracking.tensorboard else []
        if named := config.tracking.tracker:
            make = user_code.load(named, "tracking.tracker")
            try:
                self._trackers.append(make(str(run_dir), job))
            except (Exception, SystemExit) as error:  # user code
                said = f"{type(error).__name__}: {user_code.said(error)}"
                raise ConfigError(f"tracking.tracker = {named!r}: cannot be constructed: {said}") from error
        self._next = first

    def steps(self, steps: Sequence[Mapping[str, float]]) -> None:
        """Track those of the run's steps so far that are not tracked yet."""
        for metrics in steps[self._next :]:
            self._next += 1
            values = {name: value for name, value in metrics.items() if name != "step"}
            self._each("step", int(metrics["step"]), values)

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
                logger.warning("%s failed and is not called again: %r", type(tracker).__name__, error)
