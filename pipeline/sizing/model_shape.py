"""Sizes of a decoder-only model that determine its memory, from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from staleflow.stores.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder whose layers are all alike.

    Args:
        q_size, kv_size: Widths of all query heads, and of all key heads, together.
        intermediate: Width of the gated MLP, or of one expert.
        num_experts: Number of experts; 0 for a dense model.
    """

    layers: int
    hidden: int
    q_size: int
    kv_size: int
    intermediate: int
    vocabulary: int
    tied_embeddings: bool
    num_experts: int = 0
    experts_per_token: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any], label: str) -> ModelShape:
        """Read the sizes from a config.json. label: names the model in messages. Raises ConfigError if it does not have
        these sizes."""
        text: Mapping[str, Any] = config.get("text_config") or config
        try:
            heads, hidden = int(text["num_attention_heads"]), int(text["hidden_size"])
            head = int(text.get("head_dim") or hidden // heads)
            experts = int(text.get("num_experts") or text.get("num_local_experts") or 0)
            intermediate = text.get("moe_intermediate_size") if experts else None
            return cls(
                layers=int(text["num_hidden_layers"]),
                hidden=hidden,
                q_size=heads * head,
                kv_size=int(text.get("num_key_value_heads") or heads) * head,
                intermediate=int(intermediate or text["intermediate_size"]),
                vocabulary=int(text["vocab_size"]),
                tied_embeddings=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
                num_experts=experts,
                experts_per_token=int(text.get("num_experts_per_tok") or 0) if experts else 0,
            )
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ConfigError(f"{label}: its config.json does not have the sizes of a decoder: {error!r}") from error

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: attention, norms, and the MLP or all experts with their router."""
        attention = 2 * self.hidden * self.q_size + 2 * self.hidden * self.kv_size + 2 * self.hidden
        mlps = max(1, self.num_experts)
        return attention + mlps * 3 * self.hidden * self.intermediate + self.num_experts * self.hidden

    @property
    def outer_parameters(self) -> int:
        """Parameters outside of layers: embeddings, output layer, last norm."""
        return (1 if self.tied_embeddings else 2) * self.vocabulary * self.hidden + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.outer_parameters
