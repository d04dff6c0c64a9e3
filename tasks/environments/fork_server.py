"""Loads an environment once and forks a process for each episode: `python -m staleflow.tasks.environments.fork_server`.

Loading may take seconds, forking takes milliseconds. The server has one thread, so that forking is safe, and does
nothing but fork, kill and report ends. When its caller is gone it kills what is left and ends, and each episode's
process dies with it. A dead episode's own children, wherever they have fled to, become the server's, and are killed.
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
from staleflow.tasks.environments.episode import Environment, Episode, EpisodeFailed, error_line
from staleflow.tasks.environments.pickled_messages import HEADER, packed, read_exactly, read_message
from staleflow.tasks.settings.endpoint_settings import EndpointSettings

ORDER = struct.Struct("<cq")
"""What the server is told: FORK or KILL, and an episode's number. With FORK comes the episode's socket."""
FORK, KILL = b"f", b"k"
ENDED = struct.Struct("<qi")
"""What it reports: an episode's number, and the status that its process ended with."""
BEGIN, STEP, CLOSE = "begin", "step", "close"
"""What an episode's process is asked."""
LAST_S = 10.0
"""Seconds that the server spends at its end, at most, on killing what is left."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""Of prctl(2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkSettings:
    """Settings of a fork server. memory_mib: limit of a process beyond what loading took; 0: none. endpoint: of agents
    whose processes have an endpoint each; None if they use one elsewhere."""

    source: str
    options: dict[str, Any]
    key: str
    memory_mib: int
    endpoint: EndpointSettings | None = None


def read_value(connection: socket.socket) -> Any:
    """Read the next value from a socket that blocks. Raises EOFError at its end, TimeoutError after its timeout."""
    return read_message(connection.recv)


@dataclass(slots=True)
class ForkServerLoop:
    """The server: its episodes, and the loop that serves them."""

    control: socket.socket
    environment: Environment
    settings: ForkSettings
    numbers: dict[int, int] = field(default_factory=dict)
    """Episodes' numbers by process."""
    reports: bytes = b""
    """Of ended processes, not sent yet. The caller reads them when it likes: sending must never wait for that, or
    nothing would be forked any more."""

    def run(self) -> None:
        wake, woken = socket.socketpair()
        for end in (wake, woken):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        try:
            while True:
                ready, room, _ = select.select([self.control, wake], [self.control] if self.reports else [], [])
                if room:
                    self._report()
                if wake in ready:
                    with contextlib.suppress(BlockingIOError):
                        wake.recv(4096)
                    self._reap()
                if self.control in ready and not self._execute_order((wake, woken)):
                    return
        finally:
            signal.set_wakeup_fd(-1)  # its socket ends with this method, before the children do
            for process in self.numbers:
                _kill_group(process)
            self._kill_all()

    def _execute_order(self, own: tuple[socket.socket, ...]) -> bool:
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
                for end in (self.control, *own):
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
        """Send as much of the reports as there is room for."""
        try:
            self.reports = self.reports[self.control.send(self.reports, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            pass
        except OSError:  # the caller is gone, as it will be seen
            self.reports = b""


def _kill_group(process: int) -> None:
    """Kill an episode's process and those of its group. It may not have made its group yet."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(process, signal.SIGKILL)


def _kill_children(but: set[int]) -> None:
    """Kill this process's children but these: what dead episodes have left behind."""
    with contextlib.suppress(OSError):  # a system that does not tell
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            if int(child) not in but:
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
    except (EOFError, OSError):  # whoever asked is gone
        status = 0
    finally:
        os._exit(status)


def _limit_memory(most: int) -> None:
    """Limit this process's memory to so many bytes more than it has."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + most
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
    """Serve requests of one episode at a time with (result, problem), until the other side closes. Each BEGIN
    starts another episode."""
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
            elif episode is not None and method == CLOSE:
                await episode.close()
        except EpisodeFailed as failed:
            problem = str(failed)
        except MemoryError as error:
            problem = error_line(error, line=True)
        await loop.sock_sendall(connection, packed((result, problem)))


def main() -> None:
    """Load the environment that standard input names, say whether that went well, and serve."""
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
            control.sendall(packed(str(error)))
            return
        gc.collect()
        gc.freeze()  # what is loaded stays in pages that all processes share
        control.sendall(packed(""))
        ForkServerLoop(control, environment, settings).run()
    except (BrokenPipeError, ConnectionResetError, EOFError):  # whoever asked is gone
        return


if __name__ == "__main__":
    main()
