"""The evaluations during training of a simulated run, requested as in a real run. Those before and after training are
left out, since they do not affect the time of a step. Pure."""

from __future__ import annotations

from staleflow.pipeline.config.evaluation_settings import EvaluationSchedule
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.coordination.events import EvaluationRequested, NewGroup
from staleflow.stores.trajectory import GroupId
from staleflow.tasks.emulation.workload import Workload


class SimulatedEvaluations:
    """The evaluations of one simulated run. Responses are the workload's."""

    def __init__(self, config: RunConfig, workload: Workload) -> None:
        self._workload = workload
        self._schedule = EvaluationSchedule(every=config.evaluation.every, num_steps=config.steps)
        sets = config.evaluation_sets.values() if config.evaluation.every else ()
        self._size = sum(eval_set.prompts * eval_set.responses_per_prompt for eval_set in sets)
        self._number = 0
        self._is_running = self._is_due = False

    @property
    def pending(self) -> bool:
        """Whether an evaluation is running or due."""
        return self._is_running or self._is_due

    def request_after_publish(self, version: int) -> EvaluationRequested | None:
        """The request that follows a published version, if it is due and no evaluation is running."""
        self._is_due |= self._size > 0 and self._schedule.is_due(version)
        return self._next()

    def concluded(self, *, abandoned: bool) -> EvaluationRequested | None:
        """The request that follows the end of an evaluation, if another one is due."""
        self._is_running = False
        self._is_due |= abandoned
        return self._next()

    def _next(self) -> EvaluationRequested | None:
        if self._is_running or not self._is_due:
            return None
        self._is_running, self._is_due = True, False
        groups = [GroupId(-1 - self._number * self._size - i) for i in range(self._size)]
        self._number += 1
        return EvaluationRequested(
            evaluation=self._number - 1,
            groups=tuple(NewGroup(group=g, prompt_tokens=self._workload.prompt_tokens(-g)) for g in groups),
        )
