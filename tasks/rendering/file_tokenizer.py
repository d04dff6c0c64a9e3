"""A model's tokenizer from its files, without torch. Loads in milliseconds instead of seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from staleflow.stores.errors import ConfigError, raised_as
from staleflow.tasks.settings.knobs import shorten

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"


class FileTokenizer:
    """Encodes texts and conversations as transformers does, from tokenizer.json and the chat template beside it.
    Without a tokenizer.json, transformers is used."""

    def __init__(self, folder: Path) -> None:
        import tokenizers

        self._folder = folder
        self._transformers_tokenizer: Any = None
        file = folder / "tokenizer.json"
        problem = f"model.path = {str(folder)!r}: its tokenizer cannot be loaded"
        # The package raises plain `Exception`s.
        with raised_as(ConfigError, problem, Exception, remedy="copy the model again"):
            self._fast_tokenizer: Any = tokenizers.Tokenizer.from_file(str(file)) if file.is_file() else None
        if self._fast_tokenizer is not None:  # a file may store limits of an earlier training; transformers resets them
            self._fast_tokenizer.no_truncation()
            self._fast_tokenizer.no_padding()

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        if self._fast_tokenizer is None:
            encoding: dict[str, list[int]] = self._transformers()(text, add_special_tokens=add_special_tokens)
            return encoding
        return {"input_ids": self._fast_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], **options: Any) -> str:
        """The text of a conversation, as by transformers' method of this name."""
        template = chat_template(self._folder)
        if not isinstance(template, str) or not template:
            return str(self._transformers().apply_chat_template(list(messages), **options))
        from transformers.utils.chat_template_utils import render_jinja_template

        options.pop("tokenize", None)
        texts = render_jinja_template(
            [list(messages)], chat_template=template, **options, **_special_tokens(self._folder)
        )
        return str(texts[0][0])

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        if self._fast_tokenizer is None:
            return str(self._transformers().decode(tokens, skip_special_tokens=skip_special_tokens))
        return str(self._fast_tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    @property
    def unknown_id(self) -> int:
        """Id of the token for text outside the vocabulary; -1 if there is none."""
        if self._fast_tokenizer is None:
            token_id = self._transformers().unk_token_id
        else:
            name = _special_tokens(self._folder).get(
                "unk_token", getattr(self._fast_tokenizer.model, "unk_token", None)
            )
            token_id = None if name is None else self._fast_tokenizer.token_to_id(name)
        return -1 if token_id is None else int(token_id)

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a text."""
        token = _special_tokens(self._folder).get("eos_token")
        uses_fast = self._fast_tokenizer is not None and token is not None
        end: int | None = self._fast_tokenizer.token_to_id(token) if uses_fast else self._transformers().eos_token_id
        return end

    def get_vocab(self) -> dict[str, int]:
        """The id of each token, as by transformers' method of this name."""
        tokenizer = self._transformers() if self._fast_tokenizer is None else self._fast_tokenizer
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        return vocabulary

    def __len__(self) -> int:
        """Size of the vocabulary."""
        return len(self._transformers()) if self._fast_tokenizer is None else int(self._fast_tokenizer.get_vocab_size())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transformers(), name)

    def _transformers(self) -> Any:
        if self._transformers_tokenizer is None:
            from staleflow.tasks.rendering.chat_tokenizer import load_tokenizer

            self._transformers_tokenizer = load_tokenizer(str(self._folder))
        return self._transformers_tokenizer


def check_same_tokens(subject: str, policy: Mapping[str, int], other: Mapping[str, int]) -> None:
    """Raise ConfigError unless a model has each token of the policy under the same id. It may have more tokens.

    Args:
        subject: The model's key in the job file and its value, for messages.
        policy: The ids of the policy's tokens.
        other: Those of the model's.
    """
    differing_tokens = [(number, token) for token, number in policy.items() if other.get(token) != number]
    if differing_tokens:
        number, token = min(differing_tokens)
        raise ConfigError(
            f"{subject}: {len(differing_tokens)} of the {len(policy)} tokens of model.path have another id there or "
            f"none, the first is {number}, {shorten(token)}; name a model with the policy's tokenizer, such as a "
            "checkpoint"
        )


def chat_template(folder: Path) -> str | None:
    """The chat template in a model's folder; empty if there is none, None if only transformers knows."""
    try:
        if (folder / TEMPLATE_FILE).is_file():
            return (folder / TEMPLATE_FILE).read_text("utf-8")
        template = json.loads((folder / CONFIG_FILE).read_text("utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None
    if any(folder.glob("*chat_template*")) or not isinstance(template, str | None):
        return None  # several templates, or one in a file of another form
    return template or ""


def _special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens that a chat template may use, by name."""
    try:
        config = json.loads((folder / CONFIG_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    tokens = {key: value for key, value in config.items() if key.endswith("_token")}
    contents = {key: value.get("content") if isinstance(value, dict) else value for key, value in tokens.items()}
    return {key: value for key, value in contents.items() if isinstance(value, str)}
