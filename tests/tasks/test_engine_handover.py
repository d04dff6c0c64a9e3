"""Engines outlive their actors: an engine is reused by a resumed run or closed."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from staleflow.pipeline.config import actor_settings
from staleflow.stores.trajectory import InstanceId
from staleflow.tasks.actors.rollout_instance import RolloutInstance
from staleflow.tasks.engines import engine_handover
from staleflow.tasks.engines.emulated_engine import EmulatedEngine
from tests.support.bodies import Body


@pytest.fixture
def settings(tmp_path: Path) -> Any:
    return actor_settings.engine_settings(Body(tmp_path).config(), 0, ())


@pytest.fixture(autouse=True)
def close_engines() -> Iterator[None]:
    yield
    gc.collect()
    for item in list(engine_handover._registered_engines):
        item.engine.close()
        engine_handover.unregister(item.engine)


def place_instance(
    settings: Any, name: str = "rollout-0", run_folder: str = "/runs/x", *, resumed: bool = False
) -> RolloutInstance:
    return RolloutInstance(settings, InstanceId(name), 1, 5.0, 0.0, run_folder=run_folder, resumed=resumed)


def engine_of(instance: RolloutInstance) -> EmulatedEngine:
    engine = instance._engine
    assert isinstance(engine, EmulatedEngine)
    return engine


def drop_actors(instances: list[RolloutInstance]) -> list[EmulatedEngine]:
    """Drop actors as Dask does when their driver is gone; returns their engines."""
    engines = [engine_of(instance) for instance in instances]
    instances.clear()
    gc.collect()
    return engines


def test_a_resumed_run_reuses_an_engine_under_a_new_seed_and_name(settings: Any) -> None:
    (engine,) = drop_actors([place_instance(settings)])
    reseeded = dataclasses.replace(settings, seed=7) if hasattr(settings, "seed") else settings
    then = place_instance(reseeded, "rollout-1", resumed=True)
    assert engine_of(then) is engine
    assert asyncio.run(then.took_over())
    assert engine._instance == "rollout-1"
    assert len(engine_handover._registered_engines) == 1


@pytest.mark.parametrize("difference", ["run", "settings"])
def test_an_orphan_engine_of_other_settings_or_another_run_is_closed(settings: Any, difference: str) -> None:
    (engine,) = drop_actors([place_instance(settings)])
    changed = (
        dataclasses.replace(settings, max_running=settings.max_running + 1) if difference == "settings" else settings
    )
    then = place_instance(changed, run_folder="/runs/y" if difference == "run" else "/runs/x", resumed=True)
    assert engine_of(then) is not engine
    assert not asyncio.run(then.took_over())
    assert not engine._thread.is_alive()


def test_an_engine_of_no_run_is_not_reused(settings: Any) -> None:
    (engine,) = drop_actors([place_instance(settings)])
    engine_handover.unregister(engine)
    teacher = lambda: None  # noqa: E731  any object that can be referenced weakly
    engine_handover.register("", settings, engine, teacher)
    del teacher
    then = place_instance(settings)
    assert engine_of(then) is not engine
    assert not asyncio.run(then.took_over())
    assert not engine._thread.is_alive()


def test_a_dead_engine_is_not_reused(settings: Any) -> None:
    (engine,) = drop_actors([place_instance(settings)])
    engine.close()
    then = place_instance(settings, resumed=True)
    assert engine_of(then) is not engine
    assert not asyncio.run(then.took_over())


def test_an_engine_in_use_is_not_reused(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_handover, "ACTOR_EXIT_S", 0.3)
    first = place_instance(settings)
    second = place_instance(settings, "rollout-1", resumed=True)
    assert engine_of(second) is not engine_of(first)
    assert engine_of(first)._thread.is_alive()


def test_a_closed_engine_is_unregistered(settings: Any) -> None:
    with pytest.raises(LookupError):
        asyncio.run(engine_handover.require_orphan())
    instance = place_instance(settings)
    asyncio.run(instance.close())
    assert engine_handover._registered_engines == []


def test_require_orphan_needs_an_engine_without_an_actor(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_handover, "DRIVER_EXIT_S", 0.3)
    instances = [place_instance(settings)]
    with pytest.raises(LookupError, match="no engine without an actor"):
        asyncio.run(engine_handover.require_orphan())
    drop_actors(instances)
    asyncio.run(engine_handover.require_orphan())


@pytest.mark.parametrize("by", ["an instance of a run that begins", "a trainer"])
def test_other_roles_close_orphan_engines(settings: Any, by: str) -> None:
    (engine,) = drop_actors([place_instance(settings)])
    if by == "a trainer":
        engine_handover.close_orphans()
    else:
        assert engine_of(place_instance(settings, resumed=False)) is not engine
    assert not engine._thread.is_alive()


def test_of_two_orphan_engines_the_second_is_closed(settings: Any) -> None:
    """On a cluster each engine has its own process; here the memory of the second one is freed."""
    engines = drop_actors([place_instance(settings, f"rollout-{i}") for i in range(2)])
    then = place_instance(settings, resumed=True)
    assert engine_of(then) is engines[0]
    assert not engines[1]._thread.is_alive()
