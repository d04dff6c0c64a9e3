"""Advantages from the rewards of a step's groups. Numpy, pure.

An estimator maps (rewards, valid), both [G, N] with one row per group, to [G, N]: one advantage per trajectory,
constant over its tokens. An invalid member (its reward could not be computed) does not count in its group's
statistics; its own result is not used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from staleflow.stores.errors import ConfigError
from staleflow.stores.reward_signal import has_signal
from staleflow.tasks.settings.registry import Registry
from staleflow.tasks.settings.user_code import said

EPS = 1e-6
"""Added to a standard deviation that is divided by, as in the published implementations."""

Rewards = npt.NDArray[np.float64]
Valid = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlong:
    """DAPO's soft penalty on responses close to the limit (2503.14476): subtracted from the reward before advantages
    are computed, from 0 where the last `tokens` before `longest` begin up to `penalty` at their end.

    >>> Overlong(tokens=10, penalty=1.0, longest=100).penalties(np.array([50, 90, 95, 100])).tolist()
    [0.0, 0.0, 0.5, 1.0]
    """

    tokens: int
    penalty: float
    longest: int

    def penalties(self, lengths: npt.NDArray[np.int64]) -> Rewards:
        """What responses of these lengths lose; nothing if `tokens` is 0."""
        beyond = lengths - (self.longest - self.tokens)
        result: Rewards = self.penalty * np.clip(beyond / max(self.tokens, 1), 0.0, 1.0 if self.tokens else 0.0)
        return result


ADVANTAGES: Registry[Rewards] = Registry("advantage", "training.advantage", own=True)
NEED_NO_GROUP = ("reinforce_plus_plus",)
"""Estimators that also work with groups of one."""


def advantages(name: str, rewards: Rewards, valid: Valid) -> npt.NDArray[np.float32]:
    """Compute one advantage per trajectory, 0 for an invalid one. Returns [G, N] float32. Raises ConfigError if a
    user's estimator cannot be loaded or used.

    >>> advantages("rloo", np.array([[1.0, 0.0, 0.0]]), np.ones((1, 3), bool)).tolist()
    [[1.0, -0.5, -0.5]]
    """
    estimate = ADVANTAGES.load(name)
    if name in ADVANTAGES:
        return np.where(valid, estimate(rewards, valid), 0.0).astype(np.float32)
    try:
        own = np.asarray(estimate(rewards.copy(), valid.copy()), np.float64)
    except (Exception, SystemExit) as error:  # user code
        raise ConfigError(f"{ADVANTAGES.key} = {name!r}: raised {type(error).__name__}: {said(error)}") from error
    if own.shape != rewards.shape or not np.isfinite(own[valid]).all():
        found = f"shape {own.shape}" if own.shape != rewards.shape else "a number that is not finite"
        raise ConfigError(f"{ADVANTAGES.key} = {name!r}: gave {found}; it must give {rewards.shape} finite numbers")
    return np.where(valid, own, 0.0).astype(np.float32)


@ADVANTAGES.register("grpo")
def grpo(rewards: Rewards, valid: Valid) -> Rewards:
    """GRPO (2402.03300)."""
    centred, count = _centred(rewards, valid)
    # Sample standard deviation, as in the published implementations.
    std = np.sqrt((centred**2).sum(axis=1, keepdims=True) / np.maximum(count - 1, 1))
    result: Rewards = centred / (std + EPS)
    return result


@ADVANTAGES.register("dapo")
def dapo(rewards: Rewards, valid: Valid) -> Rewards:
    """DAPO (2503.14476): the same estimate; its other parts are clip_high, token_mean and the no_signal filter."""
    return grpo(rewards, valid)


@ADVANTAGES.register("dr_grpo")
def dr_grpo(rewards: Rewards, valid: Valid) -> Rewards:
    """Dr. GRPO (2503.20783)."""
    return _centred(rewards, valid)[0]


@ADVANTAGES.register("rloo")
def rloo(rewards: Rewards, valid: Valid) -> Rewards:
    """RLOO (2402.14740): R - mean of the others = (R - mean) n / (n - 1); a group of one has no others."""
    centred, count = _centred(rewards, valid)
    result: Rewards = centred * count / np.maximum(count - 1, 1)
    return result


@ADVANTAGES.register("reinforce_plus_plus")
def reinforce_plus_plus(rewards: Rewards, valid: Valid) -> Rewards:
    """REINFORCE++ (2501.03262): whitened over the batch, whatever group a reward is of."""
    return _whitened(_centred(rewards.reshape(1, -1), valid.reshape(1, -1))[0], valid).reshape(rewards.shape)


@ADVANTAGES.register("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(rewards: Rewards, valid: Valid) -> Rewards:
    """REINFORCE++ with the group mean as baseline."""
    return _whitened(_centred(rewards, valid)[0], valid)


def _whitened(centred: Rewards, valid: Valid) -> Rewards:
    """Centred rewards over their standard deviation in the batch."""
    result: Rewards = centred / (np.sqrt((centred**2).sum() / max(int(valid.sum()), 1)) + EPS)
    return result


def _centred(rewards: Rewards, valid: Valid) -> tuple[Rewards, npt.NDArray[np.int64]]:
    """[G, N] rewards minus the mean of their group, 0 where invalid; [G, 1] number of valid ones. Exactly 0 in a group
    without signal: what rounding leaves of equal rewards would count as an advantage."""
    count = valid.sum(axis=1, keepdims=True)
    mean = np.where(valid, rewards, 0.0).sum(axis=1, keepdims=True) / np.maximum(count, 1)
    counted = valid & has_signal(rewards, valid)[:, None]
    return np.where(counted, rewards - mean, 0.0), count
