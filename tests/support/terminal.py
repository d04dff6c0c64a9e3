"""A command in a real terminal: Ctrl-C goes to all of its processes."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil

from tests.support import forking

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """One command in a new controlling pseudo-terminal: forked, or started by a new interpreter."""

    def __init__(self, *args: str | Path, cwd: Path, forked: bool) -> None:
        first, second = pty.openpty()
        self._ours = first
        name = os.ttyname(second)
        # The first terminal that a session leader opens becomes its controlling terminal.
        opening = ["sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', name]
        command = [sys.executable, "-m", "staleflow.cli.main", *map(str, args)]
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200", "PYTHONPATH": str(Path.cwd())}
        process: dict[str, Any] = {"cwd": cwd, "env": environment, "start_new_session": True}
        self.process: subprocess.Popen[Any]
        if forked:
            environment[forking.ADDRESS] = ""  # child processes must receive Ctrl-C too
            self.process = forking.Popen(command, stdin=second, stdout=second, stderr=second, **process)
        else:
            self.process = subprocess.Popen([*opening, *command], **process)
        os.close(second)
        self._raw = b""

    @property
    def text(self) -> str:
        """The output so far, without colours and cursor moves."""
        return ESCAPES.sub("", self._raw.decode(errors="replace"))

    def until(self, pattern: str, within_s: float = 120.0) -> None:
        """Read until the text matches."""
        deadline = time.monotonic() + within_s
        while not re.search(pattern, self.text):
            assert time.monotonic() < deadline, f"{pattern!r} did not come:\n{self.text[-3000:]}"
            assert self._read(), f"ended before {pattern!r}:\n{self.text[-3000:]}"

    def until_computed(self, cpu_s: float, within_s: float = 120.0) -> None:
        """Read until the command process has used this much CPU time in seconds."""
        deadline = time.monotonic() + within_s
        while psutil.Process(self.process.pid).cpu_times().user < cpu_s:
            assert time.monotonic() < deadline
            assert self._read(), f"ended:\n{self.text[-3000:]}"

    def until_there(self, path: Path, within_s: float = 120.0) -> None:
        """Read until a file exists."""
        deadline = time.monotonic() + within_s
        while not path.exists():
            assert time.monotonic() < deadline, f"{path} did not come:\n{self.text[-3000:]}"
            assert self._read(), f"ended:\n{self.text[-3000:]}"

    def ctrl_c(self) -> None:
        os.write(self._ours, b"\x03")

    def end(self, within_s: float = 120.0) -> int:
        """Read to the end; returns the exit code once every process of the terminal has ended."""
        deadline = time.monotonic() + within_s
        while self._read():
            assert time.monotonic() < deadline, f"did not end:\n{self.text[:3000]}\n...\n{self.text[-3000:]}"
        code = self.process.wait(within_s)
        while self._left():
            assert time.monotonic() < deadline, f"processes are left: {self._left()}"
            time.sleep(0.1)
        return code

    def _left(self) -> list[psutil.Process]:
        results = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    results.append(process)
        return results

    def _read(self) -> bool:
        """Read pending output; returns False at the end."""
        if not select.select([self._ours], [], [], 0.2)[0]:
            return True
        try:
            more = os.read(self._ours, 65536)
        except OSError:  # Linux reports so that no process has it open, not yet or no longer
            time.sleep(0.05)
            return self.process.poll() is None
        self._raw += more
        return bool(more)

    def close(self) -> None:
        for process in self._left():
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self._ours)


@contextlib.contextmanager
def terminal(*args: str | Path, cwd: Path, forked: bool = True) -> Iterator[Terminal]:
    """A command in a terminal; remaining processes are killed at the end."""
    with closing(Terminal(*args, cwd=cwd, forked=forked)) as opened:
        yield opened
