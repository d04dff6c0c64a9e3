"""Runs a reward function with a time limit, in a separate process that is killed when it exceeds the limit.

A thread cannot be killed, and a hanging reward function would otherwise block its worker forever. The process also
provides the main thread that math-verify needs, and contains crashes. It runs as `python -m
staleflow.tasks.sources.reward_process`: requests arrive on standard input and answers leave on standard output, as
length-prefixed pickles.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from staleflow.stores.errors import ConfigError, raised_as
from staleflow.stores.printable import printable
from staleflow.tasks.environments.pickled_messages import encode_message, read_message
from staleflow.tasks.environments.terminal_output import RelayedOutput
from staleflow.tasks.rendering.reward_values import InvalidReward, describe_error, parse_reward
from staleflow.tasks.rendering.task_source import Reward
from staleflow.tasks.settings.task_config import RewardConfig
from staleflow.tasks.sources.evaluation_sets import EvaluationSet
from staleflow.tasks.sources.task_sources import (
    NamedSourceSettings,
    RecordWithOrigin,
    SourceSettings,
    extract_answer,
    make_reward,
)

START_S = 600.0
"""Seconds the scoring process may take to import what it needs: at a load of 20 on two cores reasoning-gym takes more
than 60. At a run's start deadlines.start_s is shorter."""

