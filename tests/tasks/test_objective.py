"""Terms added to every loss (a KL penalty and an entropy bonus) against slow implementations."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from staleflow.stores.errors import ConfigError
from staleflow.stores.weights import weight_file
from staleflow.tasks.training.lm_head import target_logprobs
from staleflow.tasks.training.loss import LOSSES, DecoupledPpo, Kimi, Loss, PpoClip, TokenLoss, Tokens
from staleflow.tasks.training.microbatches import Row, microbatches
from staleflow.tasks.training.objective import Objective, kl_estimates, with_finite_logprobs
from staleflow.tasks.training.tiny_model import SYMBOLS, make_tokenizer
from staleflow.tasks.training.trainer_settings import KlConfig, TrainingConfig
from tests.support.entries import entry
from tests.tasks.test_env_tokens import flat_gradient
from tests.tasks.test_env_tokens import rows as rows_of_many_turns
from tests.tasks.test_losses import draw_tokens
from tests.tasks.test_numerics import rows, trainer

ESTIMATORS = ("k1", "k2", "k3")


def k(estimator: str, new: float, reference: float) -> float:
    d = new - reference
    k3 = math.exp(-d) - 1 + d
    return {"k1": d, "k2": d * d / 2, "k3": min(k3, 10.0) if d < 0 else k3}[estimator]


def objective(**kl: Any) -> Objective:
    return Objective.of(TrainingConfig(loss=PpoClip(), kl=KlConfig(**kl)))


def reference_of(tokens: Tokens, seed: int) -> torch.Tensor:
    noise = np.random.default_rng(seed).normal(0, 0.4, tokens.sampled.shape)
    return (tokens.logprobs.detach() + torch.tensor(noise)).masked_fill(~tokens.sampled, 0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_penalty_in_the_loss_is_added_per_token(estimator: str) -> None:
    tokens = draw_tokens(1)
    reference = reference_of(tokens, 2)
    with_penalty = objective(coefficient=0.3, estimator=estimator)
    loss = with_penalty.token_loss(tokens, reference, None).loss
    alone = with_penalty.loss.token_loss(tokens).loss
    (loss - alone).masked_fill(~tokens.sampled, 0).sum().backward()
    assert tokens.logprobs.grad is not None
    for i, t in np.argwhere(tokens.sampled.numpy()):
        new, ref = float(tokens.logprobs.detach()[i, t]), float(reference[i, t])
        assert float((loss - alone).detach()[i, t]) == pytest.approx(0.3 * k(estimator, new, ref), abs=1e-12)
        slope = (k(estimator, new + 1e-6, ref) - k(estimator, new - 1e-6, ref)) / 2e-6
        assert float(tokens.logprobs.grad[i, t]) == pytest.approx(0.3 * slope, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("name", ["ppo_clip", "decoupled_ppo"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_penalty_in_the_reward_is_charged_to_the_token_and_those_before_it(estimator: str, name: str) -> None:
    """The penalty is computed under the old policy of the loss and has no gradient."""
    tokens = draw_tokens(3)
    reference = reference_of(tokens, 4)
    kl = KlConfig(coefficient=0.3, estimator=estimator, place="reward")
    paid = Objective.of(TrainingConfig(loss=entry(LOSSES, name), kl=kl))
    old = tokens.proximal if name == "decoupled_ppo" else tokens.behaviour
    expected = torch.zeros(tokens.sampled.shape, dtype=torch.float64)
    for i, t in np.argwhere(tokens.sampled.numpy()):
        later = [u for u in range(t, tokens.sampled.shape[1]) if tokens.sampled[i, u]]
        cost = sum(k(estimator, float(old[i, u]), float(reference[i, u])) for u in later)
        expected[i, t] = float(tokens.advantage[i]) - 0.3 * cost
    whole = paid.token_loss(tokens, reference, None)
    alone = paid.loss.token_loss(replace(tokens, advantage=expected))
    kept = tokens.sampled
    torch.testing.assert_close(whole.loss[kept], alone.loss[kept], rtol=1e-9, atol=1e-12)
    assert torch.equal(whole.clipped[kept], alone.clipped[kept])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_extreme_kl_estimates_have_gradients_toward_the_reference(estimator: str) -> None:
    """The k3 estimator grows without limit far below the reference and is truncated there."""
    logprobs = torch.tensor([[-1.0, -200.0, -1.0]], requires_grad=True)
    result = kl_estimates(estimator, logprobs, torch.tensor([[-200.0, -1.0, -1e9]]))
    assert result.isfinite().all()
    (gradient,) = torch.autograd.grad(result.sum(), logprobs)
    assert gradient[0, 0] > 0
    if estimator != "k3":
        assert gradient[0, 1] != 0
    assert gradient.isfinite().all()


def test_kl_estimate_far_below_the_reference_is_at_most_ten() -> None:
    """One token at -18 nats gave a penalty of 3e6; verl, ROLL and slime also limit it to 10."""
    result = kl_estimates("k3", torch.tensor([[-18.0, -3.0, -30.0]]), torch.tensor([[-0.5, -1.0, -2.0]]))
    assert result.tolist() == [[10.0, pytest.approx(math.exp(2) - 3), 10.0]]


def test_a_square_penalty_bounds_an_extreme_policy() -> None:
    """With tau = 0.1 and an advantage of -3.75 the policy stops at 37 nats."""
    logprobs = torch.tensor([[-30.0, -36.0, -40.0]], requires_grad=True)
    zeros = torch.zeros(1, 3)
    tokens = Tokens(
        logprobs=logprobs, proximal=zeros, behaviour=zeros, advantage=torch.full((1, 1), -3.75),
        sampled=torch.ones(1, 3, dtype=torch.bool), lags=torch.zeros(1, 3, dtype=torch.int64),
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(Kimi(tau=0.1).token_loss(tokens).loss.sum(), logprobs)
    assert (gradient < 0).tolist() == [[False, False, True]]


def test_entropy_is_finite_for_logits_of_minus_infinity() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf]], requires_grad=True)
    result = target_logprobs(logits, torch.tensor([1]), with_entropy=True)
    expected = torch.distributions.Categorical(logits=logits.detach()[:, :2]).entropy()
    torch.testing.assert_close(result[:, 1], expected)
    (gradient,) = torch.autograd.grad(result.sum(), logits)
    assert gradient.isfinite().all()


def test_entropy_bonus_is_subtracted_with_its_gradient() -> None:
    tokens = draw_tokens(5)
    entropy = torch.rand(tokens.sampled.shape, dtype=torch.float64).requires_grad_()
    bonus = Objective.of(TrainingConfig(loss=PpoClip(), entropy_bonus=0.2))
    loss = bonus.token_loss(tokens, None, entropy).loss
    torch.testing.assert_close(loss, bonus.loss.token_loss(tokens).loss - 0.2 * entropy)
    loss.sum().backward()
    assert entropy.grad is not None
    assert torch.equal(entropy.grad, torch.full_like(entropy, -0.2))


def test_regularized_objectives_train_rows_with_zero_advantage() -> None:
    none, failed = (replace(r, advantage=0.0, trained=t) for r, t in zip(rows(2), (True, False), strict=True))
    plain = TrainingConfig(loss=PpoClip())
    assert not Objective.of(plain).trains(none)
    for training in (
        TrainingConfig(loss=Kimi()),
        TrainingConfig(loss=PpoClip(), entropy_bonus=0.1),
        TrainingConfig(kl=KlConfig(coefficient=0.1)),
    ):
        assert Objective.of(training).trains(none)
        assert not Objective.of(training).trains(failed)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo"])
@pytest.mark.parametrize("place", ["loss", "reward", "advantage"])
@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_only_a_penalty_in_the_reward_makes_a_loss_depend_on_other_tokens(
    name: str, place: str, coefficient: float
) -> None:
    loss = entry(LOSSES, name)
    kl = KlConfig(coefficient=coefficient, place=place)
    whole = Objective.of(TrainingConfig(loss=loss, kl=kl))
    assert whole.is_tokenwise is (loss.is_tokenwise and not (place == "reward" and coefficient > 0))
    assert whole.needs_reference is (coefficient > 0)


def test_tokens_with_a_non_finite_stored_logprob_become_unsampled() -> None:
    tokens = draw_tokens(6)
    place = tuple(map(int, np.argwhere(tokens.sampled.numpy())[1]))
    for stored in (math.inf, -math.inf, math.nan):
        behaviour = tokens.behaviour.clone()
        behaviour[place] = stored
        found = with_finite_logprobs(replace(tokens, behaviour=behaviour))
        for name in ("logprobs", "proximal", "behaviour", "sampled"):
            values, before = getattr(found, name), getattr(tokens, name)
            assert values[place] == 0
            changed = values != before
            changed[place] = False
            assert not changed.any(), name


class ZeroLoss(Loss):
    """A loss that is 0 everywhere."""

    needs_proximal = False

    def token_loss(self, tokens: Tokens) -> TokenLoss:
        return TokenLoss(loss=0 * tokens.logprobs, clipped=~tokens.sampled)


def trainer_of_additions(tiny_model: Path, data: Any, **changes: Any) -> Any:
    """Return a trainer after a step with a loss of 0, so that its gradient is that of the added terms."""
    policy_trainer = trainer(tiny_model, microbatch_tokens=40, **changes)
    policy_trainer.objective = replace(policy_trainer.objective, loss=ZeroLoss())
    policy_trainer.step(0, data)
    return policy_trainer


def gradient_by_hand(model: Any, data: Any, value: Any) -> torch.Tensor:
    """Return the gradient of the mean of `value` over all sampled tokens, with one forward pass per token. value:
    function of the log-probabilities over the vocabulary and the token id."""
    count = sum(row.num_sampled for row in data)
    model.zero_grad()
    for row in data:
        tokens = [*row.prompt.tolist(), *row.response.tolist()]
        for t in np.flatnonzero(row.sampled):
            before = torch.tensor([tokens[: len(row.prompt) + t]])
            (
                value(model(input_ids=before).logits[0, -1].log_softmax(-1), before, int(row.response[t])) / count
            ).backward()
    return flat_gradient(model)


def test_entropy_bonus_gradient_matches_per_token_passes(tiny_model: Path) -> None:
    data = rows_of_many_turns()
    one = trainer_of_additions(tiny_model, data, entropy_bonus=0.5)
    expected = gradient_by_hand(trainer(tiny_model).model, data, lambda every, *_: 0.5 * (every.exp() * every).sum())
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(flat_gradient(one.model), expected, rtol=1e-3, atol=2e-6)


def test_batch_entropy_matches_the_distributions_at_the_temperature(tiny_model: Path) -> None:
    (row,) = rows(1)
    policy_trainer = trainer(tiny_model, temperature=2.0)
    (batch,) = microbatches([row], [0], np.ones(1, np.float32), 1000)
    logprobs, entropy = policy_trainer.logprob_model._compute(batch, with_entropy=True).unbind(-1)
    torch.testing.assert_close(logprobs, policy_trainer.logprob_model.logprobs(batch))
    every = (
        policy_trainer.model(input_ids=torch.from_numpy(batch.input_ids)).logits[0, batch.response_start : -1].double()
        / 2.0
    )
    expected = torch.distributions.Categorical(logits=every).entropy()
    torch.testing.assert_close(entropy[0].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("reference", ["base", "other"])
def test_kl_penalty_gradient_matches_per_token_passes(reference: str, tiny_model: Path, tmp_path: Path) -> None:
    """The policy differs from its reference: the base weights or a checkpoint."""
    data = rows_of_many_turns()
    other_trainer = trainer(tiny_model, seed=3)
    other_trainer.step(0, data)
    if reference == "other":
        other_trainer.apply_to_weights(lambda weights: weight_file.write(tmp_path / "weights", weights))
        other_trainer.save(tmp_path / "reference", tmp_path / "weights")
    path = str(tmp_path / "reference") if reference == "other" else ""
    kl = KlConfig(coefficient=0.7, estimator="k2", reference=path)
    policy_trainer = trainer(tiny_model, kl=kl, microbatch_tokens=40)
    for model in (policy_trainer.model, copy := trainer(tiny_model).model):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.01)
    policy_trainer.objective = replace(policy_trainer.objective, loss=ZeroLoss())
    metrics = policy_trainer.step(0, data)
    base = other_trainer.model if reference == "other" else trainer(tiny_model).model

    def squared(every: torch.Tensor, before: torch.Tensor, token: int) -> torch.Tensor:
        with torch.no_grad():
            held = base(input_ids=before).logits[0, -1].log_softmax(-1)[token]
        return 0.7 * 0.5 * (every[token] - held) ** 2

    expected = gradient_by_hand(copy, data, squared)
    assert expected.abs().max() > 1e-5
    torch.testing.assert_close(flat_gradient(policy_trainer.model), expected, rtol=2e-3, atol=2e-6)
    assert metrics["kl_reference"] > 0


class RecordingLoss(ZeroLoss):
    """A loss that records its arguments."""

    def __init__(self) -> None:
        self.seen: list[Tokens] = []

    def token_loss(self, tokens: Tokens) -> TokenLoss:
        self.seen.append(tokens)
        return super().token_loss(tokens)


@pytest.mark.parametrize("budget", [1, 10_000])
def test_env_tokens_and_padding_pay_no_penalty(budget: int, tiny_model: Path) -> None:
    data = rows_of_many_turns()
    policy_trainer = trainer(tiny_model, kl=KlConfig(coefficient=0.5, place="reward"), microbatch_tokens=budget)
    loss = RecordingLoss()
    policy_trainer.objective = replace(policy_trainer.objective, loss=loss)
    held = policy_trainer.reference.row_logprobs(data, range(len(data)))
    policy_trainer.step(0, data)
    results = [row[kept].tolist() for t in loss.seen for row, kept in zip(t.advantage, t.sampled, strict=True)]
    expected = []
    for i, row in enumerate(data):
        paid = [
            k("k3", float(b), float(r)) for b, r in zip(row.behaviour[row.sampled], held[i][row.sampled], strict=True)
        ]
        expected.append([row.advantage - 0.5 * sum(paid[t:]) for t in range(len(paid))])
    assert sorted(map(len, results)) == sorted(map(len, expected))
    for e in expected:
        assert any(len(f) == len(e) and f == pytest.approx(e, rel=1e-4, abs=1e-5) for f in results)


def test_the_distillation_advantage_is_the_teacher_logprob_minus_the_student_logprob(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The difference is added to the advantage of the reward. Teacher logprobs come from plain passes over each row,
    which detects an offset by one token."""
    data = rows_of_many_turns()
    policy_trainer = trainer(tiny_model, kl=teacher_of(tiny_model, tmp_path, 0.5), microbatch_tokens=60)
    loss = RecordingLoss()
    policy_trainer.objective = replace(policy_trainer.objective, loss=loss)
    policy_trainer.step(0, data)
    results = [row[kept].tolist() for t in loss.seen for row, kept in zip(t.advantage, t.sampled, strict=True)]
    expected = []
    for row in data:
        ids = torch.from_numpy(np.concatenate([row.prompt, row.response]).astype(np.int64))
        with torch.no_grad():
            logits = policy_trainer.reference.model(input_ids=ids[None]).logits[0]
        teacher = [
            float(logits[len(row.prompt) + t - 1].log_softmax(-1)[int(token)]) for t, token in enumerate(row.response)
        ]
        pairs = [(q, float(p)) for q, p, s in zip(teacher, row.behaviour, row.sampled, strict=True) if s]
        expected.append([row.advantage + 0.5 * (q - p) for q, p in pairs])
    assert sorted(map(len, results)) == sorted(map(len, expected))
    for e in expected:
        assert any(len(f) == len(e) and f == pytest.approx(e, rel=1e-4, abs=1e-5) for f in results)


