"""Measurements for `staleflow profile`: decode steps and prefill of a real engine, timed in this process without a
cluster, or taken from a finished run."""

from __future__ import annotations

import itertools
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from staleflow.pipeline.config import loading
from staleflow.pipeline.coordination import journal
from staleflow.pipeline.profiling.draft_stats import DraftsUsed
from staleflow.pipeline.profiling.fit import DraftedPoint, Fit, StepPoint, fit_prefill, fit_steps
from staleflow.pipeline.profiling.time_breakdown import TimeTracker
from staleflow.stores.errors import ActorLost, ConfigError, StoreError
from staleflow.stores.files import replace_text
from staleflow.stores.trajectory import TrajectoryId
from staleflow.tasks.emulation.cost_model import CostModel
from staleflow.tasks.engines.base import Engine, Failed, Request
from staleflow.tasks.engines.engine_settings import Speculation

WARM_TOKENS = 3
"""Tokens that every request samples before steps are counted: by then the whole batch is decoding."""
BATCH_TIMEOUT_S = 120.0
"""Timeout of one measured batch, in seconds."""
POLL_S = 0.002
FIRST_WORD, NUM_WORDS = 4, 10
"""Token ids that prompts consist of; every vocabulary has them. Prompts differ, so that no prefix cache is hit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Batch sizes and context lengths to measure: all combinations that fit into the cache."""

    running: tuple[int, ...]
    contexts: tuple[int, ...]
    steps: int
    """Decode steps measured per batch."""


