"""GPU memory of a trainer rank and a rollout instance, in bytes.

Where the numbers come from:
- Parameters of the trainer: weights, gradients and AdamW's two moments in float32, 16 bytes each, in shards; under FSDP
  what is outside of layers is whole with its gradient (8 bytes), and one layer is gathered (8 bytes: bfloat16 weights
  and gradients, and the sum of these in float32).
- Activations: what autograd saves of a layer for each token, counted by hooks on saved tensors for Qwen3 and Qwen3-MoE
  while one width at a time was doubled; tests/sizing/ counts again.
- Output layer: logits are computed in chunks of 2**28 bytes, of which up to four copies are there.
- What CUDA needs besides is from training Qwen3-0.6B on an H200 (docs/gpu.md): KERNEL_FACTOR and CONTEXT_BYTES.
- NCCL buffers and CUDA graphs are estimates: not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from staleflow.pipeline.sizing.model_shape import ModelShape

CONTEXT_BYTES = 1_400_000_000
"""Of a CUDA context, its libraries' work space, and memory that PyTorch's allocator has and cannot use."""
KERNEL_FACTOR = 1.1
"""Activations on a GPU over what autograd saves on CPU: kernels and autocast there save other tensors."""
NCCL_BYTES = 400_000_000
"""Of a group's buffers. An estimate."""
GRAPH_BYTES = 1_000_000_000
"""Of vLLM's CUDA graphs. An estimate."""
MARGIN = 0.05
"""Share of a GPU that is left free: memory is given out in pieces, and some cannot be used."""
LOGIT_BYTES = 4 * 2**28
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
    half = dtype == "bfloat16"
    wide, narrow = (26, 10) if half else (24, 16)
    attention = wide * model.hidden + narrow * (model.q_size + model.kv_size)
    if not model.num_experts:
        return attention + (8 if half else 16) * model.intermediate
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
    gathered = 8 * (model.outer_parameters + model.layer_parameters)
    if training.offload:
        return gathered
    if training.ranks > 1:
        return 16 * model.parameters // training.ranks + gathered
    cast = 2 * model.layers * model.layer_parameters if training.dtype == "bfloat16" else 0
    return 16 * model.parameters + cast


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
    widest = (
        4 * model.hidden + (2 * model.q_size + 3 * model.intermediate * max(1, model.experts_per_token)) // parallel
    )
    return {
        "weights": size * model.parameters // parallel,
        "KV cache": engine.kv_tokens * kv_bytes(model, engine.dtype, parallel),
        "forward pass": size * engine.batch_tokens * widest + 8 * engine.max_running * model.vocabulary,
        "CUDA context": CONTEXT_BYTES + GRAPH_BYTES + NCCL_BYTES * (parallel > 1),
    }
