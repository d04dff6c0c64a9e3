"""A user-defined reward for the demo's task: 1 if the extracted answer is right, else 0, with its parts."""

from __future__ import annotations

from typing import Any


def score(answer: str, record: dict[str, Any]) -> tuple[float, dict[str, float]]:
    """Reward and its parts by name. answer: what `task.answer_pattern` matched, or the whole response."""
    right = float(answer.strip() == str(record["answer"]).strip())
    return right, {"right": right, "letters": float(len(answer))}
