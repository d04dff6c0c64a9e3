"""What listens where no scheduler has answered: the mistakes that a message can name."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from typing import Any

PORT = 8786
"""The port of a Dask scheduler, unless it is told another."""
RESOLVE_S = 5.0
"""Seconds within which a host name must be resolved."""
SPEAKS_FIRST_S = 0.5
"""Seconds within which a scheduler greets whoever connects."""
ANSWER_S = 1.0
"""Seconds within which another server is expected to connect, or to answer a request."""


async def resolve(host: str, within_s: float = RESOLVE_S) -> str:
    """Why a host name cannot be resolved; empty if it can. In a thread of its own, which nobody waits for: a name
    server that does not answer takes minutes."""
    loop = asyncio.get_running_loop()
    resolved: asyncio.Future[str] = loop.create_future()

    def done(why: str) -> None:
        if not resolved.done():
            resolved.set_result(why)

    def work() -> None:
        try:
            socket.getaddrinfo(host, None)
            why = ""
        except (OSError, UnicodeError) as error:
            why = f"the host name {host} cannot be resolved: {getattr(error, 'strerror', None) or error}"
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(done, why)

    threading.Thread(target=work, daemon=True, name="resolve").start()
    try:
        async with asyncio.timeout(within_s):
            return await resolved
    except TimeoutError:
        return f"the host name {host} is not resolved within {within_s:g} s"


async def mistake_at(host: str, port: int, *, tls: bool) -> str:
    """Why what listens at a port is no scheduler that can be used so; empty if it may be one. tls: whether it was to be
    used with TLS. Takes three seconds at most; sends nothing to a scheduler that works."""
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    greeting, answer = await _greeted(host, port)
    if b"pickle-protocol" in greeting:
        return f"it does not use TLS; use tcp://{where}" if tls else ""
    if greeting:
        return f"another server answers there: {greeting[:40]!r}"
    if answer.startswith(b"HTTP/"):
        usually = "" if port == PORT else f"; the scheduler's port is usually {PORT}"
        return f"an HTTP server answers there, such as Dask's dashboard{usually}"
    if not tls and await _speaks_tls(host, port):
        return f"it requires TLS; use tls://{where} with --tls-ca-file, --tls-cert and --tls-key"
    return ""


async def _greeted(host: str, port: int) -> tuple[bytes, bytes]:
    """What a server says by itself, and, if it says nothing, how it answers an HTTP request."""
    async with _connected(host, port) as streams:
        if streams is None:
            return b"", b""
        reader, writer = streams
        greeting = await _read(reader, SPEAKS_FIRST_S)
        if greeting:
            return greeting, b""
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        return b"", await _read(reader, ANSWER_S)


async def _speaks_tls(host: str, port: int) -> bool:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        async with _connected(host, port, ssl=context) as streams:
            return streams is not None
    except ssl.SSLError as error:
        return "ALERT" in str(error.reason)  # it refuses the handshake, for want of a certificate


@contextlib.asynccontextmanager
async def _connected(host: str, port: int, **options: Any) -> Any:
    """A connection's reader and writer; None if there is none within `ANSWER_S`. Raises ssl.SSLError."""
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(host, port, **options)
    except ssl.SSLError:
        raise
    except (OSError, TimeoutError):
        yield None
        return
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def _read(reader: asyncio.StreamReader, within_s: float) -> bytes:
    try:
        async with asyncio.timeout(within_s):
            return await reader.read(4096)
    except (OSError, TimeoutError):
        return b""
