"""Direct preference optimization: the choice of pairs, and the loss and gradient of pairs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from staleflow.tasks.training.loss import Dpo
from staleflow.tasks.training.microbatches import Row, minibatches
from staleflow.tasks.training.objective import select_pairs
from staleflow.tasks.training.trainer_settings import KlConfig
from tests.tasks.test_env_tokens import flat_gradient
from tests.tasks.test_env_tokens import rows as rows_of_many_turns
from tests.tasks.test_numerics import groups, rows, trainer
from tests.tasks.test_objective import moved_model

BETA = 0.7


def sequence_logprob(model: Any, row: Row) -> torch.Tensor:
    """Return the logprob of the sampled tokens by a pass over the row alone."""
    ids = torch.from_numpy(np.concatenate([row.prompt, row.response]).astype(np.int64))
    logprobs = model(input_ids=ids[None]).logits[0, len(row.prompt) - 1 : -1].log_softmax(-1)
    own = logprobs.gather(1, ids[len(row.prompt) :, None])[:, 0]
    return own[torch.from_numpy(row.sampled)].sum()


def loss_by_hand(policy: Any, reference: Any, pairs: list[tuple[Row, Row]]) -> torch.Tensor:
    losses = []
    for best, worst in pairs:
        s_best, s_worst = (sequence_logprob(policy, row) for row in (best, worst))
        with torch.no_grad():
            r_best, r_worst = (sequence_logprob(reference, row) for row in (best, worst))
        losses.append(-torch.nn.functional.logsigmoid(BETA * ((s_best - r_best) - (s_worst - r_worst))))
    return torch.stack(losses).mean()


def test_a_pair_is_the_best_and_the_worst_response_of_a_group() -> None:
    """No pair if all responses have equal rewards, and none with a failed reward. Two groups of one prompt are two."""
    group = [replace(row, prompt=rows(1)[0].prompt) for row in groups(rows(12), 4)]
    advantages = (0.1, -0.5, 2.0, 9.0, 0.0, 0.0, 0.0, 0.0, -1.0, -2.0, -1.0, -2.0)
    data = [replace(row, advantage=a, trained=a != 9.0) for row, a in zip(group, advantages, strict=True)]
    pairs = select_pairs(data)
    assert [next(i for i, row in enumerate(data) if row is item) for item in pairs] == [2, 1, 8, 9]


def test_a_minibatch_has_whole_pairs() -> None:
    parts = minibatches(10, 3, np.random.default_rng(0), 2)
    assert sorted(np.concatenate(parts).tolist()) == list(range(10))
    for part in parts:
        assert len(part) and part[::2].tolist() == [i - 1 for i in part[1::2].tolist()]
        assert not (part[::2] % 2).any()


@pytest.mark.parametrize("budget", [1, 10_000])
@pytest.mark.parametrize("turns", ["one", "many"])
def test_dpo_loss_and_gradient_match_a_naive_implementation(
    budget: int, turns: str, tiny_model: Path, tmp_path: Path
) -> None:
    """Far from the reference, where a wrong weight would show."""
    data = groups(rows(8), 2) if turns == "one" else groups(rows_of_many_turns()[:4], 2)
    data = [replace(row, advantage=float(i % 2)) for i, row in enumerate(data)]
    reference = moved_model(tiny_model, tmp_path)
    policy_trainer = trainer(
        tiny_model, loss=Dpo(beta=BETA), kl=KlConfig(reference=reference), microbatch_tokens=budget
    )
    metrics = policy_trainer.step(0, data)
    model, other = trainer(tiny_model).model, trainer(reference).model
    loss = loss_by_hand(model, other, list(zip(data[1::2], data[::2], strict=True)))
    loss.backward()
    assert abs(float(loss.detach()) - math.log(2)) > 0.05
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    torch.testing.assert_close(flat_gradient(policy_trainer.model), flat_gradient(model), rtol=2e-3, atol=2e-6)


def test_each_update_weighs_its_pairs_by_the_current_weights(tiny_model: Path) -> None:
    """One pair trained twice in a step gives the result of two steps."""
    data = [replace(row, advantage=float(i)) for i, row in enumerate(groups(rows(2), 2))]
    whole = trainer(tiny_model, loss=Dpo(beta=BETA), epochs=2, learning_rate=1e-2)
    parts = trainer(tiny_model, loss=Dpo(beta=BETA), learning_rate=1e-2)
    loss = whole.step(0, data)["loss"]
    losses = [parts.step(step, data)["loss"] for step in range(2)]
    assert losses[0] == pytest.approx(math.log(2), rel=1e-6), "the policy is the reference"
    assert losses[1] < losses[0] - 0.01
    assert loss == pytest.approx(np.mean(losses), rel=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True))


def test_a_step_without_pairs_changes_nothing(tiny_model: Path) -> None:
    policy_trainer = trainer(tiny_model, loss=Dpo())
    before = [p.clone() for p in policy_trainer.model.parameters()]
    metrics = policy_trainer.step(0, groups(rows(5), 1))
    assert (metrics["loss"], metrics["grad_norm"], metrics["tokens_trained"]) == (0, 0, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, policy_trainer.model.parameters(), strict=True))
