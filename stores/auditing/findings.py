"""What an audit reports. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One way in which the store contradicts the promise or itself."""

    check: str
    where: str
    what: str
