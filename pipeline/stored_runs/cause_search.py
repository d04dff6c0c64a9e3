"""The search for the smallest change of a repeated training that prevents a drop of the reward. Pure.

Changes are tried from the cheapest to name: settings that a resume changed, parts of the reward, rows that stand out,
then steps and groups, halved as long as a half prevents the drop. What prevents it is given by the caller
(bisection.py), and a smaller change has to do so as well as a larger one. Rows are a cause only if random groups with
as many rows do not prevent the drop: a training differs by chance, too, and what harms in all rows is undone by leaving
out any.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from staleflow.pipeline.config.knob_tree import toml_value
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.stored_runs.run_files import format_steps
from staleflow.stores.reward_statistics import Interval, PairedDifference
from staleflow.stores.trajectories.selection import Selection
from staleflow.stores.trajectory import FinishReason

MAX_TRIALS = 20
"""Trainings of a search at most, with those of its controls."""
NUM_CONTROLS = 4
"""Random groups left out to test a cause. If half of all rows prevent a drop, a wrong cause is named in one of 16
cases."""
MIN_REPEATS = 3
"""A prompt counts as duplicated from this many groups on, and this many times as many as half of the prompts have."""
TABLES = ("training", "task", "reward", "rollout")
"""Tables of a job with settings that the weights or the held-out rewards depend on."""
OTHER_SETTINGS = {
    "training": {"ranks", "recompute_activations", "offload", "checkpoint_every", "resume_every", "keep_every"},
    "task": {"eval_prompts", "sampler"},
    "reward": {"workers", "timeout_s", "max_error_share"},
}
"""Settings of these tables that nothing of a repeated training depends on, besides rounding."""
ROLLOUT_SETTINGS = ("temperature", "max_new_tokens")
"""Settings of `rollout` that held-out prompts are answered with."""
MAX_VALUE = 60
"""Characters of a setting's value up to which the label of a change has it."""
Table = Mapping[str, npt.NDArray[Any]]
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of a repeated training; without any of its fields the training is unchanged."""

    label: str
    """The change in words."""
    where: str = ""
    """Rows that are left out, as a selection for `unlearn` and `store show`; empty: none."""
    reward_part: str = ""
    """Part of the reward that is left out; empty: none."""
    settings: tuple[tuple[str, str], ...] = ()
    """Settings that keep the value of before step `since`: their keys, as TABLE.KEY, and the value as TOML."""
    since: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The training between two versions, repeated with a change."""

    change: Change
    rows: int
    """Number of rows that are left out, or have another reward."""
    reward: float
    """Mean reward on held-out prompts of the weights that result."""
    interval: Interval | None
    """95 % interval of this mean."""
    difference: PairedDifference | None
    """From the unchanged training, over the prompts; None for too few prompts."""
    prevents: bool
    """Whether the reward is not lost with this change."""


@dataclass(slots=True, kw_only=True)
class SearchResult:
    """The result of a search."""

    cause: Trial | None = None
    """Of the changes that prevent the drop, the smallest."""
    reason: str = ""
    """Why there is no cause; empty if there is one."""
    trials: list[Trial] = field(default_factory=list)
    """All changes that were tried, in order."""
    controls: list[Trial] = field(default_factory=list)
    """Random groups with as many rows as the last cause that was tested: the spread of trainings without so many."""
    is_limited: bool = False
    """Whether MAX_TRIALS ended the search."""


# -- changes to try --------------------------------------------------------------------------------------------------


def changed_settings(before: RunConfig, after: RunConfig) -> list[str]:
    """Settings, as TABLE.KEY, that differ between two jobs of a run and that a repeated training depends on."""
    keys = []
    for table in TABLES:
        old, new = getattr(before, table), getattr(after, table)
        names = ROLLOUT_SETTINGS if table == "rollout" else [f.name for f in dataclasses.fields(new)]
        names = [name for name in names if name not in OTHER_SETTINGS.get(table, ())]
        keys += [f"{table}.{name}" for name in names if getattr(old, name) != getattr(new, name)]
    return keys


