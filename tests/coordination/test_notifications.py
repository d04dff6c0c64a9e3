"""Each event notifies the collaborators whose state depends on it. A missing notification would not show in the
commands of the event."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, get_args

import pytest

from staleflow.pipeline.coordination.evaluations import Evaluations
from staleflow.pipeline.coordination.events import (
    DecisionsContinued,
    DecodeStats,
    EnvironmentFailed,
    EnvironmentStepped,
    EvaluationRequested,
    Event,
    GroupsArrived,
    InstanceJoined,
    InstanceLeaving,
    InstanceLost,
    InstanceReported,
    InstanceSlept,
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
from staleflow.pipeline.coordination.forecast import LengthForecast, SampledTokenShare
from staleflow.pipeline.coordination.state_counts import RunningMean, RunningMeans, TruncationCounts
from staleflow.stores.in_flight.in_flight_state import NewGroup
from staleflow.stores.trajectory import GroupId, PolicyVersion, TrajectoryId
from tests.coordination.test_coordinator import A, B, Bench, in_flight, member

COLLABORATORS: dict[type[Any], tuple[str, ...]] = {
    LengthForecast: ("observe", "remove_group"),
    SampledTokenShare: ("observe",),
    Evaluations: ("begin", "pin", "unpin_lost", "count_sampled", "end_trajectory", "close"),
    TruncationCounts: ("count_consumed", "add"),
    RunningMean: ("add",),
}
"""Methods of the coordinator's collaborators that change their state."""
QUESTIONS = {
    LengthForecast: {"expected_remaining_tokens"},
    SampledTokenShare: {"expected_sampled_tokens"},
    Evaluations: {"unpin_idle_instances"},
    TruncationCounts: set(),
    RunningMean: set(),
}
"""Their other methods, whose results show in commands. Released hosts pull or get other work."""

V1 = PolicyVersion(1)
ZERO = TrajectoryId(0)
STEPS = DecodeStats(running=1, kv_tokens=10, seconds=1.0, tokens=4)


Call = tuple[object, str, tuple[Any, ...]]
"""The subject of a call, its method, and its arguments."""


class NotedBench(Bench):
    """A bench that records the collaborator calls of the latest event."""

    noted: ClassVar[list[Call]] = []

    def tell(self, event: Event) -> Any:
        self.noted.clear()
        return super().tell(event)

    def heard(self) -> list[str]:
        """Return the calls of the latest event."""
        return [text for call in self.noted if (text := self._in_words(*call))]

    def _in_words(self, subject: object, name: str, args: tuple[Any, ...]) -> str:
        if isinstance(subject, RunningMean):
            measured = self.coordinator._state.running_means
            means = {id(getattr(measured, field.name)): field.name for field in fields(RunningMeans)}
            return f"{means[id(subject)]}.add({args[0]:g})" if id(subject) in means else ""
        shown = () if isinstance(subject, Evaluations) else args[:2]
        return f"{type(subject).__name__}.{name}({', '.join(f'{value}' for value in shown)})"


def acted(bench: NotedBench) -> NotedBench:
    """The first turn of trajectory 0 is with its environment."""
    bench.join()
    bench.arrive(0)
    bench.sampled(0)
    return bench


def routed(**how: Any) -> Callable[[], NotedBench]:
    """Group 0 runs on one instance."""

    def make() -> NotedBench:
        bench = NotedBench(**how)
        bench.join()
        bench.arrive(0)
        return bench

    return make


def arrived_twice(bench: NotedBench) -> NotedBench:
    bench.join()
    bench.arrive(0, 1)
    return bench


def trained(bench: NotedBench) -> NotedBench:
    """Step 0 trains group 0 while group 1 runs."""
    arrived_twice(bench)
    bench.finish(0)
    return bench


def pulled(bench: NotedBench) -> NotedBench:
    trained(bench)
    bench.publish(1)
    return bench


def evaluation(bench: NotedBench) -> NotedBench:
    bench.join(A)
    bench.tell(EvaluationRequested(evaluation=0, groups=(NewGroup(group=GroupId(-1), prompt_tokens=7),)))
    return bench


def bench_of_two_instances(bench: NotedBench) -> NotedBench:
    bench.join(B)
    return bench


def then_sampled(bench: NotedBench, trajectory: int = 0) -> NotedBench:
    bench.sampled(trajectory)
    return bench


