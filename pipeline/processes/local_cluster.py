"""Start the worker processes of a Dask cluster on this machine.

Importing torch and transformers takes a process seconds of CPU, and a run has five or more processes. So a server
process imports them once, and all worker processes are forked from it (Python's `forkserver`), also restarted ones. The
server imports while the caller still reads the job. It starts no threads and never touches a GPU.

Invariants:
- Workers ignore SIGINT: a terminal sends Ctrl-C to all of its processes, and only the caller may decide what stops.
- Workers import modules from where the caller imports them, never from the current folder: a user's random.py or
  datasets.py there must not replace a library.
- No two workers draw the same random numbers from a generator that is seeded at import.
- No worker re-executes the caller's script, as multiprocessing does by default: a script that starts a run needs no
  `if __name__ == "__main__"`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker, spawn
from typing import Any

from staleflow.pipeline.processes.background import run_to_end

WORKER_MODULES = ("distributed.nanny", "staleflow.stores.trajectories.versioned")
"""Modules that every worker process needs."""
ACTOR_MODULES = (
    "staleflow.pipeline.cluster.plugin",
    "staleflow.tasks.actors.trajectory_server",
    "staleflow.tasks.actors.rollout_instance",
    "staleflow.tasks.actors.trainer",
    "staleflow.tasks.engines.emulated_engine",
    "staleflow.tasks.training.emulated_trainer",
)
"""Modules that a run's actors need in addition."""
MODEL_MODULES = ("staleflow.tasks.engines.transformers", "staleflow.tasks.training.policy_trainer", "safetensors.torch")
"""Modules that workers need in addition if there is a model."""
MP_METHOD_KEY = "distributed.worker.multiprocessing-method"
_ENVIRONMENT_LOCK = threading.Lock()
"""Held while os.environ has the workers' variables. Without it, two concurrent starts could restore each other's values
and leave PYTHONSAFEPATH set in this process."""
QUIET_VARIABLES = {
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "DASK_LOGGING__DISTRIBUTED": "critical",
}
"""Environment variables that silence libraries if set before they are imported. Dask's routine messages would be
written across a live view."""
OWN_PROCESS_PREFIXES = ("Dask Worker process", "staleflow")
"""Prefixes of the names of processes that must not re-execute the caller's script: Dask's workers, and simulations."""


def worker_environment(threads: int) -> dict[str, str]:
    """Environment variables of a worker process. threads: size of each thread pool.

    Dask makes workers return freed memory to the system at once. Training and sampling allocate the same buffers again,
    and the page faults made a step of the demo four times slower. So the malloc thresholds are raised.
    """
    pools = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    malloc_thresholds = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
    quiet = {name: os.environ.get(name, value) for name, value in QUIET_VARIABLES.items()}
    return {**quiet, **dict.fromkeys(malloc_thresholds, str(2**30)), **dict.fromkeys(pools, str(threads))}


def set_process_environment(threads: int) -> None:
    """Set the environment variables that libraries read at import, in the process of a command. Call before importing
    torch or transformers.

    Args:
        threads: Number of OMP threads; kept small because idle pools spin.
    """
    for name, value in {"OMP_NUM_THREADS": str(threads), **QUIET_VARIABLES}.items():
        os.environ.setdefault(name, value)


def modules_to_preload(*, emulated: bool) -> tuple[str, ...]:
    """Return the modules that the workers of a run import in addition to WORKER_MODULES."""
    return ACTOR_MODULES if emulated else (*ACTOR_MODULES, *MODEL_MODULES)


def start_fork_server(threads: int, preload_modules: Sequence[str]) -> None:
    """Start the fork server of worker processes, unless it is running. Returns at once, while the server imports
    modules.

    Args:
        threads: Size of each thread pool of a worker.
        preload_modules: Modules that the server imports, beside WORKER_MODULES.
    """
    _patch_preparation_data()
    forkserver.set_forkserver_preload(["staleflow.pipeline.processes.preloading"])
    preload_variables = {"STALEFLOW_PRELOAD": ",".join((*WORKER_MODULES, *preload_modules)), "PYTHONSAFEPATH": "1"}
    # Start it first: the server needs it, and starting it later would unblock signals.
    resource_tracker.ensure_running()
    with _ENVIRONMENT_LOCK, _environment({**worker_environment(threads), **preload_variables}), _sigint_deferred():
        forkserver.ensure_running()
    if (server := _forkserver_pid()) is not None:
        atexit.unregister(_kill_server)  # registered for an earlier server
        atexit.register(_kill_server, os.getpid(), server)


def context_without_main(context: Any) -> Any:
    """A multiprocessing context whose processes do not re-execute the caller's script."""
    _patch_preparation_data()

    class ContextWithoutMain(type(context)):  # type: ignore[misc]
        @staticmethod
        def Process(*args: Any, **kwargs: Any) -> Any:
            return context.Process(*args, name="staleflow process", **kwargs)

    return ContextWithoutMain()


