"""Decisions of the coordinator as tables of events and commands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest

from staleflow.pipeline.coordination import decision_log
from staleflow.pipeline.coordination.commands import (
    Abort,
    CloseEnvironment,
    Command,
    Discard,
    FetchPrompts,
    FinishEvaluation,
    Interrupt,
    Pull,
    ReleaseCache,
    Route,
    Score,
    StepEnvironment,
    Train,
)
from staleflow.pipeline.coordination.coordinator import Coordinator
from staleflow.pipeline.coordination.decision_log import DecisionLog
from staleflow.pipeline.coordination.events import (
    DecisionsContinued,
    EnvironmentFailed,
    EnvironmentStepped,
    EvaluationRequested,
    Event,
    GroupsArrived,
    InstanceJoined,
    InstanceLeaving,
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
from staleflow.pipeline.coordination.forecast import LengthForecast
from staleflow.pipeline.coordination.strategy_set import StrategySet
from staleflow.pipeline.strategies.admission import ADMISSION
from staleflow.pipeline.strategies.filtering import FILTERING, STRAGGLERS
from staleflow.pipeline.strategies.migration import MIGRATION
from staleflow.pipeline.strategies.routing import ROUTING
from staleflow.pipeline.strategies.synchronization import SYNCHRONIZATION
from staleflow.stores.errors import ProtocolViolation
from staleflow.stores.in_flight.in_flight_state import GroupInFlight, MemberInFlight, NewGroup
from staleflow.stores.staleness.ledger import StalenessLedger
from staleflow.stores.trajectory import AbortReason, GroupId, InstanceId, PolicyVersion, TrajectoryId
from staleflow.tasks.emulation.cost_model import CostModel
from tests.support.entries import entry

A, B, C = InstanceId("a"), InstanceId("b"), InstanceId("c")


class Bench:
    """A coordinator under test that is validated after every event."""

    def __init__(
        self,
        *,
        eta: int = 1,
        groups: int = 1,
        size: int = 1,
        admission: str = "staleflow",
        filtering: str = "keep_all",
        synchronization: str = "greedy",
        routing: str = "deadline",
        migration: str = "none",
        stragglers: str = "wait",
        straggler_share: float = 1.0,
        max_attempts: int = 1,
        environments: bool = False,
        adapters: bool = False,
        on_pull: str = "interrupt",
        **redundancy: Any,
    ) -> None:
        ledger = StalenessLedger(eta=eta, groups_per_step=groups, group_size=size, **redundancy)
        cost = CostModel(k1=1e-6, k2=0.005, k3=0.0001, k4=0.001, b=0.002, prefill=0.0)
        values = {
            "cost": cost, "eta": eta, "rng": np.random.default_rng(0), "interrupts": on_pull == "interrupt",
        }  # fmt: skip
        strategies = StrategySet(
            admission=ADMISSION.make(entry(ADMISSION, admission), values),
            routing=ROUTING.make(entry(ROUTING, routing), values),
            synchronization=SYNCHRONIZATION.make(entry(SYNCHRONIZATION, synchronization), values),
            filtering=entry(FILTERING, filtering),
            migration=MIGRATION.make(entry(MIGRATION, migration), values),
            step_costs=cost,
            stragglers=entry(STRAGGLERS, stragglers, share=straggler_share),
            max_failures=max_attempts,
            has_environments=environments,
            serves_many_versions=adapters,
        )
        forecast = LengthForecast(100)
        self.coordinator = Coordinator(ledger, strategies, forecast, validate_every_event=True)
        self.now = 0.0
        self.route_numbers: dict[int, int] = {}

    def tell(self, event: Event) -> list[Command]:
        self.now += 1.0
        commands = self.coordinator.handle(event, self.now)
        while self.coordinator.has_more_decisions:
            commands += self.coordinator.handle(DecisionsContinued(), self.now)
        self.route_numbers.update({c.trajectory: c.route_number for c in commands if isinstance(c, Route)})
        return commands

    def join(self, instance: InstanceId = A, version: int = 0, max_running: int = 8, kv: int = 10_000) -> list[Command]:
        return self.tell(
            InstanceJoined(instance=instance, version=PolicyVersion(version), kv_capacity=kv, max_running=max_running)
        )

    def arrive(self, *groups: int, prompt: int = 10) -> list[Command]:
        return self.tell(GroupsArrived(groups=tuple(NewGroup(group=GroupId(g), prompt_tokens=prompt) for g in groups)))

    def sampled(self, trajectory: int, tokens: int = 5) -> list[Command]:
        return self.tell(
            TrajectorySampled(
                trajectory=TrajectoryId(trajectory), route_number=self.route_numbers[trajectory], tokens=tokens
            )
        )

    def scored(self, trajectory: int, reward: float = 1.0, error: str = "") -> list[Command]:
        return self.tell(TrajectoryScored(trajectory=TrajectoryId(trajectory), reward=reward, error=error))

    def finish(self, *trajectories: int) -> list[Command]:
        commands: list[Command] = []
        for trajectory in trajectories:
            self.sampled(trajectory)
            commands = self.scored(trajectory)
        return commands

    def publish(self, version: int) -> list[Command]:
        return self.tell(VersionPublished(version=PolicyVersion(version)))


AnyCommand = TypeVar("AnyCommand")


def commands_of(commands: Iterable[Command], kind: type[AnyCommand]) -> list[AnyCommand]:
    return [c for c in commands if isinstance(c, kind)]


def test_draws_as_many_groups_as_can_be_reserved() -> None:
    bench = Bench(eta=2, groups=4)
    assert commands_of(bench.join(), FetchPrompts)[0].num_groups == 12


def test_no_group_is_drawn_without_an_instance() -> None:
    assert Bench().tell(Tick()) == []


def test_the_life_of_a_trajectory_from_draw_to_training() -> None:
    bench = Bench(eta=0)
    bench.join()
    (route,) = commands_of(bench.arrive(0), Route)
    assert (route.trajectory, route.instance, route.version, route.route_number) == (0, A, 0, 1)
    assert [type(c) for c in bench.sampled(0)] == [Score]
    (train,) = commands_of(bench.scored(0), Train)
    assert (train.step, train.trajectories, train.versions) == (0, (0,), (0,))
    commands = bench.publish(1)
    assert [type(c) for c in commands] == [Pull, FetchPrompts]
    assert bench.coordinator.story(TrajectoryId(0))[-1].split("  ")[-2].strip() == "consumed by step 0"
    decisions = [decision for _, _, decision, _ in bench.coordinator.latest_decisions(3)]
    assert decisions == ["consumed by step 0", "routed to a at version 0"]
    assert len(bench.coordinator.latest_decisions(1)) == 1


def test_all_members_of_a_group_are_routed_before_the_next_group() -> None:
    bench = Bench(eta=0, groups=2, size=3)
    bench.join(max_running=4)
    routes = commands_of(bench.arrive(0, 1), Route)
    assert [r.trajectory for r in routes] == [0, 1, 2, 3]


def test_interrupted_trajectories_are_routed_before_new_ones() -> None:
    bench = Bench(eta=1, groups=2)
    bench.join(max_running=2)
    bench.arrive(0, 1, 2, 3)
    commands = bench.tell(TrajectoryInterrupted(trajectory=TrajectoryId(0), route_number=1, tokens=7))
    assert [r.trajectory for r in commands_of(commands, Route)] == [0]
    assert commands_of(commands, Route)[0].route_number == 2


def test_groups_beyond_the_bound_wait_until_a_version_is_published() -> None:
    bench = Bench(eta=0)
    bench.join()
    bench.arrive(0)
    bench.arrive(1)  # more than requested, so it has to wait
    assert bench.coordinator.snapshot().num_queued == 1
    bench.finish(0)
    assert [r.trajectory for r in commands_of(bench.publish(1), Route)] == [1]


def test_a_late_result_of_an_older_route_is_ignored() -> None:
    bench = Bench(eta=1)
    bench.join()
    bench.arrive(0)
    bench.tell(TrajectoryInterrupted(trajectory=TrajectoryId(0), route_number=1, tokens=3))
    assert bench.tell(TrajectorySampled(trajectory=TrajectoryId(0), route_number=1, tokens=9)) == []
    assert commands_of(bench.sampled(0), Score)


def test_an_old_report_reverts_no_progress() -> None:
    bench = Bench(eta=1)
    bench.join()
    bench.arrive(0)
    bench.tell(InstanceReported(instance=A, progress=((TrajectoryId(0), 6), (TrajectoryId(99), 4))))
    bench.tell(InstanceReported(instance=A, progress=((TrajectoryId(0), 2),)))
    (view,) = bench.coordinator.snapshot().instances
    assert (view.num_running, view.kv_tokens) == (1, 16)


def test_trajectories_of_a_lost_instance_move_and_keep_their_version() -> None:
    bench = Bench(eta=1, groups=2)
    bench.join(A)
    bench.arrive(0, 1)
    bench.join(B)
    commands = bench.tell(InstanceLost(instance=A, why="killed"))
    assert {(r.trajectory, r.instance, r.version) for r in commands_of(commands, Route)} == {(0, B, 0), (1, B, 0)}


def test_an_instance_is_drained_after_it_leaves_and_runs_nothing() -> None:
    bench = Bench()
    bench.join()
    assert not bench.coordinator.is_drained(A), "it is in service"
    bench.arrive(0)
    assert commands_of(bench.tell(InstanceLeaving(instance=A)), Interrupt)
    assert not bench.coordinator.is_drained(A), "its trajectories are in transit"
    bench.tell(TrajectoryInterrupted(trajectory=TrajectoryId(0), route_number=1, tokens=3))
    assert bench.coordinator.is_drained(A)
    assert bench.coordinator.is_drained(B), "the instance is unknown"


def test_the_story_has_drafted_and_accepted_tokens() -> None:
    bench = Bench()
    bench.join()
    bench.arrive(0)
    bench.tell(TrajectoryInterrupted(trajectory=TrajectoryId(0), route_number=1, tokens=3))
    bench.tell(
        TrajectorySampled(
            trajectory=TrajectoryId(0),
            route_number=bench.route_numbers[0],
            tokens=9,
            drafted_tokens=7,
            accepted_tokens=4,
        )
    )
    story = bench.coordinator.story(TrajectoryId(0))
    assert any("interrupted at 3 tokens  (" in line for line in story)
    assert any("sampled, 9 tokens, 4 of 7 drafted tokens accepted  (" in line for line in story)


def test_delivered_tokens_of_a_lost_instance_are_not_sampled_again() -> None:
    bench = Bench(eta=1, groups=2)
    bench.join(A)
    bench.arrive(0, 1)
    zero, one, other = TrajectoryId(0), TrajectoryId(1), TrajectoryId(99)
    bench.tell(InstanceReported(instance=A, progress=((zero, 40), (one, 30)), delivered=((zero, 35), (other, 9))))
    bench.tell(InstanceReported(instance=A, progress=((zero, 50),), delivered=((zero, 20), (one, 31))))
    (view,) = bench.coordinator.snapshot().instances
    assert view.kv_tokens == 10 + 50 + 10 + 31
    bench.join(B)
    assert len(commands_of(bench.tell(InstanceLost(instance=A, why="killed")), Route)) == 2
    (view,) = bench.coordinator.snapshot().instances
    assert view.kv_tokens == 10 + 35 + 10 + 31


def in_flight(group: int, *members: MemberInFlight) -> GroupInFlight:
    return GroupInFlight(group=GroupId(group), prompt_tokens=10, members=members)


def member(trajectory: int, version: int = -1, tokens: int = 0, *, reward: float | None = None) -> MemberInFlight:
    return MemberInFlight(
        trajectory=TrajectoryId(trajectory), version=PolicyVersion(version), tokens=tokens, sampled=reward is not None,
        scored=reward is not None, reward=reward,
    )  # fmt: skip


def test_a_resumed_run_continues_each_trajectory_in_its_phase() -> None:
    bench = Bench(eta=1, groups=1, size=2)
    unscored = replace(member(11, 2, 8), sampled=True)
    groups = (
        in_flight(4, member(9, 1, 9, reward=1.0), member(8, 2, 9, reward=0.0)),
        in_flight(5, member(10, 2, 6), unscored),
        in_flight(6, member(12), member(13)),
    )
    commands = bench.tell(RunResumed(step=2, num_ended=(("consumed:none", 4), ("aborted:run_ended", 4)), groups=groups))
    (train,) = commands_of(commands, Train)
    assert (train.step, train.trajectories, train.versions) == (2, (8, 9), (2, 1))
    assert [c.trajectory for c in commands_of(commands, Score)] == [11]
    assert bench.coordinator.ledger.num_started == 14
    routes = commands_of(bench.join(version=2), Route)
    assert [(r.trajectory, r.route_number, r.version) for r in routes] == [(10, 2, 2)]
    (view,) = bench.coordinator.snapshot().instances
    assert view.kv_tokens == 16
    bench.scored(11)
    bench.sampled(10, 9)
    bench.scored(10)
    commands = bench.publish(3)
    assert [t.trajectories for t in commands_of(commands, Train)] == [(10, 11)]
    assert [(r.trajectory, r.route_number, r.version) for r in commands_of(commands, Route)] == [(12, 1, 3), (13, 1, 3)]


def test_a_recovered_group_without_signal_is_filtered_at_once() -> None:
    bench = Bench(eta=1, groups=1, size=2, filtering="no_signal")
    group = in_flight(0, member(0, 0, 9, reward=1.0), member(1, 0, 9, reward=1.0))
    (retire,) = bench.tell(RunResumed(step=0, num_ended=(), groups=(group,)))
    assert isinstance(retire, Discard)
    assert {(e.trajectory, e.reason) for e in retire.endings} == {
        (0, AbortReason.NO_SIGNAL),
        (1, AbortReason.NO_SIGNAL),
    }
    assert commands_of(bench.join(), FetchPrompts)[0].num_groups == 2


def test_a_resumed_run_repeats_environment_steps_of_sampled_turns() -> None:
    bench = Bench(environments=True)
    commands = bench.tell(
        RunResumed(step=0, num_ended=(), groups=(in_flight(0, replace(member(0, 0, 5), sampled=True)),))
    )
    assert [c.trajectory for c in commands_of(commands, StepEnvironment)] == [0]


def test_a_broken_invariant_is_reported_after_the_event() -> None:
    bench = Bench()
    bench.join()
    bench.arrive(0)
    bench.coordinator._state.live_trajectories[TrajectoryId(0)].delivered_tokens = 1
    with pytest.raises(ProtocolViolation, match="0 has 0 tokens, 1 of them delivered"):
        bench.tell(Tick())


def test_a_resume_with_more_groups_than_entries_raises() -> None:
    bench = Bench(eta=0, groups=1, size=1)
    groups = tuple(in_flight(g, member(g, 0, 3)) for g in (0, 1))
    with pytest.raises(ProtocolViolation, match="group 1 cannot reserve an entry at version 0"):
        bench.tell(RunResumed(step=0, num_ended=(), groups=groups))


def test_a_trajectory_that_fails_repeatedly_ends_its_group() -> None:
    bench = Bench(eta=0, size=2, max_attempts=1)
    bench.join()
    bench.arrive(0)
    for _ in range(2):
        commands = bench.tell(
            TrajectoryFailed(trajectory=TrajectoryId(1), route_number=bench.route_numbers[1], error="out of memory")
        )
    (abort,) = commands_of(commands, Abort)
    assert abort.trajectory == 0
    (retire,) = commands_of(commands, Discard)
    reasons = {e.trajectory: e.reason for e in retire.endings}
    assert reasons == {1: AbortReason.ENGINE_FAILED, 0: AbortReason.GROUP_FAILED}
    assert commands_of(commands, FetchPrompts)[0].num_groups == 1


def test_a_surplus_member_may_fail_alone() -> None:
    bench = Bench(eta=0, size=1, members_started_per_group=2, max_attempts=0)
    bench.join()
    bench.arrive(0)
    commands = bench.tell(TrajectoryFailed(trajectory=TrajectoryId(1), route_number=1, error="x"))
    assert [e.trajectory for e in commands_of(commands, Discard)[0].endings] == [1]
    assert commands_of(bench.finish(0), Train)


def test_a_group_without_signal_is_filtered_and_replaced() -> None:
    bench = Bench(eta=0, size=2, filtering="no_signal")
    bench.join()
    bench.arrive(0)
    commands = bench.finish(0, 1)
    assert {e.reason for e in commands_of(commands, Discard)[0].endings} == {AbortReason.NO_SIGNAL}
    assert commands_of(commands, FetchPrompts)[0].num_groups == 1
    assert not commands_of(commands, Train)


def test_a_failed_reward_is_not_a_zero_reward_for_a_filter() -> None:
    """Next to a reward of one, a reward of zero would be a signal."""
    bench = Bench(eta=0, size=2, filtering="no_signal")
    bench.join()
    bench.arrive(0)
    bench.sampled(0)
    bench.scored(0, 1.0)
    bench.sampled(1)
    commands = bench.scored(1, 0.0, error="it raised")
    assert {e.reason for e in commands_of(commands, Discard)[0].endings} == {AbortReason.NO_SIGNAL}


def test_surplus_members_are_aborted_on_their_instance() -> None:
    bench = Bench(eta=0, size=1, members_started_per_group=2)
    bench.join()
    bench.arrive(0)
    commands = bench.finish(1)
    assert [a.trajectory for a in commands_of(commands, Abort)] == [0]
    assert commands_of(commands, Train)[0].trajectories == (1,)


def test_synchronous_admission_starts_nothing_during_training() -> None:
    bench = Bench(eta=3, admission="synchronous")
    assert commands_of(bench.join(), FetchPrompts)[0].num_groups == 1
    bench.arrive(0)
    commands = bench.finish(0)
    assert commands_of(commands, Train)
    assert not commands_of(commands, FetchPrompts)
    assert commands_of(bench.publish(1), FetchPrompts)[0].num_groups == 1


def test_asynchronous_admission_starts_the_next_batch_during_training() -> None:
    bench = Bench(eta=1)
    bench.join()
    bench.arrive(0, 1)
    assert commands_of(bench.finish(0), Train)
    assert commands_of(bench.tell(Tick()), FetchPrompts) == []  # step 1 is promised to group 1
    commands = bench.publish(1)
    assert commands_of(commands, FetchPrompts)[0].num_groups == 1


def test_greedy_pulls_at_once_and_routes_under_the_new_version() -> None:
    bench = Bench(eta=1)
    bench.join()
    bench.arrive(0, 1)
    bench.finish(0)
    commands = bench.publish(1)
    assert [(p.instance, p.version) for p in commands_of(commands, Pull)] == [(A, 1)]
    assert commands_of(bench.arrive(2), Route)[0].version == 1  # the pull is ordered, the route will find it done
    bench.tell(PullFinished(instance=A, version=PolicyVersion(1)))


@pytest.mark.parametrize(("loaded", "next_pulls"), [(1, [(A, 2)]), (2, [])])
def test_an_instance_pulls_the_newest_version_unless_it_has_loaded_that(
    loaded: int, next_pulls: list[tuple[InstanceId, int]]
) -> None:
    """If no host has the version of a pull any more, the instance loads the newest one."""
    bench = Bench(eta=1)
    bench.join()
    bench.arrive(0, 1)
    bench.finish(0)
    assert commands_of(bench.publish(1), Pull)
    bench.finish(1)
    assert commands_of(bench.publish(2), Pull) == []
    commands = bench.tell(PullFinished(instance=A, version=PolicyVersion(loaded)))
    assert [(p.instance, p.version) for p in commands_of(commands, Pull)] == next_pulls


def four_instances(synchronization: str, on_pull: str = "interrupt") -> tuple[Bench, dict[str, list[int]]]:
    """Return instances a to d with four, three, two and one running trajectories at eta = 3, and these trajectories.
    The next version is ready to be published."""
    bench = Bench(eta=3, groups=4, synchronization=synchronization, on_pull=on_pull)
    running: dict[str, list[int]] = {name: [] for name in "abcd"}
    for name in running:
        bench.join(InstanceId(name))
    for route in commands_of(bench.arrive(*range(16)), Route):
        running[route.instance].append(route.trajectory)
    for number, trajectories in enumerate(running.values()):
        bench.finish(*trajectories[4 - number :])
        del trajectories[4 - number :]
    return bench, running


def pulling_instances(commands: Iterable[Command]) -> list[str]:
    return [pull.instance for pull in commands_of(commands, Pull)]


def test_staggered_pulls_on_the_instances_with_the_least_running_work() -> None:
    bench, _ = four_instances("staggered")
    assert pulling_instances(bench.publish(1)) == ["c", "d"]
    assert pulling_instances(bench.tell(Tick())) == []
    for rule, on_pull in (("staggered", "keep"), ("greedy", "interrupt")):
        assert pulling_instances(four_instances(rule, on_pull)[0].publish(1)) == ["a", "b", "c", "d"]


def test_an_instance_without_running_trajectories_pulls() -> None:
    bench, running = four_instances("staggered")
    bench.publish(1)
    *others, last = running["b"]
    bench.finish(*others)
    assert pulling_instances(bench.sampled(last)) == ["b"]


def test_another_instance_pulls_in_place_of_a_lost_one() -> None:
    bench, _ = four_instances("staggered")
    bench.publish(1)
    bench.tell(InstanceLost(instance=InstanceId("d"), why="gone"))
    assert pulling_instances(bench.tell(Tick())) == ["b"]


def test_kv_memory_and_concurrency_limits_are_respected() -> None:
    bench = Bench(eta=1, groups=4)
    bench.join(max_running=8, kv=25)
    assert len(commands_of(bench.arrive(0, 1, 2, 3, prompt=10), Route)) == 2
    assert bench.coordinator.snapshot().refusals == {"KV memory": 1}


def test_a_stop_ends_everything_in_flight_with_its_reason() -> None:
    bench = Bench(eta=1, groups=2)
    bench.join()
    bench.arrive(0, 1)
    commands = bench.tell(StopRequested(why="test"))
    assert {e.reason for e in commands_of(commands, Discard)[0].endings} == {AbortReason.RUN_ENDED}
    assert len(commands_of(commands, Abort)) == 2
    assert bench.coordinator.snapshot().num_live == 0
    assert bench.tell(Tick()) == []


def test_explain_waiting_names_what_a_stuck_step_waits_for() -> None:
    bench = Bench(eta=0, size=2)
    bench.join()
    bench.arrive(0)
    bench.finish(0)
    text = bench.coordinator.explain_waiting()
    assert "step 0 waits for 1 more" in text
    assert "trajectory 1: running" in text
    assert "on a" in text


def test_a_violation_includes_the_story_of_the_trajectory() -> None:
    bench = Bench(eta=0)
    bench.join()
    bench.arrive(0)
    with pytest.raises(ProtocolViolation, match="version 2 published after 0"):
        bench.publish(2)


def crowded_bench(prompt: int = 10, kv: int = 10_000) -> Bench:
    """Return a bench with 150 trajectories on instance a; instance b has joined later and is empty."""
    bench = Bench(eta=0, groups=150, migration="largest_gain")
    bench.join(A, max_running=200)
    bench.arrive(*range(150), prompt=prompt)
    bench.join(B, max_running=200, kv=kv)
    return bench


def test_trajectories_move_from_a_crowded_to_an_empty_instance() -> None:
    bench = crowded_bench()
    interrupts = commands_of(bench.tell(Tick()), Interrupt)
    assert 0 < len(interrupts) < 150
    assert {i.instance for i in interrupts} == {A}
    first = interrupts[0].trajectory
    (route,) = commands_of(bench.tell(TrajectoryInterrupted(trajectory=first, route_number=1, tokens=3)), Route)
    assert (route.trajectory, route.instance, route.route_number) == (first, B, 2)
    assert any("moves to b" in line for line in bench.coordinator.story(first))
    assert (
        commands_of(bench.tell(Tick()), Interrupt) == []
    )  # the others are on their way, and nothing moves twice a version


@pytest.mark.parametrize(("kv", "num_moved"), [(19, 0), (20, 1), (79, 3)])
def test_only_as_many_trajectories_move_as_fit_by_context(kv: int, num_moved: int) -> None:
    """More would be interrupted without being able to continue."""
    bench = crowded_bench(prompt=20, kv=kv)
    assert len(commands_of(bench.tell(Tick()), Interrupt)) == num_moved


def test_a_moved_trajectory_does_not_move_again_under_the_same_version() -> None:
    bench = crowded_bench()
    moved = sorted(i.trajectory for i in commands_of(bench.tell(Tick()), Interrupt))
    for t in moved:
        bench.tell(TrajectoryInterrupted(trajectory=t, route_number=1, tokens=3))
    bench.tell(InstanceReported(instance=B, progress=tuple((t, 40) for t in moved)))  # it is the slowest one then
    bench.join(C, max_running=200)
    assert commands_of(bench.tell(Tick()), Interrupt) == []


def test_an_eighth_of_the_instances_is_relieved_per_tick_slowest_first() -> None:
    bench = Bench(eta=0, groups=300)
    names = [InstanceId(f"instance {number}") for number in range(16)]
    for name in names[:3]:
        bench.join(name, max_running=200)
    bench.arrive(*range(300))
    for name in names[3:]:
        bench.join(name, max_running=200)
    bench.coordinator._move_planner._migration = MIGRATION.make(
        entry(MIGRATION, "largest_gain"), {"cost": bench.coordinator._move_planner._step_costs}
    )
    relieved = {i.instance for i in commands_of(bench.tell(Tick()), Interrupt)}
    assert relieved == {names[1], names[2]}, "all three have as many"


def test_a_move_to_an_instance_that_filled_up_ends_elsewhere() -> None:
    bench = crowded_bench()
    moved = commands_of(bench.tell(Tick()), Interrupt)[0].trajectory
    bench.tell(InstanceLost(instance=B, why="gone"))
    (route,) = commands_of(bench.tell(TrajectoryInterrupted(trajectory=moved, route_number=1, tokens=3)), Route)
    assert route.instance == A


def bench_with_straggler(**changes: Any) -> Bench:
    """Return a bench whose step 1 waits for trajectory 3 only, on one of two instances."""
    bench = Bench(eta=0, groups=2, stragglers="truncate", **changes)
    bench.join(A)
    bench.arrive(0, 1)
    bench.finish(0, 1)
    bench.publish(1)
    bench.tell(PullFinished(instance=A, version=PolicyVersion(1)))
    bench.join(B, version=1)
    bench.arrive(2, 3)
    bench.finish(2)
    return bench


@pytest.mark.parametrize("instance_lost", [False, True])
def test_a_failed_straggler_is_truncated_in_its_next_attempt(instance_lost: bool) -> None:
    bench = bench_with_straggler(max_attempts=3)
    for attempt in (1, 2):
        place = next(i.instance for i in bench.coordinator.snapshot().instances if i.num_running)
        bench.tell(InstanceReported(instance=place, progress=((TrajectoryId(3), 4),)))
        orders = [o for _ in range(20) for o in commands_of(bench.tell(Tick()), Interrupt)]
        assert [(o.trajectory, bench.route_numbers[3]) for o in orders] == [(3, attempt)]
        if attempt == 1 and instance_lost:
            bench.tell(InstanceLost(instance=place, why="killed"))
        elif attempt == 1:
            bench.tell(TrajectoryFailed(trajectory=TrajectoryId(3), route_number=1, error="x"))
    commands = bench.tell(TrajectoryInterrupted(trajectory=TrajectoryId(3), route_number=2, tokens=4))
    assert [c.trajectory for c in commands_of(commands, Score)] == [3]


def test_a_step_does_not_wait_for_an_aborted_group_at_its_deadline() -> None:
    bench = Bench(eta=1, max_attempts=0)
    bench.join()
    bench.arrive(0, 1)
    bench.finish(0)
    bench.publish(1)
    bench.tell(PullFinished(instance=A, version=PolicyVersion(1)))
    bench.arrive(2)
    assert commands_of(bench.finish(2), Train) == []  # group 1 is due by step 1, group 2 only by step 2
    commands = bench.tell(TrajectoryFailed(trajectory=TrajectoryId(1), route_number=1, error="out of memory"))
    assert [t.trajectories for t in commands_of(commands, Train)] == [(2,)]


@pytest.mark.parametrize(("tokens", "moved_at_version"), [(1, -1), (0, -1), (1, 1)])
def test_the_last_trajectory_of_a_stuck_step_is_truncated_once(tokens: int, moved_at_version: int) -> None:
    """Also one that has moved at this version, which does not end before the step is trained."""
    bench = bench_with_straggler()
    place = next(i.instance for i in bench.coordinator.snapshot().instances if i.num_running)
    bench.tell(InstanceReported(instance=place, progress=((TrajectoryId(3), 4),)))
    bench.coordinator._state.live_trajectories[TrajectoryId(3)].moved_at_version = PolicyVersion(moved_at_version)
    orders: list[Any] = []
    for _ in range(20):
        orders += commands_of(bench.tell(Tick()), Interrupt)
    assert [o.trajectory for o in orders] == [3]
    commands = bench.tell(TrajectoryInterrupted(trajectory=TrajectoryId(3), route_number=1, tokens=tokens))
    assert [c.trajectory for c in commands if isinstance(c, Score if tokens else Route)] == [3]
    if tokens:
        assert commands_of(bench.scored(3), Train)


def test_the_last_trajectory_of_the_first_step_is_truncated() -> None:
    """Groups that no step waits for are not truncated."""
    bench = Bench(eta=0, groups=2, stragglers="truncate")
    bench.join(A)
    bench.arrive(0, 1)
    bench.finish(0)
    bench.tell(InstanceReported(instance=A, progress=((TrajectoryId(1), 4),)))
    bench.coordinator._state.running_means.publish_interval_s.add(1.0)
    bench.arrive(2, 3)
    orders = [o for _ in range(20) for o in commands_of(bench.tell(Tick()), Interrupt)]
    assert [o.trajectory for o in orders] == [1]


def test_of_a_group_with_redundant_members_only_those_it_needs_are_truncated() -> None:
    """All unfinished ones counted, so there were too many to truncate."""
    bench = Bench(eta=0, groups=1, size=4, members_started_per_group=6, stragglers="truncate", straggler_share=0.3)
    bench.join(A)
    bench.arrive(0)
    bench.coordinator._state.running_means.publish_interval_s.add(1.0)
    bench.finish(0, 1, 2)
    bench.tell(InstanceReported(instance=A, progress=tuple((TrajectoryId(i), 4 + (i == 4)) for i in (3, 4, 5))))
    orders = [o for _ in range(20) for o in commands_of(bench.tell(Tick()), Interrupt)]
    assert [o.trajectory for o in orders] == [4]


def test_no_member_is_truncated_if_more_than_the_group_needs_await_their_rewards() -> None:
    bench = Bench(eta=0, groups=1, size=2, members_started_per_group=5, stragglers="truncate", straggler_share=0.9)
    bench.join(A)
    bench.arrive(0)
    bench.coordinator._state.running_means.publish_interval_s.add(1.0)
    for member in (0, 1, 2):
        bench.sampled(TrajectoryId(member), 5)
    bench.tell(InstanceReported(instance=A, progress=tuple((TrajectoryId(i), 4) for i in (3, 4))))
    bench.now += 100.0
    assert [o for _ in range(20) for o in commands_of(bench.tell(Tick()), Interrupt)] == []


def test_a_failed_redundant_member_leaves_the_forecast_of_its_group() -> None:
    bench = Bench(eta=0, groups=1, size=2, members_started_per_group=3, max_attempts=0)
    bench.join(A)
    bench.arrive(0)
    bench.finish(0)
    bench.tell(TrajectoryFailed(trajectory=TrajectoryId(1), route_number=1, error="out of memory"))
    assert set(bench.coordinator.forecast._finished_members) == {0}
    assert commands_of(bench.finish(2), Train)
    assert not bench.coordinator.forecast._finished_members


def test_a_repeated_refusal_is_in_the_story_once() -> None:
    bench = Bench(eta=1, groups=4)
    bench.join(A, max_running=2)
    bench.arrive(*range(4))
    for _ in range(3):
        bench.tell(Tick())
    assert bench.coordinator.snapshot().refusals["concurrency cap"] > 0
    assert [line for line in bench.coordinator.story(TrajectoryId(2)) if "waits" in line][1:] == []
    assert "waits: concurrency cap" in "".join(bench.coordinator.story(TrajectoryId(2)))


def test_the_story_of_a_followed_trajectory_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_log, "MAX_NOTES", 3)
    log = DecisionLog()
    log.follow(TrajectoryId(1))
    for trajectory in (1, 2, 2, 1, 2):
        log.note(TrajectoryId(trajectory), "waits")
    assert log.story(TrajectoryId(1)) == ["    0.000 s  waits  ()"] * 2


def bench_with_environment(**changes: Any) -> Bench:
    """Return a bench with one trajectory whose first turn was sampled on instance a; instance b is idle."""
    bench = Bench(environments=True, size=1, **changes)
    bench.join(A)
    bench.arrive(0)
    bench.sampled(0)
    bench.join(B)
    return bench


def test_an_evaluation_trajectory_that_fails_too_often_closes_its_environment() -> None:
    bench = Bench(environments=True, size=1, max_attempts=0)
    bench.join(A)
    bench.tell(EvaluationRequested(evaluation=0, groups=(NewGroup(group=GroupId(-1), prompt_tokens=10),)))
    assert commands_of(bench.sampled(-1), StepEnvironment)
    trajectory = TrajectoryId(-1)
    bench.tell(EnvironmentStepped(trajectory=trajectory, route_number=bench.route_numbers[-1], tokens=9))
    commands = bench.tell(TrajectoryFailed(trajectory=trajectory, route_number=bench.route_numbers[-1], error="x"))
    assert [c.trajectory for c in commands_of(commands, CloseEnvironment)] == [trajectory]
    assert [c.failed for c in commands_of(commands, FinishEvaluation)] == [(trajectory,)]


def observation_event(bench: Bench) -> list[Command]:
    return bench.tell(EnvironmentStepped(trajectory=TrajectoryId(0), route_number=bench.route_numbers[0], tokens=9))


def test_release_cache_is_sent_once_when_no_turn_follows() -> None:
    for ending in (
        TrajectoryScored(trajectory=TrajectoryId(0), reward=1.0),
        StopRequested(why="enough"),
        EnvironmentFailed(trajectory=TrajectoryId(0), route_number=1, error="x"),
    ):
        bench = bench_with_environment()
        received = [*bench.tell(ending), *bench.tell(StopRequested(why="enough"))]
        assert [(f.trajectory, f.instance) for f in commands_of(received, ReleaseCache)] == [(0, A)]


@pytest.mark.parametrize("lost", [True, False])
def test_an_episode_lost_with_its_host_is_not_a_failure(lost: bool) -> None:
    bench = bench_with_environment(max_attempts=0)
    received = bench.tell(EnvironmentFailed(trajectory=TrajectoryId(0), route_number=1, error="x", lost=lost))
    assert [route.trajectory for route in commands_of(received, Route)] == [0] * lost
    assert len(commands_of(received, Discard)) == (not lost)


def test_release_cache_depends_on_where_the_next_turn_is_routed() -> None:
    bench = bench_with_environment()
    received = [*bench.tell(InstanceLeaving(instance=A)), *observation_event(bench)]
    assert [r.instance for r in commands_of(received, Route)] == [B]
    assert not commands_of([*received, *bench.tell(StopRequested(why="enough"))], ReleaseCache)
    bench = bench_with_environment()
    received = observation_event(bench)
    assert [r.instance for r in commands_of(received, Route)] == [A]
    assert not commands_of([*received, *bench.tell(StopRequested(why="enough"))], ReleaseCache)


def test_cache_of_older_weights_is_not_released_again() -> None:
    bench = bench_with_environment()
    bench.arrive(1)
    assert commands_of(bench.finish(1), Train)
    assert [pull.instance for pull in commands_of(bench.publish(1), Pull)] == [A, B]
    assert not commands_of(bench.scored(0), ReleaseCache)


def test_cache_of_an_adapter_survives_a_pull() -> None:
    """A later turn returns to its instance and version; a cached context without a later turn is released."""
    bench = bench_with_environment(adapters=True, eta=1)
    bench.arrive(1)
    assert commands_of(bench.finish(1), Train)
    assert [pull.instance for pull in commands_of(bench.publish(1), Pull)] == [A, B]
    after_observation = observation_event(bench)
    assert [(r.instance, r.version) for r in commands_of(after_observation, Route) if r.trajectory == 0] == [(A, 0)]
    bench = bench_with_environment(adapters=True, eta=1)
    bench.arrive(1)
    bench.finish(1)
    bench.publish(1)
    assert [(f.trajectory, f.instance) for f in commands_of(bench.scored(0), ReleaseCache)] == [(0, A)]
