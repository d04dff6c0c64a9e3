"""The staleness protocol: which groups may be trained on, and when. Pure accounting.

Invariants:

1. Bound. A group whose oldest token may stem from version V is consumed by a step b with V <= b <= V + eta.
2. No reserved work is wasted. Without redundancy, every reserved group has a legal step as long as it is live.
3. Once. A group is consumed by at most one step, and every step consumes exactly `groups_per_step` groups.
4. Conservation. Of trajectories, started = consumed + filtered + aborted + live at every moment.

A reservation guarantees a group an entry by its deadline, not in a particular step. The ledger assigns no group to a
step; it keeps the reserved groups by version, each due by its deadline V + eta, and keeps that schedule feasible
(Hall's condition for unit jobs with deadlines): for every step D, the groups due by D fit into the steps left up to D.
In whatever order the work finishes, choosing the earliest deadline first then leaves no group without a legal step.
docs/protocol.md has the proof. Versions in flight span at most eta + 1 values, so checking the
condition costs O(eta), however many groups are live.

Worked example, eta = 1, one group a step, version 0 published:

>>> ledger = StalenessLedger(eta=1, groups_per_step=1, group_size=1)
>>> for g in (0, 1):
...     _ = ledger.start(GroupId(g))
...     ledger.reserve(GroupId(g), TrajectoryId(g), PolicyVersion(0))
>>> ledger.start(GroupId(2)); ledger.reservation_refusal(PolicyVersion(0))  # group 2 would be late
(2,)
'2 groups have reserved the 2 entries up to step 1'
>>> ledger.complete(GroupId(1), TrajectoryId(1)); ledger.occupy(GroupId(1)); ledger.is_batch_ready()
True
()
True
>>> ledger.consume(0).groups  # group 1 finished first, so it is trained on first; group 0 is still reserved for step 1
(1,)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from staleflow.stores.errors import ProtocolViolation
from staleflow.stores.staleness.ledger_groups import BufferView, Consumption, Ending, FinishedMembers, LiveGroup
from staleflow.stores.trajectory import AbortReason, Fate, GroupId, PolicyVersion, TrajectoryId

UNLIMITED = 2**62
"""`num_steps` of a run without a planned end, and any other number that sets no limit."""


class StalenessLedger:
    """The protocol's state. An illegal operation raises `ProtocolViolation` and changes nothing.

    Args:
        eta: The staleness bound, >= 0.
        groups_per_step: Groups that one step consumes.
        group_size: Members that an advantage is computed over.
        groups_started_per_step: With surplus groups. More than groups_per_step is redundancy: the surplus is aborted as
            soon as it can no longer be used.
        members_started_per_group: With surplus members; more than group_size is redundancy, as above.
        num_steps: Planned end; nothing is reserved beyond it.
    """

    def __init__(
        self,
        *,
        eta: int,
        groups_per_step: int,
        group_size: int,
        groups_started_per_step: int | None = None,
        members_started_per_group: int | None = None,
        num_steps: int = UNLIMITED,
    ) -> None:
        self.eta = eta
        self.groups_per_step = groups_per_step
        self.group_size = group_size
        self.groups_started_per_step = groups_per_step if groups_started_per_step is None else groups_started_per_step
        self.members_started_per_group = group_size if members_started_per_group is None else members_started_per_group
        self.num_steps = num_steps
        self._reservations_per_step = self.groups_started_per_step
        """Groups that may hold reservations for one step. Only a ledger whose reserved groups may lose their step
        changes it (DroppingLedger in pipeline/simulator/baselines.py)."""
        if eta < 0 or groups_per_step < 1 or group_size < 1 or num_steps < 0:
            raise ValueError("eta and num_steps must be >= 0, groups_per_step and group_size >= 1")
        if self.groups_started_per_step < groups_per_step or self.members_started_per_group < group_size:
            raise ValueError(
                "groups_started_per_step must be >= groups_per_step, and members_started_per_group >= group_size"
            )
        self.version = PolicyVersion(0)
        self.next_step = 0
        self.live_groups: dict[GroupId, LiveGroup] = {}
        """The groups that are not finished, including queued ones, which have no reserved entry."""
        # By version, in order of arrival: dicts serve as ordered sets.
        self._reserved: dict[PolicyVersion, dict[GroupId, None]] = {}
        self._occupied: dict[PolicyVersion, dict[GroupId, FinishedMembers]] = {}
        self.num_started = 0
        """Number of trajectories started, of all groups. Unlike num_reserved and num_occupied, which count groups."""
        self.num_ended: dict[tuple[Fate, AbortReason], int] = {}
        """Numbers of trajectories that have ended, by how."""

    # -- reading -------------------------------------------------------------------------------------------------

    def deadline(self, version: PolicyVersion) -> int:
        """The last step that may consume work of `version`."""
        return min(version + self.eta, self.num_steps - 1)

    def reservation_refusal(self, version: PolicyVersion) -> str | None:
        """The reason why no more groups of `version` can reserve an entry; None if one can."""
        return self._shortage(version, self._last_deadline())

    def num_reservable(self, version: PolicyVersion) -> int:
        """Number of additional groups of `version` that can reserve an entry now."""
        deadline = self.deadline(version)
        if deadline < self.next_step:
            return 0
        num_free = (
            num_unreserved if num_unfilled > 0 else 0
            for _, num_unreserved, num_unfilled in self._slack(deadline, self._last_deadline())
        )
        return max(0, min(num_free, default=0))

    def can_reserve(self, group: GroupId, version: PolicyVersion) -> bool:
        """Whether a member of `group` may be sampled under `version` or newer."""
        return self._reserve_refusal(self.live_groups[group], version) is None

    def is_batch_ready(self) -> bool:
        """Whether the next step can consume its batch now without breaking more reservations than redundancy allows."""
        if not self._has_batch():
            return False
        # After an earliest-deadline-first pick of one batch, what is due by D must fit into steps next+1 .. D,
        # except for the groups that were started in excess.
        allowance = self.groups_started_per_step - self.groups_per_step
        for step, num_due, num_finished in self._due_counts(self.next_step, self._last_deadline()):
            num_left = num_due - min(self.groups_per_step, num_finished)
            if num_left > self.groups_started_per_step * (step - self.next_step) + allowance:
                return False
        return True

    def is_live(self, group: GroupId) -> bool:
        """Whether a group has started and not ended: not finished, or finished and not trained on."""
        return group in self.live_groups or any(group in groups for groups in self._occupied.values())

    def finished_groups(self) -> dict[GroupId, FinishedMembers]:
        """The groups that wait to be trained on. O(groups)."""
        return {group: members for groups in self._occupied.values() for group, members in groups.items()}

    @property
    def num_live(self) -> int:
        """Number of live trajectories: started and not ended."""
        return self.num_started - sum(self.num_ended.values())

    @property
    def num_reserved(self) -> int:
        """Number of groups that have reserved an entry and are not finished."""
        return sum(map(len, self._reserved.values()))

    @property
    def num_occupied(self) -> int:
        """Number of finished groups that wait to be trained on."""
        return sum(map(len, self._occupied.values()))

    def mean_lag(self, *, finished: bool) -> float:
        """Mean of published version - version over the groups that are finished, or have reserved an entry and are not
        finished; 0 if none."""
        sizes = {version: len(groups) for version, groups in (self._occupied if finished else self._reserved).items()}
        return sum((self.version - version) * size for version, size in sizes.items()) / max(1, sum(sizes.values()))

    def buffer_views(self) -> tuple[BufferView, ...]:
        """Groups assigned to buffers for display: reserved ones as late, finished ones as early as possible."""
        steps = range(self.next_step, self._last_deadline() + 1)
        reserved: dict[int, dict[int, int]] = {step: {} for step in steps}
        occupied: dict[int, dict[int, int]] = {step: {} for step in steps}
        num_free = dict.fromkeys(steps, self.groups_started_per_step)
        for version in sorted(self._reserved, reverse=True):
            num_left = len(self._reserved[version])
            for step in range(self.deadline(version), self.next_step - 1, -1):
                count = min(num_left, num_free[step])
                if count:
                    reserved[step][version] = count
                num_free[step] -= count
                num_left -= count
        for version in sorted(self._occupied):
            num_left = len(self._occupied[version])
            for step in steps:
                count = min(num_left, num_free[step])
                if count:
                    occupied[step][version] = count
                num_free[step] -= count
                num_left -= count
        return tuple(
            BufferView(step=step, reserved=reserved[step], occupied=occupied[step], capacity=self.groups_per_step)
            for step in steps
        )

    # -- operations ----------------------------------------------------------------------------------------------

    def resume(self, step: int, num_ended: Mapping[tuple[Fate, AbortReason], int]) -> None:
        """Restore the counts of a run that has published version `step`. Call before any other method; `start` then
        adds the groups in flight. num_ended: trajectories that have ended, by how."""
        if self.num_started or self.next_step or step > self.num_steps:
            raise ProtocolViolation(
                f"cannot resume at step {step} of {self.num_steps}: the ledger is at step {self.next_step}, with "
                f"{self.num_started} trajectories started"
            )
        self._check_consumed(num_ended, step)
        self.version, self.next_step = PolicyVersion(step), step
        self.num_ended = dict(num_ended)
        self.num_started = sum(num_ended.values())

    def start(self, group: GroupId, live_members: Sequence[TrajectoryId] | None = None) -> tuple[TrajectoryId, ...]:
        """Add a new group to the queue, without a reservation. Returns the ids of its members.

        live_members: members of a restored group that had not ended when it was stored, completed ones included; its
        other members are among the counts that were restored. Reservations are made again, oldest version first.
        Without redundancy all can be: Hall's condition held for all of them together, so it holds for any part of them.
        With redundancy some may have to wait (docs/protocol.md).
        """
        if self.is_live(group):
            raise ProtocolViolation(f"group {group} was started twice")
        first = group * self.members_started_per_group
        members = tuple(TrajectoryId(first + i) for i in range(self.members_started_per_group))
        if live_members is not None:
            if not set(live_members) <= set(members) or len(set(live_members)) < max(
                self.group_size, len(live_members)
            ):
                raise ProtocolViolation(f"group {group} cannot be taken up with members {list(live_members)[:10]}")
            members = tuple(live_members)
        self.live_groups[group] = LiveGroup(group=group, unfinished=set(members))
        self.num_started += len(members)
        return members

    def reserve(self, group: GroupId, member: TrajectoryId, version: PolicyVersion) -> None:
        """Reserve an entry for `group` because `member` is about to be sampled under `version` or newer.

        Idempotent for a group whose reservation is at least as old. A member of an older version lowers the group's
        version, and with it its deadline, if all other reservations can still be kept. Raises ProtocolViolation if not:
        check `can_reserve` first.
        """
        live_group = self._live_group(group)
        if member not in live_group.unfinished:
            raise ProtocolViolation(f"trajectory {member} of group {group} is not waiting to be sampled")
        if (why := self._reserve_refusal(live_group, version)) is not None:
            raise ProtocolViolation(f"group {group} cannot reserve an entry at version {version}: {why}")
        if not live_group.is_reserved or version < live_group.version:
            self._remove_reservation(live_group)
            live_group.version = version
            self._reserved.setdefault(version, {})[group] = None
        live_group.member_versions[member] = min(version, live_group.member_versions.get(member, version))

    def complete(self, group: GroupId, member: TrajectoryId) -> bool:
        """Record that `member` was sampled and rewarded. Returns True once the group has all members it needs."""
        live_group = self._live_group(group)
        if member not in live_group.member_versions or member not in live_group.unfinished:
            raise ProtocolViolation(f"trajectory {member} completes without having been routed")
        live_group.unfinished.remove(member)
        live_group.completed.append(member)
        return len(live_group.completed) >= self.group_size

    def occupy(self, group: GroupId) -> tuple[Ending, ...]:
        """Turn a complete group's reservation into finished work; abort its surplus members and groups left without a
        step."""
        live_group = self._live_group(group)
        if len(live_group.completed) < self.group_size:
            raise ProtocolViolation(f"group {group} cannot be occupied: {len(live_group.completed)} done")
        self._drop(live_group)
        members = tuple(sorted(live_group.completed[: self.group_size]))
        versions = tuple(live_group.member_versions[member] for member in members)
        self._occupied.setdefault(live_group.version, {})[group] = members, versions
        surplus = (*live_group.completed[self.group_size :], *sorted(live_group.unfinished))
        endings = self._end(group, surplus, Fate.ABORTED, AbortReason.SURPLUS_MEMBER)
        return (*endings, *self._abort_surplus_groups())

    def consume(self, step: int) -> Consumption:
        """Give one batch to training step `step`, oldest versions first. Each step consumes once, in order, and only
        when ready."""
        if step != self.next_step:
            raise ProtocolViolation(f"step {step} cannot consume: step {self.next_step} is next")
        if not self.is_batch_ready():
            raise ProtocolViolation(f"step {step} cannot consume: its batch is not ready")
        batch = self._next_batch()
        for version, groups in batch.items():
            if not version <= step <= version + self.eta:
                raise ProtocolViolation(f"group {groups[0]} of version {version} at step {step}")
        finished = [self._occupied[version].pop(group) for version, groups in batch.items() for group in groups]
        self._occupied = {version: groups for version, groups in self._occupied.items() if groups}
        members = tuple(itertools.chain.from_iterable(members for members, _ in finished))
        self._count_ended(len(members), Fate.CONSUMED, AbortReason.NONE)
        self.next_step += 1
        return Consumption(
            step=step,
            groups=tuple(itertools.chain.from_iterable(batch.values())),
            members=members,
            versions=tuple(itertools.chain.from_iterable(versions for _, versions in finished)),
            surplus=self._abort_surplus_groups(),
        )

    def abort(self, group: GroupId, reason: AbortReason, member: TrajectoryId | None = None) -> tuple[Ending, ...]:
        """Abort a group, or one unfinished member of it; if too few others remain, the whole group is aborted. An
        aborted group's entry is freed."""
        finished = None if member is not None else self._pop_finished(group)
        if finished is not None:
            return self._end(group, finished[0], Fate.ABORTED, reason)
        live_group = self._live_group(group)
        if member is not None:
            if member not in live_group.unfinished:
                raise ProtocolViolation(f"trajectory {member} of group {group} cannot be aborted: it is not waiting")
            if len(live_group.completed) + len(live_group.unfinished) > self.group_size:
                live_group.unfinished.remove(member)
                return self._end(group, (member,), Fate.ABORTED, reason)
            siblings = tuple(m for m in live_group.members if m != member)
            self._drop(live_group)
            return (
                *self._end(group, (member,), Fate.ABORTED, reason),
                *self._end(group, siblings, Fate.ABORTED, AbortReason.GROUP_FAILED),
            )
        self._drop(live_group)
        return self._end(group, live_group.members, Fate.ABORTED, reason)

    def filter(self, group: GroupId, reason: AbortReason) -> tuple[Ending, ...]:
        """Discard a complete group that is not worth training on. Its entry becomes free for a replacement."""
        live_group = self._live_group(group)
        if len(live_group.completed) < self.group_size:
            raise ProtocolViolation(f"group {group} is filtered before it is complete")
        self._drop(live_group)
        return (
            *self._end(group, tuple(live_group.completed), Fate.FILTERED, reason),
            *self._end(group, tuple(sorted(live_group.unfinished)), Fate.ABORTED, AbortReason.SURPLUS_MEMBER),
        )

    def publish(self, version: PolicyVersion) -> None:
        """Record that training step `version` - 1 has finished."""
        if version != self.version + 1 or version != self.next_step:
            raise ProtocolViolation(f"version {version} published after {self.version}, next step {self.next_step}")
        self.version = version

    # -- validation ----------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check every invariant across collections, O(live groups); raises `ProtocolViolation` at the first broken."""
        self._validate_membership()
        self._validate_counts()
        is_strict = self._reservations_per_step == self.groups_per_step
        for step, num_due, num_finished in self._due_counts(min(self.next_step, self.version), self._last_deadline()):
            num_entries = self.groups_per_step * max(0, step - self.next_step + 1)
            if num_finished > num_entries or (is_strict and num_due > num_entries):
                raise ProtocolViolation(
                    f"{num_due} groups ({num_finished} finished) are due by step {step}, "
                    f"which has {num_entries} entries"
                )
        for version, groups in (*self._reserved.items(), *self._occupied.items()):
            if groups and (version > self.next_step or self.deadline(version) < self.next_step):
                raise ProtocolViolation(f"live work of version {version} at step {self.next_step}, bound {self.eta}")

    def _validate_membership(self) -> None:
        reserved_versions = {g: v for v, groups in self._reserved.items() for g in groups}
        if self.num_reserved != len(reserved_versions) or self.num_occupied != len(self.finished_groups()):
            raise ProtocolViolation("a group has entries under two versions")
        expected_versions = {g: e.version for g, e in self.live_groups.items() if e.is_reserved}
        if reserved_versions != expected_versions:
            raise ProtocolViolation(
                f"reserved entries and groups differ: {reserved_versions.items() ^ expected_versions.items()}"
            )
        if unfinished := self.live_groups.keys() & self.finished_groups():
            raise ProtocolViolation(f"groups {sorted(unfinished)} are both finished and unfinished")
        for version, groups in self._occupied.items():
            for group, (members, versions) in groups.items():
                if len(members) != self.group_size or list(members) != sorted(members) or min(versions) < version:
                    raise ProtocolViolation(f"group {group} of version {version}: {members} of versions {versions}")
        for live_group in self.live_groups.values():
            if (
                set(live_group.completed) & live_group.unfinished
                or not set(live_group.completed) <= live_group.member_versions.keys()
            ):
                raise ProtocolViolation(
                    f"group {live_group.group}: members both unfinished and done, or done but never routed"
                )
            if live_group.version != min(live_group.member_versions.values(), default=-1):
                raise ProtocolViolation(
                    f"group {live_group.group} has version {live_group.version}, its members have "
                    f"{live_group.member_versions}"
                )

    def _validate_counts(self) -> None:
        num_unfinished = sum(len(e.completed) + len(e.unfinished) for e in self.live_groups.values())
        num_live = num_unfinished + self.num_occupied * self.group_size
        if num_live != self.num_live:
            raise ProtocolViolation(
                f"started {self.num_started} - ended {sum(self.num_ended.values())} = {self.num_live}, "
                f"but {num_live} live"
            )
        self._check_consumed(self.num_ended, self.next_step)

    def _check_consumed(self, num_ended: Mapping[tuple[Fate, AbortReason], int], num_steps: int) -> None:
        num_consumed = num_ended.get((Fate.CONSUMED, AbortReason.NONE), 0)
        if num_consumed != num_steps * self.groups_per_step * self.group_size:
            raise ProtocolViolation(f"{num_consumed} trajectories consumed by {num_steps} steps")

    # -- inside --------------------------------------------------------------------------------------------------

    def _has_batch(self) -> bool:
        """Whether the next step may begin and as many groups are finished as it takes."""
        return (
            self.next_step < self.num_steps
            and self.next_step <= self.version
            and self.num_occupied >= self.groups_per_step
        )

    def _next_batch(self) -> dict[PolicyVersion, list[GroupId]]:
        """The finished groups that the next step takes, as far as there are enough, by version: the oldest versions
        first."""
        batch: dict[PolicyVersion, list[GroupId]] = {}
        num_left = self.groups_per_step
        for version in sorted(self._occupied):
            if num_left:
                batch[version] = list(itertools.islice(self._occupied[version], num_left))
                num_left -= len(batch[version])
        return batch

    def _last_deadline(self) -> int:
        """The last step by which any existing or possible reservation is due."""
        return self.deadline(self.version)

    def _due_versions(self, step: int) -> Iterable[PolicyVersion]:
        """The versions whose deadline is exactly `step`."""
        first = step - self.eta
        if step == self.num_steps - 1:  # no deadline is later than the planned end
            return (PolicyVersion(v) for v in range(max(0, first), self.version + 1))
        return (PolicyVersion(first),)

    def _due_counts(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """For each step from `first` to `last`: (step, number of groups with a reservation due by it, number of
        finished ones among them). No live group is due before `first`."""
        num_due = num_finished = 0
        for step in range(first, last + 1):
            for version in self._due_versions(step):
                num_occupied = len(self._occupied.get(version, ()))
                num_finished += num_occupied
                num_due += num_occupied + len(self._reserved.get(version, ()))
            yield step, num_due, num_finished

    def _slack(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """For each step from `first` to `last`: (step, number of further groups due by then that can reserve an entry,
        number of entries that finished work leaves). The two numbers differ only with redundancy, which reserves more
        entries than there are."""
        for step, num_due, num_finished in self._due_counts(self.next_step, last):
            if step >= first:
                num_steps = step - self.next_step + 1
                yield (
                    step,
                    self._reservations_per_step * num_steps - num_due,
                    self.groups_per_step * num_steps - num_finished,
                )

    def _shortage(self, version: PolicyVersion, last_step: int) -> str | None:
        """The reason one more group of `version` cannot reserve an entry, judged by the steps to `last_step`, or
        None."""
        if not 0 <= version <= self.version:
            return f"version {version} is not published, only 0 to {self.version} are"
        deadline = self.deadline(version)
        if deadline < self.next_step:
            return f"it would have to be trained on by step {deadline}, the next is {self.next_step}"
        if last_step < deadline:  # as for a member of a group whose reservation is at least as old
            return None
        for step, num_unreserved, num_unfilled in self._slack(deadline, last_step):
            if num_unreserved <= 0:
                num_reserved = self.groups_started_per_step * (step - self.next_step + 1) - num_unreserved
                return (
                    f"{num_reserved} groups have reserved the {num_reserved + num_unreserved} entries up to step {step}"
                )
            if num_unfilled <= 0:
                return f"finished groups fill all entries up to step {step}"
        return None

    def _reserve_refusal(self, live_group: LiveGroup, version: PolicyVersion) -> str | None:
        """The reason why a member of a group cannot be sampled under `version`; None if all reservations can still be
        kept. One not older than the group only needs a deadline that is not over."""
        is_reserved = live_group.is_reserved
        return self._shortage(version, self.deadline(live_group.version) - 1 if is_reserved else self._last_deadline())

    def _live_group(self, group: GroupId) -> LiveGroup:
        live_group = self.live_groups.get(group)
        if live_group is None:
            raise ProtocolViolation(f"group {group} is not live")
        return live_group

    def _pop_finished(self, group: GroupId) -> FinishedMembers | None:
        """Remove a finished group; returns its members, or None if there is no such group."""
        for version, groups in self._occupied.items():
            if group in groups:
                finished = groups.pop(group)
                if not groups:
                    del self._occupied[version]
                return finished
        return None

    def _remove_reservation(self, live_group: LiveGroup) -> None:
        """Remove the reservation of a group, if it has one."""
        if live_group.is_reserved:
            groups = self._reserved[live_group.version]
            del groups[live_group.group]
            if not groups:
                del self._reserved[live_group.version]

    def _drop(self, live_group: LiveGroup) -> None:
        self._remove_reservation(live_group)
        del self.live_groups[live_group.group]

    def _end(
        self, group: GroupId, members: tuple[TrajectoryId, ...], fate: Fate, reason: AbortReason
    ) -> tuple[Ending, ...]:
        self._count_ended(len(members), fate, reason)
        return tuple(Ending(trajectory=m, group=group, fate=fate, reason=reason, step=self.next_step) for m in members)

    def _count_ended(self, count: int, fate: Fate, reason: AbortReason) -> None:
        if count:
            self.num_ended[fate, reason] = self.num_ended.get((fate, reason), 0) + count

    def _abort_surplus_groups(self) -> tuple[Ending, ...]:
        """Abort reserved groups left without a legal step; only redundancy leaves any."""
        if self._reservations_per_step == self.groups_per_step:
            return ()
        endings: list[Ending] = []
        oldest_due = self.deadline(min(self._reserved, default=self.version))
        num_free = UNLIMITED
        due_counts = list(self._due_counts(min(oldest_due, self.next_step), self._last_deadline()))
        # From the latest deadline down: a group can use an entry only if one is free at its deadline and at all later.
        for step, _, num_finished in reversed(due_counts):
            num_free = min(num_free, self.groups_per_step * max(0, step - self.next_step + 1) - num_finished)
            if num_free <= 0:
                reason = AbortReason.TOO_STALE if step < self.next_step else AbortReason.SURPLUS_GROUP
                for version in tuple(self._due_versions(step)):
                    for group in tuple(self._reserved.get(version, ())):
                        endings += self.abort(group, reason)
        return tuple(endings)
