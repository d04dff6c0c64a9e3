"""What Ctrl-C does: the first ends a command in order, the second ends the process. SIGTERM is as a first one."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

TERMINATED = 128 + signal.SIGTERM
"""The exit code of a command that was ended by SIGTERM."""
SHOW_CURSOR = "\x1b[?25h"


def end_at_once() -> NoReturn:
    """End this process without cleaning up; its worker processes notice and end too."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    with contextlib.suppress(OSError):
        shown = SHOW_CURSOR if sys.stderr.isatty() else ""
        os.write(2, f"{shown}\nstaleflow: ended at once\n".encode())
    os._exit(130)


@contextlib.contextmanager
def ctrl_c() -> Iterator[None]:
    """Within: a first SIGINT raises KeyboardInterrupt, and a second one ends the process, also while the first one's
    cleaning up goes on. SIGTERM raises SystemExit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = False

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal heard
        if heard:
            end_at_once()
        heard = True
        signal.default_int_handler(number, frame)

    def terminate(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one ends it at once
        raise SystemExit(TERMINATED)

    before, terminated_before = signal.signal(signal.SIGINT, hear), signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        if not heard:  # else cleaning up goes on until the process ends
            signal.signal(signal.SIGINT, before)
            signal.signal(signal.SIGTERM, terminated_before)
