"""Supervised fine-tuning before RL and in its steps: its examples and its effect on the policy."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from staleflow.pipeline.config import actor_settings, loading
from staleflow.pipeline.config.model_facts import inspect_model
from staleflow.stores.errors import ConfigError
from staleflow.tasks.engines.adapters import LoraConfig
from staleflow.tasks.rendering.chat_tokenizer import ChatTokenizer, load_chat_tokenizer
from staleflow.tasks.rendering.task_source import Message
from staleflow.tasks.sources.examples import Examples
from staleflow.tasks.sources.prompts import TokenizedPrompts
from staleflow.tasks.training.loss import LOSSES, DecoupledPpo, Dpo, Sft
from staleflow.tasks.training.microbatches import Row
from staleflow.tasks.training.trainer_settings import SftConfig
from tests.support.entries import entry
from tests.tasks.chat_models import MODELS, chat_tokenizer
from tests.tasks.test_env_tokens import MAX_LENGTH, flat_gradient, slow_gradient
from tests.tasks.test_env_tokens import rows as agent_rows
from tests.tasks.test_numerics import rows, trainer

ANSWERS = ("7+8=15;so15.", "so3.", "1+1=2;2-1=1;so1.")


def job(folder: Path, model: Path, *overrides: str) -> Any:
    """A job whose examples are the rows of a file with more rows than prompts."""
    examples = [{"prompt": f"{i}+1", "answer": answer} for i, answer in enumerate(ANSWERS)]
    (folder / "examples.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in examples))
    (folder / "prompts.jsonl").write_text('{"prompt": "2+2", "answer": "4"}\n{"prompt": "2+1", "answer": "3"}\n')
    (folder / "job.toml").write_text(f'model.path = "{model}"\n')
    return loading.load(
        folder / "job.toml",
        (
            f"task.source=jsonl:{folder}/prompts.jsonl", f"training.sft.source=jsonl:{folder}/examples.jsonl",
            "training.sft.steps=2", "training.sft.examples_per_step=2", "rollout.max_new_tokens=16",
            "task.eval_prompts=1", *overrides,
        ),
    )  # fmt: skip


def test_an_example_is_a_prompt_and_its_answer_with_an_end_token(tiny_model: Path, tmp_path: Path) -> None:
    """All rows except those with held-out prompts, then from the start again; answers are truncated like responses."""
    from transformers import AutoTokenizer

    settings = actor_settings.example_settings(job(tmp_path, tiny_model, "rollout.max_new_tokens=9"), 1)
    assert settings is not None
    examples = pickle.loads(pickle.dumps(settings)).build()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    seen = []
    for step in range(2):
        for row in examples.rows(step):
            seen.append((tokenizer.decode(row.prompt), tokenizer.decode(row.response)))
            assert row.sampled.all() and row.trained and len(row.behaviour) == len(row.response)
    first, last = ("0+1", "7+8=15;so1"), ("1+1", "so3.<eos>")
    assert seen == [first, last, first, last], "2+1 is held out"


def test_prompts_of_evaluation_sets_are_no_examples(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "hard.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    config = job(tmp_path, tiny_model, f"evaluation.sets.hard.source=jsonl:{tmp_path}/hard.jsonl")
    settings = actor_settings.example_settings(config, 1)
    assert settings is not None
    prompts = [load_chat_tokenizer(str(tiny_model)).text(row.prompt.tolist()) for row in settings.build().rows(0)]
    assert prompts == ["0+1", "0+1"], "2+1 is held out, 1+1 is evaluated"


def test_examples_omit_the_prompts_that_the_run_omits(tiny_model: Path, tmp_path: Path) -> None:
    """Those that do not fit into the model's context."""
    config = job(
        tmp_path, tiny_model, "training.sft.source=", "task.skip_long=true", "rollout.engine.kv_tokens=1000000"
    )
    context = inspect_model(config).context_length
    examples, server = (
        actor_settings.example_settings(config, 1),
        actor_settings.server_settings(config, tmp_path / "store", context),
    )
    assert examples is not None
    assert examples.prompts.max_prompt_tokens == server.prompts.max_prompt_tokens == context - 16


@pytest.mark.parametrize("name", MODELS)
def test_a_chat_example_has_the_tokens_of_the_conversation(name: str, tiny_model: Path, tmp_path: Path) -> None:
    """As in TRL: the tokens of the whole conversation from the start of the answer on."""
    config = job(tmp_path, tiny_model, "task.chat=true", "rollout.max_new_tokens=64")
    settings = actor_settings.example_settings(config, 0)
    assert settings is not None
    tokenizer = chat_tokenizer(name)
    row = Examples(settings, TokenizedPrompts(settings.prompts, ChatTokenizer(tokenizer))).rows(0)[0]
    messages = [Message("user", "0+1")._asdict(), Message("assistant", ANSWERS[0])._asdict()]
    whole = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]
    own = [*row.prompt.tolist(), *row.response.tolist()]
    assert own[-1] == tokenizer.eos_token_id
    if name == "qwen3":  # its template gives the last answer an empty thought
        thought = tokenizer("<think>\n\n</think>\n\n", add_special_tokens=False)["input_ids"]
        own = [*row.prompt.tolist(), *thought, *row.response.tolist()]
    assert own == whole[: len(own)]
    assert not tokenizer.decode(whole[len(own) :]).strip()


