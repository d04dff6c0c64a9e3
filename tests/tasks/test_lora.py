"""Training adapters: initialization, checkpoints, ranks and supported layers."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from benchmarks.models.model_families import make_family_model
from staleflow.stores.errors import ConfigError, StoreError
from staleflow.stores.trajectory import InstanceId, PolicyVersion
from staleflow.stores.weights import weight_file, weight_folder
from staleflow.stores.weights.weight_hash import sorted_tensors
from staleflow.tasks.engines import adapters
from staleflow.tasks.engines.adapters import AdapterLayer, LoraConfig
from staleflow.tasks.engines.engine_settings import TransformersSettings
from staleflow.tasks.engines.served_adapters import ServedAdapters
from staleflow.tasks.engines.transformers import TransformersEngine, forward_logprobs, load_model
from staleflow.tasks.training.policy_trainer import PolicyTrainer
from staleflow.tasks.training.rank import SINGLE_RANK
from staleflow.tasks.training.trainer_settings import KlConfig
from tests.support.rank_processes import run_ranks
from tests.tasks.engine_conformance import model_settings
from tests.tasks.test_ranks import Training, check_same, split_job, train, training

PROBE = [3, 4, 5, 6, 7, 8]
LORA = LoraConfig(rank=4, alpha=8)


def with_adapter(job: Training, lora: LoraConfig = LORA, **changes: Any) -> Training:
    """Return the same job with an adapter and a larger learning rate."""
    changed = replace(job.settings.training, lora=lora, learning_rate=1e-2, **changes)
    return replace(job, settings=replace(job.settings, training=changed))


def published(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = trainer.apply_to_weights(
        lambda w: {n: torch.as_tensor(t).clone() for n, t in sorted_tensors(w)}
    )
    return result


def test_an_adapter_starts_as_the_base_model_and_is_trained_alone(tiny_model: Path) -> None:
    job = with_adapter(training(tiny_model, (9, 7), "ppo_clip", "token_mean"))
    trainer = PolicyTrainer(job.settings)
    base = load_model(str(tiny_model), "float32", "cpu", attention="sdpa")
    assert trainer.logprobs(PROBE) == forward_logprobs(base, PROBE)
    begun = published(trainer)
    layers = adapters.parse_layers(weight_folder.shapes(begun), "the first version")
    assert len(layers) == 2 * 7  # all linear layers of two blocks, and not the output layer
    assert AdapterLayer("model.layers.1.mlp.down_proj", rank=4, inputs=128, outputs=64) in layers
    for step, rows in enumerate(job.batches):
        trainer.step(step, rows)
    trained = published(trainer)
    assert trained.keys() == begun.keys()
    assert all(not torch.equal(trained[layer.up_name], begun[layer.up_name]) for layer in layers)
    frozen = {name: p for name, p in trainer.model.named_parameters() if ".lora_" not in name}
    values = dict(base.named_parameters())
    assert all(torch.equal(p, values[name.replace(".base_layer", "")]) for name, p in frozen.items())
    assert sum(len(group["params"]) for group in trainer.optimizer.param_groups) == len(trained)


def test_the_initial_adapter_depends_on_the_seed_only(tiny_model: Path) -> None:
    job = with_adapter(training(tiny_model, (), "ppo_clip", "token_mean"))
    before = torch.random.get_rng_state()
    first, same = (published(PolicyTrainer(job.settings)) for _ in range(2))
    other = published(PolicyTrainer(replace(job.settings, seed=1)))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if "lora_A" in name)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_checkpoint_has_the_merged_model_and_the_adapter(tiny_model: Path, tmp_path: Path) -> None:
    """transformers loads the merged model and peft the adapter; both compute the logprobs of the trainer."""
    peft = pytest.importorskip("peft")
    job = with_adapter(training(tiny_model, (9, 7), "ppo_clip", "token_mean"), LoraConfig(rank=3, alpha=5))
    trainer = PolicyTrainer(job.settings)
    for step, rows in enumerate(job.batches):
        trainer.step(step, rows)
    trainer.apply_to_weights(lambda weights: weight_file.write(tmp_path / "weights", weights))
    trainer.save(tmp_path / "step", tmp_path / "weights")
    merged = load_model(str(tmp_path / "step"), "float32", "cpu", attention="sdpa")
    base = load_model(str(tiny_model), "float32", "cpu", attention="sdpa")
    assert np.abs(np.subtract(forward_logprobs(base, PROBE), trainer.logprobs(PROBE))).max() > 0.01
    assert {n for n, _ in merged.named_parameters()} == {n for n, _ in base.named_parameters()}
    np.testing.assert_allclose(forward_logprobs(merged, PROBE), trainer.logprobs(PROBE), atol=1e-5)
    read = peft.PeftModel.from_pretrained(base, tmp_path / "step" / "adapter").eval()
    np.testing.assert_allclose(forward_logprobs(read, PROBE), trainer.logprobs(PROBE), atol=1e-5)


def test_the_base_model_is_the_kl_reference_without_a_second_copy(tiny_model: Path) -> None:
    """Equal to a second copy of the model in loss and gradient."""
    kl = KlConfig(coefficient=0.5, estimator="k3", place="loss")
    job = training(tiny_model, (7, 5), "ppo_clip", "token_mean")
    own = with_adapter(job, kl=kl)
    copied = with_adapter(job, kl=replace(kl, reference=str(tiny_model)))
    trainer = PolicyTrainer(own.settings)
    assert trainer.reference is trainer.logprob_model
    trained = train(SINGLE_RANK, own)
    assert trained.metrics[-1]["kl_reference"] > 0
    check_same(trained, train(SINGLE_RANK, copied))


def test_two_ranks_train_an_adapter_as_one_rank(tiny_model: Path, tmp_path: Path) -> None:
    """With a KL reference, and resumed from a resume point of either."""
    kl = KlConfig(coefficient=0.1, estimator="k3", place="loss")
    whole, first, last = (with_adapter(item, kl=kl) for item in split_job(tiny_model))
    expected = train(SINGLE_RANK, whole)
    shards, file = tmp_path / "v00000002.shards", tmp_path / "v00000002.pt"
    shards.mkdir()
    check_same(run_ranks(2, train, first, "", str(shards))[0], train(SINGLE_RANK, first, "", str(file)))
    for again in (train(SINGLE_RANK, last, str(shards)), run_ranks(2, train, last, str(file))[0]):
        check_same(again, replace(expected, metrics=expected.metrics[2:]))
    assert set(torch.load(file)["model"]) == {n for n in torch.load(file)["model"] if ".lora_" in n}


def test_resume_point_of_a_full_model_is_rejected_for_an_adapter(tiny_model: Path, tmp_path: Path) -> None:
    job = training(tiny_model, (), "ppo_clip", "token_mean")
    whole = PolicyTrainer(job.settings)
    whole.begin_save(tmp_path / "whole.pt")
    whole.end_save()
    with pytest.raises(StoreError, match=r"whole.pt: no resume point of this job: .*tensors differ"):
        PolicyTrainer(with_adapter(job).settings).load_state(tmp_path / "whole.pt")


def test_lora_targets_choose_the_layers(tiny_model: Path) -> None:
    job = training(tiny_model, (), "ppo_clip", "token_mean")
    chosen = with_adapter(job, LoraConfig(rank=2, targets=["q_proj", "v_proj"]))
    layers = adapters.parse_layers(weight_folder.shapes(published(PolicyTrainer(chosen.settings))), "it")
    assert {layer.module.rpartition(".")[2] for layer in layers} == {"q_proj", "v_proj"}
    with pytest.raises(ConfigError, match=r"training.lora.targets = \['no_proj'\]: "):
        PolicyTrainer(with_adapter(job, LoraConfig(rank=2, targets=["no_proj"])).settings)


def test_layers_with_other_weight_layouts_are_rejected(tiny_model: Path, tmp_path: Path) -> None:
    """A Conv1D stores its weight transposed; square ones were merged into a checkpoint the wrong way."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for targets, reason in (
        (["c_proj"], "transformer.h.0.attn.c_proj is a Conv1D"),
        ([], "it has no torch.nn.Linear but its output layer"),
    ):
        job = with_adapter(training(tmp_path, (), "ppo_clip", "token_mean"), LoraConfig(rank=2, targets=targets))
        with pytest.raises(
            ConfigError, match=rf"^training.lora.targets = .*: {reason}; .* torch.nn.Linear; train all weights$"
        ):
            PolicyTrainer(job.settings)


