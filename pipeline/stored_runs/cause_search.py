"""The search for the smallest change of a repeated training that prevents a drop of the reward. Pure.

Changes are tried from the cheapest to name: settings that a resume changed, parts of the reward, rows that stand out,
then steps and groups, halved as long as a half prevents the drop. A change *prevents* the drop if most of the lost
reward comes back with it, and its difference from the unchanged training is significant.

That alone is no evidence, since the best of many noisy trainings was chosen. So a change is the cause only if fresh
trainings confirm it: pairs of which both leave out the same few random groups, one of them with the change, the other
with random groups of as many rows. With the change each one must have a higher reward than all without it. What harms
in all rows is undone by any rows that are left out, so it confirms nothing. Rows that stand out are confirmed before
they are divided further; a part of the reward after the smallest rows, since without it there may be nothing to learn.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from staleflow.pipeline.config.knob_tree import toml_value
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.stored_runs.run_files import format_steps
from staleflow.stores.reward_statistics import Interval, PairedDifference, estimate, paired_difference
from staleflow.stores.trajectories.selection import Selection
from staleflow.stores.trajectory import FinishReason

MAX_TRAININGS = 20
"""Trainings at most, with those that confirm."""
MAX_TRIALS = 12
"""Trainings after which no further change is tried; the others are left to confirm one."""
NUM_PAIRS = 3
"""Pairs of trainings that confirm a cause. Without a difference all with the change are above all without it in one of
20 cases."""
P_LIMIT = 0.01
"""p-value below which a difference between two trainings counts."""
MIN_RECOVERED_SHARE = 0.5
"""Share of the lost reward that has to come back with a change for it to count."""
MIN_INFLUENCE_RATIO = 10.0
"""Groups stand out whose sum of |advantage| x tokens is this many times that of the median group that has one."""
PERTURBED_SHARE = 8
"""One of this many groups is left out at random in each pair."""
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
Rewards = Mapping[str, Sequence[float]]
"""Rewards by held-out prompt, one for each answer."""
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
    """Whether the reward is not lost with this change, and no other change that was tried does significantly better."""


class RepeatedTraining(Protocol):
    """The training between two versions, which can be repeated with a change."""

    def train(self, change: Change) -> Rewards:
        """Train with a change; returns the rewards of the result on held-out prompts."""

    def num_changed_rows(self, change: Change) -> int:
        """Number of rows that a change leaves out, or gives another reward."""


@dataclass(slots=True, kw_only=True)
class SearchResult:
    """The result of a search."""

    cause: Trial | None = None
    """The smallest change that prevents the drop and was confirmed."""
    reason: str = ""
    """Why there is no cause; empty if there is one."""
    trials: list[Trial] = field(default_factory=list)
    """All changes that were tried, in order."""
    controls: list[Trial] = field(default_factory=list)
    """Trainings without random groups, of all pairs that were to confirm a change."""
    repeats: list[Trial] = field(default_factory=list)
    """The other trainings of these pairs, with the change."""
    confirmed: PairedDifference | None = None
    """Repeats minus controls, over the prompts; None if nothing was confirmed."""
    is_limited: bool = False
    """Whether the limit of trainings ended the search."""


# -- changes to try --------------------------------------------------------------------------------------------------


def changed_settings(before: RunConfig, after: RunConfig) -> list[str]:
    """Settings, as TABLE.KEY, that differ between two jobs of a run and that a repeated training depends on."""
    keys = []
    before, after = _with_schedule(before), _with_schedule(after)
    for table in TABLES:
        old, new = getattr(before, table), getattr(after, table)
        names = ROLLOUT_SETTINGS if table == "rollout" else [f.name for f in dataclasses.fields(new)]
        names = [name for name in names if name not in OTHER_SETTINGS.get(table, ())]
        keys += [f"{table}.{name}" for name in names if getattr(old, name) != getattr(new, name)]
    return keys


def _with_schedule(config: RunConfig) -> RunConfig:
    """A job whose learning-rate schedule does not depend on its number of steps: a resume may change that number."""
    training = config.training
    steps = 0 if training.schedule == "constant" else training.schedule_steps or config.steps
    return dataclasses.replace(config, training=dataclasses.replace(training, schedule_steps=steps))


def restore_settings(config: RunConfig, former: RunConfig, keys: Sequence[str]) -> RunConfig:
    """A job with the values of some settings, as TABLE.KEY, that another job has."""
    former = _with_schedule(former)
    for key in keys:
        table, _, name = key.partition(".")
        section = dataclasses.replace(getattr(config, table), **{name: getattr(getattr(former, table), name)})
        config = dataclasses.replace(config, **{table: section})
    return config


def settings_change(former: RunConfig, config: RunConfig, since: int) -> Change:
    """The settings that a job has since a step, with the values of the job before."""
    keys, former = changed_settings(former, config), _with_schedule(former)
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
    groups, sums = _influence(table)
    usual = np.median(sums[sums > 0]) if (sums > 0).any() else 0.0
    outstanding = np.isin(table["group"], groups[sums > MIN_INFLUENCE_RATIO * usual])
    parts.append(
        (
            "groups with outstanding gradients",
            _one_of("group", np.unique(table["group"][outstanding])) if outstanding.any() else "",
            outstanding,
        )
    )
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


def control_changes(table: Table, cause: Change) -> Iterator[tuple[Change, Change]]:
    """Pairs of changes that confirm a cause: a few random groups are left out with the cause, and without it, but with
    other random groups that have as many rows and as large gradients as the cause. So both leave out as much.

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
        pool = others & rest if np.sum(others & rest) >= np.sum(rows) else rest
        instead = _groups_like(table, pool, rows, rng)
        yield _without_groups(np.sort(np.concatenate([few, instead]))), _and_without_groups(cause, few)


