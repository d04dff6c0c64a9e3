"""The emulated engine under the conformance suite, and what only it promises: time by the cost model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stores import parameters
from stores.parameters import ParameterFolder
from stores.trajectory import FinishReason, InstanceId, PolicyVersion
from tasks.engines.base import Engine
from tasks.engines.cost_model import CostModel
from tasks.engines.emulated import EmulatedEngine, weights, word_logprobs
from tasks.engines.settings import EmulatedSettings
from tasks.names import REWARD_TOKEN
from tasks.workload import DrawnWorkload, WorkloadSettings
from tests.tasks.engine_conformance import EngineTests, collect, request, tokens_of

COST = CostModel(k1=0.0, k2=0.004, k3=0.00005, k4=0.001, b=0.002, prefill=0.00001)


def workload(**changes: Any) -> DrawnWorkload:
    values: dict[str, Any] = {
        "kind": "lognormal", "prompt_tokens": 4, "median": 30.0, "sigma": 0.6, "long_share": 0.1, "long_ratio": 4.0,
        "exponent": 1.5, "turns": 3.0, "tool_s": 1.0, "tool_tokens": 5, "group_correlation": 0.0, "signal_share": 1.0,
        "members": 4, "max_tokens": 100, "seed": 0,
    }  # fmt: skip
    return DrawnWorkload(WorkloadSettings(**(values | changes)))


def settings(**changes: Any) -> EmulatedSettings:
    values: dict[str, Any] = {
        "cost": COST, "workload": workload(), "members": 4, "kv_tokens": 4096, "max_running": 32, "pull_s": 0.005,
        "keep": False, "time_scale": 2.0,
    }  # fmt: skip
    return EmulatedSettings(**(values | changes))


class TestEmulatedEngine(EngineTests):
    @pytest.fixture
    def engine(self) -> Iterator[EmulatedEngine]:
        one = EmulatedEngine(settings(), InstanceId("rollout-0"))
        yield one
        one.close()

    def kill(self, engine: Engine) -> None:
        assert isinstance(engine, EmulatedEngine)

        def fail() -> float:
            raise RuntimeError("no more time")

        with engine._changed:
            engine._batch.next_s = fail  # type: ignore[method-assign]
            engine._changed.notify_all()

    @contextmanager
    def hang(self, engine: Engine) -> Iterator[None]:
        """Its clock stands still."""
        assert isinstance(engine, EmulatedEngine)
        with engine._changed:
            stood_s, scale = time.monotonic() - engine._begin, engine._settings.time_scale
            engine._settings = replace(engine._settings, time_scale=1e-9)
            engine._begin -= stood_s * scale / 1e-9 - stood_s
        yield
        with engine._changed:
            engine._settings = replace(engine._settings, time_scale=scale)
            engine._begin = time.monotonic() - stood_s
            engine._changed.notify_all()

    @pytest.fixture
    def reference(self) -> Callable[..., list[float]]:
        return lambda tokens, first, weights=None: word_logprobs(np.asarray(tokens[first:], np.int32)).tolist()

    @pytest.fixture
    def other_weights(self, tmp_path: Path) -> tuple[Path, str]:
        named = weights(5)
        return ParameterFolder(tmp_path / "weights").publish(PolicyVersion(5), named), parameters.fingerprint(named)


def test_responses_are_as_long_and_as_good_as_the_workload_says() -> None:
    engine = EmulatedEngine(settings(time_scale=50.0), InstanceId("i"))
    try:
        engine.submit([request(i, max_new_tokens=100) for i in range(40)])
        for trajectory, sampled in collect(engine, 40).items():
            group, member = divmod(trajectory, 4)
            tokens = tokens_of(sampled)
            assert len(tokens) == workload().turns(group, member)[0].tokens
            assert sampled.finish is FinishReason.STOP
            assert tokens[0] == REWARD_TOKEN + workload().reward(group, member)
    finally:
        engine.close()


def test_time_passes_as_the_cost_model_says() -> None:
    """One request alone: its tokens times the step time, and not sooner. (That it is not much later is measured, in
    benchmarks/overhead.py.)"""
    engine = EmulatedEngine(settings(), InstanceId("i"))
    try:
        begin = time.monotonic()
        engine.submit([request(0, max_new_tokens=20)])
        length = len(tokens_of(collect(engine, 1)[0]))
        assert time.monotonic() - begin >= (COST.decode_s(1, 4, length) + 4 * COST.prefill) / 2.0
        assert engine.load_statistics().busy_s == pytest.approx((COST.decode_s(1, 4, length) + 4 * COST.prefill) / 2.0)
    finally:
        engine.close()
