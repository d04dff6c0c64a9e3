"""Random events in any order, also late, repeated or about unknown ids. All invariants hold after each event, and every
trajectory ends exactly once within the staleness bound."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.pipeline.config import factories, loading
from staleflow.pipeline.coordination.commands import (
    Abort,
    Command,
    Discard,
    FetchPrompts,
    Interrupt,
    Pull,
    Route,
    Score,
    Train,
)
from staleflow.pipeline.coordination.events import (
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
from staleflow.pipeline.strategies.admission import ADMISSION
from staleflow.pipeline.strategies.filtering import STRAGGLERS
from staleflow.pipeline.strategies.routing import ROUTING
from staleflow.pipeline.strategies.synchronization import SYNCHRONIZATION
from staleflow.stores.in_flight.in_flight_state import NewGroup
from staleflow.stores.trajectory import GroupId, InstanceId, PolicyVersion, TrajectoryId
from tests.support.entries import table
from tests.support.examples import num_examples

NAMES = tuple(InstanceId(name) for name in "abcd")
NUM_EVENTS = 400


class RandomRun:
    """A run whose instances reply late, twice, out of order, or not at all."""

    def __init__(self, tree: dict[str, Any], seed: int) -> None:
        self.coordinator = factories.make_coordinator(loading.from_tree(tree), validate_every_event=True)
        self.rng = random.Random(seed)
        self.now = 0.0
        self.pending: list[Event] = []
        self.answered: list[Event] = []
        self.next_group = 0
        self.ended: set[TrajectoryId] = set()
        self.names = [*NAMES]
        self.route_numbers: dict[TrajectoryId, int] = {}

    def run(self) -> None:
        for name in NAMES[:2]:
            self.tell(self.joined(name))
        for _ in range(NUM_EVENTS):
            if self.coordinator.is_finished:
                break
            if self.pending and self.rng.random() < 0.75:
                event = self.pending.pop(self.rng.randrange(len(self.pending)))
                self.answered.append(event)
            else:
                event = self.unexpected()
            self.tell(event)
        self.tell(StopRequested(why="the life is over"))
        assert len(self.ended) == self.coordinator.ledger.num_started
        assert not any(self.coordinator.num_running_by_instance().values())

    def tell(self, event: Event) -> None:
        self.now += 0.3 * self.rng.random()
        for command in self.coordinator.handle(event, self.now):
            self.obey(command)

    def joined(self, name: InstanceId) -> InstanceJoined:
        kv_capacity, max_running = self.rng.choice([60, 500, 4000]), self.rng.choice([2, 8, 30])
        version = self.coordinator.ledger.version
        return InstanceJoined(instance=name, version=version, kv_capacity=kv_capacity, max_running=max_running)

    def unexpected(self) -> Event:
        rng, name = self.rng, self.rng.choice(self.names)
        match rng.randrange(8):
            case 0:
                self.names.append(InstanceId(f"{name}.{len(self.names)}"))
                return self.joined(self.names[-1])
            case 1 if rng.random() < 0.4:
                return InstanceLost(instance=name, why="killed")
            case 2 | 3:
                progress = [(TrajectoryId(t), rng.randint(0, 60)) for t in rng.sample(range(60), 15)]
                delivered = [(TrajectoryId(t), rng.randint(0, 70)) for t in rng.sample(range(60), 15)]
                return InstanceReported(instance=name, progress=tuple(progress), delivered=tuple(delivered))
            case 4:
                version = min(rng.randrange(4), self.coordinator.ledger.version)  # only published ones are loaded
                return PullFinished(instance=name, version=PolicyVersion(version))
            case 5:
                return TrajectoryScored(trajectory=TrajectoryId(rng.randrange(60)), reward=1.0)
            case 6:
                again = [e for e in self.answered[-50:] if not isinstance(e, (GroupsArrived, VersionPublished))]
                return rng.choice(again) if again else Tick()
            case _:
                return Tick()

    def obey(self, command: Command) -> None:
        rng = self.rng
        match command:
            case FetchPrompts():
                groups = range(self.next_group, self.next_group + command.num_groups)
                self.next_group = groups.stop
                new = tuple(NewGroup(group=GroupId(g), prompt_tokens=rng.randint(1, 20)) for g in groups)
                self.pending.append(GroupsArrived(groups=new))
            case Route(trajectory=t, route_number=e):
                self.route_numbers[t] = e
                outcomes: list[Event] = [
                    TrajectorySampled(trajectory=t, route_number=e, tokens=rng.randint(1, 60)),
                    TrajectoryInterrupted(trajectory=t, route_number=e, tokens=rng.randint(0, 20)),
                    TrajectoryFailed(trajectory=t, route_number=e, error="x"),
                ]
                self.pending.append(rng.choices(outcomes, weights=[80, 14, 6])[0])
            case Interrupt(trajectory=t):
                e = self.route_numbers[t]
                self.pending.append(TrajectoryInterrupted(trajectory=t, route_number=e, tokens=rng.randint(0, 30)))
            case Score(trajectory=t):
                error = "" if rng.random() < 0.9 else "no answer"
                self.pending.append(TrajectoryScored(trajectory=t, reward=float(rng.random() < 0.5), error=error))
            case Pull():
                self.pending.append(PullFinished(instance=command.instance, version=command.version))
            case Train():
                bound = self.coordinator.ledger.eta
                assert all(v <= command.step <= v + bound for v in command.versions)
                self.end(command.trajectories)
                self.pending.append(VersionPublished(version=PolicyVersion(command.step + 1)))
            case Discard():
                self.end(tuple(ending.trajectory for ending in command.endings))
            case Abort():
                assert command.trajectory not in self.ended  # its Retire follows

    def end(self, trajectories: tuple[TrajectoryId, ...]) -> None:
        assert not self.ended & set(trajectories)
        self.ended |= set(trajectories)


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    """Return jobs with any combination of strategies and redundancy."""
    eta = draw(st.integers(0, 3))
    stragglers = draw(st.sampled_from(STRAGGLERS.names))
    return {
        "steps": 5,
        "batch": {
            "groups_per_step": draw(st.integers(1, 5)),
            "group_size": draw(st.integers(2, 3)),
            "extra_groups": draw(st.integers(0, 2)),
            "extra_members": draw(st.integers(0, 2)),
            "filtering": draw(st.sampled_from(["keep_all", "no_signal"])),
            "stragglers": table(STRAGGLERS, stragglers, patience=0.1, share=1.0),
        },
        "staleness": {"eta": eta, "admission": draw(st.sampled_from(ADMISSION.names))},
        "rollout": {
            "max_new_tokens": 100,
            "max_attempts": draw(st.sampled_from([0, 1, 5])),
            "routing": draw(st.sampled_from(ROUTING.names)),
            "synchronization": draw(st.sampled_from(SYNCHRONIZATION.names)),
            "migration": draw(st.sampled_from(["none", "largest_gain"])),
            "engine": {"name": "emulated", "max_running": 16, "kv_tokens": 4000},
        },
    }


@given(tree=jobs(), seed=st.integers(0, 10**6))
@settings(max_examples=max(60, num_examples() // 2), deadline=None)
def test_random_events_in_any_order_keep_every_invariant(tree: dict[str, Any], seed: int) -> None:
    RandomRun(tree, seed).run()
