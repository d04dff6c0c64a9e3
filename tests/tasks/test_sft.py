"""Supervised fine-tuning before RL: its examples and its effect on the policy."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from staleflow.pipeline.config import actor_settings, loading
from staleflow.stores.errors import ConfigError
from staleflow.tasks.rendering.chat_tokenizer import ChatTokenizer
from staleflow.tasks.rendering.task_source import Message
from staleflow.tasks.sources.examples import Examples
from staleflow.tasks.sources.prompts import TokenizedPrompts
from staleflow.tasks.training.loss import DecoupledPpo
from staleflow.tasks.training.trainer_settings import SftConfig
from tests.tasks.chat_models import MODELS, chat_tokenizer
from tests.tasks.test_env_tokens import flat_gradient
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
    config = job(tmp_path, tiny_model)
    (tmp_path / "examples.jsonl").write_text('{"prompt": "1+1", "answer": 2}\n')
    settings = actor_settings.example_settings(config, 0)
    assert settings is not None
    with pytest.raises(
        ConfigError, match=r"sft\.source = .*: an example has no text as its answer: '1\+1'\.\.\.; name"
    ):
        settings.build().rows(0)


class GivenExamples:
    """Settings that return existing examples."""

    def build(self) -> GivenExamples:
        return self

    def rows(self, step: int) -> Any:
        return [replace(row, advantage=0.0) for row in rows(9 + step)]


def fine_tuned_trainer(tiny_model: Path, steps: int, **changes: Any) -> Any:
    sft = SftConfig(steps=steps, learning_rate=2e-3)
    return trainer(tiny_model, examples=GivenExamples(), **{"sft": sft, "loss": DecoupledPpo()} | changes)


def test_sft_loss_is_the_cross_entropy_over_all_tokens_of_a_step(tiny_model: Path) -> None:
    """For any RL loss and any division into micro-batches."""
    policy_trainer = fine_tuned_trainer(tiny_model, 5, microbatch_tokens=30, minibatches=3, epochs=2, entropy_bonus=0.1)
    model = trainer(tiny_model).model
    metrics = policy_trainer.fine_tune(0)
    losses, count = [], 0
    for row in GivenExamples().rows(0):
        ids = torch.from_numpy(np.concatenate([row.prompt, row.response]).astype(np.int64))
        logits = model(input_ids=ids[None]).logits[0, len(row.prompt) - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[len(row.prompt) :], reduction="sum"))
        count += len(row.response)
    loss = sum(losses) / count
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
