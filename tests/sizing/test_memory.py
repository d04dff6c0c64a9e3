"""Model sizes, and memory of trainer and engine, against published models and against what autograd saves."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from staleflow.pipeline.placement.devices import GB
from staleflow.pipeline.sizing.memory import (
    CHUNK_LOGIT_BYTES,
    KV_STORAGE_FACTOR,
    MAX_COPIED_POSITIONS,
    TIED_EMBEDDINGS_BY_TYPE,
    ModelShape,
    activation_bytes_per_token,
    engine_bytes_by_use,
    kv_bytes_per_token,
    layer_activation_bytes_per_token,
    trainer_bytes_by_use,
    training_state_bytes,
)
from staleflow.pipeline.sizing.plan import MemorySettings, make_plan
from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectory import InstanceId
from staleflow.tasks.engines import transformers as transformers_engine
from staleflow.tasks.engines.adapters import LoraConfig
from staleflow.tasks.engines.engine_settings import TransformersSettings, VllmSettings
from staleflow.tasks.engines.transformers import TransformersEngine
from staleflow.tasks.training.lm_head import GPU_CHUNK_BYTES
from staleflow.tasks.training.lora import inject_adapter
from staleflow.tasks.training.trainer_settings import TrainingConfig
from tests.tasks.engine_conformance import collect, request
from tests.tasks.test_engine_transformers import settings

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
    kind = "qwen3_moe" if "A3B" in name else "qwen3"
    return {"model_type": kind, "head_dim": 128, "vocab_size": 151936} | QWEN3[name]


def shape(name: str) -> ModelShape:
    return ModelShape.of(config_of(name), name)


@pytest.mark.parametrize("name", list(QWEN3))
def test_parameter_counts_match_the_models(name: str) -> None:
    config = config_of(name)
    assert shape(name).parameters == pytest.approx(num_parameters(CONFIG_MAPPING[config["model_type"]](**config)), 1e-4)


def num_parameters(config: Any) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


@pytest.mark.parametrize("kind", TIED_EMBEDDINGS_BY_TYPE)
def test_parameter_counts_match_each_model_type_with_its_default_sizes(kind: str) -> None:
    """A saved config.json may leave out whether embeddings are tied, if that is as usual for the type."""
    config: Any = CONFIG_MAPPING[kind](num_hidden_layers=4)
    sizes = {key: value for key, value in config.to_dict().items() if key != "tie_word_embeddings"}
    assert ModelShape.of(sizes, kind).parameters == pytest.approx(num_parameters(config), rel=2e-3)


@pytest.mark.parametrize(
    "other",
    [
        {"model_type": "deepseek_v3", "n_routed_experts": 256},
        {"model_type": "gemma3", "text_config": config_of("0.6B")},
        {"mlp_only_layers": [0]},
        {"decoder_sparse_step": 2},
    ],
)
def test_models_with_layers_of_other_kinds_are_rejected(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^mine: a model of model_type = .* is not one whose memory can be planned"):
        ModelShape.of(config_of("30B-A3B") | other, "mine")


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
        training = TrainingConfig(ranks=ranks)
        assert abs(training_state_bytes(shape(name), training, "bfloat16") / GB - expected) < max(0.51, 0.05 * expected)


@pytest.mark.parametrize(("name", "megabytes"), [("8B", 9.3), ("32B", 27.6)])
def test_activation_bytes_per_token_match_the_table(name: str, megabytes: float) -> None:
    assert activation_bytes_per_token(shape(name), "bfloat16", recompute=False) / 1e6 == pytest.approx(
        megabytes, rel=0.05
    )


def saved_bytes(kind: str, dtype: str, layers: int, tokens: int, sizes: dict[str, Any], adapter_rank: int = 0) -> int:
    """Return the bytes of the tensors that autograd saves in a forward pass, without parameters."""
    torch.manual_seed(0)
    config: AutoConfig = CONFIG_MAPPING[kind](vocab_size=64, num_hidden_layers=layers, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").model
    if adapter_rank:
        model = inject_adapter(model, LoraConfig(rank=adapter_rank), seed=0)
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
@pytest.mark.parametrize(("kind", "adapter_rank"), [("qwen3", 0), ("qwen3", 8), ("qwen3_moe", 0)])
def test_activation_bytes_match_the_tensors_that_autograd_saves(kind: str, adapter_rank: int, dtype: str) -> None:
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
        saved_bytes(kind, dtype, layers, 128, sizes, adapter_rank)
        - saved_bytes(kind, dtype, layers, 64, sizes, adapter_rank)
        for layers in (1, 2)
    )
    model = ModelShape.of(sizes | {"model_type": kind, "num_hidden_layers": 2, "vocab_size": 64}, kind)
    planned, saved = layer_activation_bytes_per_token(model, dtype), (second - first) / 64
    if adapter_rank:
        assert saved <= planned <= 1.2 * saved
    else:
        assert planned == pytest.approx(saved, rel=0.05)


def test_the_weights_of_an_adapter_are_trained_and_those_of_its_model_only_read() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["qwen3"](**config_of("8B")))
    model = inject_adapter(model, LoraConfig(rank=8), seed=0)
    expected = sum((16 if p.requires_grad else 4) * p.numel() for p in model.parameters())
    training = TrainingConfig(lora=LoraConfig(rank=8))
    assert training_state_bytes(shape("8B"), training, "float32") == pytest.approx(expected, rel=1e-4)
    sharded = dataclasses.replace(training, ranks=4)
    assert (
        training_state_bytes(shape("8B"), sharded, "float32")
        < training_state_bytes(shape("8B"), training, "float32") / 2
    )
    adapter, full = (
        sum(trainer_bytes_by_use(shape("8B"), t, "float32").values()) for t in (training, TrainingConfig())
    )
    assert adapter < full - 90 * GB


def test_key_heads_are_copied_where_there_are_more_gpus_than_heads() -> None:
    """Qwen3-30B-A3B has 4 key heads."""
    bytes_per_token = [kv_bytes_per_token(shape("30B-A3B"), "bfloat16", gpus) for gpus in (1, 2, 4, 8)]
    assert bytes_per_token == [98304, 49152, 24576, 24576]


def test_the_transformers_engine_needs_more_for_its_cache_and_has_no_cuda_graphs() -> None:
    vllm = job(8).engine
    parts = engine_bytes_by_use(shape("8B"), vllm, "bfloat16")
    other = engine_bytes_by_use(shape("8B"), TransformersSettings.with_knobs_of(vllm), "bfloat16")
    assert other["KV cache"] == KV_STORAGE_FACTOR * parts["KV cache"]
    assert other["CUDA context"] == parts["CUDA context"] - 10**9


def test_logits_are_counted_as_the_output_layer_computes_them() -> None:
    assert CHUNK_LOGIT_BYTES == 4 * GPU_CHUNK_BYTES
    assert MAX_COPIED_POSITIONS == transformers_engine.MAX_COPIED_POSITIONS


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


def job(num_gpus: int, *, dtype: str = "bfloat16", ranks: int = 1, longest: int = 4096) -> MemorySettings:
    return MemorySettings(
        training=TrainingConfig(ranks=ranks),
        engine=VllmSettings(),
        dtype=dtype,
        instances=1,
        max_length=longest,
        num_gpus=num_gpus,
        has_separate_gpus=num_gpus > 1,
    )


def test_a_small_model_fits_and_its_cache_is_proposed() -> None:
    plan = make_plan(shape("0.6B"), job(8), 80 * GB)
    assert plan.changes == {}
    assert plan.proposed["rollout.engine.max_running"] == 153
    assert kv_bytes_per_token(shape("0.6B"), "bfloat16") == 2 * 28 * 1024 * 2


def test_instances_that_share_a_gpu_are_all_counted() -> None:
    proposed = []
    for instances in (1, 2, 4):
        several = dataclasses.replace(job(1), instances=instances)
        plan = make_plan(shape("0.6B"), several, 80 * GB)
        assert plan.changes == {}
        proposed.append(kv_tokens := int(str(plan.proposed["rollout.engine.kv_tokens"])))
        engine = dataclasses.replace(several.engine, kv_tokens=kv_tokens, max_batch_tokens=8192)
        parts = several.trainer_bytes_by_use(shape("0.6B")), engine_bytes_by_use(shape("0.6B"), engine, several.dtype)
        used = sum(parts[0].values()) + instances * sum(parts[1].values())
        assert 0.95 * plan.usable_bytes < used <= plan.usable_bytes
    assert proposed == sorted(proposed, reverse=True)
    crowded = dataclasses.replace(job(1), instances=40)
    assert make_plan(shape("0.6B"), crowded, 80 * GB).changes == {"rollout.instances": 1}


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
    large = dataclasses.replace(job(64), engine=TransformersSettings.with_knobs_of(job(64).engine))
    assert "rollout.engine.tensor_parallel" in (make_plan(shape("32B"), job(64), 48 * GB).changes or {})
    assert make_plan(shape("32B"), large, 48 * GB).changes is None


class LiveBytes(TorchDispatchMode):  # type: ignore[misc]  # torch has no type for it
    """Counts the bytes of the tensors that operations return, while they exist. peak: the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._bytes_by_storage: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._bytes_by_storage:
                self._bytes_by_storage[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._bytes_by_storage.pop, storage._cdata)
        self.peak = max(self.peak, sum(self._bytes_by_storage.values()))
        return result


