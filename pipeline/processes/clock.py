"""The only clock of pipeline/runtime: the time of the running event loop, in seconds.

On Python's own event loops this is the monotonic clock. On a loop with virtual time every deadline, pause and measured
duration follows the virtual time, so that tests need not wait.
"""

from __future__ import annotations

import asyncio


def now_s() -> float:
    """Return seconds since an arbitrary moment; never decreases. Call only inside a running event loop."""
    return asyncio.get_running_loop().time()


class RunClock:
    """The clock of one run: its seconds so far, with those before it was resumed. Create it in the run's event loop."""

    def __init__(self) -> None:
        self.start(0.0)

    def start(self, earlier_s: float) -> None:
        """Set the clock to the seconds that the run took before it was resumed."""
        self._started_s = now_s() - earlier_s

    @property
    def elapsed_s(self) -> float:
        return now_s() - self._started_s
