"""The worker processes of a cluster, their GPUs, and the jobs that have them. Chooses the workers for a job.

Invariants:
- A worker belongs to at most one job.
- A job that uses GPUs, on a cluster whose workers report some, gets the workers that pipeline/placement chooses for its
  rollout instances and ranks, and the GPUs that it may use on each. A GPU belongs to one role.
- After a job's driver is lost, its workers may still run its actors (an engine that decodes, a trajectory server that
  commits). They belong to no job until they have left the cluster; a restarted worker joins as a new one. A worker that
  runs only an engine can be reserved for the job's next driver.

Each call has the time as an argument. The module does not use Dask or a clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from staleflow.pipeline.cluster.gang import (
    Gang,
    Needs,
    RoleSetByWorker,
    WorkerGpus,
    choose_workers,
    describe_shortage,
    make_hosts,
    roles_by_worker,
)
from staleflow.pipeline.placement.devices import Device, describe_devices
from staleflow.pipeline.placement.placement import Assignment, Placement, Shortage, place

RESTART_LIMIT_S = 30.0
"""Seconds that a worker may take to restart. Until then a worker that has left counts as one of the cluster's."""
REPORT_LIMIT_S = 30.0
"""Seconds that a new worker may take to report its GPUs. After that it counts as a worker without GPUs."""
DeviceUuidsByWorker = Mapping[str, tuple[str, ...]]
"""UUIDs of the GPUs that a job may use on each of its workers, by address."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The job to which a worker belongs, and the roles of the worker. run_dir: the job's run folder. device_uuids:
    the GPUs that the job may use on this worker."""

    job: str
    run_dir: str
    roles: tuple[str, ...]
    device_uuids: tuple[str, ...] = ()


