"""State of the trajectories in flight, which are not in the store yet. Owned by the trajectory server.

Entries describe each change of a group, of trajectories or of a batch. In a run, only `apply` changes the state, entry
by entry. The spool (stores/in_flight/spool.py), a write-ahead log, keeps the entries on disk; applied in order, they
restore the state. Pure.

Invariants:
- Tokens of a trajectory only grow, until it restarts from its prompt. A delivery names the position of its first token:
  tokens that are there already are skipped, and a delivery that would leave a gap is refused. So entries may be
  repeated, and some may be missing.
- Every sampled token has a finite logprob: a delivery with any other is refused, since no loss could use it.
- A turn that has ended is never continued without an observation of the environment, and a reward belongs to exactly
  the tokens that were scored.
- A teacher's logprobs belong to exactly the tokens that have the reward.
- The tokens of a trajectory are of one attempt at its episode. An entry of a later attempt shows that a restart is
  missing: everything but the prompt is dropped first. An entry of an earlier attempt is late, and refused.
- Every trajectory that was drawn is either live, in the batch of a step, or ended, until the store holds it.
- A trajectory of an evaluation is live until the evaluation ends; it is never counted among those that were drawn, and
  a run that is resumed begins the evaluation again.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import numpy as np

from staleflow.stores.in_flight import spool_entries
from staleflow.stores.in_flight.stop_criteria import StopCriteria
from staleflow.stores.trajectories.records import LedgerState
from staleflow.stores.trajectory import (
    AUXILIARY,
    EndedTrajectory,
    EnvSpan,
    FinishReason,
    GroupId,
    PolicyVersion,
    Segment,
    Span,
    Timings,
    Trajectory,
    TrajectoryId,
    is_evaluation,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberInFlight:
    """A trajectory in flight, without its tokens."""

    trajectory: TrajectoryId
    version: PolicyVersion = PolicyVersion(-1)
    """The oldest policy version of its tokens; -1 if it has none."""
    tokens: int = 0
    sampled: bool = False
    """Whether its latest turn is complete."""
    scored: bool = False
    reward: float | None = None
    """None if it has none, or could not be scored."""
    given_tokens: int = 0
    """Number of its tokens that are the environment's observations, as in the store's column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewGroup:
    """A prompt for a new group. The coordinator receives its length, never its text."""

    group: GroupId
    prompt_tokens: int
    source: int = 0
    """Number of its task source."""
    task: int = -1
    """Number of its task in that source; -1: the group's own number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInFlight:
    """A group in flight, without tokens."""

    group: GroupId
    prompt_tokens: int
    members: tuple[MemberInFlight, ...]
    """Members that have not ended; scored ones first, in the order in which they were scored."""
    source: int = 0
    """Number of its task source."""
    task: int = -1
    """Number of its task in that source; -1: the group's own number."""


class LatestRouting(NamedTuple):
    """The latest routing of a trajectory."""

    route_number: int
    num_tokens: int
    """Tokens that it had then."""


