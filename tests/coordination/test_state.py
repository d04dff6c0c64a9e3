"""The coordinator's state: methods keep every invariant, `validate` detects each violation, nothing else writes."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from staleflow.pipeline.coordination.fleet import Fleet, Instance
from staleflow.pipeline.coordination.invariants import validate
from staleflow.pipeline.coordination.mixture import Mixture, MixtureSource
from staleflow.pipeline.coordination.phases import Phase, Transition
from staleflow.pipeline.coordination.snapshot import explain_waiting, take_snapshot
from staleflow.pipeline.coordination.state import CoordinatorState
from staleflow.pipeline.coordination.trajectories import LiveTrajectory
from staleflow.pipeline.coordination.work_queue import WorkQueue
from staleflow.pipeline.strategies.samplers import InOrder
from staleflow.stores.errors import ProtocolViolation
from staleflow.stores.in_flight.in_flight_state import NewGroup
from staleflow.stores.staleness.ledger import StalenessLedger
from staleflow.stores.trajectory import AbortReason, Fate, GroupId, InstanceId, PolicyVersion, TrajectoryId
from tests.coordination.state_dumps import dump_state

A, B = InstanceId("a"), InstanceId("b")


def busy_state() -> CoordinatorState:
    """Return a state with a trajectory in every phase: 0 runs on a, 1 moves from a to b, 2 is scored, 3 is done, 4 and
    5 are queued with a reservation, 6 to 8 without."""
    state = CoordinatorState(StalenessLedger(eta=1, groups_per_step=2, group_size=3))
    state.now = 1.0
    for name in (A, B):
        state.add_instance(name, PolicyVersion(0), 1000, 8)
    state.request_groups(3)
    state.add_groups([NewGroup(group=GroupId(g), prompt_tokens=10) for g in range(3)])
    for t in range(4):
        send(state, t)
    state.record_progress(state.fleet[0], [(TrajectoryId(t), 2 + t) for t in range(3)])
    state.start_move(live(state, 1), state.fleet[1])
    for t in (2, 3):
        state.finish_sampling(live(state, t), 20)
    state.record_reward(live(state, 3), 1.0)
    validate(state)
    return state


def live(state: CoordinatorState, trajectory: int) -> LiveTrajectory:
    return state.live_trajectories[TrajectoryId(trajectory)]


def send(state: CoordinatorState, trajectory: int, index: int = 0) -> None:
    state.route(live(state, trajectory), state.fleet[index])


# -- invariants --------------------------------------------------------------------------------------------------


def move_in_arrays(state: CoordinatorState) -> None:
    state.fleet._numbers[1, 0] += 1


def swap_instances(state: CoordinatorState) -> None:
    state.fleet._instances.reverse()


def list_elsewhere(state: CoordinatorState) -> None:
    for instance, tokens in ((state.fleet[0], -12), (state.fleet[1], 12)):
        instance.kv_tokens += tokens
        state.fleet._update(instance)
    del state.fleet[0].trajectories[TrajectoryId(0)]
    state.fleet[1].trajectories[TrajectoryId(0)] = None
    for instance in state.fleet:
        state.fleet._update(instance)


def list_ended(state: CoordinatorState) -> None:
    state.fleet[1].trajectories[TrajectoryId(99)] = None
    state.fleet._update(state.fleet[1])


def count_wrong(state: CoordinatorState) -> None:
    state.fleet[0].kv_tokens += 5
    state.fleet._update(state.fleet[0])


def drop_from_queue(state: CoordinatorState) -> None:
    state.queue.remove(live(state, 6), live(state, 6).queue_level)


def wrong_level(state: CoordinatorState) -> None:
    state.queue.remove(live(state, 6), live(state, 6).queue_level)
    state.queue.append(live(state, 6), 0)


def queue_twice(state: CoordinatorState) -> None:
    state.queue.append(live(state, 6), 0)


BREAKS: dict[str, tuple[Callable[[CoordinatorState], object], str]] = {
    "trajectory forgotten": (lambda s: s.live_trajectories.pop(TrajectoryId(6)), "differ about"),
    "trajectory of no group": (
        lambda s: s.live_trajectories.update({TrajectoryId(77): dataclasses.replace(live(s, 6), id=TrajectoryId(77))}),
        "differ about",
    ),
    "ledger loses a member": (lambda s: s.ledger.live_groups[GroupId(2)].unfinished.clear(), "live"),
    "phase changed": (lambda s: setattr(live(s, 0), "phase", Phase.SCORING), "0 is scoring but not listed"),
    "instance changed": (lambda s: setattr(live(s, 0), "instance", B), "0 is running but not listed"),
    "instance kept": (lambda s: setattr(live(s, 2), "instance", InstanceId("gone")), "2 is scoring on gone"),
    "done and not completed": (lambda s: setattr(live(s, 2), "phase", Phase.DONE), "2 is done, its group has"),
    "completed and not done": (lambda s: setattr(live(s, 3), "phase", Phase.SCORING), "3 is scoring, its group has"),
    "version without a routing": (lambda s: setattr(live(s, 6), "v_traj", PolicyVersion(0)), "was routed 0 times"),
    "routing without a version": (lambda s: setattr(live(s, 2), "v_traj", PolicyVersion(-1)), "version -1"),
    "routed without an route_number": (lambda s: setattr(live(s, 2), "route_number", 0), "was routed 0 times"),
    "more safe than sampled": (lambda s: setattr(live(s, 4), "delivered_tokens", 3), "3 of them delivered"),
    "cut off after it left": (
        lambda s: setattr(live(s, 4), "is_being_truncated", True),
        "4 is being truncated but queued",
    ),
    "moved after it was sampled": (
        lambda s: setattr(live(s, 2), "move_target", InstanceId("c")),
        "moving to c but scoring",
    ),
    "tokens not counted": (lambda s: setattr(live(s, 0), "tokens", 40), "KV tokens"),
    "counted too much": (count_wrong, "KV tokens"),
    "arrays out of date": (move_in_arrays, "but the arrays have"),
    "version out of date": (lambda s: setattr(s.fleet[0], "version", PolicyVersion(3)), "but the arrays have"),
    "instances swapped": (swap_instances, "has index"),
    "instance without an id": (lambda s: s.fleet._by_id.pop(B), "by id and by index differ"),
    "versions in service out of date": (
        lambda s: s.fleet.distinct_versions().append(PolicyVersion(7)),
        "list of served versions",
    ),
    "listed on another instance": (list_elsewhere, "0 is running but not listed"),
    "listed after its end": (list_ended, "have ended"),
    "move not counted": (lambda s: setattr(s.fleet[1], "num_moves", 0), "b: 0 moves counted, 1 found"),
    "move counted twice": (lambda s: setattr(s.fleet[0], "num_moves", 2), "a: 2 moves counted, 1 found"),
    "move forgotten": (lambda s: setattr(live(s, 1), "move_target", None), "moves counted, 0 found"),
    "promise not noted": (lambda s: s.unreserved_groups.add(GroupId(0)), "unreserved groups differ"),
    "promise noted too early": (lambda s: s.unreserved_groups.clear(), "unreserved groups differ"),
    "queued and not waiting": (drop_from_queue, "queued and waiting differ"),
    "waiting in another level": (wrong_level, "queued and waiting differ"),
    "waiting in two levels": (queue_twice, "queued and waiting differ"),
    "level forgotten": (lambda s: setattr(live(s, 6), "queue_level", 0), "queued and waiting differ"),
    "phase not counted": (lambda s: s.num_in_phase.update([Phase.SCORING]), "by phase"),
    "training without a batch": (lambda s: setattr(s, "is_training", True), "training is True"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_validate_detects_each_broken_invariant(name: str) -> None:
    state = busy_state()
    breaks, message = BREAKS[name]
    state.fleet.distinct_versions()
    breaks(state)
    with pytest.raises(ProtocolViolation, match=message):
        validate(state)


def test_invalid_fleet_operations_raise_and_change_nothing() -> None:
    state = busy_state()
    before = dump_state(state)
    with pytest.raises(ProtocolViolation, match="a joins twice"):
        state.add_instance(A, PolicyVersion(0), 1000, 8)
    with pytest.raises(ProtocolViolation, match="removed with 2 trajectories on it"):
        state.remove_instance(state.fleet[0])
    with pytest.raises(ProtocolViolation, match="at version 0 is to pull 0"):
        state.start_pull(state.fleet[1])
    with pytest.raises(ProtocolViolation, match="already moving"):
        state.start_move(live(state, 1), None)
    with pytest.raises(ProtocolViolation, match="started twice"):
        state.add_groups([NewGroup(group=GroupId(1), prompt_tokens=3)])
    with pytest.raises(ProtocolViolation, match="its batch is not ready"):
        state.consume()
    with pytest.raises(ProtocolViolation, match="published after"):
        state.publish(PolicyVersion(1))
    assert dump_state(state) == before


# -- verbs -------------------------------------------------------------------------------------------------------


def changes(state: CoordinatorState) -> tuple[bool, list[str], bool, bool]:
    """Return the replan flags: batch, instances with pulls, capacity, routing."""
    loads = [item.id for item in state.pop_pull_candidates()]
    return state.pop_batch_changed(), list(loads), state.pop_admission_changed(), state.pop_routing_changed()


NOTED: dict[str, tuple[Callable[[CoordinatorState], object], tuple[bool, list[str], bool, bool]]] = {
    "add_groups": (lambda s: s.add_groups([NewGroup(group=GroupId(9), prompt_tokens=3)]), (False, [], False, True)),
    "pass_time": (lambda s: s.flag_timed_decisions(), (False, [A, B], False, True)),
    "join": (lambda s: s.add_instance(InstanceId("c"), PolicyVersion(0), 9, 9), (False, [A, B, "c"], True, True)),
    "remove_instance": (lambda s: s.remove_instance(s.fleet[1]), (False, [], False, False)),
    "send": (lambda s: send(s, 4, index=1), (False, [], False, False)),
    "refuse": (lambda s: s.record_refusal(live(s, 6), "KV memory"), (False, [], False, False)),
    "start_move": (lambda s: s.start_move(live(s, 0), None), (False, [], False, False)),
    "finish_sampling": (lambda s: s.finish_sampling(live(s, 0), 9), (False, [A], False, True)),
    "interrupt": (lambda s: s.requeue_interrupted(live(s, 1), 9), (False, [A], False, True)),
    "fail": (lambda s: s.requeue_failed(live(s, 1), Transition.FAILED), (False, [A], False, True)),
    "score": (lambda s: s.record_reward(live(s, 2), 0.5), (False, [], False, False)),
    "record_progress": (lambda s: s.record_progress(s.fleet[0], [(TrajectoryId(0), 50)]), (False, [], False, False)),
    "finish_pull": (lambda s: s.finish_pull(s.fleet[1], s.fleet[1].version), (False, [B], False, False)),
    "abort": (lambda s: s.abort(GroupId(2), AbortReason.ENGINE_FAILED, TrajectoryId(6)), (True, [], True, True)),
    "draw": (lambda s: s.request_groups(2), (False, [], False, False)),
}


@pytest.mark.parametrize("verb", NOTED)
def test_operations_keep_the_invariants_and_set_the_replan_flags(verb: str) -> None:
    state = busy_state()
    changes(state)
    act, expected = NOTED[verb]
    act(state)
    validate(state)
    assert changes(state) == expected
    assert changes(state) == (False, [], False, False)


def test_a_batch_sets_replan_flags_from_scoring_to_pull() -> None:
    state = CoordinatorState(StalenessLedger(eta=1, groups_per_step=1, group_size=2, members_started_per_group=3))
    state.now = 1.0
    state.add_instance(A, PolicyVersion(0), 1000, 8)
    state.add_groups([NewGroup(group=GroupId(0), prompt_tokens=10)])
    changes(state)
    for t in range(3):
        send(state, t)
    for t in range(2):
        state.finish_sampling(live(state, t), 5)
    changes(state)
    assert not state.record_reward(live(state, 0), 1.0)
    assert changes(state) == (False, [], False, False)
    assert state.record_reward(live(state, 1), 0.0)
    assert changes(state) == (True, [], False, False)
    (surplus,) = state.occupy(GroupId(0))
    assert (surplus.ending.trajectory, surplus.running_instance) == (2, A)
    assert changes(state) == (True, [A], True, True)
    state.now = 4.0
    assert state.trainer_waited_s == 4.0
    batch, discarded = state.consume()
    assert (batch.step, batch.members, batch.versions, discarded) == (0, (0, 1), (0, 0), ())
    assert (state.is_training, state.trainer_waited_s, len(state.live_trajectories)) == (True, 0.0, 0)
    assert changes(state) == (False, [], True, True)
    validate(state)
    state.publish(PolicyVersion(1))
    assert changes(state) == (True, [A], True, True)
    state.start_pull(state.fleet[0])
    assert (state.fleet[0].version, state.fleet[0].is_pulling) == (1, True)
    assert changes(state) == (False, [], False, True)
    validate(state)


def test_siblings_share_the_level_of_their_group_and_a_move_counts_on_both_instances() -> None:
    state = busy_state()
    assert len(state.unreserved_groups) == 1
    send(state, 6, index=1)
    assert {t.id: level for level, t in state.queue} == {4: 0, 5: 0, 7: 0, 8: 0}
    assert [item.num_moves for item in state.fleet] == [1, 1]
    state.requeue_interrupted(live(state, 1), 9)
    assert [item.num_moves for item in state.fleet] == [0, 1]
    send(state, 1, index=1)
    assert [item.num_moves for item in state.fleet] == [0, 0]
    assert len(state.unreserved_groups) == 0
    validate(state)


def test_a_failed_trajectory_returns_to_its_delivered_tokens() -> None:
    state = busy_state()
    state.requeue_interrupted(live(state, 0), 9)
    send(state, 0, index=1)
    state.record_progress(state.fleet[1], [(TrajectoryId(0), 30)])
    assert state.fleet[1].kv_tokens == 40
    assert state.requeue_failed(live(state, 0), Transition.INSTANCE_LOST) == 1
    assert (live(state, 0).tokens, live(state, 0).delivered_tokens) == (9, 9)
    assert state.fleet[1].kv_tokens == 0
    validate(state)


def test_a_new_state_has_zero_times() -> None:
    state = CoordinatorState(StalenessLedger(eta=1, groups_per_step=2, group_size=3))
    assert (state.now, state.trainer_waited_s, state.is_training, state.num_requested_groups) == (0.0, 0.0, False, 0)


def test_a_snapshot_counts_the_trajectories_of_each_phase() -> None:
    """Trajectories 0 to 2 are next to be trained, 3 is done, 4 is scored, 6 runs at version 1; three versions were
    published."""
    state = busy_state()
    send(state, 4)
    state.ledger.version = PolicyVersion(1)
    state.start_pull(state.fleet[1])
    send(state, 6, 1)
    for member in (0, 1, 4):
        state.finish_sampling(live(state, member), 20)
    assert [state.record_reward(live(state, member), 0.0) for member in (0, 1, 2)] == [False, False, True]
    state.occupy(GroupId(0))
    state.ledger.version = PolicyVersion(3)
    view = take_snapshot(state, {"KV memory": 2})
    phases = (view.num_queued, view.num_running, view.num_in_environment, view.num_scoring)
    assert phases == (3, 1, 0, 1)
    assert (view.version, view.next_step, view.training, view.num_started, view.num_live) == (3, 0, False, 9, 9)
    assert (view.staleness_in_flight, view.staleness_in_queue) == (2.5, 3.0)
    assert (view.evaluated_version, view.num_eval_in_flight, view.refusals) == (-1, 0, {"KV memory": 2})
    empty = take_snapshot(CoordinatorState(StalenessLedger(eta=1, groups_per_step=2, group_size=3)), {})
    assert (empty.staleness_in_flight, empty.staleness_in_queue, empty.num_queued, empty.ended) == (0.0, 0.0, 0, {})


def test_explain_waiting_starts_with_the_oldest_version() -> None:
    """Then those without a reservation; among equals, the longest in their phase."""
    state = busy_state()
    state.now = 9.0
    state.requeue_interrupted(live(state, 1), 5)
    lines = explain_waiting(state, 7).splitlines()
    assert [int(line.partition("trajectory ")[2].partition(":")[0]) for line in lines[1:]] == [0, 2, 4, 5, 1, 6, 7]
    assert lines[0] == "step 0 waits for 2 more of its 2 groups; 2 are being sampled, 1 queued, 2 instances"
    assert lines[1] == "  group 0, trajectory 0: running for 8.0 s on a, 2 tokens, version 0"


def test_with_device_turns_a_step_waits_until_its_instances_sleep() -> None:
    state = busy_state()
    for instance in state.fleet:
        state.start_sleep(instance)
    state.ledger.next_step = 3
    assert explain_waiting(state, 7) == "step 2 waits until a, b sleep"


def test_a_mixture_counts_a_group_when_its_last_member_ends() -> None:
    counted: list[Any] = []

    class RecordingMixture(Mixture):
        def count_ended(self, endings: Mapping[GroupId, tuple[Fate, AbortReason]]) -> None:
            counted.append(dict(endings))

    mixture = RecordingMixture([MixtureSource(name="a", ratio=1.0, sampler=InOrder())], 0)
    ledger = StalenessLedger(eta=1, groups_per_step=1, group_size=1, members_started_per_group=2)
    state = CoordinatorState(ledger, mixture=mixture)
    state.now = 1.0
    mixture.draw(1)
    state.add_groups([NewGroup(group=GroupId(0), prompt_tokens=10)])
    for member in (0, 1):
        state.abort(GroupId(0), AbortReason.ENGINE_FAILED, TrajectoryId(member))
    assert counted == [{}, {GroupId(0): (Fate.ABORTED, AbortReason.ENGINE_FAILED)}]


# -- one owner ---------------------------------------------------------------------------------------------------


def methods(of: type, but: type = object) -> set[str]:
    """Return the public methods of a class that another class does not have, without properties."""
    own = {name for name, _ in inspect.getmembers(of, inspect.isfunction) if not name.startswith("_")}
    return own - set(dir(but))


TRAJECTORY_FIELDS = {f.name for f in dataclasses.fields(LiveTrajectory)}
INSTANCE_FIELDS = {f.name for f in dataclasses.fields(Instance)}
OWNERS_OF_DICTS = {"trajectories": "fleet", "live_trajectories": "state"}
LEDGER_VERBS = {"resume", "start", "reserve", "complete", "occupy", "consume", "abort", "filter", "publish"}
STATE_VERBS = methods(CoordinatorState) - {"get_running", "get_in_environment", "queue_level"}
STATE_FIELDS = set(vars(CoordinatorState(StalenessLedger(eta=1, groups_per_step=1, group_size=1))))
CHANGING_DICT = {"pop", "popitem", "clear", "update", "setdefault"}
CHANGING_SET = {"add", "discard", "remove", "pop", "clear", "update"}
FLEET_QUERIES = {"get", "get_if_context_valid", "distinct_versions", "fitting_mask", "refusal_reason", "validate"}
OWNED = {
    "ledger": LEDGER_VERBS,
    "fleet": methods(Fleet)
    - {"get", "get_if_context_valid", "distinct_versions", "fitting_mask", "refusal_reason", "validate"},
    "queue": methods(WorkQueue) - {"head", "levels", "count", "num_continuable"},
    "live_trajectories": CHANGING_DICT,
    "unreserved_groups": CHANGING_SET,
    "pending_sleeps": CHANGING_SET,
    "running_means": {"add"},
    "truncations": {"add", "count_consumed"},
}
ROOMS = ("coordination", "strategies")


def writes(source: str, module: str) -> Iterator[str]:
    """Yield writes of `module` to fields of trajectories and instances that it does not own, and calls of methods that
    write.

    Attributes of `self` belong to the writer under any name.
    """
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr=name, ctx=ast.Store() | ast.Del()) if not is_self(node.value):
                owner, writer = owner_of(name, node.value)
                if writer != module and owner:
                    yield f"line {node.lineno}: writes .{name} of {owner}"
            case ast.Subscript(value=ast.Attribute(attr=name), ctx=ast.Store() | ast.Del()):
                if OWNERS_OF_DICTS.get(name, module) != module:
                    yield f"line {node.lineno}: writes into {name}"
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="trajectories"), attr=verb)):
                if verb in CHANGING_DICT and module != "fleet":
                    yield f"line {node.lineno}: {verb}s an instance's trajectories"
            case ast.Call(func=ast.Name(id="setattr" | "delattr")):
                yield f"line {node.lineno}: writes an attribute by its name"
            case ast.Call(func=ast.Attribute(value=owner, attr=verb)):
                if verb in OWNED.get(last_name(owner), ()) and module != "state":
                    yield f"line {node.lineno}: {verb} of the {last_name(owner)} is the state's"
                if (
                    last_name(owner) == "state"
                    and verb in STATE_VERBS
                    and module not in {"coordinator", "command_issuer"}
                ):
                    yield f"line {node.lineno}: {verb} of the state is the coordinator's"


def owner_of(name: str, value: ast.expr) -> tuple[str, str]:
    """Return what has a field, and the module that writes it; empty for the fields of others."""
    if name in TRAJECTORY_FIELDS:
        return "a trajectory", "state"
    if name in INSTANCE_FIELDS:
        return "an instance", "fleet"
    is_of_state = name in STATE_FIELDS and last_name(value) == "state"
    return ("the state", "coordinator" if name == "now" else "state") if is_of_state else ("", "")


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def last_name(node: ast.expr) -> str:
    """Return `fleet` for `fleet`, `state.fleet`, `self._state.fleet` and `self._fleet`."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.lstrip("_")


