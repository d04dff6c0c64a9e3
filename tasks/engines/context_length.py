"""The context length of a model, and the part of its configuration that is about text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

UNLIMITED = 2**31
"""Context length in tokens of a model whose configuration has none."""
CHANGING_ROPE_TYPES = {"longrope", "dynamic"}
"""Types of rotary embeddings whose frequencies depend on the longest row of a pass beyond the context length."""


def text_config_of(architecture: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a model's language model, which models of several media have as `text_config`; what that
    leaves out is the whole model's."""
    text_config = architecture.get("text_config")
    if not isinstance(text_config, Mapping):
        return dict(architecture)
    return {**architecture, **{key: value for key, value in text_config.items() if value is not None}}


def context_length_of(architecture: Mapping[str, Any]) -> int:
    """The context length of a model in tokens, from its configuration.

    A rotary embedding with short and long factors (longrope, as in Phi-3) rotates all positions differently once the
    longest row of a pass exceeds the limit of the short factors. Logprobs of a row would then depend on the other rows
    of the pass, so the context ends at this limit.
    """
    architecture = text_config_of(architecture)
    declared_context = architecture.get("max_position_embeddings")
    context = declared_context if isinstance(declared_context, int) and declared_context > 0 else UNLIMITED
    for rope in _rotary_settings(architecture):
        if rope.get("short_factor") and rope.get("long_factor"):
            short = architecture.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
            context = min(context, short) if isinstance(short, int) else context
    return context


def max_rotation_length(architecture: Mapping[str, Any]) -> int | None:
    """The length in tokens beyond which a model rotates all positions differently, by the longest row of a pass; None
    if it never does."""
    architecture = text_config_of(architecture)
    rope_types = {rope.get("rope_type") for rope in _rotary_settings(architecture)}
    return context_length_of(architecture) if rope_types & CHANGING_ROPE_TYPES else None


def _rotary_settings(architecture: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The settings of rotary embeddings in a configuration; it may have several, by kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        settings = architecture.get(name)
        if isinstance(settings, Mapping):
            yield settings
            yield from (table for table in settings.values() if isinstance(table, Mapping))
