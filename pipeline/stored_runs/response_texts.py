"""Decodes the token ids of a stored run."""

from __future__ import annotations

from pathlib import Path

from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.stored_runs.conversations import messages
from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectories.dataframes import RowTexts
from staleflow.stores.trajectory import IntArray, Trajectory
from staleflow.tasks.rendering.chat_tokenizer import Detokenizer, IdDetokenizer, load_chat_tokenizer, load_detokenizer


def texts_of(config: RunConfig) -> Detokenizer:
    """Create the detokenizer of a job: its tokenizer, or the ids as text for an emulated run. Raises ConfigError if the
    tokenizer is gone."""
    return IdDetokenizer() if config.emulated else load_chat_tokenizer(config.model.path)


def decoded_texts(config: RunConfig) -> Detokenizer:
    """As `texts_of`, but from the tokenizer's file alone where possible, since importing transformers takes seconds.
    Raises ConfigError if the tokenizer is gone."""
    if not config.emulated and (detokenizer := load_detokenizer(Path(config.model.path))) is not None:
        return detokenizer
    return texts_of(config)


def shown_texts(config: RunConfig) -> Detokenizer:
    """As `decoded_texts`, but returns a detokenizer to ids as text if the tokenizer is gone. For display."""
    folder = Path(config.model.path)
    if folder.is_absolute() and not folder.exists():  # known without loading transformers, which takes seconds
        return IdDetokenizer()
    try:
        return decoded_texts(config)
    except ConfigError:
        return IdDetokenizer()


def row_texts(trajectory: Trajectory, detokenizer: Detokenizer) -> RowTexts:
    """The texts of a trajectory. Sampled parts have no special tokens; env spans keep them, because they mark the
    speakers."""

    def plain(tokens: IntArray) -> str:
        return detokenizer.text(tokens.tolist())

    def marked(tokens: IntArray) -> str:
        return detokenizer.text(tokens.tolist(), special=True)

    decode = marked if trajectory.has_env_steps else plain
    return RowTexts(
        marked(trajectory.prompt_tokens), decode(trajectory.response_tokens), messages(trajectory, plain, marked)
    )
