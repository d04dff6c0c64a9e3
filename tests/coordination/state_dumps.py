"""Text dumps of a coordinator's complete state, to check that a call changed nothing."""

from __future__ import annotations

from typing import Any

from staleflow.pipeline.coordination.state import CoordinatorState

PARTS = ("ledger", "fleet", "queue")
"""Attributes that are dumped by their attributes."""


def dump_state(state: CoordinatorState, *more: Any) -> str:
    """Return the state as text. more: trajectories that the state may have dropped already."""
    parts = {name: vars(getattr(state, name)) for name in PARTS}
    rest = {k: v for k, v in vars(state).items() if k not in {*PARTS, "fleet", "queue"}}
    return repr((parts, rest, more))