@dataclass(slots=True)
class InFlightState:
    """The trajectories of one run that are not in its store. group_size: number of trajectories per group."""

    group_size: int
    num_drawn: int = 0
    """Groups drawn: their numbers are 0 to num_drawn - 1."""
    live: dict[TrajectoryId, Trajectory] = field(default_factory=dict)
    """Trajectories that have not ended."""
    scored: set[TrajectoryId] = field(default_factory=set)
    """Trajectories that have their reward, or whose scoring failed."""
    routings: dict[TrajectoryId, LatestRouting] = field(default_factory=dict)
    """Latest routing of each live trajectory that was routed. Deliveries of an earlier route number are refused."""
    attempts: dict[TrajectoryId, int] = field(default_factory=dict)
    """Number of times that a live trajectory was restarted from its prompt; none if never."""
    turn_limits: dict[TrajectoryId, tuple[int, StopCriteria]] = field(default_factory=dict)
    """Maximum tokens (0: as many as fit) and stop criteria of the current turn, for live trajectories that have an
    observation."""
    batches: dict[int, tuple[Trajectory, ...]] = field(default_factory=dict)
    """Batch of each training step, in the trainer's order, until it is stored."""
    discarded: list[EndedTrajectory] = field(default_factory=list)
    """Trajectories that ended without being trained on, until they are stored."""

    def apply(self, entry: spool_entries.Entry) -> bool:
        """Apply an entry. Returns False if it changes nothing because it is late, repeated, or about an ended
        trajectory."""
        t = self.live.get(entry.trajectory) if isinstance(entry, spool_entries.EpisodeEntry) else None
        if isinstance(entry, spool_entries.EpisodeEntry) and t is not None and entry.attempt != self.attempt(t.id):
            if entry.attempt < self.attempt(t.id):
                return False
            self._restart_from_prompt(t, entry.attempt, self.route_number(t.id))
            self._apply(entry)
            return True
        return self._apply(entry)

    def _apply(self, entry: spool_entries.Entry) -> bool:
        match entry:
            case spool_entries.TokensDelivered():
                return self._deliver(entry)
            case spool_entries.ObservationDelivered():
                return self._observe(entry)
            case spool_entries.EpisodeRestarted():
                return self._restart(entry)
            case spool_entries.RewardDelivered():
                return self._reward(entry)
            case spool_entries.TeacherLogprobsDelivered():
                return self._add_teacher_logprobs(entry)
            case spool_entries.TrajectoriesRouted():
                return self._route(entry)
            case spool_entries.GroupDrawn():
                return self._add_drawn(entry)
            case spool_entries.BatchTaken():
                return self._take_batch(entry)
            case spool_entries.TrajectoriesDiscarded():
                return self._discard(entry)
            case spool_entries.InFlightResumed():
                return self._resume(entry)
            case spool_entries.EvaluationEnded():
                return self._end_evaluation()

    def attempt(self, trajectory: TrajectoryId) -> int:
        """Number of restarts of a live trajectory's episode."""
        return self.attempts.get(trajectory, 0)

    def route_number(self, trajectory: TrajectoryId) -> int:
        """The route number of a trajectory's latest routing; 0 if it was never routed."""
        return self.routings.get(trajectory, LatestRouting(0, 0)).route_number

    def with_tasks(self, ledger: LedgerState, num_counted: int) -> LedgerState:
        """A copy of the ledger state with the tasks of groups in flight, for a run with several task sources.

        num_counted: trajectories started when the ledger state was made.
        """
        tasks_by_group = {t.group: (t.source, t.task) for t in self.live.values() if not is_evaluation(t.id)}
        later_sources = [
            source for group, (source, _) in tasks_by_group.items() if group * self.group_size >= num_counted
        ]
        return replace(
            ledger,
            sources=tuple(
                replace(state, num_drawn=state.num_drawn + later_sources.count(number))
                for number, state in enumerate(ledger.sources)
            ),
            tasks_in_flight=tuple((int(group), *draw) for group, draw in sorted(tasks_by_group.items())),
        )

    def tasks_of(self, groups: Iterable[GroupId]) -> dict[GroupId, tuple[int, int]]:
        """(source, task) of the groups that are in flight."""
        ids = set(groups)
        return {t.group: (t.source, t.task) for t in (*self.live.values(), *self.pending_commit()) if t.group in ids}

    def accepts(self, trajectory: TrajectoryId, route_number: int) -> bool:
        """Whether a delivery under `route_number` is accepted: the trajectory is live, and was not routed again
        since."""
        return trajectory in self.live and route_number >= self.route_number(trajectory)

    def awaits_reply(self, trajectory: TrajectoryId, tokens: int, route_number: int) -> bool:
        """Whether the observation or the reward of a turn is pending: the turn ended at `tokens` under `route_number`,
        and has neither yet."""
        if not self.accepts(trajectory, route_number) or trajectory in self.scored:
            return False
        t = self.live[trajectory]
        return t.num_tokens == tokens and not (t.spans and isinstance(t.spans[-1], EnvSpan))

    def pending_commit(self) -> list[Trajectory]:
        """Trajectories that have ended and are not stored yet."""
        return [*itertools.chain(*self.batches.values()), *(e.trajectory for e in self.discarded)]

    def unstored(self, num_started: int, stored: Iterable[TrajectoryId]) -> list[TrajectoryId]:
        """Ids of trajectories in flight among the first `num_started`, except those in `stored`. num_started: the
        ledger's count, which may lag behind the groups drawn here."""
        ids = set(stored)
        pending = (t.id for t in self.pending_commit() if t.id not in ids)
        return [i for i in (*self.live, *pending) if 0 <= i < num_started]

    def remove_committed(self, trajectories: Iterable[TrajectoryId], step: int | None) -> set[GroupId]:
        """Remove the trajectories that a commit has stored. Returns the groups that have no trajectory in flight any
        more.

        Args:
            trajectories: The stored ones.
            step: The step whose batch was stored.
        """
        ids = set(trajectories)
        if step is not None:
            self.batches.pop(step, None)
        self.discarded = [e for e in self.discarded if e.trajectory.id not in ids]
        self.scored -= ids
        pending = {t.id for t in self.pending_commit()}
        return {
            group
            for group in {GroupId(i // self.group_size) for i in ids}
            if not any(i in self.live or i in pending for i in self.members_of(group))
        }

    def remove_stored(self, ledger: LedgerState) -> None:
        """Remove the trajectories in the store, according to the `ledger` of its last record."""
        live_ids = {i for start, stop in ledger.live for i in range(start, stop)}
        self.num_drawn = max(self.num_drawn, ledger.num_started // self.group_size)

        def is_stored(trajectory: TrajectoryId) -> bool:
            return not is_evaluation(trajectory) and trajectory < ledger.num_started and trajectory not in live_ids

        for trajectory in [i for i in self.live if is_stored(i)]:
            self._drop(trajectory)
        self.batches = {step: batch for step, batch in self.batches.items() if not any(is_stored(t.id) for t in batch)}
        self.discarded = [e for e in self.discarded if not is_stored(e.trajectory.id)]
        self.scored = {i for i in self.scored if not is_stored(i)}

    def lost_trajectories(self, ledger: LedgerState) -> dict[GroupId, list[TrajectoryId]]:
        """Find trajectories that were started but are neither stored nor in flight, because the spool lost them; by
        group."""
        known_ids = {*self.live, *(t.id for t in self.pending_commit())}
        by_group: dict[GroupId, list[TrajectoryId]] = {}
        for start, stop in (*ledger.live, (ledger.num_started, self.num_drawn * self.group_size)):
            for i in range(start, stop):
                if i not in known_ids:
                    by_group.setdefault(GroupId(i // self.group_size), []).append(TrajectoryId(i))
        return by_group

    def add_members(self, members: Iterable[TrajectoryId], entry: spool_entries.GroupDrawn) -> None:
        """Add trajectories of one group, with no tokens but the prompt."""
        for member in members:
            group = GroupId(member // self.group_size)
            self.live[member] = Trajectory(
                id=member,
                group=group,
                prompt_tokens=entry.prompt_tokens,
                timings=Timings(arrived_s=entry.at_s),
                dataset_row=entry.dataset_row,
                source=entry.source,
                task=entry.task,
            )

    def copy_with(self, entry: spool_entries.Entry) -> InFlightState:
        """Return a copy of the state with `entry` applied. Does not change the state."""
        state = InFlightState(**{f.name: copy.copy(getattr(self, f.name)) for f in fields(self)})
        state.apply(entry)
        return state

    def group_summaries(self) -> tuple[GroupInFlight, ...]:
        """All live groups without their tokens, oldest first."""
        groups: dict[GroupId, list[Trajectory]] = {}
        for t in self.live.values():
            if not is_evaluation(t.id):
                groups.setdefault(t.group, []).append(t)
        return tuple(
            GroupInFlight(
                group=group,
                prompt_tokens=len(members[0].prompt_tokens),
                source=members[0].source,
                task=members[0].task,
                members=tuple(
                    self._member_summary(t)
                    for t in sorted(members, key=lambda t: (t.id not in self.scored, t.timings.rewarded_s, t.id))
                ),
            )
            for group, members in sorted(groups.items())
        )

    def _member_summary(self, t: Trajectory) -> MemberInFlight:
        scored = t.id in self.scored
        observations = [span for span in t.spans if isinstance(span, EnvSpan)]
        return MemberInFlight(
            trajectory=t.id,
            version=min((s.version for s in t.segments), default=PolicyVersion(-1)),
            tokens=t.num_tokens,
            sampled=t.finish is not FinishReason.UNFINISHED,
            scored=scored,
            reward=t.reward if scored and not t.error else None,
            given_tokens=sum(len(span.tokens) for span in observations),
        )

    # -- entries -------------------------------------------------------------------------------------------------

    def _add_drawn(self, entry: spool_entries.GroupDrawn) -> bool:
        if is_evaluation(entry.group):
            member = TrajectoryId(entry.group * self.group_size)
            if member in self.live:
                return False
            self.add_members([member], entry)
            return True
        if entry.group < self.num_drawn:
            return False
        self.num_drawn = entry.group + 1
        self.add_members(self.members_of(entry.group), entry)
        return True

    def _route(self, entry: spool_entries.TrajectoriesRouted) -> bool:
        has_changed = False
        for member, route_number in entry.routed:
            t = self.live.get(member)
            if t is not None and route_number >= self.route_number(member):
                self.routings[member] = LatestRouting(route_number, t.num_tokens)
                if not t.timings.routed_s:
                    self.live[member] = replace(t, timings=replace(t.timings, routed_s=entry.at_s))
                has_changed = True
        return has_changed

    def _restart_from_prompt(self, t: Trajectory, attempt: int, route_number: int) -> None:
        """Drop all tokens of a trajectory but its prompt. attempt: number of the new attempt. route_number: deliveries
        under earlier ones are refused."""
        self.live[t.id] = replace(
            t, spans=(), finish=FinishReason.UNFINISHED, reward=0.0, reward_parts={}, error="", teacher_logprobs=None,
            timings=replace(t.timings, rewarded_s=0.0),
        )  # fmt: skip
        self.scored.discard(t.id)
        self.turn_limits.pop(t.id, None)
        self.routings[t.id] = LatestRouting(route_number, 0)
        self.attempts[t.id] = attempt

    def _deliver(self, entry: spool_entries.TokensDelivered) -> bool:
        t = self.live.get(entry.trajectory)
        routing = self.routings.get(entry.trajectory, LatestRouting(0, 0))
        if t is None or not self.accepts(t.id, entry.route_number) or t.finish is not FinishReason.UNFINISHED:
            return False
        num_known = t.num_tokens
        end = entry.start + sum(len(s.tokens) for s in entry.segments)
        # A turn has tokens. An end without any, after an observation, repeats the end of the turn before it.
        ends_turn = entry.finish is not FinishReason.UNFINISHED and not (t.spans and isinstance(t.spans[-1], EnvSpan))
        if entry.start > num_known or end < num_known or (end == num_known and not ends_turn):
            return False
        if any(segment.finite_prefix_length < len(segment.tokens) for segment in entry.segments):
            return False
        spans = list(t.spans)
        skip = num_known - entry.start
        for segment in entry.segments:
            new_segment = segment.drop_first(min(skip, len(segment.tokens)))
            skip -= len(segment.tokens) - len(new_segment.tokens)
            if len(new_segment.tokens):
                _append(spans, new_segment, merge=num_known > routing.num_tokens)
        timings = replace(t.timings, sampled_s=entry.at_s)
        self.live[entry.trajectory] = replace(t, spans=tuple(spans), finish=entry.finish, timings=timings)
        return True

    def _observe(self, entry: spool_entries.ObservationDelivered) -> bool:
        t = self.live.get(entry.trajectory)
        if t is None or t.finish is FinishReason.UNFINISHED or t.num_tokens != entry.start:
            return False
        if t.id in self.scored:
            return False
        observation = EnvSpan(
            role=entry.role,
            tokens=entry.tokens,
            seconds=entry.seconds,
            parent_end=entry.parent_end,
            is_next_turn_auxiliary=entry.is_next_turn_auxiliary,
        )
        self.live[t.id] = replace(t, spans=(*t.spans, observation), finish=FinishReason.UNFINISHED)
        self.turn_limits[t.id] = entry.max_turn_tokens, entry.stop
        return True

    def _restart(self, entry: spool_entries.EpisodeRestarted) -> bool:
        t = self.live.get(entry.trajectory)
        if t is None or entry.route_number < self.route_number(t.id) or t.id in self.scored:
            return False
        self._restart_from_prompt(t, self.attempt(t.id) + 1, entry.route_number + 1)
        return True

    def _reward(self, entry: spool_entries.RewardDelivered) -> bool:
        t = self.live.get(entry.trajectory)
        if t is None or t.num_tokens != entry.num_tokens:
            return False
        self.live[entry.trajectory] = replace(
            t,
            spans=_mask_auxiliary_turns(t.spans),
            reward=entry.reward,
            reward_parts=dict(entry.parts),
            error=entry.error,
            timings=replace(t.timings, rewarded_s=entry.at_s),
        )
        self.scored.add(entry.trajectory)
        return True

    def _add_teacher_logprobs(self, entry: spool_entries.TeacherLogprobsDelivered) -> bool:
        t = self.live.get(entry.trajectory)
        if t is None or t.id not in self.scored or t.teacher_logprobs is not None:
            return False
        if not t.num_tokens == entry.num_tokens == len(entry.logprobs) or not np.isfinite(entry.logprobs).all():
            return False
        self.live[t.id] = replace(t, teacher_logprobs=np.where(t.sampled, entry.logprobs, np.float32(0)))
        return True

    def _take_batch(self, entry: spool_entries.BatchTaken) -> bool:
        if entry.step in self.batches or any(t not in self.live for t in entry.trajectories):
            return False
        members = zip(entry.trajectories, entry.versions, strict=True)
        self.batches[entry.step] = tuple(replace(self._drop(t), v_traj=v) for t, v in members)
        return True

    def _discard(self, entry: spool_entries.TrajectoriesDiscarded) -> bool:
        has_changed = False
        for ending, version in zip(entry.endings, entry.versions, strict=True):
            if ending.trajectory in self.live:
                t = replace(self._drop(ending.trajectory), v_traj=version)
                row = EndedTrajectory(
                    trajectory=t, fate=ending.fate, reason=ending.reason, step=ending.step, loss_mask=False
                )
                self.discarded.append(row)
                has_changed = True
        return has_changed

    def _resume(self, entry: spool_entries.InFlightResumed) -> bool:
        from_prompt = set(entry.from_prompt)
        trajectories = [t for t in (*self.live.values(), *self.pending_commit()) if not is_evaluation(t.id)]
        scored = self.scored
        self.live, self.scored, self.routings, self.attempts, self.batches, self.discarded = {}, set(), {}, {}, {}, []
        self.turn_limits = {}
        for t in sorted(trajectories, key=lambda t: t.id):
            is_older = all(s.version <= entry.version for s in t.segments)
            prompt_only = Trajectory(
                id=t.id,
                group=t.group,
                prompt_tokens=t.prompt_tokens,
                timings=Timings(arrived_s=min(t.timings.arrived_s, entry.at_s)),
                dataset_row=t.dataset_row,
                source=t.source,
                task=t.task,
            )
            if t.id in from_prompt:
                trajectory = prompt_only
            elif is_older and t.id in scored:
                trajectory = replace(t, v_traj=PolicyVersion(-1), timings=_clip_timings(t.timings, entry.at_s))
                self.scored.add(t.id)
            else:
                trajectory = replace(
                    prompt_only,
                    spans=_spans_until(entry.version, t.spans),
                    finish=t.finish if is_older else FinishReason.UNFINISHED,
                    timings=replace(_clip_timings(t.timings, entry.at_s), rewarded_s=0.0),
                )
            self.live[t.id] = trajectory
        return True

    def _end_evaluation(self) -> bool:
        evaluation_trajectories = [i for i in self.live if is_evaluation(i)]
        for trajectory in evaluation_trajectories:
            self._drop(trajectory)
            self.scored.discard(trajectory)
        return bool(evaluation_trajectories)

    def members_of(self, group: GroupId) -> tuple[TrajectoryId, ...]:
        """The trajectories of a group."""
        return tuple(TrajectoryId(i) for i in range(group * self.group_size, (group + 1) * self.group_size))

    def _drop(self, trajectory: TrajectoryId) -> Trajectory:
        self.routings.pop(trajectory, None)
        self.attempts.pop(trajectory, None)
        self.turn_limits.pop(trajectory, None)
        return self.live.pop(trajectory)


def _spans_until(version: PolicyVersion, spans: Sequence[Span]) -> tuple[Span, ...]:
    """The spans before the first one of a later version."""
    return tuple(itertools.takewhile(lambda s: isinstance(s, EnvSpan) or s.version <= version, spans))


def _mask_auxiliary_turns(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The spans of a scored trajectory, with auxiliary turns as env tokens: they have no gradient."""
    result: list[Span] = []
    auxiliary = False
    for span in spans:
        if isinstance(span, EnvSpan):
            auxiliary = span.is_next_turn_auxiliary
            result.append(replace(span, is_next_turn_auxiliary=False))
        else:
            result.append(EnvSpan(role=AUXILIARY, tokens=span.tokens) if auxiliary else span)
    return tuple(result)


def _append(spans: list[Span], segment: Segment, *, merge: bool) -> None:
    """Append a segment; with `merge`, extend the last segment instead if it is of the same version and instance."""
    last_span = spans[-1] if spans and merge else None
    source = (segment.version, segment.instance)
    if isinstance(last_span, Segment) and (last_span.version, last_span.instance) == source:
        spans[-1] = replace(
            last_span,
            tokens=np.concatenate([last_span.tokens, segment.tokens]),
            logprobs=np.concatenate([last_span.logprobs, segment.logprobs]),
        )
    else:
        spans.append(segment)


def _clip_timings(timings: Timings, now_s: float) -> Timings:
    """Limit the times of a trajectory to `now_s`, the time of the resume point: the killed run went on after it."""
    return Timings(**{f.name: min(getattr(timings, f.name), now_s) for f in fields(timings)})
