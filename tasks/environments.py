"""Prompts, and the verifiers of their answers.

A `TaskSource` is deterministic and has no state: prompt `i` is always the same, so a run's position in its data is one
number, the next group's id. Training and held-out prompts come from disjoint index ranges; since two indices may give
the same text, a run draws from `source.apart(n)`, where they also differ as prompts.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stores.errors import ConfigError
from tasks import user_code
from tasks.names import REWARD_TOKEN

HELD_OUT_SHARE = 0.1
"""Maximum share of a file's rows, at its end, that is held out for evaluation (but at least one row)."""
REDRAWS = 10_000
"""Draws for one training prompt before the whole source counts as held out. If only one prompt in a hundred is not held
out, all draws fail with probability 10**-43."""

_drawing = threading.RLock()
"""Held while a dataset or a user's code draws a prompt. Some datasets seed and use numpy's global generator, others
keep their own: two threads drawing at once would both get wrong prompts. Reentrant, as a dataset may use another."""

Record = Mapping[str, Any]
Reward = Callable[[str, Record], float | tuple[float, dict[str, float]]]
"""(answer text, record) -> reward, or (reward, its parts by name). The record holds prompt, answer and metadata."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt, and the record for its verifier."""

    prompt: str
    record: Record


class TaskSource(Protocol):
    def task(self, index: int, *, held_out: bool = False) -> Task:
        """Training or held-out prompt `index`. Pure: the same index gives the same task, also with concurrent draws."""
        ...

    def apart(self, num_held_out: int) -> TaskSource:
        """The same source without its first `num_held_out` held-out prompts among the training prompts. Depends only on
        the source and that number. Generated prompts keep their indices; a file's later rows move up."""
        ...

    @property
    def num_held_out(self) -> int | None:
        """Number of held-out prompts, duplicates included; None if unlimited."""
        ...

    @property
    def held_out_notice(self) -> str:
        """One line on training prompts found to be held out so far; empty if there were none."""
        ...

    @property
    def score(self) -> Reward:
        """The source's own verifier."""
        ...


class ReasoningGym:
    """Procedural tasks with verifiers, from the `reasoning-gym` package. Unlimited; index i is drawn with seed + i."""

    HELD_OUT_OFFSET = 10**12
    """Index of the first held-out prompt; training never reaches it."""
    REDRAWN_OFFSET = 15 * 10**11
    """First index of the redraws that replace training prompts found to be held out."""

    num_held_out = None

    def __init__(self, dataset: str, options: Mapping[str, Any], seed: int) -> None:
        import reasoning_gym

        self._name = dataset
        self._num_apart = 0
        self._apart: frozenset[str] | None = None
        self._num_drawn = self._num_redrawn = 0
        try:
            self._dataset = reasoning_gym.create_dataset(dataset, size=2 * 10**12, seed=seed * 10**7, **options)
        except ValueError as error:
            raise ConfigError(f"task.source = reasoning_gym:{dataset}: {error}") from error
        except (TypeError, AssertionError) as error:
            raise ConfigError(f"task.options for reasoning_gym:{dataset}: {error}") from error

    def task(self, index: int, *, held_out: bool = False) -> Task:
        if held_out:
            return self._at(index + self.HELD_OUT_OFFSET)
        task = self._at(index)
        if not self._num_apart:
            return task
        if self._apart is None:
            self._apart = frozenset(t.prompt for t in distinct_held_out(self, self._num_apart))
        self._num_drawn += 1
        if task.prompt in self._apart:
            self._num_redrawn += 1
            tries = range(REDRAWS)
            others = (self._at(self.REDRAWN_OFFSET + index * REDRAWS + i) for i in tries)
            found = next((t for t in others if t.prompt not in self._apart), None)
            if found is None:
                raise ConfigError(
                    f"task.source = reasoning_gym:{self._name}: {REDRAWS} draws gave only prompts that are held out; "
                    f"lower task.eval_prompts = {self._num_apart}, or set task.options that allow more distinct prompts"
                )
            task = found
        return task

    def apart(self, num_held_out: int) -> ReasoningGym:
        other = copy.copy(self)
        other._num_apart, other._apart = num_held_out, None
        other._num_drawn = other._num_redrawn = 0
        return other

    @property
    def held_out_notice(self) -> str:
        if not self._num_redrawn:
            return ""
        return f"{self._num_redrawn} of {self._num_drawn} prompts drawn for training were held out, and replaced"

    def _at(self, index: int) -> Task:
        with _drawing:
            entry = self._dataset[index]
        return Task(prompt=entry["question"], record=entry)

    def score(self, answer: str, record: Record) -> float:
        return float(self._dataset.score_answer(answer, dict(record)))


