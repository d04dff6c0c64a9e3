"""Episodes in their own processes, which are forked by a server that has loaded their environment."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

from staleflow.stores.errors import ConfigError, raised_as
from staleflow.tasks.environments.child_programs import ending_by_themselves
from staleflow.tasks.environments.episode import EnvStepResult, EpisodeFailed, EpisodeStart
from staleflow.tasks.environments.fork_server import (
    BEGIN,
    CLOSE,
    END_EARLY,
    ENDED,
    FORK,
    KILL,
    LAST_S,
    ORDER,
    STEP,
    ForkSettings,
    read_value,
    receive,
)
from staleflow.tasks.environments.pickled_messages import encode_message
from staleflow.tasks.environments.terminal_output import RelayedOutput
from staleflow.tasks.rendering.task_source import Prompt

LOAD_S = 120.0
"""Seconds that a server may take to load its environment."""
REPORT_S = 1.0
"""Seconds in which the end of a process is reported after its connection has closed."""
POLL_S = 0.01


class ForkServer:
    """Starts processes for episodes. Thread-safe. It stops when it is closed or garbage-collected, and restarts after
    it has died."""

    def __init__(self, settings: ForkSettings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: Any = None
        self._num_started = 0
        self._ended: dict[int, int] = {}
        """Exit statuses of processes, by number, until they are read."""
        self._wanted: set[int] = set()
        """Processes whose exit status may still be read."""
        self._part = b""

    def start(self) -> None:
        """Load the environment if it is not loaded yet, which may take seconds. Raises ConfigError."""
        with self._lock:
            self._started()

    def fork(self) -> tuple[int, socket.socket]:
        """Fork a process. Returns its number, and a connection to it. Raises ConfigError."""
        with self._lock:
            self._read_reports()
            ours, theirs = socket.socketpair()
            try:
                self._num_started += 1
                for last_attempt in (False, True):
                    control = self._started()
                    try:
                        socket.send_fds(control, [ORDER.pack(FORK, self._num_started)], [theirs.fileno()])
                        break
                    except OSError:  # it died
                        self._forget()
                        if last_attempt:
                            raise
                self._wanted.add(self._num_started)
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
            return self._num_started, ours

    def kill(self, number: int) -> None:
        """Kill a process and all that it has started, without waiting."""
        with self._lock:
            self._wanted.discard(number)
            self._ended.pop(number, None)
            if self._control is not None:
                with contextlib.suppress(OSError):
                    self._control.sendall(ORDER.pack(KILL, number))

    def exit_code(self, number: int) -> int | None:
        """Return the exit code of a process, negative if a signal ended it; None while it is unknown."""
        with self._lock:
            self._read_reports()
            if number in self._ended:
                self._wanted.discard(number)
            return self._ended.pop(number, None)

    def death(self, number: int) -> str:
        """Describe how a process ended. May wait for the server's report."""
        deadline = time.monotonic() + REPORT_S
        while (status := self.exit_code(number)) is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return death(status)

    def _read_reports(self) -> None:
        """Read the reports of ended processes that have arrived."""
        control = self._control
        with contextlib.suppress(OSError):
            while control is not None and select.select([control], [], [], 0)[0]:
                data = control.recv(4096)
                if not data:
                    break
                self._part += data
        complete_bytes = len(self._part) // ENDED.size * ENDED.size
        reports, self._part = self._part[:complete_bytes], self._part[complete_bytes:]
        self._ended |= {n: status for n, status in ENDED.iter_unpack(reports) if n in self._wanted}

    def close(self) -> None:
        with self._lock:
            self._forget()

    def _started(self) -> socket.socket:
        if self._process is not None and self._process.poll() is not None:
            self._forget()  # it died
        if self._control is None:
            ours, theirs = socket.socketpair()
            threads = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS") if name not in os.environ}
            output = RelayedOutput()
            try:
                with ending_by_themselves():
                    process = subprocess.Popen(
                        # -P: a module in the current folder must not shadow the standard library's.
                        [sys.executable, "-P", "-m", "staleflow.tasks.environments.fork_server"],
                        stdin=theirs.fileno(),
                        stderr=output.fileno(),
                        env={**os.environ, **threads},
                    )
            finally:
                output.close()
            theirs.close()
            self._control, self._process = ours, process
            self._stop = weakref.finalize(self, _stopped, process, ours, output)
            ours.settimeout(LOAD_S)
            try:
                ours.sendall(encode_message(self.settings))
                problem = read_value(ours)
            except TimeoutError as error:
                self._forget()
                raise ConfigError(f"{self._where}: loading it took longer than {LOAD_S:g} s") from error
            except (OSError, EOFError) as error:
                self._forget()
                raise ConfigError(f"{self._where}: loading it ended its process; see what it wrote above") from error
            if problem:
                self._forget()
                raise ConfigError(problem)
        return self._control

    @property
    def _where(self) -> str:
        return f"{self.settings.key} = {self.settings.source!r}"

    def _forget(self) -> None:
        if self._stop is not None:
            self._stop()
        self._control = self._process = self._stop = None
        self._part = b""


