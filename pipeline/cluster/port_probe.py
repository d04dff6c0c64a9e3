"""Finds out what listens at an address where no Dask scheduler has answered, for a precise error message."""

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

PORT = 8786
"""Default port of a Dask scheduler."""
RESOLVE_S = 5.0
"""Timeout for resolving a host name, in seconds."""
SPEAKS_FIRST_S = 0.5
"""Seconds within which a scheduler sends its greeting to a new connection."""
ANSWER_S = 1.0
"""Timeout of a connection, and of the answer of another server, in seconds."""


async def resolve(host: str, within_s: float = RESOLVE_S) -> str:
    """Return why a host name cannot be resolved; empty if it can. Runs in a thread that is not joined, because an
    unreachable name server takes minutes."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PortState:
    """What listens at a port. mistake: why it cannot be used as a scheduler; empty if it may be one. why: reason
    if it does not answer in time. dask: whether it sent Dask's greeting."""

    mistake: str = ""
    why: str = "what listens there does not answer; it may be busy, or no scheduler"
    dask: bool = False


async def probe_port(host: str, port: int, *, tls: bool) -> PortState:
    """Find out what listens at a port, within three seconds. Only a greeting is sent, since it may be a busy scheduler.
    tls: whether the client uses TLS."""
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        greeting, answer = await _read_greeting(host, port)
    except (OSError, TimeoutError) as error:
        return PortState(why=f"it cannot be reached: {os.strerror(error.errno) if error.errno else 'no answer'}")
    if b"pickle-protocol" in greeting + (answer or b""):
        if tls:
            return PortState(mistake=f"it does not use TLS; use tcp://{where}")
        return PortState(dask=True, why="it is there, but too busy to answer")
    if greeting:
        return PortState(mistake=f"another server answers there: {greeting[:40]!r}")
    if answer is None:
        return PortState()
    if answer.startswith(b"HTTP/") or b"<html" in answer[:200].lower():
        usually = "" if port == PORT else f"; the scheduler's port is usually {PORT}"
        return PortState(mistake=f"an HTTP server answers there, such as Dask's dashboard{usually}")
    if not tls and await _speaks_tls(host, port):
        return PortState(mistake=f"it requires TLS; use tls://{where} with --tls-ca-file, --tls-cert and --tls-key")
    return PortState()


async def _read_greeting(host: str, port: int) -> tuple[bytes, bytes | None]:
    """Read a server's greeting and, if there is none, its answer to Dask's greeting: None if none, empty if the
    server closes the connection. The greeting also ends an HTTP request. Raises OSError, TimeoutError."""
    async with _connected(host, port) as (reader, writer):
        greeting = await _read(reader, SPEAKS_FIRST_S)
        if greeting:
            return greeting, b""
        writer.write(_greeting())
        return b"", await _read(reader, ANSWER_S)


async def _speaks_tls(host: str, port: int) -> bool:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        async with _connected(host, port, ssl=context):
            return True
    except ssl.SSLError as error:
        return "ALERT" in str(error.reason)  # it refuses the handshake, for want of a certificate
    except (OSError, TimeoutError):
        return False


def _greeting() -> bytes:
    """The greeting of a Dask client, with one more entry that ends an HTTP request."""
    frames = dumps({"compression": None, "python": sys.version_info[:3], "pickle-protocol": 4, "end": "\r\n\r\n"})
    head = pack_frames_prelude(frames)
    return b"".join((struct.pack("Q", len(head)), head, *frames))


@contextlib.asynccontextmanager
async def _connected(
    host: str, port: int, **options: Any
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection's reader and writer. Raises OSError, TimeoutError."""
    async with asyncio.timeout(ANSWER_S):
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
