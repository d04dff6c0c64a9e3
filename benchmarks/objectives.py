"""Losses and gradients of objectives that need no reward, against TRL's own code on random batches.

    pip install --no-deps trl==1.16.0    # in an environment of its own
    python -m benchmarks.objectives

A model of two layers with random weights, in float32 on one thread, and rows of different lengths. TRL's functions are
called unmodified, with the settings that a table's line states. Of each batch, the difference of the losses relative to
TRL's, and the length of the difference of the gradients relative to that of TRL's gradient; exits with 1 if the former
is above 1e-6, for dpo alone above 2e-6, or the latter above 3e-6.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from staleflow.tasks.training.loss import Dpo, Kimi, Sft
from staleflow.tasks.training.microbatches import Row
from staleflow.tasks.training.policy import TrainerSettings
from staleflow.tasks.training.policy_trainer import PolicyTrainer
from staleflow.tasks.training.trainer_settings import KlConfig, SftConfig, TrainingConfig

LOSS_LIMIT, DPO_LOSS_LIMIT = 1e-6, 2e-6
"""TRL's DPO sums a response's logprobs in float32, and then subtracts those of the reference; this project sums the
differences in float64. With TRL's sums in float64, too, the losses differ by at most 1.3e-7. From the loss computed
wholly in float64, TRL's differs by at most 1.3e-6, this project's by 3.8e-7 (20 batches)."""
GRADIENT_LIMIT = 3e-6
"""In float32, gradients differ by 5e-7 between two divisions into micro-batches."""
VOCABULARY, LONGEST, ROWS = 512, 48, 12
IGNORED = -100
"""The label of a token without a loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A loss and its gradient by all parameters, one after another."""

    loss: float
    gradient: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """Folders of two models of one tokenizer."""

    policy: Path
    other: Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="3 batches, to see that it works")
    args = parser.parse_args()
    batches = 3 if args.quick else args.batches
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    differences: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        models = Models(policy=Path(folder, "policy"), other=Path(folder, "other"))
        for seed, path in enumerate((models.policy, models.other)):
            make_model(path, seed)
        for seed in range(batches):
            rows = random_rows(seed)
            for name, (ours, theirs) in {
                "sft: SFTTrainer, loss_type nll, 3 micro-batches of one step": fine_tuned(models, rows, Path(folder)),
                "dpo: DPOTrainer, loss_type sigmoid, beta 0.1": preferred(models, rows, Path(folder)),
                "dpo as above + 0.3 x sft as above": mixed(models, rows, Path(folder)),
                "distillation: IWOPDTrainer, iw_opd_gamma 0, temperature 1": distilled(models, rows),
            }.items():
                loss = abs(ours.loss - theirs.loss) / abs(theirs.loss)
                gradient = float((ours.gradient - theirs.gradient).norm() / theirs.gradient.norm())
                differences[name].append((loss, gradient))
    print(f"| objective and TRL's settings, {batches} batches | loss | gradient |\n|---|---|---|")
    exceeded = False
    for name, pairs in differences.items():
        loss, gradient = np.max(pairs, axis=0)
        print(f"| {name} | {loss:.1e} | {gradient:.1e} |")
        limits = DPO_LOSS_LIMIT if name.startswith("dpo: ") else LOSS_LIMIT, GRADIENT_LIMIT
        exceeded |= not np.all((loss, gradient) <= np.asarray(limits))  # nor NaN
    if exceeded:
        sys.exit(1)


def make_model(folder: Path, seed: int) -> None:
    """Write a Llama with random weights and a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from staleflow.tasks.training.tiny_model import make_tokenizer

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=1, pad_token_id=0, initializer_range=0.06,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    make_tokenizer(("<pad>", "<eos>", "<unk>", *"0123456789")).save_pretrained(folder)


