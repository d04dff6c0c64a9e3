"""Records what is not in a run's store of each of its starts: losses, commands, seconds. The first start, each `resume`
and each restart of the driver after a loss are starts. The run's summary covers all of them.

starts.json in the run's folder holds one entry per start, oldest first. It is written at each training step and each
loss, so the entry of a killed driver is complete up to its last step.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from staleflow.pipeline.coordination.snapshot import Snapshot
from staleflow.pipeline.recovery.run_folder import CODEC, STARTS_FILE, read_json_file
from staleflow.pipeline.runtime.run_report import RunListener, RunReport
from staleflow.stores.errors import StoreError
from staleflow.stores.files import replacing

PHASES_PER_START = (
    "decide_s",
    "driver_cpu_s",
    "rollout_busy_s",
    "rollout_assigned_s",
    "rollout_idle_with_work_s",
    "tokens_sampled",
)
"""Phases that a driver measures since its own start. It measures the others over the whole run."""


@dataclass(slots=True)
class Start:
    """One start of a run. version: the version it began with. end: how it ended; empty while it runs, and if its driver
    was killed."""

    version: int
    end: str = ""
    losses: list[str] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)
    commands: dict[str, int] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    """Those of `PHASES_PER_START`, and wall_s: its own seconds; empty before its
    first step, unless it has ended after its actors were placed."""


class StartRecorder(RunListener):
    """Records the current start of a run in starts.json. Raises StoreError. version: the version it begins with.
    elapsed_s: seconds of the run before."""

    def __init__(self, run_dir: Path, version: int, elapsed_s: float) -> None:
        self._path = run_dir / STARTS_FILE
        self._earlier_starts = read_start_records(run_dir)
        self._start = Start(version)
        self._elapsed_s = elapsed_s
        self._written_counts = (0, 0)
        self._report = RunReport()
        self._write()

    def on_status(self, snapshot: Snapshot | None, report: RunReport) -> None:
        """Write the record of this start, if a step was trained or an actor lost since the last write."""
        self._report = report
        self._start.losses, self._start.alarms = list(report.lost_actors), list(report.alarms)
        self._start.commands = dict(report.command_counts)
        if report.seconds_by_activity:
            phases = {name: report.seconds_by_activity.get(name, 0.0) for name in PHASES_PER_START}
            self._start.phases = phases | {"wall_s": report.seconds_by_activity.get("wall_s", 0.0) - self._elapsed_s}
        counts = len(report.steps), len(report.lost_actors)
        if counts != self._written_counts:
            self._written_counts = counts
            self._write()

    @contextlib.contextmanager
    def record_end(self) -> Iterator[None]:
        """Context manager: writes how this start ended, with the report of the latest status."""
        ending = "stopped at once"
        try:
            yield
            ending = f"stopped: {self._report.stop_reason}" if self._report.stop_reason else "done"
        except Exception as error:
            ending = f"failed: {error}"
            raise
        finally:
            self._start.end, self._written_counts = ending, (-1, -1)
            with contextlib.suppress(StoreError):  # how the run ended is more important
                self.on_status(self._report.snapshot, self._report)

    def _write(self) -> None:
        text = json.dumps([CODEC.encode(start) for start in (*self._earlier_starts, self._start)], indent=1) + "\n"
        # Not flushed to disk, since that would slow each step; the file survives the end of this process anyway.
        with replacing(self._path, "free space or move runs_dir", flush=False) as tmp_path:
            tmp_path.write_text(text, "utf-8")


def read_start_records(run_dir: Path) -> list[Start]:
    """Read the starts of a run, oldest first; empty before its first. Raises StoreError."""
    return read_json_file(run_dir / STARTS_FILE, list[Start], "remove it to continue without earlier losses") or []


def sum_over_starts(report: RunReport, run_dir: Path) -> RunReport:
    """The report of a run's latest start, with losses, alarms, commands and seconds of all starts. Raises
    StoreError."""
    starts = read_start_records(run_dir)
    return replace(
        report,
        lost_actors=[loss for start in starts for loss in start.losses],
        alarms=[alarm for start in starts for alarm in start.alarms],
        command_counts=_sum_starts([start.commands for start in starts]),
        seconds_by_activity=report.seconds_by_activity
        | _sum_starts([{k: v for k, v in start.phases.items() if k in PHASES_PER_START} for start in starts]),
    )


Number = TypeVar("Number", int, float)


def _sum_starts(counts: Sequence[Mapping[str, Number]]) -> dict[str, Number]:
    """The sum of counts by name."""
    names = dict.fromkeys(name for counts_of_start in counts for name in counts_of_start)
    return {name: sum(counts_of_start.get(name, 0) for counts_of_start in counts) for name in names}
