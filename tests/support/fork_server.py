"""A process that has imported what commands and workers need, and runs any `python -m` program by forking.

Importing torch, transformers and distributed takes a process seconds of CPU, and a test of whole runs starts a dozen
processes. Forked from here they start in milliseconds, and are real ones: with a process id, session, files,
environment and exit code of their own. tests/support/forking.py starts them.

What is not as in a new interpreter: the parent is this server, the command line in /proc is this server's, and Python's
own options but -P are this server's.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import logging
import os
import runpy
import selectors
import signal
import socket
import sys
import termios
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import util
from pathlib import Path
from typing import Any

import dask
import numpy as np

from staleflow.pipeline.processes.local_cluster import ACTOR_MODULES, MODEL_MODULES, WORKER_MODULES

RUN_MODULES = (
    "distributed.http.worker.prometheus.core",
    "reasoning_gym",
    "tests.support.forked_scoring",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)
"""Modules that workers of test runs import on demand."""
MODULES = (
    *RUN_MODULES,
    *WORKER_MODULES,
    *ACTOR_MODULES,
    *MODEL_MODULES,
    "staleflow.cli.cluster_jobs",
    "staleflow.cli.run",
    "staleflow.cli.store",
    "staleflow.cli.train_offline",
    "distributed.cli.dask_scheduler",
    "distributed.cli.dask_worker",
    "matplotlib.pyplot",
    "staleflow.pipeline.jobs.execution",
    "staleflow.pipeline.jobs.job_driver",
    "staleflow.pipeline.stored_runs.reward_rescoring",
    "staleflow.pipeline.cluster.dashboard",
    "tensorboardX",
    "tests.support.blank_picture",
)
"""Modules that test processes import."""
REQUEST_BYTES = 2**20
FORKSERVER = "from multiprocessing.forkserver import main;"
"""Prefix of the code with which multiprocessing starts its fork server."""
NAMESPACES = {"net": 0x4000_0000, "mnt": 0x0002_0000}
"""Namespaces that a process may have separately, with their flags for setns(2)."""


@dataclass(slots=True)
class Child:
    """A forked process that is still tracked. link: connection to its requester; None if nobody waits for it."""

    pid: int
    link: socket.socket | None
    reported: bool = False


def main(listener: int, alive: int) -> None:
    """Serve until the other end of the pipe `alive` is closed; in a forked process, run the requested program.
    listener: descriptor of a listening socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()  # a collection in a child would copy all of these pages
    gc.enable()
    tasks = os.listdir("/proc/self/task")
    assert len(tasks) == 1, f"{len(tasks)} threads: only what starts none may be imported before forking"
    request, fds, link = _serve(socket.socket(fileno=listener), alive)
    link.send(str(os.getpid()).encode())
    link.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _take_over(fds, range(3))
    if request["new_session"]:
        os.setsid()
        if os.isatty(0):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    _enter_namespaces(request["beside"])
    _become(request)
    if (code := _stand_by()) is not None:
        exec(code, {"__name__": "__main__"})
        return
    sys.argv = ["-m", *request["arguments"]]
    sys.modules.pop(request["module"], None)  # runpy warns of what is imported already
    run_module = getattr(runpy, "_run_module_as_main")  # noqa: B009  mypy does not know it
    _exit_after(lambda: run_module(request["module"]))  # as `python -m` does


def _exit_after(program: Callable[[], object]) -> None:
    """Run a program and end this process as Python would, but without destroying the imported modules: that takes half
    a CPU second, because it copies the pages of the server."""
    code: object = None
    try:
        program()
    except SystemExit as error:
        code = error.code
    except BaseException as error:  # noqa: BLE001  the interpreter catches all
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    getattr(threading, "_shutdown")()  # noqa: B009  mypy does not know it; waits for threads
    getattr(atexit, "_run_exitfuncs")()  # noqa: B009  mypy does not know it
    for stream in (sys.stdout, sys.stderr):
        try:
            if not stream.closed:
                stream.flush()
        except OSError:
            code = 120
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    os._exit(code or 0)


