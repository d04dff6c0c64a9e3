"""Actors of a run see only their GPUs. NVIDIA's library is simulated, the processes are real."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from staleflow.pipeline.config import loading
from staleflow.pipeline.processes.dask_workers import connect
from tests.support.fake_nvml import pynvml


class Environment:
    """An actor that returns the environment of its process."""

    async def visible(self) -> tuple[str | None, str | None]:
        return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER")


async def seen_by(job: Path, *names: str) -> dict[str, str | None]:
    """Return the visible GPUs of each actor of a run."""
    workers = await connect(loading.load(job, ("rollout.instances=2",)))
    try:
        results = {}
        for name in names:
            role = name.partition("-")[0]
            placed = await workers.place(name, role, Environment)
            results[name], order = await placed.actor.visible()
            assert order == "PCI_BUS_ID"
        return results
    finally:
        await workers.close()


def test_each_actor_sees_its_gpu_and_light_actors_see_none(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_GPUS", "4xH100-80")
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    names = ("server", "trainer", "rollout-0", "rollout-1.1", "reward-0")
    seen = asyncio.run(seen_by(job, *names))
    assert seen == {"server": "", "trainer": "0", "rollout-0": "1", "rollout-1.1": "2", "reward-0": ""}
