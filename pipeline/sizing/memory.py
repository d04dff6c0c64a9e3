"""Sizes of a model, and GPU memory of a trainer rank and a rollout instance, in bytes.

Where the numbers come from:
- Parameters of the trainer: weights, gradients and AdamW's two moments in float32, 16 bytes each, in shards; under FSDP
  what is outside of layers is whole with its gradient (8 bytes), and one layer is gathered (8 bytes: bfloat16 weights
  and gradients, and the sum of these in float32).
- With an adapter the weights are frozen: 4 bytes each, in shards, and no gradients.
- Activations: what autograd saves of a layer for each token, counted by hooks on saved tensors for Qwen3 and Qwen3-MoE
  while one width at a time was doubled; tests/sizing/ counts again, also with an adapter.
- Output layer: logits are computed in chunks of 2**29 bytes, of which up to four copies are there.
- What CUDA needs besides is from training Qwen3-0.6B on an H200 (docs/gpu.md): GPU_ACTIVATION_FACTOR and
  CUDA_CONTEXT_BYTES.
- NCCL buffers and CUDA graphs are estimates: not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from staleflow.stores.errors import ConfigError
from staleflow.tasks.engines.engine_settings import EngineSettings
from staleflow.tasks.training.trainer_settings import TrainingConfig

TIED_EMBEDDINGS_BY_TYPE = {
    **dict.fromkeys(
        ("exaone4", "glm", "glm4", "gpt_oss", "granite", "granitemoe", "llama", "minimax_m2", "ministral3", "mistral",
         "mixtral", "olmo", "olmo2", "olmo3", "olmoe", "phi3", "phimoe", "qwen2", "qwen3", "qwen3_moe", "seed_oss",
         "stablelm"), False,
    ),
    **dict.fromkeys(("cohere", "cohere2", "ernie4_5", "gemma", "gemma2", "gemma3_text", "smollm3"), True),
}  # fmt: skip
"""Whether embeddings and output layer are one tensor if config.json does not say so, by model type. Only these types
can be sized: all their layers are as ModelShape says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder whose layers are all alike.

    Args:
        q_size, kv_size: Widths of all query heads, and of all key heads, together.
        num_kv_heads: Number of key heads.
        intermediate_size: Width of the gated MLP, or of one expert.
        num_experts: Number of experts; 0 for a dense model.
    """

    num_layers: int
    hidden_size: int
    q_size: int
    kv_size: int
    num_kv_heads: int
    intermediate_size: int
    vocabulary_size: int
    has_tied_embeddings: bool
    num_experts: int = 0
    experts_per_token: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any], label: str) -> ModelShape:
        """Read the sizes from a config.json. label: names the model in messages. Raises ConfigError if it does not have
        these sizes, or the model has layers of other kinds."""
        model_type = str(config.get("model_type"))
        are_layers_alike = not config.get("mlp_only_layers") and config.get("decoder_sparse_step", 1) == 1
        if model_type not in TIED_EMBEDDINGS_BY_TYPE or not are_layers_alike:
            raise ConfigError(
                f"{label}: a model of model_type = {model_type!r} with layers as in its config.json is not one whose "
                "memory can be planned, such as llama, mistral, qwen3, qwen3_moe or gemma2"
            )
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            head_size = int(config.get("head_dim") or hidden // heads)
            num_kv_heads = int(config.get("num_key_value_heads") or heads)
            num_experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
            intermediate = config.get("moe_intermediate_size") if num_experts else None
            return cls(
                num_layers=int(config["num_hidden_layers"]),
                hidden_size=hidden,
                q_size=heads * head_size,
                kv_size=num_kv_heads * head_size,
                num_kv_heads=num_kv_heads,
                intermediate_size=int(intermediate or config["intermediate_size"]),
                vocabulary_size=int(config["vocab_size"]),
                has_tied_embeddings=bool(config.get("tie_word_embeddings", TIED_EMBEDDINGS_BY_TYPE[model_type])),
                num_experts=num_experts,
                experts_per_token=int(config.get("num_experts_per_tok") or 0) if num_experts else 0,
            )
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ConfigError(f"{label}: its config.json does not have the sizes of a decoder: {error!r}") from error

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: attention, norms, and the MLP or all experts with their router."""
        attention = 2 * self.hidden_size * self.q_size + 2 * self.hidden_size * self.kv_size + 2 * self.hidden_size
        num_mlps = max(1, self.num_experts)
        router = self.num_experts * self.hidden_size
        return attention + num_mlps * 3 * self.hidden_size * self.intermediate_size + router

    @property
    def outer_parameters(self) -> int:
        """Parameters outside of layers: embeddings, output layer, last norm."""
        return (1 if self.has_tied_embeddings else 2) * self.vocabulary_size * self.hidden_size + self.hidden_size

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return self.num_layers * self.layer_parameters + self.outer_parameters

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of an adapter of all linear layers; routed experts have none."""
        mlp = 0 if self.num_experts else 3 * (self.hidden_size + self.intermediate_size)
        return self.num_layers * rank * (4 * self.hidden_size + 2 * self.q_size + 2 * self.kv_size + mlp)


CUDA_CONTEXT_BYTES = 1_400_000_000
"""Bytes of a CUDA context, its libraries' work space, and memory that PyTorch's allocator holds but cannot use."""
GPU_ACTIVATION_FACTOR = 1.1
"""Activations on a GPU over what autograd saves on CPU: kernels and autocast there save other tensors."""
NCCL_BYTES = 400_000_000
"""Estimated bytes of the buffers of a rank group."""
CUDA_GRAPH_BYTES = 1_000_000_000
"""Estimated bytes of vLLM's CUDA graphs."""
UNUSED_MEMORY_SHARE = 0.05
"""Share of a GPU's memory that is left free, because fragmented memory cannot be used."""
KV_STORAGE_FACTOR = 2.5
"""Tokens that the storage of the transformers engine has room for, for each token of kv_tokens. Not a proven bound,
which is 4: the most that was measured is 2.45, when responses of many lengths filled a cache of 20,000 tokens
(tests/tasks/test_row_storage.py); it may be more in a smaller cache. vLLM allocates kv_tokens."""
CHUNK_LOGIT_BYTES = 4 * 2**29
"""Bytes of four copies of a chunk's logits on a GPU: GPU_CHUNK_BYTES of tasks/training/lm_head.py each."""
MAX_COPIED_POSITIONS, LOGIT_COPY_BYTES = 64, 16
"""Positions whose logits the transformers engine copies at a time (as MAX_COPIED_POSITIONS of its module), and bytes of
the copies of each position and token of the vocabulary: logprobs and probabilities in float32, and
probabilities in float64."""
RESUME_POINT_BYTES = 12
"""Bytes of a resume point on disk per parameter: a weight and AdamW's two moments."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of a number, by model.dtype."""


