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

SIGTERM_EXIT_CODE = 128 + signal.SIGTERM
"""The exit code of a command that was ended by SIGTERM."""
SHOW_CURSOR = "\x1b[?25h"
IMPORT_FILE_PREFIX = "<frozen importlib."
"""How the file names of the code that imports modules begin."""
FIRST_RETRY_S, LAST_RETRY_S = 0.02, 0.5
"""Seconds until the first retry during an import, and the most between two retries, which double. Each retry is a
signal, and an event loop that is busy importing queues only some 280 signals: the next Ctrl-C would be lost."""


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
    """The error of a signal, which is raised in the main thread: not during an import, and again if it was lost.

    Modules may catch all errors while they are imported. Python prints and drops errors that are raised in a
    destructor, such as that of a module's lock after each import. The command would then ignore the signal.

    was_forwarded: whether the signal was raised again for a handler that was installed in the meantime.
    """

    def __init__(self, number: int, error: BaseException) -> None:
        self._number = number
        self._error = error
        self._handler = signal.getsignal(number)
        self._previous_unraisable_hook = sys.unraisablehook
        self._previous_alarm_handler: Any = None
        self._retry_s = FIRST_RETRY_S
        self.was_forwarded = False

    def raise_or_schedule(self, frame: FrameType | None) -> None:
        """Raise the error, or schedule a retry if `frame`, the current frame of the main thread, is inside an
        import."""
        sys.unraisablehook = self._on_unraisable
        if not is_importing(frame):
            raise self._error
        self._schedule_retry()

    def cancel(self) -> None:
        """Cancel the error."""
        self._cancel_alarm()
        sys.unraisablehook = self._previous_unraisable_hook

    def _schedule_retry(self) -> None:
        if self._previous_alarm_handler is None:
            self._previous_alarm_handler = signal.signal(signal.SIGALRM, self._retry)
        signal.setitimer(signal.ITIMER_REAL, self._retry_s)
        self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)

    def _retry(self, _: int, frame: FrameType | None) -> None:
        if signal.getsignal(self._number) is not self._handler:
            # A run has installed its own handler. Its event loop raises nothing here, so an import does not matter.
            self._cancel_alarm()
            self.was_forwarded = True
            signal.raise_signal(self._number)
        elif is_importing(frame):
            self._schedule_retry()
        else:
            self._cancel_alarm()
            raise self._error

    def _cancel_alarm(self) -> None:
        if self._previous_alarm_handler is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._previous_alarm_handler)
            self._previous_alarm_handler = None

    def _on_unraisable(self, unraisable: Any) -> None:
        if unraisable.exc_value is self._error:
            self._schedule_retry()
        else:
            self._previous_unraisable_hook(unraisable)


def is_importing(frame: FrameType | None) -> bool:
    """Whether a frame is inside the import of a module."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(IMPORT_FILE_PREFIX):
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
    signals: list[PendingSignal] = []
    interrupts: list[PendingSignal] = []

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if interrupts and not interrupts[-1].was_forwarded:
            end_at_once()
        interrupts.append(PendingSignal(number, KeyboardInterrupt()))
        raise_error(interrupts[-1], frame)

    def on_terminate(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one ends it at once
        raise_error(PendingSignal(number, SystemExit(SIGTERM_EXIT_CODE)), frame)

    def raise_error(pending_signal: PendingSignal, frame: FrameType | None) -> None:
        signals.append(pending_signal)
        pending_signal.raise_or_schedule(frame)

    previous_interrupt_handler, previous_terminate_handler = (
        signal.signal(signal.SIGINT, on_interrupt),
        signal.signal(signal.SIGTERM, on_terminate),
    )
    try:
        yield
    finally:
        for pending_signal in reversed(signals):
            pending_signal.cancel()
        if not interrupts:  # else cleaning up goes on until the process ends
            signal.signal(signal.SIGINT, previous_interrupt_handler)
            signal.signal(signal.SIGTERM, previous_terminate_handler)


class FinalExitCode:
    """Ends this process with `value`, if that is set, after all other functions registered with atexit. It must be
    created before they are registered.

    Python's own shutdown can change the exit code: threads of Rust libraries (icechunk's) abort the process if they
    use the interpreter then, and an interrupt that was handled while generated code was executed ends the process by
    the signal.
    """

    def __init__(self) -> None:
        self.value: int | None = None
        atexit.register(self._exit)

    def _exit(self) -> None:
        if self.value is None:
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(self.value)
