"""Splits a trajectory into the messages of a conversation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from staleflow.stores.trajectory import EnvSpan, IntArray, Trajectory

MODEL_ROLE = "assistant"
"""Role of sampled tokens."""
ENVIRONMENT_ROLE = "environment"
"""Role of tokens between two turns that belong to no message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSpan:
    """Consecutive tokens of one speaker: the model or the environment."""

    role: str
    sampled: bool
    """Whether the model sampled it."""
    start: int
    stop: int
    seconds: float = 0.0
    """Time that the environment took for it; 0 for the model."""


def message_spans(trajectory: Trajectory) -> tuple[MessageSpan, ...]:
    """Split the tokens after the prompt into message spans. Segments of one turn are one span, whichever versions
    sampled them."""
    spans: list[MessageSpan] = []
    position = 0
    for span in trajectory.spans:
        end = position + len(span.tokens)
        if isinstance(span, EnvSpan):
            spans.append(
                MessageSpan(
                    role=span.role or ENVIRONMENT_ROLE, sampled=False, start=position, stop=end, seconds=span.seconds
                )
            )
        elif spans and spans[-1].sampled:
            spans[-1] = replace(spans[-1], stop=end)
        else:
            spans.append(MessageSpan(role=MODEL_ROLE, sampled=True, start=position, stop=end))
        position = end
    return tuple(spans)


def make_messages(
    trajectory: Trajectory, decode_sampled: Callable[[IntArray], str], decode_provided: Callable[[IntArray], str]
) -> list[dict[str, Any]]:
    """The message spans as dicts: role, content, number of tokens, seconds. decode_sampled,
    decode_provided: decode sampled tokens, and tokens of environments."""
    ids = trajectory.response_tokens
    return [
        {
            "role": span.role,
            "content": (decode_sampled if span.sampled else decode_provided)(ids[span.start : span.stop]),
            "tokens": span.stop - span.start,
            "seconds": span.seconds,
        }
        for span in message_spans(trajectory)
    ]
