"""The only clock of pipeline/runtime: the time of the running event loop, in seconds.

On the loops that Python brings it is the monotonic clock. On a loop whose time is virtual every deadline, pause and
measured duration here follows that loop's time, so that a minute of waiting is tested in microseconds.
"""

from __future__ import annotations

import asyncio


def now_s() -> float:
    """Seconds since an arbitrary moment; never decreases. Call only inside a running event loop."""
    return asyncio.get_running_loop().time()
