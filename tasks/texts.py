"""Token ids as text."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from stores.errors import ConfigError

LOOK_BACK = 8
"""Tokens before one that its text is found with: a token alone may lack the space before it, or be half a letter."""


class Texts(Protocol):
    """Token ids as text."""

    def text(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """special: with special tokens, such as an end of text."""
        ...


class TokenizerTexts:
    """Texts by a model's tokenizer. Threads may share one: tokenizers keep settings between calls, those written in
    Python more than that."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()

    def text(self, tokens: Sequence[int], *, special: bool = False) -> str:
        # An array: transformers looks at each element of a list, which takes longer than decoding.
        with self._lock:
            return str(self._tokenizer.decode(np.asarray(tokens, np.int64), skip_special_tokens=not special))

    def ids(self, text: str, *, chat: bool = False) -> tuple[int, ...]:
        """Token ids of a text; with `chat`, of it as a user's turn in the tokenizer's chat template."""
        with self._lock:
            if chat:
                turn = [{"role": "user", "content": text}]
                text = self._tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
            return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])


class NumberTexts:
    """The ids themselves, for an emulated run or where the tokenizer is gone."""

    def text(self, tokens: Sequence[int], *, special: bool = False) -> str:
        return "".join(f"{token} " for token in tokens)


def tokenizer_texts(model: str) -> TokenizerTexts:
    """Texts by a model's tokenizer. Raises ConfigError if it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        return TokenizerTexts(AutoTokenizer.from_pretrained(model))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"model.path = {model!r}: its tokenizer cannot be loaded: {reason}") from error


def pieces(texts: Texts, tokens: Sequence[int]) -> list[str]:
    """Each token's share of the text they make together; a letter of several tokens is the last one's."""
    found = []
    for i in range(len(tokens)):
        begin = max(0, i - LOOK_BACK)
        before = texts.text(tokens[begin:i], special=True)
        until = texts.text(tokens[begin : i + 1], special=True)
        # A letter that is not complete decodes to a replacement, and is told with the token that completes it.
        whole = before.rstrip("\ufffd")
        found.append("" if until.endswith("\ufffd") else until[len(whole) :])
    return found
