"""Relays the output of user code to a terminal, with visible control characters and truncated long lines.

A terminal obeys control characters: an agent, a reward function, or a model through them, could clear it, change its
title, or overwrite what it shows. Code that starts user code relays its output through this module; texts of user code
in messages pass through `printable`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import IO

from staleflow.stores.printable import printable

MAX_LINE_CHARS = 4000
"""Maximum characters of a line; longer lines are truncated."""
DRAIN_TIMEOUT_S = 1.0
"""Seconds `wait` allows for the remaining output."""


def sanitize_line(line: str) -> str:
    """Make a line safe to print on a terminal. As on a terminal, only the text after the last carriage return is kept.
    line: without its line feed."""
    return printable(shorten_line(line).rstrip("\r"), MAX_LINE_CHARS)


def shorten_line(line: str) -> str:
    """Drop the text of an unfinished line that its carriage returns overwrite, and what is beyond the printed length.
    Carriage returns at its end become one, because the text after them decides whether they overwrite anything."""
    text = line.rstrip("\r")
    return text.rpartition("\r")[2][: MAX_LINE_CHARS + 1] + "\r" * (len(text) < len(line))


class RelayedOutput:
    """A pipe whose lines are written to this process's standard error. The thread "output" reads it until all processes
    have closed their write ends."""

    def __init__(self) -> None:
        read_fd, self._write_fd = os.pipe()
        stream = os.fdopen(read_fd, encoding="utf-8", errors="replace", newline="\n")
        self._thread = threading.Thread(target=_relay, args=(stream,), name="output", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """The pipe's write end, for a subprocess's stdout or stderr."""
        return self._write_fd

    def close(self) -> None:
        """Close this process's write end. Output of other processes is still relayed."""
        os.close(self._write_fd)

    def wait(self) -> None:
        """Wait until the remaining output is relayed, at most DRAIN_TIMEOUT_S, since processes may go on writing. Call
        after `close`."""
        self._thread.join(DRAIN_TIMEOUT_S)


def _relay(stream: IO[str]) -> None:
    line = ""
    with stream:
        while piece := stream.readline(MAX_LINE_CHARS + 1):
            line = shorten_line(line + piece.removesuffix("\n"))
            if piece.endswith("\n"):
                _print(line)
                line = ""
        if line:
            _print(line)


def _print(line: str) -> None:
    # A standard error that is closed must not end the thread: whoever writes would get a broken pipe.
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(sanitize_line(line) + "\n")
