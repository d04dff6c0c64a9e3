"""Places actors on the workers of a Dask cluster. Implements `Workers` of pipeline/processes/worker_protocol.py.

Dask's resources only filter placement and are released when a constructor returns. So this module itself keeps a table
of the roles on each worker. A rollout instance or a trainer rank has a worker process to itself, because all Python
code of a process shares one interpreter. Light actors (server, reward) share a worker if the heavy roles need the
remaining ones, or other runs use the cluster. Parameter servers always share the worker of another actor. On a cluster
that other runs use too, a worker belongs to one run at a time: the registry on the scheduler
(pipeline/cluster/job_registry.py) gives a run all its workers at once, and records them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from distributed import Client

from staleflow.pipeline.cluster import job_registry, submitted_job
from staleflow.pipeline.cluster.connection import CONNECT_S, ClusterAddress
from staleflow.pipeline.cluster.gang import EXCLUSIVE_ROLES, ROLES, ROLLOUT, Needs
from staleflow.pipeline.cluster.job_lookup import refuse_too_few_gpus
from staleflow.pipeline.cluster.plugin import ensure_job_registry
from staleflow.pipeline.config.local_gpus import read_devices, restrict_devices
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.config.size_plan import place_locally
from staleflow.pipeline.processes import local_cluster
from staleflow.pipeline.processes.background import run_to_end
from staleflow.pipeline.processes.clock import now_s
from staleflow.pipeline.processes.worker_protocol import ClusterLost, NoFreeWorker, PlacedActor
from staleflow.pipeline.sizing.memory import num_gpus_of
from staleflow.stores.errors import ActorLost, ActorSilent, ConfigError, StaleflowError

logger = logging.getLogger(__name__)

MAX_RETIRE_ATTEMPTS = 5
"""Maximum requests to the scheduler to retire a worker, one per second. It refuses while it counts an actor on the
worker, which it may still do shortly after the actor was released."""
ADMISSION_POLL_S = 0.5
"""Seconds between two checks whether a waiting run has its workers."""
RESUME_HINT = "the stored data is complete; `staleflow resume` continues the run"
WORKER_CHECK_S = 1.0
"""Seconds between two checks whether the worker on which an actor is being created is still there."""
STACK_S = 5.0
"""Maximum seconds until a worker returns the stack of an actor that is not ready."""
_CURRENT_CLIENT_LOCK = threading.Lock()
"""Held while a client is made current. Dask sets its global scheduler in the meantime. If two actors or runs of this
process overlapped, it would stay set, and later Dask computations in this process would look for a client."""
FILE_TIMEOUT_S = 10.0
"""Maximum seconds until a scheduler file appears: a run may be started together with its cluster."""


class DriverSlotTaken(StaleflowError):
    """The driver's worker does not, or no longer, belong to its run."""


