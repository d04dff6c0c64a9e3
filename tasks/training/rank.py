"""A process's place in the group of processes that train one model. Loads no torch."""

from __future__ import annotations

import socket
from dataclasses import dataclass

COLLECTIVE_TIMEOUT_S = 1800.0
"""Seconds that a rank waits for the others at most. In a run, one that hangs is found sooner, by the driver's
deadlines: this ends threads whose run has ended. Nor does it say that one hangs if others wait until it has written its
shards or a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Place `number` of `count`. host, port: where the store listens by which the group's processes find each other.
    listener: on the leading rank, the descriptor of the socket that it listens at, unless another process has it."""

    number: int = 0
    count: int = 1
    host: str = ""
    port: int = 0
    listener: int | None = None

    @property
    def leads(self) -> bool:
        """Whether this process writes what the group has only one of: published weights, checkpoints, metrics."""
        return self.number == 0


ALONE = Rank()
"""The place of a trainer of one process. It needs no group."""


def rank_name(number: int) -> str:
    """The name of a rank's actor.

    >>> rank_name(0), rank_name(2)
    ('trainer', 'trainer-2')
    """
    return f"trainer-{number}" if number else "trainer"


def listening() -> socket.socket:
    """A socket that listens at a free port of this host, at all of its addresses."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
