"""Settings of the sets of prompts on which a model is evaluated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from staleflow.stores.errors import ConfigError
from staleflow.tasks.rendering.task_source import Prompt, TaskSource, held_out_prompts
from staleflow.tasks.settings.dataset_columns import Columns, DataUse
from staleflow.tasks.settings.source_kinds import is_environment
from staleflow.tasks.settings.task_config import EvaluationSetConfig
from staleflow.tasks.sources.task_sources import make_source


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSet:
    """A set of prompts on which a model is evaluated."""

    name: str
    config: EvaluationSetConfig
    """Without a source: the held-out prompts of the run's own."""
    columns: Columns = Columns()
    seed: int = 0
    uses_run_reward: bool = False
    """Whether the run's own reward scores it."""
    task_source_number: int = 0
    """Without a source: the number of the run's task source that its prompts are of."""

    answer_pattern: str = ""
    """Finds the answer in a response; empty: it is the whole response."""

    def build(self) -> TaskSource:
        """Create the set's own task source; it must have one. Raises ConfigError."""
        key = f"evaluation.sets.{self.name}.source"
        source = self.config.source
        if is_environment(source, key):
            raise ConfigError(
                f"{key} = {source!r} is an environment of many turns, which is played as task.source or "
                "task.eval_source only; leave it empty in a set of that environment's tasks"
            )
        return make_source(source, self.config.options, self.seed, self.columns, DataUse.EVALUATION, key=key)


def evaluated_prompts(eval_sets: Iterable[EvaluationSet]) -> frozenset[Prompt]:
    """The prompts of those sets that have a source of their own; they must not be trained on. Raises ConfigError."""
    return frozenset[Prompt]().union(
        *(held_out_prompts(s.build(), s.config.prompts) for s in eval_sets if s.config.source)
    )
