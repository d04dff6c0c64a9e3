"""Loads an environment once and forks a process for each episode: `python -m staleflow.tasks.environments.fork_server`.

Loading may take seconds, forking takes milliseconds. The server has one thread, so that forking is safe. It only forks
and kills processes, and reports which have ended. When its caller is gone, it kills all remaining processes and ends. A
process that an episode has started, also in another session, becomes the server's child (it is the subreaper) when the
episode's process dies, and is killed.
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
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from staleflow.stores.errors import ConfigError
from staleflow.tasks.environments.environment_loader import open_environment
from staleflow.tasks.environments.episode import Environment, Episode, EpisodeFailed, error_with_location
from staleflow.tasks.environments.pickled_messages import HEADER, encode_message, read_exactly, read_message
from staleflow.tasks.settings.dataset_columns import DataUse
from staleflow.tasks.settings.endpoint_settings import EndpointSettings

COMMAND = struct.Struct("<cq")
"""Message to the server: FORK or KILL, and an episode's number. FORK is sent together with the episode's socket."""
FORK, KILL = b"f", b"k"
EXIT_REPORT = struct.Struct("<qi")
"""Message from the server: an episode's number, and the exit status of its process."""
BEGIN, STEP, END_EARLY, CLOSE = "begin", "step", "end_early", "close"
"""Requests to an episode's process."""
STOP_S = 10.0
"""Maximum seconds in which the server kills the remaining processes before it ends."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""Options of prctl(2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkServerSettings:
    """Settings of a fork server.

    memory_mib: memory that an episode's process may use in addition to the loaded environment; 0 for no limit.
    use: which rows of the environment's data set are used, if its tasks are rows.
    endpoint: settings of the endpoint that runs in each agent's process; None if agents use an endpoint elsewhere.
    """

    source: str
    options: dict[str, Any]
    key: str
    memory_mib: int
    use: DataUse = DataUse.BOTH
    endpoint: EndpointSettings | None = None


def read_value(connection: socket.socket) -> Any:
    """Read the next value from a blocking socket. Raises EOFError at its end, TimeoutError after its timeout."""
    return read_message(connection.recv)


@dataclass(slots=True)
class ForkServerLoop:
    """The fork server: its child processes, and the loop that executes the caller's commands."""

    control: socket.socket
    environment: Environment
    settings: ForkServerSettings
    episode_by_pid: dict[int, int] = field(default_factory=dict)
    """Numbers of running episodes, by process id."""
    helper_pids: frozenset[int] = frozenset()
    """Processes that the environment's code started when it was loaded. They end with the server."""
    reports: bytes = b""
    """EXIT_REPORT messages that are not sent yet. Sending never waits for the caller to read them, because no process
    could be forked meanwhile."""

    def run(self) -> None:
        wake, wake_sender = socket.socketpair()
        for sock in (wake, wake_sender):
            sock.setblocking(False)
        self.helper_pids = frozenset(_list_children())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_sender.fileno(), warn_on_full_buffer=False)
        try:
            while True:
                readable, writable, _ = select.select([self.control, wake], [self.control] if self.reports else [], [])
                if writable:
                    self._send_reports()
                if wake in readable:
                    with contextlib.suppress(BlockingIOError):
                        wake.recv(4096)
                    self._reap()
                if self.control in readable and not self._execute_command((wake, wake_sender)):
                    return
        finally:
            signal.set_wakeup_fd(-1)  # its socket ends with this method, before the children do
            for pid in self.episode_by_pid:
                _kill_group(pid)
            self._kill_all()

    def _execute_command(self, sockets: tuple[socket.socket, ...]) -> bool:
        """Execute one command of the caller. Returns False once the caller is gone."""
        data, fds, _, _ = socket.recv_fds(self.control, COMMAND.size, 1)
        if not data:
            return False
        if len(data) < COMMAND.size:
            data += read_exactly(self.control.recv, COMMAND.size - len(data))
        command, number = COMMAND.unpack(data)
        if command == FORK:
            connection = socket.socket(fileno=fds[0])
            server = os.getpid()
            try:
                pid = os.fork()
            except OSError as error:  # only this episode fails: the machine has no process or memory left
                sys.stderr.write(f"an episode's process cannot be started: {error}\n")
                connection.close()
                self.reports += EXIT_REPORT.pack(number, 1)
                return True
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for sock in (self.control, *sockets):
                    sock.close()
                _run_episode(connection, self.environment, self.settings, server)
            connection.close()
            self.episode_by_pid[pid] = number
        else:
            for pid, running in self.episode_by_pid.items():
                if running == number:
                    _kill_group(pid)
        return True

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            number = self.episode_by_pid.pop(pid, None)
            if number is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
                self.reports += EXIT_REPORT.pack(number, os.waitstatus_to_exitcode(status))
            _kill_children(
                self.helper_pids | self.episode_by_pid.keys()
            )  # their children become this process's, and are killed next

    def _kill_all(self) -> None:
        """Kill all children of this process, and their children, which become its own when their parents die."""
        deadline_s = time.monotonic() + STOP_S
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < deadline_s:
                _kill_children(frozenset())
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(0.005)

    def _send_reports(self) -> None:
        """Send as many bytes of the reports as the socket accepts without waiting."""
        try:
            self.reports = self.reports[self.control.send(self.reports, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            pass
        except OSError:  # the caller is gone; the loop ends when it reads from the socket
            self.reports = b""


def _kill_group(pid: int) -> None:
    """Kill an episode's process and its process group, which may not exist yet."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _list_children() -> list[int]:
    """The ids of this process's children; none on a system that does not list them."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text("utf-8").split()]
    except OSError:
        return []


def _kill_children(spared_pids: frozenset[int]) -> None:
    """Kill those children of this process that dead episodes have left behind."""
    for pid in _list_children():
        if pid not in spared_pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    """Call Linux's prctl; does nothing on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _run_episode(
    connection: socket.socket, environment: Environment, settings: ForkServerSettings, server: int
) -> None:
    """Run a forked process to its end. Never returns. server: process that forked it."""
    status = 1
    try:
        os.setsid()
        for name in ("numpy.random", "torch"):  # Python reseeds only its own generator after a fork
            if (module := sys.modules.get(name)) is not None:
                module.seed()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:  # it died before that
            return
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
    except BaseException:  # noqa: BLE001  such as a KeyboardInterrupt that the environment's code raised
        traceback.print_exc()
    finally:
        os._exit(status)


def _limit_memory(max_bytes: int) -> None:
    """Limit this process's memory to what it has now and `max_bytes` bytes more."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text("utf-8").split()[0])
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
    """Reply to each request with (result, error text) until the caller closes the connection. Each BEGIN closes the
    previous episode and starts a new one."""
    loop = asyncio.get_running_loop()
    episode: Episode | None = None
    while True:
        method, *args = await receive(connection)
        result: Any = None
        error_text = ""
        try:
            if method == BEGIN:
                if episode is not None:
                    previous, episode = episode, None
                    with contextlib.suppress(EpisodeFailed):  # not a failure of the new episode
                        await previous.close()
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
            error_text = str(failed)
        except MemoryError as error:
            error_text = error_with_location(error)
        await loop.sock_sendall(connection, encode_message((result, error_text)))


def main() -> None:
    """Load the environment named by the settings on standard input, report whether it loaded, and serve."""
    control = socket.socket(fileno=os.dup(0))
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    os.dup2(2, 1)
    sys.stdout = sys.stderr  # line-buffered: output before a crash is not lost
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller also gets Ctrl-C, and stops this process
    try:
        settings: ForkServerSettings = read_value(control)
        try:
            environment = open_environment(
                settings.source, settings.options, settings.key, settings.endpoint, settings.use
            )
        except ConfigError as error:
            control.sendall(encode_message(str(error)))
            return
        gc.collect()
        gc.freeze()  # the loaded objects stay in memory pages that all forked processes share
        control.sendall(encode_message(""))
        ForkServerLoop(control, environment, settings).run()
    except (BrokenPipeError, ConnectionResetError, EOFError):  # the caller is gone
        return


if __name__ == "__main__":
    main()
