"""The board: its answers to drivers and commands."""

from __future__ import annotations

import ast
import contextlib
from pathlib import Path

import pytest

from pipeline.scheduler.board import Board


def asked() -> set[str]:
    """The verbs that any module asks a board for."""
    sources = [p for top in ("pipeline", "cli") for p in Path(top).rglob("*.py")]
    calls = [node for p in sources for node in ast.walk(ast.parse(p.read_text())) if isinstance(node, ast.Call)]
    verbs = [one for call in calls if ast.unparse(call.func) in ("ask", "board.ask") for one in call.args[1:2]]
    return {verb.value for verb in verbs if isinstance(verb, ast.Constant)}


@pytest.mark.parametrize("verb", sorted(asked()))
def test_the_board_knows_what_it_is_asked(verb: str) -> None:
    with contextlib.suppress(TypeError):  # it knows the verb, and misses its arguments
        Board().asked(verb)


def test_a_verb_it_does_not_know_is_a_newer_clients() -> None:
    assert asked() >= {"slot", "submit", "claim"}
    with pytest.raises(ValueError, match="has no call 'dance'; install the same version everywhere"):
        Board().asked("dance")
