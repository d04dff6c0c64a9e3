"""A Dask cluster by hand: a scheduler and workers with nannies, each a process of its own, as an operator starts them.

Whatever ends is started again, as systemd or Slurm would. Everything lives in one folder; `close` leaves no process.
Two of the workers are on a second host, if there is one (benchmarks/soaking/machine.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.soaking.job import Kind
from benchmarks.soaking.machine import THERE, Machine
from benchmarks.soaking.recording import FOLDER

ROLES = {
    "trainer": "trainer=1",
    "server": "server=1",
    "light": "driver=1,reward=1",
    "rollout-a": "rollout=1",
    "rollout-b": "rollout=1",
    "rollout-c": "rollout=1",
}
"""Workers by name, and the roles they declare: one instance more than the job needs, and no other spare."""
MORE_ROLES: dict[Kind, dict[str, str]] = {
    "plain": {},
    "turns": {"light-b": "reward=1"},
    "agents": {"light-b": "reward=1"},
    "ranks": {"trainer-b": "trainer=1"},
}
"""Workers that a kind of job needs besides."""
FAR = ("rollout-b", "rollout-c")
"""Those on the second host."""
PRELOADS = ["benchmarks.soaking.recording"]
"""Modules that workers load as they start."""
MARK = "STALEFLOW_SOAK"
"""Environment variable of every process that a soak's cluster and run start: the soak's folder."""
REVIVE_S = 1.0
"""Seconds from the end of a process to its next start."""
ENVIRONMENT = {
    # They run elsewhere, and the scheduler is asked by functions of this package.
    "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])),
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DASK_LOGGING__DISTRIBUTED": "warning",
    "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "1000",
}
"""Dask fails a task whose workers died this often without a step in between; here they die on purpose."""


@dataclass(slots=True)
class Process:
    """A process of the cluster. gone: it is meant to stay away until `Cluster.join`."""

    name: str
    command: list[str]
    popen: subprocess.Popen[bytes]
    gone: bool = False
    ended_at: float = 0.0
    """When it was seen to have ended; 0 while it runs."""


@dataclass(slots=True)
class Cluster:
    """The cluster's processes. Logs are in folder/logs."""

    folder: Path
    machine: Machine
    kinds: tuple[Kind, ...] = ("plain",)
    processes: dict[str, Process] = field(default_factory=dict)
    port: int = 0

    @property
    def file(self) -> Path:
        return self.folder / "scheduler.json"

    def start(self) -> None:
        (self.folder / "logs").mkdir(exist_ok=True)
        with socket.socket() as free:
            free.bind((self.machine.address, 0))
            self.port = free.getsockname()[1]
        self._launch("scheduler", ["scheduler", "--port", str(self.port), "--host", self.machine.address])
        roles = dict(ROLES)
        for kind in self.kinds:
            roles |= MORE_ROLES[kind]
        for name, resources in roles.items():
            self.join(name, resources)

    def join(self, name: str, resources: str) -> None:
        """Start a worker."""
        folder = str(self.folder / "workers")
        options = ["--nthreads", "1", "--memory-limit", "0", "--local-directory", folder, "--resources", resources]
        options += [word for module in PRELOADS for word in ("--preload", module)]
        far = bool(self.machine.namespace) and name in FAR
        address = THERE if far else self.machine.address
        self._launch(name, ["worker", "--name", name, "--host", address, *options], far=far)

    def revive(self) -> list[str]:
        """Start again what has ended a while ago; returns its names."""
        revived, now = [], time.monotonic()
        for process in self.processes.values():
            if process.gone or process.popen.poll() is None:
                continue
            process.ended_at = process.ended_at or now
            if now - process.ended_at >= REVIVE_S:
                self._start_again(process)
                revived.append(process.name)
        return revived

    def leave(self, name: str, *, kill: bool) -> None:
        """End a worker and its nanny: at once, or as SIGTERM does."""
        process = self.processes[name]
        process.gone = True
        if kill:
            self._end(process)
        else:
            process.popen.terminate()

    def come_back(self, name: str) -> None:
        """Let a worker that left join again."""
        self._start_again(self.processes[name])

    @property
    def records(self) -> Path:
        """The folder of what engines record (recording.py)."""
        return self.folder / "sampled"

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the cluster's and the run's processes."""
        return {**os.environ, **ENVIRONMENT, MARK: str(self.folder), FOLDER: str(self.records)}

    @property
    def scheduler(self) -> int:
        """The scheduler's process."""
        return self.processes["scheduler"].popen.pid

    def workers_of(self, pid: int) -> Iterator[int]:
        """Processes below one of the cluster's."""
        with contextlib.suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                yield int(child)
                yield from self.workers_of(int(child))

    def orphans(self, known: Collection[int] = ()) -> list[str]:
        """Command lines of processes that were started by the cluster or the run and that none of their processes has
        below it any more. known: processes besides the cluster's whose children are no orphans."""
        roots = {os.getpid(), *known, *(process.popen.pid for process in self.processes.values())}
        mark = f"{MARK}={self.folder}\0".encode()
        results = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError):
                if mark in (folder / "environ").read_bytes() + b"\0" and not roots & set(_ancestors(int(folder.name))):
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    results += [line.strip()] if line else []
        return sorted(results)

    def close(self) -> None:
        """End everything, stopped processes too."""
        for process in self.processes.values():
            self._end(process)

    def _start_again(self, process: Process) -> None:
        self._end(process)  # a nanny's worker ends with it, a moment later
        process.gone, process.ended_at = False, 0.0
        process.popen = self._popen(process.name, process.command)

    def _launch(self, name: str, words: list[str], *, far: bool = False) -> None:
        command = [sys.executable, "-m", "dask", *words, "--no-dashboard", "--scheduler-file", str(self.file)]
        if far:
            command = self.machine.on_second_host(command)
        self.processes[name] = Process(name, command, self._popen(name, command))

    def _popen(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        if name == "scheduler":
            self.file.unlink(missing_ok=True)
        with (self.folder / "logs" / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                command, env=self.environment, cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )

    def _end(self, process: Process) -> None:
        kill_all([process.popen.pid, *self.workers_of(process.popen.pid)])
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.popen.pid, signal.SIGKILL)
        process.popen.wait()


def _ancestors(pid: int) -> Iterator[int]:
    """A process and those above it."""
    while pid:
        yield pid
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        send(pid, signal.SIGKILL)


def send(pid: int, what: signal.Signals) -> bool:
    """Send a signal; false if the process has ended."""
    try:
        os.kill(pid, what)
    except ProcessLookupError:
        return False
    return True
