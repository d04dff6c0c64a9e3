"""Running a reward function under a time budget: in a process of its own, which is killed when it overruns.

A thread cannot be killed, and a hanging reward would otherwise hold its worker for ever. The process also is the main
thread that math-verify needs, and a crash in it takes nothing else down. Run as `python -m tasks.scoring`: requests
come in on standard input and answers leave on standard output, as length-prefixed pickles.
"""

from __future__ import annotations

import math
import pickle
import select
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from stores.errors import ConfigError
from tasks.environments import extract_answer, make_reward, make_source

START_S = 60.0
"""Seconds the scoring process may take to import what it needs."""

AHEAD_BYTES = 16_384
"""Requests that may lie in the pipe, so that the process never waits for the next one. A quarter of what a pipe holds:
writing them never blocks, and so whoever writes always comes to read."""
HEADER = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringSettings:
    """What the scoring process builds its reward from; see TaskConfig and RewardConfig."""

    source: str
    options: dict[str, Any]
    seed: int
    function: str
    answer_pattern: str
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredResponse:
    """A reward, or what went wrong; then the reward is 0 and carries no gradient."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    error: str = ""


class Scorer:
    """Scores (response, record) pairs one after another. Not safe for threads; one owner."""

    def __init__(self, settings: ScoringSettings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    def check(self) -> None:
        """Start the process and raise ConfigError if the reward cannot be built."""
        self._ensure_process()

    def score(self, items: Sequence[tuple[str, Any]]) -> list[ScoredResponse]:
        """A score for each pair, within the time budget each. Never raises for what the reward function does."""
        messages = [_packed(item) for item in items]
        scores: list[ScoredResponse] = []
        sent = 0
        while len(scores) < len(messages):
            try:
                process = self._ensure_process()
                assert process.stdin is not None and process.stdout is not None
                while sent < len(messages) and (
                    sent == len(scores) or sum(map(len, messages[len(scores) : sent + 1])) <= AHEAD_BYTES
                ):
                    process.stdin.write(messages[sent])
                    sent += 1
                process.stdin.flush()
                reward, parts, problem = _read(process.stdout, self._settings.timeout_s)
                scores.append(ScoredResponse(reward=reward, parts=parts, error=problem))
                continue
            except TimeoutError:
                error = f"the reward took longer than {self._settings.timeout_s:g} s"
            except (EOFError, OSError) as died:
                error = f"the reward process died: {died or 'no message'}"
            self.close()
            scores.append(ScoredResponse(reward=0.0, error=error))
            sent = len(scores)  # what was sent after it is sent again, to a new process
        return scores

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process = None

    def _ensure_process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                # -P: whatever is called `tasks` in the current folder is not ours.
                [sys.executable, "-P", "-m", "tasks.scoring"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert self._process.stdin is not None and self._process.stdout is not None
            _write(self._process.stdin, self._settings)
            problem = _read(self._process.stdout, START_S)
            if problem:
                self.close()
                raise ConfigError(problem)
        return self._process


def _packed(value: Any) -> bytes:
    data = pickle.dumps(value)
    return HEADER.pack(len(data)) + data


def _write(pipe: Any, value: Any) -> None:
    pipe.write(_packed(value))
    pipe.flush()


def _read(pipe: Any, timeout_s: float | None) -> Any:
    """One value; TimeoutError if it is not there in time, EOFError if the other side is gone."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    (size,) = HEADER.unpack(_read_exactly(pipe, HEADER.size, deadline))
    return pickle.loads(_read_exactly(pipe, size, deadline))


def _read_exactly(pipe: Any, size: int, deadline: float | None) -> bytes:
    data = b""
    while len(data) < size:
        if deadline is not None and not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        # The raw read: a buffered one would take more than asked for, and select would not see the rest.
        chunk = pipe.raw.read(size - len(data)) if hasattr(pipe, "raw") else pipe.read(size - len(data))
        if not chunk:
            raise EOFError("end of stream")
        data += chunk
    return data


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """The scoring process: settings first, then pairs until the other side closes."""
    settings: ScoringSettings = _read(requests, None)
    try:
        source = make_source(settings.source, settings.options, settings.seed)
        reward_of = make_reward(settings.function, source)
    except ConfigError as error:
        _write(answers, str(error))
        return
    _write(answers, "")
    while True:
        try:
            response, record = _read(requests, None)
        except EOFError:
            return
        try:
            result = reward_of(extract_answer(settings.answer_pattern, response), record)
            reward, parts = result if isinstance(result, tuple) else (result, {})
            reward = float(reward)
            problem = "" if math.isfinite(reward) else f"the reward is {reward}, it must be a finite number"
        except Exception as raised:  # noqa: BLE001  the rim: whatever a user's function raises is recorded data
            reward, parts, problem = 0.0, {}, f"{type(raised).__name__}: {raised}"
        _write(answers, (0.0 if problem else reward, dict(parts), problem[:500]))


if __name__ == "__main__":
    answers_pipe = sys.stdout.buffer
    sys.stdout = sys.stderr  # a reward that prints must not write into the answers
    _serve(sys.stdin.buffer, answers_pipe)
