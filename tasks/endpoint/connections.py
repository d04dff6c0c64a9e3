"""Limits of an endpoint's connections: their number, and the time for the head of a request.

Agents keep connections while their tools work, so an idle one costs nothing but its place. One that has begun to send a
request, or has never sent any, must come to the end of the request's head in time.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

RETRY_S = 1
"""Seconds after which a client that found no place is told to try again."""
READ_ON_S = 2.0
"""Seconds that what a client goes on sending after its answer is read and dropped: closing at once would reset the
connection, and a client that is still writing would never read why."""


def timed_protocol(head_s: float, max_connections: int) -> type[H11Protocol]:
    """Make a uvicorn protocol class with limits: seconds for the head of a request, and open connections."""

    class TimedProtocol(H11Protocol):
        """A connection whose requests' heads must arrive in time."""

        _late: asyncio.TimerHandle | None = None
        _ended = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                why = f"endpoint.max_connections = {max_connections} are open; try again"
                self._end(503, why, "too_many", f"Retry-After: {RETRY_S}\r\n")
            else:
                self._late = self.loop.call_later(head_s, self._too_late)

        def data_received(self, data: bytes) -> None:
            if not self._ended:
                super().data_received(data)
            if self._ended:
                return
            if self.conn.their_state is not h11.IDLE:
                self._in_time()
            elif self._late is None and not self.transport.is_closing():
                self._late = self.loop.call_later(head_s, self._too_late)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0] and self._late is None:
                self._late = self.loop.call_later(head_s, self._too_late)

        def connection_lost(self, exc: Exception | None) -> None:
            self._in_time()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            """Refuse what is no HTTP, with a line as JSON like all that is refused."""
            self._in_time()
            if self.cycle is not None and not self.cycle.response_complete:  # of a request whose body it was to be
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            self._end(400, "this is no HTTP/1.1: the head or the chunks of a request cannot be read", "invalid_http")

        def _in_time(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

        def _too_late(self) -> None:
            self._late = None
            self._end(408, f"the head of a request took longer than endpoint.body_s = {head_s:g} s", "too_slow")

        def _end(self, status: int, why: str, code: str, more: str = "") -> None:
            """Answer with one line, and close when the client has."""
            self._ended = True
            error: dict[str, Any] = {"message": why, "type": "invalid_request_error", "param": None, "code": code}
            body = json.dumps({"error": error})
            head = f"HTTP/1.1 {status} {code}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            self.transport.write(f"{head}{more}Connection: close\r\n\r\n{body}".encode())
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self._late = self.loop.call_later(READ_ON_S, self.transport.close)

    return TimedProtocol
