"""Offline training by several processes: the task that trains starts one for each further rank, on a worker of its own.

Invariants:
- The leading rank tells the others, through the group itself, what to do next: all do the same in the same order.
- A rank that is lost ends the training of all, with a line that says so; the same command goes on from the newest
  resume point. With as many ranks as before the weights are those of a training that was not disturbed.
"""

from __future__ import annotations

import contextlib
import gc
import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from staleflow.pipeline.stored_runs.pool import Pool
from staleflow.stores.errors import ActorLost, ConfigError, StaleflowError
from staleflow.tasks.actors.trainer_rank import discard, is_lost_rank_error
from staleflow.tasks.training.microbatches import Row
from staleflow.tasks.training.rank import Rank, listening

if TYPE_CHECKING:
    from staleflow.stores.weights.weight_hash import Weights
    from staleflow.tasks.training.policy import TrainerSettings
    from staleflow.tasks.training.policy_trainer import PolicyTrainer

T = TypeVar("T")

COME_BACK_S = 30.0
"""Seconds that a worker may take to come back after its process has ended."""
LOOK_S = 0.5
"""Seconds between two looks."""


class RankZeroPolicy:
    """The policy of a rank group, as its leading rank uses it."""

    def __init__(self, policy: PolicyTrainer) -> None:
        self._policy = policy

    def step(self, step: int, rows: Sequence[Row]) -> dict[str, float]:
        """Train on rows, which the other ranks are sent by the policy itself."""
        self._tell("step", step, ())
        return self._policy.step(step, rows)

    def fine_tune(self, step: int) -> dict[str, float]:
        self._tell("fine_tune", step)
        return self._policy.fine_tune(step)

    def published(self, use: Callable[[Weights], T]) -> T:
        self._tell("published", discard)
        return self._policy.published(use)

    def save(self, folder: Path, published: Path) -> None:
        self._policy.save(folder, published)

    def save_state(self, path: Path) -> None:
        self._tell("save_state", path)
        try:
            self._policy.save_state(path)
        except RuntimeError as error:
            if is_lost_rank_error(error):  # the disk is not to blame
                raise _lost(error) from error
            raise

    def load_state(self, path: Path) -> None:
        self._tell("load_state", path)
        self._policy.load_state(path)

    def close(self) -> None:
        """End the rank group."""
        self._policy.group.broadcast(None, idle=True)
        self._policy.close()

    def abandon(self, error: BaseException) -> None:
        """Leave the group wherever it is, and this policy with it. Ranks that wait to be told what comes next fail at
        once, those in the middle of a step after `collective_s`. gloo's connections end with the last reference to
        them, so the frames of `error`, of which some refer to them, are cleared, too."""
        self._policy.close()
        del self._policy
        traceback.clear_frames(error.__traceback__)
        gc.collect()

    def _tell(self, method: str, *args: Any) -> None:
        self._policy.group.broadcast((method, *args), idle=True)


@contextlib.contextmanager
def lead_group(settings: TrainerSettings, *, shared: bool) -> Iterator[RankZeroPolicy]:
    """Create the policy of a rank group that the present Dask task leads.

    Args:
        settings: The trainer's settings.
        shared: As in Pool.

    Raises:
        ConfigError: There are not enough workers.
        ActorLost: A rank is lost.
    """
    from distributed import get_client, get_worker
    from distributed.comm.addressing import parse_host_port

    from staleflow.tasks.training.policy_trainer import PolicyTrainer

    worker, client, ranks = get_worker(), get_client(), settings.training.ranks
    addresses = _others(Pool(client, shared=shared), worker.address, ranks)
    with listening() as listener:
        place = Rank(count=ranks, host=parse_host_port(worker.address)[0], port=listener.getsockname()[1])
        pickled = pickle.dumps(settings)
        following = [
            client.submit(_follow, pickled, replace(place, number=number), workers=[address], pure=False)
            for number, address in enumerate(addresses, start=1)
        ]
        policy = RankZeroPolicy(PolicyTrainer(settings, replace(place, listener=listener.fileno())))
        try:
            with ended(policy):
                yield policy
        finally:
            client.cancel(following)


@contextlib.contextmanager
def ended(policy: RankZeroPolicy) -> Iterator[None]:
    """End the group with the block, however that ends: its other ranks hold workers as long as they wait."""
    try:
        yield
        policy.close()
    except StaleflowError:
        with contextlib.suppress(Exception):
            policy.close()  # the others wait to be told what comes next
        raise
    except BaseException as error:
        with contextlib.suppress(Exception):
            policy.abandon(error)  # in the middle of a step they would not hear that there is nothing more to do
        if isinstance(error, RuntimeError) and is_lost_rank_error(error):
            raise _lost(error) from error
        raise


def _lost(error: RuntimeError) -> ActorLost:
    reason = str(error).splitlines()[0]
    return ActorLost(
        f"the ranks of the training have lost each other: {reason}; the same command goes on from the newest resume "
        "point"
    )


def _others(pool: Pool, own: str, ranks: int) -> list[str]:
    """Addresses of the workers of the other ranks. A worker that has just ended may come back."""
    until = time.monotonic() + COME_BACK_S
    while len(addresses := [address for address in pool.free(model=True) if address != own]) < ranks - 1:
        if time.monotonic() > until:
            raise ConfigError(
                f"training.ranks = {ranks}: {len(addresses) + 1} workers are free; start more, or set training.ranks="
                f"{len(addresses) + 1}, which gives weights that are equal up to rounding"
            )
        time.sleep(LOOK_S)
    return addresses[: ranks - 1]


def _follow(settings: bytes, rank: Rank) -> None:
    """Be a rank, as a Dask task, until the leading one ends the group."""
    from staleflow.tasks.training.policy_trainer import PolicyTrainer

    policy = PolicyTrainer(pickle.loads(settings), rank)
    own: Any = None
    try:
        while (call := policy.group.broadcast(own, idle=True)) is not None:
            method, *args = call
            getattr(policy, method)(*args)
    finally:
        policy.close()
