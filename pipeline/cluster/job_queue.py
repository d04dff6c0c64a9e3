"""The queue that decides which job gets which worker processes, and when: gang scheduling, first in, first out.

Invariants:
- A worker belongs to at most one job. A waiting job has no workers; an admitted job got all that it needs at
  once.
- Jobs are admitted in the order in which they were added. A job cannot be admitted before an earlier one that all
  workers of the cluster together would be enough for, so each of those is admitted once the jobs before it have ended.
  A job that they would not be enough for keeps its position and does not block later ones.
- A job may get more workers than it needs, for reward workers of their own, while no other job waits. When a job waits
  that could start with them, they are listed in `surplus_to_return`; they stay with their job until it calls
  `return_worker`.
- When a running job loses a worker, no job is admitted until it is replaced. After `RESTART_LIMIT_S` without one, a
  resumed driver releases all of the job's workers, and the job waits again at its earlier position.
- A job that uses GPUs, on a cluster whose workers report some, gets the workers that pipeline/placement chooses for its
  rollout instances and ranks, and the GPUs that it may use on each. A GPU belongs to one role.
- After a job's driver is lost, its workers may still run its actors (an engine that decodes, a trajectory server that
  commits). They belong to no job until they have left the cluster; a restarted worker joins as a new one. A worker that
  runs only an engine can be reserved for the job's next driver, for `RESTART_LIMIT_S` at most.

Each call has the time as an argument. The module does not use Dask or a clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from staleflow.pipeline.cluster.gang import (
    DRIVER,
    EXCLUSIVE_ROLES,
    ROLLOUT,
    Gang,
    Kinds,
    Needs,
    WorkerGpus,
    choose_workers,
    describe_shortage,
    describe_workers,
    hosts_of,
    kinds_of,
    suffice,
)
from staleflow.pipeline.placement.devices import Device, describe
from staleflow.pipeline.placement.placement import Assignment, Placement, Shortage, place
from staleflow.pipeline.placement.placement_text import placement_text

RESTART_LIMIT_S = 30.0
"""Seconds that a worker may take to restart. Until then a worker that has left counts as one of the cluster's."""
WAITS_FOR_RESTART = "needs the workers of its earlier driver to restart"
"""Message: why a job waits after its driver was lost."""
REPORT_LIMIT_S = 30.0
"""Seconds that a new worker may take to report its GPUs. After that it counts as a worker without GPUs."""
WAITS_FOR_GPU_REPORT = "needs new workers to report their GPUs"
"""Message: why a job that uses GPUs waits until then."""

GpusByWorker = Mapping[str, tuple[str, ...]]
"""UUIDs of the GPUs that a job may use on each of its workers, by address."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A worker's job, and the roles that it has there. run: the job's run folder. devices: UUIDs of the GPUs that the
    job may use on this worker."""

    job: str
    run: str
    roles: tuple[str, ...]
    devices: tuple[str, ...] = ()


@dataclass(slots=True)
class QueueEntry:
    """A job that is waiting for workers or has them. wait_s: maximum seconds to wait; 0: no limit."""

    id: str
    run: str
    needs: Needs
    wait_s: float
    waiting_since_s: float
    """Time when it began to wait."""
    num_workers: int = 0
    """Number of workers that it was admitted with, including workers lost since; 0 while it waits."""
    incomplete_since_s: float | None = None
    """Time when its driver first asked for a lost worker and none was free; None if it has all its workers."""
    why: str = ""
    """Message: why it waits."""


