"""Advantages from the rewards of a step's groups. Numpy, pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tasks.names import ADVANTAGE_NAMES

EPS = 1e-6
"""Keeps a group of equal rewards at advantage 0 instead of dividing by 0."""

Rewards = npt.NDArray[np.float64]


def advantages(name: str, rewards: Rewards, valid: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32]:
    """One advantage a trajectory, constant over its tokens.

    rewards, valid: [G, N], a row a group. An invalid member (its reward could not be computed) gets 0 and does not
    count in its group's statistics. Returns [G, N] float32. Sources: GRPO 2402.03300, DAPO 2503.14476 (the same
    estimate; its other parts are clip_high, token_mean and the no_signal filter), Dr. GRPO 2503.20783, RLOO 2402.14740,
    REINFORCE++ with the group mean as baseline 2501.03262.

    >>> advantages("rloo", np.array([[1.0, 0.0, 0.0]]), np.ones((1, 3), bool)).tolist()
    [[1.0, -0.5, -0.5]]
    """
    if name not in ADVANTAGE_NAMES:
        raise ValueError(f"no advantage {name!r}; there are {', '.join(ADVANTAGE_NAMES)}")
    count = valid.sum(axis=1, keepdims=True)
    counted = np.where(valid, rewards, 0.0)
    mean = counted.sum(axis=1, keepdims=True) / np.maximum(count, 1)
    centred = np.where(valid, rewards - mean, 0.0)
    match name:
        case "grpo" | "dapo":
            # Sample deviation, as the published implementations have it.
            std = np.sqrt((centred**2).sum(axis=1, keepdims=True) / np.maximum(count - 1, 1))
            result = centred / (std + EPS)
        case "dr_grpo":
            result = centred
        case "rloo":
            # R - mean of the others = (R - mean) n / (n - 1); a group of one has no others.
            result = centred * count / np.maximum(count - 1, 1)
        case _:
            num_valid = max(int(valid.sum()), 1)
            spread = np.sqrt((centred**2).sum() / num_valid)
            result = centred / (spread + EPS)
    return np.where(valid, result, 0.0).astype(np.float32)
