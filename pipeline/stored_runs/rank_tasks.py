"""Offline training with several processes: the training task leads ranks that are actors on other workers.

If a rank is lost, the training ends with an error. The same command continues it from the newest resume point. With the
same number of ranks, the weights are equal to those of an uninterrupted training.
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

WORKER_RESTART_S = 30.0
"""Seconds that a worker may take to restart after its process has ended."""
POLL_S = 0.5
"""Seconds between two checks for free workers."""
CLOSE_S = 10.0
"""Seconds that another rank may take to leave the group. One that hangs in a step leaves after `collective_s`."""


@contextlib.contextmanager
def lead_group(settings: TrainerSettings, threads: int, *, shared: bool) -> Iterator[DistributedPolicy]:
    """Create the policy of a rank group that the current Dask task leads.

    Args:
        settings: The trainer's settings.
        threads: Number of threads of each rank.
        shared: As in Pool.

    Raises:
        ConfigError: There are not enough workers.
        ActorLost: A rank is lost.
    """
    from distributed import get_client, get_worker
    from distributed.comm.addressing import parse_host_port

    worker, client = get_worker(), get_client()
    addresses = _follower_addresses(Pool(client, shared=shared), worker.address, settings.training.ranks)
    futures = [
        client.submit(TrainerRank, settings, threads, actor=True, workers=[address], pure=False)
        for address in addresses
    ]
    with contextlib.ExitStack() as stack:
        stack.callback(client.cancel, futures)
        try:
            peers = [future.result() for future in futures]
            stack.callback(_close, peers)
            host, loop = parse_host_port(worker.address)[0], worker.loop.asyncio_loop
            policy = DistributedPolicy(settings, threads, host, peers, loop, contextvars.copy_context())
            stack.callback(policy.close)
            yield policy
        except ActorLost as error:
            raise ActorLost(
                f"a rank of the training was lost: {error}; the same command continues from the newest resume point"
            ) from error


def _close(peers: list[Any]) -> None:
    """Close the other ranks. Errors are ignored."""
    for peer in peers:
        with contextlib.suppress(Exception):
            peer.close().result(timeout=CLOSE_S)


def _follower_addresses(pool: Pool, own_address: str, ranks: int) -> list[str]:
    """Addresses of the workers for the other ranks. Waits up to WORKER_RESTART_S for workers that are restarting."""
    deadline_s = time.monotonic() + WORKER_RESTART_S
    while (
        len(addresses := [address for address in pool.free_workers(model=True) if address != own_address]) < ranks - 1
    ):
        if time.monotonic() > deadline_s:
            raise ConfigError(
                f"training.ranks = {ranks}: {len(addresses) + 1} workers are free; start more, or set training.ranks="
                f"{len(addresses) + 1}, which gives weights that are equal up to rounding"
            )
        time.sleep(POLL_S)
    return addresses[: ranks - 1]
