"""Dask workers for tasks over blocks of a store, in parallel and out of core.

Each task reads a block and returns a small result, so memory is bounded by one block per worker, however large the
store is. If a worker dies, another computes its blocks again. Workers that a cluster's jobs have are not used.

A worker may run tasks in several threads. Objects that are slow to create are created once per process and are
thread-safe, are created per thread, or are used under a lock.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import pickle
import secrets
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from staleflow.pipeline.cluster import job_registry
from staleflow.pipeline.cluster.gang import EXCLUSIVE_ROLES
from staleflow.pipeline.cluster.plugin import ensure
from staleflow.stores.errors import ActorLost, ConfigError, ProtocolViolation
from staleflow.stores.trajectories.versioned import VersionedStore

Params = ParamSpec("Params")
Result = TypeVar("Result")

Report = Callable[[Mapping[str, Any]], None]
"""Called with events of a training, as `Run.train_offline` describes them."""
BLOCK_ROWS = 2048
"""Maximum trajectories per task: some 10 MiB at 500 tokens each, tenths of a second of work."""
MIN_ROWS = 128
"""Minimum trajectories per task: with fewer, a task's overhead matters."""
MIN_BLOCKS_PER_WORKER = 8
"""Minimum blocks per worker, if there are enough rows: workers then finish at about the same time."""
CALLS_PER_WORKER = 3
"""Tasks in flight per worker: enough that none is idle."""
LOCAL = "staleflow-local"
"""Resource of the workers of a local pool, whose cluster has no registry of jobs."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Dask workers for offline tasks."""

    client: Any
    """A synchronous Dask client."""

    def run(
        self, function: Callable[..., Any], calls: Iterable[tuple[Any, ...]], *, model: bool = False
    ) -> Iterator[Any]:
        """Yield the results of function(*call) for all calls as they complete. The number of calls in flight is
        limited.

        Args:
            function: Called on the workers.
            calls: Its arguments. An exception of one call is raised here, and the other calls are dropped.
            model: Whether the calls need a worker suited to models.

        Raises:
            ConfigError: Jobs have all workers.
            ActorLost: Tasks kill the workers, or the scheduler is gone.
        """
        from distributed import KilledWorker, as_completed
        from distributed.client import FutureCancelledError

        calls = iter(calls)
        addresses = self.free_workers(model=model)

        def submit(call: tuple[Any, ...]) -> Any:
            return self.client.submit(function, *call, pure=False, workers=addresses, allow_other_workers=True)

        max_in_flight = len(addresses) * CALLS_PER_WORKER
        # zip with a range would take one more call and drop it.
        futures = as_completed([submit(call) for call in itertools.islice(calls, max_in_flight)])
        for future in futures:
            try:
                result = future.result()
            except KilledWorker as error:
                raise ActorLost(f"a task killed several workers, perhaps for lack of memory: {error}") from error
            except FutureCancelledError as error:
                raise ActorLost("the scheduler is gone; nothing was stored; run the command again") from error
            future.release()
            for next_call in calls:
                futures.add(submit(next_call))
                break
            yield result

    def blocks(self, count: int, max_rows: int = BLOCK_ROWS) -> Iterator[tuple[int, int]]:
        """Split `count` rows into (start, stop) blocks, sized to keep all workers busy."""
        rows = min(max_rows, max(MIN_ROWS, count // (len(self.free_workers()) * MIN_BLOCKS_PER_WORKER)))
        return ((first, min(first + rows, count)) for first in range(0, count, rows))

    def free_workers(self, *, model: bool = False) -> list[str]:
        """Addresses of the workers without a job.

        Args:
            model: Only workers whose resources mark them as made for models, if there are any.

        Raises:
            ConfigError: No worker is free.
        """
        workers = self.client.scheduler_info(n_workers=-1)["workers"]
        if any(LOCAL in worker["resources"] for worker in workers.values()):
            return list(workers)
        unavailable = self.client.sync(job_registry.ask, self.client, "unavailable", owner="")
        addresses = [address for address in workers if address not in unavailable]
        exclusive_workers = [
            address for address in addresses if set(workers[address]["resources"]) & set(EXCLUSIVE_ROLES)
        ]
        addresses = (exclusive_workers or addresses) if model else addresses
        if not addresses:
            raise ConfigError(
                f"cluster: none of its {len(workers)} workers is free, jobs have {len(unavailable)}; start one, or "
                "wait for a job to end (`staleflow jobs`)"
            )
        return addresses


def run_training(function: Callable[..., Any], plan: Any, ranks: int, client: Any, report: Report) -> Any:
    """Call function(plan, report) on a worker that can run models, and return its result.

    Args:
        function: Called with the plan, and with a function whose calls reach `report`.
        plan: What to do.
        ranks: Number of workers that it takes: the others are ranks of the trainer.
        client: As in `open_pool`.
        report: Called in this process.

    Raises:
        ConfigError: Fewer workers are free, or as `open_pool`.
        ActorLost: As `Pool.run`.
    """
    topic = f"staleflow-report-{secrets.token_hex(4)}"
    with open_pool(client, ranks, model=True) as pool:
        if (num_free := len(pool.free_workers(model=True))) < ranks:
            raise ConfigError(
                f"training.ranks = {ranks}: {num_free} workers are free; start more, or set training.ranks={num_free}"
            )
        pool.client.subscribe_topic(topic, lambda event: report(event[1]))
        try:
            (result,) = pool.run(_call_with_reports, [(pickle.dumps((function, plan)), topic)], model=True)
        finally:
            pool.client.unsubscribe_topic(topic)
    return pickle.loads(result)


def _call_with_reports(call: bytes, topic: str) -> bytes:
    """The task. Values are passed as bytes, which the scheduler need not unpickle."""
    from distributed import get_worker

    worker, (function, plan) = get_worker(), pickle.loads(call)
    return pickle.dumps(function(plan, lambda event: worker.log_event(topic, dict(event))))


@contextlib.contextmanager
def open_pool(client: Any, count: int, *, model: bool = False) -> Iterator[Pool]:
    """A pool of the workers of a client's cluster, or without a client of local processes.

    Args:
        client: A synchronous `distributed.Client`, or None.
        count: Number of local processes.
        model: Whether the tasks load a model.

    Raises:
        ConfigError: The client is asynchronous, or jobs have all workers of its cluster.
    """
    if client is not None:
        if client.asynchronous:
            raise ConfigError("client: it is asynchronous; pass Client(..., asynchronous=False)")
        client.sync(ensure, client)
        pool = Pool(client)
        pool.free_workers()
        yield pool
        return
    import dask
    from distributed import Client, LocalCluster

    from staleflow.pipeline.processes import local_cluster

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the dashboard's port may be taken; Dask then chooses another
        with (
            dask.config.set(local_cluster.forkserver_config(1, local_cluster.MODEL_MODULES if model else ())),
            LocalCluster(
                n_workers=count,
                threads_per_worker=1,
                memory_limit=0,
                resources={LOCAL: 1},
                dashboard_address="127.0.0.1:0",
                silence_logs=local_cluster.log_level(),
            ) as cluster,
            Client(cluster) as local_client,
        ):
            yield Pool(local_client)


def require_all_rows(num_done: int, count: int) -> None:
    """Raise ProtocolViolation unless all rows were processed, because missing rows would not be noticed otherwise."""
    if num_done != count:
        raise ProtocolViolation(f"the workers returned results for {num_done} of {count} rows; nothing was stored")


creation_lock = threading.RLock()
"""Held while a per-process object is created, so its imports too run in one thread at a time: transformers replaces its
own module at the end of its import, and a thread that waited for the import would keep the old one."""


def cache_per_process(max_results: int) -> Callable[[Callable[Params, Result]], Callable[Params, Result]]:
    """Decorator: cache a function's last `max_results` results in each process, for all tasks.

    Concurrent callers get the same result; with functools.lru_cache alone, each would compute its own. Arguments must
    be hashable and positional.
    """

    def decorate(function: Callable[Params, Result]) -> Callable[Params, Result]:
        cached_function = functools.lru_cache(maxsize=max_results)(function)

        @functools.wraps(function)
        def cached_call(*args: Params.args, **kwargs: Params.kwargs) -> Result:
            assert not kwargs
            with creation_lock:
                return cached_function(*args)

        return cached_call

    return decorate


@cache_per_process(2)
def open_store_at(path: str, snapshot: str) -> VersionedStore:
    """Open a store at a snapshot, for tasks. Reading it changes nothing, so threads may share one."""
    return VersionedStore.at(Path(path), snapshot)