def restore_settings(config: RunConfig, former: RunConfig, keys: Sequence[str]) -> RunConfig:
    """A job with the values of some settings, as TABLE.KEY, that another job has."""
    for key in keys:
        table, _, name = key.partition(".")
        section = dataclasses.replace(getattr(config, table), **{name: getattr(getattr(former, table), name)})
        config = dataclasses.replace(config, **{table: section})
    return config


def settings_change(former: RunConfig, config: RunConfig, since: int) -> Change:
    """The settings that a job has since a step, with the values of the job before."""
    keys = changed_settings(former, config)
    values = [toml_value(getattr(getattr(former, table), name)) for table, _, name in (k.partition(".") for k in keys)]
    return _with_settings(tuple(zip(keys, values, strict=True)), since)


def _with_settings(settings: Sequence[tuple[str, str]], since: int) -> Change:
    values = ", ".join(f"{key} = {value}" if len(value) <= MAX_VALUE else key for key, value in settings)
    return Change(label=f"with {values} as before step {since}", settings=tuple(settings), since=since)


def conspicuous_rows(table: Table, window: str, sources: Sequence[str] = ()) -> list[Change]:
    """Changes that leave out rows which stand out, those of the fewest rows first.

    Args:
        table: Columns of the rows of the repeated steps; `differs` says whether the reward function now gives another
            reward than the stored one, `prompt` numbers the prompts by their tokens.
        window: The steps as a selection.
        sources: Names of the task sources, if there are several.
    """
    parts = [
        (f"stale trajectories (staleness >= {lag})", f"staleness >= {lag} and {window}", table["staleness"] >= lag)
        for lag in _some_lags(table["staleness"])
    ]
    length = FinishReason.LENGTH.value
    parts.append(("truncated responses", f"finish == {length!r} and {window}", table["finish"] == length))
    for number, name in enumerate(sources):
        parts.append((f"source {name}", f"source == {number} and {window}", table["source"] == number))
    parts.append(
        (
            "rows that the reward function now gives another reward",
            _one_of("trajectory", table["trajectory"][table["differs"]]),
            table["differs"],
        )
    )
    repeated = np.isin(table["prompt"], _repeated_prompts(table))
    parts.append(("prompts drawn again and again", _one_of("group", np.unique(table["group"][repeated])), repeated))
    parts = [part for part in parts if part[2].any() and not part[2].all()]
    parts.sort(key=lambda part: int(part[2].sum()))
    return [Change(label=f"without {label}", where=where) for label, where, _ in parts]


