"""The balance of a soak's tokens: what engines sampled (recording.py) is what is stored, what was discarded for a
reason that the run's journals have, and what is in flight.

Each stored token is matched with one that the instance of its segment sampled at its position. What remains of a
trajectory's sampled tokens must have a reason: its instance was lost, it was aborted, its environment or engine failed,
or it was in flight when the run was resumed. So an unreported loss shows even if the same tokens were sampled again.
What an engine had sampled since it was last asked is not counted if its process is killed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.soaking.recording import Loading, Sampling, read
from staleflow.pipeline.coordination import journal
from staleflow.pipeline.coordination.commands import Abort, Command, Discard, Route, Train
from staleflow.pipeline.coordination.events import (
    EnvironmentFailed,
    Event,
    InstanceLost,
    PullFinished,
    RunResumed,
    TrajectoryFailed,
    TrajectoryInterrupted,
    TrajectorySampled,
)
from staleflow.pipeline.coordination.journal import list_start_files
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import Fate, Segment, Trajectory

ABORTED, LOST, FAILED, RESUMED = (
    "aborted",
    "its instance was lost",
    "its environment or engine failed",
    "in flight when the run was resumed",
)
"""Why sampled tokens may be stored nowhere."""
SHOWN = 3
"""Trajectories that a finding names."""


@dataclass(slots=True)
class Reasons:
    """Why tokens of each trajectory may have been discarded, by the journals of a run. pulls: each version that an
    instance was said to serve."""

    why: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    pulls: set[tuple[str, int]] = field(default_factory=set)
    _at: dict[int, str] = field(default_factory=dict)
    """The instance that each trajectory runs on."""
    _in_flight: set[int] = field(default_factory=set)
    _ended: dict[int, int] = field(default_factory=dict)
    """The step in which each trajectory was trained on or discarded; a resume may undo it."""

    def hear(self, entry: journal.JournalEntry) -> None:
        """Take an entry of the journals, in their order."""
        self._hear_event(entry.event)
        for command in entry.commands:
            self._hear_command(command)

    def _hear_event(self, event: Event) -> None:
        match event:
            case RunResumed(step=step):
                undone = {t for t, at in self._ended.items() if at >= step}
                for t in self._in_flight | undone:
                    self.why[t].add(RESUMED)
                self._at.clear()
            case InstanceLost(instance=instance):
                for t in [t for t, at in self._at.items() if at == instance]:
                    self._discard(t, LOST)
            case EnvironmentFailed(trajectory=t) | TrajectoryFailed(trajectory=t):
                self._discard(int(t), FAILED)
            case TrajectorySampled(trajectory=t) | TrajectoryInterrupted(trajectory=t):
                self._at.pop(int(t), None)
            case PullFinished(instance=instance, version=version):
                self.pulls.add((str(instance), int(version)))
            case _:
                pass

    def _hear_command(self, command: Command) -> None:
        match command:
            case Route(trajectory=t, instance=instance):
                self._at[int(t)] = str(instance)
                self._in_flight.add(int(t))
            case Abort(trajectory=t):
                self._discard(int(t), ABORTED)
            case Train(step=step, trajectories=trajectories):
                self._ended |= {int(t): step for t in trajectories}
                self._in_flight -= {int(t) for t in trajectories}
            case Discard(endings=endings):
                self._ended |= {int(ending.trajectory): ending.step for ending in endings}
                self._in_flight -= {int(ending.trajectory) for ending in endings}
            case _:
                pass

    def _discard(self, trajectory: int, why: str) -> None:
        self.why[trajectory].add(why)
        self._at.pop(trajectory, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Tokens by what became of them. discarded: by reason. findings: what does not add up."""

    sampled: int
    stored: int
    live: int
    discarded: dict[str, int]
    findings: tuple[str, ...]

    def line(self) -> str:
        reasons = ", ".join(f"{count:,} {why}" for why, count in sorted(self.discarded.items())) or "none"
        lost = self.sampled - self.stored - self.live - sum(self.discarded.values())
        return (
            f"tokens: {self.sampled:,} sampled = {self.stored:,} stored + {self.live:,} in flight + discarded: "
            + reasons
            + (f"; {lost:,} are missing" if lost else "")
        )


