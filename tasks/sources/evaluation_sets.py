"""Sets of prompts that a model is evaluated on, as their makers read them from the job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from staleflow.stores.errors import ConfigError
from staleflow.tasks.rendering.task_source import TaskSource
from staleflow.tasks.settings.dataset_columns import Columns
from staleflow.tasks.settings.source_kinds import is_environment
from staleflow.tasks.sources.dataset_rows import Use
from staleflow.tasks.sources.task_sources import make_source


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSet:
    """A set of prompts to evaluate a model on; see EvaluationSetConfig."""

    name: str
    source: str = ""
    """Empty: the held-out prompts of the run's own."""
    options: Mapping[str, Any] = field(default_factory=dict)
    columns: Columns = Columns()
    seed: int = 0
    main: bool = False
    """Whether the run's own reward scores it."""
    reward: str = "task"
    prompts: int
    samples: int
    greedy: bool
    temperature: float | None
    max_new_tokens: int

    def build(self) -> TaskSource:
        """Create its source, which it must name. Raises ConfigError."""
        key = f"evaluation.sets.{self.name}.source"
        if is_environment(self.source, key):
            raise ConfigError(
                f"{key} = {self.source!r} is an environment of many turns, which is played as task.source or "
                "task.eval_source only; leave it empty in a set of that environment's tasks"
            )
        return make_source(self.source, self.options, self.seed, self.columns, Use.EVALUATION, key=key)
