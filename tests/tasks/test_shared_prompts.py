"""Prompts shared by a group are computed once: equal logprobs with fewer tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from staleflow.tasks.settings.choice_names import AGGREGATION_NAMES
from staleflow.tasks.training import microbatch_split, shared_prompts
from staleflow.tasks.training.logprobs import LogprobModel
from staleflow.tasks.training.loss import LOSSES
from staleflow.tasks.training.microbatch_split import (
    GATHER_OVERHEAD_TOKENS,
    PASS_OVERHEAD_TOKENS,
    split_by_length,
    split_by_prompt,
)
from staleflow.tasks.training.microbatches import MicroBatch, Row
from staleflow.tasks.training.policy import TrainerSettings
from staleflow.tasks.training.rank import SINGLE_RANK
from staleflow.tasks.training.shared_prompts import PackedLayout, cost_tokens, indices_of_equal_keys, should_share
from staleflow.tasks.training.trainer_settings import TrainingConfig
from tests.support.entries import entry
from tests.support.rank_processes import run_ranks
from tests.tasks.test_packed_attention import model
from tests.tasks.test_ranks import Training, check_same, ragged_rows, train

SEPARATE = 2**40
"""A minimum of saved tokens that is never reached."""


def group(prompt: int, rests: Sequence[int], seed: int = 0) -> list[Row]:
    """Return responses to one prompt; some tokens are env tokens."""
    rng = np.random.default_rng((seed, prompt, *rests))
    shared = rng.integers(3, 20, prompt).astype(np.int32)

    def one(i: int, rest: int) -> Row:
        return Row(
            prompt=shared,
            response=rng.integers(3, 20, rest).astype(np.int32),
            behaviour=rng.normal(-3, 0.4, rest).astype(np.float32),
            sampled=(np.arange(rest) % 7 < 5) | (np.arange(rest) == 0),
            advantage=float(rng.normal()),
            staleness=i % 2,
        )

    return [one(i, rest) for i, rest in enumerate(rests)]


BATCHES = {
    "ragged groups": [*group(9, (1, 14, 3, 22, 8)), *group(17, (5, 4, 30)), *group(40, (2, 2))],
    "one response": [*group(12, (6,)), *group(30, (9,))],
    "a prompt of one token": [*group(1, (3, 5, 2, 8) * 6)],
    "one prompt begins another": [
        *group(20, (4, 6, 3)),
        *(replace(r, prompt=r.prompt[:18]) for r in group(20, (7, 5))),
    ],
    "after the prompt, longer than a mask is used for": [*group(20, (300, 270)), *group(300, (290, 5))],
    "nothing shared": list(ragged_rows(6, np.random.default_rng(3))),
}


def loss_of(part: MicroBatch, logprobs: torch.Tensor, entropy: torch.Tensor | None) -> torch.Tensor:
    """Return a loss with different weights for each row."""
    assert entropy is not None
    return (logprobs * torch.tensor([[1.0 + i % 3] for i in part.row_indices])).sum() + 0.1 * entropy.sum()


def gradients_and_logprobs(policy_model: Any, rows: Sequence[Row], budget: int) -> tuple[list[Any], list[int]]:
    """Return the gradients of a loss over all tokens, the logprobs of each row, and the tokens of each pass."""
    under = LogprobModel(model=policy_model, device="cpu", uses_bfloat16=False, temperature=0.7, token_budget=budget)
    assert under.packs_rows
    passes = list[int]()
    handle = policy_model.register_forward_pre_hook(
        lambda _, __, inputs: passes.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    weights = np.ones(len(rows), np.float32)
    policy_model.zero_grad()
    logprobs = dict[int, Any]()
    for batch in under.microbatches(rows, range(len(rows)), weights):
        given = under.backward(batch, loss_of, with_entropy=True, is_tokenwise=True)
        logprobs |= {i: given[k][torch.from_numpy(batch.mask[k] > 0)] for k, i in enumerate(batch.row_indices)}
    handle.remove()
    return [*(logprobs[i] for i in range(len(rows))), *(p.grad.clone() for p in policy_model.parameters())], passes


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("budget", [60, 10_000])
@pytest.mark.parametrize(
    ("kind", "config", "changes"),
    [
        ("LlamaForCausalLM", "LlamaConfig", {}),
        ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0}),
    ],
)
def test_rows_with_a_shared_prompt_have_the_logprobs_of_separate_rows(
    monkeypatch: pytest.MonkeyPatch, name: str, budget: int, kind: str, config: str, changes: dict[str, Any]
) -> None:
    """For rotary and absolute positions. A small budget splits groups over micro-batches."""
    rows = BATCHES[name]
    found, fewer = gradients_and_logprobs(model(kind, config, **changes), rows, budget)
    monkeypatch.setattr(shared_prompts, "MIN_SAVED_TOKENS", SEPARATE)
    expected, passes = gradients_and_logprobs(model(kind, config, **changes), rows, budget)
    for first, second in zip(found, expected, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6 * max(1.0, float(second.abs().max())))
    assert sum(passes) == sum(len(row.prompt) + len(row.response) for row in rows)
    if budget > 60 and name not in ("one response", "nothing shared"):
        assert sum(fewer) < sum(passes)


def test_a_model_with_padded_rows_does_not_share_prompts() -> None:
    """Its attention has a logit cap, which the packed attention does not support."""
    result = model("Gemma2ForCausalLM", "Gemma2Config", head_dim=8)
    under = LogprobModel(model=result, device="cpu", uses_bfloat16=False, temperature=1.0, token_budget=10_000)
    assert not under.packs_rows
    rows = group(20, (4, 9, 3))
    together = under.row_logprobs(rows, range(3))
    for i, row in enumerate(rows):
        np.testing.assert_allclose(under.row_logprobs([row], [0])[0], together[i], rtol=1e-5, atol=1e-6)


# -- a step of the trainer ----------------------------------------------------------------------------------------


def job(path: Path, aggregation: str, loss: str = "decoupled_ppo", **changes: Any) -> Training:
    config = TrainingConfig(
        microbatch_tokens=90, learning_rate=1e-5, loss=entry(LOSSES, loss), aggregation=aggregation, **changes
    )
    settings = TrainerSettings(
        model=str(path), dtype="float32", device="cpu", training=config, num_steps=2, temperature=1.0,
        max_response_tokens=40, seed=0,
    )  # fmt: skip
    rows = BATCHES["ragged groups"]
    return Training(settings, (tuple(rows), tuple(rows[3:] + group(33, (6, 2, 9)))))


@pytest.mark.parametrize("aggregation", AGGREGATION_NAMES)
def test_a_training_step_with_shared_prompts_equals_one_with_separate_rows(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path, aggregation: str
) -> None:
    """Also with several minibatches, which split groups, and with recomputed layers."""
    result = train(SINGLE_RANK, job(tiny_model, aggregation))
    again = train(SINGLE_RANK, job(tiny_model, aggregation))
    assert again.metrics == result.metrics
    assert all(np.array_equal(weights, result.weights[name]) for name, weights in again.weights.items())
    several = train(SINGLE_RANK, job(tiny_model, aggregation, minibatches=2, recompute_activations=True))
    monkeypatch.setattr(shared_prompts, "MIN_SAVED_TOKENS", SEPARATE)
    check_same(result, train(SINGLE_RANK, job(tiny_model, aggregation)))
    check_same(several, train(SINGLE_RANK, job(tiny_model, aggregation, minibatches=2)))


def test_two_ranks_train_as_one_rank(tiny_model: Path) -> None:
    one = job(tiny_model, "token_mean", "gspo")
    check_same(run_ranks(2, train, one)[0], train(SINGLE_RANK, one))


# -- how rows are divided -----------------------------------------------------------------------------------------

GROUPS = st.lists(st.tuples(st.integers(1, 60), st.lists(st.integers(1, 60), min_size=1, max_size=6)), max_size=8)


def flat(groups: Sequence[tuple[int, Sequence[int]]]) -> tuple[list[list[int]], list[int], list[int]]:
    """Return the rows of each prompt and the lengths of each row."""
    numbers = [number for number, (_, rests) in enumerate(groups) for _ in rests]
    prompts = [prompt for prompt, rests in groups for _ in rests]
    return indices_of_equal_keys(numbers), prompts, [rest for _, rests in groups for rest in rests]


def count(part: Sequence[int], same: Sequence[Sequence[int]], prompts: Sequence[int], rests: Sequence[int]) -> int:
    runs = [[i for i in run if i in part] for run in same]
    return sum(int(cost_tokens(len(run), prompts[run[0]], sum(rests[i] for i in run))) for run in runs if run)


@given(groups=GROUPS, ranks=st.integers(1, 4), budget=st.integers(1, 400))
def test_every_row_is_in_one_part_within_the_budget(
    groups: list[tuple[int, list[int]]], ranks: int, budget: int
) -> None:
    same, prompts, rests = flat(groups)
    batches = split_by_prompt(same, prompts, rests, ranks, budget)
    assert sorted(i for batch in batches for part in batch for i in part) == list(range(len(prompts)))
    assert batches == split_by_prompt(same, prompts, rests, ranks, budget)
    for batch in batches:
        assert len(batch) == ranks
        assert any(batch)
        for part in batch:
            padded = len(part) * max((prompts[i] + rests[i] for i in part), default=0)
            assert len(part) <= 1 or padded <= microbatch_split.MAX_PADDING_FACTOR * budget
            assert len(part) <= 1 or count(part, same, prompts, rests) <= budget


@given(
    groups=st.lists(st.tuples(st.integers(1, 60), st.lists(st.integers(1, 30), min_size=1, max_size=4)), max_size=3),
    budget=st.integers(1, 300),
)
def test_the_split_of_the_line_is_optimal(groups: list[tuple[int, list[int]]], budget: int) -> None:
    """Compared with all possible splits."""
    same, prompts, rests = flat(groups)
    if not same:
        return
    line = microbatch_split._OrderedRows.of(same, prompts, rests)

    def price(part: Sequence[int]) -> int | None:
        tokens = count(part, same, prompts, rests)
        padded = len(part) * max(prompts[i] + rests[i] for i in part)
        fits = tokens <= budget and padded <= microbatch_split.MAX_PADDING_FACTOR * budget
        return tokens + PASS_OVERHEAD_TOKENS if fits or len(part) == 1 else None

    prices: list[int] = []
    for cuts in itertools.product([False, True], repeat=len(line.order) - 1):
        ends = [i for i, cut in enumerate(cuts, start=1) if cut] + [len(line.order)]
        paid = [price(line.order[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]
        if None not in paid:
            prices.append(sum(p for p in paid if p is not None))
    assert sum(line.cost_of(part) + PASS_OVERHEAD_TOKENS for part in line.split(budget)) == min(prices)


@given(groups=GROUPS, ranks=st.integers(1, 4), budget=st.integers(100, 400))
@example(groups=[(20, [200, 1000, 200, 10]), (100, [1000, 1000, 200, 200])], ranks=3, budget=16384)
def test_a_split_by_prompt_takes_no_longer_than_one_by_length(
    groups: list[tuple[int, list[int]]], ranks: int, budget: int
) -> None:
    same, prompts, rests = flat(groups)
    overhead = PASS_OVERHEAD_TOKENS if ranks == 1 else GATHER_OVERHEAD_TOKENS

    def time_tokens(batches: list[tuple[tuple[int, ...], ...]]) -> int:
        return sum(max(count(part, same, prompts, rests) for part in batch) + overhead for batch in batches)

    by_length = split_by_length([p + r for p, r in zip(prompts, rests, strict=True)], ranks, budget)
    assert time_tokens(split_by_prompt(same, prompts, rests, ranks, budget)) <= time_tokens(by_length)


def test_groups_stay_together_when_that_takes_no_extra_part() -> None:
    same, prompts, rests = flat([(50, (10, 30, 20, 5))] * 4)
    batches = split_by_prompt(same, prompts, rests, num_ranks=1, token_budget=330)
    assert len(batches) == 2
    assert all(sum(set(run) <= set(part) for (part,) in batches) == 1 for run in same)


def test_two_ranks_get_equal_work() -> None:
    same, prompts, rests = flat([(50, (10, 30, 20, 5))] * 8)
    ((first, second),) = split_by_prompt(same, prompts, rests, num_ranks=2, token_budget=900)
    assert count(first, same, prompts, rests) == count(second, same, prompts, rests)


@given(groups=GROUPS)
def test_every_token_is_at_its_position_in_the_packed_layout(groups: list[tuple[int, list[int]]]) -> None:
    if not groups:
        return
    rows = [row for number, (prompt, rests) in enumerate(groups) for row in group(prompt, rests, number)]
    longest = max(len(row.prompt) + len(row.response) for row in rows)
    ids = np.stack([np.pad(whole := [*row.prompt, *row.response], (0, longest - len(whole))) for row in rows])
    ids = ids.astype(np.int64)
    lengths = np.asarray([len(row.prompt) + len(row.response) for row in rows])
    layout = PackedLayout.of(ids, lengths, np.asarray([len(row.prompt) for row in rows]))
    sequence = ids[layout.row, layout.position]
    positions = np.concatenate([block.positions for block in layout.blocks])
    np.testing.assert_array_equal(positions, layout.position)
    assert sum(block.num_tokens for block in layout.blocks) == len(sequence)
    for i, length in enumerate(lengths):
        columns = np.arange(length)
        places = layout.packed_indices(np.full(length, i), columns)
        np.testing.assert_array_equal(sequence[places], ids[i, :length])
        np.testing.assert_array_equal(positions[places], columns)


def test_short_prompts_are_not_shared() -> None:
    assert not should_share(2, 15, 10)
    assert should_share(2, 16, 10)
    assert not should_share(8, 4, 2000)
    assert should_share(np.asarray([1, 9]), 8, 0).tolist() == [False, True]
