"""A trajectory as a conversation: who said what after the prompt, in turn."""

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
    """A stretch of the conversation by one side: the model, or the environment."""

    role: str
    sampled: bool
    """Whether the model sampled it."""
    start: int
    stop: int
    seconds: float = 0.0
    """Time that the environment took for it; 0 of the model's."""


def passages(trajectory: Trajectory) -> tuple[MessageSpan, ...]:
    """Split what follows the prompt into passages. Segments of one turn are one passage, whichever versions sampled
    them."""
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
    """The passages as messages: role, content, number of tokens, seconds. sampled, given: decode tokens."""
    ids = trajectory.response_tokens
    return [
        {
            "role": span.role,
            "content": (sampled if span.sampled else provided)(ids[span.start : span.stop]),
            "tokens": span.stop - span.start,
            "seconds": span.seconds,
        }
        for span in passages(trajectory)
    ]
