"""The test support of the runtime: virtual time, and in-process actors that match the real ones."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from staleflow.pipeline.processes.dask_workers import DaskWorkers
from staleflow.pipeline.processes.worker_protocol import Workers
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.tasks.actors.parameter_server import ParameterServer
from staleflow.tasks.actors.reward_worker import RewardWorker
from staleflow.tasks.actors.rollout_instance import RolloutInstance
from staleflow.tasks.actors.trainer import Trainer
from staleflow.tasks.actors.trainer_rank import FollowerRank
from staleflow.tasks.engines.base import Engine
from tests.support import virtual_time
from tests.support.in_process import InProcessWorkers
from tests.support.memory_store import MemoryStore
from tests.support.scripted import (
    PlayedFollowerRank,
    PlayedParameterServer,
    PlayedTrainer,
    VirtualEngine,
    VirtualRewardWorker,
    VirtualRolloutInstance,
)


def verbs(cls: type[Any]) -> dict[str, list[str]]:
    """Return the parameters of the public methods of a class."""
    return {
        name: list(inspect.signature(method).parameters)
        for name, method in inspect.getmembers(cls, inspect.isfunction)
        if not name.startswith("_")
    }


@pytest.mark.parametrize(
    ("played", "real"),
    [
        (PlayedTrainer, Trainer),
        (PlayedFollowerRank, FollowerRank),
        (PlayedParameterServer, ParameterServer),
        (VirtualRewardWorker, RewardWorker),
        (VirtualRolloutInstance, RolloutInstance),
    ],
)
def test_in_process_actors_have_the_methods_of_the_real_actors(played: type[Any], real: type[Any]) -> None:
    assert {name: verbs(played)[name] for name in verbs(real)} == verbs(real)
    assert all(inspect.iscoroutinefunction(getattr(played, name)) for name in verbs(real))


def test_in_process_actors_have_the_constructor_arguments_of_the_real_actors() -> None:
    for played, real, own in (
        (PlayedTrainer, Trainer, 2),
        (PlayedFollowerRank, FollowerRank, 2),
        (PlayedParameterServer, ParameterServer, 2),
    ):
        parameters = [list(inspect.signature(c.__init__).parameters)[1:] for c in (played, real)]
        assert parameters[0][own:] == parameters[1]


def test_engine_store_and_workers_of_the_tests_implement_their_protocols() -> None:
    assert {name: verbs(VirtualEngine)[name] for name in verbs(Engine)} == verbs(Engine)
    assert set(verbs(MemoryStore)) <= set(verbs(VersionedStore))
    for workers in (InProcessWorkers, DaskWorkers):
        assert {name: verbs(workers)[name] for name in verbs(Workers)} == verbs(Workers)


def test_a_task_that_outlives_the_run_is_named() -> None:
    async def forgetful() -> None:
        asyncio.get_running_loop().create_task(asyncio.sleep(9), name="forgotten")

    with pytest.raises(virtual_time.LeftOver, match="forgotten: sleep"):
        virtual_time.run(forgetful())


def test_an_executor_keeps_its_order_and_survives_a_cancelled_caller() -> None:
    done = []

    async def work(name: str) -> None:
        await asyncio.sleep(1.0)
        done.append((name, asyncio.get_running_loop().time()))

    async def ask() -> None:
        loop: Any = asyncio.get_running_loop()  # whose executors run coroutines
        executor = object()
        first = asyncio.ensure_future(loop.run_in_executor(executor, work, "first"))
        second = loop.run_in_executor(executor, work, "second")
        await asyncio.sleep(0.5)
        first.cancel()
        await second

    virtual_time.run(ask())
    assert done == [("first", 1.0), ("second", 2.0)]
