"""Run pages linked from the dashboard: a `staleflow view` process for each requested run.

They listen only on the scheduler's machine, so the link works for a browser on that machine or with a forwarded port.
Other browsers get a text with the command. A page's process ends with the scheduler.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import ipaddress
import subprocess
import sys
from pathlib import Path
from typing import Any

from distributed import SchedulerPlugin
from tornado import web

from staleflow.pipeline.cluster.job_registry import JobRegistry

START_LIMIT_S = 60.0
"""Seconds a page may take to start."""
VIEW_COMMAND = (sys.executable, "-P", "-m", "staleflow.cli.main", "view")
"""Command of a run page. -P: a module in the current folder must not replace a library."""


class RunPages(SchedulerPlugin):  # type: ignore[misc]  # untyped
    """The pages started so far, by run folder."""

    def __init__(self) -> None:
        self._pages: dict[Path, tuple[asyncio.subprocess.Process, int]] = {}
        self._lock = asyncio.Lock()

    async def open_page(self, run_dir: Path) -> int:
        """Return the port of a run's page, which is started if it is not running. Raises OSError if it does not
        start."""
        async with self._lock:
            process, port = self._pages.get(run_dir, (None, 0))
            if process is None or process.returncode is not None:
                process = await asyncio.create_subprocess_exec(
                    *VIEW_COMMAND, str(run_dir), "--port", "0", "--no-browser", "--until-eof",
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                )  # fmt: skip
                assert process.stdout is not None
                try:
                    async with asyncio.timeout(START_LIMIT_S):
                        line = await process.stdout.readline()
                    port = int(line.decode().partition("http://")[2].partition("/")[0].rpartition(":")[2])
                except (TimeoutError, ValueError) as error:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                    raise OSError(f"its page could not be started; try staleflow view {run_dir}") from error
                self._pages[run_dir] = (process, port)
            return port

    async def close(self) -> None:
        """Stop all pages, at the end of the scheduler."""
        for process, _ in self._pages.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


class RunPageHandler(web.RequestHandler):
    """Request handler that redirects to the page of a job's run, or explains how to open it."""

    def initialize(self, registry: JobRegistry, pages: RunPages) -> None:
        self._registry = registry
        self._pages = pages

    async def get(self, id: str) -> None:
        job = self._registry.jobs.get(id)
        if job is None:
            raise web.HTTPError(404, f"no job {id}")
        run_dir = Path(job.run_dir)
        command = f"staleflow view {run_dir}"
        if not (run_dir / "config.toml").is_file():
            self._write_message(404, f"The scheduler's machine cannot read {run_dir}. On a machine that can: {command}")
        elif not is_local(self.request.host_name):
            self._write_message(403, f"The run's page is only available on the scheduler's machine. There: {command}")
        else:
            try:
                port = await self._pages.open_page(run_dir)
            except OSError as error:
                self._write_message(500, str(error))
                return
            self.redirect(f"http://{self.request.host_name}:{port}/")

    def _write_message(self, status: int, line: str) -> None:
        self.set_status(status)
        self.write(f"<!doctype html><meta charset=utf-8><title>staleflow</title><p>{html.escape(line)}")


def is_local(name: str) -> bool:
    """Whether a browser that uses this host name for a server runs on the server's machine.

    >>> [is_local(name) for name in ("localhost", "127.0.0.1", "[::1]", "10.0.0.7", "scheduler")]
    [True, True, True, False, False]
    """
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def add_to(scheduler: Any, registry: JobRegistry) -> None:
    """Add the route of the pages to a scheduler's dashboard."""
    pages = RunPages()
    scheduler.add_plugin(pages, name="staleflow-run-pages")
    handler = (r"/staleflow/run/(.+)", RunPageHandler, {"registry": registry, "pages": pages})
    scheduler.http_application.add_handlers(r".*", [handler])