def save_wide_model(folder: Path) -> ModelShape:
    """Save a model whose logits are larger than all else."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = CONFIG_MAPPING["qwen3"](vocab_size=30_000, num_hidden_layers=1, intermediate_size=64, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return ModelShape.of(config.to_dict(), "")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_teacher_computes_logprobs_within_its_planned_memory(dtype: str, tmp_path: Path) -> None:
    shape = save_wide_model(tmp_path)
    teacher = TransformersEngine(settings(tmp_path, dtype=dtype, max_batch_tokens=512), InstanceId("teacher-0"))
    with contextlib.closing(teacher), torch.inference_mode(), LiveBytes() as live:
        teacher._score_in_one_pass([[token % 100 for token in range(1500)]], 0.7)
    engine = TransformersSettings(kv_tokens=2048, max_running=512, max_batch_tokens=512)
    parts = engine_bytes_by_use(shape, engine, dtype)
    planned = sum(parts.values()) - parts["CUDA context"]
    assert planned / 4 < live.peak <= planned


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_engine_samples_within_its_planned_memory(dtype: str, tmp_path: Path) -> None:
    shape = save_wide_model(tmp_path)
    changes: dict[str, Any] = {"kv_tokens": 8192, "max_running": 192, "max_batch_tokens": 512}
    engine = TransformersEngine(settings(tmp_path, dtype=dtype, **changes, temperature=0.7), InstanceId("rollout-0"))
    live = LiveBytes()
    with contextlib.closing(engine):
        engine._call(live.__enter__).result()
        engine.submit([request(i, max_new_tokens=8) for i in range(192)])
        collect(engine, 192)
        engine._call(lambda: live.__exit__(None, None, None)).result()
    parts = engine_bytes_by_use(shape, TransformersSettings(**changes), dtype)
    assert parts["forward pass"] / 2 < live.peak <= parts["forward pass"] + parts["KV cache"]


def test_a_teacher_is_counted_in_place_of_the_reference_that_the_trainer_holds() -> None:
    alone, large = job(8), shape("32B")
    holding = dataclasses.replace(alone, reference=large)
    parts = make_plan(shape("0.6B"), holding, 80 * GB).trainer_bytes
    assert parts["reference model"] == 2 * large.parameters
    assert "reference model" not in make_plan(shape("0.6B"), alone, 80 * GB).trainer_bytes
    teacher = VllmSettings(tensor_parallel=2)
    taught = dataclasses.replace(alone, teachers=2, teacher=teacher, teacher_model=large)
    plan = make_plan(shape("0.6B"), taught, 80 * GB)
    assert plan.teacher_bytes == engine_bytes_by_use(large, teacher, alone.dtype)
    assert taught.num_needed_gpus == alone.num_needed_gpus + 4
    assert plan.changes == {}, "it fits"
    assert plan.proposed["deadlines.start_s"] == round(120 + 4 * large.parameters / 1e9), "the larger model"
    assert make_plan(shape("0.6B"), taught, 24 * GB).changes is None, "a teacher does not fit"
