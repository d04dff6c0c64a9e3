"""Which host and GPUs each process of a run gets.

Rules, which tests/placement/ checks on random fleets:
- A GPU has one role. With `share`, if a run has more roles than GPUs, it may have several whose memory fits side by
  side, but never two ranks of the trainer, which NCCL refuses. With `turns` it has an instance and a rank, which use
  it in turns, and each may use all of its memory; or a teacher.
- The GPUs of an instance, or of a teacher, are in one link domain of one host, and on one NUMA node if possible.
- Light roles get no GPU, and run on hosts without GPUs if there are any.
- A shortage is reported only if the roles do not fit: no GPU is idle while a role that fits it waits.
- A role keeps its previous assignment if its GPUs are still there. Otherwise it gets a GPU of the same host, or else of
  a host that has the run's weights already.
- Hosts are filled one after another, and the ranks of a trainer are on as few hosts as possible.
- A role's process sees its GPUs. Among several processes, the one with these GPUs first in its list and the fewest
  others is chosen.

The first five rules always hold if the processes of a host see either the same GPUs or disjoint ones. The last two are
preferences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from staleflow.pipeline.placement.devices import Device, Host, Process, describe

NO_ASSIGNMENTS: Mapping[str, Assignment] = {}
NO_OWNERS: Mapping[str, str] = {}
NAMELESS = Process(name="")
"""The process of a role on a host without a fixed list of processes."""


class RoleKind(Enum):
    """Kinds of roles. Roles of one kind in one run differ only in their names."""

    INSTANCE = "rollout instance"
    RANK = "rank of the trainer"
    TEACHER = "teacher"
    ENVIRONMENT = "environment host"
    LIGHT = "light role"


KINDS = frozenset(kind.value for kind in RoleKind)
PURPOSES = {RoleKind.INSTANCE: "rollout", RoleKind.RANK: "training", RoleKind.TEACHER: "teachers"}
"""What kinds of roles use their GPUs for, in messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A process to be placed. num_devices: GPUs that it computes on. memory_bytes: least memory of each; 0: any."""

    name: str
    kind: RoleKind
    num_devices: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Host, GPUs and process of one role. devices: UUIDs. process: its name; empty on hosts without a list of
    processes."""

    host: str
    devices: tuple[str, ...] = ()
    process: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The assignments of all roles, by name."""

    assignments: Mapping[str, Assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """The reason why roles do not fit."""

    line: str
    """What is missing and who uses it, in one line."""


def place(
    hosts: Sequence[Host],
    roles: Sequence[Role],
    *,
    used_gpus: Mapping[str, str] = NO_OWNERS,
    previous: Mapping[str, Assignment] = NO_ASSIGNMENTS,
    share: bool = False,
    turns: bool = False,
) -> Placement | Shortage:
    """Assign each role its host and GPUs. Deterministic.

    Args:
        hosts: All hosts; earlier ones are filled first.
        roles: The roles of one run.
        used_gpus: GPUs that others use: UUID to owner's name.
        previous: Previous assignments of these roles, by name.
        share: Whether roles may share GPUs if there are too few.
        turns: Whether an instance and a rank use the same GPUs in turns.
    """
    share = share and not turns and sum(role.num_devices for role in roles) > _num_free(hosts, used_gpus)
    shortage = None
    for to_keep in ({role.name: previous[role.name] for role in roles if role.name in previous}, {}):
        occupancy = _Occupancy.of(hosts, used_gpus, share=share, turns=turns)
        shortage = occupancy.place_all(roles, to_keep, previous)
        if shortage is None:
            return Placement(assignments={role.name: occupancy.assignments[role.name] for role in roles})
    assert shortage is not None
    return Shortage(line=_explain(hosts, roles, shortage, used_gpus, turns=turns))


@dataclass(slots=True)
class _DeviceRoles:
    """A device with the roles assigned to it so far."""

    device: Device
    host: str
    roles: list[Role] = field(default_factory=list)

    def fits(self, role: Role, *, share: bool, turns: bool) -> bool:
        if turns:
            has_kind = any(other.kind in (role.kind, RoleKind.TEACHER) for other in self.roles)
            has_kind |= bool(self.roles) and role.kind is RoleKind.TEACHER
            return not has_kind and (not self.device.memory_bytes or role.memory_bytes <= self.device.memory_bytes)
        if self.roles and not share:
            return False
        if role.kind is RoleKind.RANK and any(other.kind is RoleKind.RANK for other in self.roles):
            return False
        needed_bytes = role.memory_bytes + sum(other.memory_bytes for other in self.roles)
        return not self.device.memory_bytes or needed_bytes <= self.device.memory_bytes


@dataclass(frozen=True, slots=True)
class _VisibleDevices:
    """Devices of one link domain, and the processes of the host that see exactly these in it."""

    host: str
    devices: Sequence[_DeviceRoles]
    processes: Sequence[Process] | None
    """None: the host starts as many as are needed."""


@dataclass(slots=True)
class _Occupancy:
    """The assignments made so far, and the devices and processes that are left."""

    hosts: Sequence[Host]
    device_sets: Sequence[_VisibleDevices]
    """Devices that no other run uses, by the processes that see them."""
    share: bool
    turns: bool
    free_processes: dict[str, list[Process] | None]
    """Processes of each host without a role; None: as many as are needed."""
    assignments: dict[str, Assignment] = field(default_factory=dict)
    num_ranks: Counter[str] = field(default_factory=Counter)
    """Ranks on each host."""
    num_environments: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, hosts: Sequence[Host], used_gpus: Mapping[str, str], *, share: bool, turns: bool) -> _Occupancy:
        device_sets: list[_VisibleDevices] = []
        for host in hosts:
            free_devices = [_DeviceRoles(device, host.name) for device in host.devices if device.uuid not in used_gpus]
            by_devices: dict[frozenset[str], list[Process]] = {}
            for process in host.processes or ():
                by_devices.setdefault(frozenset(process.devices), []).append(process)
            parts: list[tuple[list[_DeviceRoles], list[Process] | None]] = [
                ([entry for entry in free_devices if entry.device.uuid in uuids], processes)
                for uuids, processes in by_devices.items()
            ]
            for devices, processes in [(free_devices, None)] if host.processes is None else parts:
                domains: dict[str, list[_DeviceRoles]] = {}
                for entry in devices:
                    domains.setdefault(entry.device.link_domain, []).append(entry)
                device_sets += [_VisibleDevices(host.name, domain, processes) for domain in domains.values()]
        free_processes = {host.name: None if host.processes is None else list(host.processes) for host in hosts}
        return cls(hosts, device_sets, share, turns, free_processes)

    def place_all(
        self, roles: Sequence[Role], to_keep: Mapping[str, Assignment], previous: Mapping[str, Assignment]
    ) -> Role | None:
        """Place all roles. Returns the first role that does not fit, or None.

        Args:
            to_keep: Assignments that are kept if possible.
            previous: Assignments near which roles are placed that cannot keep theirs.
        """
        for role in roles:
            if role.name in to_keep:
                self._keep(role, to_keep[role.name])
        waiting_roles = [role for role in roles if role.name not in self.assignments]
        # The largest roles first: smaller ones can use what is left.
        waiting_roles.sort(key=lambda role: (-role.num_devices, -role.memory_bytes))
        while waiting_roles:
            role = waiting_roles.pop(0)
            if not (
                self._place_on_devices(role, waiting_roles, previous) if role.num_devices else self._place_light(role)
            ):
                return role
        return None

    def _keep(self, role: Role, previous: Assignment) -> None:
        if not role.num_devices:
            candidates = self._usable(role, previous.host, self.free_processes.get(previous.host, ()))
            if candidates and not previous.devices:
                self._assign(role, previous.host, (), _prefer_previous(candidates, previous))
            return
        for visible in self.device_sets:
            devices = [entry for entry in visible.devices if entry.device.uuid in previous.devices]
            candidates = self._usable(role, visible.host, visible.processes) if visible.host == previous.host else ()
            if candidates and len(devices) == len(previous.devices) == role.num_devices:
                if all(entry.fits(role, share=self.share, turns=self.turns) for entry in devices):
                    devices.sort(key=lambda entry: previous.devices.index(entry.device.uuid))
                    self._assign(role, previous.host, devices, _prefer_previous(candidates, previous))
                return

    def _usable(self, role: Role, host: str, processes: Sequence[Process] | None) -> Sequence[Process]:
        """The free processes of a host that may have a role."""
        if processes is None:
            return (NAMELESS,)
        free_processes = self.free_processes.get(host) or ()
        return [p for p in processes if p in free_processes and (p.kinds is None or role.kind.value in p.kinds)]

    def _assign(self, role: Role, host: str, chosen: Sequence[_DeviceRoles], process: Process) -> None:
        for entry in chosen:
            entry.roles.append(role)
        if (free_processes := self.free_processes[host]) is not None:
            free_processes.remove(process)
        self.num_ranks[host] += role.kind is RoleKind.RANK
        self.num_environments[host] += role.kind is RoleKind.ENVIRONMENT
        devices = tuple(entry.device.uuid for entry in chosen)
        self.assignments[role.name] = Assignment(host=host, devices=devices, process=process.name)

    def _place_on_devices(self, role: Role, waiting_roles: Sequence[Role], previous: Mapping[str, Assignment]) -> bool:
        greater_needs = [other.memory_bytes for other in waiting_roles if other.memory_bytes > role.memory_bytes]
        scarce_bytes = min(greater_needs, default=0)
        previous_host = previous[role.name].host if role.name in previous else ""
        loaded_hosts = {assignment.host for assignment in previous.values() if assignment.devices}
        num_alike = 1 + sum(other.kind is role.kind for other in waiting_roles)
        order = {host.name: index for index, host in enumerate(self.hosts)}
        fitting = [
            [entry for entry in visible.devices if entry.fits(role, share=self.share, turns=self.turns)]
            for visible in self.device_sets
        ]
        sharing_cost = -1 if self.turns else 1  # negative: devices with other roles are preferred
        domains = {e.device.uuid: (e.host, e.device.link_domain) for entries in fitting for e in entries}
        num_free_by_domain = Counter(domains.values())
        options: list[tuple[tuple[float, ...], str, list[_DeviceRoles], Process]] = []
        for visible, fitting_devices in zip(self.device_sets, fitting, strict=True):
            host = visible.host
            candidates = self._usable(role, host, visible.processes)
            if len(fitting_devices) < role.num_devices or not candidates:
                continue
            num_free = num_free_by_domain[host, fitting_devices[0].device.link_domain]
            devices = _choose_devices(fitting_devices, role.num_devices, scarce_bytes, sharing_cost)
            process = min(candidates, key=lambda process: (len(process.kinds or KINDS), _offset(process, devices)))
            key = (
                sharing_cost * sum(len(entry.roles) for entry in devices),
                _num_scarce(devices, scarce_bytes),
                len(process.kinds or KINDS),
                0 if host == previous_host else 1 if host in loaded_hosts else 2,
                *(self._rank_key(host, num_free, num_alike) if role.kind is RoleKind.RANK else ()),
                num_free,
                order[host],
                _offset(process, devices),
            )
            options.append((key, host, devices, process))
        if options:
            self._assign(role, *min(options, key=lambda option: option[0])[1:])
        return bool(options)

    def _rank_key(self, host: str, num_free: int, num_ranks: int) -> tuple[float, ...]:
        """Sort key of a host for a rank of the trainer: first hosts with ranks, then with room for all ranks, then with
        more room."""
        return (not self.num_ranks[host], num_free < num_ranks, 0 if num_free >= num_ranks else -num_free)

    def _place_light(self, role: Role) -> bool:
        candidates = {host.name: self._usable(role, host.name, host.processes) for host in self.hosts}
        hosts = [host for host in self.hosts if candidates[host.name]]
        if not hosts:
            return False
        spread = role.kind is RoleKind.ENVIRONMENT
        host = min(hosts, key=lambda host: (self.num_environments[host.name] if spread else 0, bool(host.devices)))
        self._assign(role, host.name, (), min(candidates[host.name], key=lambda process: len(process.devices)))
        return True


def _prefer_previous(candidates: Sequence[Process], previous: Assignment) -> Process:
    """The process that a role had before if it is among the candidates, else the first candidate."""
    return next((process for process in candidates if process.name == previous.process), candidates[0])


def _offset(process: Process, devices: Sequence[_DeviceRoles]) -> int:
    """Index of the first of these devices in a process's list. Each worker of dask-cuda sees all devices of its host,
    in an order of its own."""
    return process.devices.index(devices[0].device.uuid) if process.devices else 0


def _num_scarce(devices: Iterable[_DeviceRoles], scarce_bytes: int) -> int:
    """Number of these devices whose memory is large enough for a waiting role that needs more than the present one."""
    return sum(0 < scarce_bytes <= entry.device.memory_bytes for entry in devices)


def _choose_devices(
    fitting_devices: Sequence[_DeviceRoles], count: int, scarce_bytes: int, sharing_cost: int
) -> list[_DeviceRoles]:
    """Choose `count` devices of one link domain: the least shared (if sharing_cost < 0, the most shared),
    then those that no larger role needs, then those on one NUMA node, then the smallest."""
    numa_counts = Counter(entry.device.numa for entry in fitting_devices)

    def key(entry: _DeviceRoles) -> tuple[int, ...]:
        size = numa_counts[entry.device.numa]
        numa = (size < count, size, entry.device.numa)
        return (sharing_cost * len(entry.roles), _num_scarce([entry], scarce_bytes), *numa, entry.device.memory_bytes)

    return sorted(fitting_devices, key=key)[:count]


def _num_free(hosts: Sequence[Host], used_gpus: Mapping[str, str]) -> int:
    return sum(device.uuid not in used_gpus for host in hosts for device in host.devices)


def _explain(
    hosts: Sequence[Host], roles: Sequence[Role], role: Role, used_gpus: Mapping[str, str], *, turns: bool
) -> str:
    """Say in one line what is missing for a role, and who uses GPUs."""
    if not role.num_devices:
        return f"no worker process is left for {role.name}; start one more"
    counts = Counter[RoleKind]()
    for other in roles:
        counts[other.kind] += other.num_devices
    parts = ", ".join(f"{count} for {PURPOSES[kind]}" for kind, count in counts.items() if count)
    parts += ", in turns" if turns else ""
    num_teacher_gpus, num_gpus = counts.pop(RoleKind.TEACHER, 0), sum(len(host.devices) for host in hosts)
    total = num_teacher_gpus + (max if turns else sum)(counts.values())
    num_free = _num_free(hosts, used_gpus)
    line = f"needs {total} GPU{'s' if total > 1 else ''} ({parts}); {num_free} of {num_gpus} are free"
    present_gpus = {device.uuid for host in hosts for device in host.devices}
    owners = Counter(owner for uuid, owner in used_gpus.items() if uuid in present_gpus)
    if owners:
        line += ", " + ", ".join(f"{count} belong to {owner}" for owner, count in sorted(owners.items()))
    if total > num_free:
        return line
    domains = Counter(
        (host.name, device.link_domain)
        for host in hosts
        for device in host.devices
        if device.uuid not in used_gpus and (not device.memory_bytes or device.memory_bytes >= role.memory_bytes)
    )
    size_text = f" of {role.memory_bytes / 10**9:.0f} GB" if role.memory_bytes else ""
    domain_text = " in one link domain" if role.num_devices > 1 else ""
    domain, max_gpus = max(domains.items(), key=lambda item: item[1], default=(("", ""), 0))
    location = f" (on {domain[0]})" if max_gpus else ""
    line += f"; {role.name} needs {role.num_devices}{size_text}{domain_text}"
    if max_gpus < role.num_devices:
        return line + f", the most there are together is {max_gpus}{location}"
    return line + ", which the other roles leave nowhere"


IDLE, OTHERS = "..", "##"
"""Cells of an idle GPU, and of one that another run has."""


def placement_text(hosts: Sequence[Host], assignments: Mapping[str, Assignment], others: Iterable[str] = ()) -> str:
    """Format which host and GPUs each role has. others: UUIDs of GPUs that other runs use.

    A cell has the roles on a GPU (r3: rollout-3, t0: the trainer, t1: trainer-1, T0: teacher-0), `..` if it is idle,
    `##` if another run has it; link domains are between bars; roles without a GPU stand behind.
    """
    labels: dict[str, list[str]] = {}
    light_roles: dict[str, list[str]] = {}
    for name, assignment in assignments.items():
        for uuid in assignment.devices:
            labels.setdefault(uuid, []).append(_label(name))
        if not assignment.devices:
            light_roles.setdefault(assignment.host, []).append(name)
    used_gpus = set(others)
    width = max((len(host.name) for host in hosts), default=0)
    kinds = {host.name: describe(host.devices) for host in hosts}
    kind_width = max(map(len, kinds.values()), default=0)
    lines = []
    for host in hosts:
        domains: dict[str, list[str]] = {}
        for device in host.devices:
            cell = "+".join(labels.get(device.uuid, ())) or (OTHERS if device.uuid in used_gpus else IDLE)
            domains.setdefault(device.link_domain, []).append(f"{cell:<2}")
        cells = " | ".join(" ".join(domain) for domain in domains.values())
        parts = [f"{host.name:<{width}}  {kinds[host.name]:<{kind_width}}"]
        if cells:
            parts.append(f"| {cells} |")
        if host.name in light_roles:
            parts.append(f"  {', '.join(light_roles[host.name])}")
        lines.append(" ".join(parts).rstrip())
    return "\n".join(lines)


def _label(name: str) -> str:
    """A name's first letter and its number: r0 for rollout-0, t0 for trainer, t1 for trainer-1, T0 for teacher-0."""
    kind, _, number = name.partition("-")
    return f"{'T' if kind == 'teacher' else kind[0]}{number or 0}"
