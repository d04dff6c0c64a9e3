"""The run page over HTTP: its files, and the answers of the API as JSON. Read-only.

It listens on this machine only unless told otherwise. A page of another site can make a browser ask this server under a
name of its own (DNS rebinding), so only requests for this machine's names are answered. No script, style or image but
its own is allowed, so that nothing a model wrote is ever executed.
"""

from __future__ import annotations

import contextlib
import inspect
import ipaddress
import json
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from staleflow.pipeline.run_page.api import RunApi
from staleflow.stores.errors import ConfigError, StaleflowError
from staleflow.tasks.endpoint.server import listening_socket

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
RESPONSE_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
STATIC_FOLDER = Path(__file__).parent / "static"
PAGE_PATHS = ("/", "/step/{step}", "/group/{group}", "/trajectories", "/trajectory/{id}", "/lanes", "/compare", "/job")
"""Addresses that a browser may open: one page, which reads from its address what to show."""
MAX_QUERY_CHARS = 4_000


class InvalidQuery(ConfigError):
    """A value in the URL is invalid."""


def application(run_api: RunApi, host_names: frozenset[str]) -> ASGIApp:
    """The ASGI application. host_names: those that are accepted, besides addresses and localhost."""

    def api_route(answer: Callable[..., dict[str, Any]]) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                if len(request.url.query) > MAX_QUERY_CHARS:
                    raise InvalidQuery(f"the address has more than {MAX_QUERY_CHARS} characters; shorten the filter")
                return _json(await run_in_threadpool(answer, **_read_query(request.query_params, answer)))
            except ConfigError as error:
                return _json({"error": str(error)}, 400)
            except StaleflowError as error:
                return _json({"error": str(error)}, 500)

        return Route(f"/api/{answer.__name__}", endpoint, methods=["GET"])

    answers = (
        run_api.overview, run_api.steps, run_api.settings, run_api.result_tables, run_api.audit, run_api.groups,
        run_api.batch, run_api.group, run_api.trajectories, run_api.excerpts, run_api.distribution, run_api.trajectory,
        run_api.story, run_api.lanes, run_api.compare,
    )  # fmt: skip
    routes = [
        *map(api_route, answers),
        Mount("/static", StaticFiles(directory=STATIC_FOLDER)),
        *(Route(path, _page, methods=["GET"]) for path in PAGE_PATHS),
    ]
    compression = Middleware(GZipMiddleware, minimum_size=10_000, compresslevel=3)  # for readers through a tunnel
    return _RequestFilter(Starlette(routes=routes, middleware=[compression]), host_names)


def _json(value: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(value, separators=(",", ":")), status, media_type="application/json")


async def _page(request: Request) -> Response:
    return FileResponse(STATIC_FOLDER / "index.html")


def _read_query(query: Mapping[str, str], answer: Callable[..., Any]) -> dict[str, Any]:
    """The parameters of a method of the API that a URL has, in their types. Raises InvalidQuery."""
    parameters = inspect.signature(answer, eval_str=True).parameters
    return {name: READERS[p.annotation](name, query[name]) for name, p in parameters.items() if name in query}


def _read_int(name: str, text: str) -> int:
    if not re.fullmatch(r"-?\d{1,18}", text):
        raise InvalidQuery(f"{name} = {text[:40]!r} is not a whole number")
    return int(text)


def _read_float(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) <= 1e18:
        raise InvalidQuery(f"{name} = {text[:40]!r} is not a number")
    return value


READERS: Mapping[Any, Callable[[str, str], Any]] = {str: lambda _, text: text, int: _read_int, float: _read_float}
"""Functions that read a value of each type. Arguments: name and text of the value."""


class _RequestFilter:
    """Refuses other methods than GET and HEAD and names that are not this machine's, and adds RESPONSE_HEADERS to
    answers."""

    def __init__(self, app: ASGIApp, host_names: frozenset[str]) -> None:
        self._app = app
        self._host_names = host_names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name.lower().encode(), value.encode()) for name, value in RESPONSE_HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *headers]}
            await send(message)

        host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
        app = self._app
        if scope["method"] not in ("GET", "HEAD"):
            app = PlainTextResponse("only GET", 405)
        elif not is_allowed_host(host, self._host_names):
            app = PlainTextResponse(f"this server does not answer to {host!r}; start it with --host", 421)
        await app(scope, receive, send_with_headers)


def is_allowed_host(host: str, host_names: frozenset[str]) -> bool:
    """Whether a Host header is accepted: an address, which no other site can claim, localhost, or one of `host_names`.

    >>> [is_allowed_host(host, frozenset({"box"})) for host in ("127.0.0.1:80", "[::1]:80", "box", "evil.example", "")]
    [True, True, True, False, False]
    """
    name = host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]
    if name.lower() in host_names | {"localhost"}:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def listen(host: str, port: int, *, exactly: bool) -> socket.socket:
    """Open a socket that listens on a port, or on a free one if that is taken, unless `exactly` that port is required.
    Raises ConfigError."""
    if not exactly:
        with contextlib.suppress(ConfigError):
            return listening_socket(host, port, "")
    return listening_socket(host, port if exactly else 0, f"--host {host}, --port {port}: cannot be listened on")


def make_server(run_api: RunApi, host: str) -> uvicorn.Server:
    """Create a server. Its `run(sockets=[...])` serves until it is interrupted. host: name on which it listens."""
    host_names = frozenset({host.lower(), socket.gethostname().lower()})
    return uvicorn.Server(
        uvicorn.Config(
            application(run_api, host_names), log_level="warning", lifespan="off", ws="none", server_header=False,
            timeout_graceful_shutdown=1,
        )
    )  # fmt: skip
