"""Responses to a list of prompts, one each, from an engine that is otherwise idle."""

from __future__ import annotations

import time
from collections.abc import Sequence

from staleflow.stores.trajectory import TrajectoryId
from staleflow.tasks.engines.base import Engine, Request, SampledTokens


def answers(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    *,
    max_new_tokens: int | Sequence[int],
    greedy: bool,
    deadline_s: float,
) -> list[tuple[int, ...] | None]:
    """Token ids of the responses, in the order of the prompts; None where the engine failed. max_new_tokens: of each
    response, or of all. Raises TimeoutError."""
    responses = generate_sampled(engine, prompts, max_new_tokens=max_new_tokens, greedy=greedy, deadline_s=deadline_s)
    return [
        None if response is None else tuple(int(token) for segment in response.segments for token in segment.tokens)
        for response in responses
    ]


def generate_sampled(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    *,
    max_new_tokens: int | Sequence[int],
    greedy: bool,
    deadline_s: float,
) -> list[SampledTokens | None]:
    """The same with logprobs, and why each response has ended."""
    most = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    requests = [
        Request(trajectory=TrajectoryId(-1 - i), route_number=0, tokens=prompt, max_new_tokens=most[i], greedy=greedy)
        for i, prompt in enumerate(prompts)
    ]
    engine.submit(requests)
    done: dict[int, SampledTokens | None] = {}
    deadline = time.monotonic() + deadline_s
    while len(done) < len(requests):
        if time.monotonic() > deadline:
            raise TimeoutError(f"evaluation: {len(done)} of {len(requests)} responses after {deadline_s:g} s")
        for event in engine.events(0.5):
            done[-1 - event.trajectory] = event if isinstance(event, SampledTokens) else None
    return [done[i] for i in range(len(requests))]
