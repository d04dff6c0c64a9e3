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
from staleflow.tasks.environments.child_programs import without_owner
from staleflow.tasks.environments.episode import EnvStepResult, EpisodeFailed, EpisodeStart
from staleflow.tasks.environments.fork_server import (
    BEGIN,
    CLOSE,
    COMMAND,
    END_EARLY,
    EXIT_REPORT,
    FORK,
    KILL,
    STEP,
    STOP_S,
    ForkServerSettings,
    read_value,
    receive,
)
from staleflow.tasks.environments.pickled_messages import encode_message
from staleflow.tasks.environments.terminal_output import RelayedOutput
from staleflow.tasks.rendering.task_source import Prompt

LOAD_TIMEOUT_S = 120.0
"""Seconds that a server may take to load its environment."""
REPORT_TIMEOUT_S = 10.0
"""Seconds to wait for the report on a process after its connection has closed."""
POLL_S = 0.01


class ForkServer:
    """Starts processes for episodes. Thread-safe. It stops when it is closed or garbage-collected; `start` restarts it
    after it has died. An event loop may call `fork`, `kill` and `exit_code`, which wait for no load or end."""

    def __init__(self, settings: ForkServerSettings) -> None:
        self.settings = settings
        self._start_lock = threading.Lock()
        """Lock for starting and stopping the server, which takes seconds; taken before `_lock`."""
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        """Connection to the server; None while it is not loaded, or once it is known to have died."""
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: Any = None
        self._num_started = 0
        self._exit_codes: dict[int, int] = {}
        """Exit codes of ended processes, by number, until they are read."""
        self._watched: set[int] = set()
        """Numbers of processes whose exit codes may still be read."""
        self._partial_report = b""

    def start(self) -> None:
        """Load the environment, unless it is loaded and its server is alive. May take seconds. Raises ConfigError."""
        with self._start_lock:
            with self._lock:
                self._read_reports()
                is_alive = self._control is not None
            if not (is_alive and self._process is not None and self._process.poll() is None):
                self._stop()
                self._load()

    def fork(self) -> tuple[int, socket.socket]:
        """Fork a process of a started server. Returns its number, and a connection to it. Raises OSError, also if the
        server has died."""
        with self._lock:
            self._read_reports()
            if self._control is None:
                raise ConnectionError("its fork server has ended")
            local, remote = socket.socketpair()
            try:
                self._num_started += 1
                socket.send_fds(self._control, [COMMAND.pack(FORK, self._num_started)], [remote.fileno()])
                self._watched.add(self._num_started)
            except BaseException:
                local.close()
                raise
            finally:
                remote.close()
            return self._num_started, local

    def kill(self, number: int) -> None:
        """Kill a process and all that it has started, without waiting."""
        with self._lock:
            self._watched.discard(number)
            self._exit_codes.pop(number, None)
            if self._control is not None:
                with contextlib.suppress(OSError):
                    self._control.sendall(COMMAND.pack(KILL, number))

    def exit_code(self, number: int) -> int | None:
        """Return the exit code of a process, negative if a signal ended it; None while it is unknown."""
        with self._lock:
            self._read_reports()
            if number in self._exit_codes:
                self._watched.discard(number)
            return self._exit_codes.pop(number, None)

    def wait_for_exit_code(self, number: int) -> int | None:
        """Like `exit_code`, of a process that has ended. May wait for the server's report."""
        deadline = time.monotonic() + REPORT_TIMEOUT_S
        while (exit_code := self.exit_code(number)) is None and time.monotonic() < deadline:
            if self._control is None:  # a server that has died reports nothing
                break
            time.sleep(POLL_S)
        return exit_code

    def _read_reports(self) -> None:
        """Read the reports of ended processes that have arrived, or that the server has died."""
        with contextlib.suppress(OSError):
            while self._control is not None and select.select([self._control], [], [], 0)[0]:
                data = self._control.recv(4096)
                self._partial_report += data
                if not data:
                    self._control = None
        complete_bytes = len(self._partial_report) // EXIT_REPORT.size * EXIT_REPORT.size
        reports, self._partial_report = self._partial_report[:complete_bytes], self._partial_report[complete_bytes:]
        self._exit_codes |= {n: status for n, status in EXIT_REPORT.iter_unpack(reports) if n in self._watched}

    def close(self) -> None:
        """Stop the server and its processes. May take seconds."""
        with self._start_lock:
            self._stop()

    def _load(self) -> None:
        local, remote = socket.socketpair()
        threads = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS") if name not in os.environ}
        output = RelayedOutput()
        try:
            with without_owner():
                self._process = subprocess.Popen(
                    # -P: a module in the current folder must not shadow the standard library's.
                    [sys.executable, "-P", "-m", "staleflow.tasks.environments.fork_server"],
                    stdin=remote.fileno(),
                    stderr=output.fileno(),
                    env={**os.environ, **threads},
                )
        finally:
            output.close()
        remote.close()
        self._finalizer = weakref.finalize(self, _stop_server, self._process, local, output)
        local.settimeout(LOAD_TIMEOUT_S)
        setting = f"{self.settings.key} = {self.settings.source!r}"
        try:
            local.sendall(encode_message(self.settings))
            error_text = read_value(local)
        except TimeoutError:
            error_text = f"{setting}: loading it took longer than {LOAD_TIMEOUT_S:g} s"
        except (OSError, EOFError):
            error_text = f"{setting}: its process ended while loading it; see its output above"
        if error_text:
            self._stop()
            raise ConfigError(error_text)
        self._control = local

    def _stop(self) -> None:
        with self._lock:
            self._control, self._partial_report = None, b""
        if self._finalizer is not None:
            self._finalizer()


