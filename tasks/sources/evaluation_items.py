"""The items of an evaluation, one per response to sample.

A run's evaluations are numbered, and each has the same items in the same order. The group id of a trajectory encodes
its evaluation and item, so a restarted server can find the item again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from staleflow.stores.trajectory import GroupId
from staleflow.tasks.rendering.task_source import Record, Task, distinct_held_out
from staleflow.tasks.sources.evaluation_sets import EvaluationSet
from staleflow.tasks.sources.prompts import Prompts
from staleflow.tasks.sources.task_sources import EvalSourceRecord

GREEDY = -1
"""Number of the greedy response to a prompt; sampled ones count from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationItem:
    """One response to sample for an evaluation: its set, prompt and sampling."""

    eval_set: EvaluationSet
    prompt_number: int
    """Number of the prompt in its set."""
    sample_number: int
    """Number of the response to it, or GREEDY."""
    tokens: tuple[int, ...]
    record: Record
    digest: str
    """Hash of the prompt's text or messages and of its seed; does not depend on the tokenizer."""

    @property
    def greedy(self) -> bool:
        return self.sample_number == GREEDY


class ItemSummary(NamedTuple):
    """The numbers of an item, and the name of its set; small enough to send between processes."""

    set_name: str
    prompt_number: int
    sample_number: int
    prompt_tokens: int
    digest: str = ""


class EvaluationItems:
    """All items of a run's evaluations, built on first use. Used in one thread."""

    def __init__(self, prompts: Prompts, eval_sets: Sequence[EvaluationSet]) -> None:
        self._prompts, self._eval_sets = prompts, eval_sets
        self._items: list[EvaluationItem] | None = None

    def all(self) -> list[EvaluationItem]:
        """The items, set by set. Raises ConfigError."""
        if self._items is None:
            self._items = [item for eval_set in self._eval_sets for item in self._items_of(eval_set)]
        return self._items

    def summaries(self) -> list[ItemSummary]:
        """A summary of each item."""
        return [
            ItemSummary(i.eval_set.name, i.prompt_number, i.sample_number, len(i.tokens), i.digest) for i in self.all()
        ]

    def item(self, group: GroupId) -> EvaluationItem:
        """The item that belongs to a group of an evaluation."""
        items = self.all()
        return items[(-1 - group) % len(items)]

    def _items_of(self, eval_set: EvaluationSet) -> Iterator[EvaluationItem]:
        """The items of a set, prompt by prompt. Raises ConfigError."""
        config, name = eval_set.config, eval_set.name
        for number, task in enumerate(self._tasks(eval_set)):
            record = task.record if eval_set.uses_run_reward else EvalSourceRecord.of(name, task.record)
            tokens, digest = self._prompts.encode(task, config.max_new_tokens), short_digest(repr(task.identity))
            for sample in (*range(config.samples), *([GREEDY] if config.greedy else [])):
                yield EvaluationItem(
                    eval_set=eval_set, prompt_number=number, sample_number=sample, tokens=tokens, record=record,
                    digest=digest,
                )  # fmt: skip

    def _tasks(self, eval_set: EvaluationSet) -> list[Task]:
        """The prompts of a set: distinct, and without those that are too long if the run leaves these out."""
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
