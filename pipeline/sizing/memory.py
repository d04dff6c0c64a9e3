"""Sizes of a model, and GPU memory of a trainer rank and a rollout instance, in bytes.

Where the numbers come from:
- Parameters of the trainer: weights, gradients and AdamW's two moments in float32, 16 bytes each, in shards; under FSDP
  what is outside of layers is whole with its gradient (8 bytes), and one layer is gathered (8 bytes: bfloat16 weights
  and gradients, and the sum of these in float32).
- Activations: what autograd saves of a layer for each token, counted by hooks on saved tensors for Qwen3 and Qwen3-MoE
  while one width at a time was doubled; tests/sizing/ counts again.
- Output layer: logits are computed in chunks of 2**29 bytes, of which up to four copies are there.
- What CUDA needs besides is from training Qwen3-0.6B on an H200 (docs/gpu.md): KERNEL_FACTOR and CONTEXT_BYTES.
- NCCL buffers and CUDA graphs are estimates: not measured.
"""

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
        text_config: Mapping[str, Any] = config.get("text_config") or config
        try:
            heads, hidden = int(text_config["num_attention_heads"]), int(text_config["hidden_size"])
            head_size = int(text_config.get("head_dim") or hidden // heads)
            experts = int(text_config.get("num_experts") or text_config.get("num_local_experts") or 0)
            intermediate = text_config.get("moe_intermediate_size") if experts else None
            return cls(
                layers=int(text_config["num_hidden_layers"]),
                hidden=hidden,
                q_size=heads * head_size,
                kv_size=int(text_config.get("num_key_value_heads") or heads) * head_size,
                intermediate=int(intermediate or text_config["intermediate_size"]),
                vocabulary=int(text_config["vocab_size"]),
                tied_embeddings=bool(config.get("tie_word_embeddings", text_config.get("tie_word_embeddings", False))),
                num_experts=experts,
                experts_per_token=int(text_config.get("num_experts_per_tok") or 0) if experts else 0,
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


CONTEXT_BYTES = 1_400_000_000
"""Bytes of a CUDA context, its libraries' work space, and memory that PyTorch's allocator holds but cannot use."""
KERNEL_FACTOR = 1.1
"""Activations on a GPU over what autograd saves on CPU: kernels and autocast there save other tensors."""
NCCL_BYTES = 400_000_000
"""Estimated bytes of the buffers of a rank group."""
GRAPH_BYTES = 1_000_000_000
"""Estimated bytes of vLLM's CUDA graphs."""
MARGIN = 0.05
"""Share of a GPU's memory that is left free, because fragmented memory cannot be used."""
LOGIT_BYTES = 4 * 2**29
STATE_BYTES = 12
"""Bytes of a resume point per parameter: a weight and AdamW's two moments."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of a number, by model.dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingShape:
    """Settings of a trainer that determine its memory. microbatch_tokens: tokens of one forward and backward pass."""

    ranks: int
    dtype: str
    microbatch_tokens: int
    recompute: bool
    offload: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """Settings of an instance that determine its memory. batch_tokens: maximum tokens of a forward pass."""

    tensor_parallel: int
    dtype: str
    kv_tokens: int
    max_running: int
    batch_tokens: int


def layer_bytes(model: ModelShape, dtype: str) -> int:
    """Bytes that autograd saves per token and layer. bfloat16: whether autocast is used, with a float32 residual
    stream; routed experts still compute in float32."""
    is_half = dtype == "bfloat16"
    hidden_bytes, attention_bytes = (26, 10) if is_half else (24, 16)
    attention = hidden_bytes * model.hidden + attention_bytes * (model.q_size + model.kv_size)
    if not model.num_experts:
        return attention + (8 if is_half else 16) * model.intermediate
    return attention + model.experts_per_token * (16 * model.intermediate + 8 * model.hidden)


def activation_bytes(model: ModelShape, dtype: str, *, recompute: bool) -> int:
    """Bytes that autograd saves per token. With recomputation: the inputs of all layers, and one whole layer."""
    if recompute:
        return 4 * model.hidden * model.layers + layer_bytes(model, dtype)
    return layer_bytes(model, dtype) * model.layers


def kv_bytes(model: ModelShape, dtype: str, tensor_parallel: int = 1) -> int:
    """Bytes of the KV cache per token on each GPU."""
    return 2 * model.layers * model.kv_size * ITEM_BYTES[dtype] // tensor_parallel


def parameter_bytes(model: ModelShape, training: TrainingShape) -> int:
    """Bytes of a rank's weights, gradients and moments."""
    gathered_bytes = 8 * (model.outer_parameters + model.layer_parameters)
    if training.offload:
        return gathered_bytes
    if training.ranks > 1:
        return 16 * model.parameters // training.ranks + gathered_bytes
    cast_bytes = 2 * model.layers * model.layer_parameters if training.dtype == "bfloat16" else 0
    return 16 * model.parameters + cast_bytes


def trainer_parts(model: ModelShape, training: TrainingShape) -> dict[str, int]:
    """Bytes of a rank's GPU by use. AdamW's temporary copies and the activations do not exist at the same time; the
    larger counts."""
    per_token = activation_bytes(model, training.dtype, recompute=training.recompute)
    optimizer = 0 if training.offload else 4 * model.parameters // training.ranks
    return {
        "weights, gradients, optimizer": parameter_bytes(model, training),
        "activations, or optimizer step": max(int(KERNEL_FACTOR * training.microbatch_tokens * per_token), optimizer),
        "output layer": LOGIT_BYTES + 4 * model.hidden * training.microbatch_tokens,
        "CUDA context": CONTEXT_BYTES + NCCL_BYTES * (training.ranks > 1),
    }


def engine_parts(model: ModelShape, engine: EngineShape) -> dict[str, int]:
    """Bytes of each GPU of an instance by use."""
    size, parallel = ITEM_BYTES[engine.dtype], engine.tensor_parallel
    values_per_token = (
        4 * model.hidden + (2 * model.q_size + 3 * model.intermediate * max(1, model.experts_per_token)) // parallel
    )
    return {
        "weights": size * model.parameters // parallel,
        "KV cache": engine.kv_tokens * kv_bytes(model, engine.dtype, parallel),
        "forward pass": size * engine.batch_tokens * values_per_token + 8 * engine.max_running * model.vocabulary,
        "CUDA context": CONTEXT_BYTES + GRAPH_BYTES + NCCL_BYTES * (parallel > 1),
    }
