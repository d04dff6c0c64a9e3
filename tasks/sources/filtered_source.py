"""A task source that replaces prompts that are too long or held out by other prompts of the same source."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from staleflow.stores.errors import ConfigError
from staleflow.tasks.rendering.task_source import Reward, Task, TaskSource

ATTEMPTS = 1000
"""Maximum prompts tried in place of one. If only one in a hundred fits, all fail with probability 4e-5."""
INDEX_STEP = 10_007
"""Distance between the indices tried, a prime: its multiples reach every row of a file. It grows with each attempt, so
that a file of as many rows is reached too."""


class Replacement(NamedTuple):
    """Why prompts are replaced. notice: shown with the number of replaced prompts. remedy: error message if none of
    ATTEMPTS prompts fits."""

    notice: str
    remedy: str


TOO_LONG = Replacement(
    "too long, and replaced (task.skip_long)",
    f"task.skip_long: {ATTEMPTS} prompts in a row are too long; lower rollout.max_new_tokens, raise "
    "rollout.engine.kv_tokens, or shorten the prompts",
)
EVALUATED = Replacement(
    "prompts of [evaluation.sets], and replaced",
    f"evaluation.sets: {ATTEMPTS} prompts of task.source in a row are evaluated; take fewer prompts, or another source",
)


class FilteredSource:
    """The training prompts of a source for which `fits` returns True.

    Held-out prompts are not replaced, since their replacements may be trained on. Which prompt replaces another depends
    only on the source and on `fits`.
    """

    def __init__(self, source: TaskSource, fits: Callable[[Task], bool], replacement: Replacement = TOO_LONG) -> None:
        self._source, self._fits, self._replacement = source, fits, replacement
        self._num_drawn = self._num_replaced = 0
        self._count_lock = threading.Lock()

    @property
    def num_held_out(self) -> int | None:
        return self._source.num_held_out

    @property
    def score(self) -> Reward:
        return self._source.score

    @property
    def held_out_notice(self) -> str:
        """The notice of the source, with the number of prompts replaced so far."""
        notice = f"{self._num_replaced} of {self._num_drawn} prompts drawn were {self._replacement.notice}"
        return "; ".join(filter(None, (self._source.held_out_notice, notice if self._num_replaced else "")))

    def excluding_held_out(self, num_held_out: int, evaluation: TaskSource | None = None) -> FilteredSource:
        return FilteredSource(self._source.excluding_held_out(num_held_out, evaluation), self._fits, self._replacement)

    def task(self, index: int, *, held_out: bool = False) -> Task:
        """Return prompt `index`, or its replacement. Raises ConfigError if none fits."""
        if held_out:
            return self._source.task(index, held_out=True)
        for attempt in range(ATTEMPTS):
            other_index = index + attempt * (INDEX_STEP + attempt)
            task = self._source.task(other_index)
            if self._fits(task):
                with self._count_lock:
                    self._num_drawn += 1
                    self._num_replaced += attempt > 0
                return task if task.row >= 0 else replace(task, row=other_index)
        raise ConfigError(self._replacement.remedy)
