"""The log shown with `-v` and `-vv`: staleflow's own, on the console of the live view."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from rich.console import Console

from staleflow.stores.printable import printable


class ConsoleHandler(logging.Handler):
    """A log handler that prints through a rich console, which keeps the live view below the records."""

    def __init__(self, console: Console, level: int) -> None:
        super().__init__(level)
        self._console = console
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(printable(self.format(record)), highlight=False, markup=False, soft_wrap=True)


@contextlib.contextmanager
def logging_to(console: Console, verbosity: int) -> Iterator[None]:
    """Context manager: shows the log on a console. verbosity: 0 shows errors; 1 also training steps and run events
    (INFO); 2 also single placements and pulls (DEBUG). Other libraries show at most warnings, and only if verbosity >
    0."""
    level = {0: logging.ERROR, 1: logging.INFO}.get(verbosity, logging.DEBUG)
    root, ours = logging.getLogger(), logging.getLogger("staleflow")
    handler, before = ConsoleHandler(console, level), ours.level
    root.addHandler(handler)
    ours.setLevel(min(level, logging.WARNING))  # a run's own log keeps warnings, shown here or not
    try:
        yield
    finally:
        root.removeHandler(handler)
        ours.setLevel(before)
