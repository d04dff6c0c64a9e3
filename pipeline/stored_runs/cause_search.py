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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from staleflow.pipeline.stored_runs.run_files import format_steps
from staleflow.pipeline.stored_runs.training_changes import (
    NUM_PAIRS,
    Change,
    Table,
    control_changes,
    influence_by_group,
    old_settings_change,
    one_of,
)
from staleflow.stores.reward_statistics import Interval, PairedDifference, estimate, paired_difference
from staleflow.stores.trajectories.selection import Selection

MAX_TRAININGS = 20
"""Trainings at most, with those that confirm."""
MAX_TRIALS = 12
"""Trainings after which no further change is tried; the others are left to confirm one."""
P_LIMIT = 0.01
"""p-value below which a difference between two trainings counts."""
MIN_RECOVERED_SHARE = 0.5
"""Share of the lost reward that has to come back with a change for it to count."""
Rewards = Mapping[str, Sequence[float]]
"""Rewards by held-out prompt, one for each answer."""
Item = TypeVar("Item")


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
    search = _Search(table=table, training=training, before=before, unchanged=unchanged, report=report)
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


@dataclass(slots=True, kw_only=True)
class _Search:
    """Trains with changes, and compares their rewards with those of the unchanged training and with each other."""

    table: Table
    training: RepeatedTraining
    before: Rewards
    unchanged: Rewards
    report: Callable[[str], None]
    result: SearchResult = field(
        default_factory=lambda: SearchResult(reason="no change that was tried prevents the drop")
    )
    trials_preventing: list[tuple[Trial, Rewards]] = field(default_factory=list)
    confirmed_changes: list[Change] = field(default_factory=list)
    """Changes that were to be confirmed, with or without success."""
    refuted_changes: list[Change] = field(default_factory=list)
    """Those of them that failed."""
    num_trainings: int = 0

    def prevents(self, change: Change) -> bool:
        """Train with a change, if the limit allows it. Returns whether it prevents the drop, and no change that was
        tried does significantly better. A change that leaves no row with a gradient is not tried: it ends the
        training, and so every drop."""
        if change.where and not self.table["advantage"][~Selection(change.where).mask(self.table)].any():
            return False
        if self.num_trainings >= MAX_TRIALS:
            self.result.is_limited = True
            return False
        trial, rewards = self._train(change)
        self.result.trials.append(trial)
        self.trials_preventing.extend([(trial, rewards)] * trial.prevents)
        return any(trial is other for other in self.preventing())

    def prevents_with(self, since: int, settings: Sequence[tuple[str, str]]) -> bool:
        return self.prevents(old_settings_change(settings, since))

    def preventing(self) -> list[Trial]:
        """The changes that prevent the drop, without those that another one does significantly better than: half of a
        cause that is everywhere would do, too. One that is no better than random groups is not compared with."""
        trials = [item for item in self.trials_preventing if item[0].change not in self.refuted_changes]
        best = max(trials, key=lambda item: item[0].reward, default=None)
        return [t for t, rewards in self.trials_preventing if best is None or not _is_higher(best[1], rewards)]

    def confirm_smallest(self) -> None:
        """Confirm the smallest of the changes that prevent the drop; if that fails, a part of the reward, and then the
        larger ones: few rows are then parts of what is everywhere. With a cause, only smaller changes."""
        cause, num_before = self.result.cause, len(self.confirmed_changes)
        while trials := [
            trial
            for trial in sorted(self.preventing(), key=lambda trial: trial.rows)
            if trial.change not in self.confirmed_changes and (cause is None or trial.rows < cause.rows)
        ]:
            parts = [trial for trial in trials if trial.change.reward_part and len(self.confirmed_changes) > num_before]
            if self.confirm([*parts, *trials][0]):
                return

    def confirm(self, trial: Trial) -> bool:
        """Confirm a change, if the limit allows it. It is the cause if that succeeds."""
        result = self.result
        self.confirmed_changes.append(trial.change)
        if self.num_trainings + 2 * NUM_PAIRS > MAX_TRAININGS:
            result.is_limited = True
            return False
        confirmation = self._train_pairs(trial.change)
        result.controls += confirmation.controls
        result.repeats += confirmation.repeats
        self.refuted_changes += [trial.change] * bool(confirmation.reason)
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
        for control_change, repeat_change in control_changes(self.table, cause):
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
            statistics.fmean(map(statistics.fmean, rewards.values())) for rewards in (self.before, self.unchanged)
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
        self.num_trainings += 1
        rewards = self.training.train(change)
        summary, difference = estimate(list(rewards.values())), paired_difference(self.unchanged, rewards)
        drop = paired_difference(self.before, self.unchanged)
        prevents = (
            difference is not None
            and drop is not None
            and difference.mean >= -MIN_RECOVERED_SHARE * drop.mean
            and difference.p < P_LIMIT
        )
        trial = Trial(
            change=change,
            rows=self.training.num_changed_rows(change),
            reward=summary.mean or 0.0,
            interval=summary.interval,
            difference=difference,
            prevents=prevents,
        )
        self.report(f"{change.label}: {trial.reward:.3f}" + ", prevents it" * prevents)
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
        return prevents(Change(label=label, where=condition + one_of("group", np.array(groups))))

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
    """The groups of some rows, those with the largest sum of |advantage| x tokens first, without those whose sum is 0,
    which train nothing."""
    groups, sums = influence_by_group(table, rows)
    return [int(group) for group in groups[np.argsort(-sums, kind="stable")[: np.count_nonzero(sums)]]]
