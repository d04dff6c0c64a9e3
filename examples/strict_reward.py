"""A reward of one's own for the demo's task: right or not, less a little for each letter beyond the answer's need."""

from __future__ import annotations

from typing import Any


def score(answer: str, record: dict[str, Any]) -> tuple[float, dict[str, float]]:
    """The reward and its parts. answer: what `task.answer_pattern` found, or all of the response."""
    right = float(answer.strip() == str(record["answer"]).strip())
    return right, {"right": right, "letters": float(len(answer))}