AHEAD_BYTES = 16_384
"""Bytes of requests sent ahead, so that the process never waits for the next one. A quarter of what a pipe holds:
writing them never blocks, so the writer always gets to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringSettings:
    """Settings of the reward, from which the scoring process builds it."""

    source: SourceSettings
    reward: RewardConfig
    eval_sets: Sequence[EvaluationSet] = ()
    """Evaluation sets with a reward of their own."""
    sources: Sequence[NamedSourceSettings] = ()
    """In place of `source`: several task sources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredResponse:
    """A response's reward, or an error, with which the reward is 0 and the response is not trained on."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    error: str = ""


class Scorer:
    """Scores (response, record) pairs one after another. Thread-safe: calls take turns."""

    def __init__(self, settings: ScoringSettings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._num_requests = 0
        """Requests numbered so far, over all processes: no number is used twice."""
        self._lock = threading.Lock()
        self._closed = False

    def check(self) -> None:
        """Start the process and raise ConfigError if the reward cannot be built."""
        problem = f"reward.function = {self._settings.reward.function!r}: its process ended while it loaded"
        with raised_as(ConfigError, problem, EOFError, ConnectionError), self._exclusive():
            self._ensure_process()

    def score(self, items: Sequence[tuple[str, Any]]) -> list[ScoredResponse]:
        """Score each pair within the time limit. Failures of the reward function are returned as errors, never raised.
        Raises RuntimeError after `close`."""
        with self._exclusive():
            return self._score_items(items)

    def close(self) -> None:
        """Stop the process permanently. A call in progress in another thread raises RuntimeError."""
        self._closed = True  # set before reading _process: a thread that starts one afterwards sees it
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._stop()

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._lock:
            try:
                self._refuse_if_closed()
                yield
            except BaseException:
                # After an interruption, say, answers may still arrive that the next call must not read.
                self._stop()
                raise

    def _score_items(self, items: Sequence[tuple[str, Any]]) -> list[ScoredResponse]:
        first = self._num_requests
        self._num_requests += len(items)
        messages = [encode_message((number, *item)) for number, item in enumerate(items, first)]
        scores: list[ScoredResponse] = []
        num_sent = 0
        while len(scores) < len(messages):
            try:
                if num_sent == len(scores) and self._process is not None and self._process.poll() is not None:
                    self._stop()  # it died while idle: no row is to blame
                process = self._ensure_process()
                assert process.stdin is not None and process.stdout is not None
                while num_sent < len(messages) and (
                    num_sent == len(scores) or sum(map(len, messages[len(scores) : num_sent + 1])) <= AHEAD_BYTES
                ):
                    process.stdin.write(messages[num_sent])
                    num_sent += 1
                process.stdin.flush()
                number, reward, parts, problem = _read(process.stdout, self._settings.reward.timeout_s)
                if number == first + len(scores):
                    scores.append(ScoredResponse(reward=reward, parts=parts, error=problem))
                    continue
                error = "the reward process answered another request; does it fork and return in both processes?"
            except TimeoutError as exception:
                error = str(exception) or f"the reward took longer than {self._settings.reward.timeout_s:g} s"
            except (EOFError, OSError) as exception:
                error = f"the reward process died: {exception or 'no message'}"
            self._refuse_if_closed()
            self._stop()
            scores.append(ScoredResponse(reward=0.0, error=error))
            num_sent = len(scores)  # later requests are sent again, to a new process
        return scores

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise RuntimeError("the scorer is closed")

    def _stop(self) -> None:
        """Stop the process; the next request starts another. Only with the lock held."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):  # requests that it never read
                        pipe.close()
            self._output.wait()
            self._process = None

    def _ensure_process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._output = RelayedOutput()
            try:
                self._process = subprocess.Popen(
                    # -P: a module in the current folder must not shadow the standard library's.
                    [sys.executable, "-P", "-m", "staleflow.tasks.sources.reward_process"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._output.fileno(),
                )
            finally:
                self._output.close()
            self._refuse_if_closed()
            assert self._process.stdin is not None and self._process.stdout is not None
            _write(self._process.stdin, self._settings)
            try:
                problem = _read(self._process.stdout, START_S)
            except TimeoutError:
                raise TimeoutError(f"the scoring process took longer than {START_S:g} s to load the reward") from None
            if problem:
                raise ConfigError(problem)
        return self._process


def _write(pipe: Any, value: Any) -> None:
    pipe.write(encode_message(value))
    pipe.flush()


def _read(pipe: Any, timeout_s: float | None) -> Any:
    """Read one value from a pipe. Raises TimeoutError after `timeout_s`, EOFError if the other side is gone."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def read(size: int) -> bytes:
        if deadline is not None and not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        # The raw read: a buffered one would take more than needed, and select would not see the rest.
        chunk: bytes = (pipe.raw if hasattr(pipe, "raw") else pipe).read(size)
        return chunk

    return read_message(read)


def _serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """The main loop of the scoring process: settings first, then pairs until the other side closes."""
    settings: ScoringSettings = _read(requests, None)
    try:
        rewards = _make_rewards(settings)
    except ConfigError as error:
        _write(replies, str(error))
        return
    _write(replies, "")
    while True:
        try:
            number, response, record = _read(requests, None)
        except EOFError:
            return
        try:
            reward_of, pattern = rewards[record.origin if isinstance(record, RecordWithOrigin) else ""]
            reward, parts = parse_reward(reward_of(extract_answer(pattern, response), record))
            problem = ""
        except InvalidReward as exception:
            reward, parts, problem = 0.0, {}, str(exception)
        except (Exception, SystemExit) as exception:  # noqa: BLE001  a user's function may raise anything
            reward, parts, problem = 0.0, {}, describe_error(exception)
        _write(replies, (number, 0.0 if problem else reward, parts, " ".join(printable(problem, 500).split())))


def _make_rewards(settings: ScoringSettings) -> dict[str, tuple[Reward, str]]:
    """Build the (reward function, answer pattern) of each origin of records. Raises ConfigError."""
    reward, rewards = settings.reward, {}
    if not settings.sources:
        job_source = settings.source.build()
        rewards[""] = make_reward(reward.function, job_source, reward.parts), settings.source.task.answer_pattern
    for entry in settings.sources:
        source = entry.settings.build()
        if entry.reward:
            reward_function = make_reward(entry.reward, source, key=f"task.sources.{entry.name}.reward")
        else:
            reward_function = make_reward(reward.function, source, reward.parts)
        rewards[entry.name] = reward_function, entry.settings.task.answer_pattern
    for eval_set in settings.eval_sets:
        source = eval_set.build() if eval_set.config.source else job_source
        reward_function = make_reward(eval_set.config.reward, source, key=f"evaluation.sets.{eval_set.name}.reward")
        rewards[eval_set.name] = reward_function, settings.source.task.answer_pattern
    return rewards


def _own_pipes() -> tuple[BinaryIO, BinaryIO]:
    """(requests, answers), moved off the standard streams, which the reward and the programs it starts may use."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    os.dup2(2, 1)
    sys.stdout = sys.stderr  # line-buffered: output before a crash is not lost
    return requests, answers


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller also gets Ctrl-C, and stops this process
    try:
        _serve(*_own_pipes())
    except (BrokenPipeError, EOFError):  # whoever asked is gone, so nobody waits for what is left in the pipe
        os._exit(0)
