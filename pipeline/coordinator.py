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

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pipeline.commands import Abort, Command, Draw, Pull, Retire, Route, Score, Train
from pipeline.events import (
    Event,
    GroupsArrived,
    InstanceJoined,
    InstanceLost,
    InstanceReported,
    PullFinished,
    StopRequested,
    Tick,
    TrajectoryFailed,
    TrajectoryInterrupted,
    TrajectorySampled,
    TrajectoryScored,
    VersionPublished,
)
from pipeline.snapshot import InstanceView, Snapshot
from pipeline.state import Instance, LiveTrajectory, Phase
from pipeline.strategies.admission import Admission
from pipeline.strategies.filtering import Filtering
from pipeline.strategies.routing import Routing
from pipeline.strategies.synchronization import LaggingInstance, Synchronization
from stores.errors import ProtocolViolation
from stores.staleness import Ending, EntryState, StalenessLedger
from stores.trajectory import AbortReason, GroupId, InstanceId, PolicyVersion, TrajectoryId

STORY_LINES = 200_000
"""Lines of history kept for `story`: about 40,000 trajectories of five lines each, some tens of megabytes."""

FRESH = 2**62
"""Queue level of work that holds no promise yet: behind everything that does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The strategies a coordinator consults, and its own few numbers."""

    admission: Admission
    routing: Routing
    synchronization: Synchronization
    filtering: Filtering
    max_attempts: int = 3
    """Engine failures or lost instances a trajectory survives."""


