"""Restarts the workers of a job whose driver is lost, from the scheduler's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
from collections.abc import Sequence
from typing import Any

from staleflow.pipeline.cluster.worker_pool import RESTART_LIMIT_S
from staleflow.tasks.engines.engine_handover import require_orphan

EXIT_LIMIT_S = 2.0
"""Seconds that a worker may take to exit. A stopped process does not exit; its nanny kills it after four more
seconds."""


async def has_orphan_engine(scheduler: Any, address: str) -> bool:
    """Whether a worker replies and has an engine without an actor."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(EXIT_LIMIT_S):
            reply = await scheduler.rpc(address).run(function=pickle.dumps(require_orphan))
            return bool(reply["status"] == "OK")
    return False


async def restart_workers(scheduler: Any, addresses: Sequence[str]) -> None:
    """Restart workers. Returns when they have left the cluster, or do not reply."""
    if not addresses:
        return
    # Workers with a nanny exit at once. An orderly shutdown would let their tasks run for four more seconds.
    workers = scheduler.workers
    await asyncio.gather(*(_exit_process(scheduler, a) for a in addresses if a in workers and workers[a].nanny))
    # Workers without a nanny are shut down; only the process that started them can start them again.
    with contextlib.suppress(Exception):
        await scheduler.restart_workers(
            list(addresses), timeout=RESTART_LIMIT_S, wait_for_workers=False, on_error="return",
            stimulus_id="staleflow-restart",
        )  # fmt: skip


async def _exit_process(scheduler: Any, address: str) -> None:
    """End a worker's process, which its nanny then restarts. Returns once the worker has left the cluster, or does not
    reply."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(EXIT_LIMIT_S):
            with contextlib.suppress(OSError):  # the connection closes when the process exits
                await scheduler.rpc(address).run(function=pickle.dumps(os._exit), args=pickle.dumps((1,)))
            while address in scheduler.workers:
                await asyncio.sleep(0.01)
