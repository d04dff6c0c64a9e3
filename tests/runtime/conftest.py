"""Fixtures for runs over in-process actors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bodies import Body


@pytest.fixture
def body(tmp_path: Path) -> Body:
    return Body(tmp_path)


@pytest.fixture(scope="session")
def player(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows the format of the game in examples/agent.toml."""
    from examples.make_agent_model import SYMBOLS, games
    from staleflow.tasks.training.tiny_model import PretrainingSettings, pretrain

    folder = tmp_path_factory.mktemp("player")
    recipe = PretrainingSettings(steps=60, hidden_size=64, num_layers=1, learning_rate=5e-3, warmup_steps=10)
    pretrain(folder, games(0), recipe, lambda _: None, lambda *_: None, SYMBOLS)
    return folder
