"""Decodes the token ids of a stored run."""

from __future__ import annotations

from pathlib import Path

from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.stored_runs.conversations import make_messages
from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectories.dataframes import RowTexts
from staleflow.stores.trajectory import IntArray, Trajectory
from staleflow.tasks.rendering.chat_tokenizer import Detokenizer, IdDetokenizer, load_chat_tokenizer, load_detokenizer


def make_detokenizer(config: RunConfig) -> Detokenizer:
    """Create the detokenizer of a job: its tokenizer, or the ids as text for an emulated run. Raises ConfigError if the
    tokenizer is gone."""
    return IdDetokenizer() if config.emulated else load_chat_tokenizer(config.model.path)


def make_fast_detokenizer(config: RunConfig) -> Detokenizer:
    """As `make_detokenizer`, but from the tokenizer's file alone where possible, since importing transformers takes
    seconds. Raises ConfigError if the tokenizer is gone."""
    if not config.emulated and (detokenizer := load_detokenizer(Path(config.model.path))) is not None:
        return detokenizer
    return make_detokenizer(config)


def make_display_detokenizer(config: RunConfig) -> Detokenizer:
    """As `make_fast_detokenizer`, but returns a detokenizer to ids as text if the tokenizer is gone. For display."""
    folder = Path(config.model.path)
    if folder.is_absolute() and not folder.exists():  # avoids importing transformers, which takes seconds
        return IdDetokenizer()
    try:
        return make_fast_detokenizer(config)
    except ConfigError:
        return IdDetokenizer()


def decode_row(trajectory: Trajectory, detokenizer: Detokenizer) -> RowTexts:
    """The texts of a trajectory. Sampled parts have no special tokens; env spans keep them, because they mark the
    speakers."""

    def decode_plain(tokens: IntArray) -> str:
        return detokenizer.text(tokens.tolist())

    def decode_with_special(tokens: IntArray) -> str:
        return detokenizer.text(tokens.tolist(), special=True)

    decode = decode_with_special if trajectory.has_env_steps else decode_plain
    return RowTexts(
        decode_with_special(trajectory.prompt_tokens),
        decode(trajectory.response_tokens),
        make_messages(trajectory, decode_plain, decode_with_special),
    )
