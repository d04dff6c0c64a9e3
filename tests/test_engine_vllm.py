"""vLLM under the conformance suite, and what only it promises. Runs where vllm is installed (`make test-vllm`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stores.trajectory import InstanceId
from tests.engine_conformance import EngineTests
from tests.test_engine_transformers import changed_weights, plain_logprobs

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)

from tasks.engines.vllm import VllmEngine, VllmSettings


def settings(model: Path, **changes: Any) -> VllmSettings:
    values: dict[str, Any] = {
        "model": str(model), "dtype": "float32", "device": "cpu", "temperature": 1.0, "max_running": 32,
        "kv_tokens": 4096, "page_tokens": 32, "max_batch_tokens": 512, "eos": (1,), "seed": 0,
    }  # fmt: skip
    return VllmSettings(**(values | changes))


class TestVllmEngine(EngineTests):
    @pytest.fixture
    def engine(self, tiny_model: Path) -> Iterator[VllmEngine]:
        one = VllmEngine(settings(tiny_model), InstanceId("rollout-0"))
        yield one
        one.close()

    @pytest.fixture
    def reference(self, tiny_model: Path) -> Callable[..., list[float]]:
        return lambda tokens, first, weights=None: plain_logprobs(tiny_model, tokens, first, weights)

    @pytest.fixture
    def other_weights(self, tiny_model: Path, tmp_path: Path) -> tuple[Path, str]:
        return changed_weights(tiny_model, tmp_path)