def _distinct_groups(table: Table, rows: npt.NDArray[np.bool_], rng: np.random.Generator) -> Iterator[npt.NDArray[Any]]:
    """One of PERTURBED_SHARE of the groups of some rows for each pair, different ones if there are enough."""
    groups = rng.permutation(np.unique(table["group"][rows]))
    count = -(-len(groups) // PERTURBED_SHARE)
    for pair in range(NUM_PAIRS):
        yield np.sort(np.roll(groups, -pair * count)[:count])


def _groups_like(
    table: Table, pool: npt.NDArray[np.bool_], rows: npt.NDArray[np.bool_], rng: np.random.Generator
) -> npt.NDArray[Any]:
    """As few random groups of a pool of rows as have the number and the gradients of other rows. For the gradients they
    are at most half of the pool, so that there are different ones."""
    groups, influence = _influence(table, pool)
    _, sizes = np.unique(table["group"][pool], return_counts=True)
    order = rng.permutation(len(groups))
    by_rows = int(np.searchsorted(np.cumsum(sizes[order]), np.sum(rows))) + 1
    by_influence = int(np.searchsorted(np.cumsum(influence[order]), np.sum(_influence(table, rows)[1]))) + 1
    count = max(by_rows, min(by_influence, len(groups) // 2)) if rows.any() else 0
    return np.asarray(groups[order[:count]])


def _without_groups(groups: npt.NDArray[Any]) -> Change:
    label = f"without {len(groups)} random groups" if len(groups) > 1 else "without a random group"
    return Change(label=label, where=_one_of("group", groups))


def _and_without_groups(cause: Change, groups: npt.NDArray[Any]) -> Change:
    control = _without_groups(groups)
    where = f"({cause.where}) or {control.where}" if cause.where else control.where
    return dataclasses.replace(cause, label=f"{cause.label}, and {control.label}", where=where)


def _one_of(column: str, values: npt.NDArray[Any]) -> str:
    """A selection of the rows with one of these values in a column."""
    return f"{column} == {values[0]}" if len(values) == 1 else f"{column} in ({', '.join(map(str, values.tolist()))})"


# -- search ----------------------------------------------------------------------------------------------------------


def search(
    table: Table,
    since: int,
    at: int,
    candidates: Sequence[Change],
    training: RepeatedTraining,
    before: Rewards,
    unchanged: Rewards,
    report: Callable[[str], None] = lambda _: None,
) -> SearchResult:
    """Try changes until no smaller one prevents the drop, and confirm the smallest, with at most MAX_TRAININGS.

    Args:
        table: Columns of the rows that steps since <= step < at trained on.
        since: The first step.
        at: The step after the last.
        candidates: Changes to try before steps and groups: settings, then parts of the reward, then rows.
        training: Repeats the training with a change.
        before: Rewards of the earlier version.
        unchanged: Rewards of the unchanged training.
        report: Called with a line for each training.
    """
    search = _Search(table, training, before, unchanged, report)
    for change in candidates:
        if not search.prevents(change):
            continue
        if change.settings:
            halve(change.settings, functools.partial(search.prevents_with, change.since))
            trials = [trial for trial in search.preventing() if trial.change.settings]
            trials = [trial for trial in trials if trial.change.since == change.since]
            search.confirm(min(trials, key=lambda trial: len(trial.change.settings)))
        elif change.where:
            search.confirm(search.result.trials[-1])
        if search.result.cause is not None:
            break
    cause = search.result.cause
    if cause is None:
        halve(range(since, at), lambda steps: search.prevents(_without_steps(steps)))
    if cause is None or cause.change.where:
        _halve_groups(table, [cause] if cause is not None else search.preventing(), search.prevents)
        search.confirm_smallest()
    search.mark_preventing()
    return search.result


class _Search:
    """Trains with changes, and compares their rewards with those of the unchanged training and with each other."""

    def __init__(
        self,
        table: Table,
        training: RepeatedTraining,
        before: Rewards,
        unchanged: Rewards,
        report: Callable[[str], None],
    ) -> None:
        self._table, self._training, self._report = table, training, report
        self._before, self._unchanged = before, unchanged
        self.result = SearchResult(reason="no change that was tried prevents the drop")
        self._preventing: list[tuple[Trial, Rewards]] = []
        self._confirmed_changes: list[Change] = []
        """Changes that were to be confirmed, with or without success."""
        self._num_trainings = 0

    def prevents(self, change: Change) -> bool:
        """Train with a change, if the limit allows it. Returns whether it prevents the drop, and no change that was
        tried does significantly better."""
        if self._num_trainings >= MAX_TRIALS:
            self.result.is_limited = True
            return False
        trial, rewards = self._train(change)
        self.result.trials.append(trial)
        self._preventing.extend([(trial, rewards)] * trial.prevents)
        return any(trial is other for other in self.preventing())

    def prevents_with(self, since: int, settings: Sequence[tuple[str, str]]) -> bool:
        return self.prevents(_with_settings(settings, since))

    def preventing(self) -> list[Trial]:
        """The changes that prevent the drop, without those that another one does significantly better than: half of a
        cause that is everywhere would do, too."""
        best = max(self._preventing, key=lambda item: item[0].reward, default=None)
        return [t for t, rewards in self._preventing if best is None or not _is_higher(best[1], rewards)]

    def confirm_smallest(self) -> None:
        """Confirm the smallest of the changes that prevent the drop; if that fails, a part of the reward, and then the
        larger ones: few rows are then parts of what is everywhere. With a cause, only smaller changes."""
        cause = self.result.cause
        trials = sorted(self.preventing(), key=lambda trial: trial.rows)
        trials = [trial for trial in trials if trial.change not in self._confirmed_changes]
        trials = [trial for trial in trials if cause is None or trial.rows < cause.rows]
        for trial in [*trials[:1], *sorted(trials[1:], key=lambda trial: not trial.change.reward_part)]:
            if self.confirm(trial):
                return

    def confirm(self, trial: Trial) -> bool:
        """Confirm a change, if the limit allows it. It is the cause if that succeeds."""
        result = self.result
        if self._num_trainings + 2 * NUM_PAIRS > MAX_TRAININGS:
            result.is_limited = True
            return False
        self._confirmed_changes.append(trial.change)
        confirmation = self._train_pairs(trial.change)
        result.controls += confirmation.controls
        result.repeats += confirmation.repeats
        if not confirmation.reason or result.cause is None:
            result.confirmed, result.reason = confirmation.confirmed, confirmation.reason
            result.cause = None if confirmation.reason else trial
        return not confirmation.reason

    def mark_preventing(self) -> None:
        """Take the mark `prevents` from trials that another one does significantly better than."""
        preventing = self.preventing()
        for number, trial in enumerate(self.result.trials):
            if trial.prevents and trial is not self.result.cause and not any(trial is other for other in preventing):
                self.result.trials[number] = dataclasses.replace(trial, prevents=False)

    def _train_pairs(self, cause: Change) -> SearchResult:
        """Train the pairs of a cause. The result has the reason if they do not confirm it."""
        result = SearchResult()
        all_controls, all_repeats = dict[str, list[float]](), dict[str, list[float]]()
        for control_change, repeat_change in control_changes(self._table, cause):
            for change, trials, rewards in (
                (control_change, result.controls, all_controls),
                (repeat_change, result.repeats, all_repeats),
            ):
                trial, scores = self._train(change)
                trials.append(trial)
                for prompt, values in scores.items():
                    rewards.setdefault(prompt, []).extend(values)
            if min(trial.reward for trial in result.repeats) <= max(trial.reward for trial in result.controls):
                result.reason = f"{cause.label} prevents the drop, but not more than random groups do"
                return result
        difference = paired_difference(all_controls, all_repeats)
        before, unchanged = (
            statistics.fmean(map(statistics.fmean, rewards.values())) for rewards in (self._before, self._unchanged)
        )
        lost = before - statistics.fmean(trial.reward for trial in result.controls)
        if lost < MIN_RECOVERED_SHARE * (before - unchanged):
            result.reason = f"{cause.label} prevents the drop, but so do random groups"
        elif difference is None or not _is_higher(all_repeats, all_controls):
            result.reason = f"{cause.label} prevents the drop, but not significantly when it is repeated"
        elif difference.mean < MIN_RECOVERED_SHARE * lost:
            result.reason = f"{cause.label} prevents less than half of the drop when it is repeated"
        else:
            result.confirmed = difference
        return result

    def _train(self, change: Change) -> tuple[Trial, Rewards]:
        self._num_trainings += 1
        rewards = self._training.train(change)
        summary, difference = estimate(list(rewards.values())), paired_difference(self._unchanged, rewards)
        drop = paired_difference(self._before, self._unchanged)
        prevents = (
            difference is not None
            and drop is not None
            and difference.mean >= -MIN_RECOVERED_SHARE * drop.mean
            and difference.p < P_LIMIT
        )
        trial = Trial(
            change=change,
            rows=self._training.num_changed_rows(change),
            reward=summary.mean or 0.0,
            interval=summary.interval,
            difference=difference,
            prevents=prevents,
        )
        self._report(f"{change.label}: {trial.reward:.3f}" + ", prevents it" * prevents)
        return trial, rewards


def _is_higher(rewards: Rewards, others: Rewards) -> bool:
    """Whether rewards are significantly higher than others on the same prompts."""
    difference = paired_difference(others, rewards)
    return difference is not None and difference.mean > 0 and difference.p < P_LIMIT


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
    groups, sums = _influence(table, rows)
    return [int(group) for group in groups[np.argsort(-sums, kind="stable")]]


def _influence(
    table: Table, rows: npt.NDArray[np.bool_] | None = None
) -> tuple[npt.NDArray[Any], npt.NDArray[np.float64]]:
    """[G] the groups of some rows, by default all, and [G] their sums of |advantage| x tokens, by which the size of
    their gradients is estimated."""
    rows = np.ones(len(table["group"]), bool) if rows is None else rows
    groups, index = np.unique(table["group"][rows], return_inverse=True)
    weights = np.abs(table["advantage"][rows]).astype(np.float64) * table["response_tokens"][rows]
    return groups, np.bincount(index, weights, minlength=len(groups)).astype(np.float64)
