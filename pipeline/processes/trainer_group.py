"""The trainer's processes, as the one actor that they are for the rest of a run.

Invariants:
- The leading rank has the trainer's name, and hears all that the trainer is asked. The others hear from it alone, but
  for the question whether they are there.
- A rank that is lost is the trainer that is lost: all of them are given up, since what the others wait for will not
  come, and placed anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Protocol

from staleflow.pipeline.config import actor_settings
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.processes.background import gather_or_cancel
from staleflow.pipeline.processes.worker_protocol import ActorArg, PlacedActor, Workers
from staleflow.tasks.actors.trainer import Trainer
from staleflow.tasks.actors.trainer_rank import TrainerRank
from staleflow.tasks.training.rank import rank_name

TRAINER = rank_name(0)


class AskOnce(Protocol):
    """See Actors.ask_once."""

    async def __call__(self, name: str, method: str, *args: Any, deadline: Literal["start_s"]) -> Any: ...


def others(config: RunConfig) -> list[str]:
    """Names of the trainer's ranks but the leading one."""
    return [rank_name(number) for number in range(1, config.training.ranks)]


def role_of(name: str) -> str:
    """The name under which an actor is lost and restored."""
    return TRAINER if name.startswith(f"{TRAINER}-") else name


def members(name: str, placed: Iterable[str]) -> list[str]:
    """The placed actors that are lost if the one of this name is."""
    return [other for other in placed if other == name or role_of(other) == name]


async def place(workers: Workers, ask_once: AskOnce, config: RunConfig, folder: str, points: Path) -> PlacedActor:
    """Place the trainer with all of its ranks, and have them form a group. folder: where it publishes weights. points:
    of its resume points. Raises as Workers.place and Actors.ask_once do."""
    settings, threads, names = actor_settings.trainer_settings(config), config.cluster.threads, others(config)
    lead = await workers.place(
        TRAINER,
        "trainer",
        Trainer,
        settings,
        folder,
        threads,
        config.deadlines.call_s,
        str(points),
        config.training.resume_every,
        config.training.ranks,
    )
    if names:
        await gather_or_cancel(*(workers.place(name, "trainer", TrainerRank, settings, threads) for name in names))
        await ask_once(TRAINER, "form_group", lead.host, *map(ActorArg, names), deadline="start_s")
    return lead
