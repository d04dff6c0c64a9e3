"""When an engine that stands still is told from one that works, or has nothing to do."""

from __future__ import annotations

from typing import Any

from pipeline.runtime.instance_link import Stillness
from stores.trajectory import PolicyVersion, TrajectoryId
from tasks.engines.base import EngineLoad


def load(tokens: int, **changes: Any) -> EngineLoad:
    values: dict[str, Any] = {
        "version": PolicyVersion(0), "running": 2, "kv_tokens": 9, "busy_s": 1.0, "tokens_sampled": tokens,
        "progress": ((TrajectoryId(0), tokens),),
    }  # fmt: skip
    return EngineLoad(**(values | changes))


def test_only_an_engine_with_work_and_without_any_sign_of_it_stands_still() -> None:
    watch = Stillness(10.0)
    assert watch.observe(load(5), 0.0) == 0
    assert watch.observe(load(5), 9.0) == 0
    assert watch.observe(load(6), 11.0) == 0, "it sampled"
    assert watch.observe(load(6, version=PolicyVersion(1)), 20.0) == 0, "it loaded weights"
    assert watch.observe(load(6, version=PolicyVersion(1), progress=()), 29.0) == 0, "one ended"
    assert watch.observe(load(6, version=PolicyVersion(1), progress=()), 39.0) == 0
    assert watch.observe(load(6, version=PolicyVersion(1), progress=()), 39.5) == 10.5
    assert watch.observe(load(6, running=0, progress=()), 99.0) == 0, "it has nothing to do"
    assert watch.observe(load(6), 108.0) == 0, "what it has is new"
