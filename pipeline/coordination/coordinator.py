"""The brain: turns what happened into what to do next, and touches nothing else.

`handle(event, now)` is the only way in and its list of commands the only way out; there is no clock, no randomness and
no input or output, so a recorded list of events gives the same commands again. It owns the ledger: strategies propose,
the coordinator vets what they propose against the protocol, and counts every refusal with its reason.

State is *speculative*: a command is taken to have landed the moment it is given. A report that was sent before the
command landed can therefore contradict it; membership (what runs where) is changed by commands and by answers to them,
never by reports, and answers carry the epoch of the routing they belong to, so late ones are recognised and ignored.

A trajectory's phases:

    QUEUED --Route--> RUNNING --TrajectorySampled--> SCORING --TrajectoryScored--> DONE --occupy, consume--> ended
       ^                 |
       +-- interrupted, failed (up to max_attempts), instance lost
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pipeline.coordination.commands import Abort, Command, Draw, Interrupt, Pull, Retire, Route, Score, Train
from pipeline.coordination.events import (
    Event,
    GroupsArrived,
    InstanceJoined,
    InstanceLost,
    InstanceReported,
    PullFinished,
    RunResumed,
    StopRequested,
    Tick,
    TrajectoryFailed,
    TrajectoryInterrupted,
    TrajectorySampled,
    TrajectoryScored,
    VersionPublished,
)
from pipeline.coordination.fleet import Instance
from pipeline.coordination.forecast import LengthForecast
from pipeline.coordination.history import History
from pipeline.coordination.moves import Move, Moves
from pipeline.coordination.pacing import Pacing
from pipeline.coordination.placement import Placement
from pipeline.coordination.pulls import Pulls
from pipeline.coordination.snapshot import Snapshot
from pipeline.coordination.state import CoordinatorState
from pipeline.coordination.trajectories import LiveTrajectory, Phase
from pipeline.coordination.work_queue import FRESH
from pipeline.strategies.admission import Admission
from pipeline.strategies.filtering import Filtering, Stragglers
from pipeline.strategies.migration import Migration
from pipeline.strategies.routing import Routing
from pipeline.strategies.synchronization import Synchronization
from stores.errors import ProtocolViolation
from stores.staleness import Ending, StalenessLedger
from stores.trajectory import AbortReason, Fate, GroupId, InstanceId, PolicyVersion, TrajectoryId


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategies:
    """The strategies a coordinator consults, and its own few numbers."""

    admission: Admission
    routing: Routing
    synchronization: Synchronization
    filtering: Filtering
    migration: Migration
    stragglers: Stragglers = Stragglers()
    max_attempts: int = 3
    """Engine failures or lost instances a trajectory survives."""


class Coordinator:
    """One run's decisions. `validate_each` re-checks the ledger's invariants after every event (O(live))."""

    def __init__(
        self,
        ledger: StalenessLedger,
        strategies: Strategies,
        forecast: LengthForecast,
        pacing: Pacing,
        *,
        validate_each: bool = False,
    ) -> None:
        self.ledger = ledger
        self.forecast = forecast
        self._state = CoordinatorState(ledger)
        # The same objects, by shorter names.
        self._live, self._fleet = self._state.live, self._state.fleet
        self._waiting, self._fresh_groups = self._state.waiting, self._state.fresh_groups
        self._measured = self._state.measured
        self._pacing = pacing
        self._strategies = strategies
        self._validate_each = validate_each
        self._groups_drawn = 0  # asked for and not yet arrived
        self._stopped = False
        self._num_events = 0
        self._history = History()
        self._placement = Placement(self._state, strategies.admission, strategies.routing, forecast, pacing)
        self._pulls = Pulls(self._state, strategies.synchronization, self._placement)
        self._moves = Moves(self._state, strategies.migration, strategies.stragglers, forecast, self._placement, pacing)
        self._commands: list[Command] = []
        # What the event at hand has changed: a decision is only made again when something it rests on has.
        self._batch_changed = self._room_changed = self._routing_changed = False
        self._loads_changed: dict[InstanceId, Instance] = {}
        self._all_loads_changed = False
        self._published_s = 0.0
        self._pull_ordered_s: dict[InstanceId, float] = {}
        self._idle_since: float | None = 0.0  # None while a step is being trained
        self._handlers: dict[type, Callable[[Any], None]] = {
            RunResumed: self._on_run_resumed,
            GroupsArrived: self._on_groups_arrived,
            InstanceJoined: self._on_instance_joined,
            InstanceLost: self._on_instance_lost,
            InstanceReported: self._on_instance_reported,
            TrajectorySampled: self._on_sampled,
            TrajectoryInterrupted: self._on_interrupted,
            TrajectoryFailed: self._on_failed,
            TrajectoryScored: self._on_scored,
            PullFinished: self._on_pull_finished,
            VersionPublished: self._on_version_published,
            StopRequested: self._on_stop_requested,
            Tick: self._on_tick,
        }

    def handle(self, event: Event, now: float) -> list[Command]:
        """Decide what follows from `event`, heard at `now` seconds. Raises `ProtocolViolation` with the story."""
        self._num_events += 1
        self._history.now = now
        self._history.cause = f"{type(event).__name__}#{self._num_events}"
        self._commands = []
        try:
            self._handlers[type(event)](event)
            if not self._stopped:
                self._plan()
            if self._validate_each:
                self.validate()
        except ProtocolViolation as violation:
            subject = getattr(event, "trajectory", None)
            story = "" if subject is None else "\n" + "\n".join(self.story(subject))
            raise ProtocolViolation(f"{violation} (while handling {event}){story}") from violation
        return self._commands

    # -- what happened -------------------------------------------------------------------------------------------

    def _on_run_resumed(self, event: RunResumed) -> None:
        parted = ((key.partition(":"), count) for key, count in event.num_ended)
        self.ledger.resume(event.step, {(Fate(fate), AbortReason(why)): n for (fate, _, why), n in parted})
        self._idle_since = self._published_s = self._now

    def _on_groups_arrived(self, event: GroupsArrived) -> None:
        self._groups_drawn -= len(event.groups)
        for new in event.groups:
            self._measured.prompt_tokens.add(new.prompt_tokens)
            members = self.ledger.start(new.group)
            self._fresh_groups.add(new.group)
            for member in members:
                live = LiveTrajectory(id=member, group=new.group, prompt_tokens=new.prompt_tokens, since=self._now)
                self._live[member] = live
                self._waiting.enter(live, FRESH)
                self._history.note(member, "arrived")
        self._routing_changed = True

    def _on_instance_joined(self, event: InstanceJoined) -> None:
        if self._fleet.get(event.instance) is not None:  # it started anew before its end was noticed
            self._on_instance_lost(InstanceLost(instance=event.instance, why="it joined anew"))
        self._fleet.join(event.instance, event.version, event.kv_capacity, event.max_running)
        self._replan()
        self._room_changed = self._routing_changed = self._all_loads_changed = True

    def _on_instance_lost(self, event: InstanceLost) -> None:
        lost = self._fleet.lose(event.instance)
        for member in () if lost is None else tuple(lost.trajectories):
            live = self._live.get(member)
            if live is not None:
                self._leave_instance(live)
                live.tokens = live.safe_tokens
                self._requeue(live, f"{event.instance} was lost: {event.why}", failed=True)
        self._replan()

    def _on_instance_reported(self, event: InstanceReported) -> None:
        instance = self._fleet.get(event.instance)
        if instance is None:
            return
        least_tokens: dict[PolicyVersion, int] = {}  # by version: the one that has most before it is the most urgent
        for member, tokens in event.progress:
            live = self._live.get(member)
            # A report may be older than a later routing; only progress of what still runs here counts, and only up.
            if live is not None and member in instance.trajectories:
                if tokens > live.tokens:
                    instance.kv_tokens += tokens - live.tokens
                    live.tokens = tokens
                version = self.ledger.entries[live.group].version
                if live.tokens < least_tokens.get(version, FRESH):
                    least_tokens[version] = live.tokens
        if self._strategies.routing.knows_urgency:
            paces_s = [
                self._pacing.pace_s(self.ledger.deadline(version), GroupId(-1), tokens, self._now)
                for version, tokens in least_tokens.items()
            ]
            instance.pace_s = min(paces_s, default=math.inf)
            self._routing_changed = True
        self._fleet.touch(instance)

    def _on_sampled(self, event: TrajectorySampled) -> None:
        live = self._current(event.trajectory, event.epoch)
        if live is None:
            return
        self._leave_instance(live)
        self._arrive(live)
        live.tokens = live.safe_tokens = event.tokens
        self.forecast.finished(live.group, event.tokens, live.forecast)
        self._score(live, f"sampled, {event.tokens} tokens")

    def _on_interrupted(self, event: TrajectoryInterrupted) -> None:
        live = self._current(event.trajectory, event.epoch)
        if live is None:
            return
        self._leave_instance(live)
        live.tokens = live.safe_tokens = event.tokens
        if live.cut and event.tokens > 0:
            self._score(live, f"cut off at {event.tokens} tokens")
        else:
            live.cut = False
            self._requeue(live, f"interrupted at {event.tokens} tokens", failed=False)

    def _on_failed(self, event: TrajectoryFailed) -> None:
        live = self._current(event.trajectory, event.epoch)
        if live is not None:
            self._leave_instance(live)
            live.tokens = live.safe_tokens
            self._requeue(live, f"failed: {event.error}", failed=True)

    def _on_scored(self, event: TrajectoryScored) -> None:
        live = self._live.get(event.trajectory)
        if live is None or live.phase is not Phase.SCORING:
            return
        live.reward = None if event.error else event.reward
        self._enter(live, Phase.DONE, f"reward {event.reward:g}" + (f", {event.error}" if event.error else ""))
        if not self.ledger.complete(live.group, live.id):
            return
        entry = self.ledger.entries[live.group]
        rewards = [r for m in entry.completed if (r := self._live[m].reward) is not None]
        verdict = self._strategies.filtering.verdict(rewards)
        if verdict is not None:
            self._retire(self.ledger.filter(live.group, verdict))
        else:
            self._retire(self.ledger.occupy(live.group))
        self._batch_changed = True

    def _on_pull_finished(self, event: PullFinished) -> None:
        instance = self._fleet.get(event.instance)
        if instance is not None and event.version == instance.version:
            instance.pulling = False
            ordered_s = self._pull_ordered_s.pop(event.instance, self._now)
            self._measured.pull_s.add(self._now - ordered_s)
            self._loads_changed[event.instance] = instance

    def _on_version_published(self, event: VersionPublished) -> None:
        self.ledger.publish(event.version)
        self._state.training, self._idle_since = False, self._now
        self._measured.interval_s.add(self._now - self._published_s)
        self._published_s = self._now
        self._pacing.step_finished(self._now)
        self._replan()
        self._batch_changed = self._room_changed = self._routing_changed = self._all_loads_changed = True

    def _on_stop_requested(self, event: StopRequested) -> None:
        self._stopped = True
        endings: list[Ending] = []
        for group in tuple(self.ledger.entries):
            endings += self.ledger.abort(group, AbortReason.RUN_ENDED)
        self._retire(endings)

    def _on_tick(self, event: Tick) -> None:
        self._routing_changed = self._all_loads_changed = True
        if not self._stopped:
            waited_s = 0.0 if self._idle_since is None else self._now - self._idle_since
            for move in self._moves.rescues(waited_s):
                self._order(move)
            for move in self._moves.migrations(self._now):
                self._order(move)

    # -- what to do ----------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        if self._batch_changed:
            self._train()
        if self._all_loads_changed or self._loads_changed:
            self._synchronize()
        if self._room_changed:
            self._draw()
        if self._routing_changed:
            self._route()
        self._batch_changed = self._room_changed = self._routing_changed = False

    def _train(self) -> None:
        if self._state.training or not self.ledger.ready():
            return
        consumption = self.ledger.consume(self.ledger.next_step)
        self._state.training, self._idle_since = True, None
        self._pacing.step_started(consumption.step, self._now)
        versions = tuple(self._live[m].v_traj for m in consumption.members)
        for member in consumption.members:
            self._history.note(member, f"consumed by step {consumption.step}")
            del self._live[member]
        for group in consumption.groups:
            self.forecast.forget(group)
        self._commands.append(
            Train(step=consumption.step, trajectories=consumption.members, versions=versions, cause=self._history.cause)
        )
        self._room_changed = self._routing_changed = True
        surplus = [e for e in consumption.endings if e.reason is not AbortReason.NONE]
        self._retire(surplus)

    def _synchronize(self) -> None:
        looked_at = list(self._fleet if self._all_loads_changed else self._loads_changed.values())
        self._loads_changed, self._all_loads_changed = {}, False
        for instance in self._pulls.due(looked_at, self._now):
            instance.version, instance.pulling = self.ledger.version, True
            self._fleet.touch(instance)
            self._pull_ordered_s[instance.instance] = self._now
            self._routing_changed = True
            self._commands.append(Pull(instance=instance.instance, version=instance.version, cause=self._history.cause))

    def _draw(self) -> None:
        room = self._strategies.admission.room(self.ledger)
        wanted = room - len(self._fresh_groups) - self._groups_drawn
        if wanted > 0 and len(self._fleet):
            self._groups_drawn += wanted
            self._commands.append(Draw(num_groups=wanted, cause=self._history.cause))

    def _route(self) -> None:
        """Serve the queue level by level, oldest promises first. A level stops at its first trajectory that finds no
        instance: those behind it are of the same version and would find none either."""
        blocked: set[int] = set()
        # Sending the first member of a fresh group opens a level for its siblings: always go on with the lowest.
        while True:
            level = next((one for one in self._waiting.levels() if one not in blocked), None)
            if level is None:
                return
            live = self._waiting.head(level)
            place = self._placement.place(live, self._now)
            if isinstance(place, str):
                self._history.refused(live, place)
                blocked.add(level)
            else:
                self._waiting.leave(live)
                self._send(live, place)

    def _send(self, live: LiveTrajectory, instance: Instance) -> None:
        pace_s = self._placement.pace_s(live, self._now)
        before = self.ledger.entries[live.group].version
        if live.v_traj < 0:
            self.ledger.reserve(live.group, live.id, instance.version)
            live.v_traj = instance.version
            live.forecast = self.forecast.expected_remaining(live.group, 0)
            self._fresh_groups.discard(live.group)
        live.epoch += 1
        self._arrive(live)
        live.instance, live.refused = instance.instance, ""
        instance.trajectories[live.id] = None
        instance.kv_tokens += live.kv_tokens
        instance.pace_s = min(instance.pace_s, pace_s)
        self._fleet.touch(instance)
        self._enter(live, Phase.RUNNING, f"routed to {instance.instance} at version {instance.version}")
        self._commands.append(
            Route(
                trajectory=live.id,
                epoch=live.epoch,
                instance=instance.instance,
                version=live.v_traj,
                cause=self._history.cause,
            )
        )
        if self.ledger.entries[live.group].version != before:
            self._move_up(live.group)

    # -- bookkeeping ---------------------------------------------------------------------------------------------

    @property
    def _now(self) -> float:
        return self._history.now

    def _replan(self) -> None:
        caps = [i.max_running for i in self._fleet]
        if caps:
            self._pacing.replan(len(caps), max(caps), self._measured.prompt_tokens.value)

    def _move_up(self, group: GroupId) -> None:
        """A group got its promise, or an older version: its queued members move to the level of that version."""
        entry = self.ledger.entries[group]
        for member in sorted(entry.waiting):
            live = self._live[member]
            if live.phase is Phase.QUEUED:
                self._waiting.leave(live)
                self._waiting.enter(live, entry.version)

    def _current(self, member: TrajectoryId, epoch: int) -> LiveTrajectory | None:
        """The trajectory an instance's answer is about, or None if the answer is late."""
        live = self._live.get(member)
        return live if live is not None and live.phase is Phase.RUNNING and live.epoch == epoch else None

    def _enter(self, live: LiveTrajectory, phase: Phase, what: str) -> None:
        live.phase, live.since = phase, self._now
        self._history.note(live.id, what)

    def _score(self, live: LiveTrajectory, what: str) -> None:
        self._enter(live, Phase.SCORING, what)
        self._commands.append(Score(trajectory=live.id, cause=self._history.cause))

    def _order(self, move: Move) -> None:
        """Take a trajectory off its instance, to go on elsewhere or to be scored as it is."""
        live, target = move.live, move.target
        live.moved_at = self.ledger.version
        if target is None:
            live.cut = True
        else:
            live.target = target.instance
            move.source.in_transit += 1
            target.in_transit += 1
        self._history.note(live.id, move.why)
        self._commands.append(
            Interrupt(trajectory=live.id, epoch=live.epoch, instance=move.source.instance, cause=self._history.cause)
        )

    def _arrive(self, live: LiveTrajectory) -> None:
        """It is no longer on its way, wherever it ended up."""
        target, live.target = self._fleet.get(live.target), None
        if target is not None:
            target.in_transit -= 1

    def _leave_instance(self, live: LiveTrajectory) -> None:
        """Take it off the instance it runs on. Before its token count changes: the instance counts with the old one."""
        instance = self._fleet.get(live.instance)
        if instance is not None and live.id in instance.trajectories:
            del instance.trajectories[live.id]
            instance.kv_tokens -= live.kv_tokens
            if live.target is not None:
                instance.in_transit -= 1
            if not instance.trajectories:
                instance.pace_s = math.inf
            self._fleet.touch(instance)
            self._loads_changed[instance.instance] = instance
            self._routing_changed = True
        live.instance = None

    def _requeue(self, live: LiveTrajectory, what: str, *, failed: bool) -> None:
        live.attempts += failed
        if live.attempts > self._strategies.max_attempts:
            self._history.note(live.id, what)
            self._retire(self.ledger.abort(live.group, AbortReason.ENGINE_FAILED, live.id))
            return
        self._enter(live, Phase.QUEUED, what)
        version = self.ledger.entries[live.group].version
        self._waiting.enter(live, FRESH if version < 0 else version)
        self._routing_changed = True

    def _retire(self, endings: Iterable[Ending]) -> None:
        """Take ended trajectories out of the live state, stop those that run, and tell the store how they ended."""
        endings = tuple(endings)
        versions = tuple(self._live[e.trajectory].v_traj for e in endings)
        for ending in endings:
            live = self._live[ending.trajectory]
            if live.phase is Phase.RUNNING and live.instance is not None:
                self._commands.append(
                    Abort(trajectory=live.id, epoch=live.epoch, instance=live.instance, cause=self._history.cause)
                )
                self._leave_instance(live)
            self._waiting.leave(live)
            self._arrive(live)
            self._fresh_groups.discard(live.group)
            self.forecast.forget(live.group)
            self._history.note(live.id, f"{ending.fate.value}: {ending.reason.value}")
            del self._live[live.id]
        if endings:
            self._room_changed = self._routing_changed = True
            self._commands.append(Retire(endings=endings, versions=versions, cause=self._history.cause))

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """All planned steps are trained and published."""
        return self.ledger.version >= self.ledger.num_steps

    @property
    def training(self) -> bool:
        return self._state.training

    def loads(self) -> dict[InstanceId, int]:
        """Trajectories each instance is taken to be running. O(instances)."""
        return {i.instance: i.num_running for i in self._fleet}

    def follow(self, trajectory: TrajectoryId) -> None:
        """Remember this trajectory's story only, however long the run. Before its first event."""
        self._history.follow(trajectory)

    def story(self, trajectory: TrajectoryId) -> list[str]:
        """What happened to a trajectory, in order: one line "time  what  (cause)" each."""
        return self._history.story(trajectory)

    def latest(self, count: int) -> list[tuple[float, int, str, str]]:
        """The last decisions: (when, trajectory, what, cause), newest first."""
        return self._history.latest(count)

    def waiting_for(self, limit: int = 6) -> str:
        """One paragraph for a run that makes no progress: what the next step waits for, and where that is."""
        return self._state.waiting_for(self._now, limit)

    def snapshot(self) -> Snapshot:
        """The run as it stands. O(groups + instances)."""
        return self._state.snapshot(self._history.refusals, self.forecast.error)

    def validate(self) -> None:
        """The ledger's invariants, and that the coordinator and the ledger speak of the same trajectories."""
        self._state.validate()