def _stop_server(process: subprocess.Popen[bytes], control: socket.socket, output: RelayedOutput) -> None:
    """Stop a server by closing its socket, so that it kills its processes and their children. They would outlive a
    server that is killed, so only a server that hangs is."""
    control.close()
    try:
        process.wait(STOP_S + 2.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    output.wait()


class ProcessLost(EpisodeFailed):
    """The process of an episode was killed by SIGKILL, or its end was not reported: the machine's fault, as a rule."""


class ForkServerLost(ProcessLost):
    """The process of an episode ended with its fork server."""


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
            result, error_text = await receive(connection)
        except (EOFError, OSError) as error:
            exit_code = await asyncio.to_thread(self._server.wait_for_exit_code, self._number)
            kind = ProcessLost if exit_code == -signal.SIGKILL else EpisodeFailed
            raise (ForkServerLost if exit_code is None else kind)(f"its process {describe_exit(exit_code)}") from error
        if error_text:
            raise EpisodeFailed(_with_memory_limit(error_text, self._server.settings.memory_mib))
        return result


class Resetter:
    """Resets environments in forked processes and returns their first observations. Thread-safe. Concurrent resets run
    in different processes, which are reused."""

    def __init__(self, settings: ForkServerSettings, timeout_s: float) -> None:
        self._server = ForkServer(settings)
        self._timeout_s = timeout_s
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
            self._server.start()
            number, connection = self._server.fork()
            connection.settimeout(self._timeout_s)
        try:
            connection.sendall(encode_message((BEGIN, start)))
            prompt, error_text = read_value(connection)
        except (EOFError, OSError) as error:
            reason = f"reset took longer than environment.step_timeout_s = {self._timeout_s:g} s"
            if not isinstance(error, TimeoutError):
                reason = f"reset: its process {describe_exit(self._server.wait_for_exit_code(number))}"
                idle, self._idle = self._idle, []  # they may have ended with the same server
                for _, idle_connection in idle:
                    idle_connection.close()
            connection.close()
            self._server.kill(number)
            raise EpisodeFailed(reason) from error
        self._idle.append((number, connection))
        if error_text:
            raise EpisodeFailed(_with_memory_limit(error_text, self._server.settings.memory_mib))
        observation: Prompt = prompt
        return observation


def describe_exit(exit_code: int | None) -> str:
    """Describe how a process ended. exit_code: its exit code, negative for a signal; None if unknown."""
    if exit_code is None:
        return "died"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"was killed by {name}"


def _with_memory_limit(error: str, memory_mib: int) -> str:
    return f"{error} (environment.memory_mib = {memory_mib})" if "MemoryError" in error and memory_mib else error
