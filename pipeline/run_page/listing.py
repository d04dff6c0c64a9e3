"""Which trajectories and groups a page shows: filtered, sorted and paged over the store's columns. Numpy, pure.

Only positions are returned; tokens are read for one page at a time, so a page costs the same however large the store.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from staleflow.stores.errors import ConfigError
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
    """A part of a list. at: positions in the store; total: elements of the whole list."""

    at: Positions
    page: int
    pages: int
    total: int


def selected(columns: Columns, where: str) -> npt.NDArray[np.bool_]:
    """[R] whether a trajectory is selected. Raises ConfigError with a message for the page."""
    try:
        return Selection(where).mask(columns)
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix("where ")) from error


def trajectories(columns: Columns, where: str, sort: str, page: int) -> Page:
    """A page of trajectories. sort: a column, with a "-" before it for descending; ties by trajectory; values that are
    not numbers come last. Raises ConfigError."""
    (at,) = np.nonzero(selected(columns, where))
    name, descending = sort.removeprefix("-"), sort.startswith("-")
    if name not in columns:
        raise ConfigError(f"cannot be sorted by {name!r}; there are {', '.join(columns)}")
    values = columns[name][at]
    if values.dtype.kind in "US":
        values = np.unique(values, return_inverse=True)[1]
    values = values.astype(np.float64)
    order = np.lexsort((columns["trajectory"][at], -values if descending else values))
    return _page(at[order], page, ROWS_PER_PAGE)


def _page(items: npt.NDArray[Any], page: int, size: int) -> Page:
    pages = max(1, -(-len(items) // size))
    page = min(max(page, 1), pages)
    return Page(at=items[(page - 1) * size : page * size], page=page, pages=pages, total=len(items))


def distribution(columns: Columns, where: str, name: str) -> dict[str, Any]:
    """Histogram of a numeric column over the selected trajectories, by fate: {"edges": [B + 1], "fates": {fate: [B]}}.
    Rewards are of those that were scored. Raises ConfigError."""
    if name not in columns or columns[name].dtype.kind in "US":
        raise ConfigError(f"{name!r} is not a column of numbers")
    chosen = selected(columns, where) & np.isfinite(columns[name].astype(np.float64))
    if name in ("reward", "advantage"):
        chosen &= scored(columns)
    values = columns[name][chosen].astype(np.float64)
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    if columns[name].dtype.kind in "ib":  # bins of equally many whole numbers
        width = max(1, math.ceil((high - low + 1) / BINS))
        edges = np.arange(low, high + width + 0.5, width) - 0.5
    else:
        edges = np.linspace(low, high if high > low else low + 1, BINS + 1)
    fates = columns["fate"][chosen]
    counts = {f.value: np.histogram(values[fates == f.value], bins=edges)[0].tolist() for f in Fate}
    return {"column": name, "edges": edges.tolist(), "fates": {fate: c for fate, c in counts.items() if any(c)}}


def by_fate(columns: Columns, where: str) -> list[dict[str, Any]]:
    """What was trained on against what was not: a row for each fate and reason of the selected trajectories, with their
    number, mean length, mean reward of those scored (None without any) and share of those cut off. Raises
    ConfigError."""
    chosen = selected(columns, where)
    rated = scored(columns) & np.isfinite(columns["reward"].astype(np.float64))
    kinds = sorted({*zip(columns["fate"][chosen].tolist(), columns["reason"][chosen].tolist(), strict=True)})
    rows = []
    for fate, reason in sorted(kinds, key=lambda kind: kind[0] != Fate.CONSUMED.value):
        these = chosen & (columns["fate"] == fate) & (columns["reason"] == reason)
        rewards = columns["reward"][these & rated].astype(np.float64)
        rows.append(
            {
                "fate": fate,
                "reason": reason,
                "count": int(these.sum()),
                "response_tokens": float(columns["response_tokens"][these].mean()),
                "reward": float(rewards.mean()) if len(rewards) else None,
                "cut": float((columns["finish"][these] == FinishReason.LENGTH.value).mean()),
            }
        )
    return rows


def scored(columns: Columns) -> npt.NDArray[np.bool_]:
    """[R] whether a trajectory has a reward."""
    return np.asarray((columns["rewarded_s"] > 0) | (columns["staleness"] >= 0))


def batch_of_step(columns: Columns, step: int) -> Positions:
    """Positions of the trajectories that a step trained on, in its order."""
    (at,) = np.nonzero((columns["step"] == step) & (columns["fate"] == Fate.CONSUMED.value))
    return at


def groups_of_step(columns: Columns, step: int, where: str, order: str, page: int) -> Page:
    """A page of the groups that a step trained on; `at` holds group ids. where: groups in which it selects a member.
    Raises ConfigError."""
    if order not in GROUP_ORDERS:
        raise ConfigError(f"groups cannot be ordered by {order!r}; there are {', '.join(GROUP_ORDERS)}")
    at = batch_of_step(columns, step)
    ids, first, member = np.unique(columns["group"][at], return_index=True, return_inverse=True)
    count = np.bincount(member, minlength=len(ids))
    rewards = columns["reward"][at].astype(np.float64)
    mean = np.bincount(member, rewards, len(ids)) / np.maximum(count, 1)
    squares = np.bincount(member, (rewards - mean[member]) ** 2, len(ids))
    longest = np.zeros(len(ids))
    np.maximum.at(longest, member, columns["response_tokens"][at])
    key = {
        "trained": first,
        "best": -mean,
        "worst": mean,
        "spread": -squares / np.maximum(count, 1),
        "longest": -longest,
    }
    sorted_ids = np.lexsort((first, key[order]))
    if where.strip():
        matching = np.unique(member[selected(columns, where)[at]])
        sorted_ids = sorted_ids[np.isin(sorted_ids, matching)]
    return _page(ids[sorted_ids], page, GROUPS_PER_PAGE)


def members(columns: Columns, groups: Positions) -> dict[int, Positions]:
    """Positions of each group's members, trained ones first, by id of the group, in the order given."""
    (at,) = np.nonzero(np.isin(columns["group"], groups))
    trained = columns["fate"][at] == Fate.CONSUMED.value
    at = at[np.lexsort((columns["trajectory"][at], ~trained))]
    return {int(group): at[columns["group"][at] == group] for group in groups}


def mean_by_step(branches: Sequence[Columns], name: str) -> dict[str, Any]:
    """Mean of a column over each step's batch, one list per branch; None for a step that a branch has not."""
    last = max((int(c["step"].max()) for c in branches if len(c["step"])), default=-1)
    means = []
    for columns in branches:
        trained = (columns["fate"] == Fate.CONSUMED.value) & (columns["loss_mask"] > 0)
        steps, values = columns["step"][trained], columns[name][trained].astype(np.float64)
        count = np.bincount(steps, minlength=last + 1)
        total = np.bincount(steps, values, last + 1)
        means.append([float(t / n) if n else None for t, n in zip(total, count, strict=True)])
    return {"step": list(range(last + 1)), "means": means}
