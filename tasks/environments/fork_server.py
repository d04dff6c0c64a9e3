"""Loads an environment once and forks a process for each episode: `python -m staleflow.tasks.environments.fork_server`.

Loading may take seconds, forking takes milliseconds. The server has one thread, so that forking is safe, and does
nothing but fork and kill processes and report which have ended. When its caller is gone, it kills all processes that
are left and ends, and each episode's process dies with it. Processes that an episode has started, also in sessions of
their own, become the server's children (it is their subreaper) when the episode's process dies, and are killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from staleflow.stores.errors import ConfigError
from staleflow.tasks.environments.environment_loader import open_environment
from staleflow.tasks.environments.episode import Environment, Episode, EpisodeFailed, error_and_line
from staleflow.tasks.environments.pickled_messages import HEADER, encode_message, read_exactly, read_message
from staleflow.tasks.settings.endpoint_settings import EndpointSettings

ORDER = struct.Struct("<cq")
"""Message to the server: FORK or KILL, and an episode's number. The episode's socket is sent along with FORK."""
FORK, KILL = b"f", b"k"
ENDED = struct.Struct("<qi")
"""Message from the server: an episode's number, and the exit status of its process."""
BEGIN, STEP, END_EARLY, CLOSE = "begin", "step", "end_early", "close"
"""Requests to an episode's process."""
LAST_S = 10.0
"""Most seconds that the server spends on killing the remaining processes before it ends."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""Options of prctl(2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkSettings:
    """Settings of a fork server.

    memory_mib: memory that an episode's process may use in addition to the loaded environment; 0 for no limit.
    endpoint: settings of the endpoint that runs in each agent's process; None if agents use an endpoint elsewhere.
    """

    source: str
    options: dict[str, Any]
    key: str
    memory_mib: int
    endpoint: EndpointSettings | None = None


def read_value(connection: socket.socket) -> Any:
    """Read the next value from a blocking socket. Raises EOFError at its end, TimeoutError after its timeout."""
    return read_message(connection.recv)


@dataclass(slots=True)
class ForkServerLoop:
    """The fork server: its child processes, and the loop that executes the caller's commands."""

    control: socket.socket
    environment: Environment
    settings: ForkSettings
    numbers: dict[int, int] = field(default_factory=dict)
    """The episode's number, by the id of its process."""
    reports: bytes = b""
    """Messages on ended processes that are not sent yet. Sending never waits for the caller to read, since nothing
    would be forked meanwhile."""

    def run(self) -> None:
        wake, wake_sender = socket.socketpair()
        for end in (wake, wake_sender):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_sender.fileno(), warn_on_full_buffer=False)
        try:
            while True:
                ready, room, _ = select.select([self.control, wake], [self.control] if self.reports else [], [])
                if room:
                    self._report()
                if wake in ready:
                    with contextlib.suppress(BlockingIOError):
                        wake.recv(4096)
                    self._reap()
                if self.control in ready and not self._execute_order((wake, wake_sender)):
                    return
        finally:
            signal.set_wakeup_fd(-1)  # its socket ends with this method, before the children do
            for process in self.numbers:
                _kill_group(process)
            self._kill_all()

    def _execute_order(self, sockets: tuple[socket.socket, ...]) -> bool:
        """Carry out one order of the caller. Returns False once the caller is gone."""
        data, descriptors, _, _ = socket.recv_fds(self.control, ORDER.size, 1)
        if not data:
            return False
        if len(data) < ORDER.size:
            data += read_exactly(self.control.recv, ORDER.size - len(data))
        order, number = ORDER.unpack(data)
        if order == FORK:
            connection = socket.socket(fileno=descriptors[0])
            process = os.fork()
            if process == 0:
                signal.set_wakeup_fd(-1)
                for end in (self.control, *sockets):
                    end.close()
                _run_episode(connection, self.environment, self.settings)
            connection.close()
            self.numbers[process] = number
        else:
            for process, running in self.numbers.items():
                if running == number:
                    _kill_group(process)
        return True

    def _reap(self) -> None:
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if process == 0:
                return
            number = self.numbers.pop(process, None)
            if number is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process, signal.SIGKILL)
                self.reports += ENDED.pack(number, os.waitstatus_to_exitcode(status))
            _kill_children(set(self.numbers))  # and the children of those, once they are dead

    def _kill_all(self) -> None:
        """Kill all children, and theirs, which become this process's once those are dead."""
        end = time.monotonic() + LAST_S
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < end:
                _kill_children(set())
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(0.005)

    def _report(self) -> None:
        """Send as much of the reports as the socket has room for."""
        try:
            self.reports = self.reports[self.control.send(self.reports, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            pass
        except OSError:  # the caller is gone; the loop ends when it reads from the socket
            self.reports = b""


def _kill_group(process: int) -> None:
    """Kill an episode's process and its process group, which may not exist yet."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(process, signal.SIGKILL)


def _kill_children(episodes: set[int]) -> None:
    """Kill those children of this process that dead episodes have left behind. episodes: processes to leave alone."""
    with contextlib.suppress(OSError):  # a system without this file
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            if int(child) not in episodes:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(int(child), signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    """Linux's prctl; elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _run_episode(connection: socket.socket, environment: Environment, settings: ForkSettings) -> None:
    """Run a forked process to its end. Never returns."""
    status = 1
    try:
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if settings.memory_mib:
            _limit_memory(settings.memory_mib * 2**20)
        connection.setblocking(False)
        asyncio.run(_serve(connection, environment))
        status = 0
    except (EOFError, OSError):  # the caller is gone
        status = 0
    finally:
        os._exit(status)


def _limit_memory(max_bytes: int) -> None:
    """Limit this process's memory to what it has now and `max_bytes` bytes more."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + max_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


async def receive(connection: socket.socket) -> Any:
    """Read the next value from a non-blocking socket. Raises EOFError at its end."""
    loop = asyncio.get_running_loop()

    async def exactly(size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            chunk = await loop.sock_recv(connection, size - len(data))
            if not chunk:
                raise EOFError("end of stream")
            data += chunk
        return bytes(data)

    (size,) = HEADER.unpack(await exactly(HEADER.size))
    return pickle.loads(await exactly(size))


async def _serve(connection: socket.socket, environment: Environment) -> None:
    """Answer each request with (result, problem) until the other side closes. Each BEGIN starts a new episode, after
    the one before is closed."""
    loop = asyncio.get_running_loop()
    episode: Episode | None = None
    while True:
        method, *args = await receive(connection)
        result: Any = None
        problem = ""
        try:
            if method == BEGIN:
                if episode is not None:
                    await episode.close()
                episode = environment.episode(args[0])
                result = await episode.begin()
            elif episode is not None and method == STEP:
                text, truncated, last = args
                result = await episode.step(text, truncated=truncated, last=last)
            elif episode is not None and method == END_EARLY:
                result = await episode.end_early()
            elif episode is not None and method == CLOSE:
                await episode.close()
        except EpisodeFailed as failed:
            problem = str(failed)
        except MemoryError as error:
            problem = error_and_line(error)
        await loop.sock_sendall(connection, encode_message((result, problem)))


def main() -> None:
    """Load the environment named by the settings on standard input, report whether it loaded, and serve."""
    control = socket.socket(fileno=os.dup(0))
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    os.dup2(2, 1)
    sys.stdout = sys.stderr  # line-buffered: output before a crash is not lost
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who presses Ctrl-C means its caller, which ends it
    try:
        settings: ForkSettings = read_value(control)
        try:
            environment = open_environment(settings.source, settings.options, settings.key, settings.endpoint)
        except ConfigError as error:
            control.sendall(encode_message(str(error)))
            return
        gc.collect()
        gc.freeze()  # what is loaded stays in pages that all processes share
        control.sendall(encode_message(""))
        ForkServerLoop(control, environment, settings).run()
    except (BrokenPipeError, ConnectionResetError, EOFError):  # the caller is gone
        return


if __name__ == "__main__":
    main()