def straggling() -> NotedBench:
    """Step 1 has waited too long for trajectory 3."""
    bench = NotedBench(eta=0, groups=2, stragglers="truncate")
    bench.join()
    bench.arrive(0, 1)
    bench.finish(0, 1)
    bench.publish(1)
    bench.arrive(2, 3)
    bench.finish(2)
    bench.tell(InstanceReported(instance=A, progress=((TrajectoryId(3), 4),)))
    bench.now += 1000.0
    return bench


def cut() -> NotedBench:
    bench = straggling()
    bench.tell(Tick())
    return bench


@dataclass(frozen=True)
class Case:
    """An event in a state and the expected calls. before: creates the state."""

    name: str
    before: Callable[[], NotedBench]
    event: Callable[[NotedBench], Event]
    heard: tuple[str, ...]

    def __str__(self) -> str:
        return self.name


def scored(trajectory: int, error: str = "") -> Callable[[NotedBench], Event]:
    return lambda bench: TrajectoryScored(trajectory=TrajectoryId(trajectory), reward=1.0, error=error)


def sampled(trajectory: int) -> Callable[[NotedBench], Event]:
    return lambda bench: TrajectorySampled(
        trajectory=TrajectoryId(trajectory), route_number=bench.route_numbers[trajectory], tokens=5
    )


