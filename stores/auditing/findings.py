"""The findings of an audit. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One contradiction in a store: with the staleness bound, or between its parts."""

    check: str
    """Name of the check that found it."""
    location: str
    """Subject of the finding, such as "step 3" or "trajectory 17"."""
    message: str
    """Description of the contradiction."""