@dataclass(slots=True)
class DaskWorkers:
    """The workers of a connected Dask cluster, and one run's actors on them."""

    client: Any
    local: Any | None
    run_name: str
    start_s: float
    roles_by_worker: dict[str, list[str]] = field(default_factory=dict)
    """Roles placed on each worker, by the worker's name."""
    num_created: int = 0
    """Number of actors that were created, lost ones included."""
    placed: dict[str, PlacedActor] = field(default_factory=dict)
    lost_addresses: set[str] = field(default_factory=set)
    """Addresses of workers that lost an actor. The scheduler still lists a hung one, but it is not chosen again."""
    restarts: set[asyncio.Future[None]] = field(default_factory=set)
    job_id: str = ""
    """The run's id in the job registry on the scheduler."""
    own_worker: str = ""
    """Address of this process as a worker, if the driver runs as a task of the cluster; else empty."""
    num_heavy_actors: int = 0
    """Number of workers that the run's rollout instances, trainer and teachers need."""
    choose_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_shared: bool = False
    """Whether other runs may use the cluster, so that workers have to be claimed."""
    scheduler_id: str = ""
    """Dask's id of the scheduler process; empty until the first request."""
    visible_devices: Mapping[str, str] = field(default_factory=dict)
    """Values of CUDA_VISIBLE_DEVICES on a local cluster, by actor name."""
    claims_gpus: bool = False
    """Whether the run claims GPUs of a shared cluster from the registry, which chooses its workers and GPUs."""
    placement_text: str = ""
    """The placement on hosts and GPUs as text for the user."""
    waiting_actors: dict[str, str] = field(default_factory=dict)
    """Actors that have no worker yet, by name, with a description of the worker that each needs, for status
    displays."""

    @property
    def dashboard(self) -> str:
        """URL of the staleflow page; empty if there is no dashboard."""
        link = str(self.client.dashboard_link or "")
        return link.removesuffix("status") + "staleflow" if link.endswith("/status") else link

    async def place(
        self,
        name: str,
        role: str,
        cls: type[Any],
        *args: Any,
        before_creation: Callable[[], Awaitable[None]] | None = None,
    ) -> PlacedActor:
        """Create an actor on a worker for `role`. Waits for a free worker, up to deadlines.start_s, and as long again
        for the actor: a worker that became free late does not hang."""
        deadline = now_s() + self.start_s
        try:
            while (worker := await self._reserve_slot(role)) is None:
                remaining_s = deadline - now_s()
                if remaining_s < 0:
                    raise NoFreeWorker(
                        f"cluster: no free worker for {name} after {self.start_s:g} s (deadlines.start_s); the run "
                        "needs one worker process for each rollout instance and each rank of the trainer, with "
                        f"resource {role}=1 if workers declare resources"
                    )
                self.waiting_actors[name] = f"a free worker process, with resource {role}=1 if any declare resources"
                await asyncio.sleep(0.2)
        finally:
            self.waiting_actors.pop(name, None)
        return await self._create(worker, name, role, cls, args, before_creation)

    async def place_beside(self, actor: PlacedActor, name: str, cls: type[Any], *args: Any) -> PlacedActor:
        """Create a parameter server on the worker of another actor."""
        slot = (actor.worker, actor.address, actor.host)
        self.roles_by_worker[actor.worker].append("parameters")
        return await self._create(slot, name, "parameters", cls, args)

    async def _create(
        self,
        slot: tuple[str, str, str],
        name: str,
        role: str,
        cls: type[Any],
        args: tuple[Any, ...],
        before_creation: Callable[[], Awaitable[None]] | None = None,
    ) -> PlacedActor:
        """Create an actor in its reserved slot: name, address and host of a worker. If this fails, the slot is free
        again; after a timeout the worker is restarted, because it may hang, unless it has other actors."""
        worker, address, host = slot
        future: Any = None
        limit: asyncio.Timeout | None = None
        try:
            if before_creation is not None:
                await before_creation()
            # A replacement gets the GPUs of the lost instance.
            visible_devices = self.visible_devices.get(name.partition(".")[0])
            if self.claims_gpus:
                visible_devices = (await self._ask("cuda_visible_devices", id=self.job_id)).get(address, "")
            async with asyncio.timeout(self.start_s) as limit:
                if visible_devices is not None:
                    await self.client.run(restrict_devices, visible_devices, workers=[address])
                    logger.debug("%s has GPUs %s", name, visible_devices or "none")
                # In the key, which cannot be used again while a future of a lost actor exists.
                self.num_created += 1
                future = self.client.submit(
                    cls,
                    *args,
                    actor=True,
                    workers=[address],
                    allow_other_workers=False,
                    key=f"staleflow-{self.run_name}-{name}-{self.num_created}",
                    pure=False,
                )
                actor = await self._wait_for_actor(future, name, address)
        except BaseException as error:
            self.roles_by_worker[worker].remove(role)
            # An actor may raise a TimeoutError of its own.
            if isinstance(error, TimeoutError) and limit is not None and limit.expired():
                self.lost_addresses.add(address)
                if future is not None:
                    stack = await self._creation_stack(future, address)
                    logger.warning("%s is not ready (%s): %s", name, future.status, stack)
                if not self.roles_by_worker[worker]:
                    self._start_restart(address)
                raise ActorSilent(
                    f"{name} was not ready within {self.start_s:g} s (deadlines.start_s) on {address}", name
                ) from None
            if isinstance(error, StaleflowError) or not isinstance(error, Exception):
                raise
            raise ActorLost(f"{name} could not start on {address}: {type(error).__name__}: {error}", name) from error
        self.placed[name] = PlacedActor(
            name=name, role=role, worker=worker, address=address, host=host, actor=actor, future=future
        )
        logger.debug("%s placed on %s (%s)", name, worker, address)
        return self.placed[name]

    async def _wait_for_actor(self, future: Any, name: str, address: str) -> Any:
        """Wait for an actor that is being created on a worker. Raises ActorLost if the worker leaves in the meantime:
        Dask would wait for a worker at this address, where none ever returns."""
        # An actor's handle uses the client that is current in the task that receives it; a process may have several.
        with _CURRENT_CLIENT_LOCK, self.client.as_current():
            pending = asyncio.ensure_future(future)
        try:
            while not (await asyncio.wait({pending}, timeout=WORKER_CHECK_S))[0]:
                if address not in (await self._identity(-1))["workers"]:
                    raise ActorLost(f"{name} could not start on {address}: the worker is gone", name)
            return await pending
        finally:
            pending.cancel()

    async def _creation_stack(self, future: Any, address: str) -> str:
        """Return the stack of the thread that creates an actor, or why it is not known."""
        try:
            async with asyncio.timeout(STACK_S):
                stacks = await self.client.call_stack(keys=[future.key])
        except (OSError, RuntimeError, KeyError, TimeoutError) as error:
            return f"its stack is not known: {type(error).__name__} {error}".rstrip()
        stack = stacks.get(address, {}).get(future.key)
        return "its stack is\n" + "".join(stack) if stack else "no thread of its process is creating it"

    def release_actor(self, name: str) -> None:
        """Release an actor and free its slot on its worker."""
        actor = self.placed.pop(name, None)
        if actor is not None:
            self.roles_by_worker[actor.worker].remove(actor.role)
            actor.future.release()

    async def return_light_worker(self, name: str) -> None:
        """Release a closed light actor, and let other runs have its process if nothing else runs there."""
        address = self.placed[name].address
        self.release_actor(name)
        if self.is_shared and not any(actor.address == address for actor in self.placed.values()):
            await self._ask("return_worker", id=self.job_id, address=address)

    def mark_lost(self, name: str) -> None:
        """Remove a lost actor, and the parameter servers beside it. No actor is placed in its process again, because it
        may hang or still hold memory. The nanny restarts it, unless the driver or another actor runs there too."""
        lost = self.placed[name]
        self.release_actor(name)
        self.lost_addresses.add(lost.address)
        neighbors = [p for p in self.placed.values() if p.address == lost.address]
        for parameter_server in [p for p in neighbors if p.role == "parameters"]:
            neighbors.remove(parameter_server)
            self.release_actor(parameter_server.name)
        if lost.address != self.own_worker and not neighbors:
            self._start_restart(lost.address)

    async def retire(self, name: str) -> None:
        """Release a closed actor, and let its process leave the cluster for good. Never raises."""
        actor = self.placed[name]
        self.lost_addresses.add(actor.address)
        actors = [p for p in self.placed.values() if p.address == actor.address]
        for other in actors:
            self.release_actor(other.name)
        # The scheduler keeps a worker while any handle of an actor on it exists, also handles in other actors that are
        # not garbage-collected yet.
        with contextlib.suppress(Exception):
            await self.client.cancel([p.future for p in actors], force=True)
        for _ in range(MAX_RETIRE_ATTEMPTS):
            with contextlib.suppress(Exception):
                if await self.client.retire_workers([actor.address]):
                    return
            await asyncio.sleep(1.0)
        logger.warning("%s does not leave the cluster; the run does not use it any more", actor.address)

    async def has_spare_worker(self) -> bool:
        """Whether there is a free worker for a rollout instance that no other run waits for."""
        if self.is_shared:
            jobs = await self._ask("jobs")
            if any(job["state"] == "waiting" and job["id"] != self.job_id for job in jobs):
                return False
        if self.claims_gpus:
            claim = {"id": self.job_id, "role": ROLLOUT, "avoided_workers": list(self.lost_addresses), "dry_run": True}
            return bool(await self._ask("claim_gpu_worker", **claim))
        async with self.choose_lock:
            workers = await self._workers()
            roles_by_address = await self._ask("workers_of", id=self.job_id) if self.is_shared else {}
            return bool(self._free_workers(ROLLOUT, {a: w for a, w in workers.items() if a not in roles_by_address}))

    def _start_restart(self, address: str) -> None:
        restart = asyncio.ensure_future(self._restart(address))
        self.restarts.add(restart)
        restart.add_done_callback(self.restarts.discard)

    async def _restart(self, address: str) -> None:
        # A dead process has been restarted by its nanny already; without a nanny nothing can restart it.
        with contextlib.suppress(Exception):
            await self.client.restart_workers([address], timeout=self.start_s, raise_for_error=False)

    async def _reserve_slot(self, role: str) -> tuple[str, str, str] | None:
        """Reserve a slot for `role`: (name, address, host) of its worker, or None if no worker is free."""
        async with self.choose_lock:
            worker = await self._choose_worker(role)
            if worker is not None:
                self.roles_by_worker.setdefault(worker[0], []).append(role)
            return worker

    async def _choose_worker(self, role: str) -> tuple[str, str, str] | None:
        workers = await self._workers()
        roles_by_address = await self._ask("workers_of", id=self.job_id) if self.is_shared else {}
        candidates = [(a, w) for a, w in workers.items() if role in roles_by_address.get(a, ())]
        if role in EXCLUSIVE_ROLES:
            candidates = [(a, w) for a, w in candidates if not self.roles_by_worker.get(str(w["name"]))]
            if self.claims_gpus and not candidates:
                claim = {"id": self.job_id, "role": role, "avoided_workers": list(self.lost_addresses)}
                address = await self._ask("claim_gpu_worker", **claim)
                candidates = [(a, w) for a, w in workers.items() if a == address]
                if not candidates:
                    return None
        candidates_left = candidates or self._free_workers(
            role, {a: w for a, w in workers.items() if a not in roles_by_address or self._num_roles(w)}
        )
        for address, worker in sorted(
            candidates_left, key=lambda item: (self._num_roles(item[1]), str(item[1]["name"]))
        ):
            if not self.is_shared or await self._ask("claim", id=self.job_id, address=address, role=role):
                return str(worker["name"]), address, str(worker["host"])
        return None

    def _free_workers(self, role: str, workers: dict[str, Any]) -> list[tuple[str, Any]]:
        """Return the free workers for a role for which the run has no claimed worker, as on a local cluster or after a
        loss."""
        are_roles_declared = any(set(w["resources"]) & set(ROLES) for w in workers.values())
        capable = {a: w for a, w in workers.items() if not are_roles_declared or w["resources"].get(role, 0) > 0}
        candidates_left = [(a, w) for a, w in capable.items() if not self._num_roles(w)]
        if role not in EXCLUSIVE_ROLES:
            # Light roles share a worker if other runs use the cluster, or the heavy roles need the remaining workers.
            exclusive = [r for roles in self.roles_by_worker.values() for r in roles if r in EXCLUSIVE_ROLES]
            num_needed = 0 if are_roles_declared else self.num_heavy_actors - len(exclusive)
            if len(candidates_left) <= num_needed or (self.is_shared and not are_roles_declared):
                with_roles = [(a, w, set(self.roles_by_worker.get(str(w["name"]), ()))) for a, w in capable.items()]
                candidates_left = [
                    (a, w) for a, w, roles in with_roles if roles and not roles & set(EXCLUSIVE_ROLES)
                ] or candidates_left
        return candidates_left

    def _num_roles(self, worker: Any) -> int:
        return len(self.roles_by_worker.get(str(worker["name"]), ()))

    async def wait_for_workers(self, config: RunConfig, announce: Callable[[str], None], own_worker: str = "") -> str:
        """Wait until the run has all its workers on a shared cluster; it has none before that. Returns the reason if
        the run must stop instead; otherwise empty.

        Args:
            announce: Called with one line for each new reason of the wait.
            own_worker: Address of this process if it is a worker; no heavy actor is placed there.

        Raises:
            ConfigError: The run has waited for longer than allowed.
            DriverSlotTaken: The driver must leave this process.
        """
        if not self.is_shared:
            return ""
        self.own_worker = own_worker
        if not own_worker:
            needs = Needs.from_config(config, has_driver_worker=False)
            await self._ask(
                "enqueue",
                id=self.job_id,
                needs=asdict(needs),
                wait_limit_s=config.deadlines.wait_s,
                driver_client=str(self.client.id),
            )
        announced_reason = ""
        while await self._identity(0) and not (job := await self._ask("check_admission", id=self.job_id))["admitted"]:
            if job["state"] in submitted_job.ENDED:
                raise ConfigError(f"cluster: {job['why']}")
            if job["stop"]:
                return str(job["stop"])
            if own_worker and job["driver_worker"] != own_worker:
                raise DriverSlotTaken("this worker no longer belongs to the run")
            if job["why"] != announced_reason:
                announced_reason = job["why"]
                announce(f"waiting: {announced_reason}")
            await asyncio.sleep(ADMISSION_POLL_S)
        if own_worker:
            self.roles_by_worker[str((await self._workers())[own_worker]["name"])] = ["driver"]
        self.placement_text = await self._ask("placement_text", id=self.job_id)
        self.claims_gpus = bool(self.placement_text)
        return ""

    async def _identity(self, n_workers: int) -> dict[str, Any]:
        """Return the scheduler's description of itself and of up to `n_workers` workers, -1 for all. Raises ClusterLost
        if it is another scheduler than at the start, because Dask's client reconnects to any scheduler at the
        address."""
        info: dict[str, Any] = await self._answer(self.client.scheduler.identity(n_workers=n_workers))
        self.scheduler_id = self.scheduler_id or str(info["id"])
        if info["id"] != self.scheduler_id:
            raise ClusterLost(f"cluster: the scheduler was restarted, so the run's actors are gone; {RESUME_HINT}")
        return info

    async def _ask(self, verb: str, **arguments: Any) -> Any:
        """Call the job registry. Raises ClusterLost if the scheduler does not answer."""
        return await self._answer(job_registry.ask(self.client, verb, **arguments))

    async def _answer(self, request: Awaitable[Any]) -> Any:
        """Await the reply to a request to the scheduler. Raises ClusterLost if there is none."""
        try:
            return await request
        except OSError as error:
            raise ClusterLost(f"cluster: the scheduler does not answer any more ({error}); {RESUME_HINT}") from error

    async def _workers(self) -> dict[str, Any]:
        info = await self._identity(-1)
        self.lost_addresses.intersection_update(info["workers"])  # a restarted worker may have the same address
        unavailable = await self._ask("unavailable", id=self.job_id) if self.is_shared else []
        return {a: w for a, w in info["workers"].items() if a not in self.lost_addresses and a not in unavailable}

    async def close(self) -> None:
        """Release the actors and, for a local cluster, its processes. Call Actors.close first. Never raises."""
        for restart in self.restarts:
            restart.cancel()
        for name in list(self.placed):
            self.release_actor(name)
        if self.is_shared and not self.own_worker:  # else the driver releases its workers itself
            with contextlib.suppress(Exception):
                await job_registry.ask(self.client, "release_workers", id=self.job_id)
        with contextlib.suppress(Exception):
            await self.client.close()
        if self.local is not None:
            with contextlib.suppress(Exception):
                await self.local.close()


