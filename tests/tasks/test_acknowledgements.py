"""Replies of the trajectory server mean that its changes are written, for every method, with a store in memory and one
on disk."""

from __future__ import annotations

import asyncio
import inspect
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from staleflow.pipeline.config import actor_settings
from staleflow.stores.errors import ActorFailed, StoreError
from staleflow.stores.in_flight.spool import Spool
from staleflow.stores.staleness.ledger_groups import Ending
from staleflow.stores.trajectories.records import CommitRecord, LedgerState
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import (
    AbortReason,
    Fate,
    FinishReason,
    GroupId,
    InstanceId,
    PolicyVersion,
    TrajectoryId,
    is_evaluation,
)
from staleflow.stores.weights.weight_report import WeightCheck, WeightReport
from staleflow.tasks.actors.server_messages import (
    ObservationItem,
    ObservationReceipt,
    RewardItem,
    TeacherLogprobs,
    TurnItem,
)
from staleflow.tasks.actors.server_settings import ServerSettings
from staleflow.tasks.actors.trajectory_server import TrajectoryServer
from staleflow.tasks.engines.base import SampledTokens
from staleflow.tasks.rendering.task_source import Message
from staleflow.tasks.sources.evaluation_items import group_of
from staleflow.tasks.sources.reward_process import ScoredResponse
from tests.support import virtual_time
from tests.support.bodies import Body
from tests.support.route_items import route_item
from tests.support.scripted import World, response, server_class
from tests.support.segments import delivery, sampled_segment

RUN = virtual_time.run

ZERO, ONE = TrajectoryId(0), TrajectoryId(1)
EVALUATION = TrajectoryId(2 * group_of(0, 0, 1))
"""The first response of the first evaluation, in a run with two trajectories per group."""
V0 = PolicyVersion(0)
EVALUATED = (
    "rollout.engine.name=transformers", "model.path=none", "task.eval_prompts=0", "evaluation.sets.short.prompts=1",
    "evaluation.sets.short.max_new_tokens=10",
)  # fmt: skip
LONG_S = 500.0
"""Virtual seconds after which no more event can happen without a thread."""


def in_memory() -> type[TrajectoryServer]:
    return server_class(World())


def on_disk() -> type[TrajectoryServer]:
    class DiskServer(server_class(World())):  # type: ignore[misc]  # a class made at run time
        store_class: ClassVar[Any] = VersionedStore

    return DiskServer


@dataclass
class ServerScene:
    """A trajectory server with four trajectories in two groups."""

    made: type[TrajectoryServer]
    settings: ServerSettings
    server: TrajectoryServer

    @classmethod
    async def create(cls, server_class: type[TrajectoryServer], folder: Path) -> ServerScene:
        config = Body(folder).config("rollout.max_new_tokens=100", *EVALUATED)
        settings = actor_settings.server_settings(config, folder / "store", 128)
        scene = cls(server_class, settings, server_class(replace(settings, serves_drafts=True), 0.0))
        await scene.server.draw(0, 2)
        return scene

    def restart(self) -> TrajectoryServer:
        """Return a new server, as created after the loss of the previous one."""
        self.server = self.made(replace(self.settings, resumed=True), 0.0)
        return self.server

    async def sample(self, *trajectories: TrajectoryId, finish: FinishReason = FinishReason.STOP) -> None:
        """Route trajectories under route number 1 and deliver nine tokens of each."""
        await self.server.record_routes(tuple(map(route_item, trajectories)))
        await self.server.deliver([sampled(t, finish) for t in trajectories])

    async def reward(self, *trajectories: TrajectoryId) -> None:
        await self.sample(*trajectories)
        await self.server.record_rewards([RewardItem(t, 9, 1, ScoredResponse(reward=1.0)) for t in trajectories])

    async def take(self) -> None:
        """Take both trajectories of group 0 into the batch of step 0."""
        await self.reward(ZERO, ONE)
        await self.server.take_batch(0, (ZERO, ONE), (V0, V0), 0)


def sampled(trajectory: TrajectoryId, finish: FinishReason = FinishReason.STOP) -> SampledTokens:
    return delivery(trajectory, sampled_segment(response(trajectory, 9)), finish=finish)


