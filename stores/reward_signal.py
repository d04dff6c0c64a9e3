"""Whether the rewards of a group carry a training signal. Numpy, pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

EQUAL_TOLERANCE = 1e-9
"""Rewards this close count as equal: they may be sums of the same parts in another order."""


def has_signal(rewards: npt.ArrayLike, valid: npt.ArrayLike = True) -> npt.NDArray[np.bool_]:
    """Whether the rewards within each group differ; otherwise all its advantages are 0.

    rewards: [..., N], members last. valid: the same shape, false where a reward could not be computed; such members
    are ignored. Returns [...].

    >>> has_signal([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]).tolist()
    [True, False]
    >>> bool(has_signal([1.0, 1.0, 0.0], [True, True, False]))
    False
    """
    rewards, valid = np.asarray(rewards, np.float64), np.asarray(valid, bool)
    highest = np.max(rewards, axis=-1, where=valid, initial=-np.inf)
    lowest = np.min(rewards, axis=-1, where=valid, initial=np.inf)
    return np.asarray(highest - lowest > EQUAL_TOLERANCE, bool)
