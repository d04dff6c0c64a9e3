"""Which host and GPUs each process of a run gets.

The rules, each a property that tests/placement/ holds against random fleets:
- A GPU is given to one role; only with `share`, for a run that has more roles than GPUs, to several whose memory fits
  side by side, and never to two ranks of the trainer, which NCCL refuses. In turns (`turns`) it is given to an
  instance and a rank, and both to one if they can be; each needs the memory for itself.
- The GPUs of an instance are of one link domain of one host, at one processor if they can be.
- Light roles get no GPU, and hosts without GPUs if there are any.
- A shortage is reported only if the roles do not fit: no GPU is idle while a role that fits waits.
- A role that had an assignment keeps it, if its GPUs are still there. A role that has to move goes to a GPU of its own
  host, or else of a host on which the run has its weights already.
- Hosts are filled one after another, and the ranks of a trainer are on as few hosts as can be.
- A role's process sees its GPUs; of several, the one that has them first in its list and sees the fewest others.

The first five hold always, of hosts whose processes see either the same GPUs or none in common; the last two are
preferences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from staleflow.pipeline.placement.devices import Device, Host, Process

NO_ASSIGNMENTS: Mapping[str, Assignment] = {}
NO_OWNERS: Mapping[str, str] = {}
NAMELESS = Process(name="")
"""The process of a role on a host that has as many as are needed."""


class RoleKind(Enum):
    """Kinds of roles. Roles of one kind in one run differ by nothing but their names."""

    INSTANCE = "rollout instance"
    RANK = "rank of the trainer"
    ENVIRONMENT = "environment host"
    LIGHT = "light role"


KINDS = frozenset(kind.value for kind in RoleKind)
PURPOSES = {RoleKind.INSTANCE: "rollout", RoleKind.RANK: "training"}
"""What kinds of roles use GPUs for, in messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A process that needs a place. num_devices: GPUs that it computes on. memory_bytes: of each, at least; 0: any."""

    name: str
    kind: RoleKind
    num_devices: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The place of one role. devices: UUIDs. process: its name, on hosts that have names for them."""

    host: str
    devices: tuple[str, ...] = ()
    process: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The places of all roles, by name."""

    assignments: Mapping[str, Assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Why roles do not fit: what is missing, and who has it, in one line."""

    line: str


def place(
    hosts: Sequence[Host],
    roles: Sequence[Role],
    *,
    taken: Mapping[str, str] = NO_OWNERS,
    previous: Mapping[str, Assignment] = NO_ASSIGNMENTS,
    share: bool = False,
    turns: bool = False,
) -> Placement | Shortage:
    """Assign each role its host and GPUs. Deterministic.

    Args:
        hosts: Earlier ones are filled first.
        roles: Of one run.
        taken: UUIDs of GPUs that others have, with their names.
        previous: Previous assignments of these roles, by name.
        share: Whether GPUs may be shared if there are fewer than the roles need.
        turns: Whether an instance and a rank have the same GPUs, in turns.
    """
    share = share and not turns and sum(role.num_devices for role in roles) > _num_free(hosts, taken)
    shortage = None
    for to_keep in ({role.name: previous[role.name] for role in roles if role.name in previous}, {}):
        occupancy = _Occupancy.of(hosts, taken, share=share, turns=turns)
        shortage = occupancy.place_all(roles, to_keep, previous)
        if shortage is None:
            return Placement(assignments={role.name: occupancy.assignments[role.name] for role in roles})
    assert shortage is not None
    return Shortage(line=_explain(hosts, roles, shortage, taken, turns=turns))


@dataclass(slots=True)
class _Card:
    """A device while roles are placed, and those on it."""

    device: Device
    host: str
    roles: list[Role] = field(default_factory=list)

    def fits(self, role: Role, *, share: bool, turns: bool) -> bool:
        if turns:
            alone = all(other.kind is not role.kind for other in self.roles)
            return alone and (not self.device.memory_bytes or role.memory_bytes <= self.device.memory_bytes)
        if self.roles and not share:
            return False
        if role.kind is RoleKind.RANK and any(other.kind is RoleKind.RANK for other in self.roles):
            return False
        needed_bytes = role.memory_bytes + sum(other.memory_bytes for other in self.roles)
        return not self.device.memory_bytes or needed_bytes <= self.device.memory_bytes


@dataclass(frozen=True, slots=True)
class _Reach:
    """Devices of one link domain that processes of a host see, and the processes, all alike in that."""

    host: str
    cards: Sequence[_Card]
    processes: Sequence[Process] | None
    """None: as many as are needed."""


