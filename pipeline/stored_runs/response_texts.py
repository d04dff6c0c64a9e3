"""Splits a trajectory into the messages of a conversation, and decodes the token ids of a stored run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from staleflow.pipeline.config.schema import RunConfig
from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectories.dataframes import RowTexts
from staleflow.stores.trajectory import EnvSpan, IntArray, Trajectory
from staleflow.tasks.environments.episode import ENVIRONMENT_ROLE
from staleflow.tasks.rendering.chat_tokenizer import Detokenizer, IdDetokenizer, load_chat_tokenizer, load_detokenizer

MODEL_ROLE = "assistant"
"""Role of sampled tokens."""


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
    trajectory: Trajectory, decode_sampled: Callable[[IntArray], str], decode_given: Callable[[IntArray], str]
) -> list[dict[str, Any]]:
    """Return the message spans as dicts: role, content, number of tokens, seconds. decode_sampled, decode_given:
    decode sampled tokens, and tokens of environments."""
    ids = trajectory.response_tokens
    return [
        {
            "role": span.role,
            "content": (decode_sampled if span.sampled else decode_given)(ids[span.start : span.stop]),
            "tokens": span.stop - span.start,
            "seconds": span.seconds,
        }
        for span in message_spans(trajectory)
    ]


def make_detokenizer(config: RunConfig) -> Detokenizer:
    """Create the detokenizer of a job: its tokenizer, from the file alone where possible, since importing transformers
    takes seconds; or the ids as text for an emulated run. Raises ConfigError if the tokenizer is gone."""
    if config.emulated:
        return IdDetokenizer()
    return load_detokenizer(Path(config.model.path)) or load_chat_tokenizer(config.model.path)


def make_display_detokenizer(config: RunConfig) -> Detokenizer:
    """As `make_detokenizer`, but returns a detokenizer to ids as text if the tokenizer is gone. For display."""
    folder = Path(config.model.path)
    if folder.is_absolute() and not folder.exists():  # avoids importing transformers, which takes seconds
        return IdDetokenizer()
    try:
        return make_detokenizer(config)
    except ConfigError:
        return IdDetokenizer()


def decode_trajectory(trajectory: Trajectory, detokenizer: Detokenizer) -> RowTexts:
    """Decode a trajectory. Sampled parts have no special tokens; env spans keep them, because they mark the
    speakers."""

    def decode_plain(tokens: IntArray) -> str:
        return detokenizer.text(tokens.tolist())

    def decode_with_special(tokens: IntArray) -> str:
        return detokenizer.text(tokens.tolist(), keep_special=True)

    decode = decode_with_special if trajectory.has_env_steps else decode_plain
    return RowTexts(
        decode_with_special(trajectory.prompt_tokens),
        decode(trajectory.response_tokens),
        make_messages(trajectory, decode_plain, decode_with_special),
    )
