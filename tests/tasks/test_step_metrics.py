"""Metrics of a training step against their definitions over all rows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from staleflow.tasks.training.loss import Cispo, PpoClip, Tis, TokenLoss, Tokens
from staleflow.tasks.training.step_metrics import ENTROPY_CAP, RowSample, TokenSums
from tests.tasks.test_numerics import rows, trainer


def test_step_metrics_match_their_definitions() -> None:
    rng = np.random.default_rng(2)
    sums, every = TokenSums(), []
    for times in (1.0, 3.0):
        sampled = rng.random((4, 9)) < 0.7
        new, behaviour, old, reference = (np.where(sampled, rng.normal(-2, 0.5, (4, 9)), 0) for _ in range(4))
        clipped = (rng.random((4, 9)) < 0.5) | ~sampled
        ratio = rng.uniform(0.5, 1.5, (4, 9))
        tokens = Tokens(
            **{n: torch.tensor(v) for n, v in (("logprobs", new), ("proximal", old), ("behaviour", behaviour))},
            advantage=torch.ones(4, 1), sampled=torch.tensor(sampled), lags=torch.zeros(4, 9),
        )  # fmt: skip
        result = TokenLoss(loss=tokens.logprobs, clipped=torch.tensor(clipped), ratio=torch.tensor(ratio))
        sums.add(tokens, result, tokens.proximal, times)
        if times == 1:
            sums.add_loss(torch.tensor(2.5), tokens, torch.tensor(reference))
            d = (reference - new)[sampled]
            kl_reference, trained = (np.exp(d) - d - 1).mean(), sampled.sum()
        picked = (new[sampled], behaviour[sampled], old[sampled], clipped[sampled], ratio[sampled])
        every += [np.stack(picked, axis=1)] * int(times)
    new, behaviour, old, clipped, ratio = np.concatenate(every).T
    r = np.exp(new - behaviour)
    weight = np.minimum(r, ENTROPY_CAP)
    metrics = sums.metrics()
    assert metrics == pytest.approx(
        {
            "clip_share": clipped.mean(),
            "clip_share_low": (clipped * (ratio < 1)).mean(),
            "clip_share_high": (clipped * (ratio >= 1)).mean(),
            "ratio_mean": r.mean(),
            "ess": r.sum() ** 2 / (len(r) * (r**2).sum()),
            "entropy": -(weight * new).sum() / weight.sum(),
            "kl_old": (np.exp(new - old) - (new - old) - 1).mean(),
            "kl_behaviour": (r - np.log(r) - 1).mean(),
            "kl_reference": kl_reference,
            "tokens_trained": trained,
            "ess_stderr": 0.0,
            "entropy_stderr": 0.0,
            "kl_behaviour_stderr": 0.0,
        }
    )
    assert sums.loss == 2.5


def test_step_metrics_without_tokens_are_defined() -> None:
    metrics = TokenSums().metrics()
    assert metrics["ess"] == 1.0
    assert {v for name, v in metrics.items() if name != "ess"} == {0.0}


def test_the_entropy_estimate_matches_the_true_entropy() -> None:
    """Tokens are drawn from one policy and measured under another."""
    rng = np.random.default_rng(0)
    pi, behind = rng.dirichlet(np.ones(30)), rng.dirichlet(np.ones(30))
    behind = 0.7 * pi + 0.3 * behind
    drawn = rng.choice(30, (1, 200_000), p=behind)
    new, old = np.log(pi)[drawn], np.log(behind)[drawn]
    whole = torch.ones(new.shape, dtype=torch.bool)
    tokens = Tokens(
        logprobs=torch.tensor(new), proximal=torch.tensor(old), behaviour=torch.tensor(old),
        advantage=torch.ones(1, 1), sampled=whole, lags=whole.long(),
    )  # fmt: skip
    sums = TokenSums()
    sums.add(tokens, TokenLoss(loss=tokens.logprobs, clipped=~whole), tokens.proximal)
    assert sums.metrics()["entropy"] == pytest.approx(-(pi * np.log(pi)).sum(), rel=0.01)
    assert sums.metrics()["kl_behaviour"] == pytest.approx((behind * np.log(behind / pi)).sum(), rel=0.05)


def step_metrics_of(model: Path, data: list[Any], **changes: Any) -> dict[str, float]:
    metrics: dict[str, float] = trainer(model, **changes).step(0, data)
    return metrics


def test_step_metrics_cover_rows_without_an_advantage(tiny_model: Path) -> None:
    """Fresh rows are computed anyway; of the others, `measured_rows` are sampled."""
    data = [replace(r, advantage=r.advantage if i < 4 else 0.0) for i, r in enumerate(rows(12))]
    policy_trainer = trainer(tiny_model)
    with torch.no_grad():
        result = policy_trainer.logprob_model.row_logprobs(data, range(12))
    ratios = [np.exp((result[i] - data[i].behaviour).astype(np.float64)) for i in range(12)]
    whole, computed = np.concatenate(ratios), np.concatenate([*ratios[:4], *ratios[4::2]])
    loss = PpoClip()
    for count in (4, 100):
        every = step_metrics_of(tiny_model, data, loss=loss, measured_rows=count)
        assert every["ratio_mean"] == pytest.approx(whole.mean(), rel=1e-4)
        assert every["ess"] == pytest.approx(whole.sum() ** 2 / (len(whole) * (whole**2).sum()), rel=1e-4)
        assert every["ess_stderr"] == every["kl_behaviour_stderr"] == every["entropy_stderr"] == 0
    none = step_metrics_of(tiny_model, data, loss=loss, measured_rows=0)
    assert none["ratio_mean"] == pytest.approx(computed.mean(), rel=1e-4)
    assert none["ess"] == pytest.approx(computed.sum() ** 2 / (len(computed) * (computed**2).sum()), rel=1e-4)
    # Two of the four stale ones represent all four.
    few = step_metrics_of(tiny_model, data, loss=loss, measured_rows=2)
    expected = [
        (computed.sum() + 2 * (ratios[a].sum() + ratios[b].sum()))
        / (len(computed) + 2 * (len(ratios[a]) + len(ratios[b])))
        for a, b in itertools.combinations((5, 7, 9, 11), 2)
    ]
    assert min(abs(few["ratio_mean"] - item) for item in expected) < 1e-4
    assert few["ess_stderr"] > 0 and few["kl_behaviour_stderr"] > 0 and few["entropy_stderr"] > 0
    assert step_metrics_of(tiny_model, data, loss=loss, measured_rows=1) == few, "one alone has no standard error"
    assert {m["tokens_trained"] for m in (none, few)} == {sum(len(r.response) for r in data[:4])}


def test_each_step_measures_a_different_sample_of_rows(tiny_model: Path) -> None:
    """An evenly spaced sample was always the same member of each group."""
    data = [replace(r, advantage=0.0, staleness=1) for r in rows(12)]
    policy_trainer = trainer(tiny_model, measured_rows=3)
    results = [policy_trainer.step(step, data) for step in (0, 1, 2, 0)]
    assert len({m["kl_behaviour"] for m in results}) == 3
    assert results[0] == results[3]


def drawn_tokens(rng: np.random.Generator, count: int) -> Tokens:
    """Return tokens of rows of different lengths, each row at a different distance from the sampling policy."""
    sampled = np.arange(40) < rng.integers(3, 41, (count, 1))
    new = rng.normal(-2, 0.5, (count, 40))
    behaviour = new - rng.normal(0, 1, (count, 40)) * rng.uniform(0.2, 0.7, (count, 1))
    return Tokens(
        logprobs=torch.tensor(np.where(sampled, new, 0)), proximal=torch.tensor(np.where(sampled, new, 0)),
        behaviour=torch.tensor(np.where(sampled, behaviour, 0)), advantage=torch.zeros(count, 1),
        sampled=torch.tensor(sampled), lags=torch.zeros(count, 40),
    )  # fmt: skip


def add_tokens(sums: TokenSums, tokens: Tokens, rows: np.ndarray[Any, Any], times: float = 1.0) -> list[list[float]]:
    part = Tokens(**{f.name: getattr(tokens, f.name)[rows] for f in fields(tokens)})
    result = TokenLoss(loss=part.logprobs, clipped=~part.sampled)
    return sums.add(part, result, part.proximal, times).tolist()  # type: ignore[no-any-return]


def test_sampled_step_metrics_are_unbiased_with_correct_standard_errors() -> None:
    """40 rows are all measured, and 24 of 160 others are drawn many times."""
    rng = np.random.default_rng(7)
    tokens = drawn_tokens(rng, 200)
    whole = TokenSums()
    add_tokens(whole, tokens, np.arange(200))
    truth = whole.metrics()
    results = []
    for _ in range(400):
        sums = TokenSums()
        add_tokens(sums, tokens, np.arange(40))
        picked = 40 + rng.choice(160, 24, replace=False)
        sample = RowSample(rows=add_tokens(sums, tokens, picked, 160 / 24), population_size=160)
        results.append(sums.metrics(1, sample))
    for name in ("ess", "entropy", "kl_behaviour"):
        values, errors = (np.asarray([m[key] for m in results]) for key in (name, f"{name}_stderr"))
        assert abs(values.mean() - truth[name]) < 0.35 * values.std(), name
        assert 0.75 < np.sqrt((errors**2).mean()) / values.std() < 1.25, name


@pytest.mark.parametrize("epochs", [1, 3])
def test_tokens_trained_counts_each_token_once_across_epochs(tiny_model: Path, epochs: int) -> None:
    data = [replace(r, advantage=r.advantage if i < 4 else 0.0) for i, r in enumerate(rows(6))]
    result = step_metrics_of(tiny_model, data, epochs=epochs, minibatches=2)
    assert result["tokens_trained"] == sum(len(r.response) for r in data[:4])


@dataclass(frozen=True)
class AdvantageDivisionLoss:
    """A user loss that fails on untrained rows because it divides by the advantage."""

    whole: Any

    def token_loss(self, tokens: Tokens) -> TokenLoss:
        if not tokens.advantage.any():
            raise ZeroDivisionError("no advantage")
        loss: TokenLoss = self.whole.token_loss(tokens)
        return loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)


def test_a_loss_that_fails_on_untrained_rows_costs_only_their_metrics(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run continues, and the failure is logged once."""
    data = [replace(r, advantage=r.advantage if i < 4 else 0.0, staleness=1) for i, r in enumerate(rows(8))]
    expected = step_metrics_of(tiny_model, data, measured_rows=0)
    policy_trainer = trainer(tiny_model)
    policy_trainer.objective = replace(
        policy_trainer.objective, loss=AdvantageDivisionLoss(policy_trainer.objective.loss)
    )
    assert policy_trainer.step(0, data) == expected
    policy_trainer.step(1, data)
    assert [r.message for r in caplog.records] == [
        "AdvantageDivisionLoss fails on rows without a gradient, which are left out of the metrics: "
        "ZeroDivisionError: no advantage; with training.measured_rows = 0 it is not called for them"
    ]
    policy_trainer.objective = replace(policy_trainer.objective, loss=AdvantageDivisionLoss(None))
    with pytest.raises(AttributeError):
        policy_trainer.step(2, data)


