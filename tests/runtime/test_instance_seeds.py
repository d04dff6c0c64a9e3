"""Sampling seeds of instances across replacements and resumes."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any, cast

import pytest

from staleflow.pipeline.config import loading
from staleflow.pipeline.config.model_facts import ModelFacts
from staleflow.pipeline.processes.worker_protocol import PlacedActor, Workers
from staleflow.pipeline.recovery.resumption import Resumption
from staleflow.pipeline.runtime.actor_client import MAX_REPLACEMENTS
from staleflow.pipeline.runtime.actors import Actors
from staleflow.stores.errors import ActorLost
from staleflow.stores.trajectory import PolicyVersion
from staleflow.tasks.engines.engine_settings import TransformersSettings


class FreshInstance:
    """An instance that has built a new engine."""

    async def took_over(self) -> bool:
        return False


class RecordingWorkers:
    """Records placements without placing. Rejects the server, so that `place_all` ends there."""

    def __init__(self) -> None:
        self.engines: dict[str, TransformersSettings] = {}
        self.placed: dict[str, PlacedActor] = {}

    async def place(self, name: str, role: str, cls: type[Any], *args: Any, **_: Any) -> PlacedActor:
        if role == "server":
            raise ActorLost("no server here")
        if role == "rollout":
            self.engines[name] = args[0]
        placed = PlacedActor(
            name=name, role=role, worker=name, address="tcp://w", host="", actor=FreshInstance(), future=None
        )
        if role == "rollout":
            self.placed[name] = placed
        return placed

    def mark_lost(self, name: str) -> None:
        del self.placed[name]


def seeds_of(resumption: Resumption | None, tmp_path: Path, instances: int) -> dict[str, int]:
    """Return the seeds of all instances of a run by name, with the maximum number of replacements."""

    async def scenario() -> RecordingWorkers:
        cluster = RecordingWorkers()
        config = loading.from_tree({"model": {"path": "x"}, "rollout": {"max_new_tokens": 8}})
        actors = Actors(config, cast(Workers, cluster), tmp_path, ModelFacts(context_length=64, eos=(1,), nonce="n"))
        try:
            await actors.place_all(resumption)
        except ActorLost:
            cluster.engines.clear()
        for index in range(instances):
            for attempt in range(MAX_REPLACEMENTS + 1):
                instance = await actors.place_instance(index)
                if attempt < MAX_REPLACEMENTS:
                    actors.record_loss(instance.placed_actor.name, ActorLost("gone"))
        return cluster

    return {name: settings.seed for name, settings in asyncio.run(scenario()).engines.items()}


def test_joined_and_lost_instances_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "staleflow"):
        seeds_of(None, tmp_path, 1)
    received = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert received[-2:] == [
        ("WARNING", "gone; replacing it"),
        ("INFO", "rollout-0.3 replaces another instance on tcp://w"),
    ]
    assert ("INFO", "rollout-0 joins on tcp://w") in received


def test_instance_seeds_are_unique_across_replacements_and_resumes(tmp_path: Path) -> None:
    fresh = seeds_of(None, tmp_path, 300)
    assert len(fresh) == 300 * (MAX_REPLACEMENTS + 1)
    again = seeds_of(Resumption(version=PolicyVersion(0), num_earlier_starts=1), tmp_path, 300)
    later = seeds_of(Resumption(version=PolicyVersion(4), num_earlier_starts=2), tmp_path, 300)
    assert len({*fresh.values(), *again.values(), *later.values()}) == 3 * len(fresh)
    assert seeds_of(None, tmp_path, 300) == fresh
