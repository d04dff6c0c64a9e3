"""Finds Dask ports of this machine that other hosts can reach without TLS. Anyone who connects to one can run code
here."""

from __future__ import annotations

import asyncio
import contextlib
from ipaddress import ip_address

import psutil

from staleflow.pipeline.cluster.port_probe import SCHEDULER_PORT, probe_port


def open_dask_ports() -> list[str]:
    """Find sockets of Dask schedulers, workers and nannies that listen beyond this machine and accept plain TCP.

    Returns:
        Addresses, `IP:PORT`, of such sockets on the scheduler's usual port, and of processes that this user may
        inspect.
    """
    return asyncio.run(_open_ports(_list_candidates()))


def _list_candidates() -> list[tuple[str, int]]:
    """Return (IP, port) of the sockets to probe: of processes whose command names dask, and the scheduler's usual
    port."""
    candidates = set()
    for connection in psutil.net_connections("tcp"):
        if connection.status != psutil.CONN_LISTEN or ip_address(connection.laddr.ip).is_loopback:
            continue
        if connection.laddr.port == SCHEDULER_PORT or (connection.pid and _is_dask(connection.pid)):
            candidates.add((connection.laddr.ip, connection.laddr.port))
    return sorted(candidates)


def _is_dask(pid: int) -> bool:
    """Whether a process, or one that it descends from, was started by a command that names dask."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return any(
            "dask" in word
            for process_or_parent in (process, *process.parents())
            for word in process_or_parent.cmdline()[:4]
        )
    return False


async def _open_ports(candidates: list[tuple[str, int]]) -> list[str]:
    """Return the candidates that send Dask's greeting without TLS, as `IP:PORT`."""
    hosts = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    replies = await asyncio.gather(*(probe_port(hosts.get(ip, ip), port, tls=False) for ip, port in candidates))
    return [f"{ip}:{port}" for (ip, port), reply in zip(candidates, replies, strict=True) if reply.is_dask]
