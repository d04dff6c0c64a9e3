"""Procedural tasks of the `reasoning-gym` package as a task source."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from typing import Any

from staleflow.stores.errors import ConfigError, raised_as, type_and_message
from staleflow.tasks.rendering.task_source import Prompt, Record, Task, TaskSource, held_out_prompts

MAX_REDRAWS = 10_000
"""Draws for one training prompt before the whole source counts as held out. If only one prompt in a hundred is not held
out, all draws fail with probability 10**-43."""

DRAW_LOCK = threading.RLock()
"""Held while a dataset or a user's code draws a prompt. Some datasets seed and use numpy's global generator, others
keep their own: two threads drawing at once would both get wrong prompts. Reentrant, as a dataset may use another."""


class ReasoningGym:
    """Procedural tasks with verifiers from the `reasoning-gym` package. Unlimited; task i is drawn with seed + i."""

    HELD_OUT_OFFSET = 10**12
    """Index of the first held-out prompt; training never reaches it."""
    REDRAWN_OFFSET = 15 * 10**11
    """First index of the redraws that replace training prompts found to be held out."""

    num_held_out = None

    def __init__(self, dataset: str, options: Mapping[str, Any], seed: int, key: str = "task.source") -> None:
        """key: key in the job file, for messages."""
        import reasoning_gym

        self._name = dataset
        self._num_held_out = 0
        self._held_out: frozenset[Prompt] = frozenset()
        self._num_drawn = self._num_redrawn = 0
        try:
            self._dataset = reasoning_gym.create_dataset(dataset, size=2 * 10**12, seed=seed * 10**7, **options)
        except ValueError as error:
            raise ConfigError(f"{key} = reasoning_gym:{dataset}: {error}") from error
        except (TypeError, AssertionError) as error:
            options_key = key.replace("source", "options")
            raise ConfigError(f"{options_key} for reasoning_gym:{dataset}: {error}") from error

    def task(self, index: int, *, held_out: bool = False) -> Task:
        if held_out:
            return self._draw(index + self.HELD_OUT_OFFSET)
        task = self._draw(index)
        if not self._held_out:
            return task
        self._num_drawn += 1
        if task.prompt in self._held_out:
            self._num_redrawn += 1
            tries = range(MAX_REDRAWS)
            redraws = (self._draw(self.REDRAWN_OFFSET + index * MAX_REDRAWS + i) for i in tries)
            replacement = next((t for t in redraws if t.prompt not in self._held_out), None)
            if replacement is None:
                raise ConfigError(
                    f"task.source = reasoning_gym:{self._name}: {MAX_REDRAWS} draws gave only prompts that are held "
                    f"out; lower task.eval_prompts = {self._num_held_out}, or set task.options that allow more "
                    "distinct prompts"
                )
            task = replacement
        return task

    def excluding_held_out(self, num_held_out: int, evaluation: TaskSource | None = None) -> ReasoningGym:
        other = copy.copy(self)
        other._num_held_out, other._held_out = num_held_out, held_out_prompts(evaluation or self, num_held_out)
        other._num_drawn = other._num_redrawn = 0
        return other

    @property
    def held_out_notice(self) -> str:
        if not self._num_redrawn:
            return ""
        return f"{self._num_redrawn} of {self._num_drawn} prompts drawn for training were held out, and replaced"

    def _draw(self, index: int) -> Task:
        problem = f"task.source = reasoning_gym:{self._name}: it cannot draw prompt {index}"
        with DRAW_LOCK, raised_as(ConfigError, problem, Exception, describe=type_and_message):
            entry = self._dataset[index]
        return Task(prompt=entry["question"], record={**entry, "prompt": entry["question"]})

    def score(self, answer: str, record: Record) -> float:
        return float(self._dataset.score_answer(answer, dict(record)))
