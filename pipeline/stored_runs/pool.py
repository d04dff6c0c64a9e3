"""Dask workers for tasks over blocks of a store, in parallel and out of core.

Each task reads a block and returns a small result, so memory is bounded by one block per thread of a worker, however
large the store is. If a worker dies, another computes its blocks again. Workers that jobs have when the work begins are
not used.

A worker may run tasks in several threads. Objects that are slow to create are created once per process and are
thread-safe, are created per thread, or are used under a lock.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import pickle
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from staleflow.pipeline.cluster import job_registry
from staleflow.pipeline.cluster.gang import EXCLUSIVE_ROLES
from staleflow.pipeline.cluster.plugin import ensure_job_registry
from staleflow.stores.errors import ActorLost, ConfigError, ProtocolViolation
from staleflow.stores.trajectories.versioned import VersionedStore

Params = ParamSpec("Params")
Result = TypeVar("Result")

EventCallback = Callable[[Mapping[str, Any]], None]
"""Called with events of a training, as `Run.train_offline` describes them."""
MAX_BLOCK_ROWS = 2048
"""Maximum trajectories per task: some 10 MiB at 500 tokens each, tenths of a second of work."""
MIN_BLOCK_ROWS = 128
"""Minimum trajectories per task: with fewer, a task's overhead matters."""
MIN_BLOCKS_PER_THREAD = 8
"""Minimum blocks per thread, if there are enough rows: workers then finish at about the same time."""
CALLS_PER_THREAD = 3
"""Tasks in flight per thread: enough that none is idle."""
CHECK_S = 2.0
"""Seconds without a result after which the workers are checked."""
MAX_LOSSES = 3
"""Number of times that all workers may be lost, as Dask lets a task kill three."""
WORKER_RESTART_S = 30.0
"""Seconds that a worker may take to restart after its process has ended."""
POLL_S = 0.5
"""Seconds between two checks for free workers."""
SCHEDULER_GONE = "the scheduler is gone; run the command again"


