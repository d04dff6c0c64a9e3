"""Worker processes of a Dask cluster on this machine alone.

Importing torch and transformers takes a process seconds of CPU, and a run has five or more processes. So they are
imported once, by a server process from which all worker processes are forked (Python's `forkserver`); a restarted
worker starts as fast. The server imports while the caller still reads the job. It starts no threads and never touches a
GPU.

Invariants:
- Workers ignore SIGINT: a terminal sends Ctrl-C to all of its processes, and only the caller may decide what stops.
- What is imported comes from where the caller imports it, never from the current folder: a random.py or datasets.py
  of the user there must not stand for a library.
- No two workers draw the same random numbers from a generator that is seeded by an import.
- No worker executes the caller's script again, as multiprocessing has processes do: a script that starts a run needs no
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
"""Modules that a run's actors need besides."""
MODEL_MODULES = ("staleflow.tasks.engines.transformers", "staleflow.tasks.training.policy_trainer", "safetensors.torch")
"""Modules that workers need besides if there is a model."""
METHOD = "distributed.worker.multiprocessing-method"
_PREPARING = threading.Lock()
"""Locked while the environment is that of workers: of two runs that start at once, the one that ends first would leave
its variables in the process, where PYTHONSAFEPATH keeps every child from importing what is beside it."""
QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "DASK_LOGGING__DISTRIBUTED": "critical",
}
"""Environment variables by which libraries keep silent, if they are set before a process imports them. Dask's routine
messages would be written across a live view."""
OWN_PROCESS_NAMES = ("Dask Worker process", "staleflow")
"""How the names of processes begin that do not execute the caller's script: Dask's workers, and simulations."""


def worker_environment(threads: int) -> dict[str, str]:
    """Environment variables of a worker process. Dask has workers return freed memory to the system at once; training
    and sampling free and take the same buffers all the time, which made a step four times slower (measured on the
    demo), all of it page faults."""
    pools = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    kept = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
    quiet = {name: os.environ.get(name, value) for name, value in QUIET.items()}
    return {**quiet, **dict.fromkeys(kept, str(2**30)), **dict.fromkeys(pools, str(threads))}


def quiet_process(threads: int) -> None:
    """Set the environment that libraries read when they are imported, for this process, which is a command's. Called
    before anything heavy is imported.

    Args:
        threads: Threads of torch: its pools spin on shared cores.
    """
    for name, value in {"OMP_NUM_THREADS": str(threads), **QUIET}.items():
        os.environ.setdefault(name, value)


def modules(*, emulated: bool) -> tuple[str, ...]:
    """What the workers of a run import."""
    return ACTOR_MODULES if emulated else (*ACTOR_MODULES, *MODEL_MODULES)


def prepare(threads: int, modules: Sequence[str]) -> None:
    """Start the server process that worker processes are forked from, unless it runs. Returns at once; the server goes
    on importing. modules: what it imports for the workers. threads: of each worker's pools."""
    _leave_out_script()
    forkserver.set_forkserver_preload(["staleflow.pipeline.processes.preloading"])
    named = {"STALEFLOW_PRELOAD": ",".join((*WORKER_MODULES, *modules)), "PYTHONSAFEPATH": "1"}
    resource_tracker.ensure_running()  # which the server needs, and which lets signals through once it has started
    with _PREPARING, _environment({**worker_environment(threads), **named}), _sigint_deferred():
        forkserver.ensure_running()
    if (server := _server()) is not None:
        atexit.unregister(_kill_server)  # of an earlier server
        atexit.register(_kill_server, os.getpid(), server)


def without_script(context: Any) -> Any:
    """A context of multiprocessing whose processes do not execute the caller's script again."""
    _leave_out_script()

    class WithoutScript(type(context)):  # type: ignore[misc]
        @staticmethod
        def Process(*args: Any, **kwargs: Any) -> Any:
            return context.Process(*args, name="staleflow process", **kwargs)

    return WithoutScript()


