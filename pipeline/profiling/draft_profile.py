"""Decode steps of a real engine that verify drafts, timed in this process for `staleflow profile`.

Greedy responses are drawn twice. The first time the engine drafts nothing; the second time it knows them, so that it
drafts what will be sampled, as many tokens as it may: steps that verify many tokens, with the engine's own drafting,
verification and bookkeeping.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from staleflow.pipeline.profiling.engine_profile import (
    POLL_S,
    WARM_TOKENS,
    Grid,
    check_patience,
    has_ended,
    probe_request,
    wait_until_empty,
)
from staleflow.pipeline.profiling.fit import DraftedPoint
from staleflow.stores.trajectory import TrajectoryId
from staleflow.tasks.engines.base import Engine, EngineLoad

FEWEST_STEPS = 3
"""Decode steps that must be seen of a batch."""


def measure_drafted(
    engine: Engine, grid: Grid, length: int, kv_tokens: int, progress: Callable[[str], None]
) -> list[DraftedPoint]:
    """Time steps that verify up to `length` drafted tokens of each trajectory, at the grid's shortest context. A batch
    that does not fit into the cache, or for which nothing was drafted, gives no point."""
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
    """Sample responses to their ends; returns what was seen, (seconds, load), while all of them decoded."""
    engine.submit([probe_request(t, context, tokens, seed=seed, greedy=True) for t, seed in batch])
    begin = time.monotonic()
    marks: list[tuple[float, EngineLoad]] = []
    whole = True
    while (load := engine.load_statistics()).running:
        now = time.monotonic()
        whole = whole and not has_ended(engine)
        sampled = [n for _, n in load.progress]
        if whole and len(sampled) == len(batch) and min(sampled) >= WARM_TOKENS:
            marks.append((now, load))
        check_patience(begin, engine)
        time.sleep(POLL_S)
    wait_until_empty(engine)
    return marks


def _point(first: tuple[float, EngineLoad], last: tuple[float, EngineLoad], running: int) -> DraftedPoint | None:
    (begin_s, before), (end_s, after) = first, last
    gained = after.tokens_sampled - before.tokens_sampled - (after.accepted_tokens - before.accepted_tokens)
    drafted = after.drafted_tokens - before.drafted_tokens
    if gained < FEWEST_STEPS * running or not drafted:
        return None
    return DraftedPoint(
        running=running,
        kv_tokens=(before.kv_tokens + after.kv_tokens) / 2,
        drafted=drafted / gained,
        step_s=(end_s - begin_s) * running / gained,
    )