def test_distillation_from_the_policy_itself_changes_nothing(tiny_model: Path) -> None:
    """Not even by rounding: both logprobs come from the same pass."""
    data = [replace(r, advantage=0.0) for r in rows(6)]
    kl = KlConfig(coefficient=1.0, estimator="k1", place="advantage", reference=str(tiny_model))
    policy_trainer = trainer(tiny_model, kl=kl, loss=DecoupledPpo())
    before = [p.clone() for p in policy_trainer.model.parameters()]
    metrics = policy_trainer.step(0, data)
    assert (metrics["loss"], metrics["grad_norm"], metrics["kl_reference"]) == (0, 0, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, policy_trainer.model.parameters(), strict=True))


def test_distillation_lowers_the_distance_to_a_teacher(tiny_model: Path, tmp_path: Path) -> None:
    """The student samples new responses before each step; there is no reward."""
    kl = teacher_of(tiny_model, tmp_path, 1.0)
    policy_trainer = trainer(tiny_model, kl=kl, loss=DecoupledPpo(), learning_rate=3e-3)
    distances = []
    for step in range(12):
        data = sampled_rows(policy_trainer.model, 32, 12, seed=step)
        distances.append(policy_trainer.step(step, data)["kl_reference"])
    assert np.mean(distances[-3:]) < 0.5 * np.mean(distances[:3])