def _serve(listener: socket.socket, alive: int) -> tuple[dict[str, Any], Sequence[int], socket.socket]:
    """Fork a process for each request. Returns only in forked processes: the request, its standard files, and the link
    to the requester."""
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, Child] = {}
    selector = selectors.DefaultSelector()
    for item in (listener, alive, woken):
        selector.register(item, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj == alive:
                os._exit(0)
            elif key.fileobj is woken:
                woken.recv(4096)
            elif key.fileobj is listener:
                link, _ = listener.accept()
                data, fds, *_ = socket.recv_fds(link, REQUEST_BYTES, 3)
                if (pid := os.fork()) == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    os.close(alive)
                    selector.close()
                    for ours in (listener, woken, waker, *filter(None, (c.link for c in children.values()))):
                        ours.close()
                    return json.loads(data), fds, link
                for fd in fds:
                    os.close(fd)
                children[pid] = Child(pid, link)
                selector.register(link, selectors.EVENT_READ, children[pid])
            else:
                _forget(key.data, selector)
        children = {pid: child for pid, child in children.items() if not _ended(child)}


def _forget(child: Child, selector: selectors.BaseSelector) -> None:
    """Stop tracking a child whose requester has read its exit or is gone."""
    assert child.link is not None
    selector.unregister(child.link)
    link, child.link = child.link, None
    _ended(child)
    link.close()  # by which the asker learns that the child is no zombie any more


def _ended(child: Child) -> bool:
    """Report the exit of a child to its requester once, and keep it a zombie until that has been read. Returns whether
    the child is no longer tracked."""
    if child.link is None:
        with contextlib.suppress(ChildProcessError):
            return os.waitpid(child.pid, os.WNOHANG)[0] == child.pid
        return True
    end = None if child.reported else os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if end is not None:
        child.reported = True
        with contextlib.suppress(OSError):  # the asker has just gone
            child.link.send(str(end.si_status << 8 if end.si_code == os.CLD_EXITED else end.si_status).encode())
    return False


def _take_over(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Move open files to the descriptors that the program expects."""
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 1000) for fd in fds]  # clear of all the numbers
    for fd in fds:
        os.close(fd)
    for fd, number in zip(above, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def _become(request: Mapping[str, Any]) -> None:
    """Reset the state of this process to that of a new interpreter."""
    environment = request["environment"]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(request["folder"])
    ours = {str(Path.cwd()), "", *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    here = [] if request["safe_path"] else [str(Path.cwd())]
    named = [str(Path(entry).absolute()) for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [*here, *named, *(entry for entry in sys.path if entry not in ours)]
    importlib.invalidate_caches()
    _renew_streams()
    np.random.seed()  # `random` does so by itself; torch's default seed is fixed
    dask.config.paths[:] = getattr(dask.config, "_get_paths")()  # noqa: B009  mypy does not know it; DASK_CONFIG is one
    dask.config.refresh()
    importlib.import_module("distributed.config").initialize_logging(dask.config.config)


def _renew_streams() -> None:
    """Reopen the standard streams after their files were replaced."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        stream = open(  # noqa: SIM115  open for as long as the process is
            number,
            "w" if number else "r",
            buffering=1 if number == 2 or os.isatty(number) else -1,
            encoding=old.encoding,
            errors=old.errors,
            closefd=False,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
        for reference in getattr(logging, "_handlerList"):  # noqa: B009  mypy does not know it
            if getattr(handler := reference(), "stream", None) is old:
                handler.setStream(stream)


def _enter_namespaces(beside: int) -> None:
    """Enter the namespaces of another process, which may have a separate network and mounts."""
    for name, flag in NAMESPACES.items():
        theirs = Path(f"/proc/{beside}/ns/{name}")
        if theirs.readlink() != Path(f"/proc/self/ns/{name}").readlink():
            fd = os.open(theirs, os.O_RDONLY)
            if ctypes.CDLL(None, use_errno=True).setns(fd, flag) != 0:
                raise OSError(ctypes.get_errno(), f"setns to {theirs}")
            os.close(fd)


def _stand_by() -> str | None:
    """Fork a process that becomes the multiprocessing fork server when this one starts it for local workers; a second
    one is started as usual. Returns in that process only: the code it runs."""
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (pid := os.fork()) == 0:
        first.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        data, fds, *_ = socket.recv_fds(second, REQUEST_BYTES, 16)
        if not data:  # whoever could have asked has ended
            os._exit(0)
        second.close()
        request = json.loads(data)
        _take_over(fds, request["numbers"])
        if not request["deaf"]:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        _become(request)
        sys.argv = ["-c"]
        return str(request["code"])
    second.close()
    spawn = util.spawnv_passfds
    waiting = [pid]

    def start(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        code = os.fsdecode(args[-1])
        if not waiting or not code.startswith(FORKSERVER):
            return spawn(path, args, passfds)
        request = {
            "code": code,
            "numbers": list(passfds),
            "deaf": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "safe_path": bool(os.environ.get("PYTHONSAFEPATH")),
        }
        socket.send_fds(first, [json.dumps(request).encode()], list(passfds))
        first.close()
        return waiting.pop()

    util.spawnv_passfds = start
    return None
