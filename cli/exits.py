"""Ends the process of a command with the command's exit code, whatever libraries or signals do later."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys


class LastExit:
    """Ends this process with `code`, if that is set, after all other functions registered with atexit; created first,
    it is called last.

    What Python would still do then can change the exit code: threads of libraries in Rust (icechunk's) abort the
    process if they reach for the interpreter while it is taken apart, and an interrupt that was handled, but came while
    generated code was executed, ends it by the signal.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        atexit.register(self._exit)

    def _exit(self) -> None:
        if self.code is None:
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(self.code)
