"""Comparison of two branches' rewards for the same trajectories."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stores.trajectory import Fate
from stores.versioned import VersionedStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Differences between two branches' rewards, over trajectories that were trained on. mean: mean rewards, without
    failed ones. flipped: groups in which the better of two members became the worse. gained, lost: groups whose rewards
    vary in the second branch only, in the first only."""

    trajectories: int
    changed: int
    mean: tuple[float, float]
    histogram: tuple[tuple[float, int, int], ...]
    """(lower edge of the bin, trajectories in the first branch, in the second)."""
    groups: int
    flipped: tuple[int, ...]
    gained: tuple[int, ...]
    lost: tuple[int, ...]


def difference(run_dir: Path, first: str, second: str) -> Difference:
    """Compare the rewards of two branches of a run's store."""
    path = run_dir / "store"
    one, two = (VersionedStore.open(path, branch=name) for name in (first, second))
    table, other = one.table(), two.table()
    if len(table["trajectory"]) > len(other["trajectory"]):
        table = {name: column[: len(other["trajectory"])] for name, column in table.items()}
    other = {name: column[: len(table["trajectory"])] for name, column in other.items()}
    (at,) = np.nonzero(table["fate"] == [f.value for f in Fate].index(Fate.CONSUMED.value))
    at = at[np.lexsort((table["trajectory"][at], table["group"][at]))]
    a, b = table["reward"][at], other["reward"][at]
    size = one.header.group_size
    grouped_a, grouped_b = a.reshape(-1, size), b.reshape(-1, size)
    ids = table["group"][at].reshape(-1, size)[:, 0]
    signal_a, signal_b = (np.ptp(g, axis=1) > 1e-9 for g in (grouped_a, grouped_b))
    # A pair of members flips if the better one becomes the worse; ties do not count.
    order_a = np.sign(grouped_a[:, :, None] - grouped_a[:, None, :])
    order_b = np.sign(grouped_b[:, :, None] - grouped_b[:, None, :])
    flipped = ((order_a * order_b) < 0).any(axis=(1, 2))
    edges = np.histogram_bin_edges(np.concatenate([a, b]), bins=10)
    counts = [np.histogram(values, bins=edges)[0] for values in (a, b)]
    return Difference(
        trajectories=len(at),
        changed=int((a != b).sum()),
        mean=(_mean(a, table["loss_mask"][at] > 0), _mean(b, other["loss_mask"][at] > 0)),
        histogram=tuple(
            (float(edge), int(m), int(n)) for edge, m, n in zip(edges[:-1], counts[0], counts[1], strict=True) if m or n
        ),
        groups=len(ids),
        flipped=tuple(ids[flipped].tolist()),
        gained=tuple(ids[~signal_a & signal_b].tolist()),
        lost=tuple(ids[signal_a & ~signal_b].tolist()),
    )


def _mean(rewards: npt.NDArray[np.float32], scored: npt.NDArray[np.bool_]) -> float:
    return float(rewards[scored].mean()) if scored.any() else 0.0