class JsonLines:
    """Rows of a file with `prompt` and `answer`, trained on in order and repeated at the end."""

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
                raise ConfigError(f"{path}, line {number}: must be an object with a string `prompt` and an `answer`")
            self._rows.append(row)
        if len(self._rows) < 2:
            raise ConfigError(
                f"{path}: {len(self._rows)} rows; at least 2 are needed, one to train on and one to hold out"
            )
        self._path = path
        self._num_rows = len(self._rows)
        self.num_held_out = max(1, int(len(self._rows) * HELD_OUT_SHARE))

    def task(self, index: int, *, held_out: bool = False) -> Task:
        num_train = len(self._rows) - self.num_held_out
        row = self._rows[num_train + index % self.num_held_out] if held_out else self._rows[index % num_train]
        return Task(prompt=row["prompt"], record=row)

    def apart(self, num_held_out: int) -> JsonLines:
        """See TaskSource. Excludes the prompts of every held-out row, however many are evaluated."""
        train, held = self._rows[: -self.num_held_out], self._rows[-self.num_held_out :]
        apart = {row["prompt"] for row in held}
        left = [row for row in train if row["prompt"] not in apart]
        if not left:
            raise ConfigError(
                f"{self._path}: each of the {len(train)} training rows has the prompt of a held-out row (the last "
                f"{self.num_held_out} rows); add rows with other prompts"
            )
        other = copy.copy(self)
        other._rows = [*left, *held]
        return other

    @property
    def held_out_notice(self) -> str:
        if len(self._rows) == self._num_rows:
            return ""
        return (
            f"{self._num_rows - len(self._rows)} of {self._num_rows} rows of {self._path} are neither trained on nor "
            f"evaluated: they repeat prompts of the {self.num_held_out} held-out rows"
        )

    def score(self, answer: str, record: Record) -> float:
        """1 if the texts are equal up to white space, else 0."""
        return float(" ".join(answer.split()) == " ".join(str(record["answer"]).split()))


class UserEnvironment:
    """A user's environment. NAME(options, seed) returns an object with two methods:

    record(index: int, held_out: bool) -> dict      # `prompt`, and anything else its verifier needs; pure
    score(answer: str, record: dict) -> float       # or (reward, its parts by name)

    The user defines what an index means, so a held-out prompt returned for training is counted, not replaced.
    """

    num_held_out = None

    def __init__(self, named: str, options: Mapping[str, Any], seed: int) -> None:
        self._where = f"task.source = {named!r}"
        self._num_apart = 0
        self._apart: frozenset[str] | None = None
        self._num_drawn = self._num_both = 0
        make = user_code.load(named, "task.source")
        try:
            self._environment = make(dict(options), seed)
            self.score = self._environment.score
        except Exception as error:  # a user's code may raise anything
            raise ConfigError(f"{self._where}: cannot be created: {type(error).__name__}: {error}") from error
        self.task(0)

    def task(self, index: int, *, held_out: bool = False) -> Task:
        try:
            with _drawing:
                record = self._environment.record(index, held_out)
        except Exception as error:  # a user's code may raise anything
            raise ConfigError(f"{self._where}: record {index}: {type(error).__name__}: {error}") from error
        if not isinstance(record, Mapping) or not isinstance(record.get("prompt"), str):
            raise ConfigError(f"{self._where}: record {index} must be a dict with a string `prompt`, not {record!r}")
        task = Task(prompt=record["prompt"], record=record)
        if self._num_apart and not held_out:
            if self._apart is None:
                self._apart = frozenset(t.prompt for t in distinct_held_out(self, self._num_apart))
            self._num_drawn += 1
            self._num_both += task.prompt in self._apart
        return task

    def apart(self, num_held_out: int) -> UserEnvironment:
        other = copy.copy(self)
        other._num_apart, other._apart = num_held_out, None
        other._num_drawn = other._num_both = 0
        return other

    @property
    def held_out_notice(self) -> str:
        if not self._num_both:
            return ""
        return (
            f"{self._where}: {self._num_both} of {self._num_drawn} prompts that were trained on are also held out; "
            "record(index, held_out) must return other prompts for training"
        )


class Emulated:
    """Task source of an emulated run: the first token of a response determines its reward."""

    num_held_out = None
    held_out_notice = ""

    def apart(self, num_held_out: int) -> Emulated:
        return self

    def task(self, index: int, *, held_out: bool = False) -> Task:
        return Task(prompt="", record={"prompt": "", "answer": ""})

    def score(self, answer: str, record: Record) -> float:
        return float(answer.split(" ", 1)[0] == str(REWARD_TOKEN + 1))


def distinct_held_out(source: TaskSource, count: int) -> list[Task]:
    """The first `count` held-out prompts without duplicates; fewer if some are equal or the source has fewer."""
    at_most = count if source.num_held_out is None else min(count, source.num_held_out)
    found: dict[str, Task] = {}
    for index in range(at_most):
        task = source.task(index, held_out=True)
        found.setdefault(task.prompt, task)
    return list(found.values())


def make_source(source: str, options: Mapping[str, Any], seed: int) -> TaskSource:
    """Create the task source named `kind:name`. Raises ConfigError."""
    kind, _, name = source.partition(":")
    if kind == "reasoning_gym" and name:
        return ReasoningGym(name, options, seed)
    if kind == "jsonl" and name:
        return JsonLines(Path(name))
    if source == "emulated":
        return Emulated()
    if name:
        return UserEnvironment(source, options, seed)
    raise ConfigError(
        f"task.source = {source!r}: expected reasoning_gym:DATASET, jsonl:FILE, file.py:NAME or module:NAME"
    )


def math_verify_reward(answer: str, record: Record) -> float:
    """1 if the answer is mathematically equal to the record's, by the `math-verify` package."""
    from math_verify import parse, verify

    gold = str(record["answer"])
    return float(verify(parse(gold if "$" in gold or "\\boxed" in gold else f"${gold}$"), parse(answer)))


def make_reward(function: str, source: TaskSource) -> Reward:
    """Load the reward named `function`: task, math_verify, path/to/file.py:name, or module:name. Raises ConfigError."""
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
            f"reward.function = {function!r}: must take (answer, record), but requires {num_required} arguments"
        )
    return reward


def extract_answer(pattern: str, response: str) -> str:
    """The first group of `pattern`'s last match in the response; the whole response without a pattern."""
    if not pattern:
        return response.strip()
    matches = list(re.finditer(pattern, response))
    return matches[-1].group(1) if matches else ""
