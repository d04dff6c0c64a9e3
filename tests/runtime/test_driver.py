"""The driver over in-process actors: runs without faults, order of operations, timeouts, end and resume.

Each run is checked with `Run.check` or `Run.check_kept`: conservation, the staleness bound, the order of tokens, and a
journal that replays to the same commands.
"""

from __future__ import annotations

import asyncio
import gc
import shutil
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from staleflow.pipeline.config.schema import DeadlineConfig
from staleflow.pipeline.coordination import journal
from staleflow.pipeline.coordination.commands import Command, Discard, Train
from staleflow.pipeline.coordination.coordinator import MAX_ROUTES_PER_EVENT, Coordinator
from staleflow.pipeline.coordination.events import (
    DecisionsContinued,
    Event,
    GroupsArrived,
    Tick,
    TrajectoryScored,
    VersionPublished,
)
from staleflow.pipeline.recovery import certificate
from staleflow.pipeline.recovery.resumption import Resumption
from staleflow.pipeline.recovery.run_journal import RunJournal
from staleflow.pipeline.runtime import driver, progress_watch
from staleflow.pipeline.runtime.actors import CLOSE_S
from staleflow.pipeline.runtime.measurements import Measurements
from staleflow.stores.errors import ConfigError, RunStuck, StoreError
from staleflow.stores.metrics import steps_with_tokens_per_s
from staleflow.stores.trajectory import AbortReason, Fate, PolicyVersion
from staleflow.stores.weights.resume_points import ResumePoints
from staleflow.tasks.actors.parameter_server import FetchProgress
from tests.support import virtual_time
from tests.support.bodies import Body, Run
from tests.support.driver_runs import (
    EVALUATED,
    LONG,
    MOVING,
    REDUNDANT,
    consumed,
    evaluations,
    first_call,
    long_ones,
    until,
)
from tests.support.in_process import Fault
from tests.support.scripted import World


def test_a_run_without_faults_completes_its_steps_and_invariants_hold(body: Body) -> None:
    run = body.checked_run()
    assert run.outcomes.lost_actors == []
    assert run.workers.actor("trainer").saved == [str(run.config.run_dir / "checkpoints" / "step-000003")]
    assert all(run.workers.actor(name).engine.closed for name in ("rollout-0", "rollout-1"))