@dataclass(frozen=True, slots=True)
class Pool:
    """Dask workers for offline tasks."""

    client: Any
    """A synchronous Dask client, on whose scheduler the job registry is registered."""

    def run(
        self, function: Callable[..., Any], calls: Iterable[tuple[Any, ...]], *, for_models: bool = False
    ) -> Iterator[Any]:
        """Yield the results of function(*call) for all calls as they complete. The number of calls in flight is
        limited.

        Args:
            function: Called on the workers; may be called again for a call whose worker was lost.
            calls: Its arguments. An exception of one call is raised here. Then no further calls begin; those that run
                are not interrupted.
            for_models: Whether the calls need a worker suited to models.

        Raises:
            ConfigError: Jobs have all workers.
            ActorLost: Tasks kill the workers, or the scheduler is gone.
        """
        from distributed import KilledWorker
        from distributed.client import FutureCancelledError

        calls = iter(calls)
        workers = self.free_workers(for_models=for_models)
        call_by_future: dict[Any, tuple[Any, ...]] = {}
        finished: queue.SimpleQueue[Any] = queue.SimpleQueue()
        num_losses = 0

        def submit(call: tuple[Any, ...]) -> None:
            # Not with allow_other_workers: idle workers of jobs would steal tasks.
            future = self.client.submit(function, *call, pure=False, workers=list(workers))
            call_by_future[future] = call
            future.add_done_callback(finished.put)

        for call in itertools.islice(calls, sum(workers.values()) * CALLS_PER_THREAD):
            submit(call)
        while call_by_future:
            try:
                future = finished.get(timeout=CHECK_S)
            except queue.Empty:
                if workers.keys().isdisjoint(self._workers()):  # Dask would wait for these addresses
                    num_losses += 1
                    if num_losses > MAX_LOSSES:
                        raise ActorLost(f"all workers died {num_losses} times, perhaps for lack of memory") from None
                    workers = self.wait_for_workers(1, for_models=for_models)
                    lost_calls = list(call_by_future.values())
                    call_by_future.clear()
                    for call in lost_calls:
                        submit(call)
                continue
            if call_by_future.pop(future, None) is None:
                continue  # submitted again
            try:
                result = future.result()
            except KilledWorker as error:
                raise ActorLost(f"a task killed several workers, perhaps for lack of memory: {error}") from error
            except FutureCancelledError as error:
                raise ActorLost(SCHEDULER_GONE) from error
            future.release()
            for call in itertools.islice(calls, 1):
                submit(call)
            yield result

    def split_rows(self, count: int, max_rows: int = MAX_BLOCK_ROWS) -> Iterator[tuple[int, int]]:
        """Split `count` rows into (start, stop) blocks of equal size, for the last perhaps less: small enough to keep
        all free workers busy, MIN_BLOCK_ROWS to `max_rows` rows (at most `max_rows` if that is less)."""
        num_blocks = sum(self.free_workers().values()) * MIN_BLOCKS_PER_THREAD
        rows = min(max_rows, max(MIN_BLOCK_ROWS, count // num_blocks))
        return ((first, min(first + rows, count)) for first in range(0, count, rows))

    def free_workers(self, *, for_models: bool = False) -> dict[str, int]:
        """The workers without a job: their numbers of threads by address.

        Args:
            for_models: Only workers whose resources mark them as made for models, if there are any.

        Raises:
            ConfigError: No worker is free.
            ActorLost: The scheduler is gone.
        """
        workers = self._workers()
        unavailable = self.client.sync(job_registry.ask, self.client, "unavailable", id="")
        addresses = [address for address in workers if address not in unavailable]
        exclusive_workers = [
            address for address in addresses if set(workers[address]["resources"]) & set(EXCLUSIVE_ROLES)
        ]
        addresses = (exclusive_workers or addresses) if for_models else addresses
        if not addresses:
            raise ConfigError(
                f"cluster: none of its {len(workers)} workers is free, jobs have {len(unavailable)}; start one, or "
                "wait for a job to end (`staleflow jobs`)"
            )
        return {address: workers[address]["nthreads"] for address in addresses}

    def wait_for_workers(self, count: int, *, for_models: bool = False) -> dict[str, int]:
        """The free workers, as `free_workers` returns them. If there are fewer than `count`, waits up to
        WORKER_RESTART_S for workers that are restarting; may then return fewer. Raises ConfigError if none is free."""
        deadline = time.monotonic() + WORKER_RESTART_S
        while time.monotonic() < deadline:
            with contextlib.suppress(ConfigError):
                if len(workers := self.free_workers(for_models=for_models)) >= count:
                    return workers
            time.sleep(POLL_S)
        return self.free_workers(for_models=for_models)

    def _workers(self) -> dict[str, Any]:
        """What the scheduler knows of each of its workers, by address. Raises ActorLost if it is gone."""
        # Not client.scheduler_info(), whose result Dask replaces every two seconds by one without workers.
        try:
            workers: dict[str, Any] = self.client.sync(self.client.scheduler.identity, n_workers=-1)["workers"]
        except OSError as error:
            raise ActorLost(SCHEDULER_GONE) from error
        return workers


def run_training(function: Callable[..., Any], plan: Any, ranks: int, client: Any, report: EventCallback) -> Any:
    """Call function(plan, report) on a worker that can run models, and return its result.

    Args:
        function: Called with the plan, and with a function that passes events to `report`.
        plan: What to do.
        ranks: Number of workers that must be free: the first calls `function`, which starts the trainer's other ranks
            on the rest.
        client: As in `open_pool`.
        report: Called in this process, in the client's IO thread, which does nothing else meanwhile. Its first
            exception is raised here when the function has ended; it gets no events after it.

    Raises:
        ConfigError: Fewer workers are free, or as `open_pool`.
        ActorLost: As `Pool.run`.
    """
    topic = f"staleflow-report-{secrets.token_hex(4)}"
    errors: list[Exception] = []

    def handle_event(event: tuple[float, Mapping[str, Any]]) -> None:
        if not errors:
            try:
                report(event[1])
            except Exception as error:  # noqa: BLE001  Dask would only log it
                errors.append(error)

    with open_pool(client, ranks, for_models=True) as pool:
        if (num_free := len(pool.free_workers(for_models=True))) < ranks:
            raise ConfigError(
                f"training.ranks = {ranks}: {num_free} workers are free; start more, or set training.ranks={num_free}"
            )
        pool.client.subscribe_topic(topic, handle_event)
        try:
            (result,) = pool.run(_call_with_reports, [(pickle.dumps((function, plan)), topic)], for_models=True)
        finally:
            pool.client.unsubscribe_topic(topic)
    if errors:
        raise errors[0]
    return pickle.loads(result)


def _call_with_reports(call: bytes, topic: str) -> bytes:
    """Call a function on a worker, whose events it sends to the client.

    Args:
        call: (function, plan), pickled, so that the scheduler need not load them.
        topic: The Dask topic of the events.

    Returns:
        The function's result, pickled.
    """
    from distributed import get_worker

    worker, (function, plan) = get_worker(), pickle.loads(call)
    return pickle.dumps(function(plan, lambda event: worker.log_event(topic, dict(event))))


@contextlib.contextmanager
def open_pool(client: Any, num_processes: int, *, for_models: bool = False) -> Iterator[Pool]:
    """A pool of the workers of a client's cluster, or without a client of local processes.

    Args:
        client: A synchronous `distributed.Client`, or None.
        num_processes: Number of local processes.
        for_models: Whether the tasks load a model.

    Raises:
        ConfigError: The client is asynchronous, jobs have all workers of its cluster, or no local process is wanted.
    """
    with contextlib.ExitStack() as stack:
        if client is None:
            if num_processes < 1:
                raise ConfigError(f"workers = {num_processes}: at least 1 process is needed")
            client = stack.enter_context(_local_client(num_processes, for_models=for_models))
        elif client.asynchronous:
            raise ConfigError("client: it is asynchronous; pass Client(..., asynchronous=False)")
        client.sync(ensure_job_registry, client)
        pool = Pool(client)
        pool.free_workers()
        yield pool


@contextlib.contextmanager
def _local_client(num_processes: int, *, for_models: bool) -> Iterator[Any]:
    """A client of local worker processes of one thread each. for_models: whether they import what models need."""
    import dask
    from distributed import Client, LocalCluster

    from staleflow.pipeline.processes import local_cluster

    with (
        dask.config.set(local_cluster.forkserver_config(1, local_cluster.MODEL_MODULES if for_models else ())),
        LocalCluster(
            n_workers=num_processes,
            threads_per_worker=1,
            memory_limit=0,
            dashboard_address="127.0.0.1:0",
            silence_logs=local_cluster.log_level(),
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


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
