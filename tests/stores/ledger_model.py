"""A naive model of the staleness protocol: a list of groups and a search for an entry for each of them.

Where the ledger counts by version and checks Hall's condition, this places every group by augmenting paths, and finds
a batch by trying every subset. It shares no code with the ledger and is slow and simple.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from staleflow.stores.trajectory import GroupId, PolicyVersion, TrajectoryId


@dataclass
class NaiveGroup:
    members: list[TrajectoryId]
    version: PolicyVersion | None = None
    routed: dict[TrajectoryId, PolicyVersion] = field(default_factory=dict)
    done: list[TrajectoryId] = field(default_factory=list)
    gone: set[TrajectoryId] = field(default_factory=set)
    occupied: bool = False

    @property
    def waiting(self) -> list[TrajectoryId]:
        return [m for m in self.members if m not in self.done and m not in self.gone]


def can_be_placed(deadlines: Sequence[int], places: dict[int, int]) -> bool:
    """Return whether every job fits into a step no later than its deadline, by augmenting paths."""
    slots = [step for step, count in places.items() for _ in range(count)]
    holder: dict[int, int] = {}

    def place(job: int, tried: set[int]) -> bool:
        for i, step in enumerate(slots):
            if step <= deadlines[job] and i not in tried:
                tried.add(i)
                if i not in holder or place(holder[i], tried):
                    holder[i] = job
                    return True
        return False

    return all(place(job, set()) for job in range(len(deadlines)))


@dataclass
class NaiveLedger:
    eta: int
    batch: int
    group_size: int
    batch_started: int
    members_started_per_group: int
    num_steps: int
    version: PolicyVersion = PolicyVersion(0)
    next_step: int = 0
    groups: dict[GroupId, NaiveGroup] = field(default_factory=dict)
    started: int = 0
    consumed: int = 0
    filtered: int = 0
    aborted: int = 0

    @property
    def redundant(self) -> bool:
        return self.batch_started > self.batch

    def deadline(self, version: int) -> int:
        return min(version + self.eta, self.num_steps - 1)

    def steps(self, first: int) -> range:
        return range(first, self.version + self.eta + 2)

    def held(self, *, occupied: bool | None = None) -> list[NaiveGroup]:
        return [
            g for g in self.groups.values() if g.version is not None and (occupied is None or g.occupied == occupied)
        ]

    def can_reserve(self, group: GroupId, version: PolicyVersion) -> bool:
        g = self.groups[group]
        if g.occupied or self.deadline(version) < self.next_step:
            return False
        if g.version is not None and version >= g.version:
            return True
        others = [o for o in self.held() if o is not g and o.version is not None]
        mine = self.deadline(version)
        if not self.redundant:
            places = dict.fromkeys(self.steps(self.next_step), self.batch)
            return can_be_placed([*(self.deadline(o.version or 0) for o in others), mine], places)
        # Over-promised places cannot all be kept; what counts is that promises stay within what may be started, where
        # this group adds one, and that finished work has left it a place.
        last = self.deadline(self.version) if g.version is None else self.deadline(g.version) - 1
        for step in range(mine, last + 1):
            due = [o for o in others if self.deadline(o.version or 0) <= step]
            num_steps = step - self.next_step + 1
            if len(due) + 1 > self.batch_started * num_steps:
                return False
            if sum(o.occupied for o in due) + 1 > self.batch * num_steps:
                return False
        return True

    def ready(self) -> bool:
        """Return whether some batch of finished groups can be consumed now so that all other groups still have an
        entry."""
        if self.next_step >= self.num_steps or self.next_step > self.version:
            return False
        occupied = self.held(occupied=True)
        allowance = self.batch_started - self.batch
        places = dict.fromkeys(self.steps(self.next_step + 1), self.batch_started) | {self.next_step: allowance}
        for chosen in itertools.combinations(occupied, self.batch):
            rest = [self.deadline(g.version) for g in self.held() if g not in chosen and g.version is not None]
            if can_be_placed(rest, places):
                return True
        return False

    def cannot_finish(self) -> list[GroupId]:
        """With redundancy: groups in flight for which finished groups have left no entry."""
        if not self.redundant:
            return []
        places = dict.fromkeys(self.steps(self.next_step), self.batch)
        finished = [self.deadline(g.version) for g in self.held(occupied=True) if g.version is not None]
        return [
            i
            for i, g in self.groups.items()
            if g.version is not None
            and not g.occupied
            and not can_be_placed([*finished, self.deadline(g.version)], places)
        ]

    def shed(self) -> set[TrajectoryId]:
        """Abort groups without an entry; returns their members."""
        gone: set[TrajectoryId] = set()
        for i in self.cannot_finish():
            gone |= self.drop(i)
        self.aborted += len(gone)
        return gone

    def drop(self, group: GroupId) -> set[TrajectoryId]:
        g = self.groups.pop(group)
        return {m for m in g.members if m not in g.gone}

    def live(self) -> Iterable[TrajectoryId]:
        return (m for g in self.groups.values() for m in g.members if m not in g.gone)
