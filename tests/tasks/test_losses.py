"""Every loss against a slow implementation of its formula per trajectory; gradients against finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from staleflow.tasks.training.loss import LOSSES, MAX_LOG_RATIO, MAX_RATIO, Loss, Tokens
from tests.support.entries import entry
from tests.tasks.test_numerics import rows, trainer

TURNS = ("sssggs.", "sgggss.", "s......", "sgsgsgs", "ssss...")
"""Trajectories: s is a sampled token, g an env token, . padding."""
LAGS = ((2, 1, 1, 0, 0, 0, 0), (0, 0, 0, 0, 0, 3, 0), (4,), (1, 0, 0, 0, 0, 0, 2), (3, 3, 2, 2))
"""Number of versions since each token was sampled, where it is not 0."""
KNOBS: dict[str, Any] = {
    "clip_low": 0.2, "clip_high": 0.28, "weight_cap": 1.5, "dual_clip": 1.6, "sequence_clip_low": 0.1,
    "sequence_clip_high": 0.15, "positive_weight": 0.7, "negative_weight": 1.3, "tau": 0.4, "sequence_cap": 1.2,
    "band_low": 0.7, "band_high": 1.4,
}  # fmt: skip
BY_TOKEN = ("logprobs", "proximal", "behaviour", "sampled", "lags")
CASES = [(name, "trajectory") for name in LOSSES.names] + [("topr", "token"), ("topr", "segment")]


@dataclass(frozen=True, kw_only=True)
class AgentArgs:
    """The sampled tokens of one trajectory. now: `new` without gradient. runs: for each token, the index of its run of
    consecutive tokens of one version."""

    new: Sequence[float]
    now: Sequence[float]
    old: Sequence[float]
    sampled: Sequence[float]
    a: float
    lags: Sequence[int]
    runs: Sequence[int]


def within(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ppo(r: float, a: float, s: Any) -> float:
    return min(r * a, within(r, 1 - s.clip_low, 1 + s.clip_high) * a)


def ppo_clip(t: AgentArgs, s: Any) -> list[float]:
    return [-ppo(math.exp(n - b), t.a, s) for n, b in zip(t.new, t.sampled, strict=True)]


def decoupled_ppo(t: AgentArgs, s: Any) -> list[float]:
    return [
        -min(math.exp(o - b), s.weight_cap) * ppo(math.exp(n - o), t.a, s)
        for n, o, b in zip(t.new, t.old, t.sampled, strict=True)
    ]


def cispo(t: AgentArgs, s: Any) -> list[float]:
    return [
        -within(math.exp(w - b), 1 - s.clip_low, 1 + s.clip_high) * t.a * n
        for n, w, b in zip(t.new, t.now, t.sampled, strict=True)
    ]


def tis(t: AgentArgs, s: Any) -> list[float]:
    return [-min(math.exp(w - b), s.weight_cap) * t.a * n for n, w, b in zip(t.new, t.now, t.sampled, strict=True)]


def dual_clip(t: AgentArgs, s: Any) -> list[float]:
    results = []
    for n, b in zip(t.new, t.sampled, strict=True):
        usual = ppo(math.exp(n - b), t.a, s)
        results.append(-max(usual, s.dual_clip * t.a) if t.a < 0 else -usual)
    return results


def gspo(t: AgentArgs, s: Any) -> list[float]:
    r = math.exp(sum(n - b for n, b in zip(t.new, t.sampled, strict=True)) / len(t.new))
    one = -min(r * t.a, within(r, 1 - s.sequence_clip_low, 1 + s.sequence_clip_high) * t.a)
    return [one] * len(t.new)


def topr(t: AgentArgs, s: Any) -> list[float]:
    results = []
    for i, n in enumerate(t.new):
        if t.a > 0:
            results.append(-s.positive_weight * t.a * n)
            continue
        of = {
            "token": [i],
            "segment": [j for j, run in enumerate(t.runs) if run == t.runs[i]],
            "trajectory": list(range(len(t.new))),
        }[s.ratio_of]
        r = math.prod(math.exp(t.now[j] - t.sampled[j]) for j in of)
        results.append(-s.negative_weight * within(r, 0, 1) * t.a * n)
    return results


def kimi(t: AgentArgs, s: Any) -> list[float]:
    return [-t.a * n + s.tau / 2 * (n - b) ** 2 for n, b in zip(t.new, t.sampled, strict=True)]


def sequence_weighted(t: AgentArgs, s: Any, weigh: Callable[[float], float]) -> list[float]:
    rho = math.prod(math.exp(o - b) for o, b in zip(t.old, t.sampled, strict=True))
    return [-weigh(rho) * ppo(math.exp(n - o), t.a, s) for n, o in zip(t.new, t.old, strict=True)]


def sequence_tis(t: AgentArgs, s: Any) -> list[float]:
    return sequence_weighted(t, s, lambda rho: min(rho, s.sequence_cap))


def sequence_mis(t: AgentArgs, s: Any) -> list[float]:
    return sequence_weighted(t, s, lambda rho: rho if rho <= s.sequence_cap else 0.0)


def icepop(t: AgentArgs, s: Any) -> list[float]:
    results = []
    for n, o, b in zip(t.new, t.old, t.sampled, strict=True):
        rho = math.exp(o - b)
        results.append(-(rho if s.band_low <= rho <= s.band_high else 0.0) * ppo(math.exp(n - o), t.a, s))
    return results


def decoupled_ppo_loglinear(t: AgentArgs, s: Any) -> list[float]:
    results = []
    for n, w, b, lag in zip(t.new, t.now, t.sampled, t.lags, strict=True):
        version, before, made = 0, lag, lag + 1  # the token's own, the step's, and the one it makes
        old = b + (before - version) / (made - version) * (w - b)
        results.append(-min(math.exp(old - b), s.weight_cap) * ppo(math.exp(n - old), t.a, s))
    return results


def sft(t: AgentArgs, s: Any) -> list[float]:
    return [-n for n in t.new]


def dpo(t: AgentArgs, s: Any) -> list[float]:
    """Its value is defined by pairs."""
    return [-t.a * (n - w) for n, w in zip(t.new, t.now, strict=True)]


SLOW: dict[str, Callable[[AgentArgs, Any], list[float]]] = {
    "ppo_clip": ppo_clip, "decoupled_ppo": decoupled_ppo, "cispo": cispo, "tis": tis, "dual_clip": dual_clip,
    "gspo": gspo, "topr": topr, "kimi": kimi, "sft": sft, "dpo": dpo,
    "sequence_tis": sequence_tis, "sequence_mis": sequence_mis, "icepop": icepop,
    "decoupled_ppo_loglinear": decoupled_ppo_loglinear,
}  # fmt: skip


def draw_tokens(seed: int) -> Tokens:
    """Return random float64 values for the tokens of TURNS, zero where none was sampled."""
    rng = np.random.default_rng(seed)
    sampled = torch.tensor([[t == "s" for t in turns] for turns in TURNS])
    new, old, behaviour = (
        torch.tensor(rng.normal(-1.5, 0.3, sampled.shape)).masked_fill(~sampled, 0) for _ in range(3)
    )
    lags = torch.tensor([[*lag, *[0] * (len(TURNS[0]) - len(lag))] for lag in LAGS])
    advantage = torch.tensor(rng.normal(size=(len(TURNS), 1)))
    return Tokens(
        logprobs=new.requires_grad_(),
        proximal=old,
        behaviour=behaviour,
        advantage=advantage,
        sampled=sampled,
        lags=lags,
    )


def runs(turns: str, lags: Sequence[int]) -> list[int]:
    """Return the run index of each sampled token."""
    results: list[int] = []
    number = -1
    for t, turn in enumerate(turns):
        if turn != "s":
            continue
        if not t or turns[t - 1] != "s" or lags[t] != lags[t - 1]:
            number += 1
        results.append(number)
    return results


def agent_args(tokens: Tokens, i: int, new: Sequence[float] | None = None) -> AgentArgs:
    picked = tokens.sampled[i]
    now = tokens.logprobs[i][picked].tolist()
    lags = tokens.lags[i].tolist()
    return AgentArgs(
        new=now if new is None else new,
        now=now,
        old=tokens.proximal[i][picked].tolist(),
        sampled=tokens.behaviour[i][picked].tolist(),
        a=float(tokens.advantage[i]),
        lags=tokens.lags[i][picked].tolist(),
        runs=runs(TURNS[i], lags),
    )


def loss_of(name: str, ratio_of: str) -> Loss:
    return entry(LOSSES, name, ratio_of=ratio_of, **KNOBS)


def test_every_loss_has_a_formula() -> None:
    assert tuple(SLOW) == LOSSES.names


@pytest.mark.parametrize(("name", "ratio_of"), CASES)
def test_token_losses_equal_the_formulas(name: str, ratio_of: str) -> None:
    loss, clipped = loss_of(name, ratio_of), 0
    for seed in range(20):
        tokens = draw_tokens(seed)
        result = loss.token_loss(tokens)
        assert result.loss.shape == result.clipped.shape == tokens.logprobs.shape
        for i in range(len(TURNS)):
            expected = SLOW[name](agent_args(tokens, i), loss)
            outcome = result.loss[i][tokens.sampled[i]].detach().numpy()
            np.testing.assert_allclose(outcome, expected, rtol=1e-9, atol=1e-12)
        clipped += int(result.clipped[tokens.sampled].sum())
    assert (clipped > 0) is (name not in ("kimi", "sft", "dpo")), "the random tokens reach what is clipped"


@pytest.mark.parametrize(("name", "ratio_of"), CASES)
def test_gradients_equal_finite_differences(name: str, ratio_of: str) -> None:
    """Of the slow implementation, with detached terms held constant and weights per token as in an aggregation."""
    loss, step = loss_of(name, ratio_of), 1e-6
    for seed in range(5):
        tokens = draw_tokens(seed)
        weight = torch.tensor(np.random.default_rng(seed).uniform(0.5, 2, tokens.sampled.shape))
        result = loss.token_loss(tokens)
        (result.loss.masked_fill(~tokens.sampled, 0) * weight).sum().backward()
        assert tokens.logprobs.grad is not None
        for i in range(len(TURNS)):
            picked = tokens.sampled[i]
            is_tokenwise = weight[i][picked].numpy()
            base = tokens.logprobs[i][picked].tolist()
            expected = []
            for t in range(len(base)):
                sides = []
                for sign in (1, -1):
                    moved = [x + sign * step * (j == t) for j, x in enumerate(base)]
                    sides.append(float(np.dot(is_tokenwise, SLOW[name](agent_args(tokens, i, moved), loss))))
                expected.append((sides[0] - sides[1]) / (2 * step))
            np.testing.assert_allclose(tokens.logprobs.grad[i][picked].numpy(), expected, rtol=1e-6, atol=1e-7)
        # Tokens reported as clipped by PPO have no gradient; those with a limited weight have one.
        if name not in ("cispo", "tis", "topr"):
            assert not tokens.logprobs.grad[tokens.sampled & result.clipped].any()


@pytest.mark.parametrize(("name", "ratio_of"), CASES)
def test_by_token_losses_are_equal_on_part_of_a_row(name: str, ratio_of: str) -> None:
    """Losses with is_tokenwise = False must depend on other tokens."""
    loss, there, same = loss_of(name, ratio_of), slice(2, 5), True
    for seed in range(5):
        tokens = draw_tokens(seed)
        cut = replace(tokens, **{f: getattr(tokens, f)[:, there] for f in BY_TOKEN})
        whole, part = loss.token_loss(tokens).loss[:, there], loss.token_loss(cut).loss
        same &= torch.allclose(whole[cut.sampled], part[cut.sampled], rtol=1e-12)
    assert same == loss.is_tokenwise


@pytest.mark.parametrize("name", LOSSES.names)
def test_importance_weights_carry_no_gradient(name: str) -> None:
    """At equal policies every loss has the gradient -A grad log pi, which an attached weight would change. The
    advantage of supervised fine-tuning is always 1."""
    new = torch.full((1, 3), -1.0, dtype=torch.float64, requires_grad=True)
    whole = torch.ones((1, 3), dtype=torch.bool)
    same = new.detach()
    advantage = torch.tensor([[2.0]], dtype=torch.float64)
    tokens = Tokens(logprobs=new, proximal=same, behaviour=same, advantage=advantage, sampled=whole, lags=whole.long())
    entry(LOSSES, name).token_loss(tokens).loss.sum().backward()
    assert new.grad is not None
    np.testing.assert_allclose(new.grad.numpy(), (-1.0 if name == "sft" else -2.0) * np.ones((1, 3)))


@pytest.mark.parametrize("name", LOSSES.names)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("stored", [-95.0, -np.inf, -40.0])
def test_an_extreme_stored_logprob_does_not_overflow_the_gradient(name: str, advantage: float, stored: float) -> None:
    """Float32 overflows at e^89, and infinity times the zero gradient of clipping is NaN."""
    new = torch.full((1, 4), -1.0, requires_grad=True)
    behaviour = torch.tensor([[-1.0, stored, -1.0, -1.0]])
    whole = torch.ones((1, 4), dtype=torch.bool)
    tokens = Tokens(
        logprobs=new, proximal=new.detach(), behaviour=behaviour, advantage=torch.tensor([[advantage]]), sampled=whole,
        lags=whole.long(),
    )  # fmt: skip
    entry(LOSSES, name).token_loss(tokens).loss.sum().backward()
    assert new.grad is not None
    assert bool(new.grad.isfinite().all())
    # These two bring a ratio nearer to 1 and then cut it: it is large by their formulas, and bounded.
    if name not in ("gspo", "decoupled_ppo_loglinear"):
        # A square penalty pulls back in proportion to the distance.
        assert float(new.grad.abs().max()) < (1 + 0.1 * 95 if name == "kimi" else 10)


@pytest.mark.parametrize(("name", "ratio_of"), CASES)
def test_clipped_flags_match_the_formulas(name: str, ratio_of: str) -> None:
    """A token counts as clipped if its weight or surrogate is beyond the bound."""
    loss = loss_of(name, ratio_of)
    for seed in range(20):
        tokens = draw_tokens(seed)
        result = loss.token_loss(tokens)
        for i in range(len(TURNS)):
            picked = tokens.sampled[i]
            expected = clipped_tokens(name, agent_args(tokens, i), loss)
            assert result.clipped[i][picked].tolist() == [was_cut for was_cut, _ in expected]
            if result.ratio is not None:
                compared = [ratio for _, ratio in expected]
                np.testing.assert_allclose(result.ratio[i][picked].detach().numpy(), compared, rtol=1e-9)


def clipped_tokens(name: str, t: AgentArgs, s: Any) -> list[tuple[bool, float]]:
    """Return for each token whether it is clipped, and the ratio that is compared."""
    tokens = range(len(t.new))

    def beyond(r: float, low: float, high: float) -> bool:
        """Return whether the surrogate of PPO is clipped."""
        return r > 1 + high if t.a > 0 else r < 1 - low

    now = [math.exp(t.now[j] - t.sampled[j]) for j in tokens]
    stored = [math.exp(t.old[j] - t.sampled[j]) for j in tokens]
    step = [math.exp(t.now[j] - t.old[j]) for j in tokens]
    if name in ("ppo_clip", "dual_clip"):
        bound = s.dual_clip if name == "dual_clip" else math.inf
        return [(beyond(r, s.clip_low, s.clip_high) or (t.a < 0 and r > bound), r) for r in now]
    if name == "cispo":
        return [(not 1 - s.clip_low <= r <= 1 + s.clip_high, r) for r in now]
    if name == "tis":
        return [(r > s.weight_cap, r) for r in now]
    if name == "gspo":
        mean = math.prod(now) ** (1 / len(now))
        return [(beyond(mean, s.sequence_clip_low, s.sequence_clip_high), mean)] * len(now)
    if name == "topr":
        ratios_of: dict[str, Callable[[int], list[int]]] = {
            "token": lambda j: [j],
            "segment": lambda j: [k for k in tokens if t.runs[k] == t.runs[j]],
            "trajectory": lambda j: list(tokens),
        }
        of = ratios_of[s.ratio_of]
        ratios = [math.prod(now[k] for k in of(j)) for j in tokens]
        return [(t.a <= 0 and r > 1, r) for r in ratios]
    if name in ("kimi", "sft", "dpo"):
        return [(False, 1.0)] * len(now)
    if name == "decoupled_ppo_loglinear":
        ratios = [now[j] ** (1 - t.lags[j] / (t.lags[j] + 1)) for j in tokens]
        return [(beyond(r, s.clip_low, s.clip_high), r) for r in ratios]
    masked = [False] * len(now)
    if name == "icepop":
        masked = [not s.band_low <= rho <= s.band_high for rho in stored]
    if name == "sequence_mis":
        masked = [math.prod(stored) > s.sequence_cap] * len(now)
    rho = [math.prod(stored)] * len(now) if name.startswith("sequence") else stored
    return [(masked[j] or beyond(step[j], s.clip_low, s.clip_high), rho[j] if masked[j] else step[j]) for j in tokens]


def token_at_ratio(ratio: float, advantage: float) -> Tokens:
    """Return one token whose current and old probability are `ratio` times the probability under which it was
    sampled."""
    new = torch.full((1, 1), math.log(ratio), dtype=torch.float64)
    whole = torch.ones((1, 1), dtype=torch.bool)
    return Tokens(
        logprobs=new.requires_grad_(), proximal=new.detach(), behaviour=torch.zeros_like(new),
        advantage=torch.full_like(new, advantage), sampled=whole, lags=whole.long(),
    )  # fmt: skip


@pytest.mark.parametrize(("name", "ratio_of"), CASES)
def test_clip_range_contains_one(name: str, ratio_of: str) -> None:
    low, high = loss_of(name, ratio_of).clip_range
    assert 0.0 <= low < 1.0 < high


def test_a_ratio_equal_to_the_bound_is_not_clipped() -> None:
    """The ratio is e, whose logarithm is exact."""
    e = float(torch.tensor(1.0, dtype=torch.float64).exp())
    for loss in (
        entry(LOSSES, "sequence_mis", sequence_cap=e, clip_high=9.0),
        entry(LOSSES, "icepop", band_high=e, clip_high=9.0),
        entry(LOSSES, "dual_clip", dual_clip=e),
        entry(LOSSES, "tis", weight_cap=e),
    ):
        tokens = token_at_ratio(math.e, -1.0)
        result = loss.token_loss(tokens)
        assert not result.clipped.any(), type(loss).__name__
        (gradient,) = torch.autograd.grad(result.loss.sum(), tokens.logprobs)
        assert gradient.item() > 0
    assert entry(LOSSES, "icepop", band_low=1.0).token_loss(token_at_ratio(1.0, 1.0)).loss.item() == -1.0


@pytest.mark.parametrize(("name", "clipped"), [("dual_clip", False), ("topr", True)])
def test_clipped_count_of_a_token_with_advantage_zero(name: str, clipped: bool) -> None:
    """dual_clip's second limit is for negative advantages only; topr limits the ratio unless the advantage is
    positive."""
    assert entry(LOSSES, name).token_loss(token_at_ratio(5.0, 0.0)).clipped.tolist() == [[clipped]]


def test_a_ratio_beyond_max_ratio_counts_as_clipped() -> None:
    assert float(torch.tensor(MAX_LOG_RATIO).exp()) > MAX_RATIO
    new = torch.tensor([[-1.0, -1.0]])
    whole = torch.ones((1, 2), dtype=torch.bool)
    tokens = Tokens(
        logprobs=new, proximal=new, behaviour=torch.tensor([[-15.0, -40.0]]), advantage=torch.tensor([[-1.0]]),
        sampled=whole, lags=whole.long(),
    )  # fmt: skip
    assert entry(LOSSES, "ppo_clip").token_loss(tokens).clipped.tolist() == [[False, True]]


@pytest.mark.parametrize("name", ["ppo_clip", "decoupled_ppo"])
def test_an_extreme_stored_logprob_drops_no_update(name: str, tiny_model: Path) -> None:
    data = [replace(r, advantage=1.0) for r in rows(3)]
    data[0].behaviour[0] = -95.0
    policy_trainer = trainer(tiny_model, loss=entry(LOSSES, name))
    before = [p.detach().clone() for p in policy_trainer.model.parameters()]
    metrics = policy_trainer.step(0, data)
    assert math.isfinite(metrics["grad_norm"])
    assert any(not torch.equal(a, b) for a, b in zip(before, policy_trainer.model.parameters(), strict=True))
