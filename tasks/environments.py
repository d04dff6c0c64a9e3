"""Prompts and how their answers are judged.

A `TaskSource` is deterministic and has no state: prompt `i` is the same whenever it is asked for, so a run's position
in its data is one number, the next group's id. Training prompts and held-out prompts come from disjoint index ranges.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stores.errors import ConfigError
from tasks import user_code
from tasks.names import REWARD_TOKEN

HELD_OUT_SHARE = 0.1
"""Of a file's rows, the share at its end that is only evaluated on, at most."""

Record = Mapping[str, Any]
Reward = Callable[[str, Record], float | tuple[float, dict[str, float]]]
"""(answer text, record) -> reward, or (reward, its parts by name). The record holds prompt, answer and metadata."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt and what its verifier needs."""

    prompt: str
    record: Record


class TaskSource(Protocol):
    def task(self, index: int, *, held_out: bool = False) -> Task:
        """Prompt `index` of the training prompts, or of the held-out ones. Pure: same index, same task."""
        ...

    @property
    def score(self) -> Reward:
        """The source's own verifier."""
        ...


class ReasoningGym:
    """Procedural tasks with verifiers, from the `reasoning-gym` package. Endless; index i is drawn with seed + i."""

    HELD_OUT_OFFSET = 10**12
    """Training never reaches this index."""

    def __init__(self, dataset: str, options: Mapping[str, Any], seed: int) -> None:
        import reasoning_gym

        try:
            self._dataset = reasoning_gym.create_dataset(dataset, size=2 * 10**12, seed=seed * 10**7, **options)
        except ValueError as error:
            raise ConfigError(f"task.source = reasoning_gym:{dataset}: {error}") from error
        except (TypeError, AssertionError) as error:
            raise ConfigError(f"task.options for reasoning_gym:{dataset}: {error}") from error

    def task(self, index: int, *, held_out: bool = False) -> Task:
        entry = self._dataset[index + (self.HELD_OUT_OFFSET if held_out else 0)]
        return Task(prompt=entry["question"], record=entry)

    def score(self, answer: str, record: Record) -> float:
        return float(self._dataset.score_answer(answer, dict(record)))


class JsonLines:
    """Rows of a file with `prompt` and `answer`. Trained on in order, again from the start at its end."""

    def __init__(self, path: Path) -> None:
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"task.source = jsonl:{path}: cannot be read: {error}") from error
        self._rows: list[dict[str, Any]] = []
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path}, line {number}: not JSON: {error}") from error
            if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or "answer" not in row:
                raise ConfigError(f"{path}, line {number}: must be an object with a text `prompt` and an `answer`")
            self._rows.append(row)
        if len(self._rows) < 2:
            raise ConfigError(
                f"{path}: {len(self._rows)} rows; at least one to train on and one to hold out are needed"
            )
        self._num_held_out = max(1, int(len(self._rows) * HELD_OUT_SHARE))

    def task(self, index: int, *, held_out: bool = False) -> Task:
        num_train = len(self._rows) - self._num_held_out
        row = self._rows[num_train + index % self._num_held_out] if held_out else self._rows[index % num_train]
        return Task(prompt=row["prompt"], record=row)

    def score(self, answer: str, record: Record) -> float:
        """1 if the texts are equal but for white space, else 0."""
        return float(" ".join(answer.split()) == " ".join(str(record["answer"]).split()))


class Own:
    """A user's own environment. NAME(options, seed) gives an object with two methods:

    record(index: int, held_out: bool) -> dict      # `prompt`, and whatever else its verifier needs; pure
    score(answer: str, record: dict) -> float       # or (reward, its parts by name)
    """

    def __init__(self, named: str, options: Mapping[str, Any], seed: int) -> None:
        self._where = f"task.source = {named!r}"
        make = user_code.load(named, "task.source")
        try:
            self._own = make(dict(options), seed)
            self.score = self._own.score
        except Exception as error:  # a user's code
            raise ConfigError(f"{self._where}: cannot be made: {type(error).__name__}: {error}") from error
        self.task(0)

    def task(self, index: int, *, held_out: bool = False) -> Task:
        try:
            record = self._own.record(index, held_out)
        except Exception as error:  # the same
            raise ConfigError(f"{self._where}: record {index}: {type(error).__name__}: {error}") from error
        if not isinstance(record, Mapping) or not isinstance(record.get("prompt"), str):
            raise ConfigError(f"{self._where}: record {index} must be a dict with a string `prompt`, not {record!r}")
        return Task(prompt=record["prompt"], record=record)


class Emulated:
    """What an emulated engine answers: the first token of a response says how it is rewarded."""

    def task(self, index: int, *, held_out: bool = False) -> Task:
        return Task(prompt="", record={"prompt": "", "answer": ""})

    def score(self, answer: str, record: Record) -> float:
        return float(answer.split(" ", 1)[0] == str(REWARD_TOKEN + 1))


def make_source(source: str, options: Mapping[str, Any], seed: int) -> TaskSource:
    """The source called `kind:name`."""
    kind, _, name = source.partition(":")
    if kind == "reasoning_gym" and name:
        return ReasoningGym(name, options, seed)
    if kind == "jsonl" and name:
        return JsonLines(Path(name))
    if source == "emulated":
        return Emulated()
    if name:
        return Own(source, options, seed)
    raise ConfigError(
        f"task.source = {source!r}: expected reasoning_gym:DATASET, jsonl:FILE, file.py:NAME or module:NAME"
    )


def math_verify_reward(answer: str, record: Record) -> float:
    """1 if the answer is mathematically equal to the record's, by the `math-verify` package."""
    from math_verify import parse, verify

    gold = str(record["answer"])
    return float(verify(parse(gold if "$" in gold or "\\boxed" in gold else f"${gold}$"), parse(answer)))


def make_reward(function: str, source: TaskSource) -> Reward:
    """The reward called `function`: task, math_verify, path/to/file.py:name, or module:name."""
    if function == "task":
        return source.score
    if function == "math_verify":
        return math_verify_reward
    if ":" not in function:
        raise ConfigError(f"reward.function = {function!r}: expected task, math_verify, file.py:name or module:name")
    reward: Reward = user_code.load(function, "reward.function")
    num_required = sum(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in inspect.signature(reward).parameters.values()
    )
    if num_required > 2:
        raise ConfigError(
            f"reward.function = {function!r}: must take (answer, record), it needs {num_required} arguments"
        )
    return reward


def extract_answer(pattern: str, response: str) -> str:
    """The first group of `pattern`'s last match in the response; the whole response if there is no pattern."""
    if not pattern:
        return response.strip()
    matches = list(re.finditer(pattern, response))
    return matches[-1].group(1) if matches else ""
