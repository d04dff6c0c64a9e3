"""Times decode steps of a real engine that verify drafts, in this process, for `staleflow profile`.

Greedy responses are sampled twice: first without drafts, then with the first responses as drafts, which are all
accepted. The timed steps thus verify the maximum number of tokens, with the engine's own drafting and bookkeeping.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from staleflow.pipeline.profiling.engine_profile import (
    POLL_S,
    WARM_TOKENS,
    Grid,
    check_timeout,
    has_ended,
    probe_request,
    wait_until_empty,
)
from staleflow.pipeline.profiling.fit import DraftedPoint
from staleflow.stores.trajectory import TrajectoryId
from staleflow.tasks.engines.base import Engine, EngineLoad

MIN_STEPS = 3
"""Minimum decode steps of a batch for a point."""


def measure_drafted(
    engine: Engine, grid: Grid, length: int, kv_tokens: int, progress: Callable[[str], None]
) -> list[DraftedPoint]:
    """Time steps that verify up to `length` drafted tokens per request, at the grid's shortest context.

    A batch that does not fit into the cache, or without drafts, gives no point.
    """
    points: list[DraftedPoint] = []
    context, tokens, first = grid.contexts[0], 2 * grid.steps, 3 * 10**6
    for running in grid.running:
        if running * (context + tokens) > kv_tokens:
            continue
        progress(f"{running} running, {context} tokens of context each, up to {length} drafted")
        engine.set_draft_length(0)
        seeds = range(first, first + running)
        _sample(engine, [(TrajectoryId(seed), seed) for seed in seeds], context, tokens)
        engine.set_draft_length(length)
        marks = _sample(engine, [(TrajectoryId(running + seed), seed) for seed in seeds], context, tokens)
        first += 2 * running
        if marks and (point := _point(marks[0], marks[-1], running)) is not None:
            points.append(point)
    engine.set_draft_length(0)
    return points


def _sample(
    engine: Engine, batch: list[tuple[TrajectoryId, int]], context: int, tokens: int
) -> list[tuple[float, EngineLoad]]:
    """Sample a batch to its end; returns (seconds, engine load) of each poll during which all requests decoded."""
    engine.submit([probe_request(t, context, tokens, seed=seed, greedy=True) for t, seed in batch])
    started_s = time.monotonic()
    marks: list[tuple[float, EngineLoad]] = []
    all_running = True
    while (load := engine.load_statistics()).running:
        now = time.monotonic()
        all_running = all_running and not has_ended(engine)
        sampled = [n for _, n in load.progress]
        if all_running and len(sampled) == len(batch) and min(sampled) >= WARM_TOKENS:
            marks.append((now, load))
        check_timeout(started_s, engine)
        time.sleep(POLL_S)
    wait_until_empty(engine)
    return marks


def _point(first: tuple[float, EngineLoad], last: tuple[float, EngineLoad], running: int) -> DraftedPoint | None:
    (begin_s, before), (end_s, after) = first, last
    gained = after.tokens_sampled - before.tokens_sampled - (after.accepted_tokens - before.accepted_tokens)
    drafted = after.drafted_tokens - before.drafted_tokens
    if gained < MIN_STEPS * running or not drafted:
        return None
    return DraftedPoint(
        running=running,
        kv_tokens=(before.kv_tokens + after.kv_tokens) / 2,
        drafted=drafted / gained,
        step_s=(end_s - begin_s) * running / gained,
    )
