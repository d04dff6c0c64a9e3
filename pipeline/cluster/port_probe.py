"""Finds out what listens at an address where no Dask scheduler has replied, for a precise error message."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import struct
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from distributed.protocol.core import dumps
from distributed.protocol.utils import pack_frames_prelude

SCHEDULER_PORT = 8786
"""Default port of a Dask scheduler."""
RESOLVE_S = 5.0
"""Timeout for resolving a host name, in seconds."""
GREETING_S = 0.5
"""Seconds within which a scheduler sends its greeting to a new connection."""
REPLY_S = 1.0
"""Timeout of a connection, and of another server's reply, in seconds."""


async def resolution_error(host: str, within_s: float = RESOLVE_S) -> str:
    """Return why a host name cannot be resolved; empty if it can. Runs in a thread that is not joined, because an
    unreachable name server takes minutes."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[str] = loop.create_future()

    def done(reason: str) -> None:
        if not future.done():
            future.set_result(reason)

    def resolve_host() -> None:
        try:
            socket.getaddrinfo(host, None)
            reason = ""
        except (OSError, UnicodeError) as error:
            reason = f"the host name {host} cannot be resolved: {getattr(error, 'strerror', None) or error}"
        with contextlib.suppress(RuntimeError):  # the loop is closed, so the result is not awaited any more
            loop.call_soon_threadsafe(done, reason)

    threading.Thread(target=resolve_host, daemon=True, name="resolve").start()
    try:
        async with asyncio.timeout(within_s):
            return await future
    except TimeoutError:
        return f"the host name {host} is not resolved within {within_s:g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class PortState:
    """Result of probing a port. error: why the server is not a usable scheduler; empty if it may be one.
    no_reply_reason: why it does not reply in time. is_dask: whether it sent Dask's greeting."""

    error: str = ""
    no_reply_reason: str = "the server there does not reply; it may be busy, or not a scheduler"
    is_dask: bool = False


async def probe_port(host: str, port: int, *, tls: bool) -> PortState:
    """Find out what listens at a port, within three seconds. Sends only a greeting, because it may be a busy scheduler.
    tls: whether the client uses TLS."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        greeting, reply = await _read_greeting(host, port)
    except (OSError, TimeoutError) as error:
        reason = os.strerror(error.errno) if error.errno else "no answer"
        return PortState(no_reply_reason=f"it cannot be reached: {reason}")
    if b"pickle-protocol" in greeting + (reply or b""):
        if tls:
            return PortState(error=f"it does not use TLS; use tcp://{address}")
        return PortState(is_dask=True, no_reply_reason="it is too busy to reply")
    if greeting:
        return PortState(error=f"another server answers there: {greeting[:40]!r}")
    if reply is None:
        return PortState()
    if reply.startswith(b"HTTP/") or b"<html" in reply[:200].lower():
        hint = "" if port == SCHEDULER_PORT else f"; the scheduler's port is usually {SCHEDULER_PORT}"
        return PortState(error=f"an HTTP server answers there, such as Dask's dashboard{hint}")
    if not tls and await _uses_tls(host, port):
        return PortState(error=f"it requires TLS; use tls://{address} with --tls-ca-file, --tls-cert and --tls-key")
    return PortState()


async def _read_greeting(host: str, port: int) -> tuple[bytes, bytes | None]:
    """Read a server's greeting and, if there is none, its answer to Dask's greeting: None if none, empty if the
    server closes the connection. The greeting also ends an HTTP request. Raises OSError, TimeoutError."""
    async with _connection(host, port) as (reader, writer):
        greeting = await _read(reader, GREETING_S)
        if greeting:
            return greeting, b""
        writer.write(_greeting())
        return b"", await _read(reader, REPLY_S)


async def _uses_tls(host: str, port: int) -> bool:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        async with _connection(host, port, ssl=context):
            return True
    except ssl.SSLError as error:
        return "ALERT" in str(error.reason)  # the server refused the handshake, because the client has no certificate
    except (OSError, TimeoutError):
        return False


def _greeting() -> bytes:
    """Return the greeting of a Dask client, with an additional entry that ends an HTTP request."""
    frames = dumps({"compression": None, "python": sys.version_info[:3], "pickle-protocol": 4, "end": "\r\n\r\n"})
    head = pack_frames_prelude(frames)
    return b"".join((struct.pack("Q", len(head)), head, *frames))


@contextlib.asynccontextmanager
async def _connection(
    host: str, port: int, **options: Any
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Context manager: connect, and yield the connection's reader and writer. Raises OSError, TimeoutError."""
    async with asyncio.timeout(REPLY_S):
        reader, writer = await asyncio.open_connection(host, port, **options)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def _read(reader: asyncio.StreamReader, within_s: float) -> bytes | None:
    """Read from a server; None after a timeout, empty if it closes the connection."""
    try:
        async with asyncio.timeout(within_s):
            return await reader.read(4096)
    except TimeoutError:
        return None
    except OSError:
        return b""
