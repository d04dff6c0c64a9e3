"""Measurements of the driver."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from staleflow.pipeline.config import loading
from staleflow.pipeline.processes.clock import RunClock
from staleflow.pipeline.processes.instance_handle import InstanceHandle
from staleflow.pipeline.processes.worker_protocol import PlacedActor
from staleflow.pipeline.runtime.measurements import Measurements
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
