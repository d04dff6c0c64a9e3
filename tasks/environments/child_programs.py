"""Programs started by episodes that run on their host's event loop. They are killed when their episode or the host
ends.

An episode in a process of its own ends with all that it started (fork_server.py). An agent or environment on the event
loop has no such process: what it starts with `subprocess` or `asyncio.create_subprocess_exec` is a child of the host,
among those of all other episodes. So each such episode has a process group for its programs. The leader is a shell
that waits at a pipe, and kills the group when the pipe closes: at the end of the episode, or at that of the host's
process, also by kill -9.

Programs are recognised by the context in which they are started (contextvars), which asyncio's tasks and
`asyncio.to_thread` hand on, and threads that an agent starts by itself do not. What forks by `os.fork`, or leaves its
session after it has started, is not recognised either; environment.isolation = "process" ends that, too.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import IO, Any

from staleflow.tasks.environments.terminal_output import MAX_LINE_BYTES, RelayedOutput, sanitize_line

LEADER = 'while read -r group; do groups="$groups -$group"; done; kill -9 $groups 0'
"""What the shell that leads a group does; it reads the ids of groups that are to end with its own."""

_current: contextvars.ContextVar[ChildPrograms | None] = contextvars.ContextVar("child_programs", default=None)
"""To whom the programs belong that are started in this context; None: they end by themselves."""


class ChildPrograms:
    """The programs of one episode. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leader: subprocess.Popen[bytes] | None = None
        self._others: set[int] = set()
        """Groups of programs that were started in one of their own."""
        self._closed = False

    @contextlib.contextmanager
    def owning(self) -> Iterator[None]:
        """Context manager: programs started inside it, also by tasks created inside it, belong to this episode."""
        _adopt_streams()
        _adopt_user_code()
        with _owned_by(self):
            yield

    def start(self, start: Callable[..., None], process: subprocess.Popen[Any], *, own_group: bool) -> None:
        """Start a program in the episode's process group. Raises what Popen raises, and RuntimeError after the end of
        the episode.

        Args:
            start: Popen's constructor with its arguments.
            own_group: Whether the program leads a process group of its own.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("the episode has ended; it cannot start another program")
            leader = self._group_leader()
            if own_group:
                start()
            else:
                start(process_group=leader.pid)
            with contextlib.suppress(ProcessLookupError):
                group = os.getpgid(process.pid)
                if group != leader.pid:
                    self._others.add(group)
                    assert leader.stdin is not None
                    leader.stdin.write(b"%d\n" % group)

    def close(self) -> None:
        """Kill all remaining programs. Waits only for the shell, which takes a millisecond."""
        with self._lock:
            self._closed = True
            leader, self._leader = self._leader, None
            if leader is None:
                return
            for group in (leader.pid, *self._others):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
            assert leader.stdin is not None
            leader.stdin.close()
            leader.wait()

    def _group_leader(self) -> subprocess.Popen[bytes]:
        if self._leader is None or self._leader.poll() is not None:  # a program may kill its own group
            with ending_by_themselves():
                self._leader = subprocess.Popen(
                    ["/bin/sh", "-c", LEADER],
                    stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    bufsize=0, process_group=0,
                )  # fmt: skip
        return self._leader


@contextlib.contextmanager
def ending_by_themselves() -> Iterator[None]:
    """Context manager: programs started inside it belong to no episode, and whoever starts them must end them."""
    with _owned_by(None):
        yield


@contextlib.contextmanager
def _owned_by(owner: ChildPrograms | None) -> Iterator[None]:
    before = _current.set(owner)
    try:
        yield
    finally:
        _current.reset(before)


class _EpisodeStream:
    """A standard stream of this process: what is written in an episode's context is shown as user code's."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._begun = ""
        """Of a line of an episode that has not ended."""

    def write(self, text: str) -> int:
        if _current.get() is None:
            return self._stream.write(text)
        *lines, self._begun = (self._begun + text).split("\n")
        self._begun = self._begun[:MAX_LINE_BYTES]
        if lines:
            self._stream.write("".join(f"{sanitize_line(line)}\n" for line in lines))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@functools.cache
def _output() -> RelayedOutput:
    """The default output of programs that episodes start."""
    return RelayedOutput()


def _adopt_streams() -> None:
    """From now on what is printed in an episode's context is shown as user code's, also if something has replaced the
    standard streams since the last call."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, _EpisodeStream):
            setattr(sys, name, _EpisodeStream(stream))


@functools.cache
def _adopt_user_code() -> None:
    """From now on a program that is started in an episode's context is started in the episode's group. It is Popen's
    constructor that is replaced, since user code calls Popen by itself and asyncio does so too."""
    start = subprocess.Popen.__init__

    @functools.wraps(start)
    def started(self: subprocess.Popen[Any], *args: Any, **kwargs: Any) -> None:
        owner = _current.get()
        if owner is None:
            start(self, *args, **kwargs)
            return
        # Positions of Popen's parameters: args, bufsize, executable, stdin, stdout, stderr.
        for name, position in (("stdout", 3), ("stderr", 4)):
            if len(args) <= position + 1 and kwargs.get(name) is None:
                kwargs[name] = _output().fileno()
        own_group = bool(kwargs.get("start_new_session")) or kwargs.get("process_group") is not None
        owner.start(functools.partial(start, self, *args, **kwargs), self, own_group=own_group)

    subprocess.Popen.__init__ = started  # type: ignore[method-assign]
