"""Choosing the worker processes that a job needs, all at once or none.

Each rollout instance and each rank of the trainer need a worker of their own; the light roles (the driver of a
submitted job, the trajectory server, the reward workers) share one. Once any worker of the cluster declares a role as a
resource, a role goes only to workers that declare it. Then the light roles may need several workers, and each reward
worker is given one of its own if one is free that declares neither rollout nor trainer and that no job waits for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from staleflow.pipeline.config.run_roles import tensor_parallel, uses_gpus
from staleflow.pipeline.config.size_plan import gpu_bytes
from staleflow.pipeline.placement.devices import Device, Host, Process
from staleflow.pipeline.placement.placement import Role, RoleKind

if TYPE_CHECKING:
    from staleflow.pipeline.config.schema import RunConfig

DRIVER = "driver"
ROLLOUT = "rollout"
EXCLUSIVE_ROLES = (ROLLOUT, "trainer")
ROLES = ("server", "reward", *EXCLUSIVE_ROLES)

Resources = Mapping[str, Mapping[str, float]]
"""What the workers of a cluster declare, by address."""
Gang = dict[str, tuple[str, ...]]
"""The roles of each chosen worker, by address."""
Kind = frozenset[str]
"""The roles that a worker may take. Workers of one kind are interchangeable."""
Kinds = dict[str, Kind]
"""The kind of each worker, by address."""


ROLE_KINDS = {
    ROLLOUT: RoleKind.INSTANCE,
    "trainer": RoleKind.RANK,
    "reward": RoleKind.ENVIRONMENT,
    "server": RoleKind.LIGHT,
    DRIVER: RoleKind.LIGHT,
}
"""What a worker that may take a role may have placed on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGpus:
    """The GPUs that a worker reports, in its order."""

    host: str
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The actors of a job. driver: whether its driver runs on a worker too. ranks: processes of the trainer, with a GPU
    each. instance_gpus: GPUs of an instance; 0: the job computes on none. gpus: most that it may have; 0: all.
    rank_bytes, instance_bytes: memory that a rank and an instance need of each GPU; 0: not known."""

    instances: int
    rewards: int
    driver: bool
    ranks: int = 1
    instance_gpus: int = 0
    gpus: int = 0
    rank_bytes: int = 0
    instance_bytes: int = 0

    @classmethod
    def of(cls, config: RunConfig, *, driver: bool) -> Needs:
        on_gpus = uses_gpus(config)
        rank_bytes, instance_bytes = gpu_bytes(config) if on_gpus else (0, 0)
        return cls(
            instances=config.rollout.instances,
            rewards=len(config.reward_actors),
            driver=driver,
            ranks=config.training.ranks,
            instance_gpus=tensor_parallel(config) if on_gpus else 0,
            gpus=config.cluster.gpus,
            rank_bytes=rank_bytes,
            instance_bytes=instance_bytes,
        )

    @property
    def num_gpus(self) -> int:
        return self.instances * self.instance_gpus + self.ranks if self.instance_gpus else 0

    @property
    def heavy_roles(self) -> list[Role]:
        """Its rollout instances and ranks, to be placed on GPUs."""
        ranks = [self.heavy_role("trainer", f"trainer-{n}") for n in range(self.ranks)]
        return ranks + [self.heavy_role(ROLLOUT, f"{ROLLOUT}-{n}") for n in range(self.instances)]

    def heavy_role(self, role: str, name: str) -> Role:
        """A rank or an instance under a name."""
        num_devices, memory_bytes = (
            (self.instance_gpus, self.instance_bytes) if role == ROLLOUT else (1, self.rank_bytes)
        )
        return Role(name=name, kind=ROLE_KINDS[role], num_devices=num_devices, memory_bytes=memory_bytes)

    @property
    def light(self) -> Needs:
        """Without the actors that need a worker of their own."""
        return replace(self, instances=0, ranks=0)

    def __str__(self) -> str:
        instances = "1 rollout instance" if self.instances == 1 else f"{self.instances} rollout instances"
        trainer = "the trainer" if self.ranks == 1 else f"{self.ranks} ranks of the trainer"
        count = self.instances + self.ranks + 1
        return f"{count} worker processes ({instances}, {trainer}, one for the light roles)"


def choose(
    needs: Needs,
    kinds: Kinds,
    free: Iterable[str],
    driver_at: str = "",
    engines: Sequence[str] = (),
    *,
    surplus: bool = True,
) -> Gang | None:
    """The workers for a job, out of the free ones, earlier ones preferred; None if they do not suffice. kinds: of all
    workers. driver_at: one of the free ones, on which the job's driver is already. engines: further ones that have the
    job's engines, preferred for rollout instances; they get another role only if the free ones do not suffice. surplus:
    whether reward workers get workers of their own that the job can do without."""
    of_kind: dict[Kind, list[str]] = defaultdict(list)
    for address in (*free, *engines):
        if address != driver_at:
            of_kind[kinds[address]].append(address)
    counts = Counter({kind: len(addresses) for kind, addresses in of_kind.items()})
    chosen = _assigned(needs, counts, kinds[driver_at] if driver_at else None)
    if chosen is None:
        return None
    waiting = {kind: iter(addresses) for kind, addresses in of_kind.items()}
    gang = {driver_at: chosen.pop(0)[1]} if driver_at else {}
    gang |= {next(waiting[kind]): roles for kind, roles in chosen}
    rest = sorted(waiting, key=lambda kind: (len(kind), sorted(kind)))
    unused = [address for kind in rest if "rollout" in kind for address in waiting[kind]]
    unused.sort(key=lambda address: address not in engines)
    gang |= dict.fromkeys(unused[: needs.instances], (ROLLOUT,))
    if not surplus:
        return gang
    spare = [
        address for kind in rest if "reward" in kind and not kind & set(EXCLUSIVE_ROLES) for address in waiting[kind]
    ]
    return gang | dict.fromkeys(spare[: needs.rewards], ("reward",))


def suffice(needs: Needs, kinds: Kinds) -> bool:
    """Whether a job could run if it had all these workers."""
    return _assigned(needs, Counter(kinds.values())) is not None


def missing(needs: Needs, kinds: Kinds, free: Sequence[str]) -> str:
    """Which workers a job waits for, for messages: the roles of which one more would do, or how many of each are free
    where workers declare roles; empty if they are all alike."""
    if len(set(kinds.values())) < 2:
        return ""
    enough = [
        role
        for role in ROLES
        if choose(needs, kinds | {role: frozenset((role,))}, [*free, role], surplus=False) is not None
    ]
    if enough:
        return f"one more with resource {' or '.join(f'{role}=1' for role in enough)} would do"
    return "of these " + ", ".join(f"{role} {sum(role in kinds[address] for address in free)}" for role in ROLES)


def kinds_of(workers: Resources) -> Kinds:
    """The roles that each worker may take, by address."""
    declared = {role for resources in workers.values() for role in resources}
    limited = (set(ROLES) if declared & set(ROLES) else set()) | (declared & {DRIVER})
    return {
        address: frozenset(r for r in (DRIVER, *ROLES) if r not in limited or resources.get(r, 0) > 0)
        for address, resources in workers.items()
    }


def hosts_of(gpus: Mapping[str, WorkerGpus], kinds: Kinds, free: Iterable[str]) -> list[Host]:
    """The machines of a cluster with all GPUs that their workers see, and with the free ones of these workers."""
    devices: dict[str, dict[str, Device]] = defaultdict(dict)
    processes: dict[str, list[Process]] = defaultdict(list)
    for own in gpus.values():
        devices[own.host] |= {device.uuid: device for device in own.devices}
    for address in free:
        if address in gpus:
            own = gpus[address]
            able = frozenset(ROLE_KINDS[role].value for role in kinds[address])
            uuids = tuple(device.uuid for device in own.devices)
            processes[own.host].append(Process(name=address, devices=uuids, kinds=able))
    return [
        Host(
            name=name,
            devices=tuple(sorted(by_uuid.values(), key=lambda device: (len(device.visible), device.visible))),
            processes=tuple(processes[name]),
        )
        for name, by_uuid in devices.items()
    ]


def existing(workers: Resources) -> str:
    """What a cluster has of workers, for messages.

    >>> existing({"a": {"trainer": 1}, "b": {"rollout": 1}, "c": {"rollout": 1}})
    'the cluster has 3; declared: server 0, reward 0, rollout 2, trainer 1'
    """
    kinds = kinds_of(workers).values()
    counts = {role: sum(role in kind for kind in kinds) for role in (DRIVER, *ROLES)}
    declared = ", ".join(f"{role} {count}" for role, count in counts.items() if count < len(workers))
    return f"the cluster has {len(workers)}" + (f"; declared: {declared}" if declared else "")


def _assigned(
    needs: Needs, counts: Counter[Kind], driver_at: Kind | None = None
) -> list[tuple[Kind, tuple[str, ...]]] | None:
    """The kinds of the workers for all roles but rollout, with their roles; None if the workers do not suffice."""
    if driver_at is not None:
        return _assign(["server", "reward"], [(driver_at, (DRIVER,))], counts, needs)
    return _assign(["server", DRIVER, "reward"] if needs.driver else ["server", "reward"], [], counts, needs)


def _assign(
    roles: Sequence[str], taken: list[tuple[Kind, tuple[str, ...]]], left: Counter[Kind], needs: Needs
) -> list[tuple[Kind, tuple[str, ...]]] | None:
    """Assign light roles to the workers taken so far or to others, such that enough are left for the heavy ones, and
    then the trainer's ranks; tries all ways, few as there are few kinds. None if there is none."""
    if not roles:
        ranks = _ranks(left, needs)
        return None if ranks is None else [*taken, *ranks]
    role, *others = roles
    for i, (kind, assigned) in enumerate(taken):
        if role in kind:
            assignment = _assign(others, [*taken[:i], (kind, (*assigned, role)), *taken[i + 1 :]], left, needs)
            if assignment is not None:
                return assignment
    for kind in sorted(left, key=lambda kind: (len(kind), sorted(kind))):  # what can do little else comes first
        if role in kind and left[kind]:
            assignment = _assign(others, [*taken, (kind, (role,))], left - Counter([kind]), needs)
            if assignment is not None:
                return assignment
    return None


def _ranks(left: Counter[Kind], needs: Needs) -> list[tuple[Kind, tuple[str, ...]]] | None:
    """Workers for the trainer's ranks, such that enough are left for the rollout instances; None if there are not."""
    spare = sum(n for kind, n in left.items() if "rollout" in kind) - needs.instances
    if spare < 0:
        return None
    taken: list[Kind] = []
    for kind in sorted(left, key=lambda kind: (len(kind), sorted(kind))):  # what can do little else comes first
        if "trainer" in kind:
            count = min(left[kind], needs.ranks - len(taken))
            if "rollout" in kind:
                count = min(count, spare)
                spare -= count
            taken += [kind] * count
    return [(kind, ("trainer",)) for kind in taken] if len(taken) == needs.ranks else None
