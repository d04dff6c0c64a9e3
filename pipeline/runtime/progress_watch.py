"""Detects that a run makes no progress."""

from __future__ import annotations

from staleflow.pipeline.config.schema import DeadlineConfig
from staleflow.pipeline.coordination.coordinator import Coordinator
from staleflow.pipeline.coordination.events import Event, InstanceReported, Tick
from staleflow.pipeline.processes.clock import now_s
from staleflow.pipeline.runtime.actors import Actors
from staleflow.pipeline.runtime.commit_queue import CommitQueue
from staleflow.pipeline.runtime.environment_hosts import EnvironmentHosts
from staleflow.pipeline.runtime.scoring import ScoreQueue
from staleflow.pipeline.runtime.teacher_queue import TeacherQueue
from staleflow.stores.errors import RunStuck
from staleflow.stores.trajectory import InstanceId, TrajectoryId


class ProgressWatch:
    """Measures the time since the last progress of one run. The driver passes it every event."""

    def __init__(
        self,
        coordinator: Coordinator,
        actors: Actors,
        commit_queue: CommitQueue,
        score_queue: ScoreQueue,
        teacher_queue: TeacherQueue,
        environment_hosts: EnvironmentHosts,
        deadlines: DeadlineConfig,
    ) -> None:
        self._coordinator = coordinator
        self._actors = actors
        self._commit_queue = commit_queue
        self._score_queue = score_queue
        self._teacher_queue = teacher_queue
        self._environment_hosts = environment_hosts
        self._deadlines = deadlines
        self._last_progress_s = now_s()
        """Time of the last progress."""
        self._last_reports: dict[InstanceId, tuple[tuple[TrajectoryId, int], ...]] = {}
        """(trajectory, tokens) in each instance's latest report."""
        self._bytes_arrived = 0

    def start(self) -> None:
        """Measure the time from now on."""
        self._last_progress_s = now_s()

    def observe(self, event: Event) -> None:
        """Record an event, which may be progress."""
        if self._is_progress(event) or self._has_pending_calls():
            self._last_progress_s = now_s()

    def check(self) -> None:
        """Raise RunStuck if there was no progress for longer than deadlines.stuck_s; during a training step, than
        train_s and call_s together, since a trainer that has not ended the step after train_s is replaced."""
        key, limit_s = "stuck_s", self._deadlines.stuck_s
        if self._coordinator.is_training:
            key, limit_s = "train_s + deadlines.call_s", self._deadlines.train_s + self._deadlines.call_s
        if now_s() - self._last_progress_s > limit_s:
            raise RunStuck(f"no progress for {limit_s:g} s (deadlines.{key}): {self._coordinator.explain_waiting()}")

    def _is_progress(self, event: Event) -> bool:
        """Whether an event counts as progress. A report does if a response has grown since the previous one."""
        match event:
            case Tick():
                return False
            case InstanceReported(instance=instance, progress=progress):
                previous_progress, self._last_reports[instance] = self._last_reports.get(instance, ()), progress
                return progress != previous_progress
            case _:
                return True

    def _has_pending_calls(self) -> bool:
        """Whether calls with deadlines of their own are pending, or weights have arrived since the last call. Waiting
        for such calls does not mean that the run is stuck."""
        actors = self._actors
        previous_bytes, self._bytes_arrived = self._bytes_arrived, actors.bytes_arrived
        is_busy = self._commit_queue.is_full or self._score_queue.is_busy or self._teacher_queue.is_busy
        is_busy |= self._environment_hosts.is_busy or actors.is_restoring or actors.is_loading or actors.lacks_role
        return is_busy or self._bytes_arrived > previous_bytes
