"""The actors of one run: placing them, asking them, handing them weights, replacing the ones that are lost.

Only rollout instances and reward workers can be replaced: what they held is known elsewhere. The trainer and the
trajectory server hold state of their own, and their loss ends the run with what was committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.config import actor_settings
from pipeline.config.model_facts import ModelFacts
from pipeline.config.schema import RunConfig
from pipeline.coordination.commands import Command
from pipeline.runtime.resumption import Resumption
from pipeline.runtime.workers import ActorCluster, Placed
from stores.errors import ActorLost, ProtocolViolation, StoreError
from stores.parameters import FOLDER_PREFIX
from stores.trajectory import InstanceId, PolicyVersion
from tasks.actors.calls import call
from tasks.actors.parameter_server import ParameterServer
from tasks.actors.reward_worker import RewardWorker
from tasks.actors.rollout_instance import RolloutInstance
from tasks.actors.trainer import StepResult, Trainer
from tasks.actors.trajectory_server import TrajectoryServer
from tasks.engines.base import Loaded

logger = logging.getLogger(__name__)

REPLACEMENTS = 3
"""How often one instance or reward worker is replaced before the run stops: past that it is no accident."""
PROBE_PROMPTS, PROBE_TOKENS = 8, 64
"""Held-out prompts that the probe is made of, and its tokens at most: one small prefill after each pull."""
SLOW_PULL_S = 5.0
"""Seconds beyond which a pull is worth a line of the log."""
CLOSE_S = 10.0
"""Seconds an actor may take to close before it is left to its worker's end."""


@dataclass(slots=True)
class InstanceHandle:
    """A rollout instance, as the driver works with it."""

    placed: Placed
    index: int
    outbox: asyncio.Queue[Command] = field(default_factory=asyncio.Queue)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    version: PolicyVersion = PolicyVersion(0)
    fingerprint: str = ""
    """Of what it holds; empty until its first pull."""
    drift: float = 0.0
    """Of its probe after the latest pull: largest difference from the trainer's logprobs, nats."""
    # For its idle share: seconds the coordinator had work on it, seconds its engine had. What the engine did before
    # the run, an evaluation, does not count.
    assigned_s: float = 0.0
    busy_s: float = 0.0
    busy_before_s: float | None = None
    tokens_sampled: int = 0

    @property
    def id(self) -> InstanceId:
        return InstanceId(self.placed.name)


