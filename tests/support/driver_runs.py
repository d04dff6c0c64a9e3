"""Driver runs over in-process actors: job configurations in which each call occurs, and queries on runs."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

from staleflow.stores.trajectory import Fate, Trajectory
from tests.support.bodies import Run
from tests.support.scripted import World

# Some responses are long. With MOVING they are interrupted and continue elsewhere, with REDUNDANT they are aborted.
LONG = ("steps=4", "staleness.eta=2", "rollout.max_new_tokens=400")
MOVES = (
    "rollout.migration=largest_gain", "rollout.migration.gain=0", "rollout.cost.k2=0", "rollout.cost.prefill=0",
    "rollout.routing=benchmarks.routing_rules:Random",
)  # fmt: skip
"""Settings that migrate trajectories from a loaded instance to another."""
MOVING = (*LONG, *MOVES)
REDUNDANT = (*LONG, "batch.extra_groups=1", "batch.extra_members=1")
EVALUATED = ("rollout.engine.name=transformers", "model.path=none", "task.eval_prompts=4")
CALLS = {
    "route": MOVING, "interrupt": MOVING, "abort": REDUNDANT, "pull": MOVING, "next_events": MOVING, "report": MOVING,
}  # fmt: skip
"""A job configuration in which each method of an instance is called."""
IN_RUN: defaultdict[str, int] = defaultdict(lambda: 1, pull=2)
"""For each method, the number of its first call during the run: every instance pulls once before."""


def long_ones() -> World:
    return World(length=lambda trajectory: 150 if trajectory % 5 == 3 else 6 + trajectory % 5)


def consumed(run: Run) -> list[Trajectory]:
    return [row.trajectory for row in run.store.trajectories() if row.fate is Fate.CONSUMED]


def evaluations(run: Run) -> list[int]:
    return [e.version for e in run.outcomes.evaluations]


def first_call(run: Run, actor: str, method: str) -> float:
    """Return the time of the first call of a method in the run, on the clock of the loop."""
    return [c.at_s for c in run.workers.calls if (c.actor, c.method) == (actor, method)][IN_RUN[method] - 1]


async def until(run: Run, condition: Any) -> None:
    while run.driver is None or not condition():
        await asyncio.sleep(0.01)