def block_spool(server: TrajectoryServer) -> tuple[asyncio.Event, asyncio.Future[Any]]:
    """Block the spool thread of a server on an event. Returns the event and a future that is done once the thread is
    unblocked."""
    opened = asyncio.Event()
    wait: Callable[[], Any] = opened.wait
    return opened, asyncio.get_running_loop().run_in_executor(server._async_spool._thread, wait)


def record_of_step() -> CommitRecord:
    ledger = LedgerState(num_started=4, num_ended={"consumed:none": 2}, live=((2, 4),), next_step=1, version=0)
    return CommitRecord(kind="step", step=0, ledger=ledger)


REFUSED = WeightCheck(
    instance=InstanceId("rollout-0"), version=V0, fingerprint="w0", weights=WeightReport(verified=1), drift=0.0,
    limit=1.0, refused="its logprobs differ",
)  # fmt: skip
ENDING = Ending(trajectory=ZERO, group=GroupId(0), fate=Fate.ABORTED, reason=AbortReason.ENGINE_FAILED, step=0)
SAID = ObservationItem(
    trajectory=ZERO, num_tokens=9, route_number=1, messages=(Message("tool", "3"),), seconds=0.5, replayed=()
)  # fmt: skip
Step = Callable[[ServerScene], Awaitable[Any]]


async def no_setup(scene: ServerScene) -> None:
    """Leave the server as created."""


async def zero_sampled(scene: ServerScene) -> None:
    await scene.sample(ZERO)


async def restarted(scene: ServerScene) -> None:
    await scene.sample(ZERO)
    scene.restart()


async def evaluated(scene: ServerScene) -> None:
    """Start sampling a response of an evaluation."""
    await scene.server.record_routes((route_item(EVALUATION),))
    assert len(scene.server._in_flight.live) == 5


WRITES: dict[str, tuple[Step, Step]] = {
    "draw": (no_setup, lambda scene: scene.server.draw(2, 1)),
    "record_routes": (no_setup, lambda scene: scene.server.record_routes((route_item(ZERO),))),
    "deliver": (no_setup, lambda scene: scene.server.deliver([sampled(ZERO)])),
    "add_observations": (zero_sampled, lambda scene: scene.server.add_observations([SAID])),
    "restart": (zero_sampled, lambda scene: scene.server.restart([(ZERO, 9, 1)])),
    "record_rewards": (
        zero_sampled,
        lambda scene: scene.server.record_rewards([RewardItem(ZERO, 9, 1, ScoredResponse(reward=0.5))]),
    ),
    "take_batch": (
        lambda scene: scene.reward(ZERO, ONE),
        lambda scene: scene.server.take_batch(0, (ZERO, ONE), (V0, V0), 0),
    ),
    "record_teacher_logprobs": (
        lambda scene: scene.reward(ZERO),
        lambda scene: scene.server.record_teacher_logprobs([TeacherLogprobs(ZERO, np.full(9, -2.0, np.float32))]),
    ),
    "discard": (zero_sampled, lambda scene: scene.server.discard((ENDING,), (V0,))),
    "commit": (lambda scene: scene.take(), lambda scene: scene.server.commit(record_of_step())),
    "resume": (restarted, lambda scene: scene.server.resume((ZERO,))),
    "end_evaluation": (evaluated, lambda scene: scene.server.end_evaluation()),
}
"""For each method that changes in-flight state: the setup that lets it change something, and the call."""