def test_measured_rows_do_not_change_the_weights(tiny_model: Path) -> None:
    data = [replace(r, advantage=0.0 if i % 2 else r.advantage) for i, r in enumerate(rows(10))]
    trained = []
    for count in (0, 3, 100):
        policy_trainer = trainer(tiny_model, measured_rows=count, minibatches=2)
        policy_trainer.step(0, data)
        trained.append(torch.cat([p.detach().flatten() for p in policy_trainer.model.parameters()]))
    assert torch.equal(trained[0], trained[1])
    assert torch.equal(trained[0], trained[2])


def test_clip_share_is_split_by_side(tiny_model: Path) -> None:
    loss = Cispo(clip_low=0.01, clip_high=0.01)
    data = rows(12)
    near = trainer(tiny_model).logprob_model.row_logprobs(data, range(12))
    data = [replace(r, behaviour=near[i] + np.float32(0.2 if i % 3 else -0.2)) for i, r in enumerate(data)]
    result = step_metrics_of(tiny_model, data, loss=loss)
    low = sum(len(r.response) for i, r in enumerate(data) if i % 3)
    assert result["clip_share_low"] == pytest.approx(low / sum(len(r.response) for r in data))
    assert result["clip_share_high"] > 0.01
    assert result["clip_share"] == pytest.approx(result["clip_share_low"] + result["clip_share_high"])
    assert step_metrics_of(tiny_model, rows(12), loss=PpoClip(clip_low=1.0))["clip_share_low"] == 0


