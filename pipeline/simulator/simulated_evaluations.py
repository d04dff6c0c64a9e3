"""The evaluations of a simulated run, where the job asks for some beside training: requested when a run on a cluster
requests them. Those before and after training alone are left out: they are no part of what a step takes. Pure."""

from __future__ import annotations

from staleflow.pipeline.config.evaluation_settings import EvaluationSchedule
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.coordination.events import EvaluationRequested, NewGroup
from staleflow.stores.trajectory import GroupId
from staleflow.tasks.emulation.workload import Workload


class SimulatedEvaluations:
    """One run's. Each response is one of the workload's."""

    def __init__(self, config: RunConfig, workload: Workload) -> None:
        self._workload = workload
        self._schedule = EvaluationSchedule(every=config.evaluation.every, num_steps=config.steps)
        sets = config.evaluation_sets.values() if config.evaluation.every else ()
        self._size = sum(eval_set.prompts * eval_set.responses_per_prompt for eval_set in sets)
        self._number = 0
        self._under_way = self._is_due = False

    @property
    def pending(self) -> bool:
        """Whether an evaluation is under way, or due."""
        return self._under_way or self._is_due

    def published(self, version: int) -> EvaluationRequested | None:
        """The request that follows a version, if it is to be evaluated and no evaluation is under way."""
        self._is_due |= self._size > 0 and self._schedule.is_due(version)
        return self._next()

    def concluded(self, *, abandoned: bool) -> EvaluationRequested | None:
        """The request that follows the end of an evaluation, if another is due."""
        self._under_way = False
        self._is_due |= abandoned
        return self._next()

    def _next(self) -> EvaluationRequested | None:
        if self._under_way or not self._is_due:
            return None
        self._under_way, self._is_due = True, False
        groups = [GroupId(-1 - self._number * self._size - i) for i in range(self._size)]
        self._number += 1
        return EvaluationRequested(
            evaluation=self._number - 1,
            groups=tuple(NewGroup(group=g, prompt_tokens=self._workload.prompt_tokens(-g)) for g in groups),
        )