READS: dict[str, tuple[Step, Callable[[Any], bool]]] = {
    "outage": (lambda scene: scene.server.outage(), lambda why: why == ""),
    "recoverable": (lambda scene: scene.server.recoverable(), lambda work: [g.group for g in work.groups] == [0, 1]),
    "held_out": (lambda scene: scene.server.held_out(1), lambda prompts: len(prompts) == 1),
    "evaluation_items": (
        lambda scene: scene.server.evaluation_items(),
        lambda items: {i.prompt_number for i in items} == {0},
    ),
    "evaluated_responses": (
        lambda scene: scene.server.evaluated_responses([GroupId(0), GroupId(7)]),
        lambda responses: [response.num_tokens for response in responses] == [9, 0],
    ),
    "set_clock": (lambda scene: scene.server.set_clock(1.0), lambda nothing: nothing is None),
    "held_out_notice": (lambda scene: scene.server.held_out_notice(), lambda notice: notice == ""),
    "draft_responses": (
        lambda scene: scene.server.draft_responses((ZERO,), frozenset()), lambda new: not new.responses
    ),
    "episode_states": (
        lambda scene: scene.server.episode_states([(ZERO, 1)]), lambda states: states[0].num_tokens == 9
    ),
    "newest_turns": (
        lambda scene: scene.server.newest_turns([TurnItem(ZERO, 9, 1, "")]), lambda turns: len(turns[0].tokens) == 9
    ),
    "teacher_items": (lambda scene: scene.server.teacher_items((TrajectoryId(99),)), lambda items: items == []),
    "scoring_items": (lambda scene: scene.server.scoring_items((ZERO,), (9,)), lambda items: items[0].num_tokens == 9),
}  # fmt: skip
"""Methods that change nothing in flight, and a check of their result while ZERO is sampled."""

NEITHER = {"close", "chain_entry"}
"""One waits until all is written, the other until a step is stored."""

both_stores = pytest.mark.parametrize("make", [in_memory, on_disk])


def test_the_servers_process_switches_between_threads_every_half_millisecond(tmp_path: Path) -> None:
    sys.setswitchinterval(0.005)
    server_class(World())(actor_settings.server_settings(Body(tmp_path).config(), tmp_path / "store", 128), 0.0)
    assert sys.getswitchinterval() == pytest.approx(0.0005)


def test_every_server_method_is_listed_as_write_or_read() -> None:
    verbs = {name for name, _ in inspect.getmembers(TrajectoryServer, inspect.iscoroutinefunction) if name[0] != "_"}
    assert verbs == WRITES.keys() | READS.keys() | NEITHER
    assert not WRITES.keys() & READS.keys()


async def test_the_chain_entry_of_a_step_waits_for_its_commit_without_blocking_other_calls(tmp_path: Path) -> None:
    scene = await ServerScene.create(in_memory(), tmp_path)
    server = scene.server
    await server.commit(replace(record_of_step(), kind="refusal"))
    assert not server._committed.is_set(), "waiting for an event that is set gives no other call its turn"
    entry = asyncio.ensure_future(server.chain_entry(0))
    await scene.take()
    await server.commit(replace(record_of_step(), kind="refusal", weight_checks=(REFUSED,)))
    await asyncio.wait({entry}, timeout=LONG_S)
    assert not entry.done(), "that commit was not the step's"
    await server.commit(record_of_step())
    assert await entry == server._store.chain_entry(0)


@both_stores
async def test_a_repeated_refusal_is_stored_once(make: Callable[[], type[TrajectoryServer]], tmp_path: Path) -> None:
    """It is stored with the ledger of the previous commit, which is not that of the call."""
    scene = await ServerScene.create(make(), tmp_path)
    refusal = replace(record_of_step(), kind="refusal", step=1, weight_checks=(REFUSED,))
    for _ in range(2):
        await scene.server.commit(refusal)
    (stored,) = scene.server._store.commits()
    assert (stored.kind, stored.step, stored.ledger.num_started) == ("refusal", 0, 0)


@pytest.mark.parametrize("is_killed", [False, True])
async def test_the_spool_forgets_an_evaluation_that_ended_or_was_killed(tmp_path: Path, is_killed: bool) -> None:
    """The parts with one that a kill interrupted stayed until the run's end, with all later ones."""
    scene = await ServerScene.create(in_memory(), tmp_path)
    await evaluated(scene)
    if is_killed:
        await scene.restart().resume(())
    else:
        await scene.server.end_evaluation()
    await scene.take()
    rest = (TrajectoryId(2), TrajectoryId(3))
    await scene.server.discard(tuple(replace(ENDING, trajectory=t, group=GroupId(1)) for t in rest), (V0, V0))
    counts = {"consumed:none": 2, "aborted:engine_failed": 2}
    step = record_of_step()
    await scene.server.commit(replace(step, ledger=replace(step.ledger, num_ended=counts)))
    assert scene.server._spool.groups >= {0, 1}, "a run that is killed now resumes from version 0"
    scene.server._spool.rotate(oldest_resume_version=1)
    assert scene.server._spool.groups == set(), "all training work is stored"