def make_grid(max_running: int, longest_context: int, steps: int) -> Grid:
    """Make a grid: counts by doubling up to max_running; contexts by quadrupling up to the longest."""
    counts = [1]
    while counts[-1] * 2 <= max_running:
        counts.append(counts[-1] * 2)
    contexts = [max(8, longest_context // 16), max(8, longest_context // 4), max(8, longest_context)]
    return Grid(running=tuple(counts), contexts=tuple(dict.fromkeys(contexts)), steps=steps)


def measure_steps(engine: Engine, grid: Grid, kv_tokens: int, progress: Callable[[str], None]) -> list[StepPoint]:
    """Measure decode steps over the grid; several points per batch, since its cache grows during the measurement."""
    points: list[StepPoint] = []
    num_requests = 0
    for context in grid.contexts:
        for running in grid.running:
            if running * (context + grid.steps + WARM_TOKENS + 8) > kv_tokens:
                continue
            progress(f"{running} running, {context} tokens of context each")
            ids = [TrajectoryId(num_requests + i) for i in range(running)]
            num_requests += running
            points += _time_batch(engine, ids, context, grid.steps)
    return points


def measure_prefill(engine: Engine, contexts: Sequence[int], first_id: int) -> tuple[list[float], list[float]]:
    """Measure the time to the first token of single requests, three per length: (prompt tokens, seconds)."""
    tokens: list[float] = []
    seconds: list[float] = []
    for i, context in enumerate(c for c in contexts for _ in range(3)):
        member = TrajectoryId(first_id + i)
        started_s = time.monotonic()
        engine.submit([probe_request(member, context, 4)])
        while not any(n >= 1 for t, n in engine.load_statistics().progress if t == member):
            if has_ended(engine):
                break
            check_timeout(started_s, engine)
            time.sleep(POLL_S / 4)
        tokens.append(context)
        seconds.append(time.monotonic() - started_s)
        engine.abort([member])
    return tokens, seconds


def _time_batch(engine: Engine, ids: list[TrajectoryId], context: int, steps: int) -> list[StepPoint]:
    """Run one batch and time each quarter of its steps while all requests decode."""
    engine.submit([probe_request(t, context, steps + WARM_TOKENS + 8) for t in ids])
    started_s = time.monotonic()
    marks: list[tuple[float, float]] = []  # (seconds, mean tokens sampled)
    while True:
        check_timeout(started_s, engine)
        load = engine.load_statistics()
        now = time.monotonic()
        sampled = [n for _, n in load.progress]
        if has_ended(engine):
            break  # from here on the batch is smaller
        if len(sampled) == len(ids) and min(sampled) >= WARM_TOKENS:
            mean = sum(sampled) / len(sampled)
            if not marks or mean > marks[-1][1]:
                marks.append((now, mean))
            if mean >= marks[0][1] + steps:
                break
        time.sleep(POLL_S)
    engine.abort(ids)
    wait_until_empty(engine)
    quarters = 4
    edges = (
        [marks[round(i * (len(marks) - 1) / quarters)] for i in range(quarters + 1)] if len(marks) > quarters else marks
    )
    return [
        StepPoint(running=len(ids), kv_tokens=len(ids) * (context + (n1 + n2) / 2), step_s=(t2 - t1) / (n2 - n1))
        for (t1, n1), (t2, n2) in itertools.pairwise(edges)
        if n2 > n1
    ]


def has_ended(engine: Engine) -> bool:
    """Return whether a request has ended. Raises ActorLost if one failed: the batch is then smaller than planned."""
    ended = engine.events(0.0)
    failed = next((e for e in ended if isinstance(e, Failed)), None)
    if failed is not None:
        raise ActorLost(f"the engine failed in a measured batch: {failed.error}")
    return bool(ended)


def probe_request(
    member: TrajectoryId, context: int, new_tokens: int, *, seed: int | None = None, greedy: bool = False
) -> Request:
    """Make a request with a synthetic prompt, distinct per `seed`; per trajectory if None."""
    prompt_id = member if seed is None else seed
    tokens = tuple(FIRST_WORD + (prompt_id * (i + 3) + i * i) % NUM_WORDS for i in range(context))
    return Request(trajectory=member, route_number=1, tokens=tokens, max_new_tokens=new_tokens, greedy=greedy)


def wait_until_empty(engine: Engine) -> None:
    """Wait until no request runs, and drop the engine's pending events."""
    started_s = time.monotonic()
    while engine.load_statistics().running:
        check_timeout(started_s, engine)
        time.sleep(POLL_S)
    engine.events(0.0)


def check_timeout(started_s: float, engine: Engine) -> None:
    """Raise ActorLost if a batch has taken longer than BATCH_TIMEOUT_S. started_s: on the monotonic clock."""
    if time.monotonic() - started_s > BATCH_TIMEOUT_S:
        raise ActorLost(f"a measured batch made no progress in {BATCH_TIMEOUT_S:g} s: {engine.load_statistics()}")


def profile_engine(
    engine: Engine, grid: Grid, kv_tokens: int, progress: Callable[[str], None]
) -> tuple[Fit, list[StepPoint]]:
    """Measure an engine over a grid and fit the cost model. Raises ConfigError if there are too few points."""
    measure_prefill(engine, grid.contexts[:1], 10**6)  # warm-up: the first forward passes are slower
    tokens, seconds = measure_prefill(engine, grid.contexts, 2 * 10**6)
    points = measure_steps(engine, grid, kv_tokens, progress)
    try:
        return fit_steps(points, fit_prefill(tokens, seconds)), points
    except ValueError as error:
        raise ConfigError(f"profile: {error}; raise --max-running, --steps or rollout.engine.kv_tokens") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Contents of a profile file, which `profile = FILE` in a job reads.

    latencies: seconds by setting of [simulation]; drafts: draft statistics; both only in a profile of a run. points:
    measured steps; drafted: those with drafts; both only in a profile of an engine.
    """

    source: str
    fit: Fit
    hardware: dict[str, Any] | None = None
    points: tuple[StepPoint, ...] = ()
    drafted: tuple[DraftedPoint, ...] = ()
    latencies: dict[str, float] = field(default_factory=dict)
    drafts: DraftsUsed = field(default_factory=DraftsUsed)

    def as_dict(self) -> dict[str, Any]:
        """Stored form: coefficients, ranges, residuals on held-out steps, and their source."""
        fit = self.fit
        return {
            "source": self.source,
            "hardware": self.hardware,
            "coefficients": asdict(fit.model),
            "latencies": self.latencies,
            "held_out_error": {"median": fit.error_median, "p90": fit.error_p90},
            "range": {"running": fit.running, "kv_tokens": fit.kv_tokens},
            "num_points": fit.num_points,
            "points": [asdict(p) for p in self.points],
            "drafted_points": [asdict(p) for p in self.drafted],
            "acceptance_rate": self.drafts.acceptance,
        }


def profile_run(run_dir: Path) -> Profile:
    """Make a profile from a finished run: the cost model fitted to its responses, and the latencies of all else.

    Raises:
        ConfigError: the run has not ended, or sampled too little.
        StoreError: its summary is damaged.
    """
    try:
        json.loads((run_dir / "summary.json").read_text())
    except OSError as error:
        raise ConfigError(f"{run_dir}: no finished run: summary.json cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise StoreError(f"{run_dir}: summary.json is damaged: {error}; restore it") from error
    job = run_dir / "config.toml"
    tree = loading.read_tree(job) if job.is_file() else {}
    batch, rollout = tree.get("batch", {}), tree.get("rollout", {})
    group_size = batch.get("group_size", 1) + batch.get("extra_members", 0)
    verify_share = rollout.get("cost", {}).get("verify_share", 1.0)
    drafting = rollout.get("engine", {}).get("speculation", {})
    speculation = Speculation(
        num_speculative_tokens=drafting.get("num_speculative_tokens", 0), disable_above=drafting.get("disable_above", 0)
    )
    watch = TimeTracker(
        replace(REFERENCE, verify_share=verify_share), group_size, on_pull=rollout.get("on_pull", "interrupt"),
        first_length=speculation.first_length,
    )  # fmt: skip
    for entry in journal.read(run_dir / "events.jsonl"):
        watch.observe(entry.now, entry.event, entry.commands)
    fit = watch.fit()
    if fit is None:
        raise ConfigError(f"{run_dir}: the run had too few decode steps to fit a cost model; make it longer")
    return Profile(source=str(run_dir), fit=fit, latencies=measured_latencies(watch, fit), drafts=watch.drafts)


def measured_latencies(watch: TimeTracker, fit: Fit) -> dict[str, float]:
    """Latencies of a run as settings of [simulation], slow instances included. A response's delay is two messages, and
    the messages of a pull are not counted in pull_s."""
    seconds = watch.latencies.means
    slow, factor = watch.slow
    if slow:
        seconds |= {"straggler_share": len(slow) / watch.num_instances, "straggler_factor": factor}
    if fit.delay_s:
        seconds["message_s"] = fit.delay_s / 2
        if "pull_s" in seconds:
            seconds["pull_s"] = max(0.0, seconds["pull_s"] - fit.delay_s)
    return seconds


REFERENCE = CostModel(k1=0.0, k2=0.0, k3=0.0, k4=1.0, b=0.0, prefill=0.0)
"""Cost model for a `TimeTracker` of which only the fit is used, not the comparison."""


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile as JSON. Raises StoreError if the file cannot be written."""
    replace_text(path, json.dumps(profile.as_dict(), indent=1) + "\n", "choose another place with --out")


def hardware() -> dict[str, Any]:
    """Hardware that the measured numbers are valid for."""
    import os

    from staleflow.tasks.engines.transformers import resolve_device

    device = resolve_device("auto")
    name = platform.processor() or platform.machine()
    if device.startswith("cuda"):
        import torch

        name = torch.cuda.get_device_name()
    return {"device": device, "name": name, "cores": os.cpu_count(), "python": platform.python_version()}
