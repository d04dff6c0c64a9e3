"""The result of a bisection as lines of text, and as a page of its own in the run's folder.

The page is one file without scripts, and requests nothing.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from staleflow.pipeline.stored_runs.bisection import Bisection
from staleflow.pipeline.stored_runs.cause_search import MAX_TRAININGS, MAX_TRIALS, Trial
from staleflow.pipeline.stored_runs.training_changes import NUM_PAIRS
from staleflow.stores.files import replace_text
from staleflow.stores.printable import printable
from staleflow.stores.reward_statistics import Interval

MAX_COMMAND_CHARS = 2000
"""Characters of a command up to which it is printed; the page has longer ones."""


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
    for line in _commands(result):
        yield (
            f"  {line}" if len(line) <= MAX_COMMAND_CHARS else f"  (a command of {len(line)} characters is on the page)"
        )
    if result.page:
        yield f"page: {result.page}"


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


def _purpose(result: Bisection) -> str:
    """What the commands do."""
    change = None if result.cause is None else result.cause.change
    if change is None or change.where:
        return "Show the rows, and train without them"
    return "Estimate rewards without it" if change.reward_part else "Show the settings"


def write(run_dir: Path, result: Bisection) -> Bisection:
    """Write the page `bisect-VERSION.html` of a result; returns the result with its path. Raises StoreError."""
    path = run_dir / f"bisect-{result.at}.html"
    replace_text(path, make_page(result), "free space or move the run's folder")
    return dataclasses.replace(result, page=str(path))


# -- page ------------------------------------------------------------------------------------------------------------

STYLE = """
:root { color-scheme: light dark; --line: #8884; --text: light-dark(#1c1c1c, #e4e4e4);
  --soft: light-dark(#5d5d5d, #a5a5a5); --since: light-dark(#1a7f37, #4cc46b); --at: light-dark(#b42318, #ff8076);
  --dot: light-dark(#33517a, #9cbcec); --control: light-dark(#b7791f55, #e0a94455); }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; color: var(--text);
  background: light-dark(#fff, #161616); }
h1 { font-size: 1.3rem; margin: 0 0 .5rem } .result { font-size: 1.1rem } .soft { color: var(--soft) }
.row { display: grid; grid-template-columns: minmax(0, 19rem) 1fr 14rem; gap: .2rem 1rem;
  align-items: center; padding: .3rem; border-top: 1px solid var(--line) } .row span { overflow-wrap: anywhere }
.row.cause { outline: 2px solid var(--since); outline-offset: -2px; font-weight: 600 }
.strip { position: relative; height: 1.5rem } .strip * { position: absolute; top: 0; bottom: 0; display: block }
.since, .at { width: 2px; margin-left: -1px } .since { background: var(--since) } .at { background: var(--at) }
.controls { background: var(--control); min-width: 4px }
.strip .bar { top: 50%; height: 3px; bottom: auto; margin-top: -1px; background: var(--dot) }
.strip .dot { width: 11px; height: 11px; border-radius: 50%; top: 50%; bottom: auto; margin: -5px 0 0 -5px;
  background: var(--dot) } .prevents .bar, .prevents .dot { background: var(--since) }
.strip .tick { color: var(--soft); font-size: .85rem; transform: translateX(-50%); bottom: auto }
.value { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.key i { display: inline-block; width: 1rem; height: .8rem; vertical-align: -1px; margin: 0 .3rem 0 1rem }
.key i:first-child { margin-left: 0 }
pre { overflow-x: auto; padding: .6rem; border: 1px solid var(--line); border-radius: 4px; white-space: pre-wrap;
  overflow-wrap: anywhere; max-height: 12rem }
@media (max-width: 56rem) {
  .row { grid-template-columns: minmax(0, 1fr) auto } .strip { grid-row: 2; grid-column: 1 / -1 } }
"""


def make_page(result: Bisection) -> str:
    """The page: a row for each change, with the mean reward and its interval between the two versions' rewards."""
    since, at = _mean(result, result.since), _mean(result, result.at)
    low, high = _reward_range(result)

    def x(reward: float) -> str:
        return f"{100 * (reward - low) / (high - low):.2f}%"

    def bar(name: str, interval: Interval | None) -> str:
        if interval is None:
            return ""
        width = 100 * (interval.high - interval.low) / (high - low)
        return f'<i class="{name}" style="left:{x(interval.low)};width:{width:.2f}%"></i>'

    controls = [trial.reward for trial in result.controls]
    lines = f'<i class="since" style="left:{x(since)}"></i><i class="at" style="left:{x(at)}"></i>'
    background = (bar("controls", Interval(low=min(controls), high=max(controls))) if controls else "") + lines
    rows = []
    versions = ((f"version {result.since}", result.reward_since), (f"version {result.at}, unchanged", result.reward_at))
    for label, reward in versions:
        dot = f'{bar("bar", reward.interval)}<i class="dot" style="left:{x(reward.mean or 0)}"></i>'
        rows.append(_row("", label, background + dot, f"{reward.mean or 0:.3f}"))
    for trial in _all_trials(result):
        dot = f'{bar("bar", trial.interval)}<i class="dot" style="left:{x(trial.reward)}"></i>'
        kind = "prevents" * trial.prevents + " cause" * (trial is result.cause)
        count = f" ({trial.rows:,} rows)" if trial.rows else ""
        difference = "" if trial.difference is None else f" ({trial.difference.mean:+.3f}, p {trial.difference.p:.3f})"
        rows.append(_row(kind, trial.change.label + count, background + dot, f"{trial.reward:.3f}{difference}"))
    ticks = "".join(f'<i class="tick" style="left:{x(tick)}">{tick:g}</i>' for tick in _ticks(low, high))
    rows.append(_row("soft", f"held-out {result.metric}", ticks, ""))
    conclusions = list(_conclusions(result))
    if not result.same_weights:
        conclusions.append("not verified: the training repeated here gives other weights than the run published")
    commands = "\n".join(_commands(result))
    title = f"Why version {result.at} of {Path(result.run).name} is worse than version {result.since}"
    if not result.trials:
        title = f"Versions {result.since} and {result.at} of {Path(result.run).name}"
    change = result.reward_change
    lost = "not tested" if change is None else f"{change.mean:+.3f} (p {change.p:.3f})"
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{_text(title)}</title><style>{STYLE}</style>
<h1>{_text(title)}</h1>
<p>Mean {_text(result.metric)} on held-out prompts: {since:.3f} and {at:.3f}, difference {lost}. The steps between
the two versions were trained again with each of these changes, in {result.elapsed_s:.0f} s.
{len(_all_trials(result))} trainings with a change.</p>
<p class="result">{"<br>".join(_text(line[0].upper() + line[1:]) for line in reversed(conclusions))}</p>
<p class="key soft"><i class="since"></i>version {result.since} <i class="at"></i>version {result.at}, unchanged
<i class="controls"></i>without random groups <i class="bar" style="background:var(--dot)"></i>95 %
interval; green where a change prevents the drop</p>
{"".join(rows)}
{f"<p>{_purpose(result)}:</p><pre>{_text(commands)}</pre>" if commands else ""}
</html>
"""


def _row(kind: str, label: str, strip: str, value: str) -> str:
    cells = f'<span>{_text(label)}</span><div class="strip">{strip}</div><span class="value">{_text(value)}</span>'
    return f'<div class="row {kind}">{cells}</div>\n'


def _text(text: str) -> str:
    return escape(printable(text))


def _reward_range(result: Bisection) -> tuple[float, float]:
    """The rewards at the left and the right edge of the picture."""
    trials = _all_trials(result)
    intervals = [result.reward_since.interval, result.reward_at.interval, *(trial.interval for trial in trials)]
    rewards = [_mean(result, result.since), _mean(result, result.at), *(trial.reward for trial in trials)]
    rewards += [edge for interval in intervals if interval is not None for edge in (interval.low, interval.high)]
    margin = (max(rewards) - min(rewards)) * 0.05 or 0.5
    return min(rewards) - margin, max(rewards) + margin


def _ticks(low: float, high: float) -> Sequence[float]:
    """Round numbers between two rewards, three to seven."""
    step = 10.0 ** math.floor(math.log10((high - low) / 2))
    step = next(size * step for size in (0.5, 1, 2, 2.5, 5) if (high - low) / (size * step) <= 7)
    return [round(k * step, 10) for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
