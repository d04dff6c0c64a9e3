"""Seconds of a training step by activity, and the speed and load of each instance over time. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from staleflow.stores.trajectory import InstanceId, TrajectoryId

SLOW_FACTOR = 1.5
"""An instance is slow if it takes this many times as long as the low median of all; equal ones differ by a few
percent."""
MIN_RESPONSES = 4
"""Minimum responses of an instance before it can be called slow."""


@dataclass(slots=True)
class PeriodTimes:
    """Seconds of a period of a run by activity. All but the first four are means over instances."""

    total_s: float = 0.0
    scoring_s: float = 0.0
    """Seconds in which scoring was the main activity: at least as many responses waited for a reward as were sampled or
    queued."""
    environment_s: float = 0.0
    """Seconds in which environment steps were the main activity: at least as many trajectories waited for one as for
    anything else."""
    environment_trajectory_seconds: float = 0.0
    """Number of trajectories in environments during `environment_s`, integrated over seconds."""
    at_max_running_s: float = 0.0
    """Seconds with max_running requests running."""
    out_of_memory_s: float = 0.0
    """Seconds below max_running and out of KV memory, with trajectories queued."""
    pull_s: float = 0.0
    """Seconds of loading weights."""
    trajectory_seconds: float = 0.0
    """Number of trajectories being sampled, integrated over seconds."""
    kv_token_seconds: float = 0.0
    """Number of KV tokens, integrated over seconds."""

    def add(self, other: PeriodTimes) -> None:
        """Add all seconds of another period."""
        for name in (f.name for f in fields(PeriodTimes)):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def mean_running(self) -> float:
        """Mean number of running trajectories per instance."""
        return self.trajectory_seconds / self.total_s if self.total_s else 0.0

    @property
    def mean_kv_tokens(self) -> float:
        """Mean number of KV tokens per instance."""
        return self.kv_token_seconds / self.total_s if self.total_s else 0.0

    @property
    def mean_in_environment(self) -> float:
        """Mean number of trajectories in environments during `environment_s`."""
        return self.environment_trajectory_seconds / self.environment_s if self.environment_s else 0.0

    def share_of(self, seconds: float) -> float:
        """`seconds` as a share of `total_s`."""
        return seconds / self.total_s if self.total_s else 0.0


@dataclass(slots=True)
class InstanceSpeed:
    """Speed of an instance by its finished responses.

    measured_s: sum of the seconds in which each of them was sampled. expected_s: the same by the cost model, for the
    same tokens and running requests.
    """

    measured_s: float = 0.0
    expected_s: float = 0.0
    num_responses: int = 0

    @property
    def slowdown(self) -> float:
        """Measured seconds over expected seconds; 0 without data."""
        return self.measured_s / self.expected_s if self.expected_s > 0 else 0.0


@dataclass(slots=True)
class StepTimes:
    """Times of a training step since the end of the previous one, or sums over several steps."""

    num_steps: int = 0
    waiting: PeriodTimes = field(default_factory=PeriodTimes)
    """Times while the trainer waited for its batch."""
    training: PeriodTimes = field(default_factory=PeriodTimes)
    """Times from the batch being ready to the new version."""
    num_tokens: int = 0
    """Number of sampled tokens."""
    speeds: dict[InstanceId, InstanceSpeed] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        return self.waiting.total_s + self.training.total_s


def sum_steps(steps: Iterable[StepTimes]) -> StepTimes:
    """Sum the times of several steps."""
    total = StepTimes()
    for step in steps:
        total.num_steps += step.num_steps
        total.num_tokens += step.num_tokens
        total.waiting.add(step.waiting)
        total.training.add(step.training)
        for name, speed in step.speeds.items():
            total_speed = total.speeds.setdefault(name, InstanceSpeed())
            total_speed.measured_s += speed.measured_s
            total_speed.expected_s += speed.expected_s
            total_speed.num_responses += speed.num_responses
    return total


def find_slow_instances(speeds: Mapping[InstanceId, InstanceSpeed]) -> tuple[list[InstanceId], float]:
    """Find slow instances. Returns their names, and the factor by which their tokens take longer than the median of the
    others."""
    slowdowns = {name: s.slowdown for name, s in speeds.items() if s.num_responses >= MIN_RESPONSES and s.slowdown > 0}
    if len(slowdowns) < 2:
        return [], 1.0
    limit = SLOW_FACTOR * statistics.median_low(slowdowns.values())
    slow_names = sorted(name for name, slowdown in slowdowns.items() if slowdown >= limit)
    if not slow_names:
        return [], 1.0
    usual_slowdown = statistics.median(slowdown for name, slowdown in slowdowns.items() if name not in slow_names)
    return slow_names, statistics.mean(slowdowns[name] for name in slow_names) / usual_slowdown


def find_steady_steps(num_steps: int, eta: int) -> tuple[int, int]:
    """Find where a run is in its steady state. Returns (a, b): from the end of step a to the end of step b.

    Leaves out the first eta + 2 steps, and the last eta + 1, because no new work starts in those. The length is a
    multiple of eta + 1 steps, the period in which waits for the longest response recur. In a run too short for that,
    all steps but the first.
    """
    cycle = eta + 1
    first, last = cycle, num_steps - cycle - 1
    last -= (last - first) % cycle
    return (first, last) if last - first >= 2 else (0, num_steps - 1)


def sum_steady_steps(steps: Sequence[StepTimes], eta: int) -> StepTimes:
    """Sum the times of a run's steady steps; of all steps if the run has only one."""
    first, last = find_steady_steps(len(steps), eta)
    return sum_steps(steps[first + 1 : last + 1] or steps)


