"""Changes of a repeated training that a search for a cause tries, and random ones to compare them with. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from staleflow.pipeline.config.knob_tree import toml_value, value_at, with_values
from staleflow.pipeline.config.schema import RunConfig
from staleflow.stores.trajectories.selection import Selection
from staleflow.stores.trajectory import FinishReason

NUM_PAIRS = 3
"""Pairs of trainings that confirm a cause. Without a difference all with the change are above all without it in one of
20 cases."""
MIN_INFLUENCE_RATIO = 10.0
"""Groups stand out whose sum of |advantage| x tokens is this many times that of the median group that has one."""
GROUPS_PER_LEFT_OUT = 8
"""One of this many groups is left out at random in each pair."""
MIN_DRAWS = 3
"""A prompt counts as duplicated from this many groups on, and this many times as many as half of the prompts have."""
JOB_TABLES = ("training", "task", "reward", "rollout", "model")
"""Tables of a job with settings that the weights or the held-out rewards depend on."""
SETTINGS_WITHOUT_EFFECT = {
    "training": {
        "ranks",
        "recompute_activations",
        "offload",
        "checkpoint_every",
        "resume_every",
        "keep_every",
        "measured_rows",
    },
    "task": {"eval_prompts", "sampler"},
    "reward": {"workers", "timeout_s", "max_error_share"},
}
"""Settings of these tables that nothing of a repeated training depends on, besides rounding."""
SETTINGS_WITH_EFFECT = {"rollout": ("temperature", "max_new_tokens"), "model": ("dtype",)}
"""The settings of these tables that the weights or the held-out rewards depend on."""
MAX_VALUE_CHARS = 60
"""Characters of a setting's value up to which the label of a change has it."""
Table = Mapping[str, npt.NDArray[Any]]
"""Columns of the rows that the repeated steps trained on."""


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


def changed_settings(before: RunConfig, after: RunConfig) -> list[str]:
    """Settings, as TABLE.KEY, that differ between two jobs of a run and that a repeated training depends on."""
    before, after = _with_schedule(before), _with_schedule(after)
    keys = []
    for table in JOB_TABLES:
        names = SETTINGS_WITH_EFFECT.get(table) or [f.name for f in dataclasses.fields(getattr(after, table))]
        keys += [f"{table}.{name}" for name in names if name not in SETTINGS_WITHOUT_EFFECT.get(table, ())]
    if before.training.schedule == "constant":  # it has no steps
        keys.remove("training.schedule_steps")
    return [key for key in keys if value_at(before, key) != value_at(after, key)]


def _with_schedule(config: RunConfig) -> RunConfig:
    """A job whose learning-rate schedule does not depend on its number of steps: a resume may change that number."""
    return with_values(config, {"training.schedule_steps": config.training.schedule_steps or config.steps})


def restore_settings(config: RunConfig, former: RunConfig, keys: Sequence[str]) -> RunConfig:
    """A job with the values of some settings, as TABLE.KEY, that another job has."""
    former = _with_schedule(former)
    return with_values(config, {key: value_at(former, key) for key in keys})


def undo_settings_change(former: RunConfig, config: RunConfig, since: int) -> Change:
    """The settings that a job has since a step, with the values of the job before."""
    keys, former = changed_settings(former, config), _with_schedule(former)
    return old_settings_change([(key, toml_value(value_at(former, key))) for key in keys], since)


def old_settings_change(settings: Sequence[tuple[str, str]], since: int) -> Change:
    """The change that keeps the values that some settings had before a step."""
    values = ", ".join(f"{key} = {value}" if len(value) <= MAX_VALUE_CHARS else key for key, value in settings)
    return Change(label=f"with {values} as before step {since}", settings=tuple(settings), since=since)


def changes_without_conspicuous_rows(table: Table, window: str, sources: Sequence[str] = ()) -> list[Change]:
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
            one_of("trajectory", table["trajectory"][table["differs"]]),
            table["differs"],
        )
    )
    repeated = np.isin(table["prompt"], _repeated_prompts(table))
    parts.append(("prompts drawn again and again", one_of("group", np.unique(table["group"][repeated])), repeated))
    groups, sums = influence_by_group(table)
    usual = np.median(sums[sums > 0]) if (sums > 0).any() else 0.0
    outstanding = np.isin(table["group"], groups[sums > MIN_INFLUENCE_RATIO * usual])
    parts.append(
        (
            "groups with outstanding gradients",
            one_of("group", np.unique(table["group"][outstanding])),
            outstanding,
        )
    )
    parts = [part for part in parts if part[2].any() and not part[2].all()]
    parts = list({part[2].tobytes(): part for part in reversed(parts)}.values())[::-1]  # the first with the same rows
    parts.sort(key=lambda part: int(part[2].sum()))
    return [Change(label=f"without {label}", where=where) for label, where, _ in parts]