def test_a_layer_whose_weight_is_read_directly_is_rejected(tmp_path: Path) -> None:
    """Jamba computes with `dt_proj.weight` directly, so an adapter would have no effect."""
    make_family_model("jamba", tmp_path / "model")
    job = with_adapter(training(tmp_path / "model", (9, 7), "ppo_clip", "token_mean"))
    with pytest.raises(ConfigError, match=r"^training.lora.targets: .* reads model.layers.0.mamba.dt_proj.\w+ itself"):
        PolicyTrainer(job.settings)
    chosen = replace(job.settings.training, lora=LoraConfig(rank=2, targets=["in_proj", "q_proj"]))
    trainer = PolicyTrainer(replace(job.settings, training=chosen))
    assert trainer.step(0, job.batches[0])["grad_norm"] > 0


@pytest.mark.parametrize(
    ("target", "problem"), [("embed_tokens", "model.embed_tokens is a Embedding"), ("lm_head", "is the output layer")]
)
def test_embeddings_and_the_output_layer_are_rejected_as_targets(target: str, problem: str, tiny_model: Path) -> None:
    """Adapters of embeddings have other names, which no engine loads. Engines compute only some tokens' logits."""
    job = with_adapter(training(tiny_model, (), "ppo_clip", "token_mean"), LoraConfig(rank=2, targets=[target]))
    with pytest.raises(ConfigError, match=rf"^training.lora.targets = .*: .*{problem}; .*Linear; name .*q_proj"):
        PolicyTrainer(job.settings)


