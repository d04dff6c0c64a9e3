"""Runs over actors in the test's own process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bodies import Body


@pytest.fixture
def body(tmp_path: Path) -> Body:
    return Body(tmp_path)