def teacher_of(tiny_model: Path, folder: Path, coefficient: float) -> KlConfig:
    """Return settings for distillation from a model that differs much from the tiny one."""
    reference = moved_model(tiny_model, folder)
    return KlConfig(coefficient=coefficient, estimator="k1", place="advantage", reference=reference)


def moved_model(tiny_model: Path, folder: Path) -> str:
    """Return the folder of a model that differs much from the tiny one."""
    other_trainer = trainer(tiny_model, seed=3, learning_rate=1e-2)
    for step in range(4):
        other_trainer.step(step, rows_of_many_turns())
    other_trainer.apply_to_weights(lambda weights: weight_file.write(folder / "weights", weights))
    other_trainer.save(folder / "moved", folder / "weights")
    return str(folder / "moved")


def sampled_rows(model: Any, count: int, length: int, seed: int) -> list[Row]:
    """Return responses of a model to one prompt, with its logprobs and advantage 0."""
    generator = torch.Generator().manual_seed(seed)
    ids, chosen = torch.full((count, 2), 5), list[torch.Tensor]()
    with torch.no_grad():
        for _ in range(length):
            logprobs = model(input_ids=ids).logits[:, -1].log_softmax(-1)
            token = torch.multinomial(logprobs.exp(), 1, generator=generator)
            chosen.append(logprobs.gather(1, token))
            ids = torch.cat([ids, token], 1)
    behaviour = torch.cat(chosen, 1).numpy()
    return [
        Row(
            prompt=row[:2].astype(np.int32), response=row[2:].astype(np.int32), behaviour=logprobs,
            sampled=np.ones(length, bool), advantage=0.0, staleness=0,
        )
        for row, logprobs in zip(ids.numpy(), behaviour, strict=True)
    ]  # fmt: skip


