"""Which resume points of a run are kept. Pure."""

from __future__ import annotations

from collections.abc import Sequence

NUM_LATEST_KEPT = 3
"""Number of latest resume points that are kept. The trainer may be two steps ahead of the last commit: one being
committed, one waiting."""


def kept_versions(versions: Sequence[int], keep_every: int) -> list[int]:
    """The versions whose resume points are kept: the latest ones, and all that `keep_every` divides unless it is 0.

    Args:
        versions: Versions that have a resume point, oldest first.
        keep_every: Versions between two points that are kept for good.
    """
    latest_versions = versions[-NUM_LATEST_KEPT:]
    return [version for version in versions if version in latest_versions or (keep_every and version % keep_every == 0)]
