"""Handling of Ctrl-C: the first ends a command cleanly, the second ends the process. SIGTERM acts as a first one.
The exit code of a command is its own, whatever libraries or signals do later.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

TERMINATED = 128 + signal.SIGTERM
"""The exit code of a command that was ended by SIGTERM."""
SHOW_CURSOR = "\x1b[?25h"
IMPORTING = "<frozen importlib."
"""How the file names of the code that imports modules begin."""
FIRST_RETRY_S, LAST_RETRY_S = 0.02, 0.5
"""Seconds until a signal that came during an import is tried again; doubled each time, up to the second number. Each
try is a signal, and an event loop that is busy importing keeps only some 280 of them: the next Ctrl-C would be lost."""


def end_at_once() -> NoReturn:
    """End this process without cleaning up. Its worker processes notice and end too."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    with contextlib.suppress(OSError):
        show_cursor = SHOW_CURSOR if sys.stderr.isatty() else ""
        os.write(2, f"{show_cursor}\nstaleflow: ended at once\n".encode())
    os._exit(130)


class PendingSignal:
    """The error of a signal, raised in the main thread where it cannot get lost: outside of imports, and again if
    nobody received it.

    Modules may catch everything while they are imported. Python prints and forgets what is raised while it takes an
    object apart, as it does with a module's lock after each import. The command would go on as if nothing had come.

    passed_on: the signal was sent once more, to who listened meanwhile; who may send it on to its first hearer.
    """

    def __init__(self, number: int, error: BaseException) -> None:
        self._number = number
        self._error = error
        self._handler = signal.getsignal(number)
        self._unraisable = sys.unraisablehook
        self._alarmed: Any = None
        self._retry_s = FIRST_RETRY_S
        self.passed_on = False

    def now_or_later(self, frame: FrameType | None) -> None:
        """Raise the error unless `frame`, the current frame of the main thread, is inside an import; then try again
        soon."""
        sys.unraisablehook = self._forgotten
        if not is_importing(frame):
            raise self._error
        self._later()

    def forget(self) -> None:
        """Cancel the error."""
        self._no_alarm()
        sys.unraisablehook = self._unraisable

    def _later(self) -> None:
        if self._alarmed is None:
            self._alarmed = signal.signal(signal.SIGALRM, self._retry)
        signal.setitimer(signal.ITIMER_REAL, self._retry_s)
        self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)

    def _retry(self, _: int, frame: FrameType | None) -> None:
        if signal.getsignal(self._number) is not self._handler:
            # Meanwhile another listens, such as a run. Its event loop raises nothing here: an import does not matter.
            self._no_alarm()
            self.passed_on = True
            signal.raise_signal(self._number)
        elif is_importing(frame):
            self._later()
        else:
            self._no_alarm()
            raise self._error

    def _no_alarm(self) -> None:
        if self._alarmed is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._alarmed)
            self._alarmed = None

    def _forgotten(self, unraisable: Any) -> None:
        if unraisable.exc_value is self._error:
            self._later()
        else:
            self._unraisable(unraisable)


def is_importing(frame: FrameType | None) -> bool:
    """Whether a frame is inside the import of a module."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(IMPORTING):
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def ctrl_c() -> Iterator[None]:
    """Context manager: a first SIGINT raises KeyboardInterrupt, and a second one ends the process, even during the
    cleanup after the first. SIGTERM raises SystemExit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    raised: list[PendingSignal] = []
    interrupted: list[PendingSignal] = []

    def hear(number: int, frame: FrameType | None) -> None:
        if interrupted and not interrupted[-1].passed_on:
            end_at_once()
        interrupted.append(PendingSignal(number, KeyboardInterrupt()))
        throw(interrupted[-1], frame)

    def terminate(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one ends it at once
        throw(PendingSignal(number, SystemExit(TERMINATED)), frame)

    def throw(pending: PendingSignal, frame: FrameType | None) -> None:
        raised.append(pending)
        pending.now_or_later(frame)

    before, terminated_before = signal.signal(signal.SIGINT, hear), signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        for pending in reversed(raised):
            pending.forget()
        if not interrupted:  # else cleaning up goes on until the process ends
            signal.signal(signal.SIGINT, before)
            signal.signal(signal.SIGTERM, terminated_before)


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
