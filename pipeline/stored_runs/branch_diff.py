"""Comparison of two branches' rewards for the same trajectories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from staleflow.stores.errors import ConfigError
from staleflow.stores.reward_statistics import has_signal
from staleflow.stores.trajectories.columns import FATES
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import Fate

IDENTITY_COLUMNS = ("trajectory", "step", "fate", "offset", "response_tokens", "text_offset", "text_bytes", "arrived_s")
"""Columns that no branch changes. Rows with equal values in them are the same row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchDifference:
    """Differences between two branches' rewards, over trajectories that were trained on."""

    trajectories: int
    changed: int
    """Trajectories whose rewards differ."""
    mean: tuple[float, float]
    """Mean reward on each branch, without those that could not be computed."""
    histogram: tuple[tuple[float, int, int], ...]
    """(lower edge of the bin, trajectories in the first branch, in the second), without those that could not be
    computed."""
    groups: int
    order_changed: tuple[int, ...]
    """Groups in which the better of two members became the worse."""
    signal_second_only: tuple[int, ...]
    """Groups whose rewards vary on the second branch only."""
    signal_first_only: tuple[int, ...]
    """Groups whose rewards vary on the first branch only."""


def compare_branches(run_dir: Path, first: str, second: str) -> BranchDifference:
    """Compare the rewards of two branches of a run's store.

    Raises:
        ConfigError: The branches are the same, or share no trajectory that was trained on.
    """
    path = run_dir / "store"
    if first == second:
        raise ConfigError(f"{run_dir}: {first} is compared with itself; name two branches")
    first_store, second_store = (VersionedStore.open(path, branch=name) for name in (first, second))
    tables = first_store.stored_columns(), second_store.stored_columns()
    count = _num_common_rows(*tables)
    table, other = ({name: column[:count] for name, column in table.items()} for table in tables)
    (positions,) = np.nonzero(table["fate"] == FATES.index(Fate.CONSUMED))
    if not len(positions):
        raise ConfigError(f"{run_dir}: no trajectory that {first} and {second} have was trained on")
    positions = positions[np.lexsort((table["trajectory"][positions], table["group"][positions]))]
    first_rewards, second_rewards = table["reward"][positions], other["reward"][positions]
    size = first_store.header.group_size
    grouped_a, grouped_b = first_rewards.reshape(-1, size), second_rewards.reshape(-1, size)
    ids = table["group"][positions].reshape(-1, size)[:, 0]
    scored_a, scored_b = table["loss_mask"][positions] > 0, other["loss_mask"][positions] > 0
    members_a, members_b = scored_a.reshape(-1, size), scored_b.reshape(-1, size)
    signal_a, signal_b = has_signal(grouped_a, members_a), has_signal(grouped_b, members_b)
    # Ties and rewards that failed do not count as a changed order.
    in_both = members_a & members_b
    pairs_in_both = in_both[:, :, None] & in_both[:, None, :]
    order_a = np.sign(grouped_a[:, :, None] - grouped_a[:, None, :])
    order_b = np.sign(grouped_b[:, :, None] - grouped_b[:, None, :])
    order_changed = (((order_a * order_b) < 0) & pairs_in_both).any(axis=(1, 2))
    rewards = first_rewards[scored_a], second_rewards[scored_b]
    edges = np.histogram_bin_edges(np.concatenate(rewards), bins=10)
    counts = [np.histogram(values, bins=edges)[0] for values in rewards]
    return BranchDifference(
        trajectories=len(positions),
        changed=int((first_rewards != second_rewards).sum()),
        mean=(_mean(first_rewards, scored_a), _mean(second_rewards, scored_b)),
        histogram=tuple(
            (float(edge), int(m), int(n)) for edge, m, n in zip(edges[:-1], counts[0], counts[1], strict=True) if m or n
        ),
        groups=len(ids),
        order_changed=tuple(ids[order_changed].tolist()),
        signal_second_only=tuple(ids[~signal_a & signal_b].tolist()),
        signal_first_only=tuple(ids[signal_a & ~signal_b].tolist()),
    )


def _num_common_rows(first_rows: Mapping[str, npt.NDArray[Any]], second_rows: Mapping[str, npt.NDArray[Any]]) -> int:
    """Number of leading rows that two branches have in common. The branches have different trajectories after steps
    that were undone. A commit is common as a whole or not at all."""
    rows = min(len(first_rows["trajectory"]), len(second_rows["trajectory"]))
    # A trajectory that was undone and sampled again keeps its id, but its text is stored elsewhere.
    equal = np.logical_and.reduce([first_rows[name][:rows] == second_rows[name][:rows] for name in IDENTITY_COLUMNS])
    return rows if equal.all() else int(np.argmin(equal))


def _mean(rewards: npt.NDArray[np.float32], is_scored: npt.NDArray[np.bool_]) -> float:
    return float(rewards[is_scored].mean()) if is_scored.any() else 0.0
