"""Training on multi-turn trajectories: env tokens are part of the context and have no gradient."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from staleflow.stores.trajectories.records import batch_fingerprint
from staleflow.stores.trajectory import EnvSpan
from staleflow.tasks.settings.choice_names import AGGREGATION_NAMES
from staleflow.tasks.training.loss import LOSSES, Loss, TokenLoss, Tokens
from staleflow.tasks.training.microbatches import Row
from tests.stores.store_conformance import ended
from tests.support.entries import entry
from tests.tasks.test_numerics import trainer

TURNS = ("sssggs", "sgggss", "s", "sgsgsgs", "ssss")
"""Responses: s is a sampled token, g an env token."""
MAX_LENGTH = 20


def rows() -> list[Row]:
    rng = np.random.default_rng(3)
    return [
        Row(
            prompt=rng.integers(3, 20, 2 + i).astype(np.int32),
            response=rng.integers(3, 20, len(turns)).astype(np.int32),
            behaviour=np.where([t == "s" for t in turns], rng.normal(-2, 0.4, len(turns)), 0).astype(np.float32),
            sampled=np.asarray([t == "s" for t in turns]),
            advantage=float(rng.normal()),
            staleness=i % 2,
        )
        for i, turns in enumerate(TURNS)
    ]


def slow_gradient(model: Any, data: list[Row], loss: Loss, aggregation: str) -> torch.Tensor:
    """Compute the gradient with one forward pass per token; the loss gets the sampled tokens only."""
    lengths = [sum(row.sampled) for row in data]
    model.zero_grad()
    for row, length in zip(data, lengths, strict=True):
        tokens = [*row.prompt.tolist(), *row.response.tolist()]
        weight = {
            "token_mean": 1 / sum(lengths),
            "sequence_mean": 1 / (len(data) * length),
            "constant_length": 1 / (len(data) * MAX_LENGTH),
        }[aggregation]
        places = [t for t in range(len(row.response)) if row.sampled[t]]
        results = []
        for t in places:
            before = torch.tensor([tokens[: len(row.prompt) + t]])
            results.append(model(input_ids=before).logits[0, -1].log_softmax(-1)[int(row.response[t])])
        logprobs = torch.stack(results).reshape(1, -1)
        sampled = torch.ones(logprobs.shape, dtype=torch.bool)
        result = loss.token_loss(
            Tokens(
                logprobs=logprobs,
                proximal=logprobs.detach(),
                behaviour=torch.from_numpy(row.behaviour[places]).reshape(1, -1),
                advantage=torch.tensor([[row.advantage]]),
                sampled=sampled,
                lags=torch.full(logprobs.shape, row.staleness),
            )
        )
        (result.loss.sum() * weight).backward()
    return flat_gradient(model)


def flat_gradient(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("name", "aggregation"),
    [
        *((name, "token_mean") for name in LOSSES.names if name != "dpo"),  # which is of pairs
        *(("decoupled_ppo", name) for name in AGGREGATION_NAMES if name != "token_mean"),
    ],
)
def test_gradient_matches_one_pass_per_sampled_token(name: str, aggregation: str, tiny_model: Path) -> None:
    loss = entry(LOSSES, name)
    policy_trainer = trainer(
        tiny_model, loss=loss, aggregation=aggregation, max_response_tokens=MAX_LENGTH, microbatch_tokens=40
    )
    expected = slow_gradient(trainer(tiny_model).model, rows(), loss, aggregation)
    metrics = policy_trainer.step(0, rows())
    assert metrics["tokens_trained"] == sum(turns.count("s") for turns in TURNS)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(flat_gradient(policy_trainer.model), expected, rtol=1e-3, atol=2e-6)


def test_stored_values_at_env_tokens_change_nothing(tiny_model: Path) -> None:
    results = []
    for value in (0.0, -1e4, 1e4, np.inf, np.nan):
        policy_trainer = trainer(tiny_model, loss=entry(LOSSES, "ppo_clip"))
        data = [replace(r, behaviour=np.where(r.sampled, r.behaviour, np.float32(value))) for r in rows()]
        results.append((policy_trainer.step(0, data), flat_gradient(policy_trainer.model)))
    for metrics, gradient in results[1:]:
        assert metrics == results[0][0]
        assert torch.equal(gradient, results[0][1])


class Ratio(Loss):
    """A loss that is NaN where the behaviour logprob is 0."""

    needs_proximal = True

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def token_loss(self, tokens: Tokens) -> TokenLoss:
        self.seen += [tokens.logprobs.detach(), tokens.proximal, tokens.behaviour]
        return TokenLoss(
            loss=tokens.advantage * tokens.logprobs / tokens.behaviour, clipped=tokens.logprobs > tokens.behaviour
        )


def test_a_loss_gets_zeros_at_env_tokens_and_its_values_there_are_ignored(tiny_model: Path) -> None:
    policy_trainer = trainer(tiny_model)
    loss = Ratio()
    policy_trainer.objective = replace(policy_trainer.objective, loss=loss)
    data = [r for r in rows() if len(r.response) == 6]
    metrics = policy_trainer.step(0, data)
    assert np.isfinite(metrics["loss"])
    assert bool(flat_gradient(policy_trainer.model).isfinite().all())
    for seen in loss.seen:
        assert int((seen == 0).sum()) == seen.numel() - sum(r.num_sampled for r in data)


def test_the_batch_fingerprint_depends_on_the_env_token_positions() -> None:
    row = ended(np.random.default_rng(0), 1, 1)
    spans = list(row.trajectory.spans)
    at = next(i for i, span in enumerate(spans) if isinstance(span, EnvSpan))
    moved = replace(row.trajectory, spans=tuple(spans[:at] + spans[at + 1 :]))
    first = spans[0]
    as_given = [EnvSpan(role="tool", tokens=first.tokens), *spans[1:]]
    prints = {
        batch_fingerprint([(t, row.advantage)])
        for t in (row.trajectory, moved, replace(row.trajectory, spans=tuple(as_given)))
    }
    assert len(prints) == 3
