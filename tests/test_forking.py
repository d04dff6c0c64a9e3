"""Forked processes behave like those of subprocess."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import forking

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


@pytest.fixture
def start(tmp_path: Path) -> Any:
    """Fixture that starts a program with these arguments and those of Popen."""
    (tmp_path / "told.py").write_text(PROGRAM)

    def start(module: str, *arguments: str, **how: Any) -> Any:
        command = [sys.executable, "-m", module, *arguments]
        environment = {"TOLD": "so", "PATH": os.environ["PATH"]}
        return forking.Popen(command, cwd=tmp_path, env=environment, text=True, **how)

    return start


PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


@pytest.mark.parametrize(("argument", "code"), [("fail", 1), ("exit", 7)])
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
