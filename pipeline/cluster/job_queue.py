"""Which job gets worker processes, and when: gang admission, first come, first served.

Invariants:
- A worker belongs to at most one job. A waiting job has none; an admitted one was given all it needs in one moment.
- Jobs are admitted in the order in which they came. None goes past an earlier one that the cluster's workers would
  suffice for, however few it needs itself: so each is served once the jobs before it have ended. One that they would
  not suffice for keeps its place, waits, and holds nobody up.
- Workers that a job has beyond what it needs, for reward workers of its own, are taken while nobody waits, and asked
  back for a job that could start with them (`wanted`). They stay the job's until it has left them (`give_back`).
- A running job that loses a worker keeps its claim to one: nobody is admitted until it has replaced it. It lacks a
  worker for `RETURN_S` at most before a driver that resumes gives up all of them and waits again, at its old place.
- A job that computes on GPUs, on a cluster whose workers report some, gets the workers that pipeline/placement chooses
  for its rollout instances and ranks, and with each the GPUs that it may use there. A GPU belongs to one role.
- Workers whose job's driver is gone may still hold its actors (engines that decode, a server that may commit). They
  belong to nobody until they have left the cluster; a restarted worker joins as another. Those that hold nothing but an
  engine may be kept for the job's next driver, which takes it over, for `RETURN_S` at most: nobody else gets them.

Told of what happens and when; knows neither Dask nor a clock.
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
    choose,
    describe_shortage,
    describe_workers,
    hosts_of,
    kinds_of,
    suffice,
)
from staleflow.pipeline.placement.devices import Device, describe
from staleflow.pipeline.placement.picture import draw
from staleflow.pipeline.placement.placement import Assignment, Placement, Shortage, place

RETURN_S = 30.0
"""Seconds a worker may take to restart; so long one that left counts as one that the cluster has."""
RESTARTS = "needs the workers of its earlier driver to restart"
"""What a job waits for whose driver is gone."""
REPORT_S = 30.0
"""Seconds a new worker may take to report its GPUs; later it counts as one that has none."""
UNREPORTED = "needs new workers to report their GPUs"
"""What a job that computes on GPUs waits for meanwhile."""

Places = Mapping[str, tuple[str, ...]]
"""UUIDs of the GPUs that chosen workers may use, by address."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A job's claim to a worker, for these roles. run: folder of the run whose actors it holds. devices: UUIDs of the
    GPUs that it may use there."""

    job: str
    run: str
    roles: tuple[str, ...]
    devices: tuple[str, ...] = ()


@dataclass(slots=True)
class QueueEntry:
    """A job that waits for workers or has them. wait_s: seconds it may wait; 0: no limit."""

    id: str
    run: str
    needs: Needs
    wait_s: float
    since_s: float
    """When it began to wait."""
    num_workers: int = 0
    """Workers it was admitted with, those it has lost since included; 0 while it waits."""
    short_since_s: float | None = None
    """When its driver first asked in vain for what it lost."""
    why: str = ""
    """What it waits for."""


class JobQueue:
    """Jobs, in the order in which they came, and the workers of one cluster."""

    def __init__(self) -> None:
        self.entries: dict[str, QueueEntry] = {}
        self.workers: dict[str, Mapping[str, float]] = {}
        self.claims: dict[str, Claim] = {}
        self.needs_restart: dict[str, Claim] = {}
        """Workers that may still hold the actors of a job whose driver is gone."""
        self._kept: dict[str, tuple[Claim, float]] = {}
        """Workers with an engine that a waiting job is to take over, and since when."""
        self._engines: set[str] = set()
        """Workers that were kept and given to their job again: it may not have taken the engine over yet."""
        self.wanted: dict[str, list[str]] = {}
        """Workers that running jobs have beyond what they need, and are to give back, by job."""
        self._unwanted: list[str] = []
        """Dirty workers that nobody was told of yet."""
        self._disconnected: dict[str, tuple[Mapping[str, float], float]] = {}
        self._kinds: Kinds | None = None
        self.gpus: dict[str, WorkerGpus] = {}
        """What workers report, those that have just left included."""
        self._unreported: dict[str, float] = {}
        """Workers that have not reported yet, and since when they are there."""
        self._lost_places: dict[str, list[tuple[str, Assignment]]] = {}
        """Roles, with their places, whose worker has left a running job and that have no other yet, by job."""

    # -- workers -------------------------------------------------------------------------------------------------

    def joined(self, address: str, resources: Mapping[str, float], unreported_since: float | None = None) -> None:
        """A worker has joined; perhaps a restarted one, under a new address. unreported_since: when it was asked for
        its GPUs; None: it has none."""
        self.workers[address] = dict(resources)
        restarted = next((old for old, (has, _) in self._disconnected.items() if has == resources), None)
        if restarted is not None:
            self._forget_gone(restarted)
        if unreported_since is not None:
            self._unreported[address] = unreported_since
        self._kinds = None

    def reported(self, address: str, gpus: WorkerGpus) -> None:
        """A worker has said which GPUs it sees."""
        self._unreported.pop(address, None)
        if address in self.workers and gpus.devices:
            self.gpus[address] = gpus

    def awaits_reports(self, now: float) -> bool:
        """Whether workers may still report GPUs."""
        return any(now - since <= REPORT_S for since in self._unreported.values())

    def left(self, address: str, now: float) -> None:
        """A worker has left."""
        resources = self.workers.pop(address, None)
        if resources is not None:
            self._disconnected[address] = resources, now
        claim = self.claims.pop(address, None)
        if claim is not None and claim.devices:
            self._lost_places.setdefault(claim.job, []).append((claim.roles[0], self._place_of(address, claim)))
        self._unreported.pop(address, None)
        self.needs_restart.pop(address, None)
        self._kept.pop(address, None)
        self._engines.discard(address)
        self._kinds = None

    def _forget_gone(self, address: str) -> None:
        del self._disconnected[address]
        self.gpus.pop(address, None)

    @property
    def free(self) -> list[str]:
        """Workers that any job may have."""
        return [
            a
            for a in self.workers
            if not any(a in addresses for addresses in (self.claims, self.needs_restart, self._kept))
        ]

    def keep(self, address: str, now: float) -> None:
        """Keep a dirty worker, which holds nothing but an engine, for its job if that waits. Else it is unwanted."""
        claim = self.needs_restart.get(address)
        if claim is not None and claim.roles == (ROLLOUT,) and self.waits(claim.job):
            self._kept[address] = self.needs_restart.pop(address), now
        else:
            self._unwanted.append(address)

    def take_unwanted(self) -> list[str]:
        """Workers that must be restarted before anyone gets them; each is told once."""
        unwanted, self._unwanted = self._unwanted, []
        return [address for address in unwanted if address in self.needs_restart]

    def unavailable(self, owner: str) -> list[str]:
        """Workers that cannot be used by a job, or by whoever is none (owner: its id, or empty)."""
        other_workers = [a for a, claim in self.claims.items() if claim.job != owner]
        return [*other_workers, *self.needs_restart, *self._kept]

    def workers_of(self, id: str) -> Gang:
        """The workers of a job, and the roles each was given for."""
        return {address: claim.roles for address, claim in self.claims.items() if claim.job == id}

    # -- GPUs ----------------------------------------------------------------------------------------------------

    def on_gpus(self, needs: Needs) -> bool:
        """Whether a job computes on GPUs here: on those there are, or on as many as it asks for."""
        return needs.instance_gpus > 0 and (bool(self.gpus) or needs.gpus > 0)

    def devices(self) -> list[Device]:
        """All GPUs of the cluster."""
        return list(
            {device.uuid: device for worker_gpus in self.gpus.values() for device in worker_gpus.devices}.values()
        )

    def short_of_gpus(self, needs: Needs) -> str:
        """Why all workers together do not have the GPUs that a job needs, in one line; empty if they do, or if there
        are no workers yet."""
        if not self.workers or not self.on_gpus(needs):
            return ""
        if 0 < needs.gpus < needs.num_gpus:
            return f"needs {needs.num_gpus} GPUs, cluster.gpus = {needs.gpus}"
        every = self.devices()
        if needs.gpus > len(every):
            return f"may have cluster.gpus = {needs.gpus}; the cluster's workers have {describe(every)}"
        placed = self._placed(needs, list(self.workers), taken={})
        return placed.line if isinstance(placed, Shortage) else ""

    def visible(self, id: str) -> dict[str, str]:
        """What CUDA_VISIBLE_DEVICES has to say on each worker of a job; empty if it computes on no GPU."""
        return {
            address: ",".join(device.visible for uuid in claim.devices for device in self._devices(address, uuid))
            for address, claim in self.claims.items()
            if claim.job == id and self.on_gpus(self.entries[id].needs)
        }

    def _devices(self, address: str, uuid: str) -> list[Device]:
        return [device for device in self.gpus[address].devices if device.uuid == uuid]

    def picture(self, id: str) -> str:
        """Where the roles of a job are; empty if it computes on no GPU."""
        if not self.visible(id):
            return ""
        assignments: dict[str, Assignment] = {}
        for address, claim in self.claims.items():
            if claim.job == id and claim.devices:
                number = sum(name.startswith(claim.roles[0]) for name in assignments)
                assignments[f"{claim.roles[0]}-{number}"] = self._place_of(address, claim)
        hosts = hosts_of(self.gpus, self._known_kinds(), ())
        return draw(hosts, assignments, [uuid for uuid, job in self._taken().items() if job != id])

    def claim_gpus(self, id: str, role: str, avoid: Sequence[str] = (), *, peek: bool = False) -> str:
        """Give a running job a worker and its GPUs for a role in a lost one's place, or for one more; returns its
        address, empty if there is none. avoid: workers that it has given up, although they are there. peek: whether
        nothing is claimed."""
        entry = self.entries.get(id)
        if entry is None or not entry.num_workers:
            return ""
        silent = [(c.roles[0], self._place_of(a, c)) for a, c in self.claims.items() if a in avoid and c.job == id]
        lost = [lost_place for lost_place in self._lost_places.get(id, ()) if lost_place[0] == role]
        before = self._places_of(id)
        if earlier := [*lost, *((name, address) for name, address in silent if name == role)]:
            before[role] = earlier[0][1]
        hosts = hosts_of(self.gpus, self._known_kinds(), [a for a in self.free if a not in avoid])
        placed = place(hosts, [entry.needs.heavy_role(role, role)], taken=self._taken(), before=before)
        if isinstance(placed, Shortage):
            return ""
        assignment = placed.assignments[role]
        if not peek:
            if lost:
                self._lost_places[id].remove(lost[0])
            self.claims[assignment.process] = Claim(id, entry.run, (role,), assignment.devices)
        return assignment.process

    def _places_of(self, id: str) -> dict[str, Assignment]:
        """Where roles of a job are or were, under the names that its needs have for them."""
        claims = [*self.claims.items(), *((address, claim) for address, (claim, _) in self._kept.items())]
        places: dict[str, Assignment] = {}
        counts = Counter[str]()
        for address, claim in claims:
            if claim.job == id and claim.devices:
                places[f"{claim.roles[0]}-{counts[claim.roles[0]]}"] = self._place_of(address, claim)
                counts[claim.roles[0]] += 1
        return places

    def _place_of(self, address: str, claim: Claim) -> Assignment:
        return Assignment(host=self.gpus[address].host, devices=claim.devices, process=address)

    def _taken(self, free: Sequence[str] = ()) -> dict[str, str]:
        """GPUs that jobs have, with the jobs' names. free: workers whose GPUs are to be placed anew."""
        retained_claims = {address: claim for address, (claim, _) in self._kept.items()}
        return {
            uuid: claim.job
            for claims in (self.claims, self.needs_restart, retained_claims)
            for address, claim in claims.items()
            if address not in free
            for uuid in claim.devices
        }

    def _placed(
        self, needs: Needs, workers: Sequence[str], *, taken: Mapping[str, str], id: str = ""
    ) -> Placement | Shortage:
        hosts = hosts_of(self.gpus, self._known_kinds(), workers)
        only = sum(len(host.devices) for host in hosts) == 1
        return place(hosts, needs.heavy_roles, taken=taken, before=self._places_of(id), share=only)

    def _select(
        self, needs: Needs, free: Sequence[str], driver_at: str = "", engines: Sequence[str] = (), *,
        id: str = "", surplus: bool = True, taken: Mapping[str, str] | None = None,
    ) -> tuple[Gang, Places] | None:  # fmt: skip
        """The workers for a job out of the free ones, and their GPUs. The arguments are those of `choose`; id: of the
        job; taken: GPUs that are not free, by default those of jobs that have other workers."""
        kinds = self._known_kinds()
        free = sorted(free, key=lambda address: address in self.gpus)  # light roles keep away from GPUs
        if not self.on_gpus(needs):
            gang = choose(needs, kinds, free, driver_at, engines, surplus=surplus)
            return None if gang is None else (gang, {})
        able = [address for address in (*engines, *free) if address != driver_at]
        placed = self._placed(needs, able, taken=self._taken([*free, *engines]) if taken is None else taken, id=id)
        if isinstance(placed, Shortage):
            return None
        heavy = {assignment.process: assignment.devices for assignment in placed.assignments.values()}
        light = choose(needs.light, kinds, [a for a in free if a not in heavy], driver_at, surplus=surplus)
        if light is None:
            return None
        roles = {assignment.process: (name.partition("-")[0],) for name, assignment in placed.assignments.items()}
        return light | roles, heavy

    def _lacks(self, needs: Needs, free: list[str]) -> str:
        """Which workers or GPUs a job waits for, for messages; empty if only their number matters."""
        if not self.on_gpus(needs):
            return describe_shortage(needs, self._known_kinds(), free)
        placed = self._placed(needs, free, taken=self._taken(free))
        return placed.line if isinstance(placed, Shortage) else "no worker process is left for the light roles"

    def _suffices(self, needs: Needs) -> bool:
        """Whether a job could run if it had all workers, those that have just left included."""
        kinds = self._known_kinds()
        return self._select(needs, list(kinds), taken={}) is not None if self.on_gpus(needs) else suffice(needs, kinds)

    # -- jobs ----------------------------------------------------------------------------------------------------

    def enter(self, id: str, run: str, needs: Needs, wait_s: float, now: float) -> None:
        """Let a job wait, behind all others; keeps its place if it has one."""
        if id not in self.entries:
            self.entries[id] = QueueEntry(id, run, needs, wait_s, now)

    def waits(self, id: str) -> bool:
        return id in self.entries and not self.entries[id].num_workers

    def leave(self, id: str) -> None:
        """End a job, or let it wait no longer. It must have left no actors on its workers."""
        self.entries.pop(id, None)
        self._lost_places.pop(id, None)
        self._release(id)

    def restart_gpus(self, id: str, addresses: Sequence[str]) -> None:
        """Have those of a job's workers restarted before anyone gets them that have used GPUs: a process keeps their
        memory, and cannot be given others. addresses: workers that can be restarted."""
        for address in addresses:
            if (claim := self.claims.get(address)) is not None and claim.job == id and claim.devices:
                self._dirty(address)

    def requeue(self, id: str, now: float) -> None:
        """Let a job wait again, at its place, with nothing held. It must have left no actors on its workers; those that
        may have engines that were kept for it are restarted."""
        entry = self.entries[id]
        for address in self._engines & set(self.workers_of(id)):
            self._dirty(address)
        entry.num_workers, entry.short_since_s, entry.since_s = 0, None, now
        self._lost_places.pop(id, None)
        self._release(id)

    def driver_lost(self, id: str, now: float) -> list[str]:
        """A job's driver is gone: it waits again. Returns the workers it had, which must be restarted before anyone
        gets them, unless they are kept."""
        workers_left = list(self.workers_of(id))
        for address in workers_left:
            self.needs_restart[address] = self.claims.pop(address)
        self.requeue(id, now)
        return workers_left

    def admit_ready(self, now: float) -> tuple[dict[str, Gang], list[str]]:
        """Admit all who can be, in their order. Returns the workers of each job admitted, and the jobs whose time to
        wait is over; these are left to the caller to end."""
        self._expire(now)
        free = self.free
        claimed = Counter(claim.job for claim in self.claims.values())
        owed = any(claimed[entry.id] < entry.num_workers for entry in self.entries.values())
        admitted: dict[str, Gang] = {}
        self.wanted = {}
        expired: list[str] = []
        ahead = 0
        for entry in self.entries.values():
            if entry.num_workers:
                continue
            if any(claim.run == entry.run for claim in self.needs_restart.values()):
                ahead += 1
                entry.why = RESTARTS
                continue
            if entry.needs.instance_gpus and self.awaits_reports(now):
                ahead += 1
                entry.why = UNREPORTED
                continue
            retained = self._kept_for(entry.id)
            alone = self._waits_alone(entry.id)
            chosen = (
                None if ahead or owed else self._select(entry.needs, free, engines=retained, id=entry.id, surplus=alone)
            )
            if chosen is not None and any(chosen[0].get(address) not in ((ROLLOUT,), None) for address in retained):
                for address in retained:
                    self._drop_kept(address)
                ahead += 1
                entry.why = RESTARTS
                continue
            if chosen is not None:
                self._give(entry, *chosen)
                admitted[entry.id] = chosen[0]
                free = self.free
            elif self._suffices(entry.needs):
                turn = f"{ahead} job{'s' if ahead > 1 else ''} before it" if ahead else "next in line"
                lacks = "" if ahead else self._lacks(entry.needs, free)
                entry.why = f"needs {entry.needs}; free {len(free)} of {len(self.workers)}; {turn}" + (
                    f"; {lacks}" if lacks else ""
                )
                if not ahead and not owed:
                    self._ask_back(entry.needs, free)
                ahead += 1
            else:
                description = describe_workers(self.workers)
                if short := self.short_of_gpus(entry.needs):
                    description += f"; {short}"
                entry.why = f"needs {entry.needs}; {description}; starts once there are enough"
            if not entry.num_workers and entry.wait_s and now - entry.since_s > entry.wait_s:
                expired.append(entry.id)
        return admitted, expired

    def _expire(self, now: float) -> None:
        """Forget workers that have not come back, and give up engines that no driver has taken over in time."""
        for address in [a for a, (_, since) in self._disconnected.items() if now - since > RETURN_S]:
            self._forget_gone(address)
            self._kinds = None
        for address in [a for a, (_, since) in self._kept.items() if now - since > RETURN_S]:
            self._drop_kept(address)

    def has_all_workers(self, id: str, now: float, driver_at: str = "") -> bool:
        """Whether an admitted job has all its workers, after giving it what it lost from those that are free. If it has
        lacked some for too long it waits again, without any."""
        entry, claimed = self.entries[id], self.workers_of(id)
        if len(claimed) >= entry.num_workers > 0:
            return True
        if not entry.num_workers:
            return False
        engines = [address for address in claimed if address in self._engines]
        without_engine = [address for address in claimed if address not in self._engines]
        alone = self._waits_alone(id)
        chosen = self._select(entry.needs, [*without_engine, *self.free], driver_at, engines, id=id, surplus=alone)
        if chosen is not None and (misused := [a for a in engines if chosen[0].get(a) != (ROLLOUT,)]):
            for address in misused:
                self._dirty(address)
            chosen = None
        if chosen is not None:
            self._release(id)
            self._give(entry, *chosen)
            return True
        entry.short_since_s = now if entry.short_since_s is None else entry.short_since_s
        entry.why = f"needs {entry.needs}; has {len(claimed)} of them left"
        if now - entry.short_since_s > RETURN_S:
            self.requeue(id, now)
        return False

    def claim(self, id: str, address: str, role: str) -> bool:
        """Give a running job one worker in a lost one's place. False if it is another's, or gone. Idempotent."""
        claimed, entry = self.claims.get(address), self.entries.get(id)
        if entry is None or not entry.num_workers or (claimed is not None and claimed.job != id):
            return False
        if claimed is None:
            if address in self.needs_restart or address in self._kept or address not in self.workers:
                return False
            self.claims[address] = Claim(id, entry.run, (role,))
        elif role not in EXCLUSIVE_ROLES:  # it shares a worker from now on, instead of having its own
            self.claims[address] = replace(claimed, roles=tuple(dict.fromkeys((*claimed.roles, role))))
            entry.num_workers -= len(self.workers_of(id)) < entry.num_workers
        return True

    def give_back(self, id: str, address: str) -> bool:
        """Take a worker back that a running job has beyond what it needs. It must have left no actors there. False if
        it needs the worker."""
        if address not in self._surplus(id):
            return False
        del self.claims[address]
        self.entries[id].num_workers -= 1
        return True

    def _surplus(self, id: str) -> list[str]:
        """Workers of a job that hold nothing but a reward worker, which another of its workers can take as well."""
        light = [address for address, roles in self.workers_of(id).items() if "reward" in roles]
        alone = [address for address in light if self.claims[address].roles == ("reward",)]
        return alone[1:] if len(alone) == len(light) else alone

    def _ask_back(self, needs: Needs, free: list[str]) -> None:
        """Ask for what running jobs have beyond what they need, if a job could start with it."""
        surplus = {address: id for id in self.entries for address in self._surplus(id)}
        chosen = self._select(needs, [*free, *surplus], surplus=False)
        for address in chosen[0] if chosen is not None else ():
            if address in surplus:
                self.wanted.setdefault(surplus[address], []).append(address)

    def _waits_alone(self, id: str) -> bool:
        """Whether no job but this one waits."""
        return not any(self.waits(other) for other in self.entries if other != id)

    def _give(self, entry: QueueEntry, gang: Gang, places: Places) -> None:
        entry.num_workers, entry.short_since_s, entry.why = len(gang), None, ""
        for address in self._kept_for(entry.id):
            if address in gang:
                del self._kept[address]
                self._engines.add(address)
            else:
                self._drop_kept(address)
        self._lost_places.pop(entry.id, None)
        self.claims |= {a: Claim(entry.id, entry.run, roles, places.get(a, ())) for a, roles in gang.items()}

    def _release(self, id: str) -> None:
        for address in self.workers_of(id):
            del self.claims[address]
        for address in self._kept_for(id):
            self._drop_kept(address)

    def _kept_for(self, id: str) -> list[str]:
        return [address for address, (claim, _) in self._kept.items() if claim.job == id]

    def _dirty(self, address: str) -> None:
        """Have a claimed worker restarted before anyone gets it."""
        self.needs_restart[address] = self.claims.pop(address)
        self._unwanted.append(address)

    def _drop_kept(self, address: str) -> None:
        self.needs_restart[address], _ = self._kept.pop(address)
        self._unwanted.append(address)

    def _known_kinds(self) -> Kinds:
        """Of all workers, and of those that have just left and may come back."""
        if self._kinds is None:
            self._kinds = kinds_of({a: has for a, (has, _) in self._disconnected.items()} | self.workers)
        return self._kinds


def place_of(gang: Gang) -> str:
    """The worker that a job's driver runs on; empty if it runs on none."""
    return next((address for address, roles in gang.items() if DRIVER in roles), "")
