"""Drop bias: how dropped trajectories differ from trained ones in length, reward and prompt, by the reason for
dropping; and how truncated responses differ from complete ones.

Members of a group are correlated, so the group is the unit: every number compared is a group's mean. Two kinds of
groups are compared by Welch's t-test, lengths on a logarithmic scale, whose difference of means is the ratio of
geometric means. Comparisons with fewer than MIN_GROUPS groups on either side, or with p above P_LIMIT, are left out. A
response that was stopped early counts with the tokens and turns it had. Dropped responses are then longer than
measured, so they are not called shorter if some were stopped.

Memory is a few numbers per group, and one block of rows at a time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from staleflow.stores.trajectory import AbortReason, Fate, FinishReason, outcome_key

MIN_GROUPS = 20
"""Least number of groups on each side of a comparison."""
P_LIMIT = 0.001
"""Probability above which a difference may be chance: at some ten comparisons per run, one run in a hundred errs."""
RATIO_LIMIT, REWARD_LIMIT = 1.1, 0.02
"""Differences below these do not matter, however certain: a ratio of lengths, a difference of rewards."""
REPORTED_TRUNCATED_SHARE = 0.1
"""Share of the responses trained on from which on it is said that they were cut off, whether they differ or not."""
ROWS_AT_ONCE = 65_536
"""Rows read together."""
DROPPED, TRUNCATED = "dropped", "truncated"
"""Kinds of rows besides "fate:reason": all dropped ones, except those that the run's end stopped; and consumed
responses that were cut off."""

MEAN_COLUMNS = ("response_tokens", "prompt_tokens", "turns", "tool_s")
"""Columns whose means are compared."""

Array = npt.NDArray[np.float64]


class HasColumns(Protocol):
    """The part of a store's interface that is used here."""

    def displayed_columns(self, start: int = 0, stop: int | None = None) -> dict[str, npt.NDArray[Any]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """A statistically significant difference between two kinds of trajectories."""

    effect: float
    """Ratio of lengths, or difference of rewards."""
    p: float
    """Two-sided p-value of Welch's t-test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeStats:
    """Statistics of the trajectories with one outcome: means over their groups, and differences from trained
    trajectories. A difference is None if there are too few groups or it is not significant."""

    name: str
    trajectories: int
    groups: int
    response_tokens: float
    prompt_tokens: float
    reward: float | None
    """None if none was scored."""
    turns: float = 0.0
    tool_s: float = 0.0
    length_ratio: Contrast | None = None
    turns_ratio: Contrast | None = None
    tool_ratio: Contrast | None = None
    prompt_ratio: Contrast | None = None
    reward_difference: Contrast | None = None


PHRASES: dict[str, Callable[[float], str]] = {
    "length_ratio": "{:.2g} times as long".format,
    "turns_ratio": "of {:.2g} times as many turns".format,
    "tool_ratio": "{:.2g} times as long with their environments".format,
    "reward_difference": lambda gap: f"{abs(gap):.2g} {'higher' if gap > 0 else 'lower'} in reward",
    "prompt_ratio": "to prompts {:.2g} times as long".format,
}
"""Phrases for lines of the report, by name of the difference in OutcomeStats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropBias:
    """Differences between the trajectories that a run trained on and those that it dropped."""

    consumed: OutcomeStats
    """The trajectories that were trained on."""
    others: tuple[OutcomeStats, ...] = ()
    """Those that were not, by reason; and the consumed ones that were cut off."""
    groups: int = 0
    never_trained: int = 0
    """Groups of which no trajectory was trained on."""

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values for JSON, with its lines."""
        return {"lines": self.lines, **asdict(self)}

    @property
    def lines(self) -> list[str]:
        """The significant differences, one line per outcome; empty if there are none."""
        lines = []
        for kind in self.others:
            contrasts = [
                f"{words(contrast.effect)} (p < .001)"
                for name, words in PHRASES.items()
                if (contrast := getattr(kind, name)) is not None
            ]
            trajectories = self.consumed.trajectories
            if kind.name == TRUNCATED:
                if contrasts or kind.trajectories >= REPORTED_TRUNCATED_SHARE * trajectories:
                    count = (
                        f"{kind.trajectories:,} of {trajectories:,} responses ({kind.trajectories / trajectories:.0%})"
                    )
                    line = f"trained on though truncated at rollout.max_new_tokens: {count}"
                    lines.append(", ".join([line, *contrasts]))
            elif contrasts:
                count = f"({kind.trajectories:,} of {trajectories + kind.trajectories:,})"
                lines.append(f"not trained on: {kind.name} responses {count} were {', '.join(contrasts)}")
        return lines


def drop_bias_of_store(store: HasColumns) -> DropBias:
    """Compare the trajectories of a store by outcome. Reads the store in blocks."""
    return compute_drop_bias(_blocks(store))


def compute_drop_bias(blocks: Iterable[Mapping[str, npt.NDArray[Any]]]) -> DropBias:
    """Compute `drop_bias_of_store` from a store's columns, given in blocks of rows."""
    sums: dict[str, _GroupSums] = {}
    groups: set[int] = set()
    for table in blocks:
        groups.update(np.unique(table["group"]).tolist())
        for name, mask in _kinds(table).items():
            if mask.any():
                sums.setdefault(name, _GroupSums()).add({column: values[mask] for column, values in table.items()})
    trained_sums = sums.pop(outcome_key(Fate.CONSUMED, AbortReason.NONE), _GroupSums())
    finished_sums = sums.pop("whole", _GroupSums())
    order = sorted(sums, key=lambda name: (name != DROPPED, name == TRUNCATED, -sums[name].trajectories))
    outcomes = tuple(
        _compare_outcomes(name, sums[name], finished_sums if name == TRUNCATED else trained_sums) for name in order
    )
    never = len(groups) - len(trained_sums.means("count"))
    return DropBias(
        consumed=_outcome_stats("consumed", trained_sums), others=outcomes, groups=len(groups), never_trained=never
    )


def _blocks(store: HasColumns) -> Iterator[dict[str, npt.NDArray[Any]]]:
    start = 0
    while len((table := store.displayed_columns(start, start + ROWS_AT_ONCE))["trajectory"]):
        yield table
        start += ROWS_AT_ONCE


def _kinds(table: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[np.bool_]]:
    """Masks of the rows of each kind; a row may be of several."""
    is_consumed = table["fate"] == Fate.CONSUMED.value
    is_truncated = is_consumed & (table["finish"] == FinishReason.LENGTH.value)
    is_unfinished = table["reason"] == AbortReason.RUN_ENDED.value
    kinds = {TRUNCATED: is_truncated, "whole": is_consumed & ~is_truncated, DROPPED: ~is_consumed & ~is_unfinished}
    for fate, reason in {*zip(table["fate"].tolist(), table["reason"].tolist(), strict=True)}:
        kinds[outcome_key(Fate(fate), AbortReason(reason))] = (table["fate"] == fate) & (table["reason"] == reason)
    return kinds


@dataclass(slots=True)
class _GroupSums:
    """Sums over the trajectories of one kind, by name: arrays by group, which grow with the groups' ids."""

    trajectories: int = 0
    stopped: int = 0
    sums: defaultdict[str, Array] = field(default_factory=lambda: defaultdict(lambda: np.zeros(0)))

    def add(self, rows: Mapping[str, npt.NDArray[Any]]) -> None:
        # A reward that failed is none; of what was dropped, the mask does not tell, and a failed one counts as scored.
        is_consumed = rows["fate"] == Fate.CONSUMED.value
        is_scored = (rows["rewarded_s"] > 0) & ~(is_consumed & (rows["loss_mask"] == 0))
        self.trajectories += len(is_scored)
        self.stopped += int((rows["finish"] == FinishReason.UNFINISHED.value).sum())
        columns = {name: rows[name] for name in MEAN_COLUMNS}
        columns |= {
            "count": np.ones(len(is_scored)),
            "scored": is_scored,
            "reward": np.where(is_scored, rows["reward"], 0.0),
        }
        for name, values in columns.items():
            before = self.sums[name]
            total: Array = np.bincount(rows["group"], values, len(before)).astype(np.float64)
            total[: len(before)] += before
            self.sums[name] = total

    def means(self, name: str, by: str = "count") -> Array:
        """A mean for each group that has any."""
        nonempty = self.sums[by] > 0
        means: Array = self.sums[name][nonempty] / self.sums[by][nonempty]
        return means


def _outcome_stats(name: str, sums: _GroupSums, **differences: Contrast | None) -> OutcomeStats:
    rewards = sums.means("reward", "scored")
    figures: dict[str, Any] = {**{name: _mean(sums.means(name)) for name in MEAN_COLUMNS}, **differences}
    return OutcomeStats(
        name=name,
        trajectories=sums.trajectories,
        groups=len(sums.means("count")),
        reward=_mean(rewards) if len(rewards) else None,
        **figures,
    )


def _compare_outcomes(name: str, sums: _GroupSums, other: _GroupSums) -> OutcomeStats:
    ratios: dict[str, Contrast | None] = {}
    for column in ("response_tokens", "turns", "tool_s"):
        ratio = _ratio(sums.means(column), other.means(column))
        # A trajectory that was stopped might have become longer.
        is_unknown = ratio is not None and ratio.effect < 1 and sums.stopped
        ratios[column] = None if is_unknown or name.endswith(AbortReason.RUN_ENDED.value) else ratio
    reward = welch_contrast(sums.means("reward", "scored"), other.means("reward", "scored"))
    return _outcome_stats(
        name,
        sums,
        length_ratio=None if name == TRUNCATED else ratios["response_tokens"],
        turns_ratio=ratios["turns"],
        tool_ratio=ratios["tool_s"],
        prompt_ratio=_ratio(sums.means("prompt_tokens"), other.means("prompt_tokens")),
        reward_difference=reward if reward is not None and abs(reward.effect) >= REWARD_LIMIT else None,
    )


def _ratio(left: Array, right: Array) -> Contrast | None:
    contrast = welch_contrast(np.log(np.maximum(left, 1.0)), np.log(np.maximum(right, 1.0)))
    if contrast is None or abs(contrast.effect) < math.log(RATIO_LIMIT):
        return None
    return Contrast(effect=math.exp(contrast.effect), p=contrast.p)


def welch_contrast(left: Array, right: Array) -> Contrast | None:
    """Compare two means by Welch's t-test; None if there are too few values, or the difference is not significant.

    The tail of Student's t is that of a normal distribution at Wallace's equivalent deviate (1959), exact to a percent
    from ten degrees of freedom on.
    """
    if min(len(left), len(right)) < MIN_GROUPS:
        return None
    parts = [float(x.var(ddof=1)) / len(x) for x in (left, right)]
    gap, variance = float(left.mean() - right.mean()), sum(parts)
    if variance <= 0:
        return Contrast(effect=gap, p=0.0) if gap else None
    freedom = variance**2 / sum(part**2 / (len(x) - 1) for part, x in zip(parts, (left, right), strict=True))
    z = (8 * freedom + 1) / (8 * freedom + 3) * math.sqrt(freedom * math.log1p(gap * gap / variance / freedom))
    p = math.erfc(z / math.sqrt(2))
    return Contrast(effect=gap, p=p) if p < P_LIMIT else None


def _mean(values: Array) -> float:
    return float(values.mean()) if len(values) else 0.0
