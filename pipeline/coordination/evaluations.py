"""Evaluations beside training: the one under way, the instances that sample for it, and where each of its
trajectories goes. Pure.

A version is evaluated by trajectories of its own, sampled under that version alone from the first token to the last.
They are routed, interrupted, retried and scored like all others, but they hold no promise of the ledger, so no step
waits for them, and none trains on them. What keeps versions apart are the *hosts*: a few instances that serve the
evaluated version and do not pull until they have nothing more to sample for it. The others pull as ever.

- Training is not starved: a share bounds the places that an evaluation has. As few instances as have so many places
  are hosts, since each of them lags for as long as its longest response takes. Within its places an evaluation comes
  first: the sooner it is over, the sooner its hosts pull. A host that could be given nothing to train on, since all
  that the bound allows at its version is under way, has all of its places for it. After the last step it has all.
- No deadlock: what is queued for an evaluation waits for its hosts only, and they need nothing from training. A host
  that lags is given no new work once its version is too old for the bound; then its places are empty.
- A lost host, or one that leaves, is replaced by any other that still serves the version; what was sampled goes on
  there. If there is none, and a newer version is published, the evaluation is abandoned, and may begin again as one of
  the newer version.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from staleflow.pipeline.coordination.events import NewGroup
from staleflow.pipeline.coordination.fleet import Fleet, Instance
from staleflow.pipeline.coordination.trajectories import LiveTrajectory
from staleflow.stores.errors import ProtocolViolation
from staleflow.stores.trajectory import InstanceId, PolicyVersion, TrajectoryId


@dataclass(slots=True)
class EvaluationUnderWay:
    """An evaluation that was requested and is not concluded. Written by `MutableEvaluations` only."""

    number: int
    members: set[TrajectoryId]
    """Those that have not ended."""
    to_sample: int
    """Those of them that are not sampled to their end yet."""
    evaluated: PolicyVersion = PolicyVersion(-1)
    """The version it is of; -1 until an instance samples for it."""
    hosts: dict[InstanceId, None] = field(default_factory=dict)
    """Instances that stay at that version for it."""
    failed: list[TrajectoryId] = field(default_factory=list)
    """Those that have ended because nothing could finish them."""


class MutableEvaluations:
    """The evaluation under way with the methods by which the state changes it."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.under_way: EvaluationUnderWay | None = None

    def begin(self, number: int, groups: Iterable[NewGroup], members: int, now: float) -> list[LiveTrajectory]:
        """Begin an evaluation; returns its trajectories, one for each group. members: ids that each group has."""
        if self.under_way is not None:
            raise ProtocolViolation(f"evaluation {number} is requested, but {self.under_way.number} is under way")
        lives = [
            LiveTrajectory(
                id=TrajectoryId(new.group * members), group=new.group, prompt_tokens=new.prompt_tokens, since=now
            )
            for new in groups
        ]
        ids = {live.id for live in lives}
        if len(ids) < len(lives) or not all(live.evaluated for live in lives):
            raise ProtocolViolation(f"evaluation {number} needs groups of its own, with negative numbers")
        self.under_way = EvaluationUnderWay(number=number, members=ids, to_sample=len(ids))
        return lives

    def stay(self, instance: Instance) -> None:
        """Have an instance stay at its version, which becomes the one that is evaluated."""
        evaluation = self._found()
        if evaluation.evaluated not in {-1, instance.version}:
            raise ProtocolViolation(
                f"{instance.instance} at version {instance.version} for one of {evaluation.evaluated}"
            )
        evaluation.evaluated = instance.version
        evaluation.hosts[instance.instance] = None

    def release(self) -> list[Instance]:
        """Let the hosts go that have nothing more to sample; returns those that are there."""
        evaluation = self.under_way
        if evaluation is None or not evaluation.hosts:
            return []
        hosts = [host for name in evaluation.hosts if (host := self._fleet.get(name)) is not None]
        if evaluation.to_sample > sum(
            host.num_evaluated for host in hosts
        ):  # the others are queued, or return from their environment
            return []
        done = [host for host in hosts if not host.num_evaluated]
        for host in done:
            del evaluation.hosts[host.instance]
        return done

    def lose(self, instance: InstanceId) -> None:
        """Note that an instance is gone. One that joins under its name later has nothing to stay for."""
        if self.under_way is not None:
            self.under_way.hosts.pop(instance, None)

    def sampled(self, live: LiveTrajectory) -> None:
        """Note that one of its trajectories is sampled to its end."""
        if live.evaluated:
            self._found().to_sample -= 1

    def end(self, live: LiveTrajectory, *, answered: bool) -> bool:
        """Note that one of its trajectories has ended. answered: whether it was scored. True if it was the last."""
        evaluation = self._found()
        if not answered:
            self.sampled(live)
            evaluation.failed.append(live.id)
        evaluation.members.discard(live.id)
        return not evaluation.members

    def close(self) -> EvaluationUnderWay:
        """Forget the evaluation under way; returns it."""
        evaluation, self.under_way = self._found(), None
        return evaluation

    def _found(self) -> EvaluationUnderWay:
        if self.under_way is None:
            raise ProtocolViolation("no evaluation is under way")
        return self.under_way


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The places of an evaluation. hosts: instances; of_each: trajectories that each runs for it at once."""

    hosts: int
    of_each: int


def places_of(share: float, num_instances: int, max_running: int) -> Places:
    """The places that a share of a fleet is: as few instances as have them.

    >>> places_of(0.25, 1, 64), places_of(0.25, 3, 64), places_of(0.25, 16, 64)
    (Places(hosts=1, of_each=16), Places(hosts=1, of_each=48), Places(hosts=4, of_each=64))
    """
    hosts = max(1, math.ceil(share * num_instances))
    return Places(hosts=hosts, of_each=max(1, int(share * num_instances / hosts * max_running)))
