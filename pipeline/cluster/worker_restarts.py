"""Restarts the workers of a job whose driver is lost, from the scheduler's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
from collections.abc import Sequence
from typing import Any

from staleflow.pipeline.cluster.job_queue import RESTART_LIMIT_S
from staleflow.tasks.engines.engine_handover import require_orphan

END_S = 2.0
"""Seconds a worker may take to end; one that is stopped never does, and is killed by its nanny after four more."""


async def has_engine(scheduler: Any, address: str) -> bool:
    """Whether a worker answers and has an engine without an actor."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(END_S):
            answer = await scheduler.rpc(address).run(function=pickle.dumps(require_orphan))
            return bool(answer["status"] == "OK")
    return False


async def restart(scheduler: Any, addresses: Sequence[str]) -> None:
    """Restart workers. Returns when they have left, or do not answer."""
    if not addresses:
        return
    # Those with a nanny end at once: closed in order, they would go on with what is under way for four seconds.
    workers = scheduler.workers
    await asyncio.gather(*(_end_process(scheduler, a) for a in addresses if a in workers and workers[a].nanny))
    # Workers without a nanny are shut down; only whoever started them can start them again.
    with contextlib.suppress(Exception):
        await scheduler.restart_workers(
            list(addresses), timeout=RESTART_LIMIT_S, wait_for_workers=False, on_error="return",
            stimulus_id="staleflow-restart",
        )  # fmt: skip


async def _end_process(scheduler: Any, address: str) -> None:
    """End a worker's process, which its nanny then starts again. Returns once the worker has left, or does not
    answer."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(END_S):
            with contextlib.suppress(OSError):  # that is how it answers
                await scheduler.rpc(address).run(function=pickle.dumps(os._exit), args=pickle.dumps((1,)))
            while address in scheduler.workers:
                await asyncio.sleep(0.01)
