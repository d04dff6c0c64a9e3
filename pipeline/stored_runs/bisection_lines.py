"""The result of a bisection as lines of text."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from staleflow.pipeline.stored_runs.bisection import Bisection
from staleflow.pipeline.stored_runs.cause_search import MAX_TRAININGS, MAX_TRIALS, Trial
from staleflow.pipeline.stored_runs.training_changes import NUM_PAIRS
from staleflow.stores.printable import printable


def result_lines(result: Bisection) -> Iterator[str]:
    """The result as lines for the terminal."""
    yield (
        f"held-out {printable(result.metric)}: version {result.since} {_mean(result, result.since):.3f}, "
        f"version {result.at} {_mean(result, result.at):.3f}"
    )
    if not result.same_weights:
        yield "not verified: the training repeated here gives other weights than the run published"
    trials = _all_trials(result)
    width = max((len(trial.change.label) for trial in trials), default=0)
    for trial in trials:
        line = f"  {printable(trial.change.label):<{width}} {trial.rows:6} rows  {trial.reward:.3f}  "
        yield line + _difference(trial) + ("  prevents it" if trial.prevents else "")
    yield from _conclusions(result)
    yield from (f"  {command}" for command in _commands(result))


def _all_trials(result: Bisection) -> list[Trial]:
    """All trainings in their order: a pair confirms with a control and a repeat."""
    pairs = zip(result.controls, result.repeats, strict=True)
    return [*result.trials, *(trial for pair in pairs for trial in pair)]


def _mean(result: Bisection, version: int) -> float:
    return (result.reward_since if version == result.since else result.reward_at).mean or 0.0


def _difference(trial: Trial) -> str:
    return "" if trial.difference is None else f"{trial.difference.mean:+.3f} (p {trial.difference.p:.3f})"


def _conclusions(result: Bisection) -> Iterator[str]:
    """What the trials show, in sentences."""
    if result.confirmed is not None and result.cause is not None:
        mean, p = result.confirmed.mean, result.confirmed.p
        pairs = f"{NUM_PAIRS} pairs of trainings that leave out random groups"
        yield f"confirmed by {pairs}: {mean:+.3f} (p {p:.3f})"
    if result.is_limited:
        limit = f"{MAX_TRIALS} trainings to search, {MAX_TRAININGS} in all"
        yield f"the limit is reached ({limit}): not all changes were tried or confirmed"
    if result.cause is None:
        yield f"no cause found: {printable(result.reason)}"
    else:
        rows = f", {result.cause.rows} rows" if result.cause.rows else ""
        yield f"smallest confirmed change that prevents it: {printable(result.cause.change.label)}{rows}"


def _commands(result: Bisection) -> list[str]:
    """Commands that show and undo the cause."""
    if result.cause is None:
        return []
    run, change = shlex.quote(result.run), result.cause.change
    if change.where:
        where = shlex.quote(change.where)
        return [f"staleflow store show {run} --where {where}", f"staleflow unlearn {run} --where {where}"]
    if change.reward_part:
        setting = shlex.quote(f"reward.parts.{change.reward_part}.weight=0")
        return [f"staleflow store rescore {run} --set {setting} --branch without"]
    return [f"staleflow config explain {run}/config.toml"]
