"""Measuring a real engine's decode steps and prefill, for `staleflow profile`. Needs no cluster: one engine, here."""

from __future__ import annotations

import itertools
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.fit import Fit, StepPoint, fit_prefill, fit_steps
from stores.errors import ConfigError, InstanceLost, StoreError
from stores.trajectory import TrajectoryId
from tasks.engines.base import Engine, Request

WARM_TOKENS = 3
"""Tokens every request has sampled before its steps are counted: by then all of the batch decodes."""
PATIENCE_S = 120.0
"""Longest that one measured batch may take."""
POLL_S = 0.002
FIRST_WORD, NUM_WORDS = 4, 10
"""Token ids that prompts are made of: in every vocabulary, and unlike from one prompt to the next, so that no engine
finds a prompt's beginning in its cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """running counts and context lengths that are measured, each with each as far as the cache holds them."""

    running: tuple[int, ...]
    contexts: tuple[int, ...]
    steps: int
    """Decode steps a batch is watched for."""


def make_grid(max_running: int, longest_context: int, steps: int) -> Grid:
    """Counts by doubling up to max_running; contexts by quadrupling up to the longest."""
    counts = [1]
    while counts[-1] * 2 <= max_running:
        counts.append(counts[-1] * 2)
    contexts = [max(8, longest_context // 16), max(8, longest_context // 4), max(8, longest_context)]
    return Grid(running=tuple(counts), contexts=tuple(dict.fromkeys(contexts)), steps=steps)


def measure_steps(engine: Engine, grid: Grid, kv_tokens: int, progress: Callable[[str], None]) -> list[StepPoint]:
    """Decode steps over the grid; several points a batch, since its cache grows while it is watched."""
    points: list[StepPoint] = []
    number = 0
    for context in grid.contexts:
        for running in grid.running:
            if running * (context + grid.steps + WARM_TOKENS + 8) > kv_tokens:
                continue
            progress(f"{running} running, {context} tokens of context each")
            ids = [TrajectoryId(number + i) for i in range(running)]
            number += running
            points += _watch(engine, ids, context, grid.steps)
    return points


def measure_prefill(engine: Engine, contexts: Sequence[int], first: int) -> tuple[list[float], list[float]]:
    """(prompt tokens, seconds to the first token) of single requests, each length three times."""
    tokens: list[float] = []
    seconds: list[float] = []
    for i, context in enumerate(c for c in contexts for _ in range(3)):
        member = TrajectoryId(first + i)
        begin = time.monotonic()
        engine.submit([_request(member, context, 4)])
        while not any(n >= 1 for t, n in engine.load_statistics().progress if t == member):
            if any(e.trajectory == member for e in engine.events(0.0)):
                break
            _check(begin, engine)
            time.sleep(POLL_S / 4)
        tokens.append(context)
        seconds.append(time.monotonic() - begin)
        engine.abort([member])
    return tokens, seconds


def _watch(engine: Engine, ids: list[TrajectoryId], context: int, steps: int) -> list[StepPoint]:
    """Run one batch and time quarters of its steps while all of it decodes."""
    engine.submit([_request(t, context, steps + WARM_TOKENS + 8) for t in ids])
    begin = time.monotonic()
    marks: list[tuple[float, float]] = []  # (seconds, mean tokens sampled)
    while True:
        _check(begin, engine)
        load = engine.load_statistics()
        now = time.monotonic()
        sampled = [n for _, n in load.progress]
        if len(sampled) < len(ids) or any(engine.events(0.0)):
            if marks:
                break  # one has ended already: what follows is another batch
        elif min(sampled) >= WARM_TOKENS:
            mean = sum(sampled) / len(sampled)
            if not marks or mean > marks[-1][1]:
                marks.append((now, mean))
            if mean >= marks[0][1] + steps:
                break
        time.sleep(POLL_S)
    engine.abort(ids)
    while engine.load_statistics().running:
        _check(begin, engine)
        time.sleep(POLL_S)
    engine.events(0.0)
    quarters = 4
    cut = (
        [marks[round(i * (len(marks) - 1) / quarters)] for i in range(quarters + 1)] if len(marks) > quarters else marks
    )
    return [
        StepPoint(running=len(ids), kv_tokens=len(ids) * (context + (n1 + n2) / 2), step_s=(t2 - t1) / (n2 - n1))
        for (t1, n1), (t2, n2) in itertools.pairwise(cut)
        if n2 > n1
    ]


def _request(member: TrajectoryId, context: int, new_tokens: int) -> Request:
    tokens = tuple(FIRST_WORD + (member * (i + 3) + i * i) % NUM_WORDS for i in range(context))
    return Request(trajectory=member, epoch=1, tokens=tokens, max_new_tokens=new_tokens)


def _check(begin: float, engine: Engine) -> None:
    if time.monotonic() - begin > PATIENCE_S:
        raise InstanceLost(f"a measured batch made no progress in {PATIENCE_S:g} s: {engine.load_statistics()}")


def profile_engine(
    engine: Engine, grid: Grid, kv_tokens: int, progress: Callable[[str], None]
) -> tuple[Fit, list[StepPoint]]:
    """Measure and fit. Raises ConfigError if the grid leaves too little to fit."""
    measure_prefill(engine, grid.contexts[:1], 10**6)  # the first forward passes are not like the others
    tokens, seconds = measure_prefill(engine, grid.contexts, 2 * 10**6)
    points = measure_steps(engine, grid, kv_tokens, progress)
    try:
        return fit_steps(points, fit_prefill(tokens, seconds)), points
    except ValueError as error:
        raise ConfigError(f"profile: {error}; raise --max-running, --steps or rollout.engine.kv_tokens") from error


def write_profile(path: Path, fit: Fit, points: Sequence[StepPoint], engine: str) -> None:
    """A file that `rollout.cost.profile` can name: coefficients, ranges, residuals, hardware, and the points."""
    value = {
        "engine": engine,
        "hardware": hardware(),
        "coefficients": asdict(fit.model),
        "held_out_error": {"median": fit.error_median, "p90": fit.error_p90},
        "range": {"running": fit.running, "kv_tokens": fit.kv_tokens},
        "points": [asdict(p) for p in points],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value, indent=1) + "\n")
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error}; choose another place with --out") from error


def hardware() -> dict[str, Any]:
    """What the numbers hold for."""
    import os

    from tasks.engines.transformers import resolve_device

    device = resolve_device("auto")
    name = platform.processor() or platform.machine()
    if device.startswith("cuda"):
        import torch

        name = torch.cuda.get_device_name()
    return {"device": device, "name": name, "cores": os.cpu_count(), "python": platform.python_version()}
