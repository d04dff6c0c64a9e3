"""Generates one response for each of a list of prompts, with an engine that has no other requests."""

from __future__ import annotations

import time
from collections.abc import Sequence

from staleflow.stores.trajectory import TrajectoryId
from staleflow.tasks.engines.base import Engine, Request, SampledTokens


def generate_responses(
    engine: Engine, prompts: Sequence[tuple[int, ...]], *, max_new_tokens: int, greedy: bool, timeout_s: float
) -> list[tuple[int, ...] | None]:
    """Return the token ids of the responses, in the order of the prompts; None where the engine failed. Raises
    TimeoutError."""
    requests = [
        Request(trajectory=TrajectoryId(-1 - i), route_number=0, tokens=p, max_new_tokens=max_new_tokens, greedy=greedy)
        for i, p in enumerate(prompts)
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
