"""Random episodes on vLLM. Runs where vllm is installed (`make test-vllm`; slow test: `make nightly-vllm`)."""

from __future__ import annotations

import importlib.util
import multiprocessing
from collections.abc import Iterator
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

import pytest

from staleflow.stores.trajectory import InstanceId, PolicyVersion
from tests.support.random_episodes import Subject
from tests.tasks.test_random_episodes import FEW, MANY, TwoModels, check_variety, random_episodes, reused_engines

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)

from staleflow.tasks.engines.engine_settings import VllmSettings
from staleflow.tasks.engines.vllm import VllmEngine
from tests.tasks.test_engine_vllm import settings


class Manager(BaseManager):
    """Manager of a process that serves an engine to all threads of this one."""


Manager.register("engine", VllmEngine)


class VllmElsewhere:
    """A vLLM engine in a separate process: two in one process crash."""

    def __init__(self, chosen: VllmSettings, instance: InstanceId) -> None:
        self._manager = Manager(ctx=multiprocessing.get_context("spawn"))
        self._manager.start()
        self._engine: Any = self._manager.engine(chosen, instance)  # type: ignore[attr-defined]  # registered above

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self._engine.load_statistics().version)

    def close(self) -> None:
        self._engine.close()
        self._manager.shutdown()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@pytest.fixture
def vllm(tiny_model: Path, tmp_path: Path) -> Iterator[Subject]:
    models = TwoModels(tiny_model, tmp_path)
    made: list[VllmElsewhere] = []

    def make(number: int) -> Any:
        # One full page of 32 tokens is found again by nearly every later turn; 256 tokens are too few for all at once.
        made.append(VllmElsewhere(settings(tiny_model, kv_tokens=256, seed=number), InstanceId(f"i{number}")))
        return made[-1]

    yield Subject(engine=reused_engines(make, models), weights=models.file, logprobs=models.logprobs)
    for item in made:
        item.close()


def test_random_episodes(vllm: Subject) -> None:
    counts = random_episodes(vllm, FEW)
    assert counts["turns"] > counts["episodes"] / 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_random_episodes(vllm: Subject) -> None:
    check_variety(random_episodes(vllm, MANY))
