"""Texts of a dry run: prompts are encoded by the model's tokenizer, and responses are random tokens of its
vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from staleflow.tasks.rendering.chat_tokenizer import ChatTokenizer, load_tokenizer
from staleflow.tasks.rendering.file_tokenizer import FileTokenizer

ID_MULTIPLIER = 2_654_435_761
"""Multiplier that maps the few token ids of an emulated engine to ids all over a vocabulary. Odd, and larger than any
vocabulary."""


class RandomTexts(ChatTokenizer):
    """A ChatTokenizer that decodes the token ids of an emulated engine as random tokens of the vocabulary."""

    def __init__(self, model: str) -> None:
        tokenizer = FileTokenizer(Path(model)) if Path(model).is_dir() else load_tokenizer(model)
        super().__init__(tokenizer)
        self._size = max(1, len(tokenizer))

    def text(self, tokens: Sequence[int], *, special: bool = False) -> str:
        return super().text([token * ID_MULTIPLIER % self._size for token in tokens], special=special)
