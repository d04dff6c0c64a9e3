"""Which host and GPUs each process of a run gets.

Rules, which tests/placement/ checks on random fleets:
- A GPU has one role. With `may_share`, if a run has more roles than GPUs, it may have several whose memory fits side
  by side, but never two ranks of the trainer, which NCCL refuses. With `takes_turns` it has an instance and a rank,
  which use it in turns, and each may use all of its memory; or a teacher.
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

from staleflow.pipeline.placement.devices import Device, Host, Process, describe_devices

NO_ASSIGNMENTS: Mapping[str, Assignment] = {}
NO_OWNERS: Mapping[str, str] = {}
ANY_PROCESS = Process(name="")
"""The process of a role on a host without a fixed list of processes."""


class RoleKind(Enum):
    """Kinds of roles. Roles of one kind in one run differ only in their names."""

    INSTANCE = "rollout instance"
    RANK = "rank of the trainer"
    TEACHER = "teacher"
    ENVIRONMENT = "environment host"
    LIGHT = "light role"


ALL_KINDS = frozenset(kind.value for kind in RoleKind)
GPU_PURPOSES = {RoleKind.INSTANCE: "rollout", RoleKind.RANK: "training", RoleKind.TEACHER: "teachers"}
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
    """Host, GPUs and process of one role. process: its name; empty on hosts without a list of
    processes."""

    host: str
    device_uuids: tuple[str, ...] = ()
    process: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The assignments of all roles, by name."""

    assignments: Mapping[str, Assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """The reason why roles do not fit."""

    message: str
    """What is missing and who uses it, in one line."""


def place(
    hosts: Sequence[Host],
    roles: Sequence[Role],
    *,
    gpu_owners: Mapping[str, str] = NO_OWNERS,
    previous: Mapping[str, Assignment] = NO_ASSIGNMENTS,
    may_share: bool = False,
    takes_turns: bool = False,
) -> Placement | Shortage:
    """Assign each role its host and GPUs. Deterministic.

    Args:
        hosts: All hosts; earlier ones are filled first.
        roles: The roles of one run.
        gpu_owners: GPUs that others use: UUID to owner's name.
        previous: Previous assignments of these roles, by name.
        may_share: Whether roles may share GPUs if there are too few.
        takes_turns: Whether an instance and a rank use the same GPUs in turns.
    """
    num_needed = sum(role.num_devices for role in roles)
    may_share = may_share and not takes_turns and num_needed > _num_free_gpus(hosts, gpu_owners)
    shortage = None
    for kept_assignments in ({role.name: previous[role.name] for role in roles if role.name in previous}, {}):
        occupancy = _Occupancy.of(hosts, gpu_owners, may_share=may_share, takes_turns=takes_turns)
        shortage = occupancy.place_all(roles, kept_assignments, previous)
        if shortage is None:
            return Placement(assignments={role.name: occupancy.assignments[role.name] for role in roles})
    assert shortage is not None
    return Shortage(message=_describe_shortage(hosts, roles, shortage, gpu_owners, takes_turns=takes_turns))


@dataclass(slots=True)
class _DeviceRoles:
    """A device with the roles assigned to it so far."""

    device: Device
    host: str
    roles: list[Role] = field(default_factory=list)

    def fits(self, role: Role, may_share: bool, takes_turns: bool) -> bool:
        if takes_turns:
            has_kind = any(other.kind in (role.kind, RoleKind.TEACHER) for other in self.roles)
            has_kind |= bool(self.roles) and role.kind is RoleKind.TEACHER
            return not has_kind and (not self.device.memory_bytes or role.memory_bytes <= self.device.memory_bytes)
        if self.roles and not may_share:
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
    may_share: bool
    takes_turns: bool
    free_processes: dict[str, list[Process] | None]
    """Processes of each host without a role; None: as many as are needed."""
    assignments: dict[str, Assignment] = field(default_factory=dict)
    num_ranks: Counter[str] = field(default_factory=Counter)
    """Ranks on each host."""
    num_environments: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(
        cls, hosts: Sequence[Host], gpu_owners: Mapping[str, str], *, may_share: bool, takes_turns: bool
    ) -> _Occupancy:
        device_sets: list[_VisibleDevices] = []
        for host in hosts:
            free_devices = [_DeviceRoles(device, host.name) for device in host.devices if device.uuid not in gpu_owners]
            by_devices: dict[frozenset[str], list[Process]] = {}
            for process in host.processes or ():
                by_devices.setdefault(frozenset(process.device_uuids), []).append(process)
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
        return cls(hosts, device_sets, may_share, takes_turns, free_processes)

    def place_all(
        self, roles: Sequence[Role], kept_assignments: Mapping[str, Assignment], previous: Mapping[str, Assignment]
    ) -> Role | None:
        """Place all roles. Returns the first role that does not fit, or None.

        Args:
            kept_assignments: Assignments that are kept if possible.
            previous: Assignments near which roles are placed that cannot keep theirs.
        """
        for role in roles:
            if role.name in kept_assignments:
                self._keep(role, kept_assignments[role.name])
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
            candidates = self._usable_processes(role, previous.host, self.free_processes.get(previous.host, ()))
            if candidates and not previous.device_uuids:
                self._assign(role, previous.host, (), _prefer_previous(candidates, previous))
            return
        for visible in self.device_sets:
            devices = [entry for entry in visible.devices if entry.device.uuid in previous.device_uuids]
            if visible.host != previous.host:
                continue
            candidates = self._usable_processes(role, visible.host, visible.processes)
            if candidates and len(devices) == len(previous.device_uuids) == role.num_devices:
                if all(entry.fits(role, self.may_share, self.takes_turns) for entry in devices):
                    devices.sort(key=lambda entry: previous.device_uuids.index(entry.device.uuid))
                    self._assign(role, previous.host, devices, _prefer_previous(candidates, previous))
                return

    def _usable_processes(self, role: Role, host: str, processes: Sequence[Process] | None) -> Sequence[Process]:
        """The free processes of a host that may have a role."""
        if processes is None:
            return (ANY_PROCESS,)
        free_processes = self.free_processes.get(host) or ()
        kind = role.kind.value
        return [p for p in processes if p in free_processes and (p.role_kinds is None or kind in p.role_kinds)]

    def _assign(self, role: Role, host: str, chosen: Sequence[_DeviceRoles], process: Process) -> None:
        for entry in chosen:
            entry.roles.append(role)
        if (free_processes := self.free_processes[host]) is not None:
            free_processes.remove(process)
        self.num_ranks[host] += role.kind is RoleKind.RANK
        self.num_environments[host] += role.kind is RoleKind.ENVIRONMENT
        device_uuids = tuple(entry.device.uuid for entry in chosen)
        self.assignments[role.name] = Assignment(host=host, device_uuids=device_uuids, process=process.name)

    def _place_on_devices(self, role: Role, waiting_roles: Sequence[Role], previous: Mapping[str, Assignment]) -> bool:
        greater_needs = [other.memory_bytes for other in waiting_roles if other.memory_bytes > role.memory_bytes]
        larger_need_bytes = min(greater_needs, default=0)
        previous_host = previous[role.name].host if role.name in previous else ""
        loaded_hosts = {assignment.host for assignment in previous.values() if assignment.device_uuids}
        num_alike = 1 + sum(other.kind is role.kind for other in waiting_roles)
        host_order = {host.name: index for index, host in enumerate(self.hosts)}
        fitting = [
            [device for device in visible.devices if device.fits(role, self.may_share, self.takes_turns)]
            for visible in self.device_sets
        ]
        sharing_cost = -1 if self.takes_turns else 1  # negative: devices with other roles are preferred
        domains = {e.device.uuid: (e.host, e.device.link_domain) for entries in fitting for e in entries}
        num_free_by_domain = Counter(domains.values())
        options: list[tuple[tuple[float, ...], str, list[_DeviceRoles], Process]] = []
        for visible, fitting_devices in zip(self.device_sets, fitting, strict=True):
            host = visible.host
            candidates = self._usable_processes(role, host, visible.processes)
            if len(fitting_devices) < role.num_devices or not candidates:
                continue
            num_free = num_free_by_domain[host, fitting_devices[0].device.link_domain]
            devices = _choose_devices(fitting_devices, role.num_devices, larger_need_bytes, sharing_cost)
            process = min(candidates, key=lambda p: (len(p.role_kinds or ALL_KINDS), _first_device_index(p, devices)))
            key = (
                sharing_cost * sum(len(entry.roles) for entry in devices),
                _num_large_devices(devices, larger_need_bytes),
                len(process.role_kinds or ALL_KINDS),
                0 if host == previous_host else 1 if host in loaded_hosts else 2,
                *(self._rank_host_key(host, num_free, num_alike) if role.kind is RoleKind.RANK else ()),
                num_free,
                host_order[host],
                _first_device_index(process, devices),
            )
            options.append((key, host, devices, process))
        if options:
            self._assign(role, *min(options, key=lambda option: option[0])[1:])
        return bool(options)

    def _rank_host_key(self, host: str, num_free: int, num_ranks: int) -> tuple[float, ...]:
        """Sort key of a host for a rank of the trainer: first hosts with ranks, then with room for all ranks, then with
        more room."""
        return (not self.num_ranks[host], num_free < num_ranks, 0 if num_free >= num_ranks else -num_free)

    def _place_light(self, role: Role) -> bool:
        candidates = {host.name: self._usable_processes(role, host.name, host.processes) for host in self.hosts}
        hosts = [host for host in self.hosts if candidates[host.name]]
        if not hosts:
            return False
        is_spread = role.kind is RoleKind.ENVIRONMENT
        host = min(hosts, key=lambda host: (self.num_environments[host.name] if is_spread else 0, bool(host.devices)))
        self._assign(role, host.name, (), min(candidates[host.name], key=lambda process: len(process.device_uuids)))
        return True


def _prefer_previous(candidates: Sequence[Process], previous: Assignment) -> Process:
    """The process that a role had before if it is among the candidates, else the first candidate."""
    return next((process for process in candidates if process.name == previous.process), candidates[0])


def _first_device_index(process: Process, devices: Sequence[_DeviceRoles]) -> int:
    """Index of the first of these devices in a process's list. Each worker of dask-cuda sees all devices of its host,
    in an order of its own."""
    return process.device_uuids.index(devices[0].device.uuid) if process.device_uuids else 0


def _num_large_devices(devices: Iterable[_DeviceRoles], larger_need_bytes: int) -> int:
    """Number of these devices whose memory is large enough for a waiting role that needs more than the present one."""
    return sum(0 < larger_need_bytes <= entry.device.memory_bytes for entry in devices)


def _choose_devices(
    fitting_devices: Sequence[_DeviceRoles], count: int, larger_need_bytes: int, sharing_cost: int
) -> list[_DeviceRoles]:
    """Choose `count` devices of one link domain: the least shared (if sharing_cost < 0, the most shared),
    then those that no larger role needs, then those on one NUMA node, then the smallest."""
    numa_counts = Counter(entry.device.numa_node for entry in fitting_devices)

    def key(entry: _DeviceRoles) -> tuple[int, ...]:
        size = numa_counts[entry.device.numa_node]
        numa = (size < count, size, entry.device.numa_node)
        num_large = _num_large_devices([entry], larger_need_bytes)
        return (sharing_cost * len(entry.roles), num_large, *numa, entry.device.memory_bytes)

    return sorted(fitting_devices, key=key)[:count]


def _num_free_gpus(hosts: Sequence[Host], gpu_owners: Mapping[str, str]) -> int:
    return sum(device.uuid not in gpu_owners for host in hosts for device in host.devices)


def _describe_shortage(
    hosts: Sequence[Host], roles: Sequence[Role], role: Role, gpu_owners: Mapping[str, str], *, takes_turns: bool
) -> str:
    """Say in one line what is missing for a role, and who uses GPUs."""
    if not role.num_devices:
        return f"no worker process is left for {role.name}; start one more"
    counts = Counter[RoleKind]()
    for other in roles:
        counts[other.kind] += other.num_devices
    parts = ", ".join(f"{count} for {GPU_PURPOSES[kind]}" for kind, count in counts.items() if count)
    parts += ", in turns" if takes_turns else ""
    num_teacher_gpus, num_gpus = counts.pop(RoleKind.TEACHER, 0), sum(len(host.devices) for host in hosts)
    total = num_teacher_gpus + (max if takes_turns else sum)(counts.values())
    num_free = _num_free_gpus(hosts, gpu_owners)
    line = f"needs {total} GPU{'s' if total > 1 else ''} ({parts}); {num_free} of {num_gpus} are free"
    present_gpus = {device.uuid for host in hosts for device in host.devices}
    owners = Counter(owner for uuid, owner in gpu_owners.items() if uuid in present_gpus)
    if owners:
        line += ", " + ", ".join(f"{count} belong to {owner}" for owner, count in sorted(owners.items()))
    if total > num_free:
        return line
    domains = Counter(
        (host.name, device.link_domain)
        for host in hosts
        for device in host.devices
        if device.uuid not in gpu_owners and (not device.memory_bytes or device.memory_bytes >= role.memory_bytes)
    )
    size_text = f" of {role.memory_bytes / 10**9:.0f} GB" if role.memory_bytes else ""
    domain_text = " in one link domain" if role.num_devices > 1 else ""
    domain, max_gpus = max(domains.items(), key=lambda item: item[1], default=(("", ""), 0))
    location = f" (on {domain[0]})" if max_gpus else ""
    line += f"; {role.name} needs {role.num_devices}{size_text}{domain_text}"
    if max_gpus < role.num_devices:
        return line + f", the most there are together is {max_gpus}{location}"
    return line + ", which the other roles leave nowhere"


IDLE_CELL, OTHER_RUN_CELL = "..", "##"
"""Cells of an idle GPU, and of one that another run has."""


def placement_text(hosts: Sequence[Host], assignments: Mapping[str, Assignment], other_gpus: Iterable[str] = ()) -> str:
    """Format which host and GPUs each role has. other_gpus: UUIDs of GPUs that other runs use.

    A cell has the roles on a GPU (r3: rollout-3, t0: the trainer, t1: trainer-1, T0: teacher-0), `..` if it is idle,
    `##` if another run has it; link domains are between bars; roles without a GPU stand behind.
    """
    labels: dict[str, list[str]] = {}
    light_roles: dict[str, list[str]] = {}
    for name, assignment in assignments.items():
        for uuid in assignment.device_uuids:
            labels.setdefault(uuid, []).append(_role_label(name))
        if not assignment.device_uuids:
            light_roles.setdefault(assignment.host, []).append(name)
    used_gpus = set(other_gpus)
    width = max((len(host.name) for host in hosts), default=0)
    kinds = {host.name: describe_devices(host.devices) for host in hosts}
    kind_width = max(map(len, kinds.values()), default=0)
    lines = []
    for host in hosts:
        domains: dict[str, list[str]] = {}
        for device in host.devices:
            cell = "+".join(labels.get(device.uuid, ())) or (OTHER_RUN_CELL if device.uuid in used_gpus else IDLE_CELL)
            domains.setdefault(device.link_domain, []).append(f"{cell:<2}")
        cells = " | ".join(" ".join(domain) for domain in domains.values())
        parts = [f"{host.name:<{width}}  {kinds[host.name]:<{kind_width}}"]
        if cells:
            parts.append(f"| {cells} |")
        if host.name in light_roles:
            parts.append(f"  {', '.join(light_roles[host.name])}")
        lines.append(" ".join(parts).rstrip())
    return "\n".join(lines)


def _role_label(name: str) -> str:
    """A name's first letter and its number: r0 for rollout-0, t0 for trainer, t1 for trainer-1, T0 for teacher-0."""
    kind, _, number = name.partition("-")
    return f"{'T' if kind == 'teacher' else kind[0]}{number or 0}"
