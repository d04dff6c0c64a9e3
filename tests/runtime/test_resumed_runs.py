"""Runs killed at any moment and resumed: work in flight continues, and every prompt is used exactly once."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.coordination.events import InstanceReported, RunResumed
from staleflow.pipeline.recovery.resumption import Resumption
from staleflow.pipeline.runtime.driver import Driver
from staleflow.pipeline.runtime.instance_link import POLL_S
from staleflow.pipeline.runtime.run_report import RunListener
from staleflow.stores.in_flight.in_flight_state import GroupInFlight, MemberInFlight
from staleflow.stores.trajectory import AbortReason, Fate, GroupId, PolicyVersion, TrajectoryId
from tests.runtime.test_teachers import TAUGHT, check_taught
from tests.support import virtual_time
from tests.support.bodies import Body, Run, Script
from tests.support.driver_runs import MOVES, until
from tests.support.in_process import Fault
from tests.support.memory_store import MemoryStore
from tests.support.scripted import World

BASE = ("steps=7", "staleness.eta=2", "rollout.max_new_tokens=400", "rollout.delivery_interval_s=0.5")
SHAPES = {
    "plain": BASE,
    "no signal": (*BASE, "batch.filtering=no_signal"),
    "redundancy": (*BASE, "batch.extra_groups=1", "batch.extra_members=1"),
    "synchronous": (*BASE, "staleness.admission=synchronous"),
    "agents": (
        *BASE,
        "task.multi_turn=yes",
        "workload.kind=agentic",
        "workload.turns=3",
        "workload.tool_s=1",
        "workload.tool_tokens=3",
        "simulation.failed_step_share=0.03",
    ),
    "moving": (*BASE, *MOVES),
    "teacher": (*BASE, *TAUGHT),
    "sources": (
        *BASE,
        "batch.filtering=no_signal",
        "task.sources.a.ratio=2",
        "task.sources.b.ratio=1",
        "task.sources.c.sampler=difficulty_window",
    ),
}


def rewound_store(store: MemoryStore, num_steps: int) -> MemoryStore:
    """Return a store as `prepare` rewinds it to this number of steps; unchanged if it has no more steps and no end."""
    records = store.commits()
    if sum(r.kind == "step" for r in records) <= num_steps and not (records and records[-1].kind == "end"):
        return store
    kept, rows = MemoryStore(store.header), list(store.trajectories())
    for record in store.commits():
        if sum(r.kind == "step" for r in kept.commits()) == num_steps:
            break
        kept.commit(record, rows[: record.num_rows])
        rows = rows[record.num_rows :]
    return kept


def resumption_of(run: Run, undone: int) -> Resumption:
    """Return the resumption of a killed run whose latest resume points are lost, as `prepare` does."""
    key = str(run.config.run_dir / "store")
    trained = sum(r.kind == "step" for r in run.world.stores[key].commits())
    version = max(0, trained - undone)
    run.world.stores[key] = rewound_store(run.world.stores[key], version)
    steps = tuple(s for s in run.outcomes.steps if s["step"] < version)
    starts = len(list(run.config.run_dir.glob("events*.jsonl")))
    (run.config.run_dir / "events.jsonl").rename(run.config.run_dir / f"events.{starts}.jsonl")
    (run.config.run_dir / "store").mkdir(exist_ok=True)
    run.world.weights.clear()  # a new start has another folder for them
    return Resumption(
        version=PolicyVersion(version),
        fingerprint=f"weights-{version}" if version else "",
        step_metrics=steps,
        elapsed_s=steps[-1]["elapsed_s"] if steps else 0.0,
        num_earlier_starts=starts,
    )


def kill_when(when: Callable[[Run], bool]) -> Script:
    """End everything at once when `when` holds, without notifying any actor."""

    async def kill(run: Run) -> None:
        while run.driver is None or not run.driver.is_in_main_loop or not when(run):
            await asyncio.sleep(0.01)
        for placed in list(run.workers.placed.values()):
            placed.future.dead = True
        run.driver.stop("killed")
        run.driver._main_task.cancel()

    return kill


def kill_after_commands(count: int) -> Script:
    """End everything at once when more than `count` commands were carried out."""
    return kill_when(lambda run: sum(run.outcomes.command_counts.values()) > count)


def resumed_event(run: Run) -> RunResumed:
    (event,) = [e.event for e in run.entries if isinstance(e.event, RunResumed)]
    return event


def check_whole(run: Run) -> None:
    """Check that the run is complete and that every prompt up to the last was used once and stored under its number."""
    if run.error is not None:
        raise run.error
    run.check_kept()
    rows = list(run.store.trajectories())
    started = run.records[-1].ledger.num_started
    assert sorted(row.trajectory.id for row in rows) == list(range(started))
    fates = Counter(row.fate for row in rows)
    assert fates[Fate.CONSUMED] == run.config.steps * run.config.trajectories_per_step
    if run.config.task.sources:
        check_sources(run)


def check_sources(run: Run) -> None:
    """Check that the last commit counts the stored groups of each source, that no task of an ordered source was
    skipped, and that all batches have equal sizes."""
    ledger = run.records[-1].ledger
    assert ledger.tasks_in_flight == ()
    batches = Counter(row.step for row in run.store.trajectories() if row.fate is Fate.CONSUMED)
    assert set(batches.values()) == {run.config.trajectories_per_step}
    rows = {
        row.trajectory.group: row for row in run.store.trajectories() if row.reason is not AbortReason.SURPLUS_MEMBER
    }
    for number, state in enumerate(ledger.sources):
        groups = [row for row in rows.values() if row.trajectory.source == number]
        fates = Counter(row.fate for row in groups)
        assert (state.num_trained, state.num_filtered) == (fates[Fate.CONSUMED], fates[Fate.FILTERED])
        assert state.num_drawn == len(groups)
        if number < 2:
            assert sorted(row.trajectory.task for row in groups) == list(range(len(groups)))
    assert len(ledger.sources) == len(run.config.task.sources)


def test_finished_and_partial_responses_of_a_killed_run_continue(body: Body) -> None:
    world = World(length=lambda trajectory: 120 if trajectory % 4 == 3 else 8)

    def scored_some(run: Run) -> bool:
        return len(run.records) == 2 and run.outcomes.command_counts["Score"] > 12

    first = body.run(*BASE, world=world, meanwhile=kill_when(scored_some))
    assert first.stopped_at_once
    second = body.run(config=first.config, world=world, resumption=resumption_of(first, 0))
    check_whole(second)
    members = [m for group in resumed_event(second).groups for m in group.members]
    assert any(m.scored for m in members)
    assert any(0 < m.tokens < 120 and not m.sampled for m in members)
    (record,) = [r for r in second.records if r.kind == "resume"]
    assert record.num_rows == 0
    assert record.metrics["taken_up"] == sum(m.version >= 0 for m in members)
    assert record.metrics["taken_up_tokens"] == sum(m.tokens for m in members)
    (note,) = [line for line in second.outcomes.notes if line.startswith("resumed ")]
    assert f"resumed {int(record.metrics['taken_up'])} in-flight responses" in note
    routed = {c.trajectory for c in second.commands("Route")}
    assert not routed & {m.trajectory for m in members if m.sampled}, "a finished response was sampled again"
    before = {t.id: t for t in first.workers.actor("server")._in_flight.live.values() if t.segments}
    for row in second.store.trajectories():
        t = row.trajectory
        if t.id in before:
            assert list(t.versions)[: before[t.id].num_tokens] == list(before[t.id].versions)
    assert not [row for row in second.store.trajectories() if row.reason is AbortReason.RUN_ENDED]


def test_a_resumed_run_computes_logprobs_that_its_teacher_had_not(body: Body) -> None:
    """Responses that have their reward, but no logprobs of the slow teacher, when everything is killed."""
    world = World(teacher_s=2.0)

    def untaught(run: Run) -> list[TrajectoryId]:
        state = run.workers.actor("server")._in_flight
        return [t for t in state.scored if t in state.live and state.live[t].teacher_logprobs is None]

    first = body.run(
        *BASE, *TAUGHT, world=world, meanwhile=kill_when(lambda run: bool(run.records) and len(untaught(run)) > 3)
    )
    before = untaught(first)
    second = body.run(config=first.config, world=world, resumption=resumption_of(first, 0))
    check_whole(second)
    check_taught(second)
    scored = {m.trajectory for group in resumed_event(second).groups for m in group.members if m.scored}
    assert len(scored & set(before)) > 3


def test_an_outage_of_the_bucket_during_the_resume_is_waited_out(body: Body) -> None:
    """The server commits that it goes on, and tries again longer than the start of an actor may take."""
    world = World(commit_s=0.5)

    async def fail_bucket(run: Run) -> None:
        await until(run, lambda: "recoverable" in run.workers.methods("server"))
        now = asyncio.get_running_loop().time()
        world.outage = (now, now + 300.0)

    first = body.run(*BASE, "deadlines.commit_s=400", world=world, meanwhile=kill_after_commands(40))
    second = body.run(config=first.config, world=world, resumption=resumption_of(first, 0), meanwhile=fail_bucket)
    check_whole(second)
    assert second.outcomes.lost_actors == []
    assert first.config.deadlines.start_s < 300 < second.ended_s


def test_a_server_that_is_silent_during_the_resume_is_replaced(body: Body) -> None:
    world = World()
    first = body.run(*BASE, "deadlines.silent_s=20", world=world, meanwhile=kill_after_commands(40))
    silent = [Fault(actor="server", method=method, silent="before") for method in ("resume", "held_out_notice")]
    second = body.run(config=first.config, world=world, resumption=resumption_of(first, 0), faults=silent)
    check_whole(second)
    (loss,) = second.outcomes.lost_actors
    assert "deadlines.silent_s" in loss


@pytest.mark.parametrize("spool_s", [0.5, 0.0])
def test_a_lost_instance_costs_only_tokens_since_its_last_delivery(body: Body, spool_s: float) -> None:
    """Two instances with four responses each; the lost one costs tokens of little more than delivery_interval_s."""
    world = World(length=lambda _: 160)
    fault = Fault(actor="rollout-0", method="report", nth=13, dies="after")
    run = body.checked_run(
        "steps=1", "batch.groups_per_step=4", "staleness.eta=0", "rollout.max_new_tokens=400",
        f"rollout.delivery_interval_s={spool_s}", faults=[fault], world=world,
    )  # fmt: skip
    ((lost_s, _),) = run.events("InstanceLost")
    routed = [c for c in run.commands("Route") if c.instance == "rollout-0"]
    assert len(routed) == 4
    rows = {row.trajectory.id: row.trajectory for row in run.store.trajectories()}
    kept = [sum(len(s.tokens) for s in rows[c.trajectory].segments if s.instance == "rollout-0") for c in routed]
    begun_s = min(now for now, event in run.events("GroupsArrived") if event.groups)
    sampled = world.tokens_per_s * (lost_s - begun_s)
    assert sampled > 100
    if spool_s:
        assert all(sampled - n <= world.tokens_per_s * (spool_s + POLL_S + 0.1) for n in kept)
    else:
        assert kept == [0, 0, 0, 0]


def test_groups_consumed_by_undone_steps_are_trained_again(body: Body) -> None:
    first = body.run(*BASE, meanwhile=kill_when(lambda run: len(run.records) == 4))
    consumed = {row.trajectory.id for row in first.store.trajectories() if row.step in (2, 3)}
    second = body.run(config=first.config, world=first.world, resumption=resumption_of(first, 2))
    check_whole(second)
    event = resumed_event(second)
    assert event.step == 2
    members = [m for group in event.groups for m in group.members]
    assert all(m.version <= 2 for m in members)
    assert consumed <= {m.trajectory for m in members}
    assert {m.trajectory for m in members if m.scored} & consumed


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("seed", range(2))
def test_a_run_killed_repeatedly_uses_every_prompt_once(body: Body, seed: int, shape: str) -> None:
    rng = random.Random(seed)
    world = World(length=lambda trajectory: 90 if trajectory % 5 == 3 else 6 + trajectory % 7)
    config: RunConfig | None = None
    resumption: Resumption | None = None
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(3, 90)
        run = body.run(
            *SHAPES[shape], config=config, world=world, resumption=resumption, meanwhile=kill_after_commands(at)
        )
        if not run.stopped_at_once:
            break
        run.check_kept()
        config, resumption = run.config, resumption_of(run, rng.choice((0, 0, 1, 2)))
    else:
        run = body.run(config=config, world=world, resumption=resumption)
    check_whole(run)


def test_a_stopped_and_resumed_run_loses_no_token(body: Body) -> None:
    """Instances deliver running responses when a run is stopped, even without periodic delivery."""
    world = World(length=lambda trajectory: 120 if trajectory % 4 == 3 else 8)

    async def stop(run: Run) -> None:
        while run.driver is None or len(run.outcomes.steps) < 2 or run.outcomes.command_counts["Score"] <= 12:
            await asyncio.sleep(0.01)
        run.driver.stop("interrupted")

    shape = (*BASE, "rollout.delivery_interval_s=0")
    first = body.run(*shape, world=world, meanwhile=stop)
    running = dict(next(e.event.progress for e in reversed(first.entries) if isinstance(e.event, InstanceReported)))
    second = body.run(config=first.config, world=world, resumption=resumption_of(first, 0))
    check_whole(second)
    members = {m.trajectory: m for group in resumed_event(second).groups for m in group.members}
    assert any(0 < m.tokens < 120 and not m.sampled for m in members.values())
    assert all(members[t].tokens >= tokens for t, tokens in running.items() if t in members)


def test_work_abandoned_by_a_stopped_run_continues_after_the_resume(body: Body) -> None:
    async def stop(run: Run) -> None:
        while run.driver is None or len(run.outcomes.steps) < 2:
            await asyncio.sleep(0.01)
        run.driver.stop("interrupted")

    first = body.run(*BASE, meanwhile=stop)
    assert first.records[-1].kind == "end"
    given_up = {r.trajectory.id for r in first.store.trajectories() if r.reason is AbortReason.RUN_ENDED}
    sampled = {
        r.trajectory.id for r in first.store.trajectories() if r.trajectory.id in given_up and r.trajectory.segments
    }
    assert sampled
    second = body.run(config=first.config, world=first.world, resumption=resumption_of(first, 0))
    check_whole(second)
    kept = {m.trajectory for group in resumed_event(second).groups for m in group.members if m.tokens}
    assert sampled <= kept
    consumed = {r.trajectory.id for r in second.store.trajectories() if r.fate is Fate.CONSUMED}
    assert given_up & consumed
    assert min(set(range(max(consumed))) - consumed, default=max(consumed)) >= max(given_up)


def test_a_resumed_group_that_is_at_once_too_old_does_not_stop_the_run(body: Body) -> None:
    """Its members wait for their scores, and the next step begins without them in the same event."""
    shape = ("staleness.eta=1", "batch.groups_per_step=1", "batch.extra_groups=1")

    def in_flight(group: int, **state: Any) -> GroupInFlight:
        members = [
            MemberInFlight(trajectory=TrajectoryId(2 * group + i), tokens=5, sampled=True, **state) for i in range(2)
        ]
        return GroupInFlight(group=GroupId(group), prompt_tokens=3, members=tuple(members))

    groups = in_flight(1, version=PolicyVersion(0)), in_flight(2, version=PolicyVersion(1), scored=True, reward=1.0)

    async def resume() -> tuple[list[str], list[int]]:
        async with body.placed(*shape) as stage:
            driver = Driver(stage.config, stage.actors, stage.config.run_dir, RunListener())
            await driver._handle(RunResumed(step=1, num_ended=(("consumed:none", 2),), groups=groups))
            kinds, queued = list(driver.report.command_counts), list(driver._score_queue._num_tokens.values())
            await driver.close()
            return kinds, queued

    assert virtual_time.run(resume()) == (["Score", "Train", "Discard"], [0, 0])


@pytest.mark.parametrize("kept_share", [None, 0.0, 0.5])
@pytest.mark.parametrize("shape", ["plain", "sources"])
def test_responses_missing_from_the_spool_start_again(body: Body, shape: str, kept_share: float | None) -> None:
    """kept: the share of each spool file that is left; None: the folder is gone."""
    first = body.run(*SHAPES[shape], meanwhile=kill_when(lambda run: len(run.records) == 2))
    spool: Path = first.config.run_dir / "spool"
    for part in spool.iterdir():
        data = part.read_bytes()
        part.write_bytes(data[: int((kept_share or 0.0) * len(data))])
    if kept_share is None:
        shutil.rmtree(spool)
    second = body.run(config=first.config, world=first.world, resumption=resumption_of(first, 0))
    check_whole(second)
    assert not [row for row in second.store.trajectories() if row.reason is AbortReason.RUN_ENDED]
