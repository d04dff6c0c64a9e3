"""Routing rules: which instance samples a trajectory. A rule sees the instances that fit and picks one, or declines.

Declined work stays in the queue and can still go to any instance and to a newer version.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from staleflow.stores.errors import ConfigError
from staleflow.tasks.emulation.cost_model import Numbers, StepCosts
from staleflow.tasks.settings.knobs import knob, parameter
from staleflow.tasks.settings.registry import Registry, RegistryEntry, UserCode
from staleflow.tasks.settings.user_code import error_text

BoolArray = npt.NDArray[np.bool_]
Scalar = TypeVar("Scalar", bound=np.generic)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What a rule sees of a trajectory."""

    kv_tokens: int
    """Tokens of KV cache it needs at once."""
    continued: bool = False
    """Whether it has a reserved place already, and perhaps tokens."""


class Loads(Protocol):
    """What a rule sees of the instances, arrays of shape [instances]: running trajectories and KV tokens of these."""

    @property
    def running(self) -> Numbers: ...
    @property
    def kv_tokens(self) -> Numbers: ...


class Routing(RegistryEntry, ABC):
    """A routing rule. It reads the speculative state and never modifies it."""

    __slots__ = ()

    @property
    def weighs_seconds(self) -> bool:
        """Whether its decisions change with the scale of the cost model's seconds."""
        return self.needs("cost")

    @abstractmethod
    def choose(self, work: Candidate, loads: Loads, fitting: BoolArray) -> int | None:
        """The row of an instance marked in `fitting` (at least one is), or None to let the work wait."""

    @abstractmethod
    def takes(self, work: Candidate, running: int, kv_tokens: float) -> bool:
        """Whether an instance with this load would be given this work if it were the only one."""


@dataclass(frozen=True, slots=True)
class ReadOnlyLoads:
    """Loads whose arrays are read-only."""

    running: Numbers
    kv_tokens: Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class UserRouting(UserCode, Routing):
    """A rule from a user's file: it receives read-only arrays, and its errors carry its name. As with every rule, the
    coordinator checks that the chosen instance fits."""

    def choose(self, work: Candidate, loads: Loads, fitting: BoolArray) -> int | None:
        read_only = ReadOnlyLoads(_read_only(loads.running), _read_only(loads.kv_tokens))
        row = self._guarded("choose", lambda: self.code.choose(work, read_only, _read_only(fitting)))
        try:
            return None if row is None else operator.index(row)
        except Exception:  # noqa: BLE001  a value of user code may raise anything
            raise ConfigError(f"{self._where}: choose returned {row!r}; it must return a row number or None") from None

    def takes(self, work: Candidate, running: int, kv_tokens: float) -> bool:
        return self._guarded("takes", lambda: bool(self.code.takes(work, running, kv_tokens)))

    @property
    def _where(self) -> str:
        return f"{ROUTING.key} = {self.name!r}"

    def _guarded(self, method: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except (Exception, SystemExit) as error:  # user code
            raise ConfigError(f"{self._where}: {method} raised {type(error).__name__}: {error_text(error)}") from error


def _read_only(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    view = array.view()
    view.flags.writeable = False
    return view


ROUTING: Registry[Routing] = Registry("routing rule", "rollout.routing", Routing, user_code=UserRouting)
"""A rule may have the parameters `cost`, the cost model; `rng`, a random generator seeded by the job; and `eta`, the
bound."""


@ROUTING.register("random")
@dataclass(frozen=True, slots=True)
class Random(Routing):
    """A random instance."""

    rng: np.random.Generator = parameter()

    def choose(self, work: Candidate, loads: Loads, fitting: BoolArray) -> int | None:
        return int(self.rng.choice(np.flatnonzero(fitting)))

    def takes(self, work: Candidate, running: int, kv_tokens: float) -> bool:
        return True


@ROUTING.register("round_robin")
@dataclass(slots=True)
class RoundRobin(Routing):
    """Each instance in turn."""

    _last: int = field(default=-1, init=False, compare=False)

    def choose(self, work: Candidate, loads: Loads, fitting: BoolArray) -> int | None:
        rows = np.flatnonzero(fitting)
        after = rows[rows > self._last]
        self._last = int(after[0] if len(after) else rows[0])
        return self._last

    def takes(self, work: Candidate, running: int, kv_tokens: float) -> bool:
        return True


@ROUTING.register("least_requests")
@dataclass(frozen=True, slots=True)
class LeastRequests(Routing):
    """The instance with the fewest running trajectories; ties go to the first."""

    def choose(self, work: Candidate, loads: Loads, fitting: BoolArray) -> int | None:
        return int(np.where(fitting, loads.running, np.inf).argmin())

    def takes(self, work: Candidate, running: int, kv_tokens: float) -> bool:
        return True


@ROUTING.register("throughput_optimal")
@dataclass(frozen=True, slots=True)
class ThroughputOptimal(Routing):
    """The instance whose throughput gains most; declines if the gain is below mu times that of an empty instance
    (StaleFlow, arXiv 2601.12784)."""

    cost: StepCosts = parameter()
    mu: float = knob(0.1, "least throughput gain, as a share of an empty instance's gain", low=0, high=1)

    def choose(self, work: Candidate, loads: Loads, fitting: BoolArray) -> int | None:
        gains = np.where(fitting, self.cost.marginal_gains(loads.running, loads.kv_tokens, work.kv_tokens), -np.inf)
        best = int(gains.argmax())
        worth_it = loads.running[best] == 0 or gains[best] >= self._least(work)
        return best if worth_it else None

    def takes(self, work: Candidate, running: int, kv_tokens: float) -> bool:
        return running == 0 or self.cost.marginal_gain(running, kv_tokens, work.kv_tokens) >= self._least(work)

    def _least(self, work: Candidate) -> float:
        return self.mu * self.cost.marginal_gain(0, 0, work.kv_tokens)


@ROUTING.register("deadline")
@dataclass(frozen=True, slots=True)
class Deadline(Routing):
    """The instance whose decode step is shortest with the new work, counting what it runs and how long that has become:
    every reserved place has a step that will wait for it, so no instance may lag behind with its oldest trajectories.
    """

    cost: StepCosts = parameter()

    @property
    def weighs_seconds(self) -> bool:
        return False  # only compares instances

    def choose(self, work: Candidate, loads: Loads, fitting: BoolArray) -> int | None:
        after_s = self.cost.steps_s(loads.running + 1, loads.kv_tokens + work.kv_tokens)
        return int(np.where(fitting, after_s, np.inf).argmin())

    def takes(self, work: Candidate, running: int, kv_tokens: float) -> bool:
        return True
