"""Tasks as token ids, and token ids as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stores.errors import ConfigError
from tasks.engines.emulated import words
from tasks.environments import Record, Task, TaskSource, distinct_held_out, make_source
from tasks.texts import NumberTexts, tokenizer_texts
from tasks.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """A held-out prompt: token ids, and what its verifier needs."""

    tokens: tuple[int, ...]
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSettings:
    """Where prompts come from and how they become token ids; see TaskConfig. tokenizer: folder or hub name of the
    model. context: tokens the model can attend to; kv_tokens: tokens an engine's cache can hold."""

    tokenizer: str
    source: str
    options: dict[str, Any]
    seed: int
    template: str
    chat: bool
    max_new_tokens: int
    context: int
    kv_tokens: int
    held_out: int | None
    """Held-out prompts that training keeps apart from; None for a store of before that was done."""
    workload: Workload | None = None
    """Where prompts come from when no model reads them: then there is no tokenizer either."""

    def build(self) -> Prompts:
        return TokenizedPrompts(self) if self.workload is None else EmulatedPrompts(self.workload)


class Prompts(Protocol):
    """Tasks as token ids, and token ids as text."""

    def task(self, index: int) -> Task: ...

    def held_out(self, count: int) -> list[Task]: ...

    @property
    def told(self) -> str: ...

    def encode(self, task: Task) -> tuple[int, ...]: ...

    def text(self, tokens: Sequence[int]) -> str: ...


class EmulatedPrompts:
    """Prompts of the lengths that a workload says; their words mean nothing."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._texts = NumberTexts()

    told = ""

    def held_out(self, count: int) -> list[Task]:
        return [self.task(i) for i in range(count)]

    def task(self, index: int) -> Task:
        return Task(prompt="", record={"prompt": "", "answer": "", "group": index})

    def encode(self, task: Task) -> tuple[int, ...]:
        group = int(task.record["group"])
        return tuple(words(group, 0, self._workload.prompt_tokens(group)).tolist())

    def text(self, tokens: Sequence[int]) -> str:
        return self._texts.text(tokens)


class TokenizedPrompts:
    """Prompts of a task source, read by the model's tokenizer. Threads may share one. Which of them a group's id stands
    for depends on `held_out`: for a store that is there it must be its header's."""

    def __init__(self, settings: PromptSettings) -> None:
        self._settings = settings
        source = make_source(settings.source, settings.options, settings.seed)
        self._source: TaskSource = source if settings.held_out is None else source.apart(settings.held_out)
        self._texts = tokenizer_texts(settings.tokenizer)

    def encode(self, task: Task) -> tuple[int, ...]:
        """The prompt's token ids. ConfigError if prompt and response cannot fit the model's context together."""
        text = self._settings.template.format(prompt=task.prompt)
        ids = self._texts.ids(text, chat=self._settings.chat)
        settings = self._settings
        room = min(settings.context, settings.kv_tokens) - settings.max_new_tokens
        if not 0 < len(ids) <= room:
            smaller = "the model's context" if settings.context <= settings.kv_tokens else "rollout.engine.kv_tokens"
            raise ConfigError(
                f"a prompt has {len(ids)} tokens; it must have 1 to {room}, {smaller} of "
                f"{min(settings.context, settings.kv_tokens)} less rollout.max_new_tokens = {settings.max_new_tokens}: "
                f"{task.prompt[:60]!r}..."
            )
        return ids

    def task(self, index: int) -> Task:
        """Training prompt `index`."""
        return self._source.task(index)

    def held_out(self, count: int) -> list[Task]:
        """The different ones among the first `count` held-out prompts."""
        return distinct_held_out(self._source, count)

    @property
    def told(self) -> str:
        """What keeping held-out prompts apart has taken, in one line."""
        return self._source.told

    def text(self, tokens: Sequence[int]) -> str:
        return self._texts.text(tokens)
