"""The Python tool: runs a model's code in a confined process with limits, which is always ended."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
from pathlib import Path

from staleflow.tasks.environments.child_programs import ending_by_themselves

MAX_OUTPUT_BYTES = 2000
"""Bytes of output that are given back; what writes more is stopped."""
INSIDE = Path(__file__).with_name("sandbox_child.py")


async def run_python(code: str, *, within_s: float, memory_mib: int) -> str:
    """Run code, and return its output or a line that begins with `error:`. When this returns or is cancelled, the
    process and its children have ended. memory_mib: memory limit; 0: 1024."""
    with ending_by_themselves():
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(INSIDE), str(math.ceil(within_s)), str((memory_mib or 1024) * 2**20),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
            env={"PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    why = ""
    output = b""
    try:
        async with asyncio.timeout(within_s):
            output = await _talk(process, code)
            if len(output) > MAX_OUTPUT_BYTES:
                why = f"error: stopped after {MAX_OUTPUT_BYTES} bytes of output"
    except TimeoutError:
        why = f"error: stopped after {within_s:.3g} s"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await _reap(process)
    text = output[:MAX_OUTPUT_BYTES].decode("utf-8", "replace").rstrip()
    if not why and process.returncode and process.returncode > 1:
        why = "error: the process was killed"
    return "\n".join(filter(None, (text, why))) or "(no output)"


async def _talk(process: asyncio.subprocess.Process, code: str) -> bytes:
    """Send the code; returns the output, at most a little more than is wanted."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(code.encode("utf-8", "replace"))
        await process.stdin.drain()
        process.stdin.close()
    output = b""
    while len(output) <= MAX_OUTPUT_BYTES:
        chunk = await process.stdout.read(MAX_OUTPUT_BYTES + 1)
        if not chunk:
            await process.wait()
            return output
        output += chunk
    return output


async def _wait_for_exit(process: asyncio.subprocess.Process) -> None:
    """Wait until a process has ended. What it wrote meanwhile is read: a stream that holds much stops reading its pipe,
    and asyncio does not tell of an end before that of the pipes."""
    assert process.stdout is not None
    while await process.stdout.read(2**16):
        pass
    await process.wait()


async def _reap(process: asyncio.subprocess.Process) -> None:
    """Wait for a process that was killed, also if this is cancelled in the meantime: it takes a moment."""
    with contextlib.suppress(asyncio.CancelledError):
        await _wait_for_exit(process)
    await _wait_for_exit(process)
    transport = getattr(process, "_transport", None)
    if transport is not None:
        transport.close()
