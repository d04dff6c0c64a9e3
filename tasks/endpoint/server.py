"""The endpoint over HTTP: parses requests, finds their sessions and sends replies.

A refused request gets a reply of one line with the reason, as JSON; other sessions are not affected. Of internal errors
a client sees only that there was one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import uvicorn
import uvicorn.loops.asyncio  # loaded now, so that processes forked from this one have it
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from staleflow.stores.errors import ConfigError, raised_as, strerror
from staleflow.tasks.endpoint.connections import make_protocol
from staleflow.tasks.endpoint.endpoint_metrics import EndpointMetrics
from staleflow.tasks.endpoint.replies import (
    TurnReply,
    chat_completion_body,
    completions_body,
    error_body,
    generate_body,
    stream_events,
)
from staleflow.tasks.endpoint.requests import (
    AUXILIARY_HEADER,
    ChatRequest,
    RequestError,
    SamplingRule,
    parse_chat,
    parse_completions,
    parse_generate,
    parse_json,
)
from staleflow.tasks.endpoint.sessions import RETRY_S, AgentSession, Sessions
from staleflow.tasks.settings.endpoint_settings import EndpointSettings

logger = logging.getLogger(__name__)

UNCOUNTED_PATHS = ("/health", "/metrics")
"""Paths whose requests the metrics do not count, because they come from monitoring."""
KEEP_ALIVE_S = 600
"""Seconds that a connection may be idle. Agents call tools between two requests; if the server closed the connection
just as the next one is sent, clients would see a failure."""
CLIENT_CLOSED = 499
"""Status of requests whose clients closed the connection, in the metrics."""
START_S = 10.0
"""Seconds in which the server must listen."""

RequestParser = Callable[..., list[ChatRequest]]
"""Parses the body of a request, which is for one turn or several."""
ResponseBuilder = Callable[[Sequence[ChatRequest], Sequence[TurnReply]], Response]


class TurnSource(Protocol):
    """Samples the turns for requests with one key. pending_bytes: size of the requests being read or pending."""

    pending_bytes: int

    async def request_turn(self, request: ChatRequest) -> TurnReply: ...


class SessionLookup(Protocol):
    """Finds the turn source of a request by its key: a session or a served policy."""

    def __len__(self) -> int: ...

    def find(self, key: str) -> TurnSource: ...


class EndpointServer:
    """An HTTP endpoint, open between `start` and `stop`. Use from one event loop. served_policy: a policy that is
    served without sessions."""

    def __init__(self, settings: EndpointSettings, served_policy: SessionLookup | None = None) -> None:
        self._settings = settings
        self._served_policy = served_policy
        self._sampling_rule = SamplingRule(settings.config.sampling) if served_policy is None else SamplingRule.OBEY
        self._metrics = EndpointMetrics()
        self.sessions = Sessions(allows_branches=settings.config.changed_past == "branch")
        self._num_in_flight = 0
        self._read_slots = asyncio.Semaphore(settings.config.max_requests)
        self._is_stopping = False
        self._server: uvicorn.Server | None = None
        self._serve_task: asyncio.Task[None] | None = None
        self._start_lock = asyncio.Lock()
        self._address = ""

    @property
    def base_url(self) -> str:
        """The base URL for clients; valid once the endpoint listens."""
        return f"{self._address}/v1"

    @property
    def _lookup(self) -> SessionLookup:
        return self.sessions if self._served_policy is None else self._served_policy

    async def start(self) -> None:
        """Start listening; does nothing if the endpoint listens already. Raises ConfigError if the address cannot be
        used."""
        async with self._start_lock:
            if self._serve_task is not None and not self._serve_task.done():
                return
            config = self._settings.config
            problem = f"endpoint.host = {config.host!r}, endpoint.port = {config.port}: cannot be listened on"
            sock = listening_socket(config.host, config.port, problem)
            tls = {"ssl_certfile": config.tls_cert, "ssl_keyfile": config.tls_key} if config.tls_cert else {}
            try:
                server = ServerWithoutSignalHandlers(
                    uvicorn.Config(
                        self._application(), log_level="critical", lifespan="off", ws="none",
                        http=make_protocol(config.body_s, config.max_connections), server_header=False,
                        access_log=False, timeout_graceful_shutdown=1, timeout_keep_alive=KEEP_ALIVE_S, **tls,  # type: ignore[arg-type]
                    )
                )  # fmt: skip
                server.config.load()
            except (OSError, ValueError) as error:  # of the certificate
                sock.close()
                raise ConfigError(f"endpoint.tls_cert = {config.tls_cert!r}: cannot be used: {error}") from error
            self._server = server
            self._serve_task = asyncio.ensure_future(server.serve(sockets=[sock]))
            host, port = sock.getsockname()[:2]
            url_host = f"[{host}]" if ":" in host else host
            self._address = f"{'https' if tls else 'http'}://{url_host}:{port}"
            if self._settings.unknown_key_grace_s:
                self.sessions.expect_predecessor_keys(self._settings.unknown_key_grace_s)
            async with asyncio.timeout(START_S):
                while not server.started and not self._serve_task.done():
                    await asyncio.sleep(0.005)

    def drain(self) -> None:
        """Refuse pending and new requests with a status on which clients retry."""
        self._is_stopping = True
        self.sessions.refuse_all(_stopping_error())

    async def stop(self) -> None:
        """Refuse all requests, and stop listening."""
        self.drain()
        if self._server is not None and self._serve_task is not None:
            self._server.should_exit = True
            await asyncio.wait({self._serve_task}, timeout=5.0)
            self._serve_task.cancel()

    # -- requests ------------------------------------------------------------------------------------------------

    def _application(self) -> ASGIApp:
        routes = [
            Route("/health", self._get_health, methods=["GET"]),
            Route("/metrics", self._get_metrics, methods=["GET"]),
        ]
        chat = self._turn_handler(parse_chat, _chat_response)
        generate = self._turn_handler(parse_generate, _generate_response)
        if self._served_policy is not None:
            completions = self._turn_handler(parse_completions, _completions_response)
            routes.append(Route("/v1/completions", completions, methods=["POST"]))
        for base in ("", "/session/{key}"):
            routes += [
                Route(f"{base}/v1/chat/completions", chat, methods=["POST"]),
                Route(f"{base}/inference/v1/generate", generate, methods=["POST"]),
                Route(f"{base}/v1/inference/v1/generate", generate, methods=["POST"]),
                Route(f"{base}/v1/models", self._list_models, methods=["GET"]),
                Route(f"{base}/v1/models/{{name:path}}", self._get_model, methods=["GET"]),
            ]
        handlers: dict[Any, Any] = {404: _handle_unknown, 405: _handle_unknown, RequestError: _handle_error}
        return _CountingApp(Starlette(routes=routes, exception_handlers=handlers), self._metrics)

    async def _get_health(self, request: Request) -> Response:
        if self._is_stopping:
            return JSONResponse({"status": "stopping"}, 503, {"Retry-After": f"{RETRY_S:g}"})
        return JSONResponse({"status": "ok"})

    async def _get_metrics(self, request: Request) -> Response:
        return PlainTextResponse(self._metrics.text(sessions=len(self._lookup), in_flight=self._num_in_flight))

    async def _list_models(self, request: Request) -> Response:
        with self._request_slot():
            self._find_session(request)
            return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def _get_model(self, request: Request) -> Response:
        with self._request_slot():
            self._find_session(request)
            return JSONResponse(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        return {"id": self._settings.model, "object": "model", "created": 0, "owned_by": "staleflow"}

    def _turn_handler(self, parse: RequestParser, to_response: ResponseBuilder) -> Any:
        async def handle(request: Request) -> Response:
            # A session's turn always gets a slot; requests to a served policy are refused beyond the limit.
            with self._request_slot(unlimited=self._served_policy is None):
                session = self._find_session(request)
                with _PendingBytes(session, self._settings.config.max_session_kib) as pending:
                    async with self._read_slots:
                        body = await self._read_body(request, pending)
                        fields = parse_json(body)
                        chats = parse(fields, temperature=self._settings.temperature, sampling=self._sampling_rule)
                    auxiliary = request.headers.get(AUXILIARY_HEADER, "").lower() in ("1", "true")
                    chats = [replace(c, num_bytes=len(body), auxiliary=c.auxiliary or auxiliary) for c in chats]
                    del body
                    for chat in chats:
                        self._check_ids(chat)
                    started_s = time.monotonic()
                    replies = await _unless_disconnected(request, [session.request_turn(chat) for chat in chats])
                for reply in replies:
                    self._metrics.observe_turn(time.monotonic() - started_s, len(reply.turn.tokens))
                return to_response(chats, replies)

        return handle

    def _check_ids(self, request: ChatRequest) -> None:
        """Raise RequestError if a token id is beyond the model's vocabulary."""
        size = self._settings.vocabulary
        if size and request.token_ids is not None and (largest := max(request.token_ids)) >= size:
            raise RequestError(400, f"token_ids contains {largest}; the model's vocabulary has {size} tokens")

    def _find_session(self, request: Request) -> TurnSource:
        """Return the session of a request, by its key. Raises RequestError."""
        header = request.headers.get("authorization", "")
        session_id = request.headers.get("x-session-id", "")
        key = request.path_params.get("key") or header.removeprefix("Bearer ").strip() or session_id
        if not key:
            raise RequestError(401, "no key: send it as Authorization: Bearer KEY", "invalid_api_key")
        session = self._lookup.find(key)
        if isinstance(session, AgentSession) and self.sessions.belongs_to_other(session_id, session):
            raise RequestError(403, "X-Session-ID is the id of another session than the key's", "invalid_session")
        return session

    async def _read_body(self, request: Request, pending: _PendingBytes) -> bytes:
        """Read a request's body, up to the limits of size and time. Raises RequestError."""
        config = self._settings.config
        max_bytes = config.max_body_kib * 1024
        too_long_error = RequestError(
            413, f"the body is longer than endpoint.max_body_kib = {config.max_body_kib}", "too_long"
        )
        length = int(request.headers.get("content-length") or 0)
        if length > max_bytes:
            raise too_long_error
        pending.check(length)
        body = bytearray()
        try:
            async with asyncio.timeout(config.body_s):
                async for chunk in request.stream():
                    pending.add(len(chunk))
                    body += chunk
                    if len(body) > max_bytes:
                        raise too_long_error
        except TimeoutError as error:
            raise RequestError(
                408, f"the body took longer than endpoint.body_s = {config.body_s:g} s", "too_slow"
            ) from error
        except ClientDisconnect as error:
            raise RequestError(400, "the connection was closed before the body was complete") from error
        return bytes(body)

    @contextlib.contextmanager
    def _request_slot(self, *, unlimited: bool = False) -> Iterator[None]:
        """Context manager: hold a slot for a request in flight. Raises RequestError if none is free,
        unless `unlimited`."""
        if self._is_stopping:
            raise _stopping_error()
        limit = self._settings.config.max_requests
        if self._num_in_flight >= limit and not unlimited:
            raise RequestError(429, f"endpoint.max_requests = {limit} are in flight; try again", "too_many", RETRY_S)
        self._num_in_flight += 1
        try:
            yield
        finally:
            self._num_in_flight -= 1


