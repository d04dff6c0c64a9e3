"""A random two-layer model for tests that sample or train."""

from __future__ import annotations

from pathlib import Path


def make_tiny_model(folder: Path) -> None:
    """Save a random two-layer Llama with the demo's tokenizer, as `from_pretrained` reads it."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    from staleflow.tasks.training.tiny_model import SYMBOLS, make_tokenizer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(SYMBOLS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