@dataclass(slots=True)
class _Occupancy:
    """Who is where, while roles are placed."""

    hosts: Sequence[Host]
    reaches: Sequence[_Reach]
    """Devices that nobody else has, by who sees them."""
    share: bool
    turns: bool
    open: dict[str, list[Process] | None]
    """Processes that each host has left."""
    assignments: dict[str, Assignment] = field(default_factory=dict)
    num_ranks: Counter[str] = field(default_factory=Counter)
    """Ranks on each host."""
    num_environments: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, hosts: Sequence[Host], taken: Mapping[str, str], *, share: bool, turns: bool) -> _Occupancy:
        reaches: list[_Reach] = []
        for host in hosts:
            cards = [_Card(device, host.name) for device in host.devices if device.uuid not in taken]
            alike: dict[frozenset[str], list[Process]] = {}
            for process in host.processes or ():
                alike.setdefault(frozenset(process.devices), []).append(process)
            visible: list[tuple[list[_Card], list[Process] | None]] = [
                ([card for card in cards if card.device.uuid in uuids], processes) for uuids, processes in alike.items()
            ]
            for own_cards, processes in [(cards, None)] if host.processes is None else visible:
                domains: dict[str, list[_Card]] = {}
                for card in own_cards:
                    domains.setdefault(card.device.link_domain, []).append(card)
                reaches += [_Reach(host.name, domain, processes) for domain in domains.values()]
        processes_of = {host.name: None if host.processes is None else list(host.processes) for host in hosts}
        return cls(hosts, reaches, share, turns, processes_of)

    def place_all(
        self, roles: Sequence[Role], to_keep: Mapping[str, Assignment], previous: Mapping[str, Assignment]
    ) -> Role | None:
        """Place all roles, those in `to_keep` where they were if possible. Returns the first role that does not fit, or
        None. previous: assignments that the new ones should be near."""
        for role in roles:
            if role.name in to_keep:
                self._keep(role, to_keep[role.name])
        waiting = [role for role in roles if role.name not in self.assignments]
        # The hardest to place first: what is left over after them any smaller role can use.
        waiting.sort(key=lambda role: (-role.num_devices, -role.memory_bytes))
        while waiting:
            role = waiting.pop(0)
            if not (self._place_on_devices(role, waiting, previous) if role.num_devices else self._place_light(role)):
                return role
        return None

    def _keep(self, role: Role, previous: Assignment) -> None:
        if not role.num_devices:
            candidates = self._able(role, previous.host, self.open.get(previous.host, ()))
            if candidates and not previous.devices:
                self._assign(role, previous.host, (), _same(candidates, previous))
            return
        for reach in self.reaches:
            cards = [card for card in reach.cards if card.device.uuid in previous.devices]
            candidates = self._able(role, reach.host, reach.processes) if reach.host == previous.host else ()
            if candidates and len(cards) == len(previous.devices) == role.num_devices:
                if all(card.fits(role, share=self.share, turns=self.turns) for card in cards):
                    cards.sort(key=lambda card: previous.devices.index(card.device.uuid))
                    self._assign(role, previous.host, cards, _same(candidates, previous))
                return

    def _able(self, role: Role, host: str, processes: Sequence[Process] | None) -> Sequence[Process]:
        """Those of a host's processes that are left and may have a role. Nameless ones never run out."""
        if processes is None:
            return (NAMELESS,)
        free_slots = self.open.get(host) or ()
        return [p for p in processes if p in free_slots and (p.kinds is None or role.kind.value in p.kinds)]

    def _assign(self, role: Role, host: str, cards: Sequence[_Card], process: Process) -> None:
        for card in cards:
            card.roles.append(role)
        if (free_slots := self.open[host]) is not None:
            free_slots.remove(process)
        self.num_ranks[host] += role.kind is RoleKind.RANK
        self.num_environments[host] += role.kind is RoleKind.ENVIRONMENT
        devices = tuple(card.device.uuid for card in cards)
        self.assignments[role.name] = Assignment(host=host, devices=devices, process=process.name)

    def _place_on_devices(self, role: Role, waiting: Sequence[Role], previous: Mapping[str, Assignment]) -> bool:
        greater = [other.memory_bytes for other in waiting if other.memory_bytes > role.memory_bytes]
        scarce_bytes = min(greater, default=0)
        previous_host = previous[role.name].host if role.name in previous else ""
        loaded = {assignment.host for assignment in previous.values() if assignment.devices}
        num_alike = 1 + sum(other.kind is role.kind for other in waiting)
        order = {host.name: index for index, host in enumerate(self.hosts)}
        fitting_of = [
            [card for card in reach.cards if card.fits(role, share=self.share, turns=self.turns)]
            for reach in self.reaches
        ]
        crowding = -1 if self.turns else 1  # how little a card with others on it is wanted
        room = self._room(fitting_of)
        best: tuple[tuple[float, ...], str, list[_Card], Process] | None = None
        for reach, fitting in zip(self.reaches, fitting_of, strict=True):
            host = reach.host
            if len(fitting) < role.num_devices or not (candidates := self._able(role, host, reach.processes)):
                continue
            num_free = room[host, fitting[0].device.link_domain]
            cards = _choose_cards(fitting, role.num_devices, scarce_bytes, crowding)
            process = min(candidates, key=lambda process: (len(process.kinds or KINDS), _offset(process, cards)))
            key = (
                crowding * sum(len(card.roles) for card in cards),
                _num_scarce(cards, scarce_bytes),
                len(process.kinds or KINDS),
                0 if host == previous_host else 1 if host in loaded else 2,
                *(self._grouping(host, num_free, num_alike) if role.kind is RoleKind.RANK else ()),
                num_free,
                order[host],
                _offset(process, cards),
            )
            if best is None or key < best[0]:
                best = key, host, cards, process
        if best is None:
            return False
        self._assign(role, *best[1:])
        return True

    @staticmethod
    def _room(fitting_of: Iterable[Sequence[_Card]]) -> Counter[tuple[str, str]]:
        """How many of these devices there are in each link domain of each host."""
        distinct = {card.device.uuid: card for fitting in fitting_of for card in fitting}
        return Counter((card.host, card.device.link_domain) for card in distinct.values())

    def _grouping(self, host: str, num_free: int, num_ranks: int) -> tuple[float, ...]:
        """How a host ranks for a rank of the trainer: one with ranks, one with room for all, one with more room."""
        return (not self.num_ranks[host], num_free < num_ranks, 0 if num_free >= num_ranks else -num_free)

    def _place_light(self, role: Role) -> bool:
        candidates = {host.name: self._able(role, host.name, host.processes) for host in self.hosts}
        hosts = [host for host in self.hosts if candidates[host.name]]
        if not hosts:
            return False
        spread = role.kind is RoleKind.ENVIRONMENT
        chosen = min(hosts, key=lambda host: (self.num_environments[host.name] if spread else 0, bool(host.devices)))
        self._assign(role, chosen.name, (), min(candidates[chosen.name], key=lambda process: len(process.devices)))
        return True


