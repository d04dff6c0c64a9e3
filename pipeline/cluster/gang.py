"""Chooses the worker processes for a job, all at once or none (gang scheduling).

Each rollout instance, each rank of the trainer and each teacher needs its own worker. The light roles (the driver of a
submitted job, the trajectory server, the reward workers) can share one worker. A role that some worker of the cluster
declares as a Dask resource is restricted to workers that declare it, so the light roles may need several workers. A
reward worker gets its own worker if a free one can take no other role but light ones, and no other job waits for it.

All functions are pure; the worker pool tracks which workers are free.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from staleflow.pipeline.config.size_plan import gpu_bytes, uses_gpus
from staleflow.pipeline.placement.devices import Device, Host, Process
from staleflow.pipeline.placement.placement import Role, RoleKind
from staleflow.pipeline.sizing.memory import num_gpus_of

if TYPE_CHECKING:
    from staleflow.pipeline.config.schema import RunConfig

DRIVER = "driver"
ROLLOUT = "rollout"
EXCLUSIVE_ROLES = (ROLLOUT, "trainer", "teacher")
ROLES = ("server", "reward", *EXCLUSIVE_ROLES)

ResourcesByWorker = Mapping[str, Mapping[str, float]]
"""The Dask resources that each worker declares, by its address."""
Gang = dict[str, tuple[str, ...]]
"""The roles of each chosen worker, by address."""
RoleSet = frozenset[str]
"""The set of roles that a worker may take. Workers with the same set are interchangeable."""
RoleSetByWorker = dict[str, RoleSet]
"""The role set of each worker, by address."""


ROLE_KINDS = {
    ROLLOUT: RoleKind.INSTANCE,
    "trainer": RoleKind.RANK,
    "teacher": RoleKind.TEACHER,
    "reward": RoleKind.ENVIRONMENT,
    "server": RoleKind.LIGHT,
    DRIVER: RoleKind.LIGHT,
}
"""The kind of each role for the placement on GPUs (placement.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGpus:
    """The host of a worker, and the GPUs that it reports, in the worker's order."""

    host: str
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Number of actors of each role of a job, and their GPUs.

    has_driver_worker: whether the job's driver runs on a worker, too. num_ranks: processes of the trainer, each with
    one GPU.
    gpus_per_instance: 0 if the job uses no GPUs. max_gpus: the job's limit on GPUs, 0 for no limit. rank_bytes,
    instance_bytes, teacher_bytes: memory that a rank, an instance or a teacher needs on each of its GPUs, 0 if not
    known.
    """

    num_instances: int
    num_reward_workers: int
    has_driver_worker: bool
    num_ranks: int = 1
    gpus_per_instance: int = 0
    max_gpus: int = 0
    rank_bytes: int = 0
    instance_bytes: int = 0
    num_teachers: int = 0
    gpus_per_teacher: int = 0
    teacher_bytes: int = 0

    @classmethod
    def from_config(cls, config: RunConfig, *, has_driver_worker: bool) -> Needs:
        """Return the needs of a job. has_driver_worker: whether its driver runs on a worker, too."""
        is_on_gpus = uses_gpus(config)
        rank_bytes, instance_bytes, teacher_bytes = gpu_bytes(config) if is_on_gpus else (0, 0, 0)
        return cls(
            num_instances=config.rollout.instances,
            num_reward_workers=len(config.reward_actors),
            has_driver_worker=has_driver_worker,
            num_ranks=config.training.ranks,
            gpus_per_instance=num_gpus_of(config.rollout.engine) if is_on_gpus else 0,
            max_gpus=config.cluster.gpus,
            rank_bytes=rank_bytes,
            instance_bytes=instance_bytes,
            num_teachers=len(config.teachers),
            gpus_per_teacher=num_gpus_of(config.teacher.engine) if is_on_gpus else 0,
            teacher_bytes=teacher_bytes,
        )

    @property
    def num_gpus(self) -> int:
        """GPUs of all instances, ranks and teachers; 0 if the job uses no GPUs."""
        if not self.gpus_per_instance:
            return 0
        return sum(role.num_devices for role in self.heavy_roles)

    @property
    def heavy_roles(self) -> list[Role]:
        """The ranks, rollout instances and teachers of the job, which are placed on GPUs."""
        counts = {"trainer": self.num_ranks, ROLLOUT: self.num_instances, "teacher": self.num_teachers}
        return [self.heavy_role(role, f"{role}-{n}") for role, count in counts.items() for n in range(count)]

    def heavy_role(self, role: str, name: str) -> Role:
        """Return the role of a rank (`trainer`), an instance (`rollout`) or a teacher for the placement on GPUs."""
        num_devices, memory_bytes = {
            "trainer": (1, self.rank_bytes),
            ROLLOUT: (self.gpus_per_instance, self.instance_bytes),
            "teacher": (self.gpus_per_teacher, self.teacher_bytes),
        }[role]
        return Role(name=name, kind=ROLE_KINDS[role], num_devices=num_devices, memory_bytes=memory_bytes)

    @property
    def light_needs(self) -> Needs:
        """The needs of the light roles only, without instances, ranks and teachers."""
        return replace(self, num_instances=0, num_ranks=0, num_teachers=0)

    def __str__(self) -> str:
        instances = "1 rollout instance" if self.num_instances == 1 else f"{self.num_instances} rollout instances"
        trainer = "the trainer" if self.num_ranks == 1 else f"{self.num_ranks} ranks of the trainer"
        teachers = f"{self.num_teachers} teacher{'s' if self.num_teachers > 1 else ''}, " if self.num_teachers else ""
        count = self.num_instances + self.num_ranks + self.num_teachers + 1
        return f"{count} worker processes ({instances}, {trainer}, {teachers}one for the light roles)"


def choose_workers(
    needs: Needs,
    role_sets: RoleSetByWorker,
    workers: Iterable[str],
    driver_worker: str = "",
    engine_workers: Sequence[str] = (),
    *,
    with_surplus: bool = True,
) -> Gang | None:
    """Choose the workers for a job; None if the free workers do not suffice.

    role_sets: the roles that each worker may take, for all workers. workers: addresses of free workers; earlier
    ones are preferred. driver_worker: the free worker on which the job's driver runs already. engine_workers:
    addresses of more workers, on which engines of this job are loaded. They are preferred for rollout instances and
    get another role only if the free workers do not suffice. with_surplus: whether reward workers also get workers of
    their own.
    """
    workers_by_set: dict[RoleSet, list[str]] = defaultdict(list)
    for address in (*workers, *engine_workers):
        if address != driver_worker:
            workers_by_set[role_sets[address]].append(address)
    counts = Counter({role_set: len(addresses) for role_set, addresses in workers_by_set.items()})
    assignments: list[tuple[RoleSet, tuple[str, ...]]] = []
    light_roles = ["server", DRIVER, "reward"] if needs.has_driver_worker else ["server", "reward"]
    if driver_worker:
        assignments, light_roles = [(role_sets[driver_worker], (DRIVER,))], ["server", "reward"]
    assignment = _assign(light_roles, assignments, counts, needs)
    if assignment is None:
        return None
    addresses_by_set = {role_set: iter(addresses) for role_set, addresses in workers_by_set.items()}
    gang = {driver_worker: assignment.pop(0)[1]} if driver_worker else {}
    gang |= {next(addresses_by_set[role_set]): roles for role_set, roles in assignment}
    unassigned_sets = _sort_by_flexibility(addresses_by_set)
    rollout_workers = [
        address for role_set in unassigned_sets if "rollout" in role_set for address in addresses_by_set[role_set]
    ]
    rollout_workers.sort(key=lambda address: address not in engine_workers)
    gang |= dict.fromkeys(rollout_workers[: needs.num_instances], (ROLLOUT,))
    if not with_surplus:
        return gang
    spare_workers = [
        address
        for role_set in unassigned_sets
        if "reward" in role_set and not role_set & set(EXCLUSIVE_ROLES)
        for address in addresses_by_set[role_set]
    ]
    return gang | dict.fromkeys(spare_workers[: needs.num_reward_workers], ("reward",))


def describe_shortage(needs: Needs, role_sets: RoleSetByWorker, workers: Sequence[str]) -> str:
    """Describe which workers a job is waiting for, for messages; empty if all workers may have the same roles.

    Names the roles of which one more worker would suffice, or else how many free workers there are for each role.
    """
    if len(set(role_sets.values())) < 2:
        return ""
    sufficient_roles = [
        role
        for role in ROLES
        if choose_workers(needs, role_sets | {role: frozenset((role,))}, [*workers, role], with_surplus=False)
        is not None
    ]
    if sufficient_roles:
        return f"one more with resource {' or '.join(f'{role}=1' for role in sufficient_roles)} would be enough"
    roles = [role for role in ROLES if role != "teacher" or needs.num_teachers]
    return "of these " + ", ".join(f"{role} {sum(role in role_sets[address] for address in workers)}" for role in roles)


def roles_by_worker(workers: ResourcesByWorker) -> RoleSetByWorker:
    """The roles that each worker may have, by address."""
    declared_roles = {role for resources in workers.values() for role in resources}
    limited_roles = (set(ROLES) if declared_roles & set(ROLES) else set()) | (declared_roles & {DRIVER})
    return {
        address: frozenset(r for r in (DRIVER, *ROLES) if r not in limited_roles or resources.get(r, 0) > 0)
        for address, resources in workers.items()
    }


def make_hosts(
    gpus_by_worker: Mapping[str, WorkerGpus], role_sets: RoleSetByWorker, workers: Iterable[str]
) -> list[Host]:
    """The hosts of a cluster with all GPUs that their workers report, and with the free workers as processes."""
    devices: dict[str, dict[str, Device]] = defaultdict(dict)
    processes: dict[str, list[Process]] = defaultdict(list)
    for worker_gpus in gpus_by_worker.values():
        devices[worker_gpus.host] |= {device.uuid: device for device in worker_gpus.devices}
    for address in workers:
        if address in gpus_by_worker:
            worker_gpus = gpus_by_worker[address]
            role_kinds = frozenset(ROLE_KINDS[role].value for role in role_sets[address])
            uuids = tuple(device.uuid for device in worker_gpus.devices)
            processes[worker_gpus.host].append(Process(name=address, device_uuids=uuids, role_kinds=role_kinds))
    return [
        Host(
            name=name,
            devices=tuple(sorted(by_uuid.values(), key=lambda device: (len(device.visible_id), device.visible_id))),
            processes=tuple(processes[name]),
        )
        for name, by_uuid in devices.items()
    ]


def describe_workers(workers: ResourcesByWorker) -> str:
    """Describe the number of workers of a cluster, and how many may have each restricted role, for messages.

    >>> describe_workers({"a": {"trainer": 1}, "b": {"rollout": 1}, "c": {"rollout": 1}})
    'the cluster has 3; declared: server 0, reward 0, rollout 2, trainer 1, teacher 0'
    """
    role_sets = roles_by_worker(workers).values()
    counts = {role: sum(role in role_set for role_set in role_sets) for role in (DRIVER, *ROLES)}
    declared_counts = ", ".join(f"{role} {count}" for role, count in counts.items() if count < len(workers))
    return f"the cluster has {len(workers)}" + (f"; declared: {declared_counts}" if declared_counts else "")


def _assign(
    roles: Sequence[str], assignments: list[tuple[RoleSet, tuple[str, ...]]], available: Counter[RoleSet], needs: Needs
) -> list[tuple[RoleSet, tuple[str, ...]]] | None:
    """Assign the light roles, then the trainer's ranks and the teachers, such that enough workers are left for rollout
    instances. Returns the role set and roles of each worker, without rollout instances.

    Each light role goes to a worker in `assignments` or to an available one. Tries all possibilities, which are
    few since there are few role sets. None if no assignment is possible.
    """
    if not roles:
        heavy_roles = _ranks_and_teachers(available, needs)
        return None if heavy_roles is None else [*assignments, *heavy_roles]
    role, *other_roles = roles
    for i, (role_set, worker_roles) in enumerate(assignments):
        if role in role_set:
            assignment = _assign(
                other_roles,
                [*assignments[:i], (role_set, (*worker_roles, role)), *assignments[i + 1 :]],
                available,
                needs,
            )
            if assignment is not None:
                return assignment
    for role_set in _sort_by_flexibility(available):
        if role in role_set and available[role_set]:
            assignment = _assign(
                other_roles, [*assignments, (role_set, (role,))], available - Counter([role_set]), needs
            )
            if assignment is not None:
                return assignment
    return None


def _sort_by_flexibility(role_sets: Iterable[RoleSet]) -> list[RoleSet]:
    """Sort role sets in the order in which workers are used: those that may take the fewest roles first."""
    return sorted(role_sets, key=lambda role_set: (len(role_set), sorted(role_set)))


def _ranks_and_teachers(available: Counter[RoleSet], needs: Needs) -> list[tuple[RoleSet, tuple[str, ...]]] | None:
    """Workers for the trainer's ranks and the teachers, such that enough are left for the rollout instances; None if
    there are not."""
    num_left = Counter(available)
    num_needed = {"trainer": needs.num_ranks, "teacher": needs.num_teachers, ROLLOUT: needs.num_instances}

    def num_spare(roles: RoleSet) -> int:
        """Workers that may have one of these roles, beyond those that the roles still need."""
        return sum(n for role_set, n in num_left.items() if role_set & roles) - sum(num_needed[role] for role in roles)

    # All roles can be assigned if and only if each set of them has as many workers as it needs (Hall's theorem).
    role_groups = [frozenset(roles) for n in (1, 2, 3) for roles in itertools.combinations(num_needed, n)]
    if min(map(num_spare, role_groups)) < 0:
        return None
    assignments: list[tuple[RoleSet, tuple[str, ...]]] = []
    for role in ("trainer", "teacher"):
        for role_set in _sort_by_flexibility(available):
            if role in role_set:
                others = [num_spare(roles) for roles in role_groups if role not in roles and roles & role_set]
                count = min(num_left[role_set], num_needed[role], *others)
                num_left[role_set] -= count
                num_needed[role] -= count
                assignments += [(role_set, (role,))] * count
    return assignments
