"""Display of a run: as a line in a Python prompt, and as a table in a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from staleflow.stores.trajectories.reader import Summary


def facts(branch: str, at_step: int | None, summary: Summary | None, *, live: bool) -> dict[str, str]:
    """The displayed facts of a run, by name, in display order. summary: None before the run has a store."""
    ended = summary is not None and summary.ended
    last = None if summary is None else summary.last_trained
    reward = None if last is None else last.metrics.get("reward")
    return {
        "branch": branch,
        **({} if at_step is None else {"as of step": str(at_step)}),
        "state": "finished" if ended else "live" if live else "unfinished",
        "steps": f"{0 if summary is None else summary.num_steps:,}",
        "trajectories": f"{0 if summary is None else summary.num_rows:,}",
        "tokens": f"{0 if summary is None else summary.num_tokens:,}",
        **({} if reward is None else {"reward": f"{reward:.3f}"}),
    }


def line(source: str, facts: Mapping[str, str]) -> str:
    """A run as one line."""
    return f"<Run {source}: {', '.join(f'{name} {value}' for name, value in facts.items())}>"


def html(source: str, facts: Mapping[str, str]) -> str:
    """A run as an HTML table."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts.items())
    return f"<table><caption>{escape(source)}</caption>{rows}</table>"
