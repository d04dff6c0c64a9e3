"""What listens where no scheduler has answered: the mistakes that a message can name."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PortState:
    """What listens at a port. mistake: why it is no scheduler that can be used so; empty if it may be one. why: what to
    say of it if it does not answer in time. dask: whether it has greeted as Dask does."""

    mistake: str = ""
    why: str = "what listens there does not answer; it may be busy, or no scheduler"
    dask: bool = False


async def probe_port(host: str, port: int, *, tls: bool) -> PortState:
    """What listens at a port, after three seconds at most. tls: whether it is to be used with TLS. All that is sent to
    a scheduler is a greeting, for it may only be busy."""
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        greeting, answer = await _greeted(host, port)
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


async def _greeted(host: str, port: int) -> tuple[bytes, bytes | None]:
    """What a server says by itself and, if it says nothing, how it answers to Dask's greeting, in which an HTTP server
    finds the end of a request: None if it does not answer, empty if it hangs up. Raises OSError, TimeoutError."""
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
    """The bytes with which a client of Dask's begins, with one entry more."""
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
    """What a server says next; None if it says nothing in that time, empty if it hangs up."""
    try:
        async with asyncio.timeout(within_s):
            return await reader.read(4096)
    except TimeoutError:
        return None
    except OSError:
        return b""
