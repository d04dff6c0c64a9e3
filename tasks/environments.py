"""Prompts and how their answers are judged.

A `TaskSource` is deterministic and has no state: prompt `i` is the same whenever it is asked for, so a run's position
in its data is one number, the next group's id. Training prompts and held-out prompts come from disjoint index ranges;
so that they are also different prompts (two indices may give the same text), a run draws from `source.apart(n)`.
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
"""Of a file's rows, the share at its end that is only evaluated on, at most."""
REDRAWS = 10_000
"""How often one training prompt is drawn before its source counts as held out as a whole. Each try gives a prompt that
may be trained on with the share of those: where that is one in a hundred, all fail once in 10**43 draws."""

_drawing = threading.RLock()
"""Held while foreign code draws a prompt. Some datasets seed numpy's global generator and draw from it, others keep the
generator in the dataset: two threads of a process at once would get neither's prompt. One may be built on another."""

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
        """Prompt `index` of the training prompts, or of the held-out ones. Pure: same index, same task, whatever other
        threads draw meanwhile."""
        ...

    def apart(self, num_held_out: int) -> TaskSource:
        """The same source, whose training prompts are none of its first `num_held_out` held-out ones. The others keep
        their indices. Depends on nothing but the source and that number."""
        ...

    @property
    def num_held_out(self) -> int | None:
        """Held-out prompts there are, equal ones included; None: without end."""
        ...

    @property
    def told(self) -> str:
        """What keeping held-out prompts apart has taken up to now, in one line; empty if nothing."""
        ...

    @property
    def score(self) -> Reward:
        """The source's own verifier."""
        ...


class ReasoningGym:
    """Procedural tasks with verifiers, from the `reasoning-gym` package. Endless; index i is drawn with seed + i."""

    HELD_OUT_OFFSET = 10**12
    """Training never reaches this index."""
    REDRAWN_OFFSET = 15 * 10**11
    """From here on are the tries for training prompts that turn out to be held out."""

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
                    f"lower task.eval_prompts = {self._num_apart}, or have task.options allow more different prompts"
                )
            task = found
        return task

    def apart(self, num_held_out: int) -> ReasoningGym:
        other = copy.copy(self)
        other._num_apart, other._apart = num_held_out, None
        other._num_drawn = other._num_redrawn = 0
        return other

    @property
    def told(self) -> str:
        if not self._num_redrawn:
            return ""
        return f"{self._num_redrawn} of {self._num_drawn} prompts drawn for training are held out: replaced by others"

    def _at(self, index: int) -> Task:
        with _drawing:
            entry = self._dataset[index]
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
        self._path = path
        self._num_rows = len(self._rows)
        self.num_held_out = max(1, int(len(self._rows) * HELD_OUT_SHARE))

    def task(self, index: int, *, held_out: bool = False) -> Task:
        num_train = len(self._rows) - self.num_held_out
        row = self._rows[num_train + index % self.num_held_out] if held_out else self._rows[index % num_train]
        return Task(prompt=row["prompt"], record=row)

    def apart(self, num_held_out: int) -> JsonLines:
        """As declared; without the prompts of any row that is held out, however many are evaluated."""
        train, held = self._rows[: -self.num_held_out], self._rows[-self.num_held_out :]
        apart = {row["prompt"] for row in held}
        left = [row for row in train if row["prompt"] not in apart]
        if not left:
            raise ConfigError(
                f"{self._path}: each of the {len(train)} rows to train on has the prompt of a row that is held out "
                f"(the last {self.num_held_out}); add rows with other prompts"
            )
        other = copy.copy(self)
        other._rows = [*left, *held]
        return other

    @property
    def told(self) -> str:
        if len(self._rows) == self._num_rows:
            return ""
        return (
            f"{self._num_rows - len(self._rows)} of {self._num_rows} rows of {self._path} are neither trained on nor "
            f"evaluated: their prompts are those of the {self.num_held_out} rows held out"
        )

    def score(self, answer: str, record: Record) -> float:
        """1 if the texts are equal but for white space, else 0."""
        return float(" ".join(answer.split()) == " ".join(str(record["answer"]).split()))


class Own:
    """A user's own environment. NAME(options, seed) gives an object with two methods:

    record(index: int, held_out: bool) -> dict      # `prompt`, and whatever else its verifier needs; pure
    score(answer: str, record: dict) -> float       # or (reward, its parts by name)

    What its indices mean is the user's: a held-out prompt that it gives for training is counted, not replaced.
    """

    num_held_out = None

    def __init__(self, named: str, options: Mapping[str, Any], seed: int) -> None:
        self._where = f"task.source = {named!r}"
        self._num_apart = 0
        self._apart: frozenset[str] | None = None
        self._num_drawn = self._num_both = 0
        make = user_code.load(named, "task.source")
        try:
            self._own = make(dict(options), seed)
            self.score = self._own.score
        except Exception as error:  # a user's code
            raise ConfigError(f"{self._where}: cannot be made: {type(error).__name__}: {error}") from error
        self.task(0)

    def task(self, index: int, *, held_out: bool = False) -> Task:
        try:
            with _drawing:
                record = self._own.record(index, held_out)
        except Exception as error:  # the same
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

    def apart(self, num_held_out: int) -> Own:
        other = copy.copy(self)
        other._num_apart, other._apart = num_held_out, None
        other._num_drawn = other._num_both = 0
        return other

    @property
    def told(self) -> str:
        if not self._num_both:
            return ""
        return (
            f"{self._where}: {self._num_both} of {self._num_drawn} prompts that were trained on are held out too; "
            "record(index, held_out) must give others for training"
        )


class Emulated:
    """What an emulated engine answers: the first token of a response says how it is rewarded."""

    num_held_out = None
    told = ""

    def apart(self, num_held_out: int) -> Emulated:
        return self

    def task(self, index: int, *, held_out: bool = False) -> Task:
        return Task(prompt="", record={"prompt": "", "answer": ""})

    def score(self, answer: str, record: Record) -> float:
        return float(answer.split(" ", 1)[0] == str(REWARD_TOKEN + 1))


def distinct_held_out(source: TaskSource, count: int) -> list[Task]:
    """The first `count` held-out prompts, each text once: fewer where there are fewer, or some are equal."""
    at_most = count if source.num_held_out is None else min(count, source.num_held_out)
    found: dict[str, Task] = {}
    for index in range(at_most):
        task = source.task(index, held_out=True)
        found.setdefault(task.prompt, task)
    return list(found.values())


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
