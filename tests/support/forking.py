"""Starts `python -m` programs without import time: forked from a process that has done the imports (fork_server.py).

`Popen` and `run` use subprocess for every other command. A few tests start commands with subprocess itself, to test
new interpreters too.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from staleflow.pipeline.processes.local_cluster import worker_environment

ADDRESS = "STALEFLOW_TESTS_FORK_SERVER"
"""Environment variable with the address of the server, which processes forked by it share unless it is empty."""
ENTER = ("nsenter", "--mount", "--net", "--target")
"""Prefix of a command that runs in the network and mounts of the process whose id follows."""
if TYPE_CHECKING:

    class _Process(subprocess.Popen[Any]):
        """subprocess.Popen with the private methods that a forked process replaces."""

        _waitpid_lock: threading.Lock

        def _execute_child(self, *args: Any, **options: Any) -> None: ...
        def _close_pipe_fds(self, *fds: int) -> None: ...
        def _internal_poll(self, *args: Any, **options: Any) -> int | None: ...
        def _handle_exitstatus(self, status: int) -> None: ...
        def _try_wait(self, wait_flags: int) -> tuple[int, int]: ...
else:
    _Process = subprocess.Popen
_execute = inspect.signature(_Process._execute_child)


@dataclass(frozen=True, slots=True)
class Program:
    """A `python [-P] -m MODULE ARGUMENTS` program."""

    module: str
    arguments: tuple[str, ...]
    safe_path: bool
    beside: int
    """The process whose network and mounts it uses."""


def program(command: Any) -> Program | None:
    """Return the program that a command runs; None if it is not one of this Python."""
    if isinstance(command, str | bytes | os.PathLike):
        return None
    words = [os.fspath(word) for word in command]
    beside = os.getpid()
    if tuple(words[: len(ENTER)]) == ENTER:
        beside, words = int(words[len(ENTER)]), words[len(ENTER) + 1 :]
    safe_path = words[1:2] == ["-P"]
    python, *rest = [words[0], *words[1 + safe_path :]]
    if python != sys.executable or rest[:1] != ["-m"]:
        return None
    return Program(rest[1], tuple(rest[2:]), safe_path, beside)


class Popen(_Process):
    """A process that is forked if it is a Python program. Without preexec arguments."""

    _link: socket.socket | None = None
    """Connection to the server, which is the parent of its child."""

    def _execute_child(self, *given: Any, **named: Any) -> None:
        call = _execute.bind(self, *given, **named).arguments
        if (forked := program(call["args"])) is None:
            super()._execute_child(*given, **named)
            return
        address = served()
        environment = {ADDRESS: address, **(os.environ if call["env"] is None else call["env"])}
        if forked.module == "dask":  # its nannies fork their workers, too
            environment.setdefault("DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD", "forkserver")
        request = {
            "module": forked.module,
            "arguments": forked.arguments,
            "safe_path": forked.safe_path,
            "environment": environment,
            "folder": os.fspath(call["cwd"] or Path.cwd()),
            "new_session": call["start_new_session"],
            "beside": forked.beside,
        }
        wanted = [call[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        files = [number if fd == -1 else fd for number, fd in enumerate(wanted)]
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.connect(address)
        socket.send_fds(link, [json.dumps(request).encode()], files)
        self._link = link
        self.pid = int(link.recv(64))
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(call[name] for name in ends))

    def _internal_poll(self, *given: Any, **named: Any) -> int | None:
        if self._link is None:
            return super()._internal_poll(*given, **named)
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._link is None:
            return super()._try_wait(wait_flags)
        try:
            status = int(self._link.recv(64, socket.MSG_DONTWAIT if wait_flags & os.WNOHANG else 0))
        except BlockingIOError:
            return 0, 0
        self._link.shutdown(socket.SHUT_WR)
        self._link.recv(1)  # it has been reaped
        self._link.close()
        return self.pid, status


def _start_if_served(*given: Any, **named: Any) -> subprocess.Popen[bytes]:
    return (Popen if os.environ.get(ADDRESS) else subprocess.Popen)(*given, **named)


SUBPROCESS = SimpleNamespace(**{**vars(subprocess), "Popen": _start_if_served})
"""Replaces `subprocess` in modules whose processes are forked where there is a server."""


def run(command: Sequence[Any], *, timeout: float | None = None, **how: Any) -> subprocess.CompletedProcess[Any]:
    """subprocess.run with a process that is forked if possible. how: its arguments except `input` and `check`."""
    if how.pop("capture_output", False):
        how |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **how) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(process.args, process.wait(), out, err)


def served() -> str:
    """Return the address of the server, which is started if it is not running."""
    return os.environ.get(ADDRESS) or _start()


@functools.cache
def _start() -> str:
    """Start the server; it ends with this process."""
    folder = tempfile.mkdtemp(prefix="fork-server-")
    address = f"{folder}/socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        alive, held = os.pipe()
        server = subprocess.Popen(
            [sys.executable, "-c", f"from tests.support import fork_server as s; s.main({listener.fileno()}, {alive})"],
            stdin=subprocess.DEVNULL,
            pass_fds=(listener.fileno(), alive),
            env={**os.environ, **worker_environment(1)},
        )
        os.close(alive)
    atexit.register(_end, os.getpid(), server, held, folder)
    return address


def _end(starter: int, server: subprocess.Popen[bytes], held: int, folder: str) -> None:
    if os.getpid() == starter:
        os.close(held)
        server.kill()
        server.wait()
        shutil.rmtree(folder)
