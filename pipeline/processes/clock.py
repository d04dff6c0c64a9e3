"""The only clock of pipeline/runtime: the time of the running event loop, in seconds.

On Python's own event loops this is the monotonic clock. On a loop with virtual time every deadline, pause and measured
duration follows the virtual time, so that tests need not wait.
"""

from __future__ import annotations

import asyncio


def now_s() -> float:
    """Return seconds since an arbitrary moment; never decreases. Call only inside a running event loop."""
    return asyncio.get_running_loop().time()