def _same(candidates: Sequence[Process], previous: Assignment) -> Process:
    """The process that a role had, or else the first of those that may have it."""
    return next((process for process in candidates if process.name == previous.process), candidates[0])


def _offset(process: Process, cards: Sequence[_Card]) -> int:
    """Where in a process's list the first of these devices is: workers of dask-cuda all see all of a host's."""
    return process.devices.index(cards[0].device.uuid) if process.devices else 0


def _num_scarce(cards: Iterable[_Card], scarce_bytes: int) -> int:
    """How many of these a role that still waits could use for its greater need."""
    return sum(0 < scarce_bytes <= card.device.memory_bytes for card in cards)


def _choose_cards(fitting: Sequence[_Card], count: int, scarce_bytes: int, crowding: int) -> list[_Card]:
    """So many of the devices of one link domain: least shared first (most, if crowding is negative), none that others
    need, at one processor if they can be, smallest first."""
    of_numa = Counter(card.device.numa for card in fitting)

    def key(card: _Card) -> tuple[int, ...]:
        size = of_numa[card.device.numa]
        apart = (size < count, size, card.device.numa)
        return (crowding * len(card.roles), _num_scarce([card], scarce_bytes), *apart, card.device.memory_bytes)

    return sorted(fitting, key=key)[:count]


def _num_free(hosts: Sequence[Host], taken: Mapping[str, str]) -> int:
    return sum(device.uuid not in taken for host in hosts for device in host.devices)


def _explain(hosts: Sequence[Host], roles: Sequence[Role], role: Role, taken: Mapping[str, str], *, turns: bool) -> str:
    """What is missing for a role, and who has GPUs, in one line."""
    if not role.num_devices:
        return f"no worker process is left for {role.name}; start one more"
    counts = Counter[RoleKind]()
    for each in roles:
        counts[each.kind] += each.num_devices
    parts = ", ".join(f"{count} for {PURPOSES[kind]}" for kind, count in counts.items() if count)
    parts += ", in turns" if turns else ""
    total, num_gpus = (max if turns else sum)(counts.values()), sum(len(host.devices) for host in hosts)
    free = _num_free(hosts, taken)
    line = f"needs {total} GPU{'s' if total > 1 else ''} ({parts}); {free} of {num_gpus} are free"
    present = {device.uuid for host in hosts for device in host.devices}
    owners = Counter(owner for uuid, owner in taken.items() if uuid in present)
    if owners:
        line += ", " + ", ".join(f"{count} belong to {owner}" for owner, count in sorted(owners.items()))
    if total > free:
        return line
    domains = Counter(
        (host.name, device.link_domain)
        for host in hosts
        for device in host.devices
        if device.uuid not in taken and (not device.memory_bytes or device.memory_bytes >= role.memory_bytes)
    )
    of_size = f" of {role.memory_bytes / 10**9:.0f} GB" if role.memory_bytes else ""
    together = " in one link domain" if role.num_devices > 1 else ""
    domain, max_gpus = max(domains.items(), key=lambda item: item[1], default=(("", ""), 0))
    location = f" (on {domain[0]})" if max_gpus else ""
    line += f"; {role.name} needs {role.num_devices}{of_size}{together}"
    if max_gpus < role.num_devices:
        return line + f", the most there are together is {max_gpus}{location}"
    return line + ", which the other roles leave nowhere"