class Actors:
    """One run's actors."""

    def __init__(self, config: RunConfig, cluster: ActorCluster, run_dir: Path, facts: ModelFacts) -> None:
        self._config = config
        self._cluster = cluster
        self._run_dir = run_dir
        self._facts = facts
        self._folder = str(Path(config.cluster.shared_memory) / f"{FOLDER_PREFIX}{config.name}-{facts.nonce}")
        self._num_lost: dict[str, int] = {}
        self._life = 0
        self._placing_parameters = asyncio.Lock()
        self._published: dict[PolicyVersion, StepResult] = {}
        self.instances: dict[InstanceId, InstanceHandle] = {}
        self.losses: list[str] = []
        self.alarms: list[str] = []
        """Instances whose probe was further from the trainer's than rollout.drift_limit."""
        self._probe: tuple[int, ...] = ()

    # -- asking --------------------------------------------------------------------------------------------------

    def actor(self, name: str) -> Any:
        """The actor called `name`, to be handed to another as an argument. Raises ActorLost if it is gone."""
        if name not in self._cluster.placed:
            raise ActorLost(f"{name} is gone")
        return self._cluster.placed[name].actor

    async def ask(self, name: str, method: str, *args: Any, within_s: float | None = None) -> Any:
        """Call an actor; by default within the deadline for short calls."""
        deadline_s = self._config.deadlines.call_s if within_s is None else within_s
        return await call(self.actor(name), method, *args, within_s=deadline_s, who=name)

    # -- placing -------------------------------------------------------------------------------------------------

    async def place_all(self, begin_s: float, resumption: Resumption | None = None) -> None:
        """Place every role, and publish the base model as version 0, or the version a stored run goes on from. begin_s:
        on the run's clock."""
        config, cluster = self._config, self._cluster
        version = PolicyVersion(0) if resumption is None else resumption.version
        self._life = 0 if resumption is None else resumption.life
        stored = resumption is not None and (self._run_dir / "store").is_dir()
        settings = actor_settings.server_settings(config, self._run_dir / "store", self._facts.context, resumed=stored)
        await _all(
            cluster.place("server", "server", TrajectoryServer, settings, begin_s),
            cluster.place(
                "trainer",
                "trainer",
                Trainer,
                actor_settings.trainer_settings(config),
                self._folder,
                config.cluster.threads,
                config.deadlines.call_s,
                str(self._run_dir / "resume"),
                config.training.resume_every,
            ),
            *(self.place_reward(f"reward-{i}") for i in range(config.reward.workers)),
            *(self.place_instance(i) for i in range(config.rollout.instances)),
        )
        for placed in (cluster.placed["trainer"], *(i.placed for i in self.instances.values())):
            await self._place_parameters(placed)
        prompts = await self.ask("server", "held_out", PROBE_PROMPTS, within_s=config.deadlines.start_s)
        tokens = [t for prompt in prompts for t in prompt.tokens]
        self._probe = tuple(tokens[: min(PROBE_TOKENS, self._facts.context - 1)])
        start_s = config.deadlines.start_s
        initial: StepResult = await self.ask("trainer", "publish_initial", self._probe, version, within_s=start_s)
        if resumption is not None and resumption.fingerprint not in ("", initial.fingerprint):
            raise StoreError(
                f"{self._run_dir}/resume: version {version} is {initial.fingerprint}, its step published "
                f"{resumption.fingerprint}; remove the damaged resume point to use an older one"
            )
        self.publish(initial)
        if version:
            await _all(*(self.pull(instance, version) for instance in self.instances.values()))

    async def place_reward(self, name: str) -> None:
        """Place a reward worker and have it load its reward function. Raises ConfigError if that cannot be done."""
        settings, call_s = actor_settings.scoring_settings(self._config), self._config.deadlines.call_s
        await self._cluster.place(name, "reward", RewardWorker, settings, call_s)
        await self.ask(name, "check", within_s=self._config.deadlines.start_s)

    async def place_instance(self, index: int) -> InstanceHandle:
        """Place instance `index`, under a new name when it replaces one: late answers of the old one must not match."""
        config = self._config
        attempt = self._num_lost.get(f"rollout-{index}", 0)
        name = f"rollout-{index}" + (f".{attempt}" if attempt else "")
        placed = await self._cluster.place(
            name,
            "rollout",
            RolloutInstance,
            actor_settings.engine_settings(config, index, self._facts.eos, attempt=attempt, life=self._life),
            InstanceId(name),
            config.cluster.threads,
            config.rollout.max_new_tokens,
            config.deadlines.call_s,
        )
        instance = InstanceHandle(placed=placed, index=index)
        self.instances[instance.id] = instance
        logger.info("%s %s on %s", name, "takes a lost one's place" if attempt else "joins", placed.address)
        if self._published and max(self._published) > 0:
            await self.pull(instance, max(self._published))
        return instance

    async def _place_parameters(self, neighbour: Placed) -> None:
        """One parameter server a host, beside an actor that is there anyway: its calls are short and asynchronous."""
        name = f"parameters-{neighbour.host}"
        async with self._placing_parameters:
            if name in self._cluster.placed:
                return
            server = self._cluster.placed["server"]
            beside = server if server.host == neighbour.host else neighbour
            call_s = self._config.deadlines.call_s
            await self._cluster.place_beside(beside, name, "parameters", ParameterServer, self._folder, call_s)

    # -- weights -------------------------------------------------------------------------------------------------

    def publish(self, result: StepResult) -> None:
        """Note a published version; instances can pull it from now on."""
        self._published[result.version] = result

    async def pull(self, instance: InstanceHandle, version: PolicyVersion) -> None:
        """Load a version on an instance, and check that what it holds is what was published."""
        begin = time.monotonic()
        await self._place_parameters(instance.placed)  # its host's may have gone with another instance's process
        source = self.actor(f"parameters-{self._cluster.placed['trainer'].host}")
        path = await self.ask(f"parameters-{instance.placed.host}", "ensure", version, source)
        loaded: Loaded = await self.ask(instance.placed.name, "pull", version, path, self._probe)
        elapsed_s = time.monotonic() - begin
        level = logging.INFO if elapsed_s > SLOW_PULL_S else logging.DEBUG
        logger.log(level, "%s pulled version %d in %.1f s", instance.id, version, elapsed_s)
        published = self._published[version]
        expected = published.fingerprint
        if loaded.fingerprint and loaded.fingerprint != expected:
            raise ProtocolViolation(
                f"{instance.id} holds {loaded.fingerprint} after pulling version {version}, {expected} was published"
            )
        instance.version, instance.fingerprint = version, loaded.fingerprint
        pairs = zip(loaded.probe, published.probe, strict=True)
        instance.drift = max((abs(a - b) for a, b in pairs), default=0.0)
        if not instance.drift <= self._config.drift_limit:
            alarm = (
                f"{instance.id} at version {version}: logprobs of the probe are up to {instance.drift:.3g} nats off "
                f"the trainer's, rollout.drift_limit allows {self._config.drift_limit:g}"
            )
            self.alarms.append(alarm)
            logger.error(alarm)

    async def pull_all(self, version: PolicyVersion) -> None:
        for instance in list(self.instances.values()):
            if instance.version != version:
                await self.pull(instance, version)

    async def prune(self, wanted: set[PolicyVersion]) -> None:
        """Remove the versions that no instance uses and that are not `wanted`."""
        used = wanted | {i.version for i in self.instances.values()}
        for name, placed in list(self._cluster.placed.items()):
            if placed.role == "parameters":
                await self.ask(name, "prune", tuple(used))

    async def checkpoint(self, name: str) -> None:
        """Save the trainer's present weights in the run's folder."""
        folder = self._run_dir / "checkpoints"
        folder.mkdir(exist_ok=True)
        await self.ask("trainer", "save_checkpoint", str(folder / name), within_s=self._config.deadlines.train_s)
        logger.info("checkpoint written to %s", folder / name)

    # -- losing --------------------------------------------------------------------------------------------------

    def lose(self, name: str, lost: ActorLost, now: float) -> None:
        """Note that an actor is gone and free its place. Raises ActorLost once it happened too often."""
        role = name.partition(".")[0]
        self._num_lost[role] = self._num_lost.get(role, 0) + 1
        self.losses.append(f"{now:.1f} s: {lost}")
        logger.warning("%s; replacing it", lost)
        self.instances.pop(InstanceId(name), None)
        self._cluster.lose(name)
        if self._num_lost[role] > REPLACEMENTS:
            raise ActorLost(f"{role} was lost {self._num_lost[role]} times, last: {lost}") from lost

    async def close(self) -> None:
        """Close all actors, the engines first: they may still use what the others hold. Never raises."""
        order = {"rollout": 0, "trainer": 1, "reward": 2}
        for placed in sorted(self._cluster.placed.values(), key=lambda p: order.get(p.role, 3)):
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await self.ask(placed.name, "close", within_s=CLOSE_S)


async def _all(*work: Coroutine[Any, Any, Any]) -> None:
    """Do all of this at once; at the first failure end the rest and raise it."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