@both_stores
@pytest.mark.parametrize("verb", WRITES)
async def test_server_calls_return_only_after_their_changes_are_spooled(
    make: Callable[[], type[TrajectoryServer]], tmp_path: Path, verb: str
) -> None:
    """Neither a call nor its repetition, which changes nothing, returns while the spool thread is blocked. A restarted
    server has the changes of every call that returned."""
    before, ask = WRITES[verb]
    scene = await ServerScene.create(make(), tmp_path)
    await before(scene)
    server = scene.server
    opened, blocked = block_spool(server)
    answers = list[asyncio.Future[Any]]()
    for _ in range(1 if verb == "commit" else 2):  # a repeated commit returns because the store has the step
        answers.append(asyncio.ensure_future(ask(scene)))
        await asyncio.wait(answers, timeout=LONG_S / 2, return_when=asyncio.FIRST_COMPLETED)
        assert not any(answer.done() for answer in answers), f"{verb} was answered while nothing could be written"
    opened.set()
    await asyncio.gather(blocked, *answers)
    assert repr(scene.restart()._in_flight) == repr(server._in_flight)
    assert scene.server._last_ledger == server._last_ledger


async def test_a_new_store_ignores_the_spool_of_another_store(tmp_path: Path) -> None:
    """The folder contains the spool of another store."""
    scene = await ServerScene.create(in_memory(), tmp_path)
    settings = replace(scene.settings, store=str(tmp_path / "another"))
    await scene.made(settings, 0.0).close()
    assert not scene.made(replace(settings, resumed=True), 0.0)._in_flight.live


async def test_times_are_on_the_runs_clock(tmp_path: Path) -> None:
    first, second = [await ServerScene.create(in_memory(), tmp_path / name) for name in ("first", "second")]
    created_s = time.monotonic()
    await first.server.set_clock(5000.0)
    resumed = second.made(replace(second.settings, resumed=True), 7000.0)
    for server, begin_s in ((first.server, 5000.0), (resumed, 7000.0)):
        await server.record_routes((route_item(ZERO),))
        elapsed_s = server._in_flight.live[ZERO].timings.routed_s - begin_s
        assert 0 <= elapsed_s <= time.monotonic() - created_s


async def test_groups_missing_from_the_spool_are_drawn_again_from_a_single_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = await ServerScene.create(in_memory(), tmp_path)
    await scene.take()
    await scene.server.commit(record_of_step())
    await scene.server._async_spool.clear()
    tasks = type(scene.server._task_cache)
    draw, drawn = tasks.prompt, list[tuple[int, int, int]]()

    def noted(self: Any, group: GroupId, source: int, task: int) -> Any:
        drawn.append((group, source, task))
        return draw(self, group, source, task)

    monkeypatch.setattr(tasks, "prompt", noted)
    scene.restart()
    assert drawn == [(1, 0, -1)]


async def test_an_observation_receipt_counts_all_tokens_of_the_trajectory(tmp_path: Path) -> None:
    scene = await ServerScene.create(in_memory(), tmp_path)
    await scene.sample(ZERO)
    repeated = replace(SAID, replayed=(SAID.messages,))
    assert await scene.server.add_observations([repeated]) == [ObservationReceipt(9, "differs")]
    (receipt,) = await scene.server.add_observations([SAID])
    assert receipt.num_tokens == scene.server._in_flight.live[ZERO].num_tokens > 9
    await scene.sample(EVALUATION)
    of_evaluation = replace(SAID, trajectory=EVALUATION)
    assert await scene.server.add_observations([of_evaluation]) == [ObservationReceipt(9, "full")], "its limit is 10"


@both_stores
@pytest.mark.parametrize("verb", READS)
async def test_reads_do_not_wait_for_the_spool_and_change_nothing(
    make: Callable[[], type[TrajectoryServer]], tmp_path: Path, verb: str
) -> None:
    scene = await ServerScene.create(make(), tmp_path)
    await scene.sample(ZERO)
    in_flight = repr(scene.server._in_flight)
    opened, blocked = block_spool(scene.server)
    read, is_right = READS[verb]
    assert is_right(await asyncio.wait_for(read(scene), LONG_S))
    assert repr(scene.server._in_flight) == in_flight
    opened.set()
    await blocked