def _cluster_of(config: RunConfig, security: Any) -> ClusterAddress:
    """Return the address of a job's cluster, which is not a local one."""
    if config.cluster.kind == "file":
        return ClusterAddress(scheduler_file=config.cluster.scheduler_file, security=security)
    return ClusterAddress(address=config.cluster.address, security=security)


async def check_gpus(config: RunConfig, security: Any = None) -> None:
    """Raise ConfigError if the cluster that a job names has too few GPUs for it."""
    if config.cluster.kind != "local":
        async with _cluster_of(config, security).open_client(file_timeout_s=FILE_TIMEOUT_S) as client:
            await refuse_too_few_gpus(client, config)


async def connect(config: RunConfig, security: Any = None, *, within_s: float = CONNECT_S) -> DaskWorkers:
    """Start or join the cluster that a job names. Raises ConfigError with one line if the cluster cannot be reached.

    Args:
        security: Dask's security object for TLS; by default Dask's configuration.
        within_s: Seconds for the scheduler to answer.
    """
    cluster = config.cluster
    local: Any = None
    visible_devices, placement_text = place_locally(config, read_devices()) if cluster.kind == "local" else ({}, "")
    if cluster.kind == "local":
        local = await local_cluster.start(
            1 + config.training.ranks + len(config.reward_actors) + config.rollout.instances + len(config.teachers),
            cluster.threads,
            local_cluster.modules_to_preload(emulated=config.emulated),
            dashboard=cluster.dashboard,
            may_have_children=max(num_gpus_of(config.rollout.engine), num_gpus_of(config.teacher.engine)) > 1,
        )
        try:
            client = await Client(local, asynchronous=True, direct_to_workers=True, set_as_default=False)
            await ensure_job_registry(client)
        except BaseException:
            await run_to_end(local.close())
            raise
    else:
        client = await _cluster_of(config, security).connect(
            direct_to_workers=True, file_timeout_s=FILE_TIMEOUT_S, within_s=within_s
        )
    return DaskWorkers(
        client=client,
        local=local,
        run_name=config.name,
        start_s=config.deadlines.start_s,
        is_shared=local is None,
        num_heavy_actors=config.rollout.instances + config.training.ranks + len(config.teachers),
        visible_devices=visible_devices,
        placement_text=placement_text,
    )
