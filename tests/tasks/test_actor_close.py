"""Closing an actor does not wait for running calls, starts no queued call, and ends its threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from staleflow.stores.trajectories.records import EMPTY_LEDGER, CommitRecord
from staleflow.stores.trajectory import InstanceId, PolicyVersion
from staleflow.tasks.actors import reward_worker
from staleflow.tasks.actors.reward_worker import RewardWorker
from staleflow.tasks.actors.rollout_instance import RolloutInstance
from staleflow.tasks.actors.task_cache import TaskCache
from staleflow.tasks.actors.trainer import Trainer
from staleflow.tasks.actors.trainer_rank import FollowerRank
from staleflow.tasks.training.rank import Rank
from tests.support.scripted import World
from tests.tasks.test_rollout_instance import Gate, make_server


class BlockingResource:
    """Policy, engine, scorer or prompts of an actor. Calls and `close` block until their gates are opened."""

    version = PolicyVersion(0)

    def __init__(self) -> None:
        self.gate, self.may_close = Gate(), threading.Event()
        self.num_calls, self.closed = 0, False

    def build(self, *_: object) -> BlockingResource:
        return self

    def wake(self) -> None: ...

    sleep = wake

    def call(self, *_: object) -> list[Any]:
        self.num_calls += 1
        self.gate.wait()
        return []

    logprobs = abort = events = peek = score = held_out = call

    def close(self) -> None:
        assert self.may_close.wait(20)
        self.closed = True


@dataclass(frozen=True)
class Case:
    """An actor under test. create: makes it from a resource and a folder. call: occupies a thread. second_call: waits
    for that thread; by default the same call."""

    create: Callable[[Any, Path], Any]
    call: Callable[[Any], Awaitable[Any]]
    second_call: Callable[[Any], Awaitable[Any]] | None = None


def instance(resource: Any, folder: Path) -> RolloutInstance:
    return RolloutInstance(resource, InstanceId("one"), 1, 30.0, 0.0)


CASES = {
    "trainer": Case(
        lambda resource, folder: Trainer(resource, str(folder / "memory"), 1, 60.0, str(folder / "resume"), 0),
        lambda actor: actor.logprobs((1, 2)),
    ),
    "trainer rank": Case(
        lambda resource, folder: FollowerRank(resource, 1), lambda actor: actor.call_policy("logprobs")
    ),
    "commands of an instance": Case(instance, lambda actor: actor.abort(())),
    "events of an instance": Case(instance, lambda actor: actor.next_events(None, 60.0), lambda a: a.flush(None)),
    "reward worker": Case(lambda resource, folder: RewardWorker(resource, 1.0), lambda actor: actor.score_texts([])),
    "prompts": Case(lambda resource, folder: TaskCache(resource, (), lambda _: {}), lambda actor: actor.held_out(1)),
}


def assert_ended(before: set[threading.Thread]) -> None:
    for thread in set(threading.enumerate()) - before:
        thread.join(20.0)
        assert not thread.is_alive(), f"{thread.name} runs on"


async def test_the_threads_of_a_closed_trajectory_server_end(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    server = make_server(World(), tmp_path)
    await server.draw(0, 1)
    await server.commit(CommitRecord(kind="end", step=0, ledger=replace(EMPTY_LEDGER, num_started=2)))
    await server.close()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert_ended(before)


@pytest.mark.parametrize("name", CASES)
async def test_a_closed_actor_starts_no_call_and_its_threads_end(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_worker, "Scorer", BlockingResource.build)
    before, resource, case = set(threading.enumerate()), BlockingResource(), CASES[name]
    actor = case.create(resource, tmp_path)
    if isinstance(actor, FollowerRank):
        await actor.join(Rank(number=1, count=2, host="localhost", port=1))
    calls = [asyncio.ensure_future(call(actor)) for call in (case.call, case.second_call or case.call)]
    while not resource.num_calls:
        await asyncio.sleep(0.001)
    if isinstance(actor, TaskCache | RewardWorker):
        resource.may_close.set()
    closing = asyncio.ensure_future(asyncio.to_thread(actor.close) if isinstance(actor, TaskCache) else actor.close())
    await asyncio.wait({closing}, timeout=0.05)
    assert resource.may_close.is_set() or not closing.done(), "an actor is closed once its resource is"
    resource.may_close.set()
    await closing
    assert not (tmp_path / "memory").exists()
    await resource.gate.open()
    first, second = await asyncio.gather(*calls, return_exceptions=True)
    assert not isinstance(first, BaseException) and isinstance(second, asyncio.CancelledError)
    assert resource.num_calls == 1 and resource.closed == (not isinstance(actor, TaskCache))
    await asyncio.get_running_loop().shutdown_default_executor()
    assert_ended(before)
