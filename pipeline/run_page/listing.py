"""Lists of trajectories and groups for the run page: filtered, sorted and split into pages over the store's columns.
Numpy, pure.

`where` is a filter expression over columns, such as "staleness <= 1 and reward > 0"; empty, it selects everything. Only
positions are returned; tokens are read for one page at a time, so a page costs the same however large the store.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectories.columns import has_reward
from staleflow.stores.trajectories.selection import Selection
from staleflow.stores.trajectory import Fate, FinishReason

Columns = Mapping[str, npt.NDArray[Any]]
Positions = npt.NDArray[np.int64]

ROWS_PER_PAGE = 50
GROUPS_PER_PAGE = 6
BINS = 30
GROUP_ORDERS = ("trained", "best", "worst", "spread", "longest")
"""Orders of a step's groups: as trained; by mean reward, highest or lowest first; by the standard deviation of rewards;
by the longest response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A part of a list. items: positions of trajectories in the store, or group ids; total: length of the whole
    list."""

    items: Positions
    page: int
    num_pages: int
    total: int


def selection_mask(columns: Columns, where: str) -> npt.NDArray[np.bool_]:
    """[R] whether the filter expression selects each trajectory. Raises ConfigError with a message for the page."""
    try:
        return Selection(where).mask(columns)
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix("where ")) from error


def trajectory_page(columns: Columns, where: str, sort: str, page: int) -> Page:
    """A page of the trajectories that a filter selects, sorted by a column.

    Args:
        where: The filter expression.
        sort: Name of a column, with a "-" before it for descending order. Ties are sorted by trajectory id; NaN comes
            last.
        page: Number of the page, from 1; numbers out of range give the nearest page.

    Raises:
        ConfigError: The filter or the column is not valid.
    """
    (positions,) = np.nonzero(selection_mask(columns, where))
    name, descending = sort.removeprefix("-"), sort.startswith("-")
    if name not in columns:
        raise ConfigError(f"cannot be sorted by {name!r}; there are {', '.join(columns)}")
    values = columns[name][positions]
    if values.dtype.kind in "US":
        values = np.unique(values, return_inverse=True)[1]
    values = values.astype(np.float64)
    order = np.lexsort((columns["trajectory"][positions], -values if descending else values))
    return _page(positions[order], page, ROWS_PER_PAGE)


def _page(items: npt.NDArray[Any], page: int, size: int) -> Page:
    num_pages = max(1, -(-len(items) // size))
    page = min(max(page, 1), num_pages)
    return Page(items=items[(page - 1) * size : page * size], page=page, num_pages=num_pages, total=len(items))


def histograms_by_fate(columns: Columns, where: str, name: str) -> dict[str, Any]:
    """Histogram of a numeric column over the selected trajectories, by fate: {"edges": [B + 1], "fates": {fate: [B]}}.
    Rewards are of those that were scored. Raises ConfigError."""
    if name not in columns or columns[name].dtype.kind in "US":
        raise ConfigError(f"{name!r} is not a column of numbers")
    mask = selection_mask(columns, where) & np.isfinite(columns[name].astype(np.float64))
    if name in ("reward", "advantage"):
        mask &= has_reward(columns)
    values = columns[name][mask].astype(np.float64)
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    if columns[name].dtype.kind in "ib":  # bins of equally many whole numbers
        width = max(1, math.ceil((high - low + 1) / BINS))
        edges = np.arange(low, high + width + 0.5, width) - 0.5
    else:
        edges = np.linspace(low, high if high > low else low + 1, BINS + 1)
    fates = columns["fate"][mask]
    counts = {f.value: np.histogram(values[fates == f.value], bins=edges)[0].tolist() for f in Fate}
    return {"column": name, "edges": edges.tolist(), "fates": {fate: c for fate, c in counts.items() if any(c)}}


def statistics_by_outcome(columns: Columns, where: str) -> list[dict[str, Any]]:
    """Compare trajectories that were trained on with others: a row for each fate and reason of the selected ones, with
    their number, mean length, mean reward of those scored (None without any) and truncated share. Raises
    ConfigError."""
    mask = selection_mask(columns, where)
    with_reward = has_reward(columns) & np.isfinite(columns["reward"].astype(np.float64))
    kinds = sorted({*zip(columns["fate"][mask].tolist(), columns["reason"][mask].tolist(), strict=True)})
    rows = []
    for fate, reason in sorted(kinds, key=lambda kind: kind[0] != Fate.CONSUMED.value):
        in_row = mask & (columns["fate"] == fate) & (columns["reason"] == reason)
        rewards = columns["reward"][in_row & with_reward].astype(np.float64)
        rows.append(
            {
                "fate": fate,
                "reason": reason,
                "count": int(in_row.sum()),
                "response_tokens": float(columns["response_tokens"][in_row].mean()),
                "reward": float(rewards.mean()) if len(rewards) else None,
                "truncated": float((columns["finish"][in_row] == FinishReason.LENGTH.value).mean()),
            }
        )
    return rows


def batch_positions(columns: Columns, step: int) -> Positions:
    """Positions of the trajectories that a step trained on, in its order."""
    (positions,) = np.nonzero((columns["step"] == step) & (columns["fate"] == Fate.CONSUMED.value))
    return positions


def group_page(columns: Columns, step: int, where: str, order: str, page: int) -> Page:
    """A page of the groups that a step trained on and that have a member which the filter `where` selects. Raises
    ConfigError."""
    if order not in GROUP_ORDERS:
        raise ConfigError(f"groups cannot be ordered by {order!r}; there are {', '.join(GROUP_ORDERS)}")
    positions = batch_positions(columns, step)
    ids, first, group_indices = np.unique(columns["group"][positions], return_index=True, return_inverse=True)
    rewarded = has_reward(columns)[positions]
    group_of_reward, rewards = group_indices[rewarded], columns["reward"][positions][rewarded].astype(np.float64)
    count = np.bincount(group_of_reward, minlength=len(ids))
    mean = np.bincount(group_of_reward, rewards, len(ids)) / np.maximum(count, 1)
    squares = np.bincount(group_of_reward, (rewards - mean[group_of_reward]) ** 2, len(ids))
    max_lengths = np.zeros(len(ids))
    np.maximum.at(max_lengths, group_indices, columns["response_tokens"][positions])
    key = {
        "trained": first,
        "best": -mean,
        "worst": mean,
        "spread": -squares / np.maximum(count, 1),
        "longest": -max_lengths,
    }
    sorted_ids = np.lexsort((first, key[order]))
    if where.strip():
        matching_groups = np.unique(group_indices[selection_mask(columns, where)[positions]])
        sorted_ids = sorted_ids[np.isin(sorted_ids, matching_groups)]
    return _page(ids[sorted_ids], page, GROUPS_PER_PAGE)


def positions_by_group(columns: Columns, groups: Positions) -> dict[int, Positions]:
    """Positions of each group's members in the store, by group id. Members that were trained on come first."""
    (positions,) = np.nonzero(np.isin(columns["group"], groups))
    is_consumed = columns["fate"][positions] == Fate.CONSUMED.value
    positions = positions[np.lexsort((columns["trajectory"][positions], ~is_consumed))]
    return {int(group): positions[columns["group"][positions] == group] for group in groups}


def mean_reward_by_step(branches: Sequence[Columns]) -> dict[str, Any]:
    """Mean reward over the batch of each step, for each branch: {"step": [S], "means": [[S] per branch]}. The mean
    is None for a step that a branch does not have."""
    last_step = max((int(c["step"].max()) for c in branches if len(c["step"])), default=-1)
    means = []
    for columns in branches:
        is_consumed = (columns["fate"] == Fate.CONSUMED.value) & (columns["loss_mask"] > 0)
        steps, values = columns["step"][is_consumed], columns["reward"][is_consumed].astype(np.float64)
        count = np.bincount(steps, minlength=last_step + 1)
        total = np.bincount(steps, values, last_step + 1)
        means.append([float(t / n) if n else None for t, n in zip(total, count, strict=True)])
    return {"step": list(range(last_step + 1)), "means": means}