class _PendingBytes:
    """Counts the bytes of one request of a session, from their arrival to the reply. max_kib: limit for all pending
    requests of the session together."""

    def __init__(self, session: TurnSource, max_kib: int) -> None:
        self._session, self._max_kib = session, max_kib
        self._num_bytes = 0

    def __enter__(self) -> _PendingBytes:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.pending_bytes -= self._num_bytes

    def add(self, num_bytes: int) -> None:
        """Count bytes that have arrived. Raises RequestError."""
        self._session.pending_bytes += num_bytes
        self._num_bytes += num_bytes
        self.check(self._num_bytes)

    def check(self, num_bytes: int) -> None:
        """Raise RequestError if these bytes and the session's other requests exceed the limit."""
        other_bytes = self._session.pending_bytes - self._num_bytes
        if other_bytes and other_bytes + num_bytes > self._max_kib * 1024:
            reason = (
                f"the session's pending requests have {other_bytes // 1024} KiB, and with this one more than "
                f"endpoint.max_session_kib = {self._max_kib}; try again after a reply"
            )
            raise RequestError(429, reason, "too_many", RETRY_S)


class _CountingApp:
    """Middleware that counts replies. Internal errors are reported without their text."""

    def __init__(self, app: ASGIApp, metrics: EndpointMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        has_headers = False

        async def count_and_send(message: Any) -> None:
            nonlocal has_headers
            if message["type"] == "http.response.start":
                has_headers = True
                if scope["path"] not in UNCOUNTED_PATHS:
                    self._metrics.count(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, count_and_send)
            return
        except Exception:
            logger.exception("the endpoint failed on a request")
            error = RequestError(500, "the endpoint failed on this request; see its log", "internal")
        if not has_headers:
            await _error_response(error)(scope, receive, count_and_send)


class ServerWithoutSignalHandlers(uvicorn.Server):
    """A uvicorn server that does not change the process's signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _unless_disconnected(
    request: Request, turn_requests: Sequence[Coroutine[Any, Any, TurnReply]]
) -> list[TurnReply]:
    """Wait for turns; raise RequestError as soon as one fails or the client disconnects. A session's turn itself
    continues, and a repeated request gets it."""
    disconnect = asyncio.ensure_future(_wait_for_disconnect(request))
    tasks = [asyncio.ensure_future(turn_request) for turn_request in turn_requests]
    turns = asyncio.gather(*tasks)
    pending: set[asyncio.Future[Any]] = {turns, disconnect}
    try:
        await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if not turns.done():
            raise RequestError(CLIENT_CLOSED, "the client closed the connection", "client_gone")
        return turns.result()
    finally:
        for future in (disconnect, *tasks):
            future.cancel()
        await asyncio.wait({*pending, *tasks})


async def _wait_for_disconnect(request: Request) -> None:
    """Wait until the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _stopping_error() -> RequestError:
    return RequestError(503, "the endpoint is stopping; try again", "stopping", RETRY_S)


def _error_response(error: RequestError) -> Response:
    headers = {} if error.retry_s is None else {"Retry-After": f"{error.retry_s:g}"}
    return JSONResponse(error_body(error), error.status, headers)


async def _handle_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _error_response(error)


def _chat_response(requests: Sequence[ChatRequest], replies: Sequence[TurnReply]) -> Response:
    (request,), (reply,) = requests, replies
    if request.stream:
        return Response("".join(stream_events(request, reply)), media_type="text/event-stream")
    return _json(chat_completion_body(request, reply))


def _generate_response(requests: Sequence[ChatRequest], replies: Sequence[TurnReply]) -> Response:
    (request,), (reply,) = requests, replies
    return _json(generate_body(request, reply))


def _completions_response(requests: Sequence[ChatRequest], replies: Sequence[TurnReply]) -> Response:
    return _json(completions_body(requests, replies))


def _json(value: dict[str, Any]) -> Response:
    return Response(json.dumps(value, separators=(",", ":")), media_type="application/json")


async def _handle_unknown(request: Request, error: Exception) -> Response:
    paths = "POST /v1/chat/completions, POST /inference/v1/generate, GET /v1/models, GET /health, GET /metrics"
    status = getattr(error, "status_code", 404)
    return _error_response(RequestError(status, f"unknown path or method; there are {paths}", "not_found"))


def listening_socket(host: str, port: int, problem: str) -> socket.socket:
    """Open a listening socket. Raises ConfigError, which begins with the problem."""
    with raised_as(ConfigError, problem, OSError, describe=strerror):
        (family, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # asyncio sends without delay (TCP_NODELAY) only where the protocol is named.
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
            sock.listen(1024)
        except OSError:
            sock.close()
            raise
    return sock