@both_stores
@pytest.mark.parametrize("verb", ["add_observations", "restart", "record_rewards"])
async def test_an_episode_state_with_an_outcome_waits_until_the_outcome_is_spooled(
    make: Callable[[], type[TrajectoryServer]], tmp_path: Path, verb: str
) -> None:
    """A second environment host asks for the state while the outcome of the first is written. It reports the outcome to
    the driver without sending it again."""
    scene = await ServerScene.create(make(), tmp_path)
    setup, call = WRITES[verb]
    await setup(scene)
    opened, blocked = block_spool(scene.server)
    outcome = asyncio.ensure_future(call(scene))
    await asyncio.wait({outcome}, timeout=LONG_S / 2)
    states = asyncio.ensure_future(scene.server.episode_states([(ZERO, 1)]))
    await asyncio.wait({states}, timeout=LONG_S / 2)
    assert not states.done()
    opened.set()
    await asyncio.gather(blocked, outcome)
    assert [state is not None and state.has_outcome for state in await states] == [True]


async def test_a_reward_belongs_to_the_tokens_that_were_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the response is fetched, its episode restarts and samples as many tokens again."""
    scene = await ServerScene.create(in_memory(), tmp_path)
    await scene.sample(ZERO)
    server, records = scene.server, scene.server._task_cache.records

    async def slow_records(groups: Iterable[GroupId]) -> dict[GroupId, Any]:
        result = await records(groups)
        assert await server.restart([(ZERO, 9, 1)]) == [True]
        await server.record_routes((route_item(ZERO, 3),))
        await server.deliver([replace(sampled(ZERO), route_number=3)])
        return result

    monkeypatch.setattr(server._task_cache, "records", slow_records)
    (item,) = await server.scoring_items((ZERO,), (9,))
    assert await server.record_rewards([RewardItem(*item[:3], ScoredResponse(reward=1.0))]) == [None]
    assert ZERO not in server._in_flight.scored


async def test_a_trajectory_that_ends_while_its_state_is_read_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its host would run the environment, or report that it failed."""
    scene = await ServerScene.create(in_memory(), tmp_path)
    await scene.sample(ZERO, ONE)
    server, records = scene.server, scene.server._task_cache.records

    async def slow_records(groups: Iterable[GroupId]) -> dict[GroupId, Any]:
        result = await records(groups)
        await server.discard((ENDING,), (V0,))
        return result

    monkeypatch.setattr(server._task_cache, "records", slow_records)
    ended, live = await server.episode_states([(ZERO, 1), (ONE, 1)])
    assert ended is None
    assert live is not None and live.num_tokens == 9


async def test_of_two_observations_of_a_turn_the_later_is_late(tmp_path: Path) -> None:
    """Two hosts send them at once, and neither is encoded before the other arrives."""
    scene = await ServerScene.create(in_memory(), tmp_path)
    await scene.sample(ZERO)
    other = replace(SAID, messages=(Message("tool", "7"),))
    receipts = await asyncio.gather(*(scene.server.add_observations([said]) for said in (SAID, other)))
    assert sorted(receipt.problem for (receipt,) in receipts) == ["", "late"]


async def test_records_of_an_ended_evaluation_are_forgotten(tmp_path: Path) -> None:
    scene = await ServerScene.create(in_memory(), tmp_path)
    await scene.sample(EVALUATION)
    await scene.server.scoring_items((EVALUATION,), (9,))
    records = scene.server._task_cache._records
    assert any(map(is_evaluation, records))
    await scene.server.end_evaluation()
    assert not any(map(is_evaluation, records))


