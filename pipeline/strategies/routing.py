"""Which instance samples a trajectory. Each rule sees the instances that may serve it and picks one, or declines.

Declined work stays in the queue, where it can still go to any instance, and to a newer version.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from stores.errors import ConfigError
from tasks.engines.cost_model import CostModel, Numbers
from tasks.knobs import knob
from tasks.registry import Registry
from tasks.user_code import said

BoolArray = npt.NDArray[np.bool_]
Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What a rule may know of a trajectory. kv_tokens: that it needs at once. pace_s: seconds a token may take if it is
    to be in time for the step that will want it; infinite if nothing is known."""

    kv_tokens: int
    pace_s: float = math.inf
    planned_s: float = 0.0
    """Seconds a decode step takes by plan: no instance need be faster for anyone's sake."""
    continued: bool = False
    """It has a place promised already, and perhaps tokens."""


class Loads(Protocol):
    """What a rule may know of the instances, an element each. pace_s: what the most urgent one they run needs."""

    @property
    def running(self) -> Numbers: ...
    @property
    def kv_tokens(self) -> Numbers: ...
    @property
    def pace_s(self) -> Numbers: ...


class Routing(Protocol):
    """Decides on the speculative state; never modifies it."""

    @property
    def knows_urgency(self) -> bool:
        """Whether it looks at pace: then it is worth working out."""
        ...

    def choose(self, work: Candidate, loads: Loads, fitting: BoolArray) -> int | None:
        """The row of an instance, one of those marked `fitting` (at least one is), or None to let it wait."""
        ...

    def takes(self, work: Candidate, running: int, kv_tokens: float) -> bool:
        """Whether an instance with this load would be given such work, if it were the only one."""
        ...


@dataclass(frozen=True, slots=True)
class SeenLoads:
    """Loads that cannot be changed."""

    running: Numbers
    kv_tokens: Numbers
    pace_s: Numbers


@dataclass(frozen=True, slots=True)
class OwnRouting:
    """A rule from a user's file, at arm's length: it is shown what it cannot change, and what it raises names it.
    Whether the instance it chooses fits is for the coordinator to say, as with every rule."""

    rule: Routing
    name: str

    @property
    def knows_urgency(self) -> bool:
        return bool(self.rule.knows_urgency)

    def choose(self, work: Candidate, loads: Loads, fitting: BoolArray) -> int | None:
        seen = SeenLoads(_locked(loads.running), _locked(loads.kv_tokens), _locked(loads.pace_s))
        row = self._asked("choose", work, seen, _locked(fitting))
        try:
            return None if row is None else operator.index(row)
        except TypeError:
            raise ConfigError(f"{self._where}: choose gave {row!r}; it must give a row's number or None") from None

    def takes(self, work: Candidate, running: int, kv_tokens: float) -> bool:
        return bool(self._asked("takes", work, running, kv_tokens))

    @property
    def _where(self) -> str:
        return f"{ROUTING.key} = {self.name!r}"

    def _asked(self, method: str, *arguments: object) -> Any:
        try:
            return getattr(self.rule, method)(*arguments)
        except Exception as error:  # a user's code
            raise ConfigError(f"{self._where}: {method} raised {type(error).__name__}: {said(error)}") from error


def _locked(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    view = array.view()
    view.flags.writeable = False
    return view


ROUTING: Registry[Routing] = Registry(
    "routing rule", "rollout.routing", contract=Routing, own=True, options="routing_options", guarded=OwnRouting
)
"""A rule may ask for `cost`, the cost model; `rng`, numbers drawn from the job's seed; and `eta`, the bound."""


@ROUTING.register("random")
@dataclass(frozen=True, slots=True)
class Random:
    """Any of them."""

    rng: np.random.Generator

    knows_urgency = False

    def choose(self, work: Candidate, loads: Loads, fitting: BoolArray) -> int | None:
        return int(self.rng.choice(np.flatnonzero(fitting)))

    def takes(self, work: Candidate, running: int, kv_tokens: float) -> bool:
        return True


@ROUTING.register("round_robin")
@dataclass(slots=True)
class RoundRobin:
    """Each instance in turn."""

    _last: int = field(default=-1, init=False)

    knows_urgency = False

    def choose(self, work: Candidate, loads: Loads, fitting: BoolArray) -> int | None:
        rows = np.flatnonzero(fitting)
        after = rows[rows > self._last]
        self._last = int(after[0] if len(after) else rows[0])
        return self._last

    def takes(self, work: Candidate, running: int, kv_tokens: float) -> bool:
        return True


@ROUTING.register("least_requests")
class LeastRequests:
    """The instance with the fewest running trajectories; the first of equals."""

    knows_urgency = False

    def choose(self, work: Candidate, loads: Loads, fitting: BoolArray) -> int | None:
        return int(np.where(fitting, loads.running, np.inf).argmin())

    def takes(self, work: Candidate, running: int, kv_tokens: float) -> bool:
        return True


@ROUTING.register("throughput_optimal")
@dataclass(frozen=True, slots=True)
class ThroughputOptimal:
    """The instance whose throughput gains most; declines when that gain is below mu times an empty instance's
    (StaleFlow, arXiv 2601.12784)."""

    cost: CostModel
    mu: float = knob(0.1, "throughput_optimal: least gain, as a share of an empty instance's", low=0, high=1)

    knows_urgency = False

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
class Deadline:
    """Ours: every promised place has a step that will wait for it, so a decode step may take no longer than the most
    urgent trajectory of an instance can afford; or than the plan says, since what is late already gains nothing from
    instances that stand empty.

    New work goes where throughput gains most among the instances that keep everyone's pace with it, and waits if there
    is none. Candidate that has begun never waits for that: if nobody keeps its pace, the fastest instance takes it.
    """

    cost: CostModel

    knows_urgency = True

    def choose(self, work: Candidate, loads: Loads, fitting: BoolArray) -> int | None:
        after_s = self.cost.steps_s(loads.running + 1, loads.kv_tokens + work.kv_tokens)
        in_time = fitting & (after_s <= np.maximum(np.minimum(loads.pace_s, work.pace_s), work.planned_s))
        if in_time.any():
            gains = self.cost.marginal_gains(loads.running, loads.kv_tokens, work.kv_tokens)
            return int(np.where(in_time, gains, -np.inf).argmax())
        fastest = int(np.where(fitting, after_s, np.inf).argmin())
        return fastest if work.continued or loads.running[fastest] == 0 else None

    def takes(self, work: Candidate, running: int, kv_tokens: float) -> bool:
        return running == 0 or self.cost.step_s(running + 1, kv_tokens + work.kv_tokens) <= max(
            work.pace_s, work.planned_s
        )
