"""A stored run's token ids as text."""

from __future__ import annotations

from pathlib import Path

from staleflow.pipeline.config.schema import RunConfig
from staleflow.stores.errors import ConfigError
from staleflow.tasks.rendering.chat_tokenizer import NumberTexts, Texts, file_texts, tokenizer_texts


def texts_of(config: RunConfig) -> Texts:
    """Text by the job's tokenizer, or the ids as text for an emulated run. Raises ConfigError if the tokenizer is
    gone."""
    return NumberTexts() if config.emulated else tokenizer_texts(config.model.path)


def shown_texts(config: RunConfig) -> Texts:
    """As `texts_of`, for people to read: by the tokenizer's file where that is enough, and the ids as text if the
    tokenizer is gone."""
    folder = Path(config.model.path)
    if not config.emulated and (texts := file_texts(folder)) is not None:
        return texts
    if folder.is_absolute() and not folder.exists():  # told without loading transformers, which takes seconds
        return NumberTexts()
    try:
        return texts_of(config)
    except ConfigError:
        return NumberTexts()