def balance(run_dir: Path, records: Path) -> Balance:
    """Compare a run's store and journals with the records of its engines."""
    reasons = Reasons()
    for _, path in list_start_files(run_dir):
        for entry in journal.JournalReader(path):
            reasons.hear(entry)
    streams: dict[int, dict[tuple[str, int, int], int]] = defaultdict(dict)
    loaded: set[tuple[str, int]] = set()
    for record in read(records):
        match record:
            case Sampling(trajectory=t) if t >= 0:
                key = record.instance, record.route_number, record.start
                streams[t][key] = max(record.stop, streams[t].get(key, record.start))
            case Loading(version=version, loaded_version=loaded_version) if version == loaded_version:
                loaded.add((record.instance, version))
            case _:
                pass
    store = VersionedStore.open(run_dir / "store")
    stored = {int(row.trajectory.id): row.trajectory for row in store.trajectories()}
    last = store.commits(-1)[0].ledger
    live = {t for a, b in last.live for t in range(a, b)} | {t for t in streams if t >= last.num_started}
    counts: Counter[str] = Counter()
    discarded: Counter[str] = Counter()
    missing: dict[int, int] = {}
    invented: list[int] = []
    for t in sorted({*streams, *stored}):
        num_sampled = sum(stop - start for (_, _, start), stop in streams[t].items())
        num_matched, num_unknown = _matched(streams[t], stored.get(t))
        counts["sampled"] += num_sampled
        counts["stored"] += num_matched
        rest = num_sampled - num_matched
        if num_unknown:
            invented.append(t)
        if rest and t not in stored and t in live:
            counts["live"] += rest
        elif rest and (why := reasons.why.get(t)):
            discarded[" or ".join(sorted(why))] += rest
        elif rest:
            missing[t] = rest
    findings = [*_lost(missing), *_members(store), *_not_loaded(reasons.pulls - loaded)]
    if invented:
        findings.append(f"{len(invented)} trajectories have stored tokens that no engine sampled, {_first(invented)}")
    return Balance(
        sampled=counts["sampled"],
        stored=counts["stored"],
        live=counts["live"],
        discarded=dict(discarded),
        findings=tuple(findings),
    )


def _matched(streams: dict[tuple[str, int, int], int], stored: Trajectory | None) -> tuple[int, int]:
    """Stored tokens of a trajectory that the instance of their segment sampled at their position, and those that it did
    not."""
    if stored is None:
        return 0, 0
    num_matched, num_unknown, position = 0, 0, 0
    for span in stored.spans:
        size = len(span.tokens)
        if isinstance(span, Segment):
            sampled = np.zeros(size, bool)
            for (instance, _, start), stop in streams.items():
                if instance == span.instance:
                    sampled[max(0, start - position) : max(0, stop - position)] = True
            num_matched += int(sampled.sum())
            num_unknown += int(size - sampled.sum())
        position += size
    return num_matched, num_unknown


def _lost(missing: dict[int, int]) -> Iterator[str]:
    if missing:
        yield (
            f"{sum(missing.values()):,} tokens of {len(missing)} trajectories were sampled, and are neither stored nor "
            f"in flight nor discarded for a reason, {_first(sorted(missing))}"
        )


def _members(store: VersionedStore) -> Iterator[str]:
    """Groups that were trained on without all their members, or of which members are not in the store."""
    header = store.header
    of_group: dict[int, list[Fate]] = defaultdict(list)
    for row in store.trajectories():
        of_group[int(row.trajectory.group)].append(row.fate)
    trained = {group: fates for group, fates in of_group.items() if Fate.CONSUMED in fates}
    short = [group for group, fates in trained.items() if fates.count(Fate.CONSUMED) != header.group_size]
    absent = [group for group, fates in trained.items() if len(fates) != header.members_started_per_group]
    if short:
        yield f"{len(short)} groups were trained on with other than {header.group_size} members, {_first(short)}"
    if absent:
        members = header.members_started_per_group
        yield f"{len(absent)} groups have other than {members} stored members, {_first(absent)}"


def _not_loaded(pulls: set[tuple[str, int]]) -> Iterator[str]:
    if pulls:
        instance, version = min(pulls)
        yield f"{len(pulls)} pulls without the weights being loaded, first {instance} version {version}"


def _first(ids: list[int]) -> str:
    return f"first {', '.join(map(str, sorted(ids)[:SHOWN]))}"
