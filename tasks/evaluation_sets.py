"""Sets of prompts that a model is evaluated on, as their makers read them from the job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tasks.columns import Columns
from tasks.environments import make_source
from tasks.episodes.limits import EnvironmentConfig
from tasks.rows import Use
from tasks.task_source import TaskSource


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSet:
    """A set of prompts; see EvaluationSetConfig. source: empty: the held-out prompts of the run's own. max_new_tokens,
    temperature: those of its responses. main: whether the run's own reward scores it."""

    name: str
    source: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    columns: Columns = Columns()
    seed: int = 0
    limits: EnvironmentConfig = EnvironmentConfig()
    main: bool = False
    reward: str = "task"
    prompts: int
    samples: int
    greedy: bool
    temperature: float | None
    max_new_tokens: int

    def build(self) -> TaskSource:
        """Create its source, which it must name. Raises ConfigError."""
        key = f"evaluation.sets.{self.name}.source"
        return make_source(self.source, self.options, self.seed, self.columns, Use.EVALUATION, self.limits, key=key)