def random_rows(seed: int) -> list[Row]:
    """Rows of pairs with one prompt each, some of whose tokens come from a tool."""
    rng = np.random.default_rng(seed)
    rows = []
    for group in range(ROWS // 2):
        prompt = rng.integers(3, VOCABULARY, int(rng.integers(4, 20))).astype(np.int32)
        for better in (True, False):
            length = int(rng.integers(2, LONGEST))
            rows.append(
                Row(
                    prompt=prompt,
                    response=rng.integers(3, VOCABULARY, length).astype(np.int32),
                    behaviour=rng.normal(-np.log(VOCABULARY), 0.5, length).astype(np.float32),
                    sampled=np.arange(length) % 7 != 5,
                    advantage=1.0 if better else -1.0,
                    staleness=1,
                    group=group,
                )
            )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Settings that return the same examples for each step."""

    examples: Sequence[Row]

    def build(self) -> Examples:
        return self

    def rows(self, step: int) -> Sequence[Row]:
        return self.examples


def our_result(models: Models, rows: Sequence[Row], **training: Any) -> Result:
    """The loss and the gradient of a step of this project's trainer. The rows are also its examples, if it has any."""
    settings = TrainerSettings(
        model=str(models.policy), dtype="float32", device="cpu", num_steps=1, temperature=1.0,
        max_response_tokens=LONGEST, seed=0, examples=Examples(examples=rows), training=TrainingConfig(
            learning_rate=1e-12, grad_clip=1e9, microbatch_tokens=200, measured_rows=0, **training
        ),
    )  # fmt: skip
    trainer = PolicyTrainer(settings)
    metrics = trainer.step(0, rows)
    loss = metrics["loss"] + settings.training.sft.weight * metrics.get("sft_loss", 0.0)
    return Result(loss=loss, gradient=gradient_of(trainer.model))


def gradient_of(model: Any) -> torch.Tensor:
    """The gradient of a model's parameters in one vector."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def padded(rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[N, L] token ids, attention mask and labels of rows, padded at the right."""
    longest = max(len(row.prompt) + len(row.response) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    attention, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
    for i, row in enumerate(rows):
        prompt, end = len(row.prompt), len(row.prompt) + len(row.response)
        ids[i, :end] = torch.from_numpy(np.concatenate([row.prompt, row.response]).astype(np.int64))
        attention[i, :end] = 1
        labels[i, prompt:end] = ids[i, prompt:end].where(torch.from_numpy(row.sampled), IGNORED)
    return ids, attention, labels


def load(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")


def distilled(models: Models, rows: list[Row]) -> tuple[Result, Result]:
    """On-policy distillation: the plain policy gradient with log q - log mu as each token's advantage."""
    from trl.experimental.iw_opd import IWOPDTrainer

    rows = [replace(row, advantage=0.0) for row in rows]
    kl = KlConfig(coefficient=1.0, estimator="k1", place="advantage", reference=str(models.other))
    ours = our_result(models, rows, loss=Kimi(tau=0.0), kl=kl)
    ids, attention, labels = padded(rows)
    student, teacher = load(models.policy), load(models.other)
    with torch.no_grad():
        of_teacher = teacher(input_ids=ids, attention_mask=attention).logits[:, :-1].log_softmax(-1)
    behaviour = torch.zeros(ids.shape)
    for i, row in enumerate(rows):
        behaviour[i, len(row.prompt) : len(row.prompt) + len(row.response)] = torch.from_numpy(row.behaviour)
    # What its loss reads of the trainer.
    metrics: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    settings = SimpleNamespace(temperature=1.0, iw_opd_gamma=0.0, iw_opd_epsilon=1e-8, model=student, _metrics=metrics)
    loss = IWOPDTrainer._compute_iw_opd_loss(
        settings,
        student_logits=student(input_ids=ids, attention_mask=attention).logits[:, :-1],
        completion_tokens=ids[:, 1:],
        labels=labels[:, 1:],
        teacher_actual_logprobs=of_teacher.gather(2, ids[:, 1:, None])[..., 0],
        rollout_logprobs=behaviour[:, 1:],
        num_items_in_batch=sum(row.num_sampled for row in rows),
    )
    loss.backward()
    return ours, Result(loss=float(loss.detach()), gradient=gradient_of(student))


def fine_tuned(models: Models, rows: list[Row], folder: Path) -> tuple[Result, Result]:
    """Supervised fine-tuning: cross-entropy over all tokens of a step."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    ours = our_result(models, rows, loss=Sft())
    ids, attention, labels = padded(rows)
    lengths = attention.sum(1).tolist()
    examples = {
        "input_ids": [line[:n].tolist() for line, n in zip(ids, lengths, strict=True)],
        "labels": [line[:n].tolist() for line, n in zip(labels, lengths, strict=True)],
    }
    config = SFTConfig(
        output_dir=str(folder / "sft"), per_device_train_batch_size=ROWS // 3, gradient_accumulation_steps=3,
        loss_type="nll", max_length=None, bf16=False, use_cpu=True, report_to=[], save_strategy="no",
        gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=load(models.policy), args=config, train_dataset=Dataset.from_dict(examples),
        processing_class=AutoTokenizer.from_pretrained(models.policy),
    )  # fmt: skip
    loss = 0.0
    batches = list(trainer.get_train_dataloader())
    count = sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)
    for batch in batches:
        part = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=count)
        part.backward()
        loss += float(part.detach())
    return ours, Result(loss=loss, gradient=gradient_of(trainer.model))


def preferred(models: Models, rows: list[Row], folder: Path) -> tuple[Result, Result]:
    """Direct preference optimization of a batch of pairs."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    ours = our_result(models, rows, loss=Dpo(), kl=KlConfig(reference=str(models.other)))
    ids, attention, labels = padded([*rows[::2], *rows[1::2]])  # all better ones first
    config = DPOConfig(
        output_dir=str(folder / "dpo"), loss_type=["sigmoid"], beta=0.1, bf16=False, use_cpu=True, report_to=[],
        save_strategy="no", gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = DPOTrainer(
        model=load(models.policy), ref_model=load(models.other), args=config,
        train_dataset=Dataset.from_list([{"prompt": "1", "chosen": "2", "rejected": "3"}]),
        processing_class=AutoTokenizer.from_pretrained(models.policy),
    )  # fmt: skip
    batch = {"input_ids": ids, "attention_mask": attention, "completion_mask": (labels != IGNORED).long()}
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return ours, Result(loss=float(loss.detach()), gradient=gradient_of(trainer.model))


def mixed(models: Models, rows: list[Row], folder: Path) -> tuple[Result, Result]:
    """Preference optimization with supervised fine-tuning mixed in."""
    sft = SftConfig(weight=0.3)
    ours = our_result(models, rows, loss=Dpo(), kl=KlConfig(reference=str(models.other)), sft=sft)
    (_, preference), (_, example) = preferred(models, rows, folder), fine_tuned(models, rows, folder)
    loss = preference.loss + sft.weight * example.loss
    return ours, Result(loss=loss, gradient=preference.gradient + sft.weight * example.gradient)


if __name__ == "__main__":
    main()
