"""Stops a run by a signal, or by a call from any thread.

Nothing is lost when a process is ended at once: what is committed is on disk, and a run may be killed at any moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import TracebackType

from staleflow.stores.errors import StaleflowError


class Interrupted(StaleflowError):
    """The run was stopped before it began."""


class StopRequest:
    """A request to stop one run. A context manager, entered by the task that executes the run.

    Until `attend` names what stops the run, the task is cancelled, and the context ends with Interrupted.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._lock = threading.Lock()
        self._task: asyncio.Task[object] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: Callable[[str], None] = self._cancel
        self._undelivered = 0

    def ask(self, reason: str) -> None:
        """Stop the run; a second request stops it at once, without waiting for the training step in flight.
        Thread-safe, also before the run begins."""
        with self._lock:
            self.reason = self.reason or reason
            self._undelivered += 1
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._deliver)

    def set_handler(self, stop: Callable[[str], None]) -> None:
        """Call `stop` with the reason of each request; at once if a request came earlier and its cancellation had no
        effect."""
        self._stop = stop
        self._undelivered = 1 if self.reason else 0
        self._deliver()

    def __enter__(self) -> StopRequest:
        with self._lock:
            self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
            if self._undelivered:
                self._loop.call_soon(self._deliver)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._loop = None
        if kind is asyncio.CancelledError and self.reason and self._task is not None:
            self._task.uncancel()
            raise Interrupted(self.reason) from None

    def _deliver(self) -> None:
        while self._undelivered:
            self._undelivered -= 1
            self._stop(self.reason)

    def _cancel(self, _: str) -> None:
        if self._task is not None:
            self._task.cancel()


@contextlib.contextmanager
def stopped_by_signals(
    request: StopRequest, announce: Callable[[str], None], at_once: Callable[[], None]
) -> Iterator[None]:
    """Context manager: the first SIGINT or SIGTERM requests that the run stops. Use in the main thread, inside of the
    request's context.

    Args:
        request: The run's request to stop.
        announce: Receives a line for the user at the first signal.
        at_once: Ends the process at the second.
    """
    loop = asyncio.get_running_loop()
    received: list[str] = []

    def hear(reason: str) -> None:
        if received:
            at_once()
        received.append(reason)
        announce(f"{reason}: stopping; Ctrl-C again ends at once")
        request.ask(reason)

    numbers = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
    for number, reason in numbers.items():
        loop.add_signal_handler(number, hear, reason)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
