"""Splits a trajectory into the messages of a conversation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from staleflow.stores.trajectory import EnvSpan, IntArray, Trajectory

MODEL = "assistant"
"""The role of what was sampled."""
NOBODY = "environment"
"""The role of given tokens that are no message, but only bridge two turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSpan:
    """Consecutive tokens of one speaker: the model or the environment."""

    role: str
    sampled: bool
    """Whether the model sampled it."""
    start: int
    stop: int
    seconds: float = 0.0
    """Time that the environment took for it; 0 of the model's."""


def message_spans(trajectory: Trajectory) -> tuple[MessageSpan, ...]:
    """Split the tokens after the prompt into message spans. Segments of one turn are one span, whichever versions
    sampled them."""
    spans: list[MessageSpan] = []
    position = 0
    for span in trajectory.spans:
        end = position + len(span.tokens)
        if isinstance(span, EnvSpan):
            spans.append(
                MessageSpan(role=span.role or NOBODY, sampled=False, start=position, stop=end, seconds=span.seconds)
            )
        elif spans and spans[-1].sampled:
            spans[-1] = replace(spans[-1], stop=end)
        else:
            spans.append(MessageSpan(role=MODEL, sampled=True, start=position, stop=end))
        position = end
    return tuple(spans)


def messages(
    trajectory: Trajectory, sampled: Callable[[IntArray], str], provided: Callable[[IntArray], str]
) -> list[dict[str, Any]]:
    """The message spans as dicts: role, content, number of tokens, seconds. sampled, given: decode sampled tokens, and
    tokens of environments."""
    ids = trajectory.response_tokens
    return [
        {
            "role": span.role,
            "content": (sampled if span.sampled else provided)(ids[span.start : span.stop]),
            "tokens": span.stop - span.start,
            "seconds": span.seconds,
        }
        for span in message_spans(trajectory)
    ]
