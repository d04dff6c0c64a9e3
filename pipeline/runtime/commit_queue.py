"""Queue of discards and commits for the trajectory server; limits how far training runs ahead of the store.

Invariants:
- Discards and commits reach the server one at a time, in the order in which they were queued.
- At most MAX_UNCOMMITTED trained steps are not stored; a further one waits. So one of the kept resume points
  (stores/weights/resume_points.py) is always of a version that the store has reached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from staleflow.pipeline.config.schema import DeadlineConfig
from staleflow.pipeline.coordination.commands import Discard
from staleflow.pipeline.processes.clock import now_s
from staleflow.pipeline.runtime.actors import Actors
from staleflow.stores.errors import ActorFailed, ActorLost
from staleflow.stores.trajectories.records import CommitRecord
from staleflow.stores.weights.retention import NUM_LATEST_KEPT

MAX_UNCOMMITTED = NUM_LATEST_KEPT - 1
"""Maximum trained steps that are not stored: one less than the resume points that are kept."""
COMMIT_NAMES = {"end": "the run's end", "refusal": "that an instance is out of service"}
"""Names of the kinds of commits that are not steps, for messages."""
OUTAGE_POLL_S = 2.0
"""Seconds between two checks whether the server retries a commit."""


class CommitQueue:
    """Queue of one run's discards and commits.

    Args:
        actors: The run's actors.
        deadlines: Deadlines of the job.
        on_commit: Called with each stored record and the metrics of its batch.
        report: Receives a line for display about a commit that takes long, or whose bucket fails.
    """

    def __init__(
        self,
        actors: Actors,
        deadlines: DeadlineConfig,
        on_commit: Callable[[CommitRecord, dict[str, float]], None],
        report: Callable[[str], None],
    ) -> None:
        self._actors = actors
        self._deadlines = deadlines
        self._on_commit = on_commit
        self._report = report
        self._queue: asyncio.Queue[Discard | CommitRecord] = asyncio.Queue()
        self._num_uncommitted = 0
        self._has_capacity = asyncio.Event()
        self._has_capacity.set()

    @property
    def is_full(self) -> bool:
        """Whether the next training step must wait for a commit."""
        return not self._has_capacity.is_set()

    def put(self, item: Discard | CommitRecord) -> None:
        """Queue discarded trajectories, or a record to commit."""
        if isinstance(item, CommitRecord):
            self._change_uncommitted(+1)
        self._queue.put_nowait(item)

    async def wait_for_room(self) -> None:
        """Wait until another step may be trained."""
        await self._has_capacity.wait()

    async def run(self) -> None:
        """Send the queued items to the server, until cancelled."""
        while True:
            item = await self._queue.get()
            if isinstance(item, Discard):
                await self._actors.ask("server", "discard", item.endings, item.versions)
            else:
                self._on_commit(item, await self._commit(item))
                self._change_uncommitted(-1)
            self._queue.task_done()

    async def wait_until_stored(self) -> None:
        """Wait until all queued items are stored."""
        await self._queue.join()

    def _change_uncommitted(self, change: int) -> None:
        self._num_uncommitted += change
        if self._num_uncommitted < MAX_UNCOMMITTED:
            self._has_capacity.set()
        else:
            self._has_capacity.clear()

    async def _commit(self, record: CommitRecord) -> dict[str, float]:
        slow_report = asyncio.ensure_future(self._report_slow(record))
        try:
            metrics: dict[str, float] = await self._actors.ask("server", "commit", record, deadline="commit_s")
            return metrics
        finally:
            slow_report.cancel()

    async def _report_slow(self, record: CommitRecord) -> None:
        """Report a slow commit every deadlines.call_s, and at once when the store's bucket fails or recovers."""
        call_s, outage, started_s = self._deadlines.call_s, "", now_s()
        reported_s = started_s
        commit_name = f"step {record.step}" if record.kind == "step" else COMMIT_NAMES[record.kind]
        while True:
            remaining_s = reported_s + call_s - now_s()
            await asyncio.sleep(min(OUTAGE_POLL_S, remaining_s))
            previous_outage, outage = outage, await self._outage()
            is_due = remaining_s <= OUTAGE_POLL_S or now_s() - reported_s >= call_s
            if not is_due and bool(outage) == bool(previous_outage):
                continue
            reported_s = now_s()
            consequence = f"sampling continues within the staleness bound, training up to {MAX_UNCOMMITTED} steps ahead"
            retry = f": {outage}; it is tried again" if outage else ""
            self._report(
                f"committing {commit_name} for {reported_s - started_s:.0f} s{retry} (deadlines.commit_s allows "
                f"{self._deadlines.commit_s:g}); {consequence}"
            )

    async def _outage(self) -> str:
        """Reason why the server retries a commit; empty if it does not, or does not answer."""
        try:
            return str(await self._actors.ask_once("server", "outage"))
        except (ActorLost, ActorFailed):
            return ""
