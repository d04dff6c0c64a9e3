"""The pace of a run: how often a step can be trained at best, and how fast each trajectory must be sampled for that.

A step every T seconds needs three things (the physical bound of `staleflow simulate --explain`, made a plan): the
trainer, T >= train_s; the instances, T >= the decode work of a batch at the rate of n running trajectories each; and
the longest trajectory, which may take eta + 1 intervals less the training, (eta + 1) T - train_s >= its tokens x the
step time at n + what its environment takes. More running trajectories raise the rate and the step time, so one n makes
T least: that is the plan. From it follow when later steps will want their batches, and for each trajectory the seconds
a token may take.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pipeline.coordination.forecast import LengthForecast
from pipeline.coordination.measured import RunningMean
from stores.trajectory import GroupId
from tasks.engines.cost_model import CostModel, Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class PacePlan:
    """The pace of a run. interval_s: seconds between training steps. running: trajectories an instance runs for that;
    step_s: seconds of its decode steps then."""

    interval_s: float
    running: int
    step_s: float


def best_plan(
    cost: CostModel,
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
    """When later steps will need their batches. slack: factor by which the plan's seconds may be exceeded, because it
    knows nothing of bursts and interruptions."""

    def __init__(self, cost: CostModel, forecast: LengthForecast, *, eta: int, trajectories: int, slack: float) -> None:
        self._cost = cost
        self._forecast = forecast
        self._eta = eta
        self._trajectories = trajectories
        self._slack = slack
        self._started_s, self._step = 0.0, -1
        self._train_s = RunningMean()
        self.plan = PacePlan(interval_s=math.inf, running=2**31, step_s=math.inf)

    def step_started(self, step: int, now: float) -> None:
        self._started_s, self._step = now, step

    def step_finished(self, now: float) -> None:
        self._train_s.add(now - self._started_s)

    def replan(self, instances: int, max_running: int, prompt_tokens: float) -> None:
        """Plan anew from the lengths and seconds measured so far."""
        if not instances:
            return
        forecast, episodes = self._forecast, self._forecast.episodes
        longest = forecast.longest_remaining(GroupId(-1), 0)
        self.plan = best_plan(
            self._cost,
            eta=self._eta,
            trajectories=self._trajectories,
            instances=instances,
            max_running=max_running,
            mean_tokens=episodes.sampled(forecast.mean),
            mean_context=prompt_tokens + forecast.mean_position,
            longest_tokens=episodes.sampled(longest),
            longest_acting_s=episodes.acting_s(longest),
            train_s=self._train_s.value,
        )
        self.plan = replace(self.plan, step_s=self.plan.step_s * self._slack)

    def due_s(self, step: int, now: float) -> float:
        """Second at which `step` will need its batch. A late step delays all that follow."""
        planned = self._started_s + (step - self._step) * self.plan.interval_s * self._slack
        return max(planned, now + (step - self._step - 1) * self.plan.interval_s * self._slack)

    def pace_s(self, due_step: int, group: GroupId, tokens: int, now: float) -> float:
        """Seconds a token may take to be sampled for a trajectory with `tokens` so far to be finished when `due_step`
        needs it, after what its environment will take."""
        remaining = self._forecast.longest_remaining(group, tokens)
        left_s = self.due_s(due_step, now) - now - self._forecast.episodes.acting_s(remaining)
        return max(left_s, 0.0) / self._forecast.episodes.sampled(remaining)

    def steps_s(self, running: Numbers, kv_tokens: Numbers) -> Numbers:
        """Seconds of a decode step on each of many instances."""
        return self._cost.steps_s(running, kv_tokens)
