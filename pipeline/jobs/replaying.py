"""A stored run's recorded events through fresh coordinators, one for each time the run was started."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.deciding import make_coordinator
from pipeline.coordination import journal
from pipeline.coordination.events import RunResumed, StopRequested
from pipeline.coordination.journal import JournalEntry
from pipeline.runtime.resumption import parts
from pipeline.runtime.run_folder import load_job
from stores.base import StepRecord
from stores.errors import ConfigError
from stores.trajectory import TrajectoryId
from stores.versioned import VersionedStore


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReplay:
    """How a run's journals compare with what a coordinator decides, and with what the run has stored."""

    num_events: int
    num_commands: int
    difference: str
    """The first other command, empty if there is none."""
    missing: str
    """What the run did after its journal ends, empty if it tells all of it."""
    torn: str
    """Which journals end in the middle of a line, as a killed run's may; empty if none does."""
    story: tuple[str, ...]


def replay_run(run_dir: Path, trajectory: TrajectoryId | None = None) -> RunReplay:
    """Replay all that a run folder has recorded. trajectory: whose story is told. Raises ConfigError, also for a
    trajectory that the run never started."""
    if not (run_dir / "events.jsonl").is_file():
        raise ConfigError(f"{run_dir}: no recorded events here; `staleflow store ls` lists the runs there are")
    # Before the journals: a run that is going on has recorded what it stores.
    records = VersionedStore.open(run_dir / "store").steps() if (run_dir / "store").is_dir() else []
    result = journal.Replay(num_events=0, num_commands=0, difference="")
    story: list[str] = []
    torn: list[str] = []
    missing = ""
    told = _Told()
    for config, events in parts(run_dir):
        coordinator = make_coordinator(load_job(run_dir, file=config.name))
        if trajectory is not None:
            coordinator.follow(trajectory)
        entries = journal.read(events)
        before = told.version
        result += journal.replay(coordinator, told.watch(entries))
        if result.difference:
            break
        if told.resumed_from > before:
            missing = missing or f"before {events.name} the journal ends at version {before}, not {told.resumed_from}"
        if told.any_event:
            told.version = coordinator.ledger.version
        if told.stopped:
            told.ended_at = told.version
        if entries.torn_line:
            torn.append(f"{events.name}, line {entries.torn_line}, is cut off and was left out")
        if trajectory is not None:
            story += coordinator.story(trajectory)
    if trajectory is not None and not story and not result.difference:
        raise ConfigError(f"{run_dir}: its journal knows no trajectory {trajectory}")
    return RunReplay(
        num_events=result.num_events,
        num_commands=result.num_commands,
        difference=result.difference,
        missing="" if result.difference else missing or told.missing(records),
        torn="; ".join(torn),
        story=tuple(story),
    )


@dataclass(slots=True)
class _Told:
    """What the journals so far tell of. version: policy versions published."""

    version: int = 0
    ended_at: int = -1
    """The version of the latest end of the run."""
    resumed_from: int = 0
    any_event: bool = False
    stopped: bool = False

    def watch(self, entries: Iterable[JournalEntry]) -> Iterator[JournalEntry]:
        """A journal's entries, looked at as they pass."""
        self.resumed_from, self.any_event, self.stopped = 0, False, False
        for entry in entries:
            self.any_event = True
            self.stopped = isinstance(entry.event, StopRequested)
            if isinstance(entry.event, RunResumed):
                self.resumed_from = entry.event.step
            yield entry

    def missing(self, records: Sequence[StepRecord]) -> str:
        """What the store has that the journals do not tell of."""
        trained = sum(r.kind == "step" for r in records)
        if trained > self.version:
            return f"the journal ends at version {self.version}, {trained} steps are stored"
        if records and records[-1].kind == "end" and self.ended_at < records[-1].ledger.version:
            return f"the journal ends at version {self.version}, before the end of the run that is stored"
        return ""