def num_gpus_of(engine: EngineSettings) -> int:
    """Number of GPUs of a rollout instance or teacher with this engine."""
    return int(getattr(engine, "tensor_parallel", 1))


def layer_activation_bytes_per_token(model: ModelShape, dtype: str) -> int:
    """Bytes that autograd saves per token and layer. With bfloat16 under autocast, which leaves the residual stream and
    routed experts in float32. With an adapter it is less, by at most a fifth, since frozen norms save nothing."""
    is_half = dtype == "bfloat16"
    hidden_bytes, attention_bytes = (26, 10) if is_half else (24, 16)
    attention = hidden_bytes * model.hidden_size + attention_bytes * (model.q_size + model.kv_size)
    if not model.num_experts:
        return attention + (8 if is_half else 16) * model.intermediate_size
    return attention + model.experts_per_token * (16 * model.intermediate_size + 8 * model.hidden_size)


def activation_bytes_per_token(model: ModelShape, dtype: str, *, recompute: bool) -> int:
    """Bytes that autograd saves per token. With recomputation: the inputs of all layers, and one whole layer."""
    if recompute:
        return 4 * model.hidden_size * model.num_layers + layer_activation_bytes_per_token(model, dtype)
    return layer_activation_bytes_per_token(model, dtype) * model.num_layers


def kv_bytes_per_token(model: ModelShape, dtype: str, tensor_parallel: int = 1) -> int:
    """Bytes of the keys and values of a token on each GPU. GPUs beyond the number of key heads have copies of heads."""
    return 2 * model.num_layers * model.kv_size * ITEM_BYTES[dtype] // min(tensor_parallel, model.num_kv_heads)


