"""Log output of Dask processes reaches the terminal only on request."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import asyncio, logging, sys
from distributed import Client
from staleflow.pipeline.stored_runs.pool import open_pool
from staleflow.pipeline.processes import local_cluster

NAMES = ("distributed.nanny", "distributed.client", "distributed.worker", "distributed.gc")

def speak(where):
    for name in NAMES:
        logging.getLogger(name).warning("%s in %s", name, where)

async def work():
    local = await local_cluster.start(1, 1, preload_modules=(), dashboard=False)
    async with Client(local, asynchronous=True) as client:
        speak("caller")
        await client.run(speak, "worker")
    await local.close()

if __name__ == "__main__":
    asyncio.run(work())
    if sys.argv[1] == "critical":  # which takes as long again
        with open_pool(None, 1) as pool:
            speak("pool")
            pool.client.run(speak, "pool's worker")
    print("spoken")
"""


@pytest.mark.parametrize(("level", "is_shown"), [("critical", False), ("info", True)])
def test_dask_warnings_reach_the_terminal_only_on_request(level: str, is_shown: bool) -> None:
    environment = {**os.environ, "DASK_LOGGING__DISTRIBUTED": level, "PYTHONPATH": os.getcwd()}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, level], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.stdout == "spoken\n", result.stderr
    messages = [line for line in result.stderr.splitlines() if " in " in line and "distributed." in line]
    assert bool(messages) == is_shown, messages
