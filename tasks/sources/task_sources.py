"""Task sources by their names in a job, and the verifiers of their answers."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Self

from staleflow.stores.errors import ConfigError, raised_as, type_and_message
from staleflow.tasks.environments.environment_config import EnvironmentConfig
from staleflow.tasks.environments.environment_source import EnvironmentSource
from staleflow.tasks.rendering.reward_values import WeightedSum
from staleflow.tasks.rendering.task_source import (
    Prompt,
    Record,
    Reward,
    Task,
    TaskSource,
    held_out_prompts,
    prompt_of,
    require_text,
)
from staleflow.tasks.settings import user_code
from staleflow.tasks.settings.choice_names import REWARD_TOKEN
from staleflow.tasks.settings.dataset_columns import Columns, DataUse
from staleflow.tasks.settings.endpoint_settings import EndpointSettings
from staleflow.tasks.settings.reward_functions import load_reward, reward_name_error
from staleflow.tasks.settings.source_kinds import SourceType, all_syntax, is_agent, is_environment, kind_of, open_source
from staleflow.tasks.settings.task_config import RewardPart, TaskConfig
from staleflow.tasks.sources.dataset_rows import RowSource
from staleflow.tasks.sources.reasoning_gym_tasks import DRAW_LOCK


class UserSource:
    """A user's source of prompts that one response answers. NAME(options, seed) returns an object with two methods:

    record(index: int, held_out: bool) -> dict      # `prompt`, a text or messages, and what its verifier needs; pure
    score(answer: str, record: dict) -> float       # or (reward, its parts by name)

    The user defines what an index means, so a held-out prompt returned for training is counted, not replaced.
    """

    num_held_out = None

    def __init__(self, reference: str, options: Mapping[str, Any], seed: int, key: str = "task.source") -> None:
        """key: key in the job file, for messages."""
        self._label = f"{key} = {reference!r}"
        self._held_out: frozenset[Prompt] = frozenset()
        self._num_drawn = self._num_overlapping = 0
        make = user_code.load(reference, key)
        with raised_as(ConfigError, f"{self._label}: cannot be created", Exception, describe=type_and_message):
            self._user_object = make(dict(options), seed)
            self.score = self._user_object.score
        self.task(0)

    def task(self, index: int, *, held_out: bool = False) -> Task:
        with DRAW_LOCK, raised_as(ConfigError, f"{self._label}: record {index}", Exception, describe=type_and_message):
            record = self._user_object.record(index, held_out)
        if not isinstance(record, Mapping) or "prompt" not in record:
            raise ConfigError(f"{self._label}: record {index} must be a dict with a `prompt`, not {record!r}")
        try:
            task = Task(prompt=require_text(prompt_of(record["prompt"])), record=record)
        except ValueError as error:
            raise ConfigError(f"{self._label}: the prompt of record {index} {error}") from error
        if self._held_out and not held_out:
            self._num_drawn += 1
            self._num_overlapping += task.prompt in self._held_out
        return task

    def excluding_held_out(self, num_held_out: int, evaluation: TaskSource | None = None) -> UserSource:
        other = copy.copy(self)
        other._held_out = held_out_prompts(evaluation or self, num_held_out)
        other._num_drawn = other._num_overlapping = 0
        return other

    @property
    def held_out_notice(self) -> str:
        if not self._num_overlapping:
            return ""
        return (
            f"{self._label}: {self._num_overlapping} of {self._num_drawn} prompts that were trained on are also held "
            "out; record(index, held_out) must return other prompts for training"
        )


class EmulatedSource:
    """Task source of an emulated run. The first token of a response determines its reward."""

    num_held_out = None
    held_out_notice = ""

    def excluding_held_out(self, num_held_out: int, evaluation: TaskSource | None = None) -> EmulatedSource:
        return self

    def task(self, index: int, *, held_out: bool = False) -> Task:
        return Task(prompt="", record={"prompt": "", "answer": ""})

    def score(self, answer: str, record: Record) -> float:
        return float(answer.split(" ", 1)[0] == str(REWARD_TOKEN + 1))


class RecordWithOrigin(dict[str, Any]):
    """A record with the name of the evaluation set or task source that it is of, whose reward scores it. origin: that
    name; empty for the run's only source."""

    origin = ""

    @classmethod
    def of(cls, origin: str, record: Record) -> Self:
        """The record with this origin."""
        result = cls(record)
        result.origin = origin
        return result


