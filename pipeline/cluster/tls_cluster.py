"""Runs a Dask scheduler and workers on this machine that accept only TLS connections, with the certificates of one
folder."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from staleflow.pipeline.cluster.certificates import (
    check_validity,
    create_certificates,
    has_certificates,
    read_scheduler_address,
)
from staleflow.stores.errors import ActorLost, ConfigError

START_LIMIT_S = 120.0
"""Seconds within which the scheduler must answer and all workers must have joined."""
POLL_S = 0.2
STOP_LIMIT_S = 10.0
"""Seconds that a process may take to end before it is killed."""
DASHBOARD_OPTION = ("--dashboard-address", "127.0.0.1:8787")
"""Option of the scheduler. Dask serves its pages over HTTP without TLS, by default on all networks."""
WORKER_OPTIONS = (
    "--nthreads", "1", "--memory-limit", "0", "--no-dashboard", "--dashboard-address", "127.0.0.1:0",
)  # fmt: skip
"""Options of a worker, as in docs/clusters.md: one thread, no memory limit that would kill a worker with a model, and a
page server that only this machine reaches. Dask starts that server even with --no-dashboard."""


WAIT_SCRIPT = """
import distributed
with distributed.Client(timeout={timeout}) as client:
    if {number}:
        client.wait_for_workers({number}, timeout={timeout})
"""
"""Script that waits for the workers. It runs in its own process, because Dask reads its configuration at import."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsCluster:
    """Running processes of a cluster, by name. address: the scheduler's. folder: the folder with certificates and
    logs."""

    address: str
    folder: Path
    processes: Mapping[str, subprocess.Popen[bytes]]

    def wait(self) -> None:
        """Wait until the scheduler or a worker's nanny ends, then raise ActorLost."""
        while True:
            self._require_running()
            time.sleep(POLL_S)

    def wait_for_workers(self, environment_variables: Mapping[str, str], num_workers: int) -> None:
        """Wait until the scheduler answers and has all workers. Raises ActorLost."""
        script = WAIT_SCRIPT.format(number=num_workers, timeout=START_LIMIT_S)
        with subprocess.Popen(
            [sys.executable, "-P", "-c", script],
            env=dict(environment_variables),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as waiter:
            try:
                while waiter.poll() is None:
                    self._require_running()
                    time.sleep(POLL_S)
            finally:
                waiter.kill()
        if waiter.returncode:
            raise ActorLost(f"the workers did not join within {START_LIMIT_S:g} s; logs are in {self.folder}")

    def _require_running(self) -> None:
        for name, process in self.processes.items():
            if process.poll() is not None:
                lines = log_file(self.folder, name).read_text("utf-8", "replace").strip().splitlines()
                raise ActorLost(f"the {name} has ended: {lines[-1].strip() if lines else 'it left no log'}")


def log_file(folder: Path, name: str) -> Path:
    """Path of the output of one of a cluster's processes."""
    return folder / f"{name.replace(' ', '-')}.log"


@contextlib.contextmanager
def tls_cluster(
    folder: Path, *, host: str, port: int, num_workers: int, announce: Callable[[str], None] = lambda line: None
) -> Iterator[TlsCluster]:
    """Context manager: runs a scheduler and workers.

    Args:
        folder: Folder of certificates and Dask configuration; created if it does not exist.
        host: Name or address at which other machines reach this one.
        port: Port of the scheduler.
        num_workers: Number of worker processes.
        announce: Called with a line of text before a long wait.

    Raises:
        ConfigError: The folder is for another address, or its certificate has expired.
        ActorLost: A process ended while the others started, as when the port is in use.
    """
    address = f"tls://{f'[{host}]' if ':' in host else host}:{port}"
    if not has_certificates(folder):
        create_certificates(folder, [host], address)
    elif (known_address := read_scheduler_address(folder)) != address:
        raise ConfigError(f"{folder}: its certificates are for {known_address}, not {address}; name another folder")
    check_validity(folder)
    environment_variables = {**os.environ, "DASK_CONFIG": str(folder.resolve()), "OMP_NUM_THREADS": "1"}
    commands = [
        ("scheduler", ["scheduler", "--host", address.rpartition(":")[0], "--port", str(port), *DASHBOARD_OPTION]),
        *((f"worker {i}", ["worker", address, "--host", host, *WORKER_OPTIONS]) for i in range(num_workers)),
    ]
    announce(f"starting a scheduler at {address} and {num_workers} workers")
    with contextlib.ExitStack() as stack:
        processes = {
            name: stack.enter_context(_running_process(arguments, environment_variables, folder, name))
            for name, arguments in commands
        }
        cluster = TlsCluster(address=address, folder=folder, processes=processes)
        cluster.wait_for_workers(environment_variables, num_workers)
        yield cluster


@contextlib.contextmanager
def _running_process(
    arguments: Sequence[str], environment_variables: Mapping[str, str], folder: Path, name: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Context manager: runs a `dask` command in a new session, with its output in a log of the folder."""
    with log_file(folder, name).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "dask", *arguments], env=dict(environment_variables), stdout=log, stderr=log,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        _end_process(process)


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """Stop a process and its child processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_LIMIT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
