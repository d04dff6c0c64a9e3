"""Trainer and embedded engine on each device. CUDA cases are marked `gpu`; docs/gpu.md lists the results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from staleflow.stores.trajectory import InstanceId, PolicyVersion
from staleflow.stores.weights.weight_folder import WeightFolder
from staleflow.tasks.engines.engine_settings import TransformersSettings
from staleflow.tasks.engines.transformers import TransformersEngine, forward_logprobs, load_model, resolve_device
from staleflow.tasks.training.microbatches import Row
from staleflow.tasks.training.packed_attention import LocalMask, PackedRowLengths, _attention
from staleflow.tasks.training.policy import TrainerSettings
from staleflow.tasks.training.policy_trainer import PolicyTrainer, use_fused_adamw
from staleflow.tasks.training.shared_prompts import PromptBlock
from staleflow.tasks.training.tiny_model import make_tokenizer
from staleflow.tasks.training.trainer_settings import TrainingConfig

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "gemma3_text": {"sliding_window": 64},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "decoder_sparse_step": 1},
}
TOKENS = [5, 9, 20, 33, 7, 11]


@pytest.fixture(scope="session", params=list(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer model of each family."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 8192,
        "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    config = CONFIG_MAPPING[request.param](**(sizes | FAMILIES[request.param]))
    folder = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def trainer(model: Path, device: str, dtype: str = "float32", **knobs: Any) -> PolicyTrainer:
    settings = TrainerSettings(
        model=str(model), dtype=dtype, device=device, training=TrainingConfig(learning_rate=1e-3, **knobs), num_steps=9,
        temperature=1.0, max_response_tokens=128, seed=0,
    )  # fmt: skip
    return PolicyTrainer(settings)


def make_engine(model: Path, device: str, dtype: str) -> TransformersEngine:
    settings = TransformersSettings(
        model=str(model), dtype=dtype, device=device, temperature=1.0, max_running=8, kv_tokens=1024, page_tokens=32,
        max_batch_tokens=512, eos=(1,), seed=0,
    )  # fmt: skip
    return TransformersEngine(settings, InstanceId("rollout-0"))


def rows(count: int = 8) -> tuple[Row, ...]:
    draw = np.random.default_rng(0)

    def row(number: int) -> Row:
        response = draw.integers(3, 60, int(draw.integers(20, 40))).astype(np.int32)
        return Row(
            prompt=draw.integers(3, 60, 9).astype(np.int32), response=response,
            behaviour=np.full(len(response), -4, np.float32), sampled=np.ones(len(response), bool),
            advantage=float((-1) ** number), staleness=0,
        )  # fmt: skip

    return tuple(row(number) for number in range(count))


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_matches_float32_on_cpu(model: Path, device: str) -> None:
    expected, measured = trainer(model, "cpu").step(0, rows()), trainer(model, device).step(0, rows())
    assert measured["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3 if device == "cpu" else 1e-2)  # TF32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_packed_as_in_float32_on_cpu(model: Path, device: str, dtype: str) -> None:
    """TF32 products differ more between packed and single rows than float32 ones."""
    expected, measured = trainer(model, "cpu"), trainer(model, device, dtype)
    assert measured.logprob_model.padding_reason == expected.logprob_model.padding_reason


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_repeat_bit_for_bit(model: Path, dtype: str) -> None:
    """In rows of several thousand tokens many parts of a kernel add to the same gradient."""
    token_ids = np.random.default_rng(0).integers(3, 60, 4000).astype(np.int32)
    long_rows = [replace(row, prompt=token_ids, advantage=1.0) for row in rows(3)]
    trainers = [trainer(model, "cuda", dtype) for _ in range(2)]
    for step in range(2):
        for policy_trainer in trainers:
            policy_trainer.step(step, long_rows)
    pairs = zip(trainers[0].model.parameters(), trainers[1].model.parameters(), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 3])
def test_one_kernel_for_all_rows_matches_a_call_for_each(window: int | None) -> None:
    """Outputs and gradients in bfloat16, with rows of one token and shared prompts."""
    blocks = (PromptBlock(0, (37, 1)), PromptBlock(64, (9, 30, 1)), PromptBlock(0, (128,)), PromptBlock(16, (200, 2)))
    row_lengths, generator = PackedRowLengths(blocks), torch.Generator("cuda").manual_seed(0)
    length = sum(block.num_tokens for block in blocks)
    inputs = [torch.randn(1, heads, length, 64, device="cuda", generator=generator) for heads in (8, 4, 4)]
    weight = torch.randn(1, length, 8, 64, device="cuda", generator=generator)

    def output_and_gradients(**autocast: Any) -> list[torch.Tensor]:
        tensors = [tensor.clone().requires_grad_() for tensor in inputs]
        with torch.autocast("cuda", **autocast):
            mask = None if window is None else LocalMask(window)
            module = torch.nn.Identity()
            query, key, value = tensors
            output, _ = _attention(module, query, key, value, mask, row_lengths=row_lengths, sliding_window=window)
        (output.float() * weight).sum().backward()
        return [output.float(), *(tensor.grad for tensor in tensors if tensor.grad is not None)]

    expected, measured = output_and_gradients(enabled=False), output_and_gradients(dtype=torch.bfloat16)
    for tensor, expected_tensor in zip(measured, expected, strict=True):
        assert (tensor - expected_tensor).abs().max() < 0.02 * expected_tensor.abs().max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("knobs", [{}, {"recompute_activations": True}, {"microbatch_tokens": 64}])
def test_bfloat16_trains(model: Path, device: str, knobs: dict[str, Any]) -> None:
    expected = trainer(model, "cpu").step(0, rows())
    measured = trainer(model, device, "bfloat16", **knobs).step(0, rows())
    assert measured["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.2)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of PyTorch about its own compiler
@pytest.mark.parametrize("knobs", [{}, {"recompute_activations": True}, {"offload": True}])
def test_a_compiled_model_trains_the_same(model: Path, knobs: dict[str, Any]) -> None:
    expected, compiled = trainer(model, "cuda", "bfloat16"), trainer(model, "cuda", "bfloat16", compile=True, **knobs)
    try:
        for step, count in enumerate((8, 8, 5)):
            measured = compiled.step(step, rows(count))
            assert measured["grad_norm"] == pytest.approx(expected.step(step, rows(count))["grad_norm"], rel=0.05)
    finally:
        compiled.rank_group.leave()


@pytest.mark.gpu
def test_offloaded_weights_train_the_same(model: Path) -> None:
    """FSDP2 with one rank: NCCL, a device mesh, pinned memory."""
    expected = trainer(model, "cuda", "bfloat16").step(0, rows())
    offloading = trainer(model, "cuda", "bfloat16", offload=True)
    try:
        assert offloading.step(0, rows())["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)
    finally:
        offloading.rank_group.leave()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_serves_the_published_weights(model: Path, tmp_path: Path, device: str, dtype: str) -> None:
    engine = make_engine(model, device, dtype)
    try:
        changed = load_model(str(model), dtype, device, "sdpa")
        with torch.no_grad():
            for parameter in changed.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(1.1)
        folder = WeightFolder(tmp_path / "weights")
        folder.publish(PolicyVersion(1), dict(changed.named_parameters()))
        engine.load(PolicyVersion(1), folder.path(PolicyVersion(1)))
        expected = forward_logprobs(changed, TOKENS)
        difference = max(abs(a - b) for a, b in zip(engine.score([TOKENS])[0].logprobs, expected, strict=True))
        assert difference < (1e-3 if dtype == "float32" else 0.3)
    finally:
        engine.close()


@pytest.mark.parametrize("device", DEVICES)
def test_a_resumed_trainer_repeats_the_next_step(model: Path, tmp_path: Path, device: str) -> None:
    """Including the optimizer state, which fused AdamW keeps on the device."""
    first = trainer(model, device)
    first.step(0, rows())
    first.begin_save(tmp_path / "state.pt")
    first.end_save()
    resumed = trainer(model, device)
    resumed.load_state(tmp_path / "state.pt")
    assert resumed.step(1, rows())["grad_norm"] == pytest.approx(first.step(1, rows())["grad_norm"], rel=1e-4)
    pairs = zip(first.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.allclose(first, second, rtol=1e-4, atol=1e-6) for first, second in pairs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_has_the_logprobs_of_the_trained_policy(model: Path, tmp_path: Path, device: str, dtype: str) -> None:
    """Three steps are trained and served on the device and compared with one plain float32 forward pass on CPU."""
    training = trainer(model, device, dtype)
    for step in range(3):
        training.step(step, rows())
    engine = make_engine(model, device, dtype)
    try:
        trained = {name: parameter.detach().cpu() for name, parameter in training.model.named_parameters()}
        folder = WeightFolder(tmp_path / "weights")
        of_type = getattr(torch, dtype)
        folder.publish(PolicyVersion(1), {name: tensor.to(of_type) for name, tensor in trained.items()})
        engine.load(PolicyVersion(1), folder.path(PolicyVersion(1)))
        plain = load_model(str(model), "float32", "cpu", "sdpa")
        plain.load_state_dict(trained, strict=False)
        drift = [
            abs(a - b) for a, b in zip(engine.score([TOKENS])[0].logprobs, forward_logprobs(plain, TOKENS), strict=True)
        ]
        assert max(drift) < (5e-3 if dtype == "float32" else 0.3)
    finally:
        engine.close()


def test_float32_products_use_tf32_on_cuda_only() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert resolve_device("cpu") == "cpu" and torch.get_float32_matmul_precision() == "highest"
        assert resolve_device("cuda") == "cuda" and torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_adamw_is_fused_if_all_parameters_are_on_a_gpu() -> None:
    with FakeTensorMode():
        on_gpu, on_cpu = torch.empty(2, device="cuda"), torch.empty(2)
    assert use_fused_adamw([on_gpu]) is True
    assert use_fused_adamw([on_cpu]) is None and use_fused_adamw([on_gpu, on_cpu]) is None
