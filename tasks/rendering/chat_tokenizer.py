"""Encodes texts and conversations, and decodes token ids.

Model families that the `renderers` package knows use its templates in code, if it is installed.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any, Protocol

import numpy as np

from staleflow.stores.errors import ConfigError, raised_as, type_and_message
from staleflow.tasks.rendering.task_source import Message
from staleflow.tasks.settings.user_code import error_text

LOOK_BACK_TOKENS = 8
"""Preceding tokens decoded with each token: alone it may lack its leading space, or be an incomplete character."""


class Detokenizer(Protocol):
    """Decodes token ids to text."""

    def text(self, tokens: Sequence[int], *, keep_special: bool = False) -> str:
        """Decode token ids. keep_special: whether to keep special tokens, such as the end of a text."""
        ...


def is_special(detokenizer: Detokenizer, token: int) -> bool:
    """Whether a token is left out of texts, such as an end of a turn."""
    return not detokenizer.text([token]) and bool(detokenizer.text([token], keep_special=True))


class ChatTokenizer:
    """Encodes and decodes text with a model's tokenizer. Thread-safe: a lock guards the tokenizer's state."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.lock = threading.Lock()
        """Guards the tokenizer's state. Users of `renderer`'s result hold it, too."""

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def text(self, tokens: Sequence[int], *, keep_special: bool = False) -> str:
        # An array, because transformers checks each element of a list, which takes longer than decoding.
        with self.lock:
            return str(self._tokenizer.decode(np.asarray(tokens, np.int64), skip_special_tokens=not keep_special))

    def ids(self, text: str) -> tuple[int, ...]:
        """Encode a text."""
        with self.lock:
            return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    @property
    def end_id(self) -> int:
        """Id of the token that ends a response. Raises ConfigError if the tokenizer defines none."""
        with self.lock:
            end = self._tokenizer.eos_token_id
        if end is None:
            raise ConfigError("model.path: its tokenizer names no eos_token, which ends a response")
        return int(end)

    def chat_ids(self, messages: Sequence[Message], tools: str = "") -> tuple[int, ...]:
        """Encode a conversation with the chat template, up to the start of the assistant's answer. Raises ConfigError
        if the template fails, or ignores the tools. tools: definitions of tools as JSON."""
        text = self.chat_text(messages, tools)
        if tools and text == self.chat_text(messages):
            raise ConfigError(
                "task.chat = true: the chat template leaves out the definitions of tools; describe them in a message, "
                "or put a template that has a place for them into the model's folder (chat_template.jinja)"
            )
        # A lone surrogate in the template's text, half of a character of UTF-16, cannot be encoded.
        problem = "task.chat = true: the text of the chat template cannot be encoded"
        with raised_as(ConfigError, problem, Exception, describe=error_text):
            return self.ids(text)

    def chat_text(self, messages: Sequence[Message], tools: str = "") -> str:
        """Render a conversation as text. Raises ConfigError if the template fails."""
        with_tools = {"tools": json.loads(tools)} if tools else {}
        chat = [message._asdict() for message in messages]
        problem = f"task.chat = true: the chat template fails on messages of {', '.join(m.role for m in messages)}"
        with self.lock, raised_as(ConfigError, problem, Exception, describe=error_text):
            render = self._tokenizer.apply_chat_template
            return str(render(chat, tokenize=False, add_generation_prompt=True, **with_tools))

    def renderer(self, model: str) -> Any:
        """The renderer of the `renderers` package for a model, if the package is installed, knows the model, and
        renders as the chat template does; else None."""
        with self.lock:
            return known_renderer(self._tokenizer, model)


class IdDetokenizer:
    """Decodes token ids to the ids as text, for emulated runs and for tokenizers that cannot be loaded."""

    def text(self, tokens: Sequence[int], *, keep_special: bool = False) -> str:
        return "".join(f"{token} " for token in tokens)


def load_chat_tokenizer(model: str) -> ChatTokenizer:
    """Load a model's tokenizer as a ChatTokenizer. Raises ConfigError if it cannot be loaded."""
    return ChatTokenizer(load_tokenizer(model))


def load_tokenizer(model: str, key: str = "model.path") -> Any:
    """Load a model's tokenizer. Raises ConfigError if it cannot be loaded. key: key in the job file, for messages."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except Exception as error:  # the libraries raise errors of many kinds for a file of another form
        is_described = isinstance(error, OSError | ValueError) and str(error).strip()
        reason = str(error).strip().splitlines()[0] if is_described else type_and_message(error)
        raise ConfigError(f"{key} = {model!r}: its tokenizer cannot be loaded: {reason}") from error


class FileDetokenizer:
    """Decodes with a tokenizer file alone, without transformers. Loads in milliseconds. Thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def text(self, tokens: Sequence[int], *, keep_special: bool = False) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=not keep_special))


def load_detokenizer(folder: Path) -> FileDetokenizer | None:
    """Load a model folder's tokenizer.json. Returns None where only transformers decodes correctly: without that file,
    with tokens defined elsewhere, or if spaces are to be cleaned up."""
    import tokenizers

    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        added_ids = [int(id) for id in settings.get("added_tokens_decoder", {})]
        needs_transformers = settings.get("clean_up_tokenization_spaces") or any(
            tokenizer.id_to_token(i) is None for i in added_ids
        )
    except Exception:  # noqa: BLE001  the library raises plain Exception for a file that it cannot read
        return None
    return None if needs_transformers else FileDetokenizer(tokenizer)


def split_by_token(detokenizer: Detokenizer, tokens: Sequence[int]) -> list[str]:
    """Split the decoded text into the part that each token adds. A character of several tokens belongs to the last of
    them."""
    parts = []
    for i in range(len(tokens)):
        start = max(0, i - LOOK_BACK_TOKENS)
        text_before = detokenizer.text(tokens[start:i], keep_special=True)
        text_through = detokenizer.text(tokens[start : i + 1], keep_special=True)
        # An incomplete character decodes to U+FFFD; it is attributed to the token that completes it.
        complete = text_before.rstrip("\ufffd")
        parts.append("" if text_through.endswith("\ufffd") else text_through[len(complete) :])
    return parts


TRIAL_CONVERSATIONS = (
    [{"role": "user", "content": "Hello there."}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there."}],
)
"""Conversations that a renderer must render as the tokenizer's chat template does."""


def known_renderer(tokenizer: Any, model: str) -> Any:
    """The renderer for a model, by its hub name or the last part of its folder. None if the package is not installed,
    does not know the model, or renders the start of a conversation differently from the tokenizer's template."""
    if importlib.util.find_spec("renderers") is None:
        return None
    from renderers import config_from_name, create_renderer
    from renderers.base import MODEL_RENDERER_MAP

    folder_name = PurePath(model).name
    family = MODEL_RENDERER_MAP.get(model) or next(
        (kind for name, kind in MODEL_RENDERER_MAP.items() if name.rpartition("/")[2] == folder_name), None
    )
    if family is None:
        return None
    try:
        renderer = create_renderer(tokenizer, config_from_name(family))
        for messages in TRIAL_CONVERSATIONS:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            if list(renderer.render_ids(messages, add_generation_prompt=True)) != list(ids):
                return None
    except Exception:  # noqa: BLE001  a tokenizer that is none of that family may fail it in any way
        return None
    return renderer
