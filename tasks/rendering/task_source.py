"""The contract of task sources, which provide prompts.

A `TaskSource` is deterministic and has no state: prompt `i` is always the same, so a run's position in its data is one
number, the next group's id. Training and held-out prompts come from disjoint index ranges; since two indices may give
the same prompt, a run draws from `source.excluding_held_out(n)`, where they also differ as prompts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from staleflow.tasks.settings.knobs import shorten

Record = Mapping[str, Any]
Reward = Callable[[str, Record], float | tuple[float, dict[str, float]]]
"""(answer text, record) -> reward, or (reward, its parts by name). The record holds prompt, answer and metadata."""


class Message(NamedTuple):
    """One message of a conversation."""

    role: str
    content: str


Prompt = str | tuple[Message, ...]
"""A text, or a conversation that the model answers. Equal prompts are one prompt, whatever else their records hold."""


def prompt_of(value: object) -> Prompt:
    """Return a record's prompt: a text, or a list of mappings with `role` and `content`. Raises ValueError; the message
    follows the value's name.

    >>> prompt_of([{"role": "user", "content": "1 + 1"}])
    (Message(role='user', content='1 + 1'),)
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"must be a text or a list of messages, not {shorten(value)}")
    messages = []
    for number, message in enumerate(value, 1):
        parts = message if isinstance(message, Mapping) else {}
        role, content = parts.get("role"), parts.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(f"has a message {number} without `role` and `content` as texts: {shorten(message)}")
        messages.append(Message(role, content))
    if messages[-1].role == "assistant":
        raise ValueError("ends with a message of the assistant; the last one must be what the model answers")
    return tuple(messages)


def require_text(prompt: Prompt) -> Prompt:
    """Return a task's prompt. Raises ValueError if it is not valid Unicode, or only white space, since responses to it
    would not depend on the task."""
    texts = [prompt] if isinstance(prompt, str) else [message.content for message in prompt]
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"is not valid Unicode: {error.reason} at character {error.start + 1}") from None
    if not any(text.strip() for text in texts):
        raise ValueError("is empty; a prompt must have a text that the model answers")
    return prompt


def prompt_excerpt(prompt: Prompt) -> str:
    """The beginning of a prompt, or of its last message, on one line for messages."""
    text = prompt if isinstance(prompt, str) else prompt[-1].content
    return f"{text[:60]!r}..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt, and the record for its verifier. seed: seed of the environment whose first observation is the prompt;
    None if the prompt alone defines the task."""

    prompt: Prompt
    record: Record
    seed: int | None = None
    row: int = -1
    """Its row in the data set, or its index among generated prompts; -1 if its source does not say."""
    source: int = 0
    """Number of its source, of a run with several."""

    @property
    def identity(self) -> tuple[Prompt, int | None]:
        """Key for deduplication. Includes the seed, because environments with different seeds may have equal first
        observations."""
        return self.prompt, self.seed


class TaskSource(Protocol):
    """A source of numbered prompts, with the verifier of their answers."""

    def task(self, index: int, *, held_out: bool = False) -> Task:
        """Return training or held-out prompt `index`. Pure: the same index gives the same task, also with concurrent
        draws."""
        ...

    def excluding_held_out(self, num_held_out: int, evaluation: TaskSource | None = None) -> TaskSource:
        """Return this source without its first `num_held_out` held-out prompts among the training prompts. Depends only
        on the sources and that number. Generated prompts keep their indices; later rows of a file move up. evaluation:
        source of the held-out prompts; this one by default."""
        ...

    @property
    def num_held_out(self) -> int | None:
        """Number of held-out prompts, duplicates included; None if unlimited."""
        ...

    @property
    def held_out_notice(self) -> str:
        """One line on training prompts that turned out to be held out; empty if there were none so far."""
        ...

    @property
    def score(self) -> Reward:
        """Score a response with the source's own verifier."""
        ...


DRAWS_PER_PROMPT = 4
"""Draws of generated prompts for each distinct held-out prompt, after which the source counts as having no more."""
SLOW_DRAW_S = 0.05
"""Seconds from which on drawing a prompt takes long."""


def draw_tasks(
    source: TaskSource, indices: Sequence[int], *, held_out: bool = False, concurrency: int = 1
) -> list[Task]:
    """Draw the prompts with these indices. concurrency: number of prompts drawn at the same time, once a draw has taken
    long; concurrent resets of environments need a process each, which costs more than a short reset."""
    tasks: list[Task] = []
    started_s = time.monotonic()
    while len(tasks) < len(indices) and (concurrency == 1 or time.monotonic() - started_s < SLOW_DRAW_S):
        started_s = time.monotonic()
        tasks.append(source.task(indices[len(tasks)], held_out=held_out))
    if remaining_indices := indices[len(tasks) :]:
        with ThreadPoolExecutor(min(concurrency, len(remaining_indices)), thread_name_prefix="draw") as threads:
            tasks += threads.map(lambda index: source.task(index, held_out=held_out), remaining_indices)
    return tasks


def distinct_held_out(source: TaskSource, count: int, concurrency: int = 1) -> list[Task]:
    """The first `count` distinct held-out prompts, in order; fewer if the source has fewer. Draws at most `count *
    DRAWS_PER_PROMPT` generated prompts. concurrency: see `draw_tasks`."""
    limit = count * DRAWS_PER_PROMPT if source.num_held_out is None else source.num_held_out
    by_identity: dict[tuple[Prompt, int | None], Task] = {}
    num_drawn = 0
    while (num_missing := min(count - len(by_identity), limit - num_drawn)) > 0:
        indices = range(num_drawn, num_drawn + num_missing)
        for task in draw_tasks(source, indices, held_out=True, concurrency=concurrency):
            by_identity.setdefault(task.identity, task)
        num_drawn += num_missing
    return list(by_identity.values())


def held_out_prompts(evaluation: TaskSource, num_held_out: int) -> frozenset[Prompt]:
    """The held-out prompts that must not be trained on: all of a data set, however many are evaluated, and the first
    `num_held_out` of generated prompts."""
    count = num_held_out if evaluation.num_held_out is None else evaluation.num_held_out
    return frozenset(task.prompt for task in distinct_held_out(evaluation, count))
