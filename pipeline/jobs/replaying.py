"""Replays a stored run's events in new coordinators, one for each start of the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from staleflow.pipeline.config.factories import make_coordinator
from staleflow.pipeline.coordination import journal
from staleflow.pipeline.coordination.events import RunResumed, StopRequested
from staleflow.pipeline.coordination.journal import JournalEntry, list_start_files
from staleflow.pipeline.recovery.run_folder import load_job, require_run
from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectories.reader import StoreSummary
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import TrajectoryId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Result of comparing a run's journals with the decisions of new coordinators, and with the run's store."""

    num_events: int
    num_commands: int
    difference: str
    """Message: the first command that differs; empty if there is none."""
    missing_events: str
    """Message: what the run stored that its journals do not cover; empty if they cover everything."""
    truncated_journals: str
    """Message: which journals end in the middle of a line, as the journal of a killed run may; empty if none does."""
    story: tuple[str, ...]
    """The events of the chosen trajectory, one line each."""


def replay_run(run_dir: Path, trajectory: TrajectoryId | None = None) -> ReplayResult:
    """Replay all events recorded in a run folder. Raises ConfigError, also for a trajectory that the run never started.
    trajectory: the trajectory whose events to list."""
    require_run(run_dir)
    if not journal.list_files(run_dir / "events.jsonl"):
        raise ConfigError(f"{run_dir}: no recorded events; the run was killed before its first, or they were removed")
    # Read before the journals: a run in progress records events before it stores their step.
    summary = VersionedStore.open(run_dir / "store").summary() if (run_dir / "store").exists() else None
    result = journal.ReplayComparison(num_events=0, num_commands=0, difference="")
    story: list[str] = []
    truncated: list[str] = []
    difference = missing = ""
    coverage = _Coverage()
    for config, events in list_start_files(run_dir):
        coordinator = make_coordinator(load_job(run_dir, file=config.name))
        if trajectory is not None:
            coordinator.follow(trajectory)
        entries = journal.JournalReader(events)
        previous_version = coverage.version
        result += journal.replay(coordinator, coverage.observe(entries))
        difference = result.difference
        if difference:
            break
        if coverage.resumed_from > previous_version:
            missing = (
                missing
                or f"before {events.name} the journal ends at version {previous_version}, not {coverage.resumed_from}"
            )
        if coverage.has_events:
            coverage.version = coordinator.ledger.version
        if coverage.has_ended:
            coverage.ended_at = coverage.version
        if entries.incomplete_line_number:
            truncated.append(f"{events.name}, line {entries.incomplete_line_number}, is incomplete and was ignored")
        if trajectory is not None:
            story += coordinator.story(trajectory)
    if trajectory is not None and not story and not difference:
        raise ConfigError(f"{run_dir}: its journal has no trajectory {trajectory}")
    return ReplayResult(
        num_events=result.num_events,
        num_commands=result.num_commands,
        difference=difference,
        missing_events="" if difference else missing or coverage.explain_missing(summary),
        truncated_journals="; ".join(truncated),
        story=tuple(story),
    )


@dataclass(slots=True)
class _Coverage:
    """What the journals read so far cover. version: policy versions published."""

    version: int = 0
    ended_at: int = -1
    """Version at the latest end of the run; -1 before any."""
    resumed_from: int = 0
    has_events: bool = False
    has_ended: bool = False

    def observe(self, entries: Iterable[JournalEntry]) -> Iterator[JournalEntry]:
        """Yield a journal's entries, and update the coverage."""
        self.resumed_from, self.has_events, self.has_ended = 0, False, False
        for entry in entries:
            self.has_events = True
            self.has_ended = isinstance(entry.event, StopRequested)
            if isinstance(entry.event, RunResumed):
                self.resumed_from = entry.event.step
            yield entry

    def explain_missing(self, summary: StoreSummary | None) -> str:
        """Explain which part of the store the journals do not cover; empty if they cover everything."""
        if summary is None or summary.last_commit is None:
            return ""
        if summary.num_steps > self.version:
            return f"the journal ends at version {self.version}, {summary.num_steps} steps are stored"
        if summary.has_ended and self.ended_at < summary.last_commit.ledger.version:
            return f"the journal ends at version {self.version}, before the end of the run that is stored"
        return ""