class Coordinator:
    """One run's decisions. `validate_each` re-checks the ledger's invariants after every event (O(live))."""

    def __init__(self, ledger: StalenessLedger, policy: Policy, *, validate_each: bool = False) -> None:
        self.ledger = ledger
        self._policy = policy
        self._validate_each = validate_each
        self._live: dict[TrajectoryId, LiveTrajectory] = {}
        self._instances: dict[InstanceId, Instance] = {}
        self._levels: dict[int, deque[TrajectoryId]] = {}
        self._fresh_groups: set[GroupId] = set()
        self._groups_drawn = 0  # asked for and not yet arrived
        self._training = False
        self._stopped = False
        self._num_events = 0
        self._refusals: dict[str, int] = {}
        self._log: deque[tuple[TrajectoryId, float, str, str]] = deque(maxlen=STORY_LINES)
        self._commands: list[Command] = []
        self._now = 0.0
        self._cause = ""
        self._handlers: dict[type, Callable[[Any], None]] = {
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
            Tick: lambda _event: None,
        }

    def handle(self, event: Event, now: float) -> list[Command]:
        """Decide what follows from `event`, heard at `now` seconds. Raises `ProtocolViolation` with the story."""
        self._num_events += 1
        self._now = now
        self._cause = f"{type(event).__name__}#{self._num_events}"
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

    def _on_groups_arrived(self, event: GroupsArrived) -> None:
        self._groups_drawn -= len(event.groups)
        for new in event.groups:
            members = self.ledger.start(new.group)
            self._fresh_groups.add(new.group)
            for member in members:
                self._live[member] = LiveTrajectory(
                    id=member, group=new.group, prompt_tokens=new.prompt_tokens, since=self._now
                )
                self._enqueue(member, FRESH)
                self._note(member, "arrived")

    def _on_instance_joined(self, event: InstanceJoined) -> None:
        self._instances[event.instance] = Instance(
            instance=event.instance,
            version=event.version,
            kv_capacity=event.kv_capacity,
            max_running=event.max_running,
        )

    def _on_instance_lost(self, event: InstanceLost) -> None:
        lost = self._instances.pop(event.instance, None)
        for member in () if lost is None else tuple(lost.trajectories):
            live = self._live.get(member)
            if live is not None:
                self._leave_instance(live)
                live.tokens = live.safe_tokens
                self._requeue(live, f"{event.instance} was lost: {event.why}", failed=True)

    def _on_instance_reported(self, event: InstanceReported) -> None:
        instance = self._instances.get(event.instance)
        if instance is None:
            return
        for member, tokens in event.progress:
            live = self._live.get(member)
            # A report may be older than a later routing; only progress of what still runs here counts, and only up.
            if live is not None and member in instance.trajectories and tokens > live.tokens:
                instance.kv_tokens += tokens - live.tokens
                live.tokens = tokens

    def _on_sampled(self, event: TrajectorySampled) -> None:
        live = self._current(event.trajectory, event.epoch)
        if live is None:
            return
        self._leave_instance(live)
        live.tokens = live.safe_tokens = event.tokens
        self._enter(live, Phase.SCORING, f"sampled, {event.tokens} tokens")
        self._commands.append(Score(trajectory=live.id, cause=self._cause))

    def _on_interrupted(self, event: TrajectoryInterrupted) -> None:
        live = self._current(event.trajectory, event.epoch)
        if live is not None:
            self._leave_instance(live)
            live.tokens = live.safe_tokens = event.tokens
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
        verdict = self._policy.filtering.verdict(rewards)
        if verdict is not None:
            self._retire(self.ledger.filter(live.group, verdict))
        else:
            self._retire(self.ledger.occupy(live.group))

    def _on_pull_finished(self, event: PullFinished) -> None:
        instance = self._instances.get(event.instance)
        if instance is not None and event.version == instance.version:
            instance.pulling = False

    def _on_version_published(self, event: VersionPublished) -> None:
        self.ledger.publish(event.version)
        self._training = False

    def _on_stop_requested(self, event: StopRequested) -> None:
        self._stopped = True
        endings: list[Ending] = []
        for group in tuple(self.ledger.entries):
            endings += self.ledger.abort(group, AbortReason.RUN_ENDED)
        self._retire(endings)

    # -- what to do ----------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        self._train()
        self._synchronize()
        self._draw()
        self._route()

    def _train(self) -> None:
        if self._training or not self.ledger.ready():
            return
        consumption = self.ledger.consume(self.ledger.next_step)
        self._training = True
        versions = tuple(self._live[m].v_traj for m in consumption.members)
        for member in consumption.members:
            self._note(member, f"consumed by step {consumption.step}")
            del self._live[member]
        self._commands.append(
            Train(step=consumption.step, trajectories=consumption.members, versions=versions, cause=self._cause)
        )
        surplus = [e for e in consumption.endings if e.reason is not AbortReason.NONE]
        self._retire(surplus)

    def _synchronize(self) -> None:
        published = self.ledger.version
        for instance in self._instances.values():
            if instance.version >= published or instance.pulling:
                continue
            lagging = LaggingInstance(
                lag=published - instance.version,
                num_running=instance.num_running,
                max_running=instance.max_running,
                can_be_fed=self._can_be_fed(instance),
            )
            if self._policy.synchronization.should_pull(lagging):
                instance.version, instance.pulling = published, True
                self._commands.append(Pull(instance=instance.instance, version=published, cause=self._cause))

    def _draw(self) -> None:
        room = self._policy.admission.room(self.ledger)
        wanted = room - len(self._fresh_groups) - self._groups_drawn
        if wanted > 0 and self._instances:
            self._groups_drawn += wanted
            self._commands.append(Draw(num_groups=wanted, cause=self._cause))

    def _route(self) -> None:
        """Serve the queue level by level, oldest promises first. A level stops at its first trajectory that finds no
        instance: those behind it are of the same version and would find none either."""
        if not any(i.num_running < i.max_running for i in self._instances.values()):
            return
        blocked: set[int] = set()
        # Sending the first member of a fresh group opens a level for its siblings: always go on with the lowest.
        while open_levels := self._levels.keys() - blocked:
            level = min(open_levels)
            queue = self._levels[level]
            if not queue:
                del self._levels[level]
                continue
            live = self._live.get(queue[0])
            if live is None or live.phase is not Phase.QUEUED or self._level_of(live) != level:
                queue.popleft()  # it ended, or moved to another level
                continue
            instance = self._place(live)
            if instance is None:
                blocked.add(level)
                continue
            queue.popleft()
            self._send(live, instance)

    def _place(self, live: LiveTrajectory) -> Instance | None:
        candidates, refusal = [], "no instance"
        for instance in self._instances.values():
            why = self._unfit(live, instance)
            if why is None:
                candidates.append(instance)
            else:
                refusal = why
        if not candidates:
            self._refusals[refusal] = self._refusals.get(refusal, 0) + 1
            return None
        chosen = self._policy.routing.choose(live.kv_tokens, candidates)
        if chosen is None:
            self._refusals["gain too small"] = self._refusals.get("gain too small", 0) + 1
            return None
        return self._instances[chosen]

    def _unfit(self, live: LiveTrajectory, instance: Instance) -> str | None:
        """Why this instance cannot take this trajectory now; None if it can."""
        if instance.num_running >= instance.max_running:
            return "concurrency cap"
        if instance.num_running and instance.kv_tokens + live.kv_tokens > instance.kv_capacity:
            return "KV memory"
        return self._version_refusal(live, instance.version)

    def _version_refusal(self, live: LiveTrajectory, version: PolicyVersion) -> str | None:
        if live.v_traj >= 0:
            return None if version >= live.v_traj else "version too old"
        if self.ledger.entries[live.group].state is EntryState.QUEUED:
            return None if self._policy.admission.refusal(self.ledger, version) is None else "no place under the bound"
        return None if self.ledger.can_reserve(live.group, version) else "version too old for its group"

    def _send(self, live: LiveTrajectory, instance: Instance) -> None:
        level = self._level_of(live)
        if live.v_traj < 0:
            self.ledger.reserve(live.group, live.id, instance.version)
            live.v_traj = instance.version
            self._fresh_groups.discard(live.group)
        live.epoch += 1
        live.instance = instance.instance
        instance.trajectories[live.id] = None
        instance.kv_tokens += live.kv_tokens
        self._enter(live, Phase.RUNNING, f"routed to {instance.instance} at version {instance.version}")
        self._commands.append(
            Route(
                trajectory=live.id,
                epoch=live.epoch,
                instance=instance.instance,
                version=live.v_traj,
                cause=self._cause,
            )
        )
        if self._level_of(live) != level:
            self._move_up(live.group)

    # -- bookkeeping ---------------------------------------------------------------------------------------------

    def _level_of(self, live: LiveTrajectory) -> int:
        version = self.ledger.entries[live.group].version
        return FRESH if version < 0 else version

    def _enqueue(self, member: TrajectoryId, level: int) -> None:
        self._levels.setdefault(level, deque()).append(member)

    def _move_up(self, group: GroupId) -> None:
        """A group got its promise, or an older version: its queued members move to the level of that version."""
        entry = self.ledger.entries[group]
        for member in sorted(entry.waiting):
            if self._live[member].phase is Phase.QUEUED:
                self._enqueue(member, entry.version)

    def _current(self, member: TrajectoryId, epoch: int) -> LiveTrajectory | None:
        """The trajectory an instance's answer is about, or None if the answer is late."""
        live = self._live.get(member)
        return live if live is not None and live.phase is Phase.RUNNING and live.epoch == epoch else None

    def _enter(self, live: LiveTrajectory, phase: Phase, what: str) -> None:
        live.phase, live.since = phase, self._now
        self._note(live.id, what)

    def _leave_instance(self, live: LiveTrajectory) -> None:
        """Take it off the instance it runs on. Before its token count changes: the instance counts with the old one."""
        instance = self._instances.get(live.instance) if live.instance is not None else None
        if instance is not None and live.id in instance.trajectories:
            del instance.trajectories[live.id]
            instance.kv_tokens -= live.kv_tokens
        live.instance = None

    def _requeue(self, live: LiveTrajectory, what: str, *, failed: bool) -> None:
        live.attempts += failed
        if live.attempts > self._policy.max_attempts:
            self._note(live.id, what)
            self._retire(self.ledger.abort(live.group, AbortReason.ENGINE_FAILED, live.id))
            return
        self._enter(live, Phase.QUEUED, what)
        self._enqueue(live.id, self._level_of(live))

    def _retire(self, endings: Iterable[Ending]) -> None:
        """Take ended trajectories out of the live state, stop those that run, and tell the store how they ended."""
        endings = tuple(endings)
        versions = tuple(self._live[e.trajectory].v_traj for e in endings)
        for ending in endings:
            live = self._live[ending.trajectory]
            if live.phase is Phase.RUNNING and live.instance is not None:
                self._commands.append(
                    Abort(trajectory=live.id, epoch=live.epoch, instance=live.instance, cause=self._cause)
                )
                self._leave_instance(live)
            self._fresh_groups.discard(live.group)
            self._note(live.id, f"{ending.fate.value}: {ending.reason.value}")
            del self._live[live.id]
        if endings:
            self._commands.append(Retire(endings=endings, versions=versions, cause=self._cause))

    def _can_be_fed(self, instance: Instance) -> bool:
        """Whether some queued trajectory could go to this instance at the version it serves."""
        for level in sorted(self._levels):
            for member in self._levels[level]:
                live = self._live.get(member)
                if live is not None and live.phase is Phase.QUEUED:
                    if self._version_refusal(live, instance.version) is None:
                        return True
                    break  # the level's others are of the same version
        return False

    def _note(self, member: TrajectoryId, what: str) -> None:
        self._log.append((member, self._now, self._cause, what))

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """All planned steps are trained and published."""
        return self.ledger.version >= self.ledger.num_steps

    @property
    def training(self) -> bool:
        return self._training

    def loads(self) -> dict[InstanceId, int]:
        """Trajectories each instance is taken to be running. O(instances)."""
        return {i.instance: i.num_running for i in self._instances.values()}

    def story(self, trajectory: TrajectoryId) -> list[str]:
        """What happened to a trajectory, in order: one line "time  what  (cause)" each."""
        return [f"{now:9.3f} s  {what}  ({cause})" for who, now, cause, what in self._log if who == trajectory]

    def waiting_for(self, limit: int = 6) -> str:
        """One paragraph for a run that makes no progress: what the next step waits for, and where that is."""
        ledger = self.ledger
        if self._training:
            return f"step {ledger.next_step - 1} is training"
        head = (
            f"step {ledger.next_step} waits for {ledger.groups_per_step - ledger.num_occupied} more of its "
            f"{ledger.groups_per_step} groups; {ledger.num_reserved} are being sampled, "
            f"{len(self._fresh_groups)} queued, {len(self._instances)} instances"
        )
        oldest = sorted(
            (t for t in self._live.values() if t.phase is not Phase.DONE),
            key=lambda t: (self._level_of(t), t.since),
        )[:limit]
        lines = [
            f"group {t.group}, trajectory {t.id}: {t.phase.value} for {self._now - t.since:.1f} s"
            + (f" on {t.instance}" if t.instance is not None else "")
            + f", {t.tokens} tokens, version {t.v_traj}"
            for t in oldest
        ]
        return "\n  ".join([head, *lines])

    def snapshot(self) -> Snapshot:
        """The run as it stands. O(groups + instances)."""
        phases = dict.fromkeys(Phase, 0)
        for live in self._live.values():
            phases[live.phase] += 1
        ages: dict[EntryState, list[int]] = {s: [] for s in EntryState}
        for entry in self.ledger.entries.values():
            ages[entry.state].append(self.ledger.version - entry.version)
        return Snapshot(
            version=self.ledger.version,
            next_step=self.ledger.next_step,
            training=self._training,
            num_queued=phases[Phase.QUEUED],
            num_running=phases[Phase.RUNNING],
            num_scoring=phases[Phase.SCORING],
            num_started=self.ledger.num_started,
            num_live=self.ledger.num_live,
            ended={
                fate.value if reason is AbortReason.NONE else f"{fate.value}:{reason.value}": n
                for (fate, reason), n in self.ledger.num_ended.items()
            },
            staleness_in_flight=_mean(ages[EntryState.RESERVED]),
            staleness_in_queue=_mean(ages[EntryState.OCCUPIED]),
            buffers=self.ledger.view(),
            instances=tuple(
                InstanceView(
                    instance=i.instance,
                    version=i.version,
                    pulling=i.pulling,
                    num_running=i.num_running,
                    max_running=i.max_running,
                    kv_tokens=i.kv_tokens,
                    kv_capacity=i.kv_capacity,
                )
                for i in self._instances.values()
            ),
            refusals=dict(self._refusals),
        )

    def validate(self) -> None:
        """The ledger's invariants, and that the coordinator and the ledger speak of the same trajectories."""
        self.ledger.validate()
        held = {m for e in self.ledger.entries.values() for m in e.members}
        if held != self._live.keys():
            raise ProtocolViolation(f"ledger and coordinator differ about {sorted(held ^ self._live.keys())[:10]}")
        for instance in self._instances.values():
            if instance.kv_tokens != sum(self._live[m].kv_tokens for m in instance.trajectories):
                raise ProtocolViolation(f"{instance.instance} is taken to hold {instance.kv_tokens} KV tokens")
            for member in instance.trajectories:
                live = self._live[member]
                if live.phase is not Phase.RUNNING or live.instance != instance.instance:
                    raise ProtocolViolation(f"{member} is listed on {instance.instance} but {live.phase.value}")
        for live in self._live.values():
            if live.phase is Phase.QUEUED and live.id not in self._levels.get(self._level_of(live), ()):
                raise ProtocolViolation(f"queued trajectory {live.id} stands in no queue")


def _mean(values: list[int]) -> float:
    return sum(values) / len(values) if values else 0.0
