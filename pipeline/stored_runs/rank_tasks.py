"""Offline training by several processes: the task that trains leads ranks that are actors on other workers.

A rank that is lost ends the training of all, with a line that says so; the same command goes on from the newest resume
point. With as many ranks as before the weights are those of a training that was not disturbed.
"""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from staleflow.pipeline.stored_runs.pool import Pool
from staleflow.stores.errors import ActorLost, ConfigError
from staleflow.tasks.actors.trainer_rank import DistributedPolicy, TrainerRank

if TYPE_CHECKING:
    from staleflow.tasks.training.policy import TrainerSettings

COME_BACK_S = 30.0
"""Seconds that a worker may take to come back after its process has ended."""
LOOK_S = 0.5
"""Seconds between two looks."""
CLOSE_S = 10.0
"""Seconds that another rank may take to leave the group; one that hangs in a step leaves it after `collective_s`."""


@contextlib.contextmanager
def lead_group(settings: TrainerSettings, threads: int, *, shared: bool) -> Iterator[DistributedPolicy]:
    """Create the policy of a rank group that the present Dask task leads.

    Args:
        settings: The trainer's settings.
        threads: Of each rank.
        shared: As in Pool.

    Raises:
        ConfigError: There are not enough workers.
        ActorLost: A rank is lost.
    """
    from distributed import get_client, get_worker
    from distributed.comm.addressing import parse_host_port

    worker, client = get_worker(), get_client()
    addresses = _others(Pool(client, shared=shared), worker.address, settings.training.ranks)
    futures = [
        client.submit(TrainerRank, settings, threads, actor=True, workers=[address], pure=False)
        for address in addresses
    ]
    with contextlib.ExitStack() as closing:
        closing.callback(client.cancel, futures)
        try:
            peers = [future.result() for future in futures]
            closing.callback(_close, peers)
            host, loop = parse_host_port(worker.address)[0], worker.loop.asyncio_loop
            policy = DistributedPolicy(settings, threads, host, peers, loop, contextvars.copy_context())
            closing.callback(policy.close)
            yield policy
        except ActorLost as error:
            raise ActorLost(
                f"the ranks of the training have lost each other: {error}; the same command goes on from the newest "
                "resume point"
            ) from error


def _close(peers: list[Any]) -> None:
    """Close the other ranks, as far as they answer."""
    for peer in peers:
        with contextlib.suppress(Exception):
            peer.close().result(timeout=CLOSE_S)


def _others(pool: Pool, own_address: str, ranks: int) -> list[str]:
    """Addresses of the workers of the other ranks. Waits a while for a worker that has just ended to come back."""
    until = time.monotonic() + COME_BACK_S
    while len(addresses := [address for address in pool.free(model=True) if address != own_address]) < ranks - 1:
        if time.monotonic() > until:
            raise ConfigError(
                f"training.ranks = {ranks}: {len(addresses) + 1} workers are free; start more, or set training.ranks="
                f"{len(addresses) + 1}, which gives weights that are equal up to rounding"
            )
        time.sleep(LOOK_S)
    return addresses[: ranks - 1]
