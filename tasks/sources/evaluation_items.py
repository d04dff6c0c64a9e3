"""The items of an evaluation, one per response to sample.

A run's evaluations are numbered, and each has the same items in the same order. The group id of a trajectory encodes
its evaluation and item, so a restarted server can find the item again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from staleflow.stores.trajectory import GroupId
from staleflow.tasks.rendering.task_source import Record, Task, distinct_held_out
from staleflow.tasks.sources.evaluation_sets import EvaluationSet
from staleflow.tasks.sources.prompts import Prompts
from staleflow.tasks.sources.task_sources import EvaluationRecord

GREEDY = -1
"""Number of the greedy response to a prompt; sampled ones count from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationItem:
    """One response to sample for an evaluation: its set, prompt and sampling."""

    eval_set: EvaluationSet
    prompt: int
    """Number of the prompt in its set."""
    sample: int
    """Number of the response to it."""
    tokens: tuple[int, ...]
    record: Record
    digest: str
    """Hash of the prompt's text or messages; does not depend on the tokenizer."""

    @property
    def greedy(self) -> bool:
        return self.sample == GREEDY


class ItemSummary(NamedTuple):
    """The numbers of an item, and the name of its set; small enough to send between processes."""

    set_name: str
    prompt: int
    sample: int
    prompt_tokens: int
    digest: str = ""


class EvaluationItems:
    """All items of a run's evaluations, built on first use. Used in one thread."""

    def __init__(self, prompts: Prompts, sets: Sequence[EvaluationSet]) -> None:
        self._prompts, self._sets = prompts, sets
        self._items: list[EvaluationItem] | None = None

    def all(self) -> list[EvaluationItem]:
        """The items, set by set. Raises ConfigError."""
        if self._items is None:
            self._items = [item for eval_set in self._sets for item in self._items_of(eval_set)]
        return self._items

    def summaries(self) -> list[ItemSummary]:
        """A summary of each item."""
        return [ItemSummary(i.eval_set.name, i.prompt, i.sample, len(i.tokens), i.digest) for i in self.all()]

    def item(self, group: GroupId) -> EvaluationItem:
        """The item that belongs to a group of an evaluation."""
        items = self.all()
        return items[(-1 - group) % len(items)]

    def _items_of(self, eval_set: EvaluationSet) -> list[EvaluationItem]:
        sample_numbers = [*range(eval_set.config.samples), *([GREEDY] if eval_set.config.greedy else [])]
        return [
            EvaluationItem(
                eval_set=eval_set,
                prompt=prompt_number,
                sample=sample,
                tokens=self._prompts.encode(task, eval_set.config.max_new_tokens),
                record=record,
                digest=short_digest(repr(task.identity)),
            )
            for prompt_number, task in enumerate(self._tasks(eval_set))
            for record in (
                task.record if eval_set.uses_run_reward else EvaluationRecord.with_label(eval_set.name, task.record),
            )
            for sample in sample_numbers
        ]

    def _tasks(self, eval_set: EvaluationSet) -> list[Task]:
        if not eval_set.config.source:
            return self._prompts.held_out(eval_set.config.prompts, eval_set.task_source_number)
        return [t for t in distinct_held_out(eval_set.build(), eval_set.config.prompts) if self._prompts.fits(t)]


def short_digest(text: str) -> str:
    """Hash of a text, 16 hex digits, for comparison."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def group_of(evaluation: int, item: int, num_items: int) -> GroupId:
    """Group id of the response to item `item` of evaluation `evaluation`.

    >>> group_of(0, 0, 10), group_of(2, 3, 10)
    (-1, -24)
    """
    return GroupId(-1 - evaluation * num_items - item)
