"""Prompts as token ids, and responses as text. Prompts that are too long, or held out, are replaced by others of the
same source.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from staleflow.stores.errors import ConfigError
from staleflow.tasks.emulation.workload import Workload
from staleflow.tasks.engines.emulated_engine import emulated_ids
from staleflow.tasks.rendering.bridging import Bridge, make_bridge
from staleflow.tasks.rendering.chat_tokenizer import ChatTokenizer, IdDetokenizer, load_chat_tokenizer, load_tokenizer
from staleflow.tasks.rendering.file_tokenizer import FileTokenizer
from staleflow.tasks.rendering.task_source import (
    Message,
    Prompt,
    Reward,
    Task,
    TaskSource,
    distinct_held_out,
    draw_tasks,
    held_out_prompts,
    prompt_excerpt,
)
from staleflow.tasks.rendering.turn_params import split_params
from staleflow.tasks.sources.evaluation_sets import EvaluationSet, evaluated_prompts
from staleflow.tasks.sources.task_sources import NamedSourceSettings, SourceSettings, with_origin


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSettings:
    """Settings of a run's prompts; see TaskConfig."""

    tokenizer: str
    """Folder or hub name of the model."""
    source: SourceSettings
    max_new_tokens: int
    context_length: int
    """Tokens that the model can attend to."""
    kv_tokens: int
    """Tokens that an engine's cache can hold."""
    num_held_out: int
    """Number of held-out prompts excluded from training."""
    max_prompt_tokens: int | None = None
    """Longer prompts are replaced by others; None: they raise an error. For an existing store it must be the value in
    its header."""
    workload: Workload | None = None
    """Source of prompt lengths in an emulated run, which has no tokenizer; else None."""
    eval_sets: tuple[EvaluationSet, ...] = ()
    """Evaluation sets, whose prompts are not trained on."""
    has_random_responses: bool = False
    """Whether the engine is emulated, and responses are random texts (`run --dry-run`)."""
    sources: tuple[NamedSourceSettings, ...] = ()
    """Several sources, used instead of `source`."""

    @property
    def agent_sources(self) -> frozenset[int]:
        """Numbers of the sources that run agents, whose requests may limit their turns."""
        settings = [source.settings for source in self.sources] or [self.source]
        return frozenset(number for number, source in enumerate(settings) if source.is_agent_source)

    def response_tokens(self, source: int) -> int:
        """Maximum number of tokens of a response to a prompt of a source."""
        return self.sources[source].max_new_tokens if self.sources else self.max_new_tokens

    def for_source(self, source: NamedSourceSettings) -> PromptSettings:
        """Settings for one of several sources."""
        return replace(
            self,
            source=source.settings,
            num_held_out=source.num_held_out,
            max_new_tokens=source.max_new_tokens,
            max_prompt_tokens=self.max_prompt_tokens if source.settings.task.skip_long else None,
            sources=(),
        )

    def build(self) -> Prompts:
        if self.sources:
            return MixedPrompts(self)
        if self.has_random_responses:
            return TokenizedPrompts(self, RandomTextTokenizer(self.tokenizer))
        return TokenizedPrompts(self) if self.workload is None else EmulatedPrompts(self.workload)


class Prompts(Protocol):
    """Numbered prompts: drawing them, encoding them, and decoding responses."""

    def task(self, index: int) -> Task:
        """Draw training prompt `index` of the first source."""
        ...

    def tasks(self, indices: Sequence[int], source: int = 0) -> list[Task]:
        """Draw training prompts of a source."""
        ...

    def held_out(self, count: int, source: int = 0) -> list[Task]:
        """Draw the first `count` distinct held-out prompts of a source; fewer if it has fewer."""
        ...

    @property
    def held_out_notice(self) -> str:
        """One line on training prompts that turned out to be held out; empty if there were none so far."""
        ...

    def encode(self, task: Task, max_new_tokens: int = 0) -> tuple[int, ...]:
        """Token ids of a prompt. Raises ConfigError if prompt and response exceed the context or the engine's cache.
        max_new_tokens: maximum tokens of the response; 0: as in training."""
        ...

    def fits(self, task: Task) -> bool:
        """Whether a prompt is short enough to be used by a run that leaves out prompts that are too long."""
        ...

    def text(self, tokens: Sequence[int]) -> str:
        """Decode a response."""
        ...

    def bridge_tokens(
        self, before: Sequence[int], turn: Sequence[int], messages: Sequence[Message], source: int = 0
    ) -> list[int]:
        """Encode the messages between two turns, from the end of the first to the start of the second; see
        Bridge.ids."""
        ...

    def render(self, messages: Sequence[Message], source: int = 0) -> list[int]:
        """Encode a complete conversation, up to the start of the next turn."""
        ...


