"""Advantages from the rewards of a step's groups. Numpy, pure.

An estimator maps (rewards, valid), both [G, N] with one row per group, to [G, N]: one advantage per trajectory,
constant over its tokens. An invalid member (its reward could not be computed) does not count in its group's
statistics; its own result is not used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from staleflow.stores.errors import ConfigError, raised_as, type_and_message
from staleflow.stores.reward_statistics import has_signal
from staleflow.tasks.settings.registry import Registry, RegistryEntry, UserCode
from staleflow.tasks.settings.user_code import load

EPS = 1e-6
"""Added to a standard deviation that is divided by, as in the published implementations."""

Rewards = npt.NDArray[np.float64]
Valid = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongPenalty:
    """DAPO's soft penalty on responses whose length is near the limit `max_length` (2503.14476). It is subtracted from
    their reward, and grows from 0 at `max_length - ramp_tokens` to `penalty` at `max_length`.

    >>> OverlongPenalty(ramp_tokens=10, penalty=1.0, max_length=100).penalties(np.array([50, 90, 95, 100])).tolist()
    [0.0, 0.0, 0.5, 1.0]
    """

    ramp_tokens: int
    penalty: float
    max_length: int

    def penalties(self, lengths: npt.NDArray[np.int64]) -> Rewards:
        """Penalties of responses by their lengths, each at least 0; all 0 if `ramp_tokens` is 0."""
        excess = lengths - (self.max_length - self.ramp_tokens)
        penalties: Rewards = self.penalty * np.clip(
            excess / max(self.ramp_tokens, 1), 0.0, 1.0 if self.ramp_tokens else 0.0
        )
        return penalties


class Advantage(RegistryEntry, ABC):
    """An estimator of advantages."""

    __slots__ = ()
    compares_members = True
    """Whether it compares the members of a group, and so needs groups of at least two."""

    def advantages(self, rewards: Rewards, valid: Valid) -> npt.NDArray[np.float32]:
        """Compute one advantage per trajectory, 0 for invalid ones. Returns [G, N] float32. Raises ConfigError if a
        user's estimator cannot be loaded or used.

        >>> Rloo().advantages(np.array([[1.0, 0.0, 0.0]]), np.ones((1, 3), bool)).tolist()
        [[1.0, -0.5, -0.5]]
        """
        return np.where(valid, self.estimate(rewards, valid), 0.0).astype(np.float32)

    @abstractmethod
    def estimate(self, rewards: Rewards, valid: Valid) -> Rewards:
        """Estimate advantages, [G, N]. Values of invalid members are ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserAdvantage(UserCode, Advantage):
    """An advantage function from a user's file. Checks its results."""

    code_kind: ClassVar[str] = "function"
    compares_members = False

    def estimate(self, rewards: Rewards, valid: Valid) -> Rewards:
        function = self.code or load(self.name, ADVANTAGES.key)
        setting = f"{ADVANTAGES.key} = {self.name!r}"
        with raised_as(ConfigError, f"{setting} raised", Exception, SystemExit, describe=type_and_message):
            estimates = np.asarray(function(rewards.copy(), valid.copy()), np.float64)
        if estimates.shape != rewards.shape or not np.isfinite(estimates[valid]).all():
            mistake = f"shape {estimates.shape}" if estimates.shape != rewards.shape else "a number that is not finite"
            raise ConfigError(f"{setting}: returned {mistake}; it must return {rewards.shape} finite numbers")
        return estimates


ADVANTAGES: Registry[Advantage] = Registry("advantage", "training.advantage", Advantage, user_code=UserAdvantage)


@ADVANTAGES.register("grpo")
@dataclass(frozen=True, slots=True)
class Grpo(Advantage):
    """GRPO (2402.03300)."""

    def estimate(self, rewards: Rewards, valid: Valid) -> Rewards:
        centered, count = _center(rewards, valid)
        # Sample standard deviation, as in the published implementations.
        std = np.sqrt((centered**2).sum(axis=1, keepdims=True) / np.maximum(count - 1, 1))
        result: Rewards = centered / (std + EPS)
        return result


@ADVANTAGES.register("dapo")
@dataclass(frozen=True, slots=True)
class Dapo(Grpo):
    """DAPO (2503.14476): the same estimate; its other parts are clip_high, token_mean and the no_signal filter."""


@ADVANTAGES.register("dr_grpo")
@dataclass(frozen=True, slots=True)
class DrGrpo(Advantage):
    """Dr. GRPO (2503.20783)."""

    def estimate(self, rewards: Rewards, valid: Valid) -> Rewards:
        return _center(rewards, valid)[0]


@ADVANTAGES.register("rloo")
@dataclass(frozen=True, slots=True)
class Rloo(Advantage):
    """RLOO (2402.14740): R - mean of the others = (R - mean) n / (n - 1); a group of one has no others."""

    def estimate(self, rewards: Rewards, valid: Valid) -> Rewards:
        centered, count = _center(rewards, valid)
        result: Rewards = centered * count / np.maximum(count - 1, 1)
        return result


@ADVANTAGES.register("reinforce_plus_plus")
@dataclass(frozen=True, slots=True)
class ReinforcePlusPlus(Advantage):
    """REINFORCE++ (2501.03262): rewards whitened over the whole batch; groups are ignored."""

    compares_members = False

    def estimate(self, rewards: Rewards, valid: Valid) -> Rewards:
        return _whiten(_center(rewards.ravel()[None], valid.ravel()[None])[0], valid).reshape(rewards.shape)


@ADVANTAGES.register("reinforce_plus_plus_baseline")
@dataclass(frozen=True, slots=True)
class ReinforcePlusPlusBaseline(Advantage):
    """REINFORCE++ with the group mean as baseline."""

    def estimate(self, rewards: Rewards, valid: Valid) -> Rewards:
        return _whiten(_center(rewards, valid)[0], valid)


@ADVANTAGES.register("none")
@dataclass(frozen=True, slots=True)
class NoAdvantage(Advantage):
    """Advantages of 0, for objectives without advantages such as distillation."""

    compares_members = False

    def estimate(self, rewards: Rewards, valid: Valid) -> Rewards:
        return np.zeros_like(rewards)


def _whiten(centered: Rewards, valid: Valid) -> Rewards:
    """Centred rewards divided by their standard deviation in the batch."""
    result: Rewards = centered / (np.sqrt((centered**2).sum() / max(int(valid.sum()), 1)) + EPS)
    return result


def _center(rewards: Rewards, valid: Valid) -> tuple[Rewards, npt.NDArray[np.int64]]:
    """[G, N] rewards minus the mean of their group, 0 where invalid; [G, 1] number of valid ones. Exactly 0 in a group
    of equal rewards, where rounding errors would otherwise be scaled up to advantages."""
    count = valid.sum(axis=1, keepdims=True)
    mean = np.where(valid, rewards, 0.0).sum(axis=1, keepdims=True) / np.maximum(count, 1)
    return np.where(valid & has_signal(rewards, valid)[:, None], rewards - mean, 0.0), count
