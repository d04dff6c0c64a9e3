"""Restores lost actors that have state, while engines continue to sample: the trainer from its resume point, the
trajectory server from its store and spool.

Invariants:
- While a role is being restored, no other calls are sent to it, not even to a placed actor, because its state is not
  complete yet. Only calls that change and read no state are sent to it, such as `server_answers`, and those of actors
  that got it as an argument once it was placed.
- A role is restored once for each loss, even if several calls notice it: they wait for the same restoration, and are
  repeated then. So all calls to the trajectory server may be repeated.
- A restored trajectory server has all data that the lost one acknowledged (stores/in_flight/spool.py).
- A restored trainer has the last published weights, as their fingerprint proves. It repeats the steps since its resume
  point, on the same rows in the same order. If this gives other weights, because kernels are not deterministic, the run
  ends with an error. Resuming it trains those steps again, so that the store has one history.
- Once all actors are placed, a role's process that does not reply for deadlines.silent_s is lost, even during a call
  with a longer deadline. While the role is being restored, only the deadlines of its calls apply.
- The trainer's ranks are one role: the loss of one rank is the loss of all (trainer_group.py).
- A loss counts like any other: too many within an hour end the run, and so does one without a free worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from staleflow.pipeline.processes.background import gather_or_cancel
from staleflow.pipeline.processes.clock import RunClock, now_s
from staleflow.pipeline.processes.trainer_group import restored_actor
from staleflow.pipeline.processes.worker_protocol import NoFreeWorker, PlacedActor
from staleflow.stores.errors import ActorLost, ActorSilent
from staleflow.stores.trajectory import PolicyVersion
from staleflow.stores.weights.resume_points import ResumePoints

logger = logging.getLogger(__name__)

PING_S = 2.0
"""Seconds between two pings of the roles."""


class RestorableActors(Protocol):
    """The methods of Actors that recovery needs."""

    clock: RunClock

    @property
    def trained_fingerprints(self) -> Mapping[PolicyVersion, str]: ...

    async def ask(self, name: str, method: str, *args: Any, deadline: Literal["silent_s"]) -> Any: ...

    async def ask_once(self, name: str, method: str, *args: Any) -> Any: ...

    def record_loss(self, name: str, loss_error: ActorLost) -> None: ...

    async def place_server(self, *, resumed: bool) -> PlacedActor: ...

    async def place_trainer(self) -> PlacedActor: ...

    async def publish_initial(self, version: PolicyVersion, fingerprint: str = "") -> None: ...

    async def repeat_step(self, step: int) -> None: ...


class RoleRecovery:
    """Restores the actors of one run that have state. resume_points: folder of its resume points."""

    def __init__(
        self, actors: RestorableActors, resume_points: Path, resume_every: int, follower_names: Sequence[str] = ()
    ) -> None:
        """resume_every: training steps between two resume points; 0 for none. follower_names: names of the trainer's
        ranks other than the leading one."""
        self._actors = actors
        self._follower_names = follower_names
        self._resume_points = ResumePoints(resume_points)
        self._resume_every = resume_every
        self._is_started = False
        self._restorations: dict[str, asyncio.Task[None]] = {}
        self._restored_s: dict[str, float] = {}
        self._restore_errors: dict[str, BaseException] = {}
        """Errors of roles that could not be restored, which end the run."""

    def start(self) -> None:
        """Start restoring lost actors."""
        self._is_started = True

    @property
    def is_restoring(self) -> bool:
        """Whether an actor is being restored. Each call of that has a deadline."""
        return bool(self._restorations)

    async def wait_while_restoring(self, name: str) -> None:
        """Wait while an actor is being restored; it is placed before it has its state. Raises ActorLost if restoring
        fails."""
        if (task := self._restorations.get(restored_actor(name))) is not None:
            await asyncio.shield(task)

    async def watch(self) -> None:
        """Ping actors that nobody calls, until cancelled, to detect their loss: engines may wait for weights that were
        lost with one. A busy process answers, since its work runs in threads beside its event loop; a stopped one does
        not."""
        await gather_or_cancel(
            self._ping("trainer", "version"),
            *(self._ping(rank, "ping") for rank in self._follower_names),
            self._ping("server", "held_out_notice"),
        )

    async def _ping(self, name: str, method: str) -> None:
        while True:
            await asyncio.sleep(PING_S)
            await self._actors.ask(name, method, deadline="silent_s")

    async def stop(self) -> None:
        """Stop restoring lost actors."""
        self._is_started = False
        tasks = list(self._restorations.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def wait_until_restored(self, loss_error: ActorLost, called_s: float) -> None:
        """Wait until an actor that a call found lost is restored. called_s: time of the call.

        Raises:
            ActorLost: Restoring failed, or `loss_error` itself if the actor cannot be restored. Also during the run's
                start, when another attempt would miss its deadline again.
        """
        role = restored_actor(loss_error.actor)
        if role not in ("trainer", "server") or not self._is_started:
            raise loss_error
        if isinstance(loss_error, ActorSilent) and not self._actors.trained_fingerprints:
            raise loss_error
        if role in self._restore_errors:
            raise self._restore_errors[role]
        if self._restored_s.get(role, -1.0) >= called_s:
            return
        task = self._restorations.get(role)
        if task is None:
            task = self._restorations[role] = asyncio.ensure_future(self._restore(role, loss_error))
            task.add_done_callback(lambda task: self._record_end(role, task))
        await asyncio.shield(task)

    def _record_end(self, role: str, task: asyncio.Task[None]) -> None:
        del self._restorations[role]
        if task.cancelled():
            return
        if (error := task.exception()) is None:
            self._restored_s[role] = now_s()
        else:
            self._restore_errors[role] = error

    async def _restore(self, role: str, loss_error: ActorLost) -> None:
        """Place a role again until it is restored. Raises ActorLost if it cannot be. loss_error: the loss of its
        actor."""
        while True:
            resume_point = self._newest_resume_point(max(self._actors.trained_fingerprints, default=PolicyVersion(0)))
            if role == "trainer" and resume_point is None:
                raise loss_error
            self._actors.record_loss(role, loss_error)
            try:
                if role == "trainer":
                    await self._restore_trainer(resume_point or PolicyVersion(0))
                else:
                    actor = await self._actors.place_server(resumed=True)
                    await self._actors.ask_once("server", "set_clock", self._actors.clock.elapsed_s)
                    logger.warning("the trajectory server is restored on %s with its store and spool", actor.address)
                return
            except NoFreeWorker as error:
                raise ActorLost(f"{loss_error}; {error}", role) from error
            except ActorLost as next_loss:
                if restored_actor(next_loss.actor) != role:
                    raise
                loss_error = next_loss

    def _newest_resume_point(self, version: PolicyVersion) -> PolicyVersion | None:
        """Return the version of the newest complete resume point up to `version`, 0 for the base model. None if the run
        writes no resume points."""
        if version and not self._resume_every:
            return None
        return max((v for v in self._resume_points.complete_versions() if v <= version), default=PolicyVersion(0))

    async def _restore_trainer(self, resume_point: PolicyVersion) -> None:
        """Place a trainer that repeats the steps after the resume point. If no version was published yet, the run's
        start continues with the new trainer."""
        actors = self._actors
        actor = await actors.place_trainer()
        if not actors.trained_fingerprints:
            logger.warning("the trainer starts again, on %s", actor.address)
            return
        version = max(actors.trained_fingerprints)
        logger.warning(
            "the trainer is restored on %s with version %d from its resume point%s",
            actor.address,
            resume_point,
            f"; it repeats steps {resume_point} to {version - 1}" if resume_point < version else "",
        )
        await actors.publish_initial(resume_point, actors.trained_fingerprints.get(resume_point, ""))
        for step in range(resume_point, version):
            await actors.repeat_step(step)