class EmulatedPrompts:
    """Prompts of arbitrary tokens, with lengths drawn from a workload."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._tokenizer = IdDetokenizer()

    held_out_notice = ""

    def held_out(self, count: int, source: int = 0) -> list[Task]:
        return [self.task(i) for i in range(count)]

    def task(self, index: int) -> Task:
        return Task(prompt=f"prompt {index}", record={"prompt": "", "answer": "", "group": index}, row=index)

    def tasks(self, indices: Sequence[int], source: int = 0) -> list[Task]:
        return [self.task(i) for i in indices]

    def encode(self, task: Task, max_new_tokens: int = 0) -> tuple[int, ...]:
        group = int(task.record["group"])
        return tuple(emulated_ids(group, 0, self._workload.prompt_tokens(group)).tolist())

    def fits(self, task: Task) -> bool:
        return True

    def text(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.text(tokens)

    def bridge_tokens(
        self, before: Sequence[int], turn: Sequence[int], messages: Sequence[Message], source: int = 0
    ) -> list[int]:
        """Return arbitrary tokens. The content of each message is its number of tokens."""
        count = sum(int(message.content) for message in messages)
        return [int(t) for t in emulated_ids(0, len(before) + len(turn), count)]

    def render(self, messages: Sequence[Message], source: int = 0) -> list[int]:
        return self.bridge_tokens((), (), messages)


class TokenizedPrompts:
    """Prompts of a task source, encoded by the model's tokenizer. Thread-safe.

    The mapping of group ids to prompts depends on `num_held_out`: for an existing store it must be the value in its
    header.
    """

    def __init__(self, settings: PromptSettings, tokenizer: ChatTokenizer | None = None) -> None:
        """tokenizer: the model's tokenizer; loaded by default."""
        self._task_config = settings.source.task
        self._observation_template = settings.source.environment_config.template
        """Text inserted around observations without a chat template."""
        if self._task_config.system and not self._task_config.chat:
            raise ConfigError("task.system: only a chat template has a place for it; set task.chat = true")
        self._settings = settings
        self._concurrency = settings.source.concurrency
        source = settings.source.build().excluding_held_out(settings.num_held_out)
        self._source = without_prompts(source, evaluated_prompts(settings.eval_sets))
        if settings.max_prompt_tokens is not None:
            self._source = FilteredSource(self._source, self.fits)
        self._tokenizer = tokenizer or load_chat_tokenizer(settings.tokenizer)
        self._bridge: Bridge | None = None

    @property
    def num_held_out(self) -> int | None:
        """Number of held-out prompts, duplicates included; None if unlimited."""
        return self._source.num_held_out

    @property
    def excluded_prompts(self) -> frozenset[Prompt]:
        """The held-out prompts, which are excluded from training."""
        return held_out_prompts(self._source, self._settings.num_held_out)

    def exclude(self, prompts: frozenset[Prompt]) -> None:
        """Exclude these prompts from training."""
        self._source = without_prompts(self._source, prompts)

    @property
    def bridge(self) -> Bridge:
        """The encoder of messages between two turns of an episode."""
        if self._bridge is None:
            self._bridge = make_bridge(
                self._tokenizer,
                self._settings.tokenizer,
                chat=self._task_config.chat,
                observation_template=self._observation_template,
            )
        return self._bridge

    def encode(self, task: Task, max_new_tokens: int = 0) -> tuple[int, ...]:
        ids = self._ids(task)
        settings = self._settings
        max_new_tokens = max_new_tokens or settings.max_new_tokens
        max_tokens = min(settings.context_length, settings.kv_tokens) - max_new_tokens
        if not 0 < len(ids) <= max_tokens:
            limit_name = (
                "the model's context" if settings.context_length <= settings.kv_tokens else "rollout.engine.kv_tokens"
            )
            raise ConfigError(
                f"a prompt has {len(ids)} tokens; it must have 1 to {max_tokens}, {limit_name} of "
                f"{min(settings.context_length, settings.kv_tokens)} less max_new_tokens = {max_new_tokens}: "
                f"{prompt_excerpt(task.prompt)}{'; task.skip_long = true skips such prompts' if ids else ''}"
            )
        return ids

    def encode_response(self, text: str) -> list[int]:
        """Token ids of a response with its end token; truncated to max_new_tokens."""
        return [*self._tokenizer.ids(text), self._tokenizer.end_id][: self._settings.max_new_tokens]

    def _ids(self, task: Task) -> tuple[int, ...]:
        params, prompt = split_params(task.prompt)
        template = self._task_config.template
        if params.token_ids is not None:
            return params.token_ids
        if self._task_config.chat:
            *before, last_message = (Message("user", prompt),) if isinstance(prompt, str) else prompt
            messages = [*before, last_message._replace(content=template.format(prompt=last_message.content))]
            if self._task_config.system and messages[0].role != "system":
                messages.insert(0, Message("system", self._task_config.system))
            return self._tokenizer.chat_ids(messages, params.tools)
        if not isinstance(prompt, str) and len(prompt) == 1 and prompt[0].role == "user":
            prompt = prompt[0].content
        if isinstance(prompt, str):
            return self._tokenizer.ids(template.format(prompt=prompt))
        raise ConfigError(f"a prompt is a list of messages; set task.chat = true: {prompt_excerpt(prompt)}")

    def fits(self, task: Task) -> bool:
        """Whether a prompt is within `max_prompt_tokens`."""
        limit = self._settings.max_prompt_tokens
        return limit is None or not self.may_be_too_long(task) or len(self._ids(task)) <= limit

    def may_be_too_long(self, task: Task) -> bool:
        """Whether a prompt may have too many tokens, judged without encoding it: a token has at least one byte."""
        settings, max_tokens = self._settings, self._settings.max_prompt_tokens
        if max_tokens is None:
            max_tokens = min(settings.context_length, settings.kv_tokens) - settings.max_new_tokens
        if self._task_config.chat or not isinstance(task.prompt, str):
            return True
        return len(task.prompt.encode()) + len(self._task_config.template.encode()) > max_tokens

    def task(self, index: int) -> Task:
        """Training prompt `index`."""
        return self.tasks([index])[0]

    def tasks(self, indices: Sequence[int], source: int = 0) -> list[Task]:
        """Training prompts, drawn concurrently if the source waits for something, such as a server."""
        tasks = draw_tasks(self._source, indices, concurrency=self._concurrency)
        return [t if t.row >= 0 else replace(t, row=index) for t, index in zip(tasks, indices, strict=True)]

    def held_out(self, count: int, source: int = 0) -> list[Task]:
        """The first `count` distinct held-out prompts, less those that are too long for a run that leaves these out.
        Others do not take their place, since they may be trained on."""
        return [task for task in distinct_held_out(self._source, count, self._concurrency) if self.fits(task)]

    @property
    def held_out_notice(self) -> str:
        """One line on training prompts that turned out to be held out; empty if there were none so far."""
        return self._source.held_out_notice

    def text(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.text(tokens)

    def bridge_tokens(
        self, before: Sequence[int], turn: Sequence[int], messages: Sequence[Message], source: int = 0
    ) -> list[int]:
        params, rest = split_params(tuple(messages))
        if params.token_ids is not None:
            return list(params.token_ids)
        return self.bridge.ids(before, turn, [m for m in rest if isinstance(m, Message)])

    def render(self, messages: Sequence[Message], source: int = 0) -> list[int]:
        params, rest = split_params(tuple(messages))
        if params.token_ids is not None:
            return list(params.token_ids)
        conversation = [m for m in rest if isinstance(m, Message)]
        if self._task_config.chat:
            if self._task_config.system and conversation[0].role != "system":
                conversation.insert(0, Message("system", self._task_config.system))
            return list(self._tokenizer.chat_ids(conversation, params.tools))
        templates = {"assistant": "{observation}"}
        texts = (
            templates.get(m.role, self._observation_template).replace("{observation}", m.content) for m in conversation
        )
        return list(self._tokenizer.ids("".join(texts)))


class MixedPrompts:
    """Prompts of several task sources, each with its own template and limits. A prompt that is held out of one source
    is not trained on in any other."""

    def __init__(self, settings: PromptSettings) -> None:
        make_tokenizer = RandomTextTokenizer if settings.has_random_responses else load_chat_tokenizer
        tokenizer: ChatTokenizer = make_tokenizer(settings.tokenizer)
        self._names = [source.name for source in settings.sources]
        self.prompts_by_source = [
            TokenizedPrompts(settings.for_source(source), tokenizer) for source in settings.sources
        ]
        held_out = [prompts.excluded_prompts for prompts in self.prompts_by_source]
        for number, prompts in enumerate(self.prompts_by_source):
            prompts.exclude(frozenset().union(*held_out[:number], *held_out[number + 1 :]))

    def task(self, index: int, source: int = 0) -> Task:
        """Training prompt `index` of a source."""
        return self.tasks([index], source)[0]

    def tasks(self, indices: Sequence[int], source: int = 0) -> list[Task]:
        """Training prompts of a source."""
        return [self._with_origin(task, source) for task in self.prompts_by_source[source].tasks(indices)]

    def held_out(self, count: int, source: int = 0) -> list[Task]:
        """The first `count` distinct held-out prompts of a source; see TokenizedPrompts.held_out."""
        return [self._with_origin(task, source) for task in self.prompts_by_source[source].held_out(count)]

    def _with_origin(self, task: Task, source: int) -> Task:
        return replace(task, source=source, record=with_origin(self._names[source], task.record))

    @property
    def held_out_notice(self) -> str:
        """One line on training prompts that turned out to be held out; empty if there were none so far."""
        notices = zip(self._names, (prompts.held_out_notice for prompts in self.prompts_by_source), strict=True)
        return "; ".join(f"task {name}: {notice}" for name, notice in notices if notice)

    def encode(self, task: Task, max_new_tokens: int = 0) -> tuple[int, ...]:
        return self.prompts_by_source[task.source].encode(task, max_new_tokens)

    def fits(self, task: Task) -> bool:
        return self.prompts_by_source[task.source].fits(task)

    def text(self, tokens: Sequence[int]) -> str:
        return self.prompts_by_source[0].text(tokens)

    def bridge_tokens(
        self, before: Sequence[int], turn: Sequence[int], messages: Sequence[Message], source: int = 0
    ) -> list[int]:
        return self.prompts_by_source[source].bridge_tokens(before, turn, messages)

    def render(self, messages: Sequence[Message], source: int = 0) -> list[int]:
        return self.prompts_by_source[source].render(messages)


MAX_ATTEMPTS = 1000
"""Maximum prompts tried in place of one, in each of two orders. If only one in a hundred fits, all of the first order
fail with probability 4e-5."""
INDEX_STEP = 10_007
"""Distance between the indices tried first, which grows with each attempt. These may miss half of the rows of a short
file, so that the indices that follow are tried last."""


class ReplacementReason(NamedTuple):
    """Why prompts are replaced. notice: shown with the number of replaced prompts. remedy: error message if none of
    MAX_ATTEMPTS prompts fits."""

    notice: str
    remedy: str


TOO_LONG = ReplacementReason(
    "too long, and replaced (task.skip_long)",
    f"task.skip_long: {MAX_ATTEMPTS} prompts in a row are too long; lower rollout.max_new_tokens, raise "
    "rollout.engine.kv_tokens, or shorten the prompts",
)
EVALUATED = ReplacementReason(
    "prompts of [evaluation.sets], and replaced",
    f"evaluation.sets: {MAX_ATTEMPTS} prompts in a row are evaluated; take fewer prompts, or another source",
)


class FilteredSource:
    """The training prompts of a source for which `fits` returns True.

    Held-out prompts are not replaced, since their replacements may be trained on. Which prompt replaces another depends
    only on the source and on `fits`.
    """

    def __init__(self, source: TaskSource, fits: Callable[[Task], bool], reason: ReplacementReason = TOO_LONG) -> None:
        self._source, self._fits, self._reason = source, fits, reason
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
        notice = f"{self._num_replaced} of {self._num_drawn} prompts drawn were {self._reason.notice}"
        return "; ".join(filter(None, (self._source.held_out_notice, notice if self._num_replaced else "")))

    def excluding_held_out(self, num_held_out: int, evaluation: TaskSource | None = None) -> FilteredSource:
        return FilteredSource(self._source.excluding_held_out(num_held_out, evaluation), self._fits, self._reason)

    def task(self, index: int, *, held_out: bool = False) -> Task:
        """Return prompt `index`, or its replacement. Raises ConfigError if none fits."""
        if held_out:
            return self._source.task(index, held_out=True)
        distant_indices = (index + attempt * (INDEX_STEP + attempt) for attempt in range(MAX_ATTEMPTS))
        for other_index in itertools.chain(distant_indices, range(index + 1, index + MAX_ATTEMPTS)):
            task = self._source.task(other_index)
            if self._fits(task):
                with self._count_lock:
                    self._num_drawn += 1
                    self._num_replaced += other_index != index
                return task if task.row >= 0 else replace(task, row=other_index)
        raise ConfigError(self._reason.remedy)


def without_prompts(source: TaskSource, prompts: frozenset[Prompt]) -> TaskSource:
    """The source without these training prompts, in place of which it has others. Tasks of an environment remain: their
    seed defines them, and all of them may have one first observation."""

    def is_trained(task: Task) -> bool:
        return task.seed is not None or task.prompt not in prompts

    return FilteredSource(source, is_trained, EVALUATED) if prompts else source


ID_MULTIPLIER = 2_654_435_761
"""Multiplier that maps the few token ids of an emulated engine to ids all over a vocabulary. Odd, and larger than any
vocabulary."""


class RandomTextTokenizer(ChatTokenizer):
    """A ChatTokenizer that decodes the token ids of an emulated engine as random tokens of the vocabulary."""

    def __init__(self, model: str) -> None:
        tokenizer = FileTokenizer(Path(model)) if Path(model).is_dir() else load_tokenizer(model)
        super().__init__(tokenizer)
        self._size = max(1, len(tokenizer))

    def text(self, tokens: Sequence[int], *, keep_special: bool = False) -> str:
        return super().text([token * ID_MULTIPLIER % self._size for token in tokens], keep_special=keep_special)
