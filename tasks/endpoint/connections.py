"""Limits of an endpoint's connections: their number, and the time for the head of a request.

Agents keep connections open while their tools work, so an idle connection only counts towards the limit. A new
connection, and one on which a request has begun, must send the complete head of the request in time.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

RETRY_AFTER_S = 1
"""Seconds in the Retry-After header of the error when too many connections are open."""
LINGER_S = 2.0
"""Seconds between an error response and closing the connection, in which input is read and dropped. Closing at once
would reset the connection, and a client that is still writing would never read the error."""


def make_protocol(head_s: float, max_connections: int) -> type[H11Protocol]:
    """Make the class of the endpoint's connections for uvicorn. head_s: seconds for the head of a request.
    max_connections: open connections; more are refused."""

    class TimedProtocol(H11Protocol):
        """A connection whose requests' heads must arrive in time."""

        _timer: asyncio.TimerHandle | None = None
        _refused = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                message = f"endpoint.max_connections = {max_connections} are open; try again"
                self._refuse(503, message, "too_many", f"Retry-After: {RETRY_AFTER_S}\r\n")
            else:
                self._timer = self.loop.call_later(head_s, self._head_timed_out)

        def data_received(self, data: bytes) -> None:
            if not self._refused:
                super().data_received(data)
            if self._refused:
                return
            if self.conn.their_state is not h11.IDLE:
                self._cancel_timer()
            elif self._timer is None and not self.transport.is_closing():
                self._timer = self.loop.call_later(head_s, self._head_timed_out)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0] and self._timer is None:
                self._timer = self.loop.call_later(head_s, self._head_timed_out)

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel_timer()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            """Reply to input that is not HTTP with an error as JSON, like all errors of the endpoint."""
            self._cancel_timer()
            if self.cycle is not None and not self.cycle.response_complete:  # the bad input is in this request's body
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            self._refuse(400, "not HTTP/1.1: the head or the chunks of a request cannot be parsed", "invalid_http")

        def _cancel_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _head_timed_out(self) -> None:
            self._timer = None
            self._refuse(408, f"the head of a request took longer than endpoint.body_s = {head_s:g} s", "too_slow")

        def _refuse(self, status: int, message: str, code: str, headers: str = "") -> None:
            """Send an error response, and close the connection after LINGER_S."""
            self._refused = True
            error: dict[str, Any] = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
            body = json.dumps({"error": error})
            head = f"HTTP/1.1 {status} {code}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            self.transport.write(f"{head}{headers}Connection: close\r\n\r\n{body}".encode())
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self._timer = self.loop.call_later(LINGER_S, self.transport.close)

    return TimedProtocol
