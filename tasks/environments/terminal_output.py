"""What user code prints, on its way to a terminal: control characters are made visible, and lines are cut.

A terminal obeys control characters: an agent, a reward function or what a model made them print could clear it, change
its title, or write over what is shown. Whoever starts user code relays its output from here, and texts of user code in
messages pass through `printable`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import IO

from staleflow.stores.printable import printable

LONGEST_LINE = 4000
"""Bytes of a line that are shown."""
LAST_S = 1.0
"""Seconds that the end of an output is waited for."""


def shown_line(line: str) -> str:
    """A line without its end, as a terminal may be shown it. Of what carriage returns write over each other, the last
    is shown, as a terminal would."""
    return printable(line.rstrip("\r").rpartition("\r")[2], LONGEST_LINE)


class RelayedOutput:
    """A pipe that user code's processes write to, until all of them have closed it; what they write is shown on this
    process's standard error, line by line."""

    def __init__(self) -> None:
        reading, self._writing = os.pipe()
        self._thread = threading.Thread(target=_relay, args=(os.fdopen(reading, "rb"),), name="output", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Where processes write to."""
        return self._writing

    def close(self) -> None:
        """Write no more from this process; what other processes write is still shown."""
        os.close(self._writing)

    def wait(self) -> None:
        """Wait until all that was written is shown, but not for processes that go on writing."""
        self._thread.join(LAST_S)


def _relay(stream: IO[bytes]) -> None:
    begins = True
    with stream:
        while piece := stream.readline(LONGEST_LINE + 1):
            ends = piece.endswith(b"\n")
            if begins:
                # A standard error that is closed must not end this thread: whoever writes would get a broken pipe.
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.write(shown_line(piece.decode("utf-8", "replace").rstrip("\n")) + "\n")
            begins = ends
