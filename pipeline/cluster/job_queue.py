"""The queue that decides which job gets which worker processes, and when: gang scheduling, first in, first out.

Invariants, besides those of worker_pool.py:
- A waiting job has no workers; an admitted job got all that it needs at once.
- Jobs are admitted in the order in which they were added. A job for which all workers of the cluster together are
  enough is admitted before all later jobs, once the jobs before it have ended. A job for which they are not enough
  keeps its position and does not block later ones.
- While no other job waits, a job may get more workers than it needs, one for each reward worker. If a job waits that
  could start with these, they are listed in `surplus_to_return`. They stay with their job until it calls
  `return_worker`.
- When a running job loses a worker, no job is admitted until it is replaced. After `RESTART_LIMIT_S` without one, a
  resumed driver releases all of the job's workers, and the job waits again at its earlier position. A worker is
  reserved for a job's next driver for `RESTART_LIMIT_S` at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from staleflow.pipeline.cluster.gang import (
    DRIVER,
    EXCLUSIVE_ROLES,
    ROLLOUT,
    Gang,
    Needs,
    describe_workers,
    make_hosts,
)
from staleflow.pipeline.cluster.worker_pool import RESTART_LIMIT_S, Claim, DeviceUuidsByWorker, WorkerPool
from staleflow.pipeline.placement.placement import Shortage, place, placement_text

WAITS_FOR_RESTART = "needs the workers of its earlier driver to restart"
"""Reason shown for a job that waits after its driver was lost."""
WAITS_FOR_GPU_REPORT = "needs new workers to report their GPUs"
"""Reason shown for a job that waits for new workers to report their GPUs."""


@dataclass(slots=True)
class QueueEntry:
    """A job that is waiting for workers or has them. wait_limit_s: maximum seconds to wait; 0: no limit."""

    id: str
    run_dir: str
    needs: Needs
    wait_limit_s: float
    waiting_since_s: float
    """Time at which it began to wait."""
    num_workers: int = 0
    """Number of workers at its admission, including workers lost since; 0 while it waits."""
    incomplete_since_s: float | None = None
    """Time at which its driver first requested a replacement and none was free; None if it has all its workers."""
    reason: str = ""
    """Why it waits, as shown to users."""


class JobQueue(WorkerPool):
    """The jobs of one cluster in the order in which they were added, and the cluster's workers."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[str, QueueEntry] = {}
        self.surplus_to_return: dict[str, list[str]] = {}
        """Workers that running jobs do not need and should return, by job."""

    # -- workers -------------------------------------------------------------------------------------------------

    def reserve_or_restart(self, address: str, now: float) -> None:
        """Handle a worker of `restart_claims`: reserve it for its job if only an engine runs on it and the job is
        waiting; otherwise have it restarted."""
        claim = self.restart_claims.get(address)
        if claim is not None and claim.roles == (ROLLOUT,) and self.is_waiting(claim.job):
            self._reservations[address] = self.restart_claims.pop(address), now
        else:
            self._pending_restarts.append(address)

    # -- GPUs ----------------------------------------------------------------------------------------------------

    def cuda_visible_devices(self, id: str) -> dict[str, str]:
        """Return the value of CUDA_VISIBLE_DEVICES for each worker of a job, by address; empty if it uses no GPU."""
        return {
            address: ",".join(
                d.visible_id for uuid in claim.device_uuids for d in self.worker_gpus[address].devices if d.uuid == uuid
            )
            for address, claim in self.claims.items()
            if claim.job == id and self.uses_gpus(self.entries[id].needs)
        }

    def placement_text(self, id: str) -> str:
        """Return the job's roles on hosts and GPUs as several lines of text; empty if it uses no GPU."""
        if not self.cuda_visible_devices(id):
            return ""
        hosts = make_hosts(self.worker_gpus, self._role_sets_of_all(), ())
        other_gpus = [uuid for uuid, job in self._gpu_owners().items() if job != id]
        return placement_text(hosts, self._assignments_of(id), other_gpus)

    def claim_gpu_worker(
        self, id: str, role: str, avoided_workers: Sequence[str] = (), *, dry_run: bool = False
    ) -> str:
        """Assign a worker with GPUs to a role of a running job, in place of a lost worker or in addition. Returns the
        worker's address; empty if none is suitable.

        Args:
            avoided_workers: Workers that may not be chosen.
            dry_run: Only find the worker, without claiming it.
        """
        entry = self.entries.get(id)
        if entry is None or not entry.num_workers:
            return ""
        avoided_assignments = [
            (claim.roles[0], self._assignment_of(address, claim))
            for address, claim in self.claims.items()
            if address in avoided_workers and claim.job == id
        ]
        lost_assignments = [assignment for assignment in self._lost_assignments.get(id, ()) if assignment[0] == role]
        previous = self._assignments_of(id)
        if replaced_assignments := [*lost_assignments, *(pair for pair in avoided_assignments if pair[0] == role)]:
            previous[role] = replaced_assignments[0][1]
        hosts = make_hosts(
            self.worker_gpus,
            self._role_sets_of_all(),
            [address for address in self.free_workers if address not in avoided_workers],
        )
        placement = place(hosts, [entry.needs.heavy_role(role, role)], gpu_owners=self._gpu_owners(), previous=previous)
        if isinstance(placement, Shortage):
            return ""
        assignment = placement.assignments[role]
        if not dry_run:
            if lost_assignments:
                self._lost_assignments[id].remove(lost_assignments[0])
            self.claims[assignment.process] = Claim(id, entry.run_dir, (role,), assignment.device_uuids)
        return assignment.process

    # -- jobs ----------------------------------------------------------------------------------------------------

    def add_job(self, id: str, run_dir: str, needs: Needs, wait_limit_s: float, now: float) -> None:
        """Add a job at the end of the queue. A job that is in the queue keeps its position."""
        if id not in self.entries:
            self.entries[id] = QueueEntry(id, run_dir, needs, wait_limit_s, now)

    def is_waiting(self, id: str) -> bool:
        """Whether a job is in the queue and has no workers."""
        return id in self.entries and not self.entries[id].num_workers

    def remove_job(self, id: str) -> None:
        """Remove a job and release its workers. It must have no actors left on them."""
        self.entries.pop(id, None)
        self._lost_assignments.pop(id, None)
        self._release(id)

    def restart_gpu_workers(self, id: str, addresses: Sequence[str]) -> None:
        """Restart the workers of a job that used GPUs, because a process does not free all GPU memory and cannot change
        its visible GPUs. addresses: workers that can be restarted."""
        for address in addresses:
            if (claim := self.claims.get(address)) is not None and claim.job == id and claim.device_uuids:
                self._restart_claimed(address)

    def requeue(self, id: str, now: float) -> None:
        """Make a job wait again at its position, and release its workers. No actors may be left on them, except engines
        of a reservation. Workers with engines or GPUs are restarted."""
        entry = self.entries[id]
        for address in self._engine_workers & set(self.workers_of(id)):
            self._restart_claimed(address)
        self.restart_gpu_workers(id, list(self.workers_of(id)))
        entry.num_workers, entry.incomplete_since_s, entry.waiting_since_s = 0, None, now
        self._lost_assignments.pop(id, None)
        self._release(id)

    def requeue_after_driver_loss(self, id: str, now: float) -> list[str]:
        """Make a job whose driver was lost wait again. Returns its former workers, each of which must be restarted or
        reserved (`reserve_or_restart`)."""
        former_workers = list(self.workers_of(id))
        for address in former_workers:
            self.restart_claims[address] = self.claims.pop(address)
        self.requeue(id, now)
        return former_workers

    def admit_jobs(self, now: float) -> tuple[dict[str, Gang], list[str]]:
        """Admit all jobs that can start, in order. Returns the workers of each admitted job, and the jobs that have
        waited longer than their limit, which the caller must end."""
        self._expire(now)
        workers = self.free_workers
        is_incomplete = any(entry.num_workers and not self._has_all_workers(entry) for entry in self.entries.values())
        admitted_gangs: dict[str, Gang] = {}
        self.surplus_to_return = {}
        expired_ids: list[str] = []
        num_ahead = 0
        for entry in self.entries.values():
            if entry.num_workers:
                continue
            if any(claim.run_dir == entry.run_dir for claim in self.restart_claims.values()):
                num_ahead += 1
                entry.reason = WAITS_FOR_RESTART
                continue
            if entry.needs.gpus_per_instance and self.awaits_gpu_reports(now):
                num_ahead += 1
                entry.reason = WAITS_FOR_GPU_REPORT
                continue
            reserved_workers = self._reserved_workers(entry.id)
            can_start = not num_ahead and not is_incomplete
            with_surplus = self._is_only_waiting(entry.id)
            selection = (
                self._choose_workers_and_gpus(
                    entry.needs, workers, engine_workers=reserved_workers, id=entry.id, with_surplus=with_surplus
                )
                if can_start
                else None
            )
            if selection is not None and any(
                selection[0].get(address) not in ((ROLLOUT,), None) for address in reserved_workers
            ):
                for address in reserved_workers:
                    self._cancel_reservation(address)
                num_ahead += 1
                entry.reason = WAITS_FOR_RESTART
                continue
            if selection is not None:
                self._grant(entry, *selection)
                admitted_gangs[entry.id] = selection[0]
                workers = self.free_workers
            elif self._is_large_enough(entry.needs):
                position_text = (
                    f"{num_ahead} job{'s' if num_ahead > 1 else ''} before it" if num_ahead else "next in line"
                )
                shortage = "" if num_ahead else self._describe_shortage(entry.needs, workers)
                entry.reason = f"needs {entry.needs}; free {len(workers)} of {len(self.workers)}; {position_text}" + (
                    f"; {shortage}" if shortage else ""
                )
                if can_start:
                    self._request_surplus(entry.needs, workers)
                num_ahead += 1
            else:
                description = describe_workers(self.workers)
                if shortage := self.gpu_shortage(entry.needs):
                    description += f"; {shortage}"
                entry.reason = f"needs {entry.needs}; {description}; starts once there are enough"
            if not entry.num_workers and entry.wait_limit_s and now - entry.waiting_since_s > entry.wait_limit_s:
                expired_ids.append(entry.id)
        return admitted_gangs, expired_ids

    def _expire(self, now: float) -> None:
        """Remove workers that have not restarted within RESTART_LIMIT_S, and cancel reservations of that age."""
        for address in [a for a, (_, since) in self._disconnected.items() if now - since > RESTART_LIMIT_S]:
            self._remove_disconnected(address)
            self._role_sets = None
        for address in [a for a, (_, since) in self._reservations.items() if now - since > RESTART_LIMIT_S]:
            self._cancel_reservation(address)

    def replace_lost_workers(self, id: str, now: float, driver_worker: str = "") -> bool:
        """Replace the lost workers of an admitted job by free ones. Returns whether it now has all its workers. If some
        are still missing after RESTART_LIMIT_S, the job waits again, without workers."""
        entry, workers = self.entries[id], self.workers_of(id)
        if not entry.num_workers:
            return False
        if self._has_all_workers(entry):
            return True
        engine_workers = [address for address in workers if address in self._engine_workers]
        without_engine = [address for address in workers if address not in self._engine_workers]
        with_surplus = self._is_only_waiting(id)
        free_workers = [*without_engine, *self.free_workers]
        selection = self._choose_workers_and_gpus(
            entry.needs, free_workers, driver_worker, engine_workers, id=id, with_surplus=with_surplus
        )
        if selection is not None and (
            misused_workers := [address for address in engine_workers if selection[0].get(address) != (ROLLOUT,)]
        ):
            for address in misused_workers:
                self._restart_claimed(address)
            selection = None
        if selection is not None:
            self.restart_gpu_workers(id, [address for address in workers if address not in selection[0]])
            self._release(id)
            self._grant(entry, *selection)
            self._engine_workers.update(engine_workers)
            return True
        entry.incomplete_since_s = now if entry.incomplete_since_s is None else entry.incomplete_since_s
        entry.reason = f"needs {entry.needs}; has {len(workers)} of them left"
        if now - entry.incomplete_since_s > RESTART_LIMIT_S:
            self.requeue(id, now)
        return False

    def _has_all_workers(self, entry: QueueEntry) -> bool:
        """Whether an admitted job has as many workers as at its admission, and enough for each role: optional instances
        replace no other role."""
        gang, needs = self.workers_of(entry.id), entry.needs
        counts = Counter(role for roles in gang.values() for role in roles)
        required_counts = Counter(role.name.partition("-")[0] for role in needs.heavy_roles)
        required_counts.update(("server", "reward", DRIVER) if needs.has_driver_worker else ("server", "reward"))
        return len(gang) >= entry.num_workers and required_counts <= counts

    def claim_worker(self, id: str, address: str, role: str) -> bool:
        """Assign a worker to a running job in place of a lost one. Returns False if the worker belongs to another job
        or has left. Idempotent."""
        claim, entry = self.claims.get(address), self.entries.get(id)
        if entry is None or not entry.num_workers or (claim is not None and claim.job != id):
            return False
        if claim is None:
            if address in self.restart_claims or address in self._reservations or address not in self.workers:
                return False
            self.claims[address] = Claim(id, entry.run_dir, (role,))
        elif role not in EXCLUSIVE_ROLES:  # the role shares this worker from now on
            self.claims[address] = replace(claim, roles=tuple(dict.fromkeys((*claim.roles, role))))
            entry.num_workers -= len(self.workers_of(id)) < entry.num_workers
        return True

    def return_worker(self, id: str, address: str) -> bool:
        """Release a worker that a running job does not need. The job must have no actors left on it. Returns False, and
        changes nothing, if the job needs the worker."""
        if address not in self._surplus_workers(id):
            return False
        del self.claims[address]
        self.entries[id].num_workers -= 1
        return True

    def _surplus_workers(self, id: str) -> list[str]:
        """Workers that a job does not need: each runs only a reward worker, which another of its workers can run."""
        reward_workers = [address for address, roles in self.workers_of(id).items() if "reward" in roles]
        reward_only = [address for address in reward_workers if self.claims[address].roles == ("reward",)]
        return reward_only[1:] if len(reward_only) == len(reward_workers) else reward_only

    def _request_surplus(self, needs: Needs, workers: list[str]) -> None:
        """Set `surplus_to_return` if a job could start with the workers that running jobs do not need."""
        surplus_workers = {address: id for id in self.entries for address in self._surplus_workers(id)}
        selection = self._choose_workers_and_gpus(needs, [*workers, *surplus_workers], with_surplus=False)
        for address in selection[0] if selection is not None else ():
            if address in surplus_workers:
                self.surplus_to_return.setdefault(surplus_workers[address], []).append(address)

    def _is_only_waiting(self, id: str) -> bool:
        """Whether no job but this one waits."""
        return not any(self.is_waiting(other) for other in self.entries if other != id)

    def _grant(self, entry: QueueEntry, gang: Gang, devices: DeviceUuidsByWorker) -> None:
        entry.num_workers, entry.incomplete_since_s, entry.reason = len(gang), None, ""
        for address in self._reserved_workers(entry.id):
            if address in gang:
                del self._reservations[address]
                self._engine_workers.add(address)
            else:
                self._cancel_reservation(address)
        self._lost_assignments.pop(entry.id, None)
        self.claims |= {
            address: Claim(entry.id, entry.run_dir, roles, devices.get(address, ())) for address, roles in gang.items()
        }


def find_driver_worker(gang: Gang) -> str:
    """Return the address of the worker that runs a job's driver; empty if there is none."""
    return next((address for address, roles in gang.items() if DRIVER in roles), "")