def test_dropped_updates_are_counted(tiny_model: Path) -> None:
    data = rows(6)
    assert step_metrics_of(tiny_model, data, minibatches=3)["updates_dropped"] == 0
    poison = replace(data[0], advantage=float("inf"))
    result = step_metrics_of(tiny_model, [poison, *data[1:]], minibatches=3, loss=Tis())
    assert result["updates_dropped"] == 1
    assert not np.isfinite(result["grad_norm"])


def test_fewer_rows_than_minibatches_give_the_mean_loss(tiny_model: Path) -> None:
    (row,) = rows(1)
    assert step_metrics_of(tiny_model, [row], minibatches=4)["loss"] == pytest.approx(
        step_metrics_of(tiny_model, [row])["loss"]
    )


def test_kl_to_the_old_policy_is_measured_on_later_minibatches(tiny_model: Path) -> None:
    data = [replace(r, advantage=r.advantage + 0.1) for r in rows(12)]
    assert step_metrics_of(tiny_model, data)["kl_old"] == pytest.approx(0, abs=1e-9)
    without = [replace(r, advantage=0.0) if i % 2 else r for i, r in enumerate(data)]
    assert step_metrics_of(tiny_model, without)["kl_old"] == pytest.approx(0, abs=1e-9)
    result = step_metrics_of(tiny_model, data, minibatches=3)
    assert 1e-9 < result["kl_old"] < result["kl_behaviour"]
