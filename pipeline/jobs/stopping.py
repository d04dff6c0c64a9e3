"""Stopping a run from where it was started: a first signal asks it to stop, a second ends the process at once.

Nothing is lost by the second: what is committed is on disk, and a run may be killed at any moment.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import TracebackType


class Interrupted(Exception):
    """The run was stopped before it began."""


class Signals:
    """SIGINT and SIGTERM, heard from construction to `close`, in the loop of the task that constructs it.

    Until `attend` names what stops the run, the task is cancelled, and the context ends with Interrupted.
    """

    def __init__(self, announce: Callable[[str], None], at_once: Callable[[], None]) -> None:
        """announce: receives a line for the user at the first signal. at_once: ends the process at the second."""
        self.why = ""
        self._announce = announce
        self._at_once = at_once
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        self._stop: Callable[[str], None] = self._cancel
        for number, why in {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}.items():
            self._loop.add_signal_handler(number, self._hear, why)

    def attend(self, stop: Callable[[str], None]) -> None:
        """Call `stop` with the reason at the first signal; now, if it came already and what was awaited then ignored
        the cancellation."""
        self._stop = stop
        if self.why:
            stop(self.why)

    def __enter__(self) -> Signals:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)
        if kind is asyncio.CancelledError and self.why and self._task is not None:
            self._task.uncancel()
            raise Interrupted(self.why) from None

    def _hear(self, why: str) -> None:
        if self.why:
            self._at_once()
        self.why = why
        self._announce(f"{why}: stopping; Ctrl-C again ends at once")
        self._stop(why)

    def _cancel(self, _: str) -> None:
        if self._task is not None:
            self._task.cancel()
