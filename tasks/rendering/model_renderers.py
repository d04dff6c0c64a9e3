"""Chat templates of known model families in code, from the `renderers` package if it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import PurePath
from typing import Any

PROBES = (
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
        for messages in PROBES:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            if list(renderer.render_ids(messages, add_generation_prompt=True)) != list(ids):
                return None
    except Exception:  # noqa: BLE001  a tokenizer that is none of that family may fail it in any way
        return None
    return renderer
