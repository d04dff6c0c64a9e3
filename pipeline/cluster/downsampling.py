"""Metrics over steps as a plot draws them: a smooth line, and raw values behind it, of a bounded number of points."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

MOST_BINS = 200
"""Most bins of steps; each is two points, since a plot is about twice as many pixels wide."""
SPANS = 40
"""The smooth line is a mean over 1/40 of the steps, and over three at least once there are that many."""
SMOOTH = "smooth "
"""Prefix of a metric's smooth column."""


def columns(steps: Sequence[Mapping[str, float]], names: Iterable[str]) -> dict[str, Array]:
    """Columns "step", each metric, and each metric smoothed. Of more steps than fit, a bin's smallest and largest value
    are kept, in the order they came: needles stay visible, and a thousand more steps cost nothing. Missing values are
    NaN."""
    x = np.asarray([step["step"] for step in steps], np.float64)
    bins = np.array_split(np.arange(len(x)), min(MOST_BINS, len(x))) if len(x) > 2 * MOST_BINS else []
    result = {"step": np.asarray([x[i] for span in bins for i in (span[0], span[-1])]) if bins else x}
    for name in names:
        values = np.asarray([np.nan if (v := step.get(name)) is None else v for step in steps], np.float64)
        smooth = smoothed(values)
        if bins:
            values = np.concatenate([_extremes(values[span]) for span in bins])
            smooth = np.asarray([smooth[i] for span in bins for i in (span[0], span[-1])])
        result |= {name: values, SMOOTH + name: smooth}
    return result


def smoothed(values: Array) -> Array:
    """Mean over the steps around each; NaN counts as missing.

    >>> smoothed(np.array([0.0, 3.0, 0.0, 3.0])).tolist()
    [1.5, 1.0, 2.0, 1.5]
    """
    span = max(3, len(values) // SPANS) if len(values) > 2 else 1
    before, after = (span - 1) // 2, span // 2
    known = ~np.isnan(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    at = np.arange(len(values))
    first, last = np.maximum(at - before, 0), np.minimum(at + after + 1, len(values))
    count = counts[last] - counts[first]
    means: Array = np.where(count > 0, (sums[last] - sums[first]) / np.maximum(count, 1), np.nan)
    return means


def _extremes(values: Array) -> Array:
    """The smallest and the largest of these, in the order they came; NaN twice if there are none."""
    if np.isnan(values).all():
        return np.asarray([np.nan, np.nan])
    low, high = int(np.nanargmin(values)), int(np.nanargmax(values))
    return values[[min(low, high), max(low, high)]]
