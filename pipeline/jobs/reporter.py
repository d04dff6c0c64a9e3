"""Reports a run's progress and log to the registry on its scheduler and to the run folder, and receives requests to
stop.

All runs report, on any cluster: the dashboard page, `staleflow status` and `staleflow logs` show it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from staleflow.pipeline.cluster import job_registry
from staleflow.pipeline.coordination.snapshot import Snapshot
from staleflow.pipeline.jobs.summary import format_step
from staleflow.pipeline.processes.dask_workers import DaskWorkers
from staleflow.pipeline.recovery import job_record
from staleflow.pipeline.runtime.driver import Driver
from staleflow.pipeline.runtime.evaluation_results import Evaluation, describe_progress, group_by_set
from staleflow.pipeline.runtime.run_report import RunListener, RunReport
from staleflow.stores.errors import StoreError
from staleflow.stores.metrics import tokens_per_s
from staleflow.stores.serialization import Codec

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.5
"""Seconds between reports; each answer says whether to stop."""
RECORD_INTERVAL_S = 5.0
"""Seconds without news after which the record in the run folder is written again, as a sign of life."""
MAX_DECISIONS = 30
"""Number of latest decisions in a report."""
CODEC = Codec()


class WarningHandler(logging.Handler):
    """A log handler that passes the messages of warnings and errors to a function. write: called with each."""

    def __init__(self, write: Callable[[str], object]) -> None:
        super().__init__(logging.WARNING)
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write(record.getMessage())
        except Exception:  # noqa: BLE001  a malformed log call must not end its caller
            self.handleError(record)


@contextlib.contextmanager
def capturing_warnings(write: Callable[[str], object], thread_id: int | None = None) -> Iterator[None]:
    """Context manager: calls `write` with the message of each logged warning. thread_id: that of the only thread whose
    warnings count; None: those of all threads do."""
    handler, log = WarningHandler(write), logging.getLogger("staleflow")
    if thread_id is not None:
        handler.addFilter(lambda record: record.thread == thread_id)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


class Reporter(RunListener):
    """Sends one run's progress and log lines to the registry. num_steps: number of training steps of the run. run_dir:
    the run folder, which stores them too."""

    def __init__(self, id: str, num_steps: int, run_dir: Path) -> None:
        self.id = id
        self._run_dir = run_dir
        self._recorded_state = ""
        """State and reason that the run folder has."""
        self._recorded_s = 0.0
        """The event loop's time when the run folder got them."""
        self._report_lock = asyncio.Lock()
        self._num_steps = num_steps
        self._lines: list[str] = []
        self._status: dict[str, Any] = {}
        self._steps: list[dict[str, float]] = []
        self._unsent_lines: list[str] = []
        self._unsent_steps: list[dict[str, float]] = []
        """Lines and steps that the run folder has, but not the registry, because a request failed."""
        self._activity = ""
        self._retired: list[str] = []
        """Workers to retire of the registry's last reply, which it may still list."""
        self._is_registry_lost = False

    def on_line(self, text: str) -> None:
        """Append a line to the log."""
        self._lines.append(f"{time.strftime('%H:%M:%S')}  {text}")

    def on_activity(self, activity: str) -> None:
        if activity != self._activity:
            self._activity = activity
            self._log(activity)

    def add_earlier_steps(self, steps: Sequence[dict[str, float]]) -> None:
        """Send the stored steps of a resumed run, without log lines."""
        self._steps += steps

    def on_step_stored(self, step: Mapping[str, float], bottleneck: str) -> None:
        self._activity = "training"
        self._steps.append(dict(step))
        self._log(format_step(step, self._num_steps, bottleneck))

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self._log(evaluation.line)

    def on_status(self, snapshot: Snapshot, report: RunReport) -> None:
        is_evaluating = snapshot.num_eval_in_flight > 0
        self._status = {
            **CODEC.encode(snapshot),
            "losses": list(report.lost_actors),
            "tokens_per_s": tokens_per_s(report.steps),
            "fleet": report.instances_line,
            "environments": [CODEC.encode(host) for host in report.environment_hosts],
            "sources": [source.line for source in report.sources],
            "bottleneck": next(reversed(report.bottlenecks.values()), ""),
            "evaluating": describe_progress(snapshot.evaluated_version, snapshot.num_eval_in_flight)
            if is_evaluating
            else "",
            "evaluated": [set_evaluations[-1].line for set_evaluations in group_by_set(report.evaluations).values()],
        }

    def _log(self, line: str) -> None:
        """Append a line to the run's log and to this process's log."""
        self.on_line(line)
        logger.info(line)

    async def report_until_done(self, driver: Driver, workers: DaskWorkers) -> None:
        """Report regularly while the driver runs, also after it was told to stop. Stops it once, or retires an
        instance, when requested."""
        has_stopped = False
        while True:
            try:
                stop_reason = await self._exchange(driver, workers)
                self._is_registry_lost = False
            except OSError as error:  # a lost request; the next round sends its lines and steps too
                if not self._is_registry_lost:  # else each round of an outage would add a line to the log
                    logger.warning("the job registry did not answer: %s", error)
                self._is_registry_lost, stop_reason = True, ""
            if stop_reason and not has_stopped:
                has_stopped = True
                await write_record(self._run_dir, self.id, {"stop": stop_reason}, [])
                driver.stop(stop_reason)
            await asyncio.sleep(REPORT_INTERVAL_S)

    async def _exchange(self, driver: Driver, workers: DaskWorkers) -> str:
        """Report once, and retire or release the workers that the registry requests. Returns why the run must stop;
        empty if it need not."""
        state, reason = "running", ""
        if workers.waiting_actors:
            needs = "; ".join(f"{name} needs {need}" for name, need in sorted(workers.waiting_actors.items()))
            state, reason = "waiting", f"{needs}; stops waiting after {workers.start_s:g} s (deadlines.start_s)"
            if driver.is_in_main_loop:
                state, reason = "running", f"continues without {needs}"
        driver_status = {
            "decisions": driver.latest_decisions(MAX_DECISIONS),
            "tokens_sampled": driver.sampled_tokens_by_instance(),
            "kept_tokens": driver.kept_tokens_by_instance(),
        }
        reply = await self.report(workers.client, state, reason, driver_status)
        self._retired = reply["retire"]
        for worker in self._retired:
            self._log(driver.retire(worker) or f"retiring {worker}")
        for worker in reply["release"]:
            driver.release_worker(worker)
        return str(reply["stop"])

    async def report(
        self, client: Any, state: str, reason: str, driver_status: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Send new steps and lines to the registry, and write them to the folder. Returns the registry's reply. A
        report whose caller is cancelled is completed, before the next one begins."""
        return await asyncio.shield(self._report(client, state, reason, driver_status))

    async def _report(
        self, client: Any, state: str, reason: str, driver_status: dict[str, Any] | None
    ) -> dict[str, Any]:
        async with self._report_lock:
            lines, self._lines = self._lines, []
            steps, self._steps = self._steps, []
            status = {**self._status, "doing": self._activity, **(driver_status or {})} if self._status else {}
            now = asyncio.get_running_loop().time()
            is_due = now - self._recorded_s >= RECORD_INTERVAL_S or self._recorded_state != f"{state} {reason}"
            if lines or steps or is_due:
                self._recorded_state, self._recorded_s = f"{state} {reason}", now
                changes: dict[str, Any] = {"steps": self._num_steps, "state": state, "why": reason}
                changes |= ({"status": status} if status else {}) | ({"last": steps[-1]} if steps else {})
                await write_record(self._run_dir, self.id, changes, lines)
            lines, steps = self._unsent_lines + lines, self._unsent_steps + steps
            self._unsent_lines, self._unsent_steps = [], []
            try:
                reply: dict[str, Any] = await job_registry.ask(
                    client, "report", id=self.id, state=state, why=reason, status=status, steps=steps, lines=lines,
                    retired=self._retired,
                )  # fmt: skip
            except OSError:
                self._unsent_lines, self._unsent_steps = lines, steps
                raise
            return reply


async def write_record(run_dir: Path, id: str, changes: Mapping[str, Any], lines: Sequence[str]) -> None:
    """Write the state of a run's job to the locked run folder. Errors are ignored, because the registry has the state
    as well."""
    try:
        await asyncio.to_thread(job_record.write, run_dir, id, changes, lines)
    except StoreError as error:
        logger.debug("the record of the job is not kept: %s", error)


async def record_state(job: Mapping[str, Any], state: str, reason: str) -> None:
    """Write a job's state and the reason for it to the locked run folder. job: the registry's entry of the job."""
    await write_record(Path(job["run_dir"]), job["id"], {"state": state, "why": reason}, [_state_line(state, reason)])


async def report_state(client: Any, job: Mapping[str, Any], state: str, reason: str) -> None:
    """Report a job's state and the reason for it to the registry. job: its entry there."""
    lines = [_state_line(state, reason)]
    await job_registry.ask(client, "report", id=job["id"], state=state, why=reason, status={}, steps=[], lines=lines)


def _state_line(state: str, reason: str) -> str:
    line = f"{time.strftime('%H:%M:%S')}  {state}"
    return f"{line}: {reason}" if reason else line
