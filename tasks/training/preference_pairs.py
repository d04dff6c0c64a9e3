"""Direct preference optimization (DPO, 2305.18290): selects the best and the worst response of each group, and
computes their contribution to the loss. Numpy, pure.

The loss of a pair is -log sigmoid(m), m = beta ((s_best - r_best) - (s_worst - r_worst)), with s and r the logprobs of
whole responses under the policy and the reference. Its gradient is that of a policy gradient whose advantages are
beta sigmoid(-m) and -beta sigmoid(-m). So a trainer that computes m before an update can train the two responses
separately.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from staleflow.tasks.training.microbatches import LogprobsByRow, Row


def select_pairs(rows: Iterable[Row]) -> list[Row]:
    """The responses with the highest and the lowest advantage of each group, in this order. Groups whose advantages are
    equal, and rows whose reward failed, are left out."""
    by_group: dict[int, list[Row]] = {}
    for row in rows:
        if row.trained and row.num_sampled:
            by_group.setdefault(row.group, []).append(row)
    pairs = list[Row]()
    for members in by_group.values():
        best, worst = max(members, key=_advantage), min(members, key=_advantage)
        if best.advantage > worst.advantage:
            pairs += [best, worst]
    return pairs


def weight_pairs(
    rows: Sequence[Row], indices: Sequence[int], policy: LogprobsByRow, reference: LogprobsByRow, beta: float
) -> tuple[dict[int, Row], float]:
    """The chosen rows with the advantages of their pairs, by row index, and the mean loss of the pairs.

    Args:
        rows: From `select_pairs`.
        indices: Indices of whole pairs: an even index and the next one, and so on.
        policy: Logprobs of the chosen rows under the policy.
        reference: Logprobs under the reference model.
        beta: Weight of a log ratio.
    """
    ratio = {i: _log_ratio(rows[i], policy[i], reference[i]) for i in indices}
    weighted, losses = dict[int, Row](), []
    for best, worst in zip(indices[::2], indices[1::2], strict=True):
        margin = beta * (ratio[best] - ratio[worst])
        losses.append(np.logaddexp(0.0, -margin))
        weight = float(beta * np.exp(-np.logaddexp(0.0, margin)))
        weighted[best] = replace(rows[best], advantage=weight)
        weighted[worst] = replace(rows[worst], advantage=-weight)
    return weighted, float(np.mean(losses))


def _advantage(row: Row) -> float:
    return row.advantage


def _log_ratio(row: Row, policy: npt.NDArray[np.float32], reference: npt.NDArray[np.float32]) -> float:
    """The log ratio of a whole response, nats, over the tokens that have a loss."""
    return float((policy - reference)[row.usable].sum(dtype=np.float64))
