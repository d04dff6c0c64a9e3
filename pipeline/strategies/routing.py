"""Routing rules, which choose the instance that samples a trajectory among the instances with room, or none.

Declined work stays in the queue and can still go to any instance and to a newer version.

A trajectory's next turn goes to the instance that caches its context if that saves more than it costs.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from staleflow.pipeline.strategies.migration import InstanceLoad
from staleflow.stores.errors import ConfigError
from staleflow.tasks.emulation.cost_model import CostModel, Numbers
from staleflow.tasks.settings.knobs import parameter
from staleflow.tasks.settings.registry import Registry, RegistryEntry, UserCode
from staleflow.tasks.settings.user_code import error_text

BoolArray = npt.NDArray[np.bool_]
Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The data about a trajectory that a routing rule receives."""

    kv_tokens: int
    """KV tokens that it needs when it starts: prompt and tokens so far."""
    continued: bool = False
    """Whether it has tokens of an earlier turn or routing."""


class Loads(Protocol):
    """The data about instances that a routing rule receives: arrays of shape [instances] with running trajectories and
    their KV tokens."""

    @property
    def running(self) -> Numbers: ...
    @property
    def kv_tokens(self) -> Numbers: ...


class Routing(RegistryEntry, ABC):
    """A routing rule. It reads the speculative state and never modifies it."""

    __slots__ = ()
    weighs_seconds = False
    """Whether its decisions may change with the scale of the cost model's seconds."""

    @abstractmethod
    def choose(self, candidate: Candidate, loads: Loads, fitting_mask: BoolArray) -> int | None:
        """The index of an instance that is True in `fitting_mask` (at least one is), or None to let the trajectory
        wait."""


@dataclass(frozen=True, slots=True)
class ReadOnlyLoads:
    """Loads whose arrays are read-only."""

    running: Numbers
    kv_tokens: Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class UserRouting(UserCode, Routing):
    """A rule from a user's file. It receives read-only arrays, and errors carry its name. As with every rule, the
    coordinator checks that the chosen instance fits."""

    weighs_seconds = True

    def choose(self, candidate: Candidate, loads: Loads, fitting_mask: BoolArray) -> int | None:
        read_only = ReadOnlyLoads(_read_only(loads.running), _read_only(loads.kv_tokens))
        prefix = f"{ROUTING.key} = {self.name!r}"
        try:
            index = self.code.choose(candidate, read_only, _read_only(fitting_mask))
        except (Exception, SystemExit) as error:  # user code
            raise ConfigError(f"{prefix}: choose raised {type(error).__name__}: {error_text(error)}") from error
        try:
            return None if index is None else operator.index(index)
        except Exception:  # noqa: BLE001  a value of user code may raise anything
            raise ConfigError(
                f"{prefix}: choose returned {index!r}; it must return an instance's index or None"
            ) from None


def _read_only(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    view = array.view()
    view.flags.writeable = False
    return view


ROUTING: Registry[Routing] = Registry(
    "routing rule",
    "rollout.routing",
    Routing,
    user_code=UserRouting,
)
"""A rule may have the parameters `cost`, the cost model; `rng`, a random generator seeded by the job; and `eta`, the
bound."""


@ROUTING.register("deadline")
@dataclass(frozen=True, slots=True)
class DeadlineRouting(Routing):
    """Choose the instance with the shortest decode step including the new trajectory, counting the number and length of
    its running ones. A step waits for every reserved entry, so no instance should fall behind with the oldest
    trajectories."""

    cost: CostModel = parameter()

    def choose(self, candidate: Candidate, loads: Loads, fitting_mask: BoolArray) -> int | None:
        step_after_s = self.cost.step_s_by_instance(loads.running + 1, loads.kv_tokens + candidate.kv_tokens)
        return int(np.where(fitting_mask, step_after_s, np.inf).argmin())


@dataclass(frozen=True, slots=True)
class CacheAffinity:
    """Compares the time of a prefill, which delays all requests of an instance, with slower decoding."""

    step_costs: CostModel

    def prefers_cached(
        self, cached_load: InstanceLoad, preferred_load: InstanceLoad, kv_tokens: int, remaining_tokens: float
    ) -> bool:
        """Whether the trajectory goes to the instance with its cached context.

        Args:
            cached_load: Load of the instance that has the context.
            preferred_load: Load of the instance that routing prefers.
            kv_tokens: Length of the context.
            remaining_tokens: Tokens that the trajectory is expected to sample still.
        """

        def step_s(load: InstanceLoad) -> float:
            return self.step_costs.step_s(load.running + 1, load.kv_tokens + kv_tokens)

        prefill_s = self.step_costs.prefill * kv_tokens * (preferred_load.running + 1)
        return remaining_tokens * (step_s(cached_load) - step_s(preferred_load)) <= prefill_s