FULL_MEMORY_SHARE = 0.85
"""Share of the KV cache above which an instance counts as full: routing leaves the rest for growth."""


@dataclass(slots=True)
class RunningTrajectory:
    """A trajectory on an instance."""

    route_number: int
    tokens_at_route: int
    delivered_tokens: int
    """Tokens that it keeps if its instance is lost."""
    tokens_at_report: float
    """Number of its tokens in the latest report."""
    steps_at_report: float
    """Decode steps of its instance at that report."""
    prompt_tokens: int
    sums_at_route: InstanceSums
    """Those of its instance when it was routed."""


@dataclass(slots=True)
class InstanceSums:
    """Sums of an instance since it joined, up to a time, or between two times; see `TrackedInstance`."""

    time_s: float
    """The time, or the seconds between the two."""
    num_pulls: int = 0
    trajectory_seconds: float = 0.0
    kv_token_seconds: float = 0.0
    pull_s: float = 0.0
    prefilled_tokens: float = 0.0

    def copy(self) -> InstanceSums:
        return replace(self)

    def since(self, before: InstanceSums) -> InstanceSums:
        """The sums between an earlier time and this one."""
        return InstanceSums(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))


@dataclass(slots=True)
class TrackedInstance:
    """An instance and its sums. Between two reports each of its trajectories is assumed to gain one token per
    `token_s`, the rate of those that have ended."""

    name: InstanceId
    kv_capacity: int
    max_running: int
    sums: InstanceSums
    """Those up to its latest update."""
    sums_at_report: InstanceSums | None = None
    """Those at the latest report; None before the first."""
    running: dict[TrajectoryId, RunningTrajectory] = field(default_factory=dict)
    kv_tokens: float = 0.0
    token_s: float = math.inf
    decode_steps: float = 0.0
    is_pulling: bool = False

    def advance_to(self, now: float) -> None:
        """Add the time up to `now` to the sums."""
        passed_s, self.sums.time_s = now - self.sums.time_s, now
        steps = 0.0 if self.is_pulling else passed_s / self.token_s
        new_tokens = steps * len(self.running)
        self.sums.trajectory_seconds += passed_s * len(self.running)
        self.sums.kv_token_seconds += passed_s * (self.kv_tokens + new_tokens / 2)
        self.sums.pull_s += passed_s * self.is_pulling
        self.decode_steps += steps
        self.kv_tokens += new_tokens

    def estimate_tokens(self, trajectory: RunningTrajectory) -> float:
        """Estimate the response tokens of a running trajectory at its latest update."""
        return trajectory.tokens_at_report + self.decode_steps - trajectory.steps_at_report

    @property
    def is_full(self) -> bool:
        """Whether it runs as many trajectories as it may."""
        return len(self.running) >= self.max_running

    @property
    def is_out_of_memory(self) -> bool:
        """Whether another trajectory of mean size would not fit into its KV cache."""
        count = len(self.running)
        if not count or self.is_full:
            return False
        return self.kv_tokens * (count + 1) / count > FULL_MEMORY_SHARE * self.kv_capacity


@dataclass(slots=True)
class InstanceCounts:
    """Sums over all instances, updated incrementally: subtract an instance before it changes, and add it afterwards."""

    num_instances: int = 0
    num_full: int = 0
    num_out_of_memory: int = 0
    num_pulling: int = 0
    num_running: int = 0
    kv_tokens: float = 0.0

    def add(self, instance: TrackedInstance, sign: int) -> None:
        """Add an instance (sign 1), or subtract it (sign -1)."""
        self.num_instances += sign
        self.num_full += sign * instance.is_full
        self.num_out_of_memory += sign * instance.is_out_of_memory
        self.num_pulling += sign * instance.is_pulling
        self.num_running += sign * len(instance.running)
        self.kv_tokens += sign * instance.kv_tokens