def _patch_preparation_data() -> None:
    """Patch multiprocessing so that our processes do not import the caller's script. multiprocessing has no option for
    this. Objects from the script reach them pickled by value."""
    get_preparation_data = spawn.get_preparation_data
    if hasattr(get_preparation_data, "__wrapped__"):
        return

    @functools.wraps(get_preparation_data)
    def preparation_data(name: str) -> dict[str, Any]:
        settings = get_preparation_data(name)
        return {
            k: v
            for k, v in settings.items()
            if not (name.startswith(OWN_PROCESS_PREFIXES) and k.startswith("init_main_from"))
        }

    spawn.get_preparation_data = preparation_data


def _forkserver_pid() -> int | None:
    """Return the process id of the fork server; None if none has been started."""
    pid: int | None = getattr(forkserver, "_forkserver")._forkserver_pid  # noqa: B009  mypy does not know it
    return pid


def _kill_server(starter: int, server: int) -> None:
    """Kill the fork server when the process that started it exits. Left alone, it would finish its imports before
    exiting and keep the caller's output pipes open."""
    if os.getpid() == starter and _forkserver_pid() == server:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)


def forkserver_config(threads: int, preload_modules: Sequence[str]) -> dict[str, object]:
    """Start the fork server, and return the Dask settings with which workers are forked from it. Arguments as in
    `start_fork_server`."""
    import dask
    from distributed.utils import get_mp_context

    with dask.config.set({MP_METHOD_KEY: "forkserver"}):
        get_mp_context()  # its first call sets Dask's own list of modules to preload, which is replaced now
    start_fork_server(threads, preload_modules)
    return {
        MP_METHOD_KEY: "forkserver",
        "distributed.nanny.pre-spawn-environ": worker_environment(threads),
        # Starting several processes at once starves the event loops for seconds: not worth a warning.
        "distributed.admin.tick.limit": "60s",
    }


async def start(
    num_workers: int, threads: int, preload_modules: Sequence[str], *, dashboard: bool, may_have_children: bool = False
) -> Any:
    """Start a LocalCluster whose worker processes have one thread each.

    Args:
        num_workers: Number of worker processes.
        threads, preload_modules: As in `start_fork_server`.
        dashboard: Whether to serve the dashboard; without it, nothing is served over HTTP.
        may_have_children: Whether workers may start processes by multiprocessing, as a tensor-parallel vLLM does.
    """
    import dask
    from distributed import LocalCluster

    dask.config.set(forkserver_config(threads, preload_modules) | {"distributed.worker.daemon": not may_have_children})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the dashboard's port may be taken; Dask then chooses another
        cluster = LocalCluster(
            n_workers=num_workers,
            threads_per_worker=1,
            processes=True,
            memory_limit=0,
            dashboard_address="127.0.0.1:8787" if dashboard else None,
            silence_logs=log_level(),
            asynchronous=True,
        )
        start_task = asyncio.ensure_future(cluster)
        try:
            local = await asyncio.shield(start_task)
        except BaseException:
            await run_to_end(_close_once_started(cluster, start_task))
            raise
    if not dashboard:
        _close_http_server(local)
    return local


async def _close_once_started(cluster: Any, start_task: asyncio.Future[Any]) -> None:
    """Close a cluster after its start. It knows its workers only once all have started; closed earlier, it would leave
    them behind."""
    await asyncio.wait([start_task])
    await cluster.close()


def log_level() -> int:
    """Dask's log level for this process and worker processes: the configured one, at least WARNING. LocalCluster would
    set WARNING in the nannies' processes; clients set their own level."""
    return max(logging.WARNING, logging.getLogger("distributed").getEffectiveLevel())


def _close_http_server(local: Any) -> None:
    """Close the HTTP server of a local cluster's scheduler: Dask starts one even without a dashboard, on port 8787."""
    local.scheduler.services.pop("dashboard").stop()
    local.scheduler_info["services"].pop("dashboard", None)  # clients derive the dashboard's address from this entry


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block, for the processes started there, and restore them afterwards."""
    previous = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _sigint_deferred() -> Iterator[None]:
    """Defer a SIGINT received inside the block until it exits: in the main thread that of any thread, in another thread
    only its own. Child processes inherit the blocked mask, until they ignore SIGINT as
    pipeline/processes/preloading.py does."""
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    pending_signals = []
    is_main_thread = threading.current_thread() is threading.main_thread()  # only the main thread may set a handler
    handler = signal.signal(signal.SIGINT, lambda *_: pending_signals.append(True)) if is_main_thread else None
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        if pending_signals:
            signal.raise_signal(signal.SIGINT)