def test_examples_without_answers_are_rejected(tiny_model: Path, tmp_path: Path) -> None:
    """All rows are checked at the start."""
    config = job(tmp_path, tiny_model)
    settings = actor_settings.example_settings(config, 0)
    assert settings is not None
    for answer in ("2", '" "'):
        (tmp_path / "examples.jsonl").write_text(
            f'{{"prompt": "1+0", "answer": "1"}}\n{{"prompt": "1+1", "answer": {answer}}}\n'
        )
        with pytest.raises(ConfigError, match=r"sft\.source = .*, line 2: answer has no text to learn"):
            settings.build()


def test_an_example_that_is_too_long_is_replaced(tiny_model: Path, tmp_path: Path) -> None:
    config = job(tmp_path, tiny_model, "task.skip_long=true", "rollout.engine.kv_tokens=64")
    long_row, short_row = ({"prompt": prompt, "answer": "1"} for prompt in ("1+" * 40 + "1", "1+0"))
    (tmp_path / "examples.jsonl").write_text(f"{json.dumps(long_row)}\n{json.dumps(short_row)}\n")
    settings = actor_settings.example_settings(config, 0)
    assert settings is not None
    tokenizer = load_chat_tokenizer(str(tiny_model))
    assert [tokenizer.text(row.prompt.tolist()) for row in settings.build().rows(0)] == ["1+0", "1+0"]


class GivenExamples:
    """Settings that return existing examples, other ones for each step, which they record."""

    def __init__(self) -> None:
        self.steps = list[int]()

    def build(self) -> GivenExamples:
        return self

    def rows(self, step: int) -> Any:
        self.steps.append(step)
        return [replace(row, advantage=0.0, staleness=1) for row in rows(9 + step)]


def fine_tuned_trainer(tiny_model: Path, steps: int, **changes: Any) -> Any:
    sft = SftConfig(steps=steps, learning_rate=2e-3)
    return trainer(tiny_model, examples=GivenExamples(), **{"sft": sft, "loss": DecoupledPpo()} | changes)


def cross_entropy(model: Any, examples: Sequence[Row], temperature: float = 1.0) -> torch.Tensor:
    """Mean over all answer tokens, each example in a forward pass of its own."""
    losses = list[torch.Tensor]()
    for row in examples:
        ids = torch.from_numpy(np.concatenate([row.prompt, row.response]).astype(np.int64))
        logits = model(input_ids=ids[None]).logits[0, len(row.prompt) - 1 : -1] / temperature
        losses.append(torch.nn.functional.cross_entropy(logits, ids[len(row.prompt) :], reduction="none"))
    return torch.cat(losses).mean()


def test_sft_loss_is_the_cross_entropy_over_all_tokens_of_a_step(tiny_model: Path) -> None:
    """For any RL loss and any division into micro-batches."""
    policy_trainer = fine_tuned_trainer(tiny_model, 5, microbatch_tokens=30, minibatches=3, epochs=2, entropy_bonus=0.1)
    model = trainer(tiny_model).model
    metrics = policy_trainer.fine_tune(0)
    loss = cross_entropy(model, GivenExamples().rows(0))
    loss.backward()
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
    assert metrics["learning_rate"] == 2e-3
    torch.testing.assert_close(flat_gradient(policy_trainer.model), flat_gradient(model), rtol=1e-4, atol=1e-7)


def test_rl_after_sft_starts_with_its_settings_and_a_new_optimizer(tiny_model: Path) -> None:
    one, again = fine_tuned_trainer(tiny_model, 3), fine_tuned_trainer(tiny_model, 3)
    losses = [one.fine_tune(step)["loss"] for step in range(3)]
    assert losses[-1] < losses[0]
    assert not one.optimizer.state
    for step in range(3):
        again.fine_tune(step)
    for metrics in (one.step(0, rows(5)), again.step(0, rows(5))):
        assert metrics["learning_rate"] == 1e-3
        assert metrics["tokens_trained"] == sum(row.num_sampled for row in rows(5))
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), again.model.parameters(), strict=True))


# -- mixed into RL ---------------------------------------------------------------------------------------------------


def mixed_trainer(tiny_model: Path, weight: float = 0.3, steps: int = 0, **changes: Any) -> Any:
    sft = SftConfig(weight=weight, steps=steps)
    return trainer(tiny_model, examples=GivenExamples(), **{"sft": sft, "loss": DecoupledPpo()} | changes)