class EvalSourceRecord(RecordWithOrigin):
    """A record of task.eval_source or of an evaluation set, which is scored by the verifier of its own source."""


def with_origin(name: str, record: Record) -> RecordWithOrigin:
    """The record of a task of one of several task sources. name: the source's."""
    kind = EvalSourceRecord if isinstance(record, EvalSourceRecord) else RecordWithOrigin
    return kind.of(name, record)


class SourceWithEvaluation:
    """A task source with the training prompts of one source and the held-out prompts of another."""

    def __init__(self, training: TaskSource, evaluation: TaskSource) -> None:
        self._training, self._evaluation = training, evaluation

    def task(self, index: int, *, held_out: bool = False) -> Task:
        if not held_out:
            return self._training.task(index)
        task = self._evaluation.task(index, held_out=True)
        return replace(task, record=EvalSourceRecord(task.record))

    def excluding_held_out(self, num_held_out: int, evaluation: TaskSource | None = None) -> SourceWithEvaluation:
        source = evaluation or self._evaluation
        return SourceWithEvaluation(self._training.excluding_held_out(num_held_out, source), self._evaluation)

    @property
    def num_held_out(self) -> int | None:
        return self._evaluation.num_held_out

    @property
    def held_out_notice(self) -> str:
        return self._training.held_out_notice

    def score(self, answer: str, record: Record) -> float | tuple[float, dict[str, float]]:
        source = self._evaluation if isinstance(record, EvalSourceRecord) else self._training
        return source.score(answer, record)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings:
    """Settings of a task source; see TaskConfig."""

    task: TaskConfig
    seed: int
    tokenizer: str = ""
    """Folder of the model's tokenizer, for sources that render by it."""
    environment_config: EnvironmentConfig = EnvironmentConfig()
    """The job's [environment]."""
    endpoint: EndpointSettings = EndpointSettings()
    """Settings of the endpoint through which agents sample."""

    @property
    def is_agent_source(self) -> bool:
        """Whether training or evaluation prompts come from an agent, whose requests may limit their own responses."""
        return is_agent(self.task.source) or is_agent(self.task.eval_source)

    @property
    def concurrency(self) -> int:
        """Number of tasks drawn at the same time: environments mostly wait for resets. Raises ConfigError."""
        is_environment_source = is_environment(self.task.source, "task.source")
        return self.environment_config.concurrency if is_environment_source else 1

    def build(self) -> TaskSource:
        """Create the task source. Raises ConfigError."""
        task = self.task
        training = self._make_source(task.source, self.options, self.training_use)
        if not task.eval_source:
            return training
        return SourceWithEvaluation(
            training, self._make_source(task.eval_source, self.eval_options, DataUse.EVALUATION)
        )

    @property
    def training_use(self) -> DataUse:
        """Which rows of task.source's data set are used."""
        return DataUse.TRAINING if self.task.eval_source else DataUse.BOTH

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the source."""
        return self._with_tokenizer(self.task.source, self.task.options)

    @property
    def eval_options(self) -> dict[str, Any]:
        """Arguments of the source of evaluation prompts."""
        return self._with_tokenizer(self.task.eval_source, self.task.eval_options)

    def _with_tokenizer(self, source: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of a source, with the model's tokenizer if its kind renders by it."""
        kind = kind_of(source)
        return {"tokenizer": self.tokenizer, **options} if kind is not None and kind.needs_tokenizer else dict(options)

    def _make_source(self, source: str, options: Mapping[str, Any], use: DataUse) -> TaskSource:
        return make_source(source, options, self.seed, self.task.columns, use, self.environment_config, self.endpoint)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSourceSettings:
    """Settings of one of several task sources."""

    name: str
    settings: SourceSettings
    num_held_out: int
    """Number of its held-out prompts excluded from training."""
    max_new_tokens: int
    """Maximum number of tokens of a response to a prompt of this source."""
    reward: str
    """Name of its reward function, as in reward.function; empty: the run's reward."""