def _stopped(process: subprocess.Popen[bytes], control: socket.socket, output: RelayedOutput) -> None:
    """Stop a server, which kills its processes and their children; they would outlive a server that is killed. One that
    hangs is killed."""
    control.close()
    try:
        process.wait(LAST_S + 2.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    output.wait()


class ForkedEpisode:
    """An episode in its own process."""

    def __init__(self, server: ForkServer, start: EpisodeStart) -> None:
        self._server, self._start = server, start
        self._number = 0
        self._connection: socket.socket | None = None

    async def begin(self) -> Prompt:
        with raised_as(EpisodeFailed, "no process can be started for it", ConfigError, OSError):
            await asyncio.to_thread(self._server.start)
            self._number, self._connection = self._server.fork()
        self._connection.setblocking(False)
        prompt: Prompt = await self._request(BEGIN, self._start)
        return prompt

    async def step(self, text: str, *, truncated: bool, last: bool) -> EnvStepResult:
        result: EnvStepResult = await self._request(STEP, text, truncated, last)
        return result

    async def end_early(self) -> EnvStepResult:
        result: EnvStepResult = await self._request(END_EARLY)
        return result

    async def close(self) -> None:
        if self._connection is not None:
            try:
                await self._request(CLOSE)
            finally:
                self.kill()

    def kill(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self._server.kill(self._number)

    async def _request(self, *request: Any) -> Any:
        connection = self._connection
        assert connection is not None
        try:
            await asyncio.get_running_loop().sock_sendall(connection, encode_message(request))
            result, problem = await receive(connection)
        except (EOFError, OSError) as error:
            death = await asyncio.to_thread(self._server.death, self._number)
            raise EpisodeFailed(f"its process {death}") from error
        if problem:
            raise EpisodeFailed(_with_limit(problem, self._server.settings.memory_mib))
        return result


class Resetter:
    """Resets environments in forked processes and returns their first observations. Thread-safe. Each reset has a
    process to itself, which is reused for later ones."""

    def __init__(self, settings: ForkSettings, within_s: float) -> None:
        self._server = ForkServer(settings)
        self._within_s = within_s
        self._idle: list[tuple[int, socket.socket]] = []

    def __del__(self) -> None:
        for _, connection in self._idle:
            connection.close()  # the process behind it ends

    def first_observation(self, start: EpisodeStart) -> Prompt:
        """Return the first observation of an episode. Raises EpisodeFailed, and ConfigError if the environment cannot
        be loaded."""
        try:
            number, connection = self._idle.pop()
        except IndexError:
            number, connection = self._server.fork()
            connection.settimeout(self._within_s)
        try:
            connection.sendall(encode_message((BEGIN, start)))
            prompt, problem = read_value(connection)
        except (EOFError, OSError) as error:
            why = f"reset took longer than environment.step_timeout_s = {self._within_s:g} s"
            if not isinstance(error, TimeoutError):
                why = f"reset: its process {self._server.death(number)}"
            connection.close()
            self._server.kill(number)
            raise EpisodeFailed(why) from error
        self._idle.append((number, connection))
        if problem:
            raise EpisodeFailed(_with_limit(problem, self._server.settings.memory_mib))
        observation: Prompt = prompt
        return observation


def death(status: int | None) -> str:
    """Describe how a process ended. status: its exit code, negative for a signal; None if unknown."""
    if status is None:
        return "died"
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}"


def _with_limit(problem: str, memory_mib: int) -> str:
    return f"{problem} (environment.memory_mib = {memory_mib})" if "MemoryError" in problem and memory_mib else problem
