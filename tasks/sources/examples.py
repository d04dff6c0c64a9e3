"""Examples for supervised fine-tuning: prompts encoded as in RL, each with its answer and the end of a response.

Example `i` is always the same, so the batch of a step needs no store and no state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from staleflow.stores.errors import ConfigError, raised_as
from staleflow.tasks.rendering.task_source import Task, TaskSource, draw_tasks, prompt_excerpt
from staleflow.tasks.settings.dataset_columns import Columns, DataUse
from staleflow.tasks.settings.source_kinds import is_environment
from staleflow.tasks.sources.dataset_rows import RowSource
from staleflow.tasks.sources.evaluation_sets import EvaluationSet, evaluated_prompts
from staleflow.tasks.sources.prompts import FilteredSource, PromptSettings, TokenizedPrompts, without_prompts
from staleflow.tasks.sources.task_sources import SourceSettings, make_source
from staleflow.tasks.training.microbatches import Row

SOURCE_KEY = "training.sft.source"
"""Key in the job file of the examples' own source."""
PROMPTS_KEY = "task.source"
"""Key of their source without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleSettings:
    """Settings of the examples of supervised fine-tuning; see SftConfig."""

    prompts: PromptSettings
    """The run's prompts and their encoding; only the encoding is used if `source` is set."""
    examples_per_step: int
    """Examples per step."""
    source: str = ""
    """Source of the examples; empty: training prompts of the run."""
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    columns: Columns = Columns()
    held_out_source: SourceSettings | None = None
    """Settings of the source whose held-out prompts are excluded from `source`; None if there are none."""
    eval_sets: tuple[EvaluationSet, ...] = ()
    """Evaluation sets, whose prompts are excluded from `source` too."""

    def build(self) -> Examples:
        """Create the examples. Raises ConfigError."""
        return Examples(self, TokenizedPrompts(self.prompts))


class Examples:
    """The examples of each step, as rows for the trainer."""

    def __init__(self, settings: ExampleSettings, prompts: TokenizedPrompts) -> None:
        """Load the data set. Raises ConfigError."""
        self._settings, self._prompts = settings, prompts
        self._label = f"{SOURCE_KEY} = {settings.source!r}" if settings.source else PROMPTS_KEY
        if settings.source and is_environment(settings.source, SOURCE_KEY):
            raise ConfigError(f"{self._label}: an environment has no answers to learn; name rows with answers")
        self._source = self._make_source() if settings.source else None

    def rows(self, step: int) -> list[Row]:
        """The rows of a step. Raises ConfigError for a row without an answer."""
        count = self._settings.examples_per_step
        indices = range(step * count, (step + 1) * count)
        tasks = self._prompts.tasks(indices) if self._source is None else draw_tasks(self._source, indices)
        return [self.row(task) for task in tasks]

    def row(self, task: Task) -> Row:
        """Build the row of a prompt and its answer. The answer is truncated to the maximum length of a response. Raises
        ConfigError."""
        answer = task.record.get("answer")
        if not isinstance(answer, str) or not answer.strip():
            raise ConfigError(
                f"{self._label}: an example has no text as its answer: {prompt_excerpt(task.prompt)}; name rows with "
                f"answers as {SOURCE_KEY}, and their column as task.columns.answer"
            )
        prompt, response = self._prompts.encode(task), self._prompts.encode_response(answer)
        return Row(
            prompt=np.asarray(prompt, np.int32),
            response=np.asarray(response, np.int32),
            behaviour=np.zeros(len(response), np.float32),
            sampled=np.ones(len(response), np.bool_),
            advantage=0.0,
            staleness=1,  # a fresh row's logprobs are compared with the model's
        )

    def _make_source(self) -> TaskSource:
        settings = self._settings
        source = make_source(
            settings.source, settings.options, settings.seed, settings.columns, DataUse.TRAINING, key=SOURCE_KEY
        )
        if isinstance(source, RowSource):
            with raised_as(ConfigError, self._label, ConfigError):
                source.check_text_answers()
        if settings.held_out_source is not None:
            source = source.excluding_held_out(settings.prompts.num_held_out, settings.held_out_source.build())
        source = without_prompts(source, evaluated_prompts(settings.eval_sets))
        return source if settings.prompts.max_prompt_tokens is None else FilteredSource(source, self._prompts.fits)
