"""The number of random examples of each test."""

from __future__ import annotations

from hypothesis import settings


def num_examples() -> int:
    """Return the default number of examples: 50, or 2,000 in nightly runs; see tests/conftest.py."""
    assert settings.default is not None
    return settings.default.max_examples