def test_a_policy_equal_to_its_reference_pays_no_penalty(tiny_model: Path) -> None:
    data = [replace(r, advantage=0.0) for r in rows(4)]
    policy_trainer = trainer(tiny_model, kl=KlConfig(coefficient=1.0), loss=PpoClip())
    before = [p.clone() for p in policy_trainer.reference.model.parameters()]
    metrics = policy_trainer.step(0, data)
    assert metrics["kl_reference"] == pytest.approx(0, abs=1e-9)
    assert metrics["grad_norm"] == pytest.approx(0, abs=1e-5)
    policy_trainer.step(1, [replace(r, advantage=1.0) for r in data])  # negative ones may all be clipped
    assert policy_trainer.step(2, data)["kl_reference"] > 1e-6
    assert all(torch.equal(a, b) for a, b in zip(before, policy_trainer.reference.model.parameters(), strict=True))


@pytest.mark.parametrize("difference", ["swapped tokens", "fewer rows"])
def test_a_reference_with_another_vocabulary_is_rejected(difference: str, tiny_model: Path, tmp_path: Path) -> None:
    """Also if the sizes are equal: token ids must have the same meaning. Unused embedding rows are accepted."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(tiny_model)
    config.vocab_size += -1 if difference == "fewer rows" else 64
    LlamaForCausalLM(config).save_pretrained(tmp_path / "other")
    symbols = [*SYMBOLS]
    make_tokenizer(symbols).save_pretrained(tmp_path / "other")
    kl = KlConfig(coefficient=0.1, reference=str(tmp_path / "other"))
    if difference == "fewer rows":
        with pytest.raises(ConfigError, match=r"its embeddings have .* rows, fewer than the policy's .*; name a model"):
            trainer(tiny_model, kl=kl)
        return
    trainer(tiny_model, kl=kl)
    symbols[4], symbols[5] = symbols[5], symbols[4]
    make_tokenizer(symbols).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"2 of the \d+ tokens of model.path .* the first is 4, '0'; name a model"):
        trainer(tiny_model, kl=kl)