CASES = (
    Case(
        "a resumed run has a prompt in flight",
        NotedBench,
        lambda bench: RunResumed(step=0, num_ended=(), groups=(in_flight(0, member(0, 0, 3)),)),
        ("prompt_tokens.add(10)",),
    ),
    Case(
        "groups arrive",
        routed(eta=1),
        lambda bench: GroupsArrived(groups=(NewGroup(group=GroupId(1), prompt_tokens=30),)),
        ("prompt_tokens.add(30)",),
    ),
    Case(
        "an evaluation is requested",
        routed(eta=1),
        lambda bench: EvaluationRequested(evaluation=0, groups=(NewGroup(group=GroupId(-1), prompt_tokens=7),)),
        ("Evaluations.begin()", "Evaluations.pin()"),
    ),
    Case(
        "an instance joins",
        NotedBench,
        lambda bench: InstanceJoined(instance=A, version=PolicyVersion(0), kv_capacity=100, max_running=2),
        (),
    ),
    Case(
        "an instance is lost",
        routed(eta=1, max_attempts=3),
        lambda bench: InstanceLost(instance=A, why="killed"),
        ("Evaluations.unpin_lost()",),
    ),
    Case(
        "one of two instances is lost",
        lambda: bench_of_two_instances(routed(eta=1, max_attempts=3)()),
        lambda bench: InstanceLost(instance=B, why="killed"),
        ("Evaluations.unpin_lost()",),
    ),
    Case(
        "the last attempt of a trajectory is lost with its instance",
        routed(eta=1, max_attempts=0),
        lambda bench: InstanceLost(instance=A, why="killed"),
        ("LengthForecast.remove_group(0)", "Evaluations.unpin_lost()"),
    ),
    Case(
        "an instance leaves", routed(eta=1), lambda bench: InstanceLeaving(instance=A), ()
    ),
    Case(
        "an instance reports what it has decoded",
        routed(eta=1),
        lambda bench: InstanceReported(instance=A, progress=((ZERO, 4),), steps=STEPS),
        (),
    ),
    Case(
        "a trajectory is sampled",
        routed(eta=1),
        sampled(0),
        ("Evaluations.count_sampled()", "LengthForecast.observe(0, 5)"),
    ),
    Case(
        "a turn is sampled", routed(eta=1, environments=True), sampled(0), ()
    ),
    Case(
        "an evaluation's trajectory is sampled: by other rules, so no length is learned",
        lambda: evaluation(NotedBench(eta=1)),
        sampled(-1),
        ("Evaluations.count_sampled()",),
    ),
    Case(
        "a trajectory is interrupted",
        routed(eta=1),
        lambda bench: TrajectoryInterrupted(trajectory=ZERO, route_number=1, tokens=3),
        (),
    ),
    Case(
        "a trajectory fails for good",
        routed(eta=1, max_attempts=0),
        lambda bench: TrajectoryFailed(trajectory=ZERO, route_number=1, error="x"),
        ("LengthForecast.remove_group(0)",),
    ),
    Case(
        "an environment answers",
        lambda: acted(NotedBench(eta=1, environments=True)),
        lambda bench: EnvironmentStepped(trajectory=ZERO, route_number=1, tokens=9),
        (),
    ),
    Case(
        "an environment fails for good",
        lambda: acted(NotedBench(eta=1, environments=True, max_attempts=0)),
        lambda bench: EnvironmentFailed(trajectory=ZERO, route_number=1, error="x"),
        ("LengthForecast.remove_group(0)",),
    ),
    Case(
        "a reward completes the batch",
        lambda: then_sampled(routed(eta=1)()),
        scored(0),
        ("LengthForecast.remove_group(0)", "TruncationCounts.count_consumed(1)"),
    ),
    Case(
        "an episode ends, and with it the batch is complete",
        lambda: acted(NotedBench(eta=1, environments=True)),
        scored(0),
        (
            "LengthForecast.observe(0, 5)", "SampledTokenShare.observe(5, 0)", "Evaluations.count_sampled()",
            "LengthForecast.remove_group(0)", "TruncationCounts.count_consumed(1)",
        ),
    ),
    Case(
        "a reward completes a group without signal",
        lambda: then_sampled(routed(eta=1, filtering="no_signal")()),
        scored(0),
        ("LengthForecast.remove_group(0)",),
    ),
    Case(
        "the last reward of an evaluation",
        lambda: then_sampled(evaluation(NotedBench(eta=1)), -1),
        scored(-1),
        ("Evaluations.end_trajectory()", "Evaluations.close()"),
    ),
    Case(
        "a pull is finished",
        lambda: pulled(NotedBench(eta=1)),
        lambda bench: PullFinished(instance=A, version=V1),
        (),
    ),
    Case(
        "an instance has freed its GPUs",
        lambda: trained(NotedBench(eta=1)),
        lambda bench: InstanceSlept(instance=A, step=0),
        (),
    ),
    Case(
        "a version is published",
        lambda: trained(NotedBench(eta=1)),
        lambda bench: VersionPublished(version=V1),
        ("publish_interval_s.add(5)",),
    ),
    Case(
        "a stop ends what is in flight",
        lambda: arrived_twice(NotedBench(eta=1)),
        lambda bench: StopRequested(why="test"),
        ("LengthForecast.remove_group(0)", "LengthForecast.remove_group(1)"),
    ),
    Case(
        "a stop ends an evaluation",
        lambda: evaluation(NotedBench(eta=1)),
        lambda bench: StopRequested(why="test"),
        ("Evaluations.close()", "LengthForecast.remove_group(-1)"),
    ),
    Case("routing goes on after its limit", routed(eta=1), lambda bench: DecisionsContinued(), ()),
    Case("time passes", routed(eta=1), lambda bench: Tick(), ()),
    Case(
        "a straggler is told to end",
        straggling,
        lambda bench: Tick(),
        ("TruncationCounts.add(1)",),
    ),
    Case(
        "a straggler ends by itself before it could be cut off",
        cut,
        sampled(3),
        ("Evaluations.count_sampled()", "TruncationCounts.add(-1)", "LengthForecast.observe(3, 5)"),
    ),
)  # fmt: skip


def recording(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def record(self: object, *args: Any, **kwargs: Any) -> Any:
        NotedBench.noted.append((self, method.__name__, args))
        return method(self, *args, **kwargs)

    return record


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_event_notifies_every_listed_collaborator(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    for cls, names in COLLABORATORS.items():
        for name in names:
            monkeypatch.setattr(cls, name, recording(getattr(cls, name)))
    bench = case.before()
    bench.tell(case.event(bench))
    assert sorted(bench.heard()) == sorted(case.heard)


def test_every_event_and_every_collaborator_method_is_in_the_table() -> None:
    assert {type(case.event(case.before())) for case in CASES} == set(get_args(Event))
    heard = {call.partition("(")[0] for case in CASES for call in case.heard}
    expected = {f"{cls.__name__}.{name}" for cls, names in COLLABORATORS.items() for name in names}
    means = {f"{field.name}.add" for field in fields(RunningMeans)}
    assert heard == (expected - {"RunningMean.add"}) | means


def test_collaborator_methods_are_classified_as_updates_or_queries() -> None:
    for cls, names in COLLABORATORS.items():
        public = {name for name, _ in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")}
        assert public == {*names, *QUESTIONS[cls]}, cls
