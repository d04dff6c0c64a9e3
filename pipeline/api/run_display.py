"""A run in a line, for a Python prompt, and as a table, for a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from staleflow.stores.trajectories.reader import Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What is shown of a run. reward: of its latest step; None before the first."""

    source: str
    branch: str
    at_step: int | None
    state: str
    steps: int
    trajectories: int
    tokens: int
    reward: float | None

    @classmethod
    def of(cls, source: str, branch: str, at_step: int | None, summary: Summary | None, *, live: bool) -> RunFacts:
        """What to show of a run with this summary; None before it has a store."""
        ended = summary is not None and summary.ended
        last = None if summary is None else summary.last_trained
        return cls(
            source=source,
            branch=branch,
            at_step=at_step,
            state="finished" if ended else "live" if live else "unfinished",
            steps=0 if summary is None else summary.num_steps,
            trajectories=0 if summary is None else summary.num_rows,
            tokens=0 if summary is None else summary.num_tokens,
            reward=None if last is None else last.metrics.get("reward"),
        )

    @property
    def shown(self) -> dict[str, str]:
        """Names and values, in display order."""
        snapshot = {} if self.at_step is None else {"as of step": str(self.at_step)}
        reward = {} if self.reward is None else {"reward": f"{self.reward:.3f}"}
        return {
            "branch": self.branch,
            **snapshot,
            "state": self.state,
            "steps": f"{self.steps:,}",
            "trajectories": f"{self.trajectories:,}",
            "tokens": f"{self.tokens:,}",
            **reward,
        }


def line(facts: RunFacts) -> str:
    """A run in a line."""
    return f"<Run {facts.source}: {', '.join(f'{name} {value}' for name, value in facts.shown.items())}>"


def html(facts: RunFacts) -> str:
    """A run as a table."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts.shown.items())
    return f"<table><caption>{escape(facts.source)}</caption>{rows}</table>"
