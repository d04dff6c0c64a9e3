"""Tiny random models of the families of causal LMs, for tests that every family must pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 96
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None,
    "eos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.06,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
STATES: dict[str, Any] = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
                          "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4}  # fmt: skip
MIXED = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
WINDOW = 12
"""Tokens of sliding windows and chunks: fewer than the tests' contexts have."""
SLIDING = ["sliding_attention", "full_attention"] * 2
LATENT: dict[str, Any] = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
                          "v_head_dim": 16}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "phi3": {},
    "olmo2": {},
    "olmo3": {"sliding_window": WINDOW, "layer_types": SLIDING},
    "smollm3": {},
    "gemma2": {"head_dim": 16, "sliding_window": WINDOW, "layer_types": SLIDING, "query_pre_attn_scalar": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": WINDOW, "layer_types": SLIDING, "query_pre_attn_scalar": 16},
    "gemma3n_text": {"head_dim": 16, "sliding_window": WINDOW, "layer_types": SLIDING, "num_kv_shared_layers": 2,
                     "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "laurel_rank": 8,
                     "intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": {"head_dim": 16, "global_head_dim": 16, "sliding_window": WINDOW, "layer_types": SLIDING,
                    "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCABULARY,
                    "hidden_size_per_layer_input": 8},
    "granite": {},
    "glm4": {"head_dim": 16},
    "cohere2": {"sliding_window": WINDOW, "layer_types": SLIDING},
    "ernie4_5": {"head_dim": 16},
    "qwen3_moe": EXPERTS | {"head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": EXPERTS,
    "glm4_moe": {"head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                 "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "deepseek_v3": LATENT | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                             "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
                             "num_key_value_heads": 4},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW,
                "layer_types": SLIDING},
    "llama4_text": {"head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1,
                    "attention_chunk_size": WINDOW, "moe_layers": [1, 3],
                    "layer_types": ["chunked_attention", "full_attention"] * 2, "no_rope_layers": [1, 0, 1, 0]},
    "qwen3_next": STATES | EXPERTS | {"head_dim": 16, "layer_types": MIXED, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": STATES | {"head_dim": 16, "layer_types": MIXED},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"], "conv_L_cache": 3, "block_ff_dim": 96},
    "nemotron_h": {"head_dim": 16, "layers_block_type": ["mamba", "attention", "mamba", "mlp"], "mamba_num_heads": 4,
                   "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4, "chunk_size": 8},
    "falcon_h1": {"head_dim": 16, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16,
                  "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_chunk_size": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "mamba", "attention", "mamba"], "mamba_n_heads": 8,
                         "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8,
                         "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32},
    "mamba2": {},
    "deepseek_v32": {},
}  # fmt: skip
"""By model type, what differs from COMMON."""


def write_model(family: str, folder: Path) -> Path:
    """Write a tiny random model of a family."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(COMMON | FAMILIES[family]))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder
