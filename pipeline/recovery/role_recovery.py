"""Restores lost actors that have state, while engines continue to sample: the trainer from its resume point, the
trajectory server from store and spool.

Invariants:
- A role that is being restored is asked nothing else, though its actor is there: it has neither its group nor its
  weights yet.
- A role is restored once for each loss, however many callers saw it: they wait for the same restoration, and are asked
  again once it is there. All that the trajectory server is asked may be asked twice.
- A trajectory server that is back has all that the one before it acknowledged (stores/in_flight/spool.py).
- A trainer that is back holds the weights that were published last, by their fingerprint. It has trained the steps
  since its resume point again, on the same rows in the same order; if it comes to other weights, as kernels that are
  not deterministic may, the run ends and says so. Resuming it repeats those steps, so that the store has one history.
- A process of a role that answers nothing for deadlines.silent_s is lost, whatever it was asked to do and how long that
  may take.
- The trainer's ranks are one role: the loss of one is that of all (trainer_group.py).
- A loss counts like any other: too many within an hour end the run, and so does one without a free worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from staleflow.pipeline.processes.background import gather_or_cancel
from staleflow.pipeline.processes.clock import now_s
from staleflow.pipeline.processes.trainer_group import role_of
from staleflow.pipeline.processes.worker_protocol import NoFreeWorker, PlacedActor
from staleflow.stores.errors import ActorLost, ActorSilent
from staleflow.stores.trajectory import PolicyVersion
from staleflow.stores.weights.resume_points import ResumePoints

logger = logging.getLogger(__name__)

WATCH_S = 2.0
"""Seconds between two looks whether the roles are there."""


class Roles(Protocol):
    """The methods of Actors that recovery needs."""

    @property
    def trained_fingerprints(self) -> Mapping[PolicyVersion, str]: ...

    async def ask(self, name: str, method: str, *args: Any, deadline: Literal["silent_s"]) -> Any: ...

    async def ask_once(self, name: str, method: str, *args: Any) -> Any: ...

    def record_loss(self, name: str, lost: ActorLost, now: float) -> None: ...

    async def place_server(self, begin_s: float, *, resumed: bool) -> PlacedActor: ...

    async def place_trainer(self) -> PlacedActor: ...

    async def publish_initial(self, version: PolicyVersion, fingerprint: str = "") -> None: ...

    async def repeat_step(self, step: int) -> None: ...


class RoleRecovery:
    """Restores the actors of one run that have state. points: folder of its resume points."""

    def __init__(self, actors: Roles, points: Path, every: int, ranks: Sequence[str] = ()) -> None:
        """every: training steps between two resume points; 0 for none. ranks: names of the trainer's ranks other than
        the leading one."""
        self._actors = actors
        self._ranks = ranks
        self._points = ResumePoints(points)
        self._every = every
        self._elapsed_s: Callable[[], float] | None = None
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._done_s: dict[str, float] = {}
        self._failed: dict[str, BaseException] = {}
        """Why a role could not be restored, which ends the run."""

    def begin(self, elapsed_s: Callable[[], float]) -> None:
        """Start restoring lost actors. elapsed_s: seconds of the run so far."""
        self._elapsed_s = elapsed_s

    @property
    def busy(self) -> bool:
        """Whether an actor is being restored. Each part of that has a deadline."""
        return bool(self._under_way)

    async def wait_until_settled(self, name: str) -> None:
        """Wait while an actor is being restored; it is placed before it has its state. Raises ActorLost if restoring
        fails."""
        if (task := self._under_way.get(role_of(name))) is not None:
            await asyncio.shield(task)

    async def watch(self) -> None:
        """Ping actors that nobody calls, until cancelled, to detect their loss: engines may wait for weights that were
        lost with one. A busy process answers, since its work runs in threads beside its event loop; a stopped one does
        not."""
        while True:
            await asyncio.sleep(WATCH_S)
            await gather_or_cancel(
                self._actors.ask("trainer", "version", deadline="silent_s"),
                *(self._actors.ask(rank, "ping", deadline="silent_s") for rank in self._ranks),
                self._actors.ask("server", "held_out_notice", deadline="silent_s"),
            )

    async def end(self) -> None:
        """Stop restoring lost actors."""
        self._elapsed_s = None
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def wait_until_restored(self, lost: ActorLost, called_s: float) -> None:
        """Wait until an actor that a call found lost is restored. called_s: time of the call.

        Raises:
            ActorLost: Restoring failed, or `lost` itself if the actor cannot be restored. Also during the run's start,
                when another attempt would miss its deadline again.
        """
        role = role_of(lost.actor)
        if role not in ("trainer", "server") or self._elapsed_s is None:
            raise lost
        if isinstance(lost, ActorSilent) and not self._actors.trained_fingerprints:
            raise lost
        if role in self._failed:
            raise self._failed[role]
        if self._done_s.get(role, -1.0) >= called_s:
            return
        task = self._under_way.get(role)
        if task is None:
            task = self._under_way[role] = asyncio.ensure_future(self._restore(role, lost, self._elapsed_s))
            task.add_done_callback(lambda done: self._ended(role, done))
        await asyncio.shield(task)

    def _ended(self, role: str, done: asyncio.Task[None]) -> None:
        del self._under_way[role]
        if done.cancelled():
            return
        if (error := done.exception()) is None:
            self._done_s[role] = now_s()
        else:
            self._failed[role] = error

    async def _restore(self, role: str, lost: ActorLost, elapsed_s: Callable[[], float]) -> None:
        """Place a role again until it comes back. lost: the actor of it that was lost. Raises ActorLost."""
        while True:
            point = self._newest_point(max(self._actors.trained_fingerprints, default=PolicyVersion(0)))
            if role == "trainer" and point is None:
                raise lost
            self._actors.record_loss(role, lost, elapsed_s())
            try:
                if role == "trainer":
                    await self._restore_trainer(point or PolicyVersion(0))
                else:
                    placed = await self._actors.place_server(elapsed_s(), resumed=True)
                    await self._actors.ask_once("server", "keep_time", elapsed_s())
                    logger.warning("the trajectory server is back on %s with its store and spool", placed.address)
                return
            except NoFreeWorker as error:
                raise ActorLost(f"{lost}; {error}", role) from error
            except ActorLost as again:
                if role_of(again.actor) != role:
                    raise
                lost = again

    def _newest_point(self, version: PolicyVersion) -> PolicyVersion | None:
        """The version of the newest complete resume point up to `version`; the base model is one. None if the run
        writes none."""
        if version and not self._every:
            return None
        return max((v for v in self._points.complete_versions() if v <= version), default=PolicyVersion(0))

    async def _restore_trainer(self, point: PolicyVersion) -> None:
        """Place a trainer, and have it train again what was trained after the point. If nothing was published yet, the
        start of the run goes on with it."""
        actors = self._actors
        placed = await actors.place_trainer()
        if not actors.trained_fingerprints:
            logger.warning("the trainer starts again, on %s", placed.address)
            return
        version = max(actors.trained_fingerprints)
        logger.warning(
            "the trainer is back on %s with version %d from its resume point%s",
            placed.address,
            point,
            f"; it trains steps {point} to {version - 1} again" if point < version else "",
        )
        await actors.publish_initial(point, actors.trained_fingerprints.get(point, ""))
        for step in range(point, version):
            await actors.repeat_step(step)
