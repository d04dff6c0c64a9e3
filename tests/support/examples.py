"""How many random examples tests of this run try."""

from __future__ import annotations

from hypothesis import settings


def num_examples() -> int:
    """Of a test that does not say it: 50, or 2,000 in nightly runs; see tests/conftest.py."""
    assert settings.default is not None
    return settings.default.max_examples
