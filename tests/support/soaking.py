"""`python -m benchmarks.soak` with forked processes (forking.py): its cluster, its runs and its audits."""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import soak
from benchmarks.soaking import cluster, counting, machine, running
from tests.support import forking, planted

on_second_host = machine.Machine.on_second_host


class ForkedProcess:
    """The asyncio process interface of a forked process."""

    def __init__(self, *command: str, **files: Any) -> None:
        self._process = forking.Popen(command, **files)

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()

    async def communicate(self) -> tuple[bytes, bytes]:
        return await asyncio.to_thread(self._process.communicate)


async def answering(*command: str, **files: Any) -> ForkedProcess:
    return ForkedProcess(*command, **files)


@functools.cache
def second_host(one: machine.Machine) -> int:
    """Start an idle process on the second host, whose namespaces others can enter."""
    process = subprocess.Popen(on_second_host(one, ["sleep", "infinity"]))
    atexit.register(process.kill)
    while Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n":
        assert process.poll() is None
        time.sleep(0.01)
    return process.pid


def enter_second_host(one: machine.Machine, command: list[str]) -> list[str]:
    return [*forking.ENTER, str(second_host(one)), *command]


if __name__ == "__main__":
    if planted.NAME in os.environ:
        cluster.PRELOADS.append(planted.__name__)
    for module in (cluster, running):
        vars(module)["subprocess"] = forking.SUBPROCESS
    vars(counting)["asyncio"] = SimpleNamespace(**{**vars(asyncio), "create_subprocess_exec": answering})
    setattr(machine.Machine, "on_second_host", enter_second_host)  # noqa: B010  a method, which mypy lets nobody assign
    soak.main()
