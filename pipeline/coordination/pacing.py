"""The pace of a run: how often a step can be trained at best, and how fast each trajectory must be sampled for that.

A step every T seconds needs three things (the physical bound of `staleflow simulate --explain`, made a plan): the
trainer, T >= train_s; the instances, T >= the decode work of a batch at the rate of n running trajectories each; and
the longest trajectory, which may take eta + 1 intervals less the training, (eta + 1) T - train_s >= its tokens x the
step time at n + what its environment takes. More running trajectories raise the rate and the step time, so one n makes
T least: that is the plan. From it follow when later steps will want their batches, and for each trajectory the seconds
a token may take.

That n is a mean, and says nothing of what it costs to hold work back for it. How much longer than planned a decode step
may get before new work waits is therefore tried out: a few limits, and none, are played on the lengths seen so far
(`steady_state`), and new work waits only if that makes steps shorter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from staleflow.pipeline.coordination.forecast import WINDOW, LengthForecast
from staleflow.pipeline.coordination.running_means import Measured, RunningMean
from staleflow.pipeline.coordination.steady_state import CYCLES, AverageInstance, DrawnResponse, interval_s
from staleflow.stores.trajectory import GroupId
from staleflow.tasks.emulation.cost_model import Numbers, StepCosts

LIMITS = (1.0, 1.1, 1.2, 1.35, 1.6)
"""Limits of a decode step that are tried, as factors of the planned one: below it an instance cannot do its share."""
WORTH_IT = 0.01
"""Share by which steps must get shorter for new work to wait: less is the chance of what was drawn."""
TRIALS = 4
"""Draws of lengths that each limit is tried on."""
MOST_TRIED = 512
"""Responses an instance may have in flight for limits to be tried; with more, what one adds is too little to matter."""
MASK = 2**64 - 1
TRUSTED = 0.25
"""Largest share by which steps may take longer or less long than was played for a limit to hold: beyond it the cost
model is not this engine's, or the run is not steady, and nothing waits."""
AGAIN = 1.5
"""Growth of the number of finished responses, or change of the training time, after which limits are tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PacePlan:
    """The pace of a run. interval_s: seconds between training steps. running: trajectories an instance runs for that;
    step_s: seconds of its decode steps then."""

    interval_s: float
    running: int
    step_s: float


def best_plan(
    cost: StepCosts,
    *,
    eta: int,
    trajectories: int,
    instances: int,
    max_running: int,
    mean_tokens: float,
    mean_context: float,
    longest_tokens: float,
    longest_acting_s: float,
    train_s: float,
) -> PacePlan:
    """The plan with the shortest interval. trajectories: per step. mean_tokens, longest_tokens: that are sampled.
    mean_context: KV tokens per running trajectory. longest_acting_s: that the longest one's environment takes."""
    best = PacePlan(interval_s=math.inf, running=1, step_s=math.inf)
    running = 1
    while running <= max_running:
        step_s = cost.step_s(running, running * mean_context)
        work_s = trajectories * (mean_tokens * step_s / running + cost.prefill * mean_context) / instances
        longest_s = (longest_tokens * step_s + longest_acting_s + train_s) / (eta + 1)
        interval_s = max(train_s, work_s, longest_s)
        if interval_s < best.interval_s:
            best = PacePlan(interval_s=interval_s, running=running, step_s=step_s)
        running += max(1, running // 8)
    return best


class Pacing:
    """When later steps will need their batches, and how long decode steps may take.

    slack: factor by which the plan's seconds may be exceeded; 0 to have it found by playing the run out. recomputes:
    an instance that loads new weights prefills all of its contexts."""

    def __init__(
        self,
        cost: StepCosts,
        forecast: LengthForecast,
        *,
        eta: int,
        groups: int,
        group_size: int,
        slack: float,
        recomputes: bool,
    ) -> None:
        self._cost = cost
        self._forecast = forecast
        self._eta = eta
        self._groups, self._group_size = groups, group_size
        self._slack = slack
        self._recomputes = recomputes
        self._started_s, self._step = 0.0, -1
        self._train_s = RunningMean()
        self._tried: tuple[int, int, int, float] = (0, 0, 0, 0.0)
        self._limit, self._interval_s = math.inf, math.inf
        self.plan = PacePlan(interval_s=math.inf, running=2**31, step_s=math.inf)

    def step_started(self, step: int, now: float) -> None:
        self._started_s, self._step = now, step

    def step_finished(self, now: float) -> None:
        self._train_s.add(now - self._started_s)

    def replan(self, instances: int, max_running: int, kv_capacity: int, measured: Measured) -> None:
        """Plan anew from the lengths and seconds measured so far. max_running, kv_capacity: of the largest instance."""
        if not instances:
            return
        forecast, episodes = self._forecast, self._forecast.episodes
        longest = forecast.longest_remaining(GroupId(-1), 0)
        self.plan = best_plan(
            self._cost,
            eta=self._eta,
            trajectories=self._groups * self._group_size,
            instances=instances,
            max_running=max_running,
            mean_tokens=episodes.sampled(forecast.mean),
            mean_context=measured.prompt_tokens.value + forecast.mean_position,
            longest_tokens=episodes.sampled(longest),
            longest_acting_s=episodes.acting_s(longest),
            train_s=self._train_s.value,
        )
        if self._slack:
            interval_s, limit = self.plan.interval_s * self._slack, self._slack
        else:
            self._try_limits(instances, max_running, kv_capacity, measured)
            as_played = abs(measured.interval_s.value / self._interval_s - 1) <= TRUSTED
            interval_s, limit = min(self._interval_s, self.plan.interval_s), self._limit if as_played else math.inf
        self.plan = replace(self.plan, interval_s=interval_s, step_s=self.plan.step_s * limit)

    def _try_limits(self, instances: int, max_running: int, kv_capacity: int, measured: Measured) -> None:
        """Find the limit of decode steps with which steps are shortest, if what it depends on has changed enough."""
        finished, train_s = self._forecast.num_finished, self._train_s.value
        before = self._tried
        if not self._forecast.knows or not train_s:
            return
        grown = finished >= min(AGAIN * before[2], before[2] + WINDOW)
        changed = not train_s / AGAIN <= before[3] <= train_s * AGAIN
        if (instances, max_running) == before[:2] and not grown and not changed:
            return
        self._tried = (instances, max_running, finished, train_s)
        self._limit = self._interval_s = math.inf
        share = self._groups * self._group_size / instances
        group_size = min(self._group_size, max(1, round(share)))
        groups = max(1, round(share / group_size))
        if groups * group_size * (self._eta + 1) > MOST_TRIED:
            return
        one = AverageInstance(
            cost=self._cost,
            eta=self._eta,
            groups=groups,
            group_size=group_size,
            max_running=max_running,
            kv_capacity=kv_capacity,
            prompt_tokens=measured.prompt_tokens.value,
            typical_tokens=measured.prompt_tokens.value + self._forecast.mean_position,
            train_s=train_s,
            pull_s=measured.pull_s.value,
            recomputes=self._recomputes,
        )
        count = groups * group_size
        drawn = [self._drawn(count, trial) for trial in range(TRIALS)]
        tried = {
            limit: sum(interval_s(one, responses, self.plan.step_s * limit) for responses in drawn) / TRIALS
            for limit in (*LIMITS, math.inf)
        }
        best = min(tried, key=tried.__getitem__)
        self._limit = best if tried[best] < (1 - WORTH_IT) * tried[math.inf] else math.inf
        self._interval_s = tried[self._limit]

    def _drawn(self, count: int, trial: int) -> list[DrawnResponse]:
        """Responses as an instance may get them, `count` a version: drawn from the lengths seen lately, and one of each
        version the longest of its step, since what a step waits for runs somewhere."""
        forecast, episodes = self._forecast, self._forecast.episodes
        longest = forecast.longest_remaining(GroupId(-1), 0)
        versions = range((CYCLES + 1) * (self._eta + 1))
        tokens: list[float] = [forecast.drawn(_mixed(trial, k)) for k in range(count * len(versions))]
        for version in versions:
            tokens[version * count + int(_mixed(trial, -1 - version) * count)] = longest
        return [DrawnResponse(steps=max(1.0, episodes.sampled(n)), acting_s=episodes.acting_s(n)) for n in tokens]

    def due_s(self, step: int, now: float) -> float:
        """Second at which `step` will need its batch. A late step delays all that follow."""
        planned = self._started_s + (step - self._step) * self.plan.interval_s
        return max(planned, now + (step - self._step - 1) * self.plan.interval_s)

    def pace_s(self, due_step: int, group: GroupId, tokens: int, now: float) -> float:
        """Seconds a token may take to be sampled for a trajectory with `tokens` so far to be finished when `due_step`
        needs it, after what its environment will take."""
        remaining = self._forecast.longest_remaining(group, tokens)
        left_s = self.due_s(due_step, now) - now - self._forecast.episodes.acting_s(remaining)
        return max(left_s, 0.0) / self._forecast.episodes.sampled(remaining)

    def steps_s(self, running: Numbers, kv_tokens: Numbers) -> Numbers:
        """Seconds of a decode step on each of many instances."""
        return self._cost.steps_s(running, kv_tokens)


def _mixed(trial: int, number: int) -> float:
    """A number in [0, 1) that looks drawn at random and is always the same (splitmix64, by Steele, Lea and Flood)."""
    z = (trial << 40) + number * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return ((z ^ z >> 31) >> 11) / 2**53