def _some_lags(staleness: npt.NDArray[Any]) -> list[int]:
    """The lowest, the middle and the highest of the lags above the lowest one of all rows."""
    lags = np.unique(staleness)[1:].tolist()
    return sorted({lags[0], lags[len(lags) // 2], lags[-1]}) if lags else []


def _repeated_prompts(table: Table) -> npt.NDArray[Any]:
    """Prompts of at least MIN_REPEATS groups, and of MIN_REPEATS times as many as the median prompt."""
    _, first = np.unique(table["group"], return_index=True)
    prompts, counts = np.unique(table["prompt"][first], return_counts=True)
    return np.asarray(prompts[counts >= MIN_REPEATS * max(1.0, float(np.median(counts)))])


def random_groups(table: Table, cause: Trial) -> list[Change]:
    """Random groups with as many rows as a change leaves out, of groups without a row of it where these are enough."""
    is_in_cause = np.isin(table["group"], table["group"][Selection(cause.change.where).mask(table)])
    other_groups = table["group"][~is_in_cause] if np.sum(~is_in_cause) >= cause.rows else table["group"]
    groups, sizes = np.unique(other_groups, return_counts=True)
    changes, rng = [], np.random.default_rng(0)
    for _ in range(NUM_CONTROLS):
        order = rng.permutation(len(groups))
        count = int(np.searchsorted(np.cumsum(sizes[order]), cause.rows)) + 1
        label = f"without {count} random groups" if count > 1 else "without a random group"
        changes.append(Change(label=label, where=_one_of("group", np.sort(groups[order[:count]]))))
    return changes


def _one_of(column: str, values: npt.NDArray[Any]) -> str:
    """A selection of the rows with one of these values in a column."""
    return f"{column} == {values[0]}" if len(values) == 1 else f"{column} in ({', '.join(map(str, values.tolist()))})"


# -- search ----------------------------------------------------------------------------------------------------------


def search(
    table: Table, since: int, at: int, candidates: Sequence[Change], attempt: Callable[[Change], Trial]
) -> SearchResult:
    """Try changes until no smaller one prevents the drop, with at most MAX_TRIALS trainings.

    Args:
        table: Columns of the rows that steps since <= step < at trained on.
        since: The first step.
        at: The step after the last.
        candidates: Changes to try before steps and groups: settings, then parts of the reward, then rows.
        attempt: Repeats the training with a change.
    """
    result, preventing = SearchResult(), list[Trial]()

    def prevents(change: Change) -> bool:
        if len(result.trials) >= MAX_TRIALS - NUM_CONTROLS:
            result.is_limited = True
            return False
        result.trials.append(trial := attempt(change))
        preventing.extend([trial] * trial.prevents)
        return trial.prevents

    def prevents_with(since: int, settings: Sequence[tuple[str, str]]) -> bool:
        return prevents(_with_settings(settings, since))

    for change in candidates:
        if not prevents(change):
            continue
        if change.settings:
            halve(change.settings, functools.partial(prevents_with, change.since))
            result.cause = preventing[-1]
            return result
        if change.where:
            break
    halve(range(since, at), lambda steps: prevents(_without_steps(steps)))
    _halve_groups(table, preventing, prevents)
    for trial in sorted(preventing, key=lambda trial: trial.rows):
        if trial.change.where:
            if result.controls:
                continue
            result.controls = [attempt(change) for change in random_groups(table, trial)]
            if any(control.prevents for control in result.controls):
                result.reason = f"{trial.change.label} prevents the drop, but so do random groups with as many rows"
                continue
        result.cause, result.reason = trial, ""
        return result
    result.reason = result.reason or "no change alone prevents the drop, only leaving out all steps together"
    return result


def _without_steps(steps: Sequence[int]) -> Change:
    return Change(label=f"without {format_steps(steps)}", where=f"step >= {steps[0]} and step <= {steps[-1]}")


def _halve_groups(table: Table, preventing: Sequence[Trial], prevents: Callable[[Change], bool]) -> None:
    """Halve the groups of the smallest part that prevents the drop, or all, those with the largest gradients first."""
    parts = [trial for trial in preventing if trial.change.where]
    part = min(parts, key=lambda trial: trial.rows, default=None)
    rows = np.ones(len(table["group"]), bool) if part is None else Selection(part.change.where).mask(table)
    if part is None or part.change.where.startswith("step >="):
        prefix, condition = "without", ""
    else:
        prefix, condition = f"{part.change.label}, of", f"({part.change.where}) and "

    def without(groups: Sequence[int]) -> bool:
        label = f"{prefix} group {groups[0]}" if len(groups) == 1 else f"{prefix} {len(groups)} groups"
        return prevents(Change(label=label, where=condition + _one_of("group", np.array(groups))))

    halve(groups_by_influence(table, rows), without)


def halve(items: Sequence[Item], prevents: Callable[[Sequence[Item]], bool]) -> list[Item]:
    """Halve a sequence as long as one of its halves prevents something, which the whole sequence is known to do."""
    items = list(items)
    while len(items) > 1:
        middle = (len(items) + 1) // 2
        for half in (items[:middle], items[middle:]):
            if prevents(half):
                items = half
                break
        else:
            return items
    return items


def groups_by_influence(table: Table, rows: npt.NDArray[np.bool_]) -> list[int]:
    """The groups of some rows, those with the largest sum of |advantage| x tokens first."""
    groups, index = np.unique(table["group"][rows], return_inverse=True)
    influence = np.bincount(index, np.abs(table["advantage"][rows]) * table["response_tokens"][rows])
    return [int(group) for group in groups[np.argsort(-influence, kind="stable")]]
