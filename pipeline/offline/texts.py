"""A stored run's token ids as text."""

from __future__ import annotations

from pipeline.config.schema import RunConfig
from tasks.texts import NumberTexts, Texts, tokenizer_texts


def texts_of(config: RunConfig) -> Texts:
    """Text by the job's tokenizer, or the ids as text for an emulated run. Raises ConfigError if the tokenizer is
    gone."""
    return NumberTexts() if config.emulated else tokenizer_texts(config.model.path)
