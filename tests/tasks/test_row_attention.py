"""Rows without padding: the numbers of padded ones, or the model gets padded ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from staleflow.tasks.training.logprobs import LogprobModel
from staleflow.tasks.training.microbatches import microbatches
from staleflow.tasks.training.packed_attention import NAME, takes_rows
from tests.tasks.test_ranks import ragged

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def model(kind: str, config: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    made = getattr(transformers, config)(**SIZES | changes)
    return getattr(transformers, kind)._from_config(made, dtype=torch.float32).eval()


def computed(found: Any, *, packed: bool) -> list[torch.Tensor]:
    """Logprobs and gradients of a ragged batch."""
    under = LogprobModel(model=found, device="cpu", half=False, temperature=1.0, token_budget=10_000)
    if not packed:
        object.__setattr__(under, "takes_rows", False)
    rows = ragged(9, np.random.default_rng(3))
    (batch,) = microbatches(rows, range(9), np.ones(9, np.float32), 10_000)
    found.zero_grad()
    logprobs = under.batch(batch)
    (logprobs * torch.linspace(-1, 1, logprobs.numel()).view(logprobs.shape)).sum().backward()
    return [logprobs.detach(), *(p.grad.clone() for p in found.parameters())]


@pytest.mark.parametrize(
    ("kind", "config", "changes"),
    [
        ("LlamaForCausalLM", "LlamaConfig", {}),
        ("Qwen2ForCausalLM", "Qwen2Config", {}),
        ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 16}),
        ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    ],
)
def test_rows_without_padding_have_the_numbers_of_padded_ones(kind: str, config: str, changes: dict[str, Any]) -> None:
    if kind.startswith("GPT2"):
        changes = {**changes, "attn_pdrop": 0.0}
    found = model(kind, config, **changes)
    padded = computed(model(kind, config, **changes), packed=False)
    for one, other in zip(computed(found, packed=True), padded, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
def test_usual_models_take_them(kind: str) -> None:
    found = model(f"{kind}ForCausalLM", f"{kind}Config")
    assert takes_rows(found, "cpu")
    assert found.config._attn_implementation == NAME


def test_a_model_whose_attention_has_a_window_keeps_its_own() -> None:
    """A row may be longer than it."""
    torch.manual_seed(0)
    found = MistralForCausalLM._from_config(MistralConfig(**SIZES, sliding_window=8), dtype=torch.float32).eval()
    before = found.config._attn_implementation
    assert not takes_rows(found, "cpu")
    assert found.config._attn_implementation == before


def test_a_model_that_mixes_tokens_elsewhere_gets_padded_rows() -> None:
    torch.manual_seed(0)
    found = LlamaForCausalLM._from_config(LlamaConfig(**SIZES), dtype=torch.float32).eval()
    layer = found.model.layers[1].mlp
    whole = layer.forward
    layer.forward = lambda hidden: whole(hidden.cumsum(1))
    assert not takes_rows(found, "cpu")


def test_what_is_saved_of_a_model_does_not_name_the_attention(tmp_path: Path) -> None:
    found = model("LlamaForCausalLM", "LlamaConfig")
    assert takes_rows(found, "cpu")
    found.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()
