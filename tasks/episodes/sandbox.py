"""The Python tool: runs a model's code in a sandboxed process with limits on time, memory and output."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
from pathlib import Path

from staleflow.tasks.environments.child_programs import without_owner

MAX_OUTPUT_BYTES = 2000
"""Maximum bytes of output; a process that writes more is killed."""
PROGRAM = Path(__file__).with_name("sandbox_child.py")


async def run_python(code: str, *, timeout_s: float, memory_mib: int) -> str:
    """Run code, and return its output, followed by a line that begins with `error:` if it was stopped. When this
    returns or is cancelled, the process and its children have ended. memory_mib: memory limit; 0: 1024."""
    limits = (str(math.ceil(timeout_s)), str((memory_mib or 1024) * 2**20))
    with without_owner():
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", "-u", str(PROGRAM), *limits,  # unbuffered: a timeout loses no output
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
            env={"PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    failure = ""
    output = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            await _send_and_read(process, code, output)
            if len(output) > MAX_OUTPUT_BYTES:
                failure = f"error: stopped after {MAX_OUTPUT_BYTES} bytes of output"
    except TimeoutError:
        failure = f"error: stopped after {timeout_s:.3g} s"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await _reap(process)
    text = output[:MAX_OUTPUT_BYTES].decode("utf-8", "replace").rstrip()
    if not failure and process.returncode not in (0, 1):  # negative: by a signal
        failure = "error: the process was killed"
    return "\n".join(filter(None, (text, failure))) or "(no output)"


async def _send_and_read(process: asyncio.subprocess.Process, code: str, output: bytearray) -> None:
    """Send the code, and append what the process prints to `output`, also if this is cancelled. Reading stops after
    MAX_OUTPUT_BYTES."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(code.encode("utf-8", "replace"))
        await process.stdin.drain()
        process.stdin.close()
    while len(output) <= MAX_OUTPUT_BYTES:
        chunk = await process.stdout.read(MAX_OUTPUT_BYTES + 1)
        if not chunk:
            await process.wait()
            return
        output += chunk


async def _wait_for_exit(process: asyncio.subprocess.Process) -> None:
    """Wait until a process has ended, and drop its remaining output. asyncio reports the end only after the pipes are
    closed, and a stream with a full buffer does not read its pipe."""
    assert process.stdout is not None
    while await process.stdout.read(2**16):
        pass
    await process.wait()


async def _reap(process: asyncio.subprocess.Process) -> None:
    """Wait for a process that was killed, which is short. If this is cancelled in the meantime, it raises only after
    the process has ended."""
    exit_wait = asyncio.ensure_future(_wait_for_exit(process))
    try:
        await asyncio.shield(exit_wait)
    except asyncio.CancelledError:
        await exit_wait
        raise
    finally:
        transport = getattr(process, "_transport", None)
        if transport is not None:
            transport.close()
