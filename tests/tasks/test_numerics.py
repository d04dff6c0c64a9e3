"""Advantages, losses and packing against naive implementations."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from staleflow.stores.weights.weight_hash import sorted_tensors
from staleflow.tasks.settings.choice_names import AGGREGATION_NAMES
from staleflow.tasks.settings.knobs import values
from staleflow.tasks.training.advantage import ADVANTAGES
from staleflow.tasks.training.loss import LOSSES, DecoupledPpo
from staleflow.tasks.training.microbatches import Row, microbatches, minibatches, token_weights
from staleflow.tasks.training.rank_group import RankGroup
from staleflow.tasks.training.trainer_settings import KlConfig, TrainingConfig
from tests.support.entries import entry


def naive_advantages(name: str, rewards: list[list[float]], valid: list[list[bool]]) -> list[list[float]]:
    everything = []
    for group, ok in zip(rewards, valid, strict=True):
        counted = [r for r, w in zip(group, ok, strict=True) if w]
        everything += [r - sum(counted) / len(counted) for r in counted]
    result = []
    for group, ok in zip(rewards, valid, strict=True):
        counted = [r for r, w in zip(group, ok, strict=True) if w]
        row = []
        for i, r in enumerate(group):
            if not ok[i] or name == "none":
                row.append(0.0)
                continue
            mean = sum(counted) / len(counted)
            if name in ("grpo", "dapo"):
                var = sum((x - mean) ** 2 for x in counted) / max(len(counted) - 1, 1)
                row.append((r - mean) / (math.sqrt(var) + 1e-6))
            elif name == "dr_grpo":
                row.append(r - mean)
            elif name == "reinforce_plus_plus":
                batch = [x for other, w in zip(rewards, valid, strict=True) for x, v in zip(other, w, strict=True) if v]
                mean = sum(batch) / len(batch)
                spread = math.sqrt(sum((x - mean) ** 2 for x in batch) / len(batch))
                row.append((r - mean) / (spread + 1e-6))
            elif name == "rloo":
                others = [x for j, x in enumerate(group) if j != i and ok[j]]
                row.append(r - sum(others) / len(others) if others else 0.0)
            else:
                spread = math.sqrt(sum(x * x for x in everything) / len(everything))
                row.append((r - mean) / (spread + 1e-6))
        result.append(row)
    return result


def advantages(name: str, rewards: Any, valid: Any) -> Any:
    return entry(ADVANTAGES, name).advantages(rewards, valid)


@pytest.mark.parametrize("name", ADVANTAGES.names)
def test_advantages_match_a_naive_implementation(name: str) -> None:
    rng = np.random.default_rng(5)
    rewards = rng.normal(size=(5, 4))
    valid = rng.random((5, 4)) > 0.2
    valid[0] = True
    rewards[1] = 0.5
    expected = naive_advantages(name, rewards.tolist(), valid.tolist())
    np.testing.assert_allclose(advantages(name, rewards, valid), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ADVANTAGES.names)
def test_advantages_of_nearly_equal_rewards_match_a_naive_implementation(name: str) -> None:
    """Their standard deviation is as small as the epsilon added to it."""
    rewards, valid = np.array([[1e-6, -1e-6, 0.0], [3e-6, -1e-6, 1e-6]]), np.ones((2, 3), bool)
    expected = naive_advantages(name, rewards.tolist(), valid.tolist())
    np.testing.assert_allclose(advantages(name, rewards, valid), expected, rtol=1e-6, atol=1e-15)


def test_equal_rewards_have_zero_advantage() -> None:
    for name in ADVANTAGES.names:
        assert not advantages(name, np.full((2, 4), 0.7), np.ones((2, 4), bool)).any()
        # 0.1 + 0.2 is not 0.3 in binary, and neither is the mean of three times 0.1 equal to 0.1.
        assert not advantages(name, np.asarray([[0.1 + 0.2, 0.3, 0.3]]), np.ones((1, 3), bool)).any()
        assert not advantages(name, np.full((1, 3), 0.1), np.ones((1, 3), bool)).any()
        assert not advantages(name, np.asarray([[0.3, 0.1 + 0.2, 0.9]]), np.asarray([[True, True, False]])).any()


def test_estimators_without_group_comparison_accept_groups_of_one() -> None:
    alone = [name for name in ADVANTAGES.names if not ADVANTAGES.find(name).compares_members]
    assert alone == ["reinforce_plus_plus", "none"]
    for name in set(alone) - {"none"}:
        estimate = advantages(name, np.asarray([[1.0], [0.0], [0.0], [5.0]]), np.asarray([[True]] * 3 + [[False]]))
        assert estimate[0, 0] > 0 > estimate[1, 0] == estimate[2, 0]
        assert estimate[3, 0] == 0
        assert estimate.sum() == pytest.approx(0, abs=1e-6)


def rows(count: int) -> list[Row]:
    """Return random rows, the same ones for a count in every test."""
    rng = np.random.default_rng(count)

    def one(i: int) -> Row:
        length = int(rng.integers(1, 20))
        return Row(
            prompt=rng.integers(3, 20, int(rng.integers(2, 9))).astype(np.int32),
            response=rng.integers(3, 20, length).astype(np.int32),
            behaviour=rng.normal(-1, 0.3, length).astype(np.float32),
            sampled=np.ones(length, bool),
            advantage=float(rng.normal()),
            staleness=i % 2,
        )

    return [one(i) for i in range(count)]


def groups(members: list[Row], size: int) -> list[Row]:
    """Assign the rows to groups of this size with one prompt each."""
    return [replace(row, prompt=members[i - i % size].prompt, group=i // size) for i, row in enumerate(members)]


@pytest.mark.parametrize("budget", [1, 30, 64, 10_000])
def test_microbatches_contain_each_row_once_within_the_budget(budget: int) -> None:
    data = rows(17)
    batches = microbatches(data, list(range(17)), np.ones(17, np.float32), budget)
    assert sorted(i for b in batches for i in b.row_indices) == list(range(17))
    for batch in batches:
        assert len(batch.row_indices) == 1 or batch.input_ids.size <= budget
        for k, i in enumerate(batch.row_indices):
            picked = batch.mask[k] > 0
            assert batch.targets[k][picked].tolist() == data[i].response.tolist()
            np.testing.assert_array_equal(batch.behaviour[k][picked], data[i].behaviour)


def test_minibatches_split_rows_evenly() -> None:
    parts = minibatches(10, 4, np.random.default_rng(0))
    assert sorted(int(i) for p in parts for i in p) == list(range(10))
    assert {len(p) for p in parts} == {2, 3}


@pytest.mark.parametrize("name", AGGREGATION_NAMES)
def test_token_weights(name: str) -> None:
    losses = [[1.0, 2.0], [3.0, 4.0, 5.0, 6.0]]
    expected = {"token_mean": 21 / 6, "sequence_mean": (1.5 + 4.5) / 2, "constant_length": 21 / (2 * 8)}[name]
    weights = token_weights(name, [2, 4], 8)
    assert sum(w * x for w, row in zip(weights, losses, strict=True) for x in row) == pytest.approx(expected)


@pytest.mark.parametrize("name", AGGREGATION_NAMES)
def test_rows_without_sampled_tokens_do_not_change_the_mean(name: str) -> None:
    losses = [[1.0, 2.0], [], [3.0, 4.0, 5.0, 6.0], []]
    expected = {"token_mean": 21 / 6, "sequence_mean": (1.5 + 4.5) / 4, "constant_length": 21 / (4 * 8)}[name]
    weights = token_weights(name, [2, 0, 4, 0], 8)
    assert sum(w * x for w, row in zip(weights, losses, strict=True) for x in row) == pytest.approx(expected)
    assert np.isfinite(token_weights(name, [0, 0], 8)).all()


def test_empty_responses_train_like_rows_without_a_gradient(tiny_model: Any) -> None:
    """A micro-batch with empty responses only raised an IndexError."""
    empty = [
        replace(row, response=row.response[:0], behaviour=row.behaviour[:0], sampled=row.sampled[:0]) for row in rows(2)
    ]
    metrics = trainer(tiny_model, microbatch_tokens=1).step(0, [*empty, *rows(3)])
    alone = trainer(tiny_model, microbatch_tokens=1).step(0, rows(3))
    assert metrics["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    only = trainer(tiny_model).step(0, empty)
    assert (only["loss"], only["grad_norm"]) == (0.0, 0.0)


@pytest.mark.parametrize("name", LOSSES.names)
def test_tokens_with_a_non_finite_stored_logprob_are_dropped_and_counted(tiny_model: Any, name: str) -> None:
    """Such a token trains like an env token, for every loss."""
    data = groups(rows(6), 2)
    knobs = {"loss": entry(LOSSES, name), "aggregation": "constant_length"}
    sampled, behaviour = data[1].sampled.copy(), data[1].behaviour.copy()
    sampled[1], behaviour[1] = False, 0.0
    other_trainer = trainer(tiny_model, **knobs)
    expected = other_trainer.step(0, [data[0], replace(data[1], sampled=sampled, behaviour=behaviour), *data[2:]])
    assert expected.pop("tokens_dropped") == 0
    behaviour = data[1].behaviour.copy()
    behaviour[1] = math.nan
    policy_trainer = trainer(tiny_model, **knobs)
    result = policy_trainer.step(0, [data[0], replace(data[1], behaviour=behaviour), *data[2:]])
    assert result.pop("tokens_dropped") == 1
    assert result == pytest.approx(expected, rel=1e-5, abs=1e-7)
    for a, b in zip(policy_trainer.model.parameters(), other_trainer.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_dropped_tokens_count_in_the_token_mean(tiny_model: Any) -> None:
    data = rows(3)
    sampled, behaviour = data[1].sampled.copy(), data[1].behaviour.copy()
    sampled[1], behaviour[1] = False, math.nan
    dropped = trainer(tiny_model).step(0, [data[0], replace(data[1], behaviour=behaviour), data[2]])
    given = trainer(tiny_model).step(0, [data[0], replace(data[1], behaviour=behaviour, sampled=sampled), data[2]])
    count = sum(row.num_sampled for row in data)
    assert dropped["loss"] == pytest.approx(given["loss"] * (count - 1) / count, rel=1e-5)


def test_a_row_has_a_prompt() -> None:
    """Without a prompt the first token would be predicted from the last."""
    with pytest.raises(AssertionError, match="predicted from its prompt"):
        replace(rows(1)[0], prompt=np.zeros(0, np.int32))


def trainer(tiny_model: Any, **changes: Any) -> Any:
    from staleflow.tasks.training.policy import TrainerSettings
    from staleflow.tasks.training.policy_trainer import PolicyTrainer

    torch.set_num_threads(1)
    training: dict[str, Any] = {
        "learning_rate": 1e-3, "microbatch_tokens": 10_000, "grad_clip": 1e9,
        **{name: changes.pop(name) for name in tuple(changes) if name in values(TrainingConfig())},
    }  # fmt: skip
    base: dict[str, Any] = {
        "model": str(tiny_model), "dtype": "float32", "device": "cpu", "num_steps": 10, "temperature": 1.0,
        "max_response_tokens": 20, "seed": 0,
    }  # fmt: skip
    return PolicyTrainer(TrainerSettings(**(base | changes), training=TrainingConfig(**training)))


def test_padding_and_packing_do_not_change_the_gradient(tiny_model: Any) -> None:
    data = rows(9)
    results = []
    for budget in (1, 60, 10_000):
        policy_trainer = trainer(tiny_model, microbatch_tokens=budget)
        metrics = policy_trainer.step(0, data)
        flat = torch.cat([p.detach().flatten() for p in policy_trainer.model.parameters()])
        results.append((metrics["loss"], metrics["grad_norm"], flat))
    for loss, norm, flat in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-4)
        assert norm == pytest.approx(results[0][1], rel=1e-4)
        torch.testing.assert_close(flat, results[0][2], atol=2e-4, rtol=1e-3)


def test_a_trainer_resumed_from_a_resume_point_repeats_the_next_step(tiny_model: Any, tmp_path: Any) -> None:
    from staleflow.stores.errors import StoreError

    data = rows(8)
    policy_trainer = trainer(tiny_model, minibatches=3)
    policy_trainer.step(0, data)
    policy_trainer.begin_save(tmp_path / "state")
    policy_trainer.end_save()
    expected = policy_trainer.step(1, data)
    other_trainer = trainer(tiny_model, minibatches=3, seed=5)
    other_trainer.load_state(tmp_path / "state")
    assert other_trainer.step(1, data) == expected
    for a, b in zip(policy_trainer.model.parameters(), other_trainer.model.parameters(), strict=True):
        assert torch.equal(a, b)
    (tmp_path / "state").write_bytes((tmp_path / "state").read_bytes()[:1000])
    with pytest.raises(StoreError, match="no resume point of this job"):
        other_trainer.load_state(tmp_path / "state")


def test_a_resume_point_from_before_the_first_step_also_resets_the_moments(tiny_model: Any, tmp_path: Path) -> None:
    policy_trainer, results = trainer(tiny_model), []
    policy_trainer.begin_save(tmp_path / "state")
    policy_trainer.end_save()
    for _ in range(2):
        policy_trainer.load_state(tmp_path / "state")
        policy_trainer.step(0, rows(8))
        results.append([parameter.detach().clone() for parameter in policy_trainer.model.parameters()])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def test_a_resume_point_written_late_has_the_state_of_its_step(tiny_model: Any, tmp_path: Path) -> None:
    """A copy is written, which later steps do not change."""
    data = rows(8)
    model_trainer = trainer(tiny_model, minibatches=3)
    model_trainer.step(0, data)
    model_trainer.begin_save(tmp_path / "state")
    expected = model_trainer.step(1, data)
    model_trainer.end_save()
    other_trainer = trainer(tiny_model, minibatches=3, seed=5)
    other_trainer.load_state(tmp_path / "state")
    assert other_trainer.step(1, data) == expected
    for a, b in zip(model_trainer.model.parameters(), other_trainer.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_policy_and_reference_are_tried_on_the_device_also_in_turns(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved_models, shard = list[Any](), RankGroup.shard

    def recorded_shard(group: RankGroup, model: Any, *dtype: Any) -> Any:
        moved_models.append(model)
        return shard(group, model, *dtype)

    monkeypatch.setattr(RankGroup, "shard", recorded_shard)
    policy_trainer = trainer(tiny_model, shares_device=True, kl=KlConfig(coefficient=0.1))
    assert moved_models == [policy_trainer.model, policy_trainer.reference.model]


def test_rows_without_gradient_count_in_the_denominator(tiny_model: Any) -> None:
    data = rows(6)
    muted = [replace(r, advantage=0.0, staleness=0) for r in data]
    alone = trainer(tiny_model).step(0, data[:3])
    together = trainer(tiny_model).step(0, data[:3] + muted[3:])
    share = sum(len(r.response) for r in data[:3]) / sum(len(r.response) for r in data)
    assert together["loss"] == pytest.approx(alone["loss"] * share, rel=1e-4)
    assert together["grad_norm"] == pytest.approx(alone["grad_norm"] * share, rel=1e-4)


def test_a_step_without_fresh_rows_has_no_mismatch_metrics(tiny_model: Any) -> None:
    """Stored logprobs are comparable only under the weights that sampled them; a value of 0 would claim agreement."""
    fresh = [replace(row, staleness=0) for row in rows(3)]
    names = {"mismatch_mean", "mismatch_max", "kl_rollout"}
    assert "kl_reference" not in trainer(tiny_model).step(0, fresh)
    assert names <= trainer(tiny_model).step(0, fresh).keys()
    assert not names & trainer(tiny_model).step(0, [replace(row, staleness=1) for row in fresh]).keys()


def test_recomputed_logprobs_use_the_sampling_temperature(tiny_model: Any) -> None:
    (row,) = rows(1)
    policy_trainer = trainer(tiny_model, temperature=2.0)
    (batch,) = microbatches([row], [0], np.ones(1, np.float32), 1000)
    ids = torch.tensor([[*row.prompt.tolist(), *row.response.tolist()]])
    logits = policy_trainer.model(input_ids=ids).logits[0].detach().double() / 2.0
    expected = [
        float(logits[len(row.prompt) - 1 + t].log_softmax(-1)[int(row.response[t])]) for t in range(len(row.response))
    ]
    got = policy_trainer.logprob_model.logprobs(batch)[0][torch.from_numpy(batch.mask[0] > 0)]
    np.testing.assert_allclose(got.detach().numpy(), expected, atol=1e-5)


def test_bfloat16_is_published_but_trained_in_float32(tiny_model: Any) -> None:
    policy_trainer = trainer(tiny_model, dtype="bfloat16", learning_rate=1e-6)
    before = {n: p.detach().clone() for n, p in policy_trainer.model.named_parameters()}
    assert np.isfinite(policy_trainer.step(0, rows(4))["loss"])
    assert all(p.dtype == torch.float32 for p in policy_trainer.model.parameters())
    assert any(not torch.equal(p, before[n]) for n, p in policy_trainer.model.named_parameters())
    assert policy_trainer.apply_to_weights(lambda weights: {t.dtype for _, t in sorted_tensors(weights)}) == {
        torch.bfloat16
    }


def test_learning_rate_schedule(tiny_model: Any) -> None:
    policy_trainer = trainer(tiny_model, schedule="cosine", warmup_steps=2, num_steps=12)
    rates = [policy_trainer.learning_rate(s) for s in range(13)]
    assert rates[0] == pytest.approx(1e-3 / 3)
    assert max(rates) == rates[2] == pytest.approx(1e-3)
    assert rates[12] == pytest.approx(1e-4)
    longer = trainer(tiny_model, schedule="cosine", warmup_steps=2, num_steps=20, schedule_steps=12)
    assert [longer.learning_rate(s) for s in range(14)] == [*rates, rates[12]]


def test_linear_and_cosine_schedules_end_at_the_floor(tiny_model: Any) -> None:
    policy_trainer = trainer(tiny_model, schedule="linear", warmup_steps=2, num_steps=12, schedule_floor=0.25)
    rates = [policy_trainer.learning_rate(s) for s in range(15)]
    assert rates[:3] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3])
    assert rates[2:13] == pytest.approx(np.linspace(1e-3, 2.5e-4, 11).tolist())
    assert rates[12:] == pytest.approx([2.5e-4] * 3)
    lowest = trainer(tiny_model, schedule="cosine", num_steps=4, schedule_floor=0.0)
    assert lowest.learning_rate(4) == pytest.approx(0.0)


def test_later_epochs_use_the_proximal_policy_of_the_first(tiny_model: Any) -> None:
    data = rows(8)

    def weights(name: str, epochs: int, steps: int, proximal: Any = None) -> torch.Tensor:
        policy_trainer = trainer(tiny_model, epochs=epochs, loss=entry(LOSSES, name))
        for _ in range(steps):
            if proximal is not None:
                policy_trainer._logprobs_before_step = lambda *_, **__: proximal
            policy_trainer.step(0, data)
        return torch.cat([p.detach().flatten() for p in policy_trainer.model.parameters()])

    torch.testing.assert_close(weights("ppo_clip", 2, 1), weights("ppo_clip", 1, 2))
    first = trainer(tiny_model, loss=DecoupledPpo())._logprobs_before_step(data, single_update=False)
    twice = weights("decoupled_ppo", 2, 1)
    torch.testing.assert_close(twice, weights("decoupled_ppo", 1, 2, first))
    assert not torch.allclose(twice, weights("decoupled_ppo", 1, 2))


@pytest.mark.parametrize("name", ["ppo_clip", "decoupled_ppo"])
def test_a_step_of_one_update_reuses_its_forward_pass(tiny_model: Any, name: str) -> None:
    """The forward pass of the update also gives the proximal policy and the logprobs compared with the stored ones. The
    result equals that of separate passes."""
    data = [replace(row, advantage=0.0) if i in (2, 5) else row for i, row in enumerate(rows(8))]
    first, second = (trainer(tiny_model, loss=entry(LOSSES, name), measured_rows=0) for _ in range(2))
    computed: list[int] = []
    batch = first.logprob_model.lm_head._forward

    def counted(hidden: Any) -> Any:
        computed.append(hidden.shape[1])
        return batch(hidden)

    first.logprob_model.lm_head._layer.forward = counted
    apart = second._logprobs_before_step
    second._logprobs_before_step = lambda data, single_update: apart(data, single_update=False)
    metrics, expected = first.step(0, data), second.step(0, data)
    tokens = [row.num_sampled for row in data if row.advantage or row.staleness == 0]
    assert len(tokens) == 6 + 1, "those with a gradient, and of the two others the fresh one"
    assert sum(computed) == sum(tokens)
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=0)


def test_a_non_finite_gradient_changes_no_weights(tiny_model: Any) -> None:
    data = rows(2)
    poison = replace(data[0], advantage=math.inf, staleness=0)
    policy_trainer = trainer(tiny_model)
    before = torch.cat([p.detach().flatten().clone() for p in policy_trainer.model.parameters()])
    policy_trainer.step(0, [poison, data[1]])
    assert torch.equal(before, torch.cat([p.detach().flatten() for p in policy_trainer.model.parameters()]))


def test_fewer_rows_than_minibatches_give_one_row_per_minibatch() -> None:
    parts = minibatches(2, 3, np.random.default_rng(0))
    assert sorted(int(i) for part in parts for i in part) == [0, 1]
    assert [len(part) for part in parts] == [1, 1]