async def test_a_batch_is_refused_if_its_rewards_were_lost_with_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full, so the restored server has less of the trajectories than the driver knows of."""
    scene = await ServerScene.create(in_memory(), tmp_path)
    await scene.sample(ZERO)
    with monkeypatch.context() as patch:

        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(scene.server._spool, "_write", fail)
        await scene.reward(ONE)
        await scene.server.record_rewards([RewardItem(ZERO, 9, 1, ScoredResponse(reward=1.0))])
    server = scene.restart()
    with pytest.raises(StoreError, match=r"response 1, lost with .*: it has 0 of 9 tokens, and cannot be scored"):
        await server.scoring_items((ZERO, ONE), (9, 9))
    assert [item.num_tokens for item in await server.scoring_items((ZERO,), (9,))] == [9]
    with pytest.raises(
        StoreError, match=r"step 0 needs trajectories, .*: \[0, 1\]; free space, then `staleflow resume`"
    ):
        await server.take_batch(0, (ZERO, ONE), (V0, V0), 0)
    assert not server._in_flight.batches


async def test_a_server_that_was_replaced_while_silent_does_not_stop_its_successors_spool(tmp_path: Path) -> None:
    """Its late commit began the part that the successor was about to begin."""
    scene = await ServerScene.create(in_memory(), tmp_path)
    silent_spool = scene.server._spool
    scene.restart()
    silent_spool.rotate(oldest_resume_version=0)
    await scene.sample(ZERO)
    assert scene.restart()._in_flight.live[ZERO].num_tokens == 9


async def test_a_commit_is_refused_if_an_end_or_the_batch_was_lost_with_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger counted the trajectory as ended while the record listed it as in flight."""
    scene = await ServerScene.create(in_memory(), tmp_path)
    await scene.take()
    await scene.sample(TrajectoryId(2))
    with monkeypatch.context() as patch:

        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(scene.server._spool, "_write", fail)
        await scene.server.discard((replace(ENDING, trajectory=TrajectoryId(2), group=GroupId(1)),), (V0,))
    server = scene.restart()
    step = record_of_step()
    counts = {"consumed:none": 2, "aborted:engine_failed": 1}
    with pytest.raises(StoreError, match=r"ends of trajectories before step 0, lost with .*`staleflow resume`"):
        await server.commit(replace(step, ledger=replace(step.ledger, num_ended=counts)))
    with pytest.raises(StoreError, match=r"the batch of step 1, lost with .*`staleflow resume`"):
        await server.commit(replace(step, step=1))
    assert not server._store.commits()
    await server.commit(step)


@both_stores
async def test_a_commit_retried_after_a_failure_stores_the_step(
    make: Callable[[], type[TrajectoryServer]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit counts only once the store has it; until then all rows of the batch and of other endings are kept."""
    scene = await ServerScene.create(make(), tmp_path)
    await scene.take()
    server = scene.server
    await scene.sample(TrajectoryId(2))
    await server.discard((replace(ENDING, trajectory=TrajectoryId(2), group=GroupId(1)),), (V0,))
    with monkeypatch.context() as patch:

        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(server._store, "commit", fail)
        with pytest.raises(ActorFailed, match="No space left"):
            await server.commit(record_of_step())
    assert (await server.recoverable()).ledger.next_step == 0
    begin_s = time.monotonic()
    assert 0 <= (await server.commit(record_of_step()))["commit_s"] <= time.monotonic() - begin_s
    (stored,) = server._store.commits()
    assert (stored.step, stored.num_rows) == (0, 3)
    assert await server.commit(record_of_step()) == {"commit_s": 0.0, **stored.metrics}
    assert len(server._store.commits()) == 1, "a repeated one is in the store once"
    assert not server._step_batches._batches, "stored rows are not kept"
    (new,) = (await server.draft_responses((TrajectoryId(3),), frozenset())).responses
    assert new.responses == ((2, tuple(response(2, 9))),), "the stored response of its group"


@both_stores
async def test_undone_spool_entries_do_not_return_when_the_reset_cannot_be_written(
    make: Callable[[], type[TrajectoryServer]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier entries are removed instead; otherwise a resumed run would read them."""
    scene = await ServerScene.create(make(), tmp_path)
    await scene.sample(ZERO, ONE)
    await scene.server.record_routes((route_item(2),))
    server = scene.restart()
    with monkeypatch.context() as patch:

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(Spool, "_write", full)
        work = await server.resume((ZERO,))
    assert (work.num_responses, work.num_tokens, work.num_restarted) == (1, 9, 1), "2 had no tokens"
    assert (await server.resume((ZERO,))).num_restarted == 0, "it is counted once"
    assert not work.ledger.tasks_in_flight, "only runs of several sources list them"
    assert server._in_flight.live[ZERO].num_tokens == 0
    later = scene.restart()
    assert later._in_flight.live[ZERO].num_tokens == 0