@pytest.mark.parametrize(
    ("family", "left_out", "last_parts"),
    [
        ("mixtral", "experts", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("qwen2_moe", "gate_up_proj", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
                                       "shared_expert_gate"}),
        ("llama4_text", "router", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("nemotron_h", "conv1d", {"in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"}),
        ("falcon_h1", "conv1d", {"in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj",
                                 "down_proj"}),
    ],
)  # fmt: skip
def test_default_targets_are_linear_layers_in_every_family(
    family: str, left_out: str, last_parts: set[str], tmp_path: Path
) -> None:
    """Experts and routers get no adapters by default and are rejected by name; the projections of a Mamba layer get
    them."""
    make_family_model(family, tmp_path / "model")
    job = with_adapter(training(tmp_path / "model", (9, 7), "ppo_clip", "token_mean"))
    trainer = PolicyTrainer(job.settings)
    for step, rows in enumerate(job.batches):
        trainer.step(step, rows)
    layers = adapters.parse_layers(weight_folder.shapes(published(trainer)), "it")
    assert {layer.module.rpartition(".")[2] for layer in layers} == last_parts
    trainer.apply_to_weights(lambda weights: weight_file.write(tmp_path / "weights", weights))
    settings = model_settings(tmp_path / "model") | {"lora": LORA, "num_served_versions": 2}
    with closing(TransformersEngine(TransformersSettings(**settings), InstanceId("i"))) as engine:
        before = engine.score([PROBE])[0].logprobs
        engine.load(PolicyVersion(1), tmp_path / "weights")
        np.testing.assert_allclose(engine.score([PROBE])[0].logprobs, trainer.logprobs(PROBE), atol=1e-5)
        assert np.abs(np.subtract(before, trainer.logprobs(PROBE))).max() > 1e-3
    chosen = replace(job.settings.training, lora=LoraConfig(rank=2, targets=[left_out]))
    with pytest.raises(ConfigError, match=rf"^training.lora.targets = \['{left_out}'\]: .*{left_out}.*; name layers"):
        PolicyTrainer(replace(job.settings, training=chosen))


def test_tensors_that_are_not_an_adapter_are_rejected() -> None:
    down, up = "base_model.model.x.lora_A.weight", "base_model.model.x.lora_B.weight"
    assert adapters.parse_layers({down: (2, 8), up: (6, 2)}, "f") == [AdapterLayer("x", rank=2, inputs=8, outputs=6)]
    for shapes, message in (
        ({"x.weight": (2, 2)}, r"f: x.weight \(2, 2\) is not part of an adapter"),
        ({down: (2, 8)}, r"f: the adapter of x is incomplete: A is \(2, 8\), B is None"),
        ({down: (2, 8), up: (6, 3)}, r"f: the adapter of x is incomplete"),
    ):
        with pytest.raises(StoreError, match=message):
            adapters.parse_layers(shapes, "f")


class Router(torch.nn.Linear):  # type: ignore[misc]
    """A linear layer that returns more than its product, as Llama 4 has."""

    def forward(self, input: torch.Tensor) -> Any:
        return super().forward(input), input


def test_only_layers_that_can_be_adapted_have_an_adapter_served() -> None:
    tensors = {
        "base_model.model.x.lora_A.weight": torch.ones(2, 8), "base_model.model.x.lora_B.weight": torch.ones(8, 2),
    }  # fmt: skip
    model: Any = torch.nn.ModuleDict({"x": torch.nn.Linear(8, 8)})
    model.device = torch.device("cpu")
    served = ServedAdapters(model, LoraConfig(rank=2))
    for version in (PolicyVersion(1), PolicyVersion(2)):
        served.add(version, *served.prepare(tensors, Path("f")))
    model["x"] = Router(8, 8)
    with pytest.raises(StoreError, match=r"^f: the model's x is not a linear layer and cannot have an adapter$"):
        ServedAdapters(model, LoraConfig(rank=2)).prepare(tensors, Path("f"))