SHAPES = {
    "synchronous": ("staleness.admission=synchronous",),
    "two instances": (
        "staleness.eta=3",
        "rollout.routing=benchmarks.routing_rules:ThroughputOptimal",
        "reward.workers=2",
    ),
    "redundancy": ("batch.extra_groups=1", "batch.extra_members=1"),
    "random routing": ("staleness.eta=2", "rollout.routing=benchmarks.routing_rules:Random"),
    "deadline": ("staleness.eta=3", "rollout.migration=largest_gain"),
    "one instance": ("rollout.instances=1", "staleness.eta=0"),
    "many instances": ("rollout.instances=7", "batch.groups_per_step=9", "reward.workers=3"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_invariants_hold_for_other_configurations(body: Body, shape: str) -> None:
    run = body.checked_run("steps=5", "rollout.max_new_tokens=400", *SHAPES[shape], world=long_ones())
    assert run.store.header.eta == run.config.staleness.eta
    if shape == "synchronous":
        assert {row.staleness for row in run.store.trajectories()} == {0}


@pytest.mark.parametrize(("num_groups", "group_size", "num_per_event"), [(20, 8, 8), (3, 80, 1)])
def test_as_many_groups_arrive_in_an_event_as_it_routes(
    body: Body, num_groups: int, group_size: int, num_per_event: int
) -> None:
    run = body.checked_run(
        "steps=2", "staleness.eta=1", "rollout.instances=2", "rollout.engine.max_running=500",
        f"batch.groups_per_step={num_groups}", f"batch.group_size={group_size}",
    )  # fmt: skip
    arrivals = [entry.event for entry in run.entries if isinstance(entry.event, GroupsArrived)]
    assert [len(event.groups) for event in arrivals[:2]] == [num_per_event] * 2
    is_continued = any(isinstance(entry.event, DecisionsContinued) for entry in run.entries)
    assert is_continued == (group_size > MAX_ROUTES_PER_EVENT)


def test_other_calls_run_between_two_events(body: Body) -> None:
    nums_queued: list[int] = []

    async def count_queued(run: Run) -> None:
        await until(run, lambda: run.driver.is_in_main_loop)
        for _ in range(20):
            run.driver._inbox.put_nowait(Tick())
        while not run.driver._inbox.empty():
            nums_queued.append(run.driver._inbox.qsize())
            await asyncio.sleep(0)

    body.checked_run(meanwhile=count_queued)
    assert len(nums_queued) >= 20
    assert all(first - second <= 1 for first, second in pairwise(nums_queued))


@pytest.mark.parametrize("long_event_commands", [driver.LONG_EVENT_COMMANDS, 0], ids=["", "all are long"])
def test_other_calls_run_between_the_parts_of_a_long_event(
    body: Body, monkeypatch: pytest.MonkeyPatch, long_event_commands: int
) -> None:
    """An event is long if it has many commands or takes a batch. Its parts include the journal and measurements."""
    monkeypatch.setattr(driver, "LONG_EVENT_COMMANDS", long_event_commands)
    waits: list[bool] = []
    append, observe = RunJournal.append, Measurements.observe

    def append_and_call(self: RunJournal, now: float, event: Event, commands: Sequence[Command]) -> None:
        append(self, now, event, commands)
        waits.append(True)
        asyncio.get_running_loop().call_soon(waits.append, False)

    def observe_and_check(self: Measurements, now: float, event: Event, commands: Sequence[Command]) -> None:
        is_long = len(commands) > long_event_commands or any(isinstance(command, Train) for command in commands)
        assert waits[-1] is not is_long
        observe(self, now, event, commands)

    monkeypatch.setattr(RunJournal, "append", append_and_call)
    monkeypatch.setattr(Measurements, "observe", observe_and_check)
    run = body.checked_run()
    assert sum(isinstance(command, Train) for entry in run.entries for command in entry.commands) == run.config.steps


def test_an_event_is_journalled_before_other_calls_run(body: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a step could be stored, and the process end, before the journal has the event after which it is stored."""
    monkeypatch.setattr(driver, "LONG_EVENT_COMMANDS", 0)
    not_journalled: list[Event] = []
    handle, append = Coordinator.handle, RunJournal.append

    def handle_and_call(self: Coordinator, event: Event, now: float, *limits: int) -> list[Command]:
        if not limits:  # no replay
            not_journalled.append(event)
            asyncio.get_running_loop().call_soon(not_journalled.clear)
        return handle(self, event, now, *limits)

    def append_and_check(self: RunJournal, now: float, event: Event, commands: Sequence[Command]) -> None:
        assert not_journalled[-1:] == [event]
        append(self, now, event, commands)

    monkeypatch.setattr(Coordinator, "handle", handle_and_call)
    monkeypatch.setattr(RunJournal, "append", append_and_check)
    body.checked_run("steps=2")


@pytest.mark.parametrize("num_ticks", [2, 7200])
def test_garbage_older_than_a_tick_is_collected_once_an_hour(
    body: Body, monkeypatch: pytest.MonkeyPatch, num_ticks: int
) -> None:
    monkeypatch.setattr(driver, "TICKS_PER_FULL_COLLECTION", num_ticks)
    are_collected: list[bool] = []

    async def drop_cycle(run: Run) -> None:
        await until(run, lambda: run.driver.is_in_main_loop)
        cycle: Any = World()
        cycle.itself, reference = cycle, weakref.ref(cycle)
        await asyncio.sleep(1.5 * driver.TICK_S)
        del cycle
        await asyncio.sleep(2 * driver.TICK_S)
        are_collected.append(reference() is None)

    body.checked_run("steps=2", meanwhile=drop_cycle)
    assert are_collected == [num_ticks == 2]
    assert gc.get_freeze_count() == 0


def test_a_migrated_trajectory_continues_from_its_tokens_on_another_instance(body: Body) -> None:
    run = body.checked_run(*MOVING, world=long_ones())
    assert run.commands("Interrupt")
    moved = [r for r in run.store.trajectories() if len({s.instance for s in r.trajectory.segments}) > 1]
    assert moved, "no trajectory has segments of two instances"


def test_groups_without_signal_are_dropped_and_replaced(body: Body) -> None:
    run = body.checked_run("batch.filtering=no_signal", world=World(length=lambda t: 6 + (t % 3) * (t % 4)))
    rows = list(run.store.trajectories())
    assert {r.fate for r in rows} == {Fate.CONSUMED, Fate.FILTERED}
    for group in {r.trajectory.group for r in rows}:
        members = [r for r in rows if r.trajectory.group == group]
        if AbortReason.RUN_ENDED not in {m.reason for m in members}:
            signal_there = len({r.trajectory.reward for r in members}) > 1
            assert signal_there == (members[0].fate is Fate.CONSUMED)


def test_two_runs_of_one_job_have_equal_events(body: Body) -> None:
    first, second = body.run(*REDUNDANT, world=long_ones()), body.run(*REDUNDANT, world=long_ones())
    assert first.entries == second.entries


# -- what cannot be replaced ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actor", "method"),
    [("server", "held_out"), ("trainer", "publish_initial"), ("reward-0", "check"), ("environment-0", "check")],
)
def test_an_actor_not_ready_within_start_s_ends_the_run(body: Body, actor: str, method: str) -> None:
    overrides = ("task.multi_turn=yes", "workload.kind=agentic") if actor == "environment-0" else ()
    run = body.run(*overrides, faults=[Fault(actor=actor, method=method, silent="before")])
    assert str(run.raised()) == f"{actor} did not answer within 50 s (deadlines.start_s)"
    assert run.ended_s == pytest.approx(first_call(run, actor, method) + 50, abs=0.1)


def test_an_actor_that_cannot_start_ends_the_run_at_once(body: Body) -> None:
    """The run does not wait for the other actors, and their calls are cancelled."""
    faults = [
        Fault(actor="reward-0", method="__init__", error=ConfigError("reward.function: no such file")),
        Fault(actor="rollout-1", method="__init__", late_s=40.0),
    ]
    run = body.run(faults=faults)
    assert str(run.raised()) == "reward.function: no such file"
    assert run.ended_s < 2
    assert "rollout-1" not in run.workers.placed


def test_a_failed_commit_ends_the_run_and_announces_no_later_version(body: Body) -> None:
    full = StoreError("store: could not be stored: no space left; free space or move runs_dir")
    run = body.run("steps=6", faults=[Fault(actor="server", method="commit", nth=2, error=full)])
    assert run.raised() is full
    assert [r.step for r in run.records] == [0]
    assert [s["step"] for s in run.outcomes.steps] == [0.0]
    assert run.workers.methods("server").count("commit") == 2
    run.check_kept()


def test_a_failed_commit_after_the_last_step_ends_the_run(body: Body) -> None:
    full = StoreError("store: could not be stored: no space left; free space or move runs_dir")
    run = body.run(faults=[Fault(actor="server", method="commit", nth=4, error=full)])
    assert run.raised() is full
    assert [r.kind for r in run.records] == ["step"] * 3
    assert "save_checkpoint" not in run.workers.methods("trainer")


# -- order ---------------------------------------------------------------------------------------------------------


def test_a_step_is_queued_for_commit_before_its_version_is_announced(body: Body) -> None:
    """The ledger stored with a step is the one before its version is published, and endings are ordered accordingly."""
    run = body.checked_run(*REDUNDANT, world=long_ones())
    stored = [c for c in run.workers.calls if c.actor == "server" and c.method in ("commit", "discard")]
    ordered: list[Any] = []
    for entry in run.entries:
        if isinstance(entry.event, VersionPublished):
            ordered.append(("commit", entry.event.version - 1))
        ordered += [("discard", c.endings) for c in entry.commands if isinstance(c, Discard)]
    ordered.append(("commit", run.config.steps))
    assert ordered == [(c.method, c.args[0].step if c.method == "commit" else c.args[0]) for c in stored]


def test_steps_are_reported_in_order_after_their_commit(body: Body) -> None:
    run = body.checked_run("steps=5", faults=[Fault(actor="server", method="commit", nth=2, late_s=2.5)])
    assert [s["step"] for s in run.outcomes.steps] == [0.0, 1.0, 2.0, 3.0, 4.0]
    commits = [c.at_s for c in run.workers.calls if c.method == "commit"]
    assert commits[2] - commits[1] > 2.5, "the third commit waits for the second"
    rates = [s["tokens_per_s"] for s in run.outcomes.steps]
    assert rates == [s["tokens_per_s"] for s in steps_with_tokens_per_s(run.outcomes.steps)], "of each step alone"


def test_only_versions_that_no_instance_uses_are_removed(body: Body) -> None:
    """A pull of a removed version would end the run (see PlayedParameterServer)."""
    run = body.checked_run(*LONG, "steps=6", hosts=("one", "two"), world=long_ones())
    assert {name for name in run.workers.names if name.startswith("parameters")} == {"parameters-one", "parameters-two"}
    assert all(weight <= {5, 6} for weight in run.world.weights.values())


def test_the_version_of_a_queued_pull_is_kept(body: Body) -> None:
    """A slow call delays it, while other instances load two later versions."""
    slow = Fault(actor="rollout-1", method="route", nth=3, late_s=4.5)
    job = ("steps=9", "staleness.eta=3", "rollout.instances=4", "deadlines.call_s=60")
    run = body.checked_run(*job, hosts=("one", "two"), faults=[slow])
    pulls = [c.version for c in run.commands("Pull") if c.instance == "rollout-1"]
    loaded = [e.version for _, e in run.events("PullFinished") if e.instance == "rollout-1"]
    assert loaded == pulls[: len(loaded)]
    assert pulls != list(range(1, 10)), "several versions were published while one was queued"


@pytest.mark.parametrize("how", [{"silent": "before"}, {"error": OSError("reset")}], ids=["silent", "reset"])
def test_a_parameter_server_that_fails_to_prune_does_not_stop_the_run(body: Body, how: dict[str, Any]) -> None:
    """The host keeps more versions than needed for a while."""
    faults = [Fault(actor="parameters-two", method="prune", **how)]
    run = body.checked_run(*LONG, "steps=6", hosts=("one", "two"), world=long_ones(), faults=faults)
    assert run.outcomes.lost_actors == []
    assert all(weight <= {5, 6} for weight in run.world.weights.values())


def test_checkpoints_are_saved_every_checkpoint_every_steps(body: Body) -> None:
    run = body.checked_run("steps=5", "training.checkpoint_every=2")
    names = [folder.rpartition("/")[2] for folder in run.workers.actor("trainer").saved]
    assert names == ["step-000002", "step-000004", "step-000005"]
    certificates = [certificate.read(Path(folder)) for folder in run.workers.actor("trainer").saved]
    assert [(int(c.version), c.entry) for c in certificates] == [(v, f"{v - 1:064x}") for v in (2, 4, 5)]


def test_resume_points_are_kept_as_often_as_set(body: Body) -> None:
    run = body.checked_run("steps=8", "training.resume_every=2", "training.keep_every=4")
    assert ResumePoints(run.config.run_dir / "resume").versions() == [4, 6, 8]
    run = body.checked_run("steps=10", "name=longer", "training.resume_every=1", "training.keep_every=3")
    assert ResumePoints(run.config.run_dir / "resume").versions() == [3, 6, 8, 9, 10]


# -- nothing happens -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_training", "limit_s"), [(True, 80.0), (False, 30.0)])
def test_a_run_is_stuck_only_after_the_trainer_would_have_been_replaced(
    monkeypatch: pytest.MonkeyPatch, is_training: bool, limit_s: float
) -> None:
    now = 0.0
    monkeypatch.setattr(progress_watch, "now_s", lambda: now)
    coordinator: Any = SimpleNamespace(is_training=is_training, explain_waiting=lambda: "it waits")
    idle: Any = SimpleNamespace()
    watch = progress_watch.ProgressWatch(
        coordinator, idle, idle, idle, idle, idle, DeadlineConfig(train_s=60.0, call_s=20.0, stuck_s=30.0)
    )
    now = limit_s
    watch.check()
    now = limit_s + 1.0
    with pytest.raises(RunStuck, match=f"no progress for {limit_s:g} s"):
        watch.check()


def test_a_stuck_run_names_what_it_waits_for_and_the_setting(body: Body) -> None:
    run = body.run(faults=[Fault(actor="reward-0", method="score", nth=0, change=lambda _: ())])
    error = run.raised()
    assert isinstance(error, RunStuck)
    assert str(error).startswith("no progress for 30 s (deadlines.stuck_s): step 0 waits for 2 more of its 2 groups")
    assert "scoring for" in str(error)
    sampled_s = run.events("TrajectorySampled")[-1][0]
    ended_s = run.entries[-1].now
    assert 29.5 < ended_s - sampled_s < 31.5
    run.check_kept()


def test_growing_responses_count_as_progress(body: Body) -> None:
    """Each response takes longer than stuck_s, and only progress reports arrive meanwhile."""
    run = body.checked_run(world=World(length=lambda trajectory: 95, tokens_per_s=2.0))
    assert all(len(t.response_tokens) / 2.0 > run.config.deadlines.stuck_s for t in consumed(run))


@pytest.mark.parametrize("server_lost", [False, True])
def test_the_store_has_the_times_of_the_run_clock(
    body: Body, monkeypatch: pytest.MonkeyPatch, server_lost: bool
) -> None:
    """The clock starts when all actors are ready and continues if the server is replaced."""
    clock = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr("staleflow.tasks.actors.trajectory_server.time", clock)
    faults = [Fault(actor="trainer", method="publish_initial", late_s=20.0)]
    if server_lost:
        faults += [
            Fault(actor="server", method="record_rewards", nth=4, dies="before"),
            Fault(actor="server", method="__init__", nth=2, late_s=5.0),
        ]
    run = body.run(faults=faults)
    assert bool(run.outcomes.lost_actors) == server_lost
    scored = {e.event.trajectory: e.now for e in run.entries if isinstance(e.event, TrajectoryScored)}
    stored = {t.id: t.timings.rewarded_s for t in consumed(run)}
    assert stored
    assert [scored[i] for i in stored] == pytest.approx(list(stored.values()), abs=0.5)


def with_progress(num_bytes: int, _: object) -> FetchProgress:
    return FetchProgress(path="", num_bytes=num_bytes)


@pytest.mark.parametrize("arrives", [True, False])
def test_slowly_arriving_weights_count_as_progress(body: Body, arrives: bool) -> None:
    """The transfer of version 1 takes longer than stuck_s."""
    slow = [
        Fault(actor="parameters-two", method="ensure_version", nth=n + 2, late_s=2.0,  # both instances have version 0
              change=partial(with_progress, n * 1000 if arrives else 1000))
        for n in range(1, 61)
    ]  # fmt: skip
    hosts = ("one", "one", "one", "two", "two")
    run = body.run("staleness.eta=0", hosts=hosts, faults=slow, world=World(num_bytes=10**6))
    if arrives:
        run.check()
        assert run.outcomes.lost_actors == []
    else:
        assert str(run.raised()).startswith("no progress for 30 s (deadlines.stuck_s)")
        run.check_kept()


def test_weights_that_load_slowly_do_not_count_as_a_stuck_run(body: Body) -> None:
    """The timeout of a load grows with its bytes."""
    slow = [Fault(actor=f"rollout-{i}", method="pull", nth=2, late_s=45.0) for i in range(2)]
    run = body.checked_run("staleness.eta=0", faults=slow, world=World(num_bytes=10**9 + 10**8))
    assert run.outcomes.lost_actors == []


def test_a_slow_batch_of_rewards_does_not_count_as_a_stuck_run(body: Body) -> None:
    """Each response is scored within its timeout, and all of them take longer than stuck_s."""
    run = body.checked_run("batch.groups_per_step=4", "rollout.engine.max_running=8", world=World(reward_s=8.0))
    assert run.outcomes.lost_actors == []


@pytest.mark.parametrize(("only", "alone"), [("rollout-0", "rollout.instances=1"), ("reward-0", "reward.workers=1")])
def test_a_run_is_not_stuck_while_its_only_actor_of_a_role_is_replaced(body: Body, only: str, alone: str) -> None:
    """It is placed within start_s, which is more than stuck_s."""

    async def kill(run: Run) -> None:
        await until(run, lambda: run.driver.is_in_main_loop)
        await asyncio.sleep(1.0)
        run.workers.kill(only)

    late = Fault(actor=only, method="__init__", nth=2, late_s=40.0)
    run = body.checked_run(alone, faults=[late], meanwhile=kill)
    assert len(run.outcomes.lost_actors) == 1


def test_a_long_training_step_does_not_count_as_a_stuck_run(body: Body) -> None:
    """The step takes longer than stuck_s and less than train_s."""
    body.checked_run("staleness.eta=0", world=World(train_s=38.0))


# -- evaluation and the end ----------------------------------------------------------------------------------------


def test_instances_pull_the_last_version_in_parallel(body: Body) -> None:
    late = [Fault(actor=f"rollout-{i}", method="pull", nth=0, late_s=2.0) for i in range(3)]
    run = body.checked_run(*EVALUATED, "rollout.instances=3", "staleness.eta=2", faults=late)
    pulled = [c.at_s for c in run.workers.calls if c.method == "pull" and c.args[0].version == run.config.steps]
    assert len(pulled) == 3
    assert max(pulled) - min(pulled) < 1.0


def test_an_instance_lost_during_the_last_pull_is_replaced(body: Body) -> None:
    plain = body.run(*EVALUATED)
    last = sum(c.method == "pull" and c.actor == "rollout-0" for c in plain.workers.calls)
    run = body.checked_run(*EVALUATED, faults=[Fault(actor="rollout-0", method="pull", nth=last, dies="before")])
    assert evaluations(run) == [0, 3]
    assert len(run.outcomes.lost_actors) == 1


@pytest.mark.parametrize("actor", ["rollout-0", "trainer", "reward-0", "server", "parameters-one"])
@pytest.mark.parametrize("how", ["dies", "silent", "error"])
def test_closing_never_raises_and_times_out(body: Body, actor: str, how: str) -> None:
    fault = {"error": ValueError("no")} if how == "error" else {how: "before"}
    run = body.checked_run(faults=[Fault(actor=actor, method="close", **fault)])
    closed = [c for c in run.workers.calls if c.method == "close"]
    assert {c.actor for c in closed[:2]} == {"rollout-0", "rollout-1"}, "engines first"
    assert len(closed) == 6
    assert closed[-1].at_s - closed[0].at_s < 10.5


# -- going on with a stored run ------------------------------------------------------------------------------------


def test_hung_instances_are_closed_together(body: Body) -> None:
    async def run() -> float:
        silent = Fault(actor="rollout-0", method="close", nth=0, silent="before")
        others = [replace(silent, actor=f"rollout-{i}") for i in range(1, 4)]
        async with body.placed("rollout.instances=4", faults=[silent, *others]) as stage:
            begun_s = asyncio.get_running_loop().time()
            await stage.actors.close()
            return asyncio.get_running_loop().time() - begun_s

    ended_s = virtual_time.run(run())
    assert CLOSE_S <= ended_s < CLOSE_S + 1.0


def test_a_closed_driver_has_compressed_its_journal(body: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start may be in the same process, and renames the parts."""

    def copy_slowly(*args: Any) -> None:
        time.sleep(0.3)
        copy(*args)

    copy = shutil.copyfileobj
    monkeypatch.setattr(shutil, "copyfileobj", copy_slowly)
    monkeypatch.setattr(driver, "RunJournal", partial(RunJournal, part_bytes=4_000))
    run = body.run()
    parts = journal.list_closed_parts(run.config.run_dir / "events.jsonl").values()
    assert parts
    assert all(part.suffix == ".gz" for part in parts)


def test_a_stopped_run_resumes_at_its_step(body: Body) -> None:
    async def stop(run: Run) -> None:
        await until(run, lambda: run.workers.methods("server").count("commit") == 2)
        run.driver.stop("interrupted")

    overrides = ("steps=5", "batch.extra_members=1")
    first = body.run(*overrides, meanwhile=stop)
    trained = sum(r.kind == "step" for r in first.records)
    assert trained == 3
    folder = first.config.run_dir
    (folder / "events.jsonl").rename(folder / "events.1.jsonl")
    (folder / "store").mkdir()
    steps = tuple(dict(s) for s in first.outcomes.steps)
    resumption = Resumption(
        version=PolicyVersion(trained),
        fingerprint=f"weights-{trained}",
        step_metrics=steps,
        elapsed_s=steps[-1]["elapsed_s"],
    )
    second = body.run(config=first.config, world=first.world, resumption=resumption)
    if second.error is not None:
        raise second.error
    second.check_kept()
    assert [s["step"] for s in second.outcomes.steps] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [r.step for r in second.records if r.kind == "step"] == [0, 1, 2, 3, 4]
    assert all(a["elapsed_s"] < b["elapsed_s"] for a, b in pairwise(second.outcomes.steps))
    assert second.entries[0].now >= resumption.elapsed_s
    pulled = [c for c in second.workers.calls if c.method == "pull"]
    assert [c.args[0].version for c in pulled[:2]] == [trained, trained]


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (2, "version 2 is weights-2, its step published others; remove the damaged resume point"),
        (0, "version 0 is weights-0, the run began with others: model.path or the examples of training.sft have"),
    ],
)
def test_resuming_with_other_weights_than_the_stored_ones_raises(body: Body, version: int, message: str) -> None:
    resumption = Resumption(version=PolicyVersion(version), fingerprint="others")
    run = body.run(resumption=resumption)
    error = run.raised()
    assert isinstance(error, StoreError)
    assert message in str(error)


def start_phases(run: Run) -> list[str]:
    begin = "starting actors"
    return [what.removeprefix(begin) for _, what in run.phases if what.startswith(begin)]


def test_the_phase_at_start_names_the_missing_actors(body: Body) -> None:
    late = Fault(actor="rollout-1", method="__init__", late_s=9.0)
    run = body.checked_run("rollout.instances=2", faults=(late,))
    ready = ": all 5 ready"
    stages = ["", ": 4 of 5 ready, waiting for rollout-1", f"{ready}, publishing the first weights"]
    assert start_phases(run) == stages
    slow = [Fault(actor="trainer", method=method, nth=nth, late_s=9.0) for method, nth in
            (("logprobs", 1), ("fine_tune", 2), ("publish_initial", 1))]  # fmt: skip
    run = body.run("training.sft.steps=2", faults=slow)
    assert start_phases(run)[-3:] == [f"{ready}, publishing the first weights", f"{ready}, fine-tuned 1 of 2 steps",
                                  f"{ready}, publishing the first weights"]  # fmt: skip