@pytest.mark.parametrize("budget", [1, 60, 10_000])
@pytest.mark.parametrize(("name", "aggregation"), [("decoupled_ppo", "token_mean"), ("ppo_clip", "sequence_mean")])
def test_gradient_of_a_mixed_step_is_that_of_both_losses(
    name: str, aggregation: str, budget: int, tiny_model: Path
) -> None:
    """The reference computes the RL loss in one pass per token."""
    loss = entry(LOSSES, name)
    changes: dict[str, Any] = {"loss": loss, "aggregation": aggregation, "microbatch_tokens": budget}
    changes["max_response_tokens"] = MAX_LENGTH
    policy_trainer = mixed_trainer(tiny_model, **changes)
    metrics = policy_trainer.step(4, agent_rows())
    model = trainer(tiny_model).model
    expected_gradient = slow_gradient(model, agent_rows(), loss, aggregation)
    model.zero_grad()
    expected_loss = cross_entropy(model, GivenExamples().rows(4))
    expected_loss.backward()
    expected_gradient += 0.3 * flat_gradient(model)
    difference = flat_gradient(policy_trainer.model) - expected_gradient
    assert difference.norm() < 1e-6 * expected_gradient.norm()
    assert metrics["sft_loss"] == pytest.approx(expected_loss.item(), rel=1e-6)
    assert metrics["sft_tokens"] == sum(len(row.response) for row in GivenExamples().rows(4))
    others = trainer(tiny_model, **changes).step(4, agent_rows())
    assert {k: v for k, v in metrics.items() if k in others and k != "grad_norm"} == {
        k: v for k, v in others.items() if k != "grad_norm"
    }, "metrics of the batch are without the examples"


def test_an_adapter_has_the_gradient_of_both_losses(tiny_model: Path) -> None:
    settings: dict[str, Any] = {"lora": LoraConfig(rank=4), "loss": DecoupledPpo()}
    trainers = mixed_trainer(tiny_model, **settings), trainer(tiny_model, **settings)
    for policy_trainer in trainers:
        policy_trainer.step(0, rows(5))
    fine_tuned = fine_tuned_trainer(tiny_model, 2, **settings)
    fine_tuned.fine_tune(0)
    mixed, rl, sft = (
        torch.cat([p.grad.flatten() for p in t.model.parameters() if p.requires_grad]) for t in (*trainers, fine_tuned)
    )
    assert (mixed - rl - 0.3 * sft).norm() < 1e-6 * mixed.norm()
    assert (mixed - rl).norm() > 0.01 * mixed.norm()


def test_examples_are_learnt_at_temperature_1_and_responses_at_that_of_sampling(tiny_model: Path) -> None:
    examples = GivenExamples().rows(0)
    with torch.no_grad():
        at_1, at_sampling = (cross_entropy(trainer(tiny_model).model, examples, t).item() for t in (1.0, 0.3))
    assert abs(at_1 - at_sampling) > 0.01
    assert fine_tuned_trainer(tiny_model, 5, temperature=0.3).fine_tune(0)["loss"] == pytest.approx(at_1, rel=1e-6)
    mixed = mixed_trainer(tiny_model, temperature=0.3, loss=Sft(), epochs=2, learning_rate=1e-12)
    metrics = mixed.step(0, examples)
    assert metrics["sft_loss"] == pytest.approx(at_1, rel=1e-6)
    assert metrics["loss"] == pytest.approx(at_sampling, rel=1e-6)


def test_minibatches_divide_the_examples_of_a_step(tiny_model: Path) -> None:
    """In each epoch, in their order; each update averages over the tokens of its own."""
    policy_trainer = mixed_trainer(tiny_model, learning_rate=1e-12, minibatches=2, epochs=2)
    metrics = policy_trainer.step(0, [replace(row, advantage=0.0) for row in rows(6)])
    examples, model = GivenExamples().rows(0), trainer(tiny_model).model
    losses = [cross_entropy(model, part) for part in (examples[:5], examples[5:])]
    assert metrics["sft_loss"] == pytest.approx(sum(loss.item() for loss in losses) / 2, rel=1e-6)
    losses[1].backward()
    difference = flat_gradient(policy_trainer.model) - 0.3 * flat_gradient(model)
    assert difference.norm() < 1e-6 * 0.3 * flat_gradient(model).norm(), "the gradient of the last update"


def test_mixed_steps_draw_the_examples_after_those_before_rl_also_after_a_resume(
    tiny_model: Path, tmp_path: Path
) -> None:
    first = mixed_trainer(tiny_model, steps=2)
    for step in range(2):
        first.fine_tune(step)
    first.step(0, rows(5))
    first.begin_save(tmp_path / "point")
    first.end_save()
    first.step(1, rows(6))
    assert first.settings.examples.steps == [0, 1, 2, 3]
    second = mixed_trainer(tiny_model, steps=2)
    second.load_state(tmp_path / "point")
    second.step(1, rows(6))
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))


def test_a_step_without_pairs_has_no_update(tiny_model: Path) -> None:
    policy_trainer = mixed_trainer(tiny_model, loss=Dpo())
    metrics = policy_trainer.step(0, [replace(row, advantage=1.0) for row in rows(3)])
    assert (metrics["grad_norm"], "sft_loss" in metrics) == (0.0, False)
    weights = (policy_trainer.model.parameters(), trainer(tiny_model).model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
