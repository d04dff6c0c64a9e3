"""The [evaluation] section of a job: when the model is evaluated, on which prompts, with which share of the
instances."""

from __future__ import annotations

from dataclasses import dataclass

from staleflow.tasks.settings.knobs import knob
from staleflow.tasks.settings.task_config import EvaluationSetConfig

HELD_OUT = "held-out"
"""Name of the set that task.eval_prompts and task.eval_source describe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """Evaluations before, during and after training. They are sampled by the run's own instances."""

    every: int = knob(0, "training steps between evaluations; 0: only the first and the last version", low=0)
    max_slot_share: float = knob(
        0.25,
        "largest share of the instances' slots that an evaluation has while there is training work for them",
        above=0,
        high=1,
    )
    best_checkpoint_set: str = knob(
        "", "set whose mean reward selects checkpoints/best; empty: no best checkpoint is kept"
    )
    sets: dict[str, EvaluationSetConfig] = knob(
        {}, "sets by name, besides that of task.eval_prompts, which is called held-out"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSchedule:
    """The versions of a run that are evaluated: the first, the last, and every `every`-th between them. Pure."""

    every: int
    num_steps: int

    def is_due(self, version: int) -> bool:
        """Whether a version is evaluated.

        >>> [v for v in range(8) if EvaluationSchedule(every=3, num_steps=7).is_due(v)]
        [0, 3, 6, 7]
        """
        return version in {0, self.num_steps} or (self.every > 0 and version % self.every == 0)

    def latest_due(self, version: int) -> int:
        """The latest evaluated version up to this one."""
        return next(v for v in range(version, -1, -1) if self.is_due(v))
