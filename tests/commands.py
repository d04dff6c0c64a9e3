"""Runs commands in this process: without a second import of torch, twenty fit in a test."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path

from staleflow.cli.main import main


def command(*args: str | int | Path) -> subprocess.CompletedProcess[str]:
    """Run `staleflow ARGS` in this process; not for commands that start a cluster."""
    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["staleflow", *map(str, args)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        sys.argv = before
    return subprocess.CompletedProcess(sys.argv, code, out.getvalue(), err.getvalue())


def error_line(*args: str | int | Path) -> str:
    """Run `staleflow ARGS`, which must be rejected with exit code 2, one line and no output; returns the line."""
    answer = command(*args)
    assert (answer.returncode, answer.stdout, answer.stderr.count("\n")) == (2, "", 1), (args, answer)
    return answer.stderr
