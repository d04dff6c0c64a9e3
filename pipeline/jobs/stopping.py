"""Stops a run by a signal, or by a call from any thread.

A run may be killed at any moment, since committed data is on disk.
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

    Until `set_handler` is called, a request cancels the task, and the context raises Interrupted.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._lock = threading.Lock()
        self._task: asyncio.Task[object] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handler: Callable[[str], None] = self._cancel
        self._num_undelivered = 0

    def ask(self, reason: str) -> None:
        """Stop the run; a second request stops it at once, without waiting for the training step in flight.
        Thread-safe, also before the run begins."""
        with self._lock:
            self.reason = self.reason or reason
            self._num_undelivered += 1
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._deliver)

    def set_handler(self, handler: Callable[[str], None]) -> None:
        """Call `handler` with the reason of each request; at once if a request came earlier and its cancellation had no
        effect."""
        self._handler = handler
        self._num_undelivered = 1 if self.reason else 0
        self._deliver()

    def __enter__(self) -> StopRequest:
        with self._lock:
            self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
            if self._num_undelivered:
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
        while self._num_undelivered:
            self._num_undelivered -= 1
            self._handler(self.reason)

    def _cancel(self, _: str) -> None:
        if self._task is not None:
            self._task.cancel()


@contextlib.contextmanager
def stopped_by_signals(
    request: StopRequest, announce: Callable[[str], None], end_process: Callable[[], None]
) -> Iterator[None]:
    """Context manager: the first SIGINT or SIGTERM requests that the run stops. Use in the main thread, inside of the
    request's context.

    Args:
        request: The run's request to stop.
        announce: Receives a line for the user at the first signal.
        end_process: Called at the second signal.
    """
    loop = asyncio.get_running_loop()
    received_reasons: list[str] = []

    def handle_signal(reason: str) -> None:
        if received_reasons:
            end_process()
        received_reasons.append(reason)
        announce(f"{reason}: stopping; Ctrl-C again ends at once")
        request.ask(reason)

    reasons = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
    for number, reason in reasons.items():
        loop.add_signal_handler(number, handle_signal, reason)
    try:
        yield
    finally:
        for number in reasons:
            loop.remove_signal_handler(number)
