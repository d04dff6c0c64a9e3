"""Model sizes, and memory of trainer and engine, against published models and against what autograd saves."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from staleflow.pipeline.placement.devices import GB
from staleflow.pipeline.sizing.memory import (
    EngineShape,
    ModelShape,
    TrainingShape,
    activation_bytes,
    kv_bytes,
    layer_bytes,
    parameter_bytes,
)
from staleflow.pipeline.sizing.plan import SizedJob, make_plan
from staleflow.stores.errors import ConfigError

QWEN3: dict[str, dict[str, Any]] = {
    "0.6B": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
        "tie_word_embeddings": False,
    },
    "32B": {
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 25600,
        "tie_word_embeddings": False,
    },
    "30B-A3B": {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "tie_word_embeddings": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
"""The published sizes of Qwen3."""


def config_of(name: str) -> dict[str, Any]:
    return {"head_dim": 128, "vocab_size": 151936} | QWEN3[name]


def shape(name: str) -> ModelShape:
    return ModelShape.of(config_of(name), name)


@pytest.mark.parametrize("name", list(QWEN3))
def test_parameter_counts_match_the_models(name: str) -> None:
    kind = "qwen3_moe" if "A3B" in name else "qwen3"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**config_of(name)))
    assert shape(name).parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("8B", {4: 44, 8: 28, 16: 20, 64: 14}),
        ("32B", {4: 147, 8: 82, 16: 49, 64: 25}),
        ("30B-A3B", {4: 132, 8: 71, 16: 40, 64: 18}),
    ],
)
def test_parameter_bytes_of_a_rank_match_the_table(name: str, gigabytes: dict[int, int]) -> None:
    """The table is rounded to gigabytes."""
    for ranks, expected in gigabytes.items():
        training = TrainingShape(ranks=ranks, dtype="bfloat16", microbatch_tokens=8192, recompute=False, offload=False)
        assert abs(parameter_bytes(shape(name), training) / GB - expected) < max(0.51, 0.05 * expected)


@pytest.mark.parametrize(("name", "megabytes"), [("8B", 9.3), ("32B", 27.6)])
def test_activation_bytes_per_token_match_the_table(name: str, megabytes: float) -> None:
    assert activation_bytes(shape(name), "bfloat16", recompute=False) / 1e6 == pytest.approx(megabytes, rel=0.05)


def saved_bytes(kind: str, dtype: str, layers: int, tokens: int, sizes: dict[str, Any]) -> int:
    """Return the bytes of the tensors that autograd saves in a forward pass, without parameters."""
    torch.manual_seed(0)
    config: AutoConfig = CONFIG_MAPPING[kind](vocab_size=64, num_hidden_layers=layers, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").model
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    results: dict[int, torch.Tensor] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in own:
            results[place] = tensor  # referenced, so that no other tensor gets its address
        return tensor

    half = torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16")
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor), half:
        outcome = model(input_ids=torch.arange(tokens)[None] % 60, use_cache=False)
    assert outcome is not None
    return sum(tensor.untyped_storage().nbytes() for tensor in results.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_activation_bytes_match_the_tensors_that_autograd_saves(kind: str, dtype: str) -> None:
    """By differences between two layers and one, and between sequences 64 tokens apart."""
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    if kind == "qwen3_moe":
        sizes |= {
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 96,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    first, second = (
        saved_bytes(kind, dtype, layers, 128, sizes) - saved_bytes(kind, dtype, layers, 64, sizes) for layers in (1, 2)
    )
    model = ModelShape.of(sizes | {"num_hidden_layers": 2, "vocab_size": 64}, kind)
    assert layer_bytes(model, dtype) == pytest.approx((second - first) / 64, rel=0.05)


@pytest.mark.parametrize("key", ["num_attention_heads", "hidden_size", "vocab_size"])
def test_a_config_without_decoder_sizes_gives_a_one_line_error(key: str) -> None:
    complete = config_of("0.6B")
    for broken in (complete | {key: "many"}, {k: v for k, v in complete.items() if k != key}):
        with pytest.raises(ConfigError, match=r"^mine: its config\.json does not have the sizes of a decoder"):
            ModelShape.of(broken, "mine")


def test_a_config_without_attention_heads_gives_a_one_line_error() -> None:
    config = config_of("0.6B") | {"num_attention_heads": 0, "head_dim": None}
    with pytest.raises(ConfigError, match=r"^mine: its config\.json does not have the sizes of a decoder"):
        ModelShape.of(config, "mine")


def job(num_gpus: int, *, dtype: str = "bfloat16", ranks: int = 1, longest: int = 4096) -> SizedJob:
    return SizedJob(
        training=TrainingShape(ranks=ranks, dtype=dtype, microbatch_tokens=8192, recompute=False, offload=False),
        engine=EngineShape(tensor_parallel=1, dtype=dtype, kv_tokens=16384, max_running=64, batch_tokens=1024),
        instances=1,
        max_length=longest,
        num_gpus=num_gpus,
        has_own_gpus=num_gpus > 1,
    )


def test_a_small_model_fits_and_its_cache_is_proposed() -> None:
    plan = make_plan(shape("0.6B"), job(8), 80 * GB)
    assert plan.changes == {}
    assert plan.proposed["rollout.engine.max_running"] == 153
    assert kv_bytes(shape("0.6B"), "bfloat16") == 2 * 28 * 1024 * 2


def test_a_model_that_does_not_fit_gets_the_smallest_change() -> None:
    alone = make_plan(shape("8B"), job(8), 80 * GB)
    assert alone.changes == {"training.recompute_activations": True, "training.ranks": 4}
    assert make_plan(shape("8B"), job(8), 141 * GB).changes == {"training.ranks": 4}
    assert make_plan(shape("32B"), job(1), 24 * GB).changes is None


def test_a_planned_change_makes_the_model_fit() -> None:
    for name in QWEN3:
        for num_gpus in (1, 8, 64):
            for memory_gb in (24, 80, 141):
                plan = make_plan(shape(name), job(num_gpus), memory_gb * GB)
                assert plan.changes is None or set(plan.proposed)


def test_several_gpus_for_an_instance_are_proposed_for_vllm_only() -> None:
    """The transformers engine has no tensor_parallel."""
    large = dataclasses.replace(job(64), is_vllm=False)
    assert "rollout.engine.tensor_parallel" in (make_plan(shape("32B"), job(64), 48 * GB).changes or {})
    assert make_plan(shape("32B"), large, 48 * GB).changes is None
