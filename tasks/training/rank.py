"""The rank of a process in the group that trains one model. Does not import torch."""

from __future__ import annotations

import socket
from dataclasses import dataclass

COLLECTIVE_TIMEOUT_S = 1800.0
"""Maximum number of seconds that a rank waits for the others: long enough for them to write their shards or a
checkpoint. A rank that hangs longer fails the step, even within `deadlines.train_s`. This also ends threads whose run
has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Rank `number` of `count`. host, port: address of PyTorch's TCPStore, by which the ranks find each other.
    listener_fd: on the leading rank, the descriptor of the listening socket, unless another process has it."""

    number: int = 0
    count: int = 1
    host: str = ""
    port: int = 0
    listener_fd: int | None = None

    @property
    def leads(self) -> bool:
        """Whether this rank writes what the group has only once: published weights, checkpoints, metrics."""
        return self.number == 0


SINGLE_RANK = Rank()
"""The rank of a trainer of one process, without a group."""


def rank_name(number: int) -> str:
    """The name of a rank's actor.

    >>> rank_name(0), rank_name(2)
    ('trainer', 'trainer-2')
    """
    return f"trainer-{number}" if number else "trainer"


def open_listening_socket() -> socket.socket:
    """Open a socket that listens on a free port on all addresses of this host."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