def _leave_out_script() -> None:
    """Have multiprocessing tell its processes of the caller's script only if they are not ours: what ours get of it is
    pickled by value. It has no option for that."""
    prepare = spawn.get_preparation_data
    if hasattr(prepare, "__wrapped__"):
        return

    @functools.wraps(prepare)
    def data(name: str) -> dict[str, Any]:
        settings = prepare(name)
        return {
            k: v
            for k, v in settings.items()
            if not (name.startswith(OWN_PROCESS_NAMES) and k.startswith("init_main_from"))
        }

    spawn.get_preparation_data = data


def _server() -> int | None:
    """Process id of the server; None if there is none."""
    pid: int | None = getattr(forkserver, "_forkserver")._forkserver_pid  # noqa: B009  mypy does not know it
    return pid


def _kill_server(starter: int, server: int) -> None:
    """End the server with the process that started it. By itself it would first import everything, and meanwhile keep
    open the pipes that its caller's output goes to."""
    if os.getpid() == starter and _server() == server:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)


def forkserver_config(threads: int, modules: Sequence[str]) -> dict[str, object]:
    """Dask's settings with which it forks workers from the server, which is started. The arguments are those of
    `prepare`."""
    import dask
    from distributed.utils import get_mp_context

    with dask.config.set({METHOD: "forkserver"}):
        get_mp_context()  # its first call sets a list of modules of its own
    prepare(threads, modules)
    return {
        METHOD: "forkserver",
        "distributed.nanny.pre-spawn-environ": worker_environment(threads),
        # Starting several processes at once starves the event loops for seconds: not worth a warning.
        "distributed.admin.tick.limit": "60s",
    }


async def start(
    num_workers: int, threads: int, modules: Sequence[str], *, dashboard: bool, parents: bool = False
) -> Any:
    """A LocalCluster of worker processes with one thread each. dashboard: whether it serves one; else it serves
    nothing over HTTP. parents: whether workers may start processes by multiprocessing, as a tensor-parallel vLLM does.
    The other arguments are those of `prepare`."""
    import dask
    from distributed import LocalCluster

    dask.config.set(forkserver_config(threads, modules) | {"distributed.worker.daemon": not parents})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the dashboard's port may be taken; Dask then chooses another
        starting = LocalCluster(
            n_workers=num_workers,
            threads_per_worker=1,
            processes=True,
            memory_limit=0,
            dashboard_address="127.0.0.1:8787" if dashboard else None,
            silence_logs=log_level(),
            asynchronous=True,
        )
        opening = asyncio.ensure_future(starting)
        try:
            local = await asyncio.shield(opening)
        except BaseException:
            # A cluster knows its workers only once all have started; closed earlier, it would leave them behind.
            await asyncio.wait([opening])
            await starting.close()
            raise
    if not dashboard:
        _serve_nothing(local)
    return local


def log_level() -> int:
    """The level from which on Dask's messages are shown, here and in worker processes: the configured one, but warnings
    at least. LocalCluster would set it to warnings for nannies in their processes, and clients have one of their own.
    """
    return max(logging.WARNING, logging.getLogger("distributed").getEffectiveLevel())


def _serve_nothing(local: Any) -> None:
    """Close the HTTP server of a local cluster's scheduler: Dask starts one even without a dashboard, on port 8787."""
    local.scheduler.services.pop("dashboard").stop()
    local.scheduler_info["services"].pop("dashboard", None)  # what clients make the dashboard's address from


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for the processes that are started inside."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _sigint_deferred() -> Iterator[None]:
    """A SIGINT that comes inside is heard afterwards, whichever thread gets it. Processes that are started
    inside hold it back until they ignore it, as pipeline/processes/preloading.py does."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    heard = []
    main = threading.current_thread() is threading.main_thread()  # else the handler, and what it raises, are not ours
    handler = signal.signal(signal.SIGINT, lambda *_: heard.append(True)) if main else None
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if heard:
            signal.raise_signal(signal.SIGINT)
