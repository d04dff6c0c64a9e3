"""Places the processes of a trainer, which the rest of a run uses as one actor.

Invariants:
- The leading rank has the trainer's name and receives all calls to the trainer. The other ranks are called by it alone,
  except for pings.
- The loss of a rank is the loss of the trainer: all ranks are closed, since the others would wait forever, and placed
  again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from staleflow.pipeline.config import actor_settings
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.processes.background import gather_or_cancel
from staleflow.pipeline.processes.worker_protocol import ActorArg, PlacedActor, Workers
from staleflow.tasks.actors.trainer import Trainer
from staleflow.tasks.actors.trainer_rank import FollowerRank
from staleflow.tasks.training.rank import rank_name

TRAINER = rank_name(0)


def follower_names(config: RunConfig) -> list[str]:
    """Return the names of the trainer's ranks other than the leading one."""
    return [rank_name(number) for number in range(1, config.training.ranks)]


def restored_actor(name: str) -> str:
    """Return the name under which the loss of an actor is recorded and recovered: all ranks count as the trainer."""
    return TRAINER if name.startswith(f"{TRAINER}-") else name


def list_lost_together(name: str, placed: Iterable[str]) -> list[str]:
    """Return the names of the placed actors that are lost together with the actor of this name."""
    return [other for other in placed if restored_actor(other) == restored_actor(name)]


async def place_trainer(
    workers: Workers,
    ask_once: Callable[..., Awaitable[Any]],
    config: RunConfig,
    weights_folder: str,
    resume_points: Path,
) -> PlacedActor:
    """Place the trainer with all its ranks, and connect them to a group. Raises as Workers.place and Actors.ask_once
    do. weights_folder: folder of published weights. resume_points: folder of resume points."""
    settings, threads, names = actor_settings.policy_settings(config), config.cluster.threads, follower_names(config)
    leader = await workers.place(
        TRAINER,
        "trainer",
        Trainer,
        settings,
        weights_folder,
        threads,
        config.deadlines.call_s,
        str(resume_points),
        config.training.resume_every,
        config.training.keep_every,
        config.training.ranks,
    )
    if names:
        await gather_or_cancel(*(workers.place(name, "trainer", FollowerRank, settings, threads) for name in names))
        await ask_once(TRAINER, "form_group", leader.host, *map(ActorArg, names), deadline="start_s")
    return leader
