"""Tiny models of the families of causal language models that recipes train, at random, with a tokenizer of sums.

A family is a `model_type` of transformers. Each model has two layers, one of each kind that its family has, windows and
chunks of 16 tokens, and weights that are large enough for a wrong cache or mask to change logprobs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

WINDOW = 16
"""Tokens of a sliding window or a chunk of attention."""
CONTEXT = 256
"""Most tokens of a row, by the configuration."""
SCALE = 0.1
"""Standard deviation of weights; the usual 0.02 makes all tokens nearly as probable."""
VOCABULARY = 32

_SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
                   "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}  # fmt: skip
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
           "num_key_value_heads": 4}  # fmt: skip
_DELTA_NET = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
              "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}  # fmt: skip
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
_HEAD = {"head_dim": 8}

FAMILIES: dict[str, dict[str, Any]] = {
    # dense
    "llama": {}, "mistral": {"sliding_window": WINDOW}, "ministral": {"sliding_window": WINDOW, **_HEAD}, "qwen2": {},
    "qwen3": _HEAD, "gemma": _HEAD, "gemma2": {"sliding_window": WINDOW, **_HEAD}, "gemma3_text": _HEAD | _SLIDING,
    "phi": {}, "phi3": {}, "olmo": {}, "olmo2": {}, "olmo3": _SLIDING, "smollm3": {}, "granite": {}, "cohere": {},
    "cohere2": _HEAD | _SLIDING, "glm": _HEAD, "glm4": _HEAD, "starcoder2": {}, "stablelm": {},
    "exaone4": _HEAD | _SLIDING, "ernie4_5": _HEAD, "seed_oss": _HEAD, "hunyuan_v1_dense": _HEAD, "arcee": {},
    "nemotron": {}, "apertus": {}, "gpt_neox": {}, "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    # mixtures of experts
    "mixtral": _LOCAL_EXPERTS, "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3_moe": _EXPERTS | _HEAD, "olmoe": {"num_experts": 4, "num_experts_per_tok": 2}, "granitemoe": _LOCAL_EXPERTS,
    "gpt_oss": _LOCAL_EXPERTS | _HEAD | _SLIDING, "glm4_moe": _ROUTED_EXPERTS | _HEAD,
    "deepseek_v2": _ROUTED_EXPERTS | _LATENT, "deepseek_v3": _ROUTED_EXPERTS | _LATENT,
    "dots1": _ROUTED_EXPERTS | _HEAD, "minimax_m2": _LOCAL_EXPERTS | _HEAD,
    "llama4_text": _HEAD | {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 64,
                            "attention_chunk_size": WINDOW, "interleave_moe_layer_step": 2, "no_rope_layers": [1, 0]},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 0,
                     "moe_num_shared_experts": 1},
    # layers with a recurrent state
    "qwen3_next": _EXPERTS | _HEAD | _DELTA_NET | {"shared_expert_intermediate_size": 32},
    "qwen3_5_text": _HEAD | _DELTA_NET,
    "qwen3_5_moe_text": _EXPERTS | _HEAD | _DELTA_NET | {"shared_expert_intermediate_size": 32},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_ff_dim": 64, "block_multiple_of": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, **_EXPERTS},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2,
                   "layers_block_type": ["mamba", "attention"], **_HEAD},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, **_HEAD},
    "granitemoehybrid": _LOCAL_EXPERTS | _MAMBA | {"layer_types": ["mamba", "attention"],
                                                   "shared_intermediate_size": 32},
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1,
              "mamba_d_state": 8, "use_mamba_kernels": False},
    "minimax": _LOCAL_EXPERTS | _HEAD | {"layer_types": ["linear_attention", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
    "recurrent_gemma": {},
}  # fmt: skip
"""What the configuration of a family's tiny model has besides the common sizes, by `model_type`."""


def make_family_model(family: str, folder: Path) -> None:
    """Write the tiny model of a family and a tokenizer of sums, as `from_pretrained` reads them. The same each time."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    from staleflow.tasks.training.tiny_model import make_tokenizer

    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "n_positions": CONTEXT,
        "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": False,
    }  # fmt: skip
    if family != "gpt2":
        del sizes["n_positions"]
    config = AutoConfig.for_model(family, **(sizes | FAMILIES[family]))
    for name in ("attn_pdrop", "resid_pdrop", "embd_pdrop"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=SCALE)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
