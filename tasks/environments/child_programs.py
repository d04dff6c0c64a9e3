"""Programs started by episodes that run on their host's event loop. They are killed when their episode or the host
ends.

An episode in its own process ends with all programs that it started (fork_server.py). An agent or environment on the
event loop has no such process: a program that it starts with `subprocess` or `asyncio.create_subprocess_exec` is a
child of the host, like the programs of all other episodes. So each such episode has a process group for its programs.
The group's leader is a shell that reads from a pipe, and kills the group when the pipe closes: when the episode ends,
or the host's process does, even by kill -9.

Programs are assigned to episodes by the context in which they are started (contextvars). asyncio's tasks and
`asyncio.to_thread` inherit it; threads that an agent starts itself do not. Programs forked by `os.fork`, and programs
that move to another session later, are missed as well; environment.isolation = "process" ends those, too.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

from staleflow.tasks.environments.terminal_output import RelayedOutput, sanitize_line, shorten_line

LEADER_SCRIPT = 'while read -r group; do groups="$groups -$group"; done; kill -9 $groups 0'
"""Script of the shell that leads a group. It reads the ids of further groups, and kills them together with its own."""

_owner: contextvars.ContextVar[ChildPrograms | None] = contextvars.ContextVar("child_programs", default=None)
"""Owner of the programs that are started in this context; None: no episode owns them."""


class ChildPrograms:
    """The programs of one episode. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leader: subprocess.Popen[bytes] | None = None
        self._other_groups: set[int] = set()
        """Ids of the process groups of programs that lead a group."""
        self._closed = False
        self.partial_lines: dict[_EpisodeStream, str] = {}
        """Starts of the episode's lines whose ends have not been written yet."""

    @contextlib.contextmanager
    def as_owner(self) -> Iterator[None]:
        """Context manager: programs started inside it, also by tasks created inside it, belong to this episode."""
        _replace_streams()
        _replace_popen()
        with _with_owner(self):
            yield

    def start(self, popen: Callable[..., None], process: subprocess.Popen[Any], *, own_group: bool) -> None:
        """Start a program in the episode's process group. Raises Popen's errors, and RuntimeError after the end of the
        episode.

        Args:
            popen: Popen's constructor with its arguments.
            own_group: Whether the program leads a process group of its own.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("the episode has ended; it cannot start another program")
            leader = self._group_leader()
            if own_group:
                popen()
            else:
                popen(process_group=leader.pid)
            with contextlib.suppress(ProcessLookupError):
                group = os.getpgid(process.pid)
                if group != leader.pid:
                    self._other_groups.add(group)
                    assert leader.stdin is not None
                    leader.stdin.write(b"%d\n" % group)

    def close(self) -> None:
        """End unfinished lines, and kill all remaining programs. Waits for the shell, which takes a millisecond."""
        with _with_owner(self), contextlib.suppress(OSError, ValueError):
            for stream, line in list(self.partial_lines.items()):
                stream.write("\n" if line else "")
        with self._lock:
            self._closed = True
            leader, self._leader = self._leader, None
            if leader is None:
                return
            for group in (leader.pid, *self._other_groups):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
            assert leader.stdin is not None
            leader.stdin.close()
            leader.wait()

    def _group_leader(self) -> subprocess.Popen[bytes]:
        if self._leader is None or self._leader.poll() is not None:  # a program may kill its own group
            with without_owner():
                self._leader = subprocess.Popen(
                    ["/bin/sh", "-c", LEADER_SCRIPT],
                    stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    bufsize=0, process_group=0,
                )  # fmt: skip
        return self._leader


@contextlib.contextmanager
def without_owner() -> Iterator[None]:
    """Context manager: programs started inside it belong to no episode, so the code that starts them must end them."""
    with _with_owner(None):
        yield


@contextlib.contextmanager
def _with_owner(owner: ChildPrograms | None) -> Iterator[None]:
    token = _owner.set(owner)
    try:
        yield
    finally:
        _owner.reset(token)


class _EpisodeStream:
    """A standard stream of this process that sanitizes lines written in an episode's context, which are user code's.
    What user code writes to the file descriptor is not sanitized."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        owner = _owner.get()
        if owner is None:
            return self._stream.write(text)
        *lines, partial_line = (owner.partial_lines.get(self, "") + text).split("\n")
        owner.partial_lines[self] = shorten_line(partial_line)
        if lines:
            self._stream.write("".join(f"{sanitize_line(line)}\n" for line in lines))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    @property
    def buffer(self) -> Any:
        """The stream for bytes; in an episode's context one that sanitizes their lines, too."""
        return self._stream.buffer if _owner.get() is None else _EpisodeBuffer(self)

    def flush(self) -> None:
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _EpisodeBuffer(io.RawIOBase):
    """The stream for bytes of an `_EpisodeStream`."""

    def __init__(self, stream: _EpisodeStream) -> None:
        super().__init__()
        self._stream = stream

    def write(self, data: Any, /) -> int:
        self._stream.write(bytes(memoryview(data)).decode(errors="replace"))
        return len(data)


@functools.cache
def _output() -> RelayedOutput:
    """The default output of programs that episodes start."""
    return RelayedOutput()


def _replace_streams() -> None:
    """Replace the standard streams by `_EpisodeStream`. May be called again, in case other code has replaced them."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, _EpisodeStream):
            setattr(sys, name, _EpisodeStream(stream))


@functools.cache
def _replace_popen() -> None:
    """Replace Popen's constructor, so that programs started in an episode's context start in the episode's group. User
    code and asyncio both call Popen."""
    original_init = subprocess.Popen.__init__

    @functools.wraps(original_init)
    def popen_init(self: subprocess.Popen[Any], *args: Any, **kwargs: Any) -> None:
        owner = _owner.get()
        if owner is None:
            original_init(self, *args, **kwargs)
            return
        # Positions of Popen's parameters: args, bufsize, executable, stdin, stdout, stderr.
        for name, position in (("stdout", 3), ("stderr", 4)):
            if len(args) <= position + 1 and kwargs.get(name) is None:
                kwargs[name] = _output().fileno()
        own_group = bool(kwargs.get("start_new_session")) or kwargs.get("process_group") is not None
        owner.start(functools.partial(original_init, self, *args, **kwargs), self, own_group=own_group)

    subprocess.Popen.__init__ = popen_init  # type: ignore[method-assign]