def make_source(
    source: str,
    options: Mapping[str, Any],
    seed: int,
    columns: Columns | None = None,
    use: DataUse = DataUse.BOTH,
    environment_config: EnvironmentConfig | None = None,
    endpoint: EndpointSettings | None = None,
    key: str = "",
) -> TaskSource:
    """Create the task source named `kind:name`.

    Args:
        source: Name of the source.
        options: Arguments of the source, as in task.options.
        seed: Seed of the run.
        columns: Columns of a data set's rows.
        use: Which rows of a data set are used.
        environment_config: The job's [environment].
        endpoint: Settings of an agent's endpoint.
        key: Key in the job file that names the source, for messages.

    Raises:
        ConfigError: The source cannot be created.
    """
    key = key or ("task.eval_source" if use is DataUse.EVALUATION else "task.source")
    label = f"{key} = {source!r}"
    kind, name = kind_of(source), source.partition(":")[2]
    if kind is not None and kind.type is SourceType.PROCEDURAL:
        task_source: TaskSource = kind.open(name, options, seed, key, label=label)
        return task_source
    if kind is not None and kind.type is SourceType.ROWS:
        return RowSource(open_source(kind.type, source, options, label), columns or Columns(), label, use)
    if source == "emulated":
        return EmulatedSource()
    if name and is_environment(source, key):
        return EnvironmentSource(
            source, options, seed, key, environment_config or EnvironmentConfig(), endpoint or EndpointSettings(), use
        )
    if name:
        return UserSource(source, options, seed, key)
    raise ConfigError(f"{label}: expected {all_syntax()}, file.py:NAME or module:NAME")


def make_reward(
    function: str,
    source: TaskSource,
    parts: Mapping[str, RewardPart] = MappingProxyType({}),
    *,
    key: str = "reward.function",
) -> Reward:
    """Create the reward named `function`, or the weighted sum of `parts`. Raises ConfigError. key: its key in the job
    file, for messages."""
    if not parts:
        return _load_reward(function, source, key)
    if function != "task":
        raise ConfigError(f"reward.function = {function!r}: there are reward.parts too; make it one of them")
    loaded = {n: _load_reward(part.function, source, f"reward.parts.{n}.function") for n, part in parts.items()}
    return WeightedSum(loaded, {name: part.weight for name, part in parts.items()})


def _load_reward(function: str, source: TaskSource, key: str) -> Reward:
    """Load a reward of the registry, path/to/file.py:name, or module:name. key: of the job file, for messages."""
    if fault := reward_name_error(function):
        raise ConfigError(f"{key} {fault}")
    reward = load_reward(function, key)
    try:
        signature = inspect.signature(reward)
        options = {"source": source} if "source" in signature.parameters else {}
        signature.bind("answer", {}, **options)
    except ValueError as error:
        raise ConfigError(f"{key} = {function!r}: its arguments are unknown; wrap it in a function of yours") from error
    except TypeError as error:
        raise ConfigError(f"{key} = {function!r}: must take (answer, record): {error}") from error
    return functools.partial(reward, **options) if options else reward


def extract_answer(pattern: str, response: str) -> str:
    """Return the first group of the last match of `pattern` in the response, empty if there is none; without a pattern
    the whole response, stripped of white space."""
    if not pattern:
        return response.strip()
    matches = list(re.finditer(pattern, response))
    return matches[-1].group(1) or "" if matches else ""