class WorkerPool:
    """The workers of one cluster, by address."""

    def __init__(self) -> None:
        self.workers: dict[str, Mapping[str, float]] = {}
        """The Dask resources that each worker declares."""
        self.claims: dict[str, Claim] = {}
        self.restart_claims: dict[str, Claim] = {}
        """Workers that may still run actors of a job whose driver was lost, with their earlier claims."""
        self._reservations: dict[str, tuple[Claim, float]] = {}
        """Workers reserved for a waiting job because its engine is loaded there, with the time of the reservation."""
        self._engine_workers: set[str] = set()
        """Workers that a job got from its reservation. Their engine may not be connected to the new driver yet."""
        self._pending_restarts: list[str] = []
        """Workers that `take_pending_restarts` has not returned yet."""
        self._disconnected: dict[str, tuple[Mapping[str, float], float]] = {}
        """Workers that have left and may restart: their resources, and the time when they left."""
        self._role_sets: RoleSetByWorker | None = None
        self.worker_gpus: dict[str, WorkerGpus] = {}
        """The GPUs that workers report, including workers that have just left."""
        self._unreported_since: dict[str, float] = {}
        """Workers that have not reported their GPUs yet, with the time when they joined."""
        self._lost_assignments: dict[str, list[tuple[str, Assignment]]] = {}
        """Roles of running jobs whose worker has left and was not replaced yet, with their old assignments, by job."""

    # -- workers -------------------------------------------------------------------------------------------------

    def add_worker(self, address: str, resources: Mapping[str, float], unreported_since: float | None = None) -> None:
        """Add a worker that has joined the cluster, or a restarted one with a new address. unreported_since: time at
        which it was asked to report its GPUs; None if it was not."""
        self.workers[address] = dict(resources)
        previous_address = next((a for a, (worker, _) in self._disconnected.items() if worker == resources), None)
        if address in self._disconnected:  # a worker with a fixed port
            previous_address = address
        if previous_address is not None:
            self._remove_disconnected(previous_address)
        if unreported_since is not None:
            self._unreported_since[address] = unreported_since
        self._role_sets = None

    def set_gpus(self, address: str, gpus: WorkerGpus) -> None:
        """Store the GPUs that a worker has reported."""
        self._unreported_since.pop(address, None)
        if address in self.workers and gpus.devices:
            self.worker_gpus[address] = gpus

    def awaits_gpu_reports(self, now: float) -> bool:
        """Whether some workers may still report GPUs."""
        return any(now - since <= REPORT_LIMIT_S for since in self._unreported_since.values())

    def remove_worker(self, address: str, now: float) -> None:
        """Remove a worker that has left the cluster."""
        resources = self.workers.pop(address, None)
        if resources is not None:
            self._disconnected[address] = resources, now
        claim = self.claims.pop(address, None)
        if claim is not None and claim.device_uuids:
            self._lost_assignments.setdefault(claim.job, []).append(
                (claim.roles[0], self._assignment_of(address, claim))
            )
        self._unreported_since.pop(address, None)
        self.restart_claims.pop(address, None)
        self._reservations.pop(address, None)
        self._engine_workers.discard(address)
        self._role_sets = None

    def _remove_disconnected(self, address: str) -> None:
        del self._disconnected[address]
        if address not in self.workers:
            self.worker_gpus.pop(address, None)

    @property
    def free_workers(self) -> list[str]:
        """Workers that no job has, and that need no restart."""
        return [
            address
            for address in self.workers
            if not any(address in addresses for addresses in (self.claims, self.restart_claims, self._reservations))
        ]

    def take_pending_restarts(self) -> list[str]:
        """Return the workers that must be restarted before a job can get them. Each is returned once."""
        addresses, self._pending_restarts = self._pending_restarts, []
        return [address for address in addresses if address in self.restart_claims]

    def unavailable_workers(self, id: str) -> list[str]:
        """Return the workers that a job cannot use. id: the job; empty for a process that belongs to no
        job."""
        other_workers = [a for a, claim in self.claims.items() if claim.job != id]
        return [*other_workers, *self.restart_claims, *self._reservations]

    def workers_of(self, id: str) -> Gang:
        """Return the workers of a job and their roles."""
        return {address: claim.roles for address, claim in self.claims.items() if claim.job == id}

    # -- claims --------------------------------------------------------------------------------------------------

    def _release(self, id: str) -> None:
        for address in self.workers_of(id):
            del self.claims[address]
            self._engine_workers.discard(address)
        for address in self._reserved_workers(id):
            self._cancel_reservation(address)

    def _reserved_workers(self, id: str) -> list[str]:
        return [address for address, (claim, _) in self._reservations.items() if claim.job == id]

    def _restart_claimed(self, address: str) -> None:
        """Remove a worker from its job, and mark it for restart."""
        self.restart_claims[address] = self.claims.pop(address)
        self._pending_restarts.append(address)

    def _cancel_reservation(self, address: str) -> None:
        self.restart_claims[address], _ = self._reservations.pop(address)
        self._pending_restarts.append(address)

    def _role_sets_of_all(self) -> RoleSetByWorker:
        """Return the role sets of all workers, including workers that have just left and may restart."""
        if self._role_sets is None:
            self._role_sets = roles_by_worker(
                {a: resources for a, (resources, _) in self._disconnected.items()} | self.workers
            )
        return self._role_sets

    # -- GPUs ----------------------------------------------------------------------------------------------------

    def uses_gpus(self, needs: Needs) -> bool:
        """Whether a job uses GPUs on this cluster: it supports GPUs, and the cluster has some or the job sets
        cluster.gpus."""
        return needs.gpus_per_instance > 0 and (bool(self.worker_gpus) or needs.max_gpus > 0)

    def devices(self) -> list[Device]:
        """Return all GPUs of the cluster."""
        return list({device.uuid: device for gpus in self.worker_gpus.values() for device in gpus.devices}.values())

    def gpu_shortage(self, needs: Needs) -> str:
        """Return why all workers together have too few GPUs for a job, on one line; empty if they have enough, or if
        there are no workers yet."""
        if not self.workers or not self.uses_gpus(needs):
            return ""
        if 0 < needs.max_gpus < needs.num_gpus:
            return f"needs {needs.num_gpus} GPUs, cluster.gpus = {needs.max_gpus}"
        devices = self.devices()
        if needs.max_gpus > len(devices):
            return f"may have cluster.gpus = {needs.max_gpus}; the cluster's workers have {describe_devices(devices)}"
        placement = self._place(needs, list(self.workers), gpu_owners={})
        return placement.message if isinstance(placement, Shortage) else ""

    def _assignments_of(self, id: str) -> dict[str, Assignment]:
        """Return the current assignments of a job's heavy roles by name, including those of reserved workers."""
        claims = [*self.claims.items(), *((address, claim) for address, (claim, _) in self._reservations.items())]
        assignments: dict[str, Assignment] = {}
        counts = Counter[str]()
        for address, claim in claims:
            if claim.job == id and claim.device_uuids:
                assignments[f"{claim.roles[0]}-{counts[claim.roles[0]]}"] = self._assignment_of(address, claim)
                counts[claim.roles[0]] += 1
        return assignments

    def _assignment_of(self, address: str, claim: Claim) -> Assignment:
        return Assignment(host=self.worker_gpus[address].host, device_uuids=claim.device_uuids, process=address)

    def _gpu_owners(self, workers: Sequence[str] = ()) -> dict[str, str]:
        """Return the ids of the jobs that have GPUs, by UUID of the GPU. workers: workers whose GPUs are left
        out."""
        reserved_claims = {address: claim for address, (claim, _) in self._reservations.items()}
        return {
            uuid: claim.job
            for claims in (self.claims, self.restart_claims, reserved_claims)
            for address, claim in claims.items()
            if address not in workers
            for uuid in claim.device_uuids
        }

    def _place(
        self, needs: Needs, workers: Sequence[str], *, gpu_owners: Mapping[str, str], id: str = ""
    ) -> Placement | Shortage:
        hosts = make_hosts(self.worker_gpus, self._role_sets_of_all(), workers)
        is_shared = sum(len(host.devices) for host in hosts) == 1
        return place(
            hosts, needs.heavy_roles, gpu_owners=gpu_owners, previous=self._assignments_of(id), may_share=is_shared
        )

    def _choose_workers_and_gpus(
        self, needs: Needs, workers: Sequence[str], driver_worker: str = "", engine_workers: Sequence[str] = (), *,
        id: str = "", with_surplus: bool = True, gpu_owners: Mapping[str, str] | None = None,
    ) -> tuple[Gang, DeviceUuidsByWorker] | None:  # fmt: skip
        """Choose a job's workers among the free ones, and their GPUs; None if they are not enough. id: the job.
        gpu_owners: GPUs in use, by default those of all workers that are not in `workers` or `engine_workers`.
        Other arguments: see `choose_workers`."""
        role_sets = self._role_sets_of_all()
        # Light roles prefer workers without GPUs.
        workers = sorted(workers, key=lambda address: address in self.worker_gpus)
        if not self.uses_gpus(needs):
            gang = choose_workers(needs, role_sets, workers, driver_worker, engine_workers, with_surplus=with_surplus)
            return None if gang is None else (gang, {})
        candidates = [address for address in (*engine_workers, *workers) if address != driver_worker]
        gpu_owners = self._gpu_owners([*workers, *engine_workers]) if gpu_owners is None else gpu_owners
        placement = self._place(needs, candidates, gpu_owners=gpu_owners, id=id)
        if isinstance(placement, Shortage):
            return None
        devices = {assignment.process: assignment.device_uuids for assignment in placement.assignments.values()}
        light_gang = choose_workers(
            needs.light_needs,
            role_sets,
            [address for address in workers if address not in devices],
            driver_worker,
            with_surplus=with_surplus,
        )
        if light_gang is None:
            return None
        roles = {assignment.process: (name.partition("-")[0],) for name, assignment in placement.assignments.items()}
        return light_gang | roles, devices

    def _describe_shortage(self, needs: Needs, workers: list[str]) -> str:
        """Describe which workers or GPUs a job waits for; empty if only the number of workers is too small."""
        if not self.uses_gpus(needs):
            return describe_shortage(needs, self._role_sets_of_all(), workers)
        placement = self._place(needs, workers, gpu_owners=self._gpu_owners(workers))
        return placement.message if isinstance(placement, Shortage) else "no worker process is left for the light roles"

    def _is_large_enough(self, needs: Needs) -> bool:
        """Whether all workers of the cluster, including workers that have just left, are enough for a job."""
        return self._choose_workers_and_gpus(needs, list(self._role_sets_of_all()), gpu_owners={}) is not None
