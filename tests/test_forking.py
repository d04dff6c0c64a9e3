"""Forked processes behave like those of subprocess."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import forking

STARTS: dict[str, Callable[..., Any]] = {"a new interpreter": subprocess.Popen, "forked": forking.Popen}
PROGRAM = """
import asyncio, os, signal, sys, threading
print(__name__, sys.argv[1:], os.getcwd() == sys.path[0], os.environ["TOLD"], "HOME" in os.environ, flush=True)
print(os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid(), file=sys.stderr)
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, threading.current_thread().name, file=sys.stderr)
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, sorted(os.listdir("/proc/self/fd"))[:3], file=sys.stderr)
async def nothing(): pass
asyncio.run(nothing())
match sys.argv[1]:
    case "fail": raise ValueError("as asked")
    case "exit": sys.exit(7)
    case "wait": sys.stdin.read()
"""
WORKERS = """
import multiprocessing, os, signal, sys
def tell(): print("worker", os.getpgid(0) == os.getpgid(os.getppid()), flush=True)
if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    for _ in range(2):
        process = context.Process(target=tell)
        process.start()
        process.join()
    print("joined", process.exitcode, flush=True)
    signal.raise_signal(signal.SIGKILL)
"""


@pytest.fixture(params=STARTS)
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Fixture that starts a program with these arguments and those of Popen."""
    (tmp_path / "told.py").write_text(PROGRAM)
    (tmp_path / "workers.py").write_text(WORKERS)

    def start(module: str, *arguments: str, **how: Any) -> Any:
        command = [sys.executable, "-m", module, *arguments]
        how = {"cwd": tmp_path, "env": {"TOLD": "so", "PATH": os.environ["PATH"]}, "text": True} | how
        return STARTS[request.param](command, **how)

    return start


PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


@pytest.mark.parametrize(("argument", "code"), [("fail", 1), ("exit", 7), ("end", 0)])
def test_a_forked_process_has_its_arguments_environment_and_exit_code(start: Any, argument: str, code: int) -> None:
    for new_session in (False, True):
        with start("told", argument, start_new_session=new_session, **PIPES) as process:
            out, err = process.communicate(timeout=60)
        assert out == f"__main__ ['{argument}'] True so False\n"
        assert err.splitlines()[0] == f"{new_session} {new_session}"
        assert err.splitlines()[1:3] == ["True MainThread", "True ['0', '1', '2']"]
        assert ("ValueError: as asked" in err) == (argument == "fail")
        assert process.returncode == code


def test_a_forked_process_can_be_killed_and_waited_for(start: Any) -> None:
    with start("told", "wait", start_new_session=True, **PIPES) as process:
        assert process.stdout.readline()
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        time.sleep(0.1)
        os.kill(process.pid, 0)  # a zombie until it is waited for
        assert process.wait(10) == -signal.SIGKILL
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)
    with start("told", "wait", **PIPES) as process:
        assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == -signal.SIGINT
        assert process.poll() == -signal.SIGINT


def test_a_forked_process_has_its_terminal(start: Any) -> None:
    first, second = pty.openpty()
    files = {"stdin": second, "stdout": second, "stderr": second}
    with start("told", "wait", start_new_session=True, preexec_fn=None, **files) as process:
        os.close(second)
        seen = b""
        while seen.count(b"\n") < 4:
            seen += os.read(first, 1000)
        if type(process) is forking.Popen:  # subprocess would need a shell between
            os.write(first, b"\x03")
            assert process.wait(10) == -signal.SIGINT
        else:
            process.kill()
    os.close(first)


def test_workers_of_a_forked_process_are_its_children(start: Any) -> None:
    with start("workers", stdout=subprocess.PIPE, start_new_session=True) as process:
        out, _ = process.communicate(timeout=60)
    assert out == "worker True\nworker True\njoined 0\n"
    assert process.returncode == -signal.SIGKILL


def test_a_forked_process_may_use_other_network_and_mount_namespaces(tmp_path: Path) -> None:
    (tmp_path / "spaces.py").write_text(
        "import os\nfor one in 'net', 'mnt': print(os.readlink(f'/proc/self/ns/{one}'))"
    )
    apart = ["unshare", "--net", "--mount", "sh", "-c", "echo; exec sleep 60"]
    with subprocess.Popen(apart, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as other:
        assert other.stdout is not None
        if not other.stdout.readline():
            pytest.skip("this process may not make namespaces")
        command = [*forking.ENTER, str(other.pid), sys.executable, "-m", "spaces"]
        ran = forking.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert ran.stdout.split() == [os.readlink(f"/proc/{other.pid}/ns/{item}") for item in ("net", "mnt")]
        assert ran.stdout.split() != [os.readlink(f"/proc/self/ns/{item}") for item in ("net", "mnt")]
        other.kill()
