"""Builds engines from their settings, in the process that samples with them, and generates responses with an engine
that has no other requests.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any

from staleflow.stores.trajectory import InstanceId, TrajectoryId
from staleflow.tasks.engines.base import Engine, Request, SampledTokens
from staleflow.tasks.engines.engine_settings import EmulatedSettings, TransformersSettings, VllmSettings

MODULES: dict[type[Any], str] = {
    TransformersSettings: "staleflow.tasks.engines.transformers",
    VllmSettings: "staleflow.tasks.engines.vllm",
    EmulatedSettings: "staleflow.tasks.engines.emulated_engine",
}
"""Module of the engine of each settings class. It has a function `build(settings, instance, threads)`, and is imported
when the engine is built."""


def build_engine(settings: Any, instance: InstanceId, threads: int) -> Engine:
    """Build the engine that the settings describe. Settings of an engine from another package must have a method
    `build(instance, threads)`.

    Args:
        settings: of one of the classes in MODULES, or of another package.
        instance: the rollout instance for which the engine samples.
        threads: number of CPU threads of the engine.
    """
    if (module := MODULES.get(type(settings))) is not None:
        engine: Engine = importlib.import_module(module).build(settings, instance, threads)
    else:
        engine = settings.build(instance, threads)
    return engine


def generate_responses(
    engine: Engine, prompts: Sequence[tuple[int, ...]], *, max_new_tokens: Sequence[int], greedy: bool, timeout_s: float
) -> list[tuple[int, ...] | None]:
    """Return the token ids of the responses, in the order of the prompts; None where the engine failed. Raises
    TimeoutError. max_new_tokens: for each prompt."""
    requests = [
        Request(trajectory=TrajectoryId(-1 - i), route_number=0, tokens=p, max_new_tokens=most, greedy=greedy)
        for i, (p, most) in enumerate(zip(prompts, max_new_tokens, strict=True))
    ]
    engine.submit(requests)
    responses: dict[int, tuple[int, ...] | None] = {}
    deadline = time.monotonic() + timeout_s
    while len(responses) < len(requests):
        if time.monotonic() > deadline:
            raise TimeoutError(f"evaluation: {len(responses)} of {len(requests)} responses after {timeout_s:g} s")
        for event in engine.events(0.5):
            segments = event.segments if isinstance(event, SampledTokens) else None
            tokens = None if segments is None else tuple(int(t) for segment in segments for t in segment.tokens)
            responses[-1 - event.trajectory] = tokens
    return [responses[i] for i in range(len(requests))]
