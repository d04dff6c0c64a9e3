"""Measurements of the driver."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from staleflow.pipeline.config import loading
from staleflow.pipeline.processes.clock import RunClock
from staleflow.pipeline.processes.instance_handle import InstanceHandle
from staleflow.pipeline.processes.worker_protocol import PlacedActor
from staleflow.pipeline.runtime.measurements import Measurements
from staleflow.stores.trajectory import PolicyVersion
from staleflow.tasks.engines.base import EngineLoad
from tests.support import virtual_time

RUN = virtual_time.run


@pytest.mark.parametrize("earlier_s", [0.0, 1000.0])
async def test_assigned_time_excludes_time_before_the_resume(earlier_s: float) -> None:
    config = loading.load(Path("examples/dryrun.toml"))
    placed = PlacedActor("rollout-0", "rollout", "tcp://a", "tcp://a", "host", actor=None, future=None)
    instance = InstanceHandle(placed, 0)

    measured = Measurements(config, RunClock(), earlier_s)
    await asyncio.sleep(5.0)
    measured.count_assigned_time({instance.id: 1}, {instance.id: instance})
    assert instance.assigned_s == pytest.approx(5.0)
    assert measured.seconds_by_activity([], [instance])["rollout_idle_with_work_s"] == pytest.approx(5.0)


async def test_the_work_of_lost_instances_counts() -> None:
    """An instance and its replacement count as one in a mean over instances."""

    def instance(name: str, index: int, seconds: float, cached_tokens: int) -> InstanceHandle:
        placed = PlacedActor(name, "rollout", "tcp://a", "tcp://a", "host", actor=None, future=None)
        first = EngineLoad(version=PolicyVersion(0), running=0, kv_tokens=0, busy_s=0.0, tokens_sampled=0, progress=())
        last = replace(first, cached_tokens=cached_tokens)
        return InstanceHandle(placed, index, busy_s=seconds, assigned_s=2 * seconds, initial_load=first, load=last)

    measured = Measurements(loading.load(Path("examples/dryrun.toml")), RunClock(), 0.0)
    instances = [instance("rollout-0", 0, 4.0, 50), instance("rollout-1", 1, 10.0, 7)]
    instances.append(instance("rollout-0.1", 0, 6.0, 3))
    metrics = {"train_s": 0.0, "publish_s": 0.0}
    measured.finish_training(metrics, instances, 9)
    seconds = measured.seconds_by_activity([], instances)
    assert (metrics["cached_tokens"], metrics["kept_tokens"]) == (60.0, 9.0)
    assert (seconds["rollout_busy_s"], seconds["rollout_idle_with_work_s"]) == (10.0, 10.0)
