"""Rows with context branches as sequences: each sampled token once, with its own context and the weight of its row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from staleflow.stores.context_branches import ContextBranch, context_positions
from staleflow.tasks.training.branch_sequences import BranchSequences
from staleflow.tasks.training.microbatches import BatchMessage, Row
from tests.tasks.branching import branching_row
from tests.tasks.test_numerics import trainer


def test_a_row_with_branches_becomes_one_sequence_per_branch() -> None:
    row = Row.of(branching_row())
    (packed,) = BatchMessage.of([branching_row()], 0).rows()
    assert packed.branches == row.branches == (ContextBranch(9, 0), ContextBranch(12, 5), ContextBranch(15, 7))
    sequences = BranchSequences.of([row])
    assert sequences.sequences_of_row == ((0, 1, 2, 3),)
    results = [
        (item.prompt.tolist(), item.response.tolist(), item.sampled.astype(int).tolist()) for item in sequences.rows
    ]
    assert results == [
        ([0, 1, 2], [3, 4, 5, 6, 7, 8], [0, 0, 0, 0, 1, 1]),
        ([9], [10, 11], [1, 1]),
        ([0, 1, 2], [3, 4, 12, 13, 14], [0, 0, 0, 1, 1]),
        ([0, 1, 2], [3, 4, 5, 6, 15, 16, 17], [1, 1, 0, 0, 0, 1, 1]),
    ]
    assert sum(item.num_sampled for item in sequences.rows) == row.num_sampled == 10
    for item in sequences.rows:
        assert item.advantage == row.advantage
        np.testing.assert_allclose(item.behaviour[item.sampled], -item.response[item.sampled] / 100, rtol=1e-6)
    values = {i: one.response.astype(np.float32) for i, one in enumerate(sequences.rows)}
    expected = np.where(row.sampled, row.response, 0)
    assert sequences.merge_by_row([row], values)[0].tolist() == expected.tolist()


def test_rows_without_branches_are_unchanged() -> None:
    plain = replace(Row.of(branching_row()), branches=())
    sequences = BranchSequences.of([plain, Row.of(branching_row()), plain])
    assert sequences.rows[0] is sequences.rows[-1] is plain
    assert sequences.sequences_of_row == ((0,), (1, 2, 3, 4), (5,))
    assert sequences.select([2, 1]) == ([5, 1, 2, 3, 4], [0, 1, 1, 1, 1])
    assert sequences.merge_by_row([plain] * 3, {0: plain.behaviour})[0] is plain.behaviour


def test_a_row_without_sampled_tokens_is_unchanged() -> None:
    row = Row.of(branching_row())
    nothing = replace(row, sampled=np.zeros(len(row.response), bool))
    (one,) = BranchSequences.of([nothing]).rows
    assert one.response.tolist() == row.response.tolist()


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_branch_gradients_match_one_pass_per_token(tiny_model: Path, aggregation: str) -> None:
    """Compared with one forward pass per token. The weight of a row does not depend on its branches."""
    policy_trainer = trainer(tiny_model, aggregation=aggregation)
    row = replace(Row.of(branching_row()), advantage=1.0)
    rows = [row, replace(row, branches=(), advantage=-0.5)]
    ids = np.concatenate([row.prompt, row.response]).astype(np.int64)
    total, data = torch.zeros(()), []
    for now in rows:
        share = 1 / 20 if aggregation == "token_mean" else 1 / (2 * now.num_sampled)
        behaviour = np.zeros(len(now.response), np.float32)
        for at in np.flatnonzero(now.sampled).tolist():
            place = at + len(now.prompt)
            context = ids[context_positions([branch for branch in now.branches if branch.start <= place], place)]
            logits = policy_trainer.model(input_ids=torch.from_numpy(context[None])).logits[0, -1].float()
            logprob = logits.log_softmax(-1)[int(ids[place])]
            behaviour[at] = logprob.item()  # so that ratios are 1
            total = total - share * now.advantage * logprob
        data.append(replace(now, behaviour=behaviour))
    total.backward()
    expected = {name: p.grad.clone() for name, p in policy_trainer.model.named_parameters() if p.grad is not None}
    metrics = policy_trainer.step(0, data)
    assert metrics["mismatch_max"] < 1e-4
    for name, parameter in policy_trainer.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5, rtol=1e-3)