def cache_bytes_per_kv_token(model: ModelShape, engine: EngineSettings, dtype: str) -> int:
    """Bytes that an instance allocates on each GPU for each token of kv_tokens."""
    factor = 1 if engine.name == "vllm" else KV_STORAGE_FACTOR
    return int(factor * kv_bytes_per_token(model, dtype, num_gpus_of(engine)))


def training_state_bytes(model: ModelShape, training: TrainingConfig, dtype: str) -> int:
    """Bytes of a rank's weights, gradients and moments."""
    gathered_bytes = (4 if training.lora.rank else 8) * (model.outer_parameters + model.layer_parameters)
    if training.offload:
        return gathered_bytes
    state_bytes = 16 * trained_parameters(model, training)
    if training.lora.rank:
        state_bytes += 4 * model.parameters
    if training.ranks > 1:
        return state_bytes // training.ranks + gathered_bytes
    cast_bytes = 2 * model.num_layers * model.layer_parameters if dtype == "bfloat16" else 0
    return state_bytes + cast_bytes


def trained_parameters(model: ModelShape, training: TrainingConfig) -> int:
    """Parameters that have a gradient: all, or those of an adapter."""
    return model.adapter_parameters(training.lora.rank) if training.lora.rank else model.parameters


def trainer_bytes_by_use(
    model: ModelShape, training: TrainingConfig, dtype: str, reference: ModelShape | None = None
) -> dict[str, int]:
    """Bytes of a rank's GPU by use. AdamW's temporary copies and the activations do not exist at the same time; the
    larger counts.

    Args:
        model: Sizes of the trained model.
        training: The trainer's settings. A pass has `microbatch_tokens` tokens.
        dtype: The job's model.dtype.
        reference: The reference model of which each rank holds its share; None if there is none, or teachers hold it.
    """
    per_token = activation_bytes_per_token(model, dtype, recompute=training.recompute_activations)
    optimizer_step_bytes = 0 if training.offload else 4 * trained_parameters(model, training) // training.ranks
    reference_part = {}
    if reference is not None and not training.offload:
        reference_part["reference model"] = ITEM_BYTES[dtype] * reference.parameters // training.ranks
    return {
        "weights, gradients, optimizer": training_state_bytes(model, training, dtype),
        **reference_part,
        "activations, or optimizer step": max(
            int(GPU_ACTIVATION_FACTOR * training.microbatch_tokens * per_token), optimizer_step_bytes
        ),
        "output layer": CHUNK_LOGIT_BYTES + 4 * model.hidden_size * training.microbatch_tokens,
        "CUDA context": CUDA_CONTEXT_BYTES + NCCL_BYTES * (training.ranks > 1),
    }


def engine_bytes_by_use(model: ModelShape, engine: EngineSettings, dtype: str) -> dict[str, int]:
    """Bytes of each GPU of an instance by use. dtype: the job's model.dtype."""
    item_bytes, num_gpus = ITEM_BYTES[dtype], num_gpus_of(engine)
    values_per_token = (
        4 * model.hidden_size
        + (2 * model.q_size + 3 * model.intermediate_size * max(1, model.experts_per_token)) // num_gpus
    )
    # vLLM: estimated. Ours: logits twice, because some models scale them, and the copies of a few positions.
    bytes_per_vocabulary_entry = 8 * engine.max_running
    if engine.name == "transformers":
        copied_positions = min(engine.max_running, MAX_COPIED_POSITIONS)
        bytes_per_vocabulary_entry = 2 * item_bytes * engine.max_running + LOGIT_COPY_BYTES * copied_positions
    return {
        "weights": item_bytes * model.parameters // num_gpus,
        "KV cache": engine.kv_tokens * cache_bytes_per_kv_token(model, engine, dtype),
        "forward pass": item_bytes * engine.max_batch_tokens * values_per_token
        + bytes_per_vocabulary_entry * model.vocabulary_size,
        "CUDA context": CUDA_CONTEXT_BYTES + CUDA_GRAPH_BYTES * (engine.name == "vllm") + NCCL_BYTES * (num_gpus > 1),
    }
