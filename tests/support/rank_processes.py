"""The ranks of a trainer as plain processes without a cluster."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from staleflow.tasks.training.rank import Rank

LIMIT_S = 120.0
"""Time limit in seconds for the work of a group."""

WorkTotals = Callable[..., Any]
"""work(rank, *arguments), a function of a module; its result is sent back."""


def run_ranks(count: int, work: WorkTotals, *arguments: Any) -> list[Any]:
    """Call `work` in this many processes, each with its rank; returns the results in order."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = Rank(count=count, host="127.0.0.1", port=store.port)
    context = multiprocessing.get_context("forkserver")
    processes, ends = [], []
    for number in range(count):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(there, work, replace(place, number=number), arguments))
        process.start()
        there.close()
        processes.append(process)
        ends.append(here)
    try:
        results = []
        for number, end in enumerate(ends):
            assert end.poll(LIMIT_S), f"rank {number} has no result after {LIMIT_S:g} s"
            results.append(end.recv())
        for number, result in enumerate(results):
            assert not isinstance(result, Failure), f"rank {number} failed: {result.args[0]}"
        return results
    finally:
        for process in processes:
            process.kill()
            process.join()


class Failure(Exception):
    """The traceback of a process that failed."""


def _work(end: Connection, work: WorkTotals, rank: Rank, arguments: tuple[Any, ...]) -> None:
    import traceback

    try:
        end.send(work(rank, *arguments))
    except BaseException:  # noqa: BLE001  the test raises it
        end.send(Failure(traceback.format_exc()))