class JobQueue:
    """The jobs of one cluster in the order in which they were added, and the cluster's workers."""

    def __init__(self) -> None:
        self.entries: dict[str, QueueEntry] = {}
        self.workers: dict[str, Mapping[str, float]] = {}
        self.claims: dict[str, Claim] = {}
        self.needs_restart: dict[str, Claim] = {}
        """Workers that may still run actors of a job whose driver was lost, with their earlier claims."""
        self._reservations: dict[str, tuple[Claim, float]] = {}
        """Workers reserved for a waiting job because its engine is loaded there, with the time of the reservation."""
        self._engine_workers: set[str] = set()
        """Workers that a job got back from a reservation. Their engine may not be connected to the new driver yet."""
        self.surplus_to_return: dict[str, list[str]] = {}
        """Workers that running jobs do not need and should return, by job."""
        self._pending_restarts: list[str] = []
        """Workers that `take_pending_restarts` has not returned yet."""
        self._disconnected: dict[str, tuple[Mapping[str, float], float]] = {}
        self._kinds: Kinds | None = None
        self.gpus: dict[str, WorkerGpus] = {}
        """The GPUs that workers report, including workers that have just left."""
        self._unreported: dict[str, float] = {}
        """Workers that have not reported their GPUs yet, with the time when they joined."""
        self._lost_assignments: dict[str, list[tuple[str, Assignment]]] = {}
        """Roles of running jobs whose worker has left and was not replaced yet, with their old assignments, by job."""

    # -- workers -------------------------------------------------------------------------------------------------

    def add_worker(self, address: str, resources: Mapping[str, float], unreported_since: float | None = None) -> None:
        """Add a worker that has joined the cluster, or a restarted one with a new address. unreported_since: time at
        which it was asked for its GPUs; None if it has none."""
        self.workers[address] = dict(resources)
        restarted = next((old for old, (declared, _) in self._disconnected.items() if declared == resources), None)
        if restarted is not None:
            self._forget_worker(restarted)
        if unreported_since is not None:
            self._unreported[address] = unreported_since
        self._kinds = None

    def set_gpus(self, address: str, gpus: WorkerGpus) -> None:
        """Store the GPUs that a worker has reported."""
        self._unreported.pop(address, None)
        if address in self.workers and gpus.devices:
            self.gpus[address] = gpus

    def awaits_reports(self, now: float) -> bool:
        """Whether some workers may still report GPUs."""
        return any(now - since <= REPORT_LIMIT_S for since in self._unreported.values())

    def remove_worker(self, address: str, now: float) -> None:
        """Remove a worker that has left the cluster."""
        resources = self.workers.pop(address, None)
        if resources is not None:
            self._disconnected[address] = resources, now
        claim = self.claims.pop(address, None)
        if claim is not None and claim.devices:
            self._lost_assignments.setdefault(claim.job, []).append(
                (claim.roles[0], self._assignment_of(address, claim))
            )
        self._unreported.pop(address, None)
        self.needs_restart.pop(address, None)
        self._reservations.pop(address, None)
        self._engine_workers.discard(address)
        self._kinds = None

    def _forget_worker(self, address: str) -> None:
        del self._disconnected[address]
        self.gpus.pop(address, None)

    @property
    def free(self) -> list[str]:
        """Workers that any job can get."""
        return [
            a
            for a in self.workers
            if not any(a in addresses for addresses in (self.claims, self.needs_restart, self._reservations))
        ]

    def reserve_or_restart(self, address: str, now: float) -> None:
        """Handle a worker of `needs_restart`: reserve it for its job if only an engine runs on it and the job is
        waiting; otherwise have it restarted."""
        claim = self.needs_restart.get(address)
        if claim is not None and claim.roles == (ROLLOUT,) and self.waits(claim.job):
            self._reservations[address] = self.needs_restart.pop(address), now
        else:
            self._pending_restarts.append(address)

    def take_pending_restarts(self) -> list[str]:
        """Return the workers that must be restarted before a job can get them. Each is returned once."""
        addresses, self._pending_restarts = self._pending_restarts, []
        return [address for address in addresses if address in self.needs_restart]

    def unavailable(self, owner: str) -> list[str]:
        """Workers that a job cannot use. owner: id of the job; empty for a process that belongs to no job."""
        other_workers = [a for a, claim in self.claims.items() if claim.job != owner]
        return [*other_workers, *self.needs_restart, *self._reservations]

    def workers_of(self, id: str) -> Gang:
        """The workers of a job and their roles."""
        return {address: claim.roles for address, claim in self.claims.items() if claim.job == id}

    # -- GPUs ----------------------------------------------------------------------------------------------------

    def uses_gpus(self, needs: Needs) -> bool:
        """Whether a job uses GPUs on this cluster: it supports GPUs, and the cluster has some or the job sets
        cluster.gpus."""
        return needs.instance_gpus > 0 and (bool(self.gpus) or needs.gpus > 0)

    def devices(self) -> list[Device]:
        """All GPUs of the cluster."""
        return list(
            {device.uuid: device for worker_gpus in self.gpus.values() for device in worker_gpus.devices}.values()
        )

    def gpu_shortage(self, needs: Needs) -> str:
        """One line that says why all workers together have too few GPUs for a job; empty if they have enough, or if
        there are no workers yet."""
        if not self.workers or not self.uses_gpus(needs):
            return ""
        if 0 < needs.gpus < needs.num_gpus:
            return f"needs {needs.num_gpus} GPUs, cluster.gpus = {needs.gpus}"
        devices = self.devices()
        if needs.gpus > len(devices):
            return f"may have cluster.gpus = {needs.gpus}; the cluster's workers have {describe(devices)}"
        placed = self._place(needs, list(self.workers), taken={})
        return placed.line if isinstance(placed, Shortage) else ""

    def visible_devices(self, id: str) -> dict[str, str]:
        """Value of CUDA_VISIBLE_DEVICES for each worker of a job, by address; empty if the job uses no GPU."""
        return {
            address: ",".join(device.visible for uuid in claim.devices for device in self._devices(address, uuid))
            for address, claim in self.claims.items()
            if claim.job == id and self.uses_gpus(self.entries[id].needs)
        }

    def _devices(self, address: str, uuid: str) -> list[Device]:
        return [device for device in self.gpus[address].devices if device.uuid == uuid]

    def placement_text(self, id: str) -> str:
        """The job's roles on hosts and GPUs, as several lines of text; empty if the job uses no GPU."""
        if not self.visible_devices(id):
            return ""
        assignments: dict[str, Assignment] = {}
        for address, claim in self.claims.items():
            if claim.job == id and claim.devices:
                number = sum(name.startswith(claim.roles[0]) for name in assignments)
                assignments[f"{claim.roles[0]}-{number}"] = self._assignment_of(address, claim)
        hosts = hosts_of(self.gpus, self._known_kinds(), ())
        return placement_text(hosts, assignments, [uuid for uuid, job in self._taken().items() if job != id])

    def claim_gpus(self, id: str, role: str, avoid: Sequence[str] = (), *, peek: bool = False) -> str:
        """Give a running job a worker with GPUs for a role, in place of a lost worker or in addition. Returns the
        worker's address; empty if none fits.

        Args:
            avoid: Workers that may not be chosen.
            peek: Only find the worker, without claiming it.
        """
        entry = self.entries.get(id)
        if entry is None or not entry.num_workers:
            return ""
        avoided = [
            (c.roles[0], self._assignment_of(a, c)) for a, c in self.claims.items() if a in avoid and c.job == id
        ]
        lost = [loss for loss in self._lost_assignments.get(id, ()) if loss[0] == role]
        previous = self._assignments_of(id)
        if replaced := [*lost, *(pair for pair in avoided if pair[0] == role)]:
            previous[role] = replaced[0][1]
        hosts = hosts_of(self.gpus, self._known_kinds(), [a for a in self.free if a not in avoid])
        placed = place(hosts, [entry.needs.heavy_role(role, role)], used_gpus=self._taken(), previous=previous)
        if isinstance(placed, Shortage):
            return ""
        assignment = placed.assignments[role]
        if not peek:
            if lost:
                self._lost_assignments[id].remove(lost[0])
            self.claims[assignment.process] = Claim(id, entry.run, (role,), assignment.devices)
        return assignment.process

    def _assignments_of(self, id: str) -> dict[str, Assignment]:
        """Present assignments of a job's roles, by the names of `Needs.heavy_roles`; reserved workers are included."""
        claims = [*self.claims.items(), *((address, claim) for address, (claim, _) in self._reservations.items())]
        assignments: dict[str, Assignment] = {}
        counts = Counter[str]()
        for address, claim in claims:
            if claim.job == id and claim.devices:
                assignments[f"{claim.roles[0]}-{counts[claim.roles[0]]}"] = self._assignment_of(address, claim)
                counts[claim.roles[0]] += 1
        return assignments

    def _assignment_of(self, address: str, claim: Claim) -> Assignment:
        return Assignment(host=self.gpus[address].host, devices=claim.devices, process=address)

    def _taken(self, free: Sequence[str] = ()) -> dict[str, str]:
        """UUIDs of the GPUs that jobs have, with the jobs' ids. free: workers whose GPUs are left out."""
        reserved_claims = {address: claim for address, (claim, _) in self._reservations.items()}
        return {
            uuid: claim.job
            for claims in (self.claims, self.needs_restart, reserved_claims)
            for address, claim in claims.items()
            if address not in free
            for uuid in claim.devices
        }

    def _place(
        self, needs: Needs, workers: Sequence[str], *, taken: Mapping[str, str], id: str = ""
    ) -> Placement | Shortage:
        hosts = hosts_of(self.gpus, self._known_kinds(), workers)
        share = sum(len(host.devices) for host in hosts) == 1
        return place(hosts, needs.heavy_roles, used_gpus=taken, previous=self._assignments_of(id), share=share)

    def _select(
        self, needs: Needs, free: Sequence[str], driver_worker: str = "", engine_workers: Sequence[str] = (), *,
        id: str = "", surplus: bool = True, taken: Mapping[str, str] | None = None,
    ) -> tuple[Gang, GpusByWorker] | None:  # fmt: skip
        """Choose a job's workers among the free ones, and their GPUs; None if they are not enough. id: the job. taken:
        GPUs in use, by default those of all workers that are not in `free` or `engine_workers`. Other arguments: see
        `choose`."""
        kinds = self._known_kinds()
        free = sorted(free, key=lambda address: address in self.gpus)  # light roles keep away from GPUs
        if not self.uses_gpus(needs):
            gang = choose_workers(needs, kinds, free, driver_worker, engine_workers, surplus=surplus)
            return None if gang is None else (gang, {})
        candidates = [address for address in (*engine_workers, *free) if address != driver_worker]
        taken = self._taken([*free, *engine_workers]) if taken is None else taken
        placed = self._place(needs, candidates, taken=taken, id=id)
        if isinstance(placed, Shortage):
            return None
        heavy = {assignment.process: assignment.devices for assignment in placed.assignments.values()}
        light = choose_workers(
            needs.light_needs, kinds, [a for a in free if a not in heavy], driver_worker, surplus=surplus
        )
        if light is None:
            return None
        roles = {assignment.process: (name.partition("-")[0],) for name, assignment in placed.assignments.items()}
        return light | roles, heavy

    def _describe_shortage(self, needs: Needs, free: list[str]) -> str:
        """Message: which workers or GPUs a job waits for; empty if only the number of workers is too small."""
        if not self.uses_gpus(needs):
            return describe_shortage(needs, self._known_kinds(), free)
        placed = self._place(needs, free, taken=self._taken(free))
        return placed.line if isinstance(placed, Shortage) else "no worker process is left for the light roles"

    def _suffices(self, needs: Needs) -> bool:
        """Whether all workers of the cluster, including workers that have just left, are enough for a job."""
        kinds = self._known_kinds()
        return (
            self._select(needs, list(kinds), taken={}) is not None if self.uses_gpus(needs) else suffice(needs, kinds)
        )

    # -- jobs ----------------------------------------------------------------------------------------------------

    def enter(self, id: str, run: str, needs: Needs, wait_s: float, now: float) -> None:
        """Add a job at the end of the queue. A job that is in the queue keeps its position."""
        if id not in self.entries:
            self.entries[id] = QueueEntry(id, run, needs, wait_s, now)

    def waits(self, id: str) -> bool:
        return id in self.entries and not self.entries[id].num_workers

    def leave(self, id: str) -> None:
        """Remove a job and release its workers. It must have no actors left on them."""
        self.entries.pop(id, None)
        self._lost_assignments.pop(id, None)
        self._release(id)

    def restart_gpus(self, id: str, addresses: Sequence[str]) -> None:
        """Restart the workers of a job that used GPUs, because a process does not free all GPU memory and cannot change
        its visible GPUs. addresses: workers that can be restarted."""
        for address in addresses:
            if (claim := self.claims.get(address)) is not None and claim.job == id and claim.devices:
                self._restart_claimed(address)

    def requeue(self, id: str, now: float) -> None:
        """Put a job back to waiting, at its position, and release its workers. It must have no actors left on them,
        except engines of a reservation, whose workers are restarted."""
        entry = self.entries[id]
        for address in self._engine_workers & set(self.workers_of(id)):
            self._restart_claimed(address)
        entry.num_workers, entry.incomplete_since_s, entry.waiting_since_s = 0, None, now
        self._lost_assignments.pop(id, None)
        self._release(id)

    def requeue_after_driver_loss(self, id: str, now: float) -> list[str]:
        """Put a job whose driver was lost back to waiting. Returns its former workers; each must be restarted or
        reserved (`reserve_or_restart`)."""
        workers_left = list(self.workers_of(id))
        for address in workers_left:
            self.needs_restart[address] = self.claims.pop(address)
        self.requeue(id, now)
        return workers_left

    def admit_ready(self, now: float) -> tuple[dict[str, Gang], list[str]]:
        """Admit all jobs that can start, in order. Returns the workers of each admitted job, and the jobs that have
        waited longer than their limit, which the caller must end."""
        self._expire(now)
        free = self.free
        claimed = Counter(claim.job for claim in self.claims.values())
        replacement_due = any(claimed[entry.id] < entry.num_workers for entry in self.entries.values())
        admitted: dict[str, Gang] = {}
        self.surplus_to_return = {}
        expired: list[str] = []
        num_ahead = 0
        for entry in self.entries.values():
            if entry.num_workers:
                continue
            if any(claim.run == entry.run for claim in self.needs_restart.values()):
                num_ahead += 1
                entry.why = WAITS_FOR_RESTART
                continue
            if entry.needs.instance_gpus and self.awaits_reports(now):
                num_ahead += 1
                entry.why = WAITS_FOR_GPU_REPORT
                continue
            reserved = self._reserved_for(entry.id)
            can_start = not num_ahead and not replacement_due
            surplus = self._is_only_waiting(entry.id)
            chosen = (
                self._select(entry.needs, free, engine_workers=reserved, id=entry.id, surplus=surplus)
                if can_start
                else None
            )
            if chosen is not None and any(chosen[0].get(address) not in ((ROLLOUT,), None) for address in reserved):
                for address in reserved:
                    self._cancel_reservation(address)
                num_ahead += 1
                entry.why = WAITS_FOR_RESTART
                continue
            if chosen is not None:
                self._grant(entry, *chosen)
                admitted[entry.id] = chosen[0]
                free = self.free
            elif self._suffices(entry.needs):
                position = f"{num_ahead} job{'s' if num_ahead > 1 else ''} before it" if num_ahead else "next in line"
                shortage = "" if num_ahead else self._describe_shortage(entry.needs, free)
                entry.why = f"needs {entry.needs}; free {len(free)} of {len(self.workers)}; {position}" + (
                    f"; {shortage}" if shortage else ""
                )
                if can_start:
                    self._request_surplus(entry.needs, free)
                num_ahead += 1
            else:
                description = describe_workers(self.workers)
                if shortage := self.gpu_shortage(entry.needs):
                    description += f"; {shortage}"
                entry.why = f"needs {entry.needs}; {description}; starts once there are enough"
            if not entry.num_workers and entry.wait_s and now - entry.waiting_since_s > entry.wait_s:
                expired.append(entry.id)
        return admitted, expired

    def _expire(self, now: float) -> None:
        """Remove workers that have not come back within RESTART_LIMIT_S, and cancel reservations of that age."""
        for address in [a for a, (_, since) in self._disconnected.items() if now - since > RESTART_LIMIT_S]:
            self._forget_worker(address)
            self._kinds = None
        for address in [a for a, (_, since) in self._reservations.items() if now - since > RESTART_LIMIT_S]:
            self._cancel_reservation(address)

    def replace_lost_workers(self, id: str, now: float, driver_worker: str = "") -> bool:
        """Replace the lost workers of an admitted job by free ones. Returns whether it now has all its workers. If some
        are still missing after RESTART_LIMIT_S, the job goes back to waiting, without workers."""
        entry, claimed = self.entries[id], self.workers_of(id)
        if len(claimed) >= entry.num_workers > 0:
            return True
        if not entry.num_workers:
            return False
        engine_workers = [address for address in claimed if address in self._engine_workers]
        without_engine = [address for address in claimed if address not in self._engine_workers]
        surplus = self._is_only_waiting(id)
        free = [*without_engine, *self.free]
        chosen = self._select(entry.needs, free, driver_worker, engine_workers, id=id, surplus=surplus)
        if chosen is not None and (misused := [a for a in engine_workers if chosen[0].get(a) != (ROLLOUT,)]):
            for address in misused:
                self._restart_claimed(address)
            chosen = None
        if chosen is not None:
            self._release(id)
            self._grant(entry, *chosen)
            return True
        entry.incomplete_since_s = now if entry.incomplete_since_s is None else entry.incomplete_since_s
        entry.why = f"needs {entry.needs}; has {len(claimed)} of them left"
        if now - entry.incomplete_since_s > RESTART_LIMIT_S:
            self.requeue(id, now)
        return False

    def claim(self, id: str, address: str, role: str) -> bool:
        """Give a running job a worker that replaces a lost one. Returns False if the worker belongs to another job or
        has left. Idempotent."""
        claimed, entry = self.claims.get(address), self.entries.get(id)
        if entry is None or not entry.num_workers or (claimed is not None and claimed.job != id):
            return False
        if claimed is None:
            if address in self.needs_restart or address in self._reservations or address not in self.workers:
                return False
            self.claims[address] = Claim(id, entry.run, (role,))
        elif role not in EXCLUSIVE_ROLES:  # the role shares this worker from now on
            self.claims[address] = replace(claimed, roles=tuple(dict.fromkeys((*claimed.roles, role))))
            entry.num_workers -= len(self.workers_of(id)) < entry.num_workers
        return True

    def return_worker(self, id: str, address: str) -> bool:
        """Release a worker that a running job does not need. The job must have no actors left on it. Returns False, and
        changes nothing, if the job needs the worker."""
        if address not in self._surplus(id):
            return False
        del self.claims[address]
        self.entries[id].num_workers -= 1
        return True

    def _surplus(self, id: str) -> list[str]:
        """Workers that a job does not need: each runs only a reward worker, which another of its workers can run."""
        reward_workers = [address for address, roles in self.workers_of(id).items() if "reward" in roles]
        reward_only = [address for address in reward_workers if self.claims[address].roles == ("reward",)]
        return reward_only[1:] if len(reward_only) == len(reward_workers) else reward_only

    def _request_surplus(self, needs: Needs, free: list[str]) -> None:
        """Set `surplus_to_return` if a job could start with the workers that running jobs do not need."""
        surplus = {address: id for id in self.entries for address in self._surplus(id)}
        chosen = self._select(needs, [*free, *surplus], surplus=False)
        for address in chosen[0] if chosen is not None else ():
            if address in surplus:
                self.surplus_to_return.setdefault(surplus[address], []).append(address)

    def _is_only_waiting(self, id: str) -> bool:
        """Whether no job but this one waits."""
        return not any(self.waits(other) for other in self.entries if other != id)

    def _grant(self, entry: QueueEntry, gang: Gang, devices: GpusByWorker) -> None:
        entry.num_workers, entry.incomplete_since_s, entry.why = len(gang), None, ""
        for address in self._reserved_for(entry.id):
            if address in gang:
                del self._reservations[address]
                self._engine_workers.add(address)
            else:
                self._cancel_reservation(address)
        self._lost_assignments.pop(entry.id, None)
        self.claims |= {a: Claim(entry.id, entry.run, roles, devices.get(a, ())) for a, roles in gang.items()}

    def _release(self, id: str) -> None:
        for address in self.workers_of(id):
            del self.claims[address]
        for address in self._reserved_for(id):
            self._cancel_reservation(address)

    def _reserved_for(self, id: str) -> list[str]:
        return [address for address, (claim, _) in self._reservations.items() if claim.job == id]

    def _restart_claimed(self, address: str) -> None:
        """Take a worker from its job and have it restarted."""
        self.needs_restart[address] = self.claims.pop(address)
        self._pending_restarts.append(address)

    def _cancel_reservation(self, address: str) -> None:
        self.needs_restart[address], _ = self._reservations.pop(address)
        self._pending_restarts.append(address)

    def _known_kinds(self) -> Kinds:
        """Kinds of all workers, including workers that have just left and may come back."""
        if self._kinds is None:
            self._kinds = kinds_of({a: resources for a, (resources, _) in self._disconnected.items()} | self.workers)
        return self._kinds


def driver_address(gang: Gang) -> str:
    """Address of the worker that runs a job's driver; empty if no worker does."""
    return next((address for address, roles in gang.items() if DRIVER in roles), "")
