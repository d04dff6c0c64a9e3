"""Chromium for browser tests, wherever it is installed."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
MISSING = " and ".join(
    name
    for name, there in (("playwright", importlib.util.find_spec("playwright")), ("Chromium", CHROMIUM))
    if not there
)
"""Why browser tests cannot run on this machine; empty if they can."""
REASON = f"needs a browser: {MISSING} not found"

in_browser = pytest.mark.skipif(bool(MISSING), reason=REASON)
"""Mark of tests that use Chromium."""


@contextlib.asynccontextmanager
async def open_browser() -> AsyncIterator[Any]:
    """Start Chromium, which takes two CPU seconds. It belongs to the running event loop."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        # Without a sandbox, since tests run as root in containers; all that is opened is the project's own.
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()


@contextlib.asynccontextmanager
async def open_page(browser: Any = None, **context: Any) -> AsyncIterator[Any]:
    """Open a page in a new browser profile. Raises AssertionError afterwards if the page logged an error or requested
    another host. browser: from `open_browser`; None for a new one. context: arguments of Playwright's `new_context`,
    such as viewport and color_scheme."""
    async with contextlib.AsyncExitStack() as stack:
        profile = await (browser or await stack.enter_async_context(open_browser())).new_context(**context)
        stack.push_async_callback(profile.close)
        page = await profile.new_page()
        page.set_default_timeout(120_000)  # of a machine with a load of 8
        faults: list[str] = []
        hosts: set[str] = set()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda line: faults.extend([line.text] if line.type == "error" else []))
        page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
        yield page
        # The page shows rejected requests; Bokeh reconnects after a lost connection.
        passing = ("400 (Bad Request)", "websocket", "WebSocket")
        assert [fault for fault in faults if not any(words in fault for words in passing)] == []
        assert len(hosts) <= 1