def modules() -> list[Path]:
    return sorted(path for room in ROOMS for path in Path("pipeline", room).glob("*.py"))


@pytest.mark.parametrize("path", modules(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_each_module_writes_only_its_fields(path: Path) -> None:
    assert list(writes(path.read_text(), path.stem)) == []


def test_only_the_coordination_package_calls_ledger_methods_that_write() -> None:
    """The simulator and the driver read `coordinator.ledger`."""
    for path in (p for p in Path("pipeline").rglob("*.py") if p.parent.name not in ROOMS):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="ledger"), attr=verb)):
                    assert verb not in LEDGER_VERBS, f"{path}, line {node.lineno}: {verb}"


@pytest.mark.parametrize(
    "line",
    [
        "live.phase = Phase.DONE",
        "live.tokens += 4",
        "live.tokens: int = 4",
        "live.instance, rest = None, 3",
        "for live.route_number in range(3): pass",
        "del live.reward",
        "self._state.live_trajectories[3].queue_level = 2",
        "setattr(live, 'phase', Phase.DONE)",
        "instance.kv_tokens -= 3",
        "self._fleet[0].is_pulling = False",
        "instance.trajectories[3] = None",
        "del instance.trajectories[3]",
        "instance.trajectories.pop(3)",
        "ledger.abort(group, reason)",
        "self._state.ledger.publish(3)",
        "state.fleet.add_trajectory(instance, 3, 4, 0.1)",
        "self._state.queue.append(live, 3)",
        "self._state.route(live, instance)",
        "self._state.is_training = True",
        "self._state.live_trajectories[3] = live",
        "state.live_trajectories.pop(3)",
        "state.unreserved_groups.discard(3)",
    ],
)
def test_a_write_by_another_module_is_detected(line: str) -> None:
    assert len(list(writes(line, "placement"))) == 1


def test_writes_by_the_owner_are_allowed() -> None:
    owned: Any = {
        "state": "live.phase = 1\nself.fleet.add_trajectory(1)\nself.ledger.abort(1)",
        "fleet": "one.index = 3",
    }
    assert [list(writes(source, module)) for module, source in owned.items()] == [[], []]
    assert list(writes("self._state.route(live)", "coordinator")) == []
    assert list(writes("self.tokens = 3\nlevel = 2", "placement")) == []
