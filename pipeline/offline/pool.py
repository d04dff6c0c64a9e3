"""Dask workers for plain tasks over blocks of a store, in parallel and out of core.

Workers read, compute and answer with little; so memory is bounded by a block each, whatever the store holds. The blocks
of a worker that dies are computed again by another. On a cluster that runs jobs their workers are left alone.

A worker may have several threads, each with a task of its own. What is slow to make is made once a process, and is safe
for threads; or each thread has its own; or it is used under a lock.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from pipeline.runtime.workers import HEAVY_ROLES
from pipeline.scheduler import board
from pipeline.scheduler.connection import Where
from stores.errors import ActorLost, ConfigError, ProtocolViolation
from stores.versioned import VersionedStore

Key = ParamSpec("Key")
Made = TypeVar("Made")

BLOCK_ROWS = 2048
"""Trajectories a task works on, at most: some 10 MiB of tokens at 500 a trajectory, tenths of a second of work."""
LEAST_ROWS = 128
"""Below this a task's own cost counts."""
BLOCKS_A_WORKER = 8
"""At least, if there are rows enough: workers then end at about the same time."""
CALLS_A_WORKER = 3
"""Tasks that are under way for each worker: enough that none waits."""


@dataclass(frozen=True, slots=True)
class Pool:
    """client: a synchronous Dask client. shared: whether others may use the cluster too."""

    client: Any
    shared: bool

    def run(
        self, function: Callable[..., Any], calls: Iterable[tuple[Any, ...]], *, model: bool = False
    ) -> Iterator[Any]:
        """Results of function(*call) for every call, as they come; never more under way than the workers can use. What
        a call raises is raised here, and the others are dropped. model: whether the calls need a worker made for
        models. Raises ConfigError if jobs have all workers, ActorLost if the workers do not survive it."""
        from distributed import KilledWorker, as_completed
        from distributed.client import FutureCancelledError

        calls = iter(calls)
        free = self.free(model=model)
        where = {"workers": free, "allow_other_workers": True} if self.shared else {}

        def submit(call: tuple[Any, ...]) -> Any:
            return self.client.submit(function, *call, pure=False, **where)

        under_way = len(free) * CALLS_A_WORKER
        # Not zip with a range: it would take a call more, and drop it.
        futures = as_completed([submit(call) for call in itertools.islice(calls, under_way)])
        for future in futures:
            try:
                result = future.result()
            except KilledWorker as error:
                raise ActorLost(f"workers died of the same work several times, for memory? {error}") from error
            except FutureCancelledError as error:
                raise ActorLost("the scheduler is gone; nothing was stored, give the command again") from error
            future.release()
            for following in calls:
                futures.add(submit(following))
                break
            yield result

    def blocks(self, count: int, most: int = BLOCK_ROWS) -> Iterator[tuple[int, int]]:
        """(first, last) of blocks that cover so many rows, of a size that gives all workers work."""
        rows = min(most, max(LEAST_ROWS, count // (len(self.free()) * BLOCKS_A_WORKER)))
        return blocks(count, rows)

    def free(self, *, model: bool = False) -> list[str]:
        """Addresses of the workers that no job has; of those with GPUs if some say by their resources which they are.
        Raises ConfigError if there are none."""
        workers = self.client.scheduler_info(n_workers=-1)["workers"]
        if not self.shared:
            return list(workers)
        taken = self.client.sync(board.ask, self.client, "taken", owner="")
        free = [address for address in workers if address not in taken]
        made = [address for address in free if set(workers[address]["resources"]) & set(HEAVY_ROLES)]
        free = (made or free) if model else free
        if not free:
            raise ConfigError(
                f"cluster: none of its {len(workers)} workers is free, jobs have {len(taken)}; start one more, or wait "
                "for a job to end (`staleflow jobs`)"
            )
        return free


@contextlib.contextmanager
def pool_at(where: Where, count: int) -> Iterator[Pool]:
    """Workers for plain tasks: of the cluster that is named, or `count` local processes if none is. Raises ConfigError
    if there are none."""
    if not where.named:
        with local_pool(count) as pool:
            yield pool
        return
    with where.blocking() as client:
        pool = Pool(client, shared=True)
        pool.free()
        yield pool


@contextlib.contextmanager
def local_pool(count: int) -> Iterator[Pool]:
    """A pool of `count` local worker processes."""
    import dask
    from distributed import Client, LocalCluster

    from pipeline.runtime.workers import worker_environment

    environment = {"distributed.nanny.pre-spawn-environ": worker_environment(1)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the dashboard's port may be taken; Dask then chooses another
        with (
            dask.config.set(environment),
            LocalCluster(
                n_workers=count, threads_per_worker=1, memory_limit=0, dashboard_address="127.0.0.1:0"
            ) as cluster,
            Client(cluster) as client,
        ):
            yield Pool(client, shared=False)


def require_all(done: int, count: int) -> None:
    """Raise ProtocolViolation unless all rows were worked on: those left out would look as if they were done."""
    if done != count:
        raise ProtocolViolation(f"the workers answered for {done} of {count} rows; nothing was stored")


def blocks(count: int, rows: int) -> Iterator[tuple[int, int]]:
    """(first, last) of blocks that cover so many rows.

    >>> list(blocks(5, 2))
    [(0, 2), (2, 4), (4, 5)]
    """
    return ((first, min(first + rows, count)) for first in range(0, count, rows))


making = threading.RLock()
"""Held while what a process keeps is made: its imports, too, then are for one thread at a time. transformers, for one,
replaces its own module at the end of its import, and who waited for that is left with the old one."""


def once_a_process(most: int) -> Callable[[Callable[Key, Made]], Callable[Key, Made]]:
    """A function whose last `most` results are kept for the tasks of a process. Threads that ask for the same at once
    get the same: functools.lru_cache alone would make it for each of them. Arguments are hashable, and by position."""

    def decorate(make: Callable[Key, Made]) -> Callable[Key, Made]:
        kept = functools.lru_cache(maxsize=most)(make)

        @functools.wraps(make)
        def made(*args: Key.args, **kwargs: Key.kwargs) -> Made:
            assert not kwargs
            with making:
                return kept(*args)

        return made

    return decorate


@once_a_process(2)
def store_at(path: str, snapshot: str) -> VersionedStore:
    """A store as tasks read it. Reading at a snapshot changes nothing in it, so threads may share one."""
    return VersionedStore.at(Path(path), snapshot)
