"""Weights of vLLM workers after a load, by part: fused tensors, experts, shards. Runs where vllm is installed."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from staleflow.stores.trajectory import InstanceId, PolicyVersion
from staleflow.stores.weights.weight_comparison import compare_parts
from staleflow.stores.weights.weight_folder import WeightFolder
from staleflow.tasks.engines.transformers import forward_logprobs, load_model
from tests.tasks.engine_conformance import model_settings

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)

from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from staleflow.tasks.engines.engine_settings import VllmSettings
from staleflow.tasks.engines.vllm import VllmEngine

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 512,
}  # fmt: skip
"""The vocabulary is padded, and the experts of Qwen3-MoE too, by vLLM's kernels."""
MODELS: dict[str, Any] = {
    "tied": Qwen3Config(**SIZES, intermediate_size=96, tie_word_embeddings=True),
    "biases": LlamaConfig(**SIZES | {"num_key_value_heads": 1}, intermediate_size=96, attention_bias=True),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, intermediate_size=96, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2
    ),
    "mixtral": MixtralConfig(**SIZES, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2),
    "glm4_moe": Glm4MoeConfig(
        **SIZES,
        intermediate_size=96,
        moe_intermediate_size=48,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        n_shared_experts=1,
    ),
    "gpt_oss": GptOssConfig(**SIZES, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2),
}
PROBE = [3, 10, 14, 7, 20, 30, 40, 50, 60, 70]
LOADS = 5


def write_model(name: str, folder: Path, vocabulary: int = 97) -> Path:
    """Write a tiny model whose random weights all affect the logprobs."""
    torch.manual_seed(0)
    config = copy.deepcopy(MODELS[name])
    config.vocab_size = vocabulary
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for weight in model.state_dict().values():
            weight.add_(0.15 * torch.randn_like(weight))
    model.save_pretrained(folder)
    return folder


class UpdatedEngine:
    """An engine, the model of the trainer, and the weight file of their version."""

    def __init__(self, name: str, tensor_parallel: int, folder: Path) -> None:
        path = write_model(name, folder / "model")
        settings: dict[str, Any] = model_settings(path) | {"tensor_parallel": tensor_parallel}
        self.engine = VllmEngine(VllmSettings(**settings), InstanceId("rollout-0"))
        self.model = load_model(str(path), "float32", "cpu", attention="eager")
        self.folder = WeightFolder(folder / "published")

    def publish(self, version: int) -> Path:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_((0.1 if version else 0.0) * torch.randn_like(parameter))
        self.folder.publish(PolicyVersion(version), dict(self.model.named_parameters()))
        return self.folder.path(PolicyVersion(version))


RUNS = [*((name, 1) for name in MODELS), ("biases", 2), ("qwen3_moe", 2), ("gpt_oss", 2)]
"""Model and number of workers that share it."""
BUFFER = "e_score_correction_bias"
"""A parameter of vLLM's GLM-4-MoE that is a buffer in transformers: it is not published, and a load does not change
it."""


@pytest.fixture(scope="module", params=RUNS, ids=lambda param: f"{param[0]}-{param[1]}")
def updated_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpdatedEngine]:
    name, tensor_parallel = request.param
    one = UpdatedEngine(name, tensor_parallel, tmp_path_factory.mktemp("weights"))
    yield one
    one.engine.close()


def test_every_part_is_verified_after_each_load(updated_engine: UpdatedEngine) -> None:
    for version in range(LOADS + 1):
        report = updated_engine.engine.load(PolicyVersion(version), updated_engine.publish(version)).weights
        assert report.outcome == "verified", report.line
        assert report.verified >= len(dict(updated_engine.model.named_parameters()))
        assert updated_engine.engine.score([PROBE])[0].logprobs == pytest.approx(
            forward_logprobs(updated_engine.model, PROBE), abs=1e-4
        )


def flip(worker: Any, number: int, rank: int) -> str:
    """Flip a bit in the middle of a parameter of a worker; returns its name, or "" if there is no such parameter."""
    named = worker.model_runner.get_model().named_parameters()
    parameters = [item for item in named if not item[0].endswith(BUFFER)]
    if number >= len(parameters):
        return ""
    name, parameter = parameters[number]
    if worker.rank == rank:
        parameter.data.view(torch.int32)[(0,) * parameter.ndim] ^= 1
    return str(name)


def test_one_flipped_bit_in_any_parameter_contradicts(updated_engine: UpdatedEngine) -> None:
    path = updated_engine.publish(7)
    assert updated_engine.engine.load(PolicyVersion(7), path).weights.outcome == "verified"
    vllm, tensor_parallel = updated_engine.engine._engine, updated_engine.engine._settings.tensor_parallel

    def flip_parameter(number: int, rank: int) -> str:
        names: list[str] = updated_engine.engine._call(partial(vllm.collective_rpc, flip, args=(number, rank))).result()
        return names[0]

    for rank in range(tensor_parallel):
        number = 0
        while name := flip_parameter(number, rank):
            report = updated_engine.engine._compare_weights(path)
            assert (report.contradicted, len(report.names)) == (1, 1), (rank, name, report.line)
            flip_parameter(number, rank)
            number += 1
        assert number >= 10
    assert updated_engine.engine._compare_weights(path).outcome == "verified"


def test_a_tensor_with_an_unknown_name_is_not_verified(updated_engine: UpdatedEngine) -> None:
    from staleflow.tasks.engines import vllm_layouts, vllm_weights

    if updated_engine.engine._settings.tensor_parallel > 1:
        pytest.skip("the model is in other processes")
    path = updated_engine.publish(8)
    updated_engine.engine.load(PolicyVersion(8), path)
    tensors = vllm_weights.checkpoint_tensors(updated_engine.engine._settings.model, str(path))
    tensors["model.layers.0.unheard_of.weight"] = tensors.pop("model.layers.0.input_layernorm.weight")
    model = updated_engine.engine._engine.collective_rpc(lambda worker: worker.model_runner.get_model())[0]
    report = compare_parts(vllm_layouts.weight_parts(model, tensors))
    assert report.outcome == "not verified"
    assert set(report.not_verified) == {"the engine has no layer of that name", "not all of a parameter is published"}