def _some_lags(staleness: npt.NDArray[Any]) -> list[int]:
    """The lowest, the middle and the highest of the lags above the lowest one of all rows."""
    lags = np.unique(staleness)[1:].tolist()
    return sorted({lags[0], lags[len(lags) // 2], lags[-1]}) if lags else []


def _repeated_prompts(table: Table) -> npt.NDArray[Any]:
    """Prompts of at least MIN_DRAWS groups, and of MIN_DRAWS times as many as the median prompt."""
    _, first = np.unique(table["group"], return_index=True)
    prompts, counts = np.unique(table["prompt"][first], return_counts=True)
    return np.asarray(prompts[counts >= MIN_DRAWS * np.median(counts)])


def control_changes(table: Table, cause: Change) -> Iterator[tuple[Change, Change]]:
    """Pairs of changes that confirm a cause: a few random groups are left out with the cause, and without it, but with
    other random groups that have as many rows and as large gradients as the cause. So both leave out as much. If the
    cause leaves no row of a step, they are all groups of as many other steps: a step without rows changes nothing,
    while one with few rows has an update of about the usual size.

    These other groups have no row of the cause, if others are enough. Instead of a cause that leaves out no rows, none
    are left out.
    """
    rng = np.random.default_rng(0)
    everything = np.ones(len(table["group"]), bool)
    rows = Selection(cause.where).mask(table) if cause.where else ~everything
    others = ~np.isin(table["group"], table["group"][rows])  # all, if no rows are left out
    enough = len(np.unique(table["group"][others])) >= NUM_PAIRS
    for few in _distinct_groups(table, others if enough else everything, rng):
        rest = ~np.isin(table["group"], few)
        in_steps = rest & np.isin(table["step"], _steps_like(table, rows, rng))
        rest &= ~in_steps
        num_rows = max(0, int(np.sum(rows)) - int(np.sum(in_steps)))
        influence = influence_by_group(table, rows)[1].sum() - influence_by_group(table, in_steps)[1].sum()
        pool = others & rest if np.sum(others & rest) >= num_rows else rest
        instead = _groups_like(table, pool, num_rows, influence, rng)
        left_out = np.unique(np.concatenate([few, table["group"][in_steps], instead]))
        yield _without_groups(left_out), _and_without_groups(cause, few)


def _distinct_groups(table: Table, rows: npt.NDArray[np.bool_], rng: np.random.Generator) -> Iterator[npt.NDArray[Any]]:
    """One of GROUPS_PER_LEFT_OUT of the groups of some rows for each pair, different ones if there are enough."""
    groups = rng.permutation(np.unique(table["group"][rows]))
    count = -(-len(groups) // GROUPS_PER_LEFT_OUT)
    for pair in range(NUM_PAIRS):
        yield np.sort(np.roll(groups, -pair * count)[:count])


def _steps_like(table: Table, rows: npt.NDArray[np.bool_], rng: np.random.Generator) -> npt.NDArray[Any]:
    """As many random steps as have no other rows than these, those with the fewest of these rows first."""
    steps, index, sizes = np.unique(table["step"], return_inverse=True, return_counts=True)
    counts = np.bincount(index, rows, minlength=len(steps))
    order = rng.permutation(len(steps))
    order = order[np.argsort(counts[order], kind="stable")]
    return np.asarray(steps[order[: np.sum(counts == sizes)]])


def _groups_like(
    table: Table, pool: npt.NDArray[np.bool_], num_rows: int, influence: float, rng: np.random.Generator
) -> npt.NDArray[Any]:
    """As few random groups of a pool of rows as have a number of rows, and a sum of |advantage| x tokens. For this sum
    they are at most half of the pool, so that there are different ones."""
    groups, sums = influence_by_group(table, pool)
    _, sizes = np.unique(table["group"][pool], return_counts=True)
    order = rng.permutation(len(groups))
    by_rows = int(np.searchsorted(np.cumsum(sizes[order]), num_rows)) + 1 if num_rows > 0 else 0
    by_influence = int(np.searchsorted(np.cumsum(sums[order]), influence)) + 1 if influence > 0 else 0
    return np.asarray(groups[order[: max(by_rows, min(by_influence, len(groups) // 2))]])


def _without_groups(groups: npt.NDArray[Any]) -> Change:
    label = f"without {len(groups)} random groups" if len(groups) > 1 else "without a random group"
    return Change(label=label, where=one_of("group", groups))


def _and_without_groups(cause: Change, groups: npt.NDArray[Any]) -> Change:
    control = _without_groups(groups)
    where = f"({cause.where}) or {control.where}" if cause.where else control.where
    return dataclasses.replace(cause, label=f"{cause.label}, and {control.label}", where=where)


def one_of(column: str, values: npt.NDArray[Any]) -> str:
    """A selection of the rows with one of these values in a column."""
    return f"{column} == {values[0]}" if len(values) == 1 else f"{column} in ({', '.join(map(str, values.tolist()))})"


def influence_by_group(
    table: Table, rows: npt.NDArray[np.bool_] | None = None
) -> tuple[npt.NDArray[Any], npt.NDArray[np.float64]]:
    """[G] the groups of some rows, by default all, and [G] their sums of |advantage| x tokens, by which the size of
    their gradients is estimated."""
    rows = np.ones(len(table["group"]), bool) if rows is None else rows
    groups, index = np.unique(table["group"][rows], return_inverse=True)
    weights = np.abs(table["advantage"][rows]).astype(np.float64) * table["response_tokens"][rows]
    return groups, np.bincount(index, weights, minlength=len(groups)).astype(np.float64)
