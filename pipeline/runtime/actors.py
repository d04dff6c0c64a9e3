"""The actors of one run: placing them, calling them, handing them weights, replacing the ones that are lost.

Invariants:
- Every call has a deadline. A lost actor shows as ActorLost, which names the deadline where one was missed.
- A call that hands on an actor (ActorArg) may take call_s longer: its own call to that one has to fail first, so
  that who failed is who counts as lost, not who asked. So may a commit: the trajectory server itself gives up after
  commit_s, and names the cause. What was slow and answers again is lost to nobody.
- Rollout instances and reward workers are replaced by those who use them: what they held is known elsewhere. The
  trainer and the trajectory server hold state of their own and are restored (restoring.py); who called one is kept
  waiting, and its call is made again.
- None is replaced more than REPLACEMENTS times an hour. An instance's replacement has its own name: late answers
  of the old one are not taken for the new one's.
- An instance counts as serving a version only after it has proved to hold the weights that were published under it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from staleflow.pipeline.config import actor_settings
from staleflow.pipeline.config.model_facts import ModelFacts
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.processes import trainer_group
from staleflow.pipeline.processes.background import gather_or_cancel
from staleflow.pipeline.processes.clock import now_s
from staleflow.pipeline.processes.instance_handle import InstanceHandle
from staleflow.pipeline.processes.worker_protocol import ActorArg, PlacedActor, Workers
from staleflow.pipeline.recovery.resumption import Resumption
from staleflow.pipeline.recovery.role_recovery import RoleRecovery
from staleflow.pipeline.weights.weight_transfers import WeightTransfers
from staleflow.stores.errors import (
    ActorFailed,
    ActorLost,
    ActorSilent,
    ConfigError,
    StoreError,
    TransferFailed,
    WeightsRefused,
)
from staleflow.stores.trajectory import InstanceId, PolicyVersion, TrajectoryId
from staleflow.stores.weights.weight_folder import FOLDER_PREFIX
from staleflow.stores.weights.weight_report import WeightCheck
from staleflow.tasks.actors.actor_calls import call_actor
from staleflow.tasks.actors.environment_host import EnvironmentHost
from staleflow.tasks.actors.parameter_server import ParameterServer
from staleflow.tasks.actors.published_weights import PublishedWeights, mean_difference
from staleflow.tasks.actors.reward_worker import RewardWorker
from staleflow.tasks.actors.rollout_instance import RolloutInstance
from staleflow.tasks.actors.store_thread import while_bucket_fails
from staleflow.tasks.actors.trainer import PublishedStep
from staleflow.tasks.actors.trajectory_server import TrajectoryServer

logger = logging.getLogger(__name__)

T = TypeVar("T")

REPLACEMENTS, WITHIN_S = 3, 3600.0
"""How often one instance or reward worker is replaced within so many seconds before the run stops: more losses are no
accident. Those of longer ago do not count, since a run of weeks meets four sooner or later."""
NAMED = 4
"""Most actors that are named in a line on the start."""
PROBE_PROMPTS, PROBE_TOKENS = 8, 64
"""Held-out prompts that the probe is made of, and its tokens at most: one small prefill after each pull."""
AGAIN_S = 1.0
"""Seconds until weights that nobody could hand on are asked for again."""
MAX_FALSE_LOSSES = 3
"""How often in a row an actor may say that the trajectory server is lost, which answers, before it counts as lost
itself: it may be the one that is cut off."""
SLOW_PULL_S = 5.0
"""Pulls that take longer, in seconds, are logged."""
CLOSE_S = 10.0
"""Seconds an actor may take to close before it is left to end with its worker."""
Deadline = Literal["start_s", "call_s", "train_s", "silent_s", "commit_s"]
"""The knob of [deadlines] that limits a call."""


DRIFT_FACTOR = 4.0
"""Times the engines' difference from the trainer at version 0 that an instance's logprobs may differ later."""
MOST_DRIFT = 0.5
"""Nats by which engine and trainer may differ on average at version 0: rounding in 8 bits explains less."""


def drift_floor(dtype: str) -> float:
    """Nats that rounding in a type explains on average, whatever version 0 has shown."""
    return 1e-3 if dtype == "float32" else 2e-2


SERVER = ActorArg("server")


def unusable(refused: WeightsRefused) -> ConfigError:
    """The error of a run whose first weights an instance refuses: another instance would refuse them, too."""
    return ConfigError(f"rollout.engine cannot be updated by this trainer: {refused}; use another engine or model")


class Actors:
    """The actors of one run, on any kind of workers."""

    def __init__(self, config: RunConfig, workers: Workers, run_dir: Path, facts: ModelFacts) -> None:
        self._config = config
        self._workers = workers
        self._run_dir = run_dir
        self._facts = facts
        self._folder = str(Path(config.cluster.shared_memory) / f"{FOLDER_PREFIX}{config.name}-{facts.nonce}")
        self._lost_at: dict[str, list[float]] = {}
        self._long_calls: dict[str, set[asyncio.Future[Any]]] = defaultdict(set)
        """What the calls that may take long wait for besides, by the actor: its loss."""
        self._retired: list[int] = []
        """Indices of the instances that were retired, each time."""
        self._earlier_starts = 0
        self._resumed = False
        self._trainer_host = ""
        self._placing_parameters: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._unanswering: set[str] = set()
        """Addresses of processes whose parameter server did not answer: no further one is placed there."""
        self._published: dict[PolicyVersion, PublishedStep] = {}
        self._transfers = WeightTransfers(self, config.deadlines.call_s, config.cluster.delta_versions)
        self._base_logprobs: tuple[float, ...] = ()
        """The base model's of the probe; empty without supervised fine-tuning, when version 0 has them."""
        self._trained: dict[PolicyVersion, str] = {}
        self._to_save: Counter[PolicyVersion] = Counter()
        """Checkpoints of each version that are being saved."""
        self.restoring = RoleRecovery(
            self, run_dir / "resume", config.training.resume_every, trainer_group.others(config)
        )
        self.instances: dict[InstanceId, InstanceHandle] = {}
        self.losses: list[str] = []
        self.alarms: list[str] = []
        """Instances that were taken out of service for their weights or logprobs."""
        self.notes: list[str] = []
        """What of the instances' weights is not verified."""
        self.drift_limit = config.rollout.logprob_drift_limit or drift_floor(config.model.dtype)
        """The most that an instance's logprobs of the probe may differ from the trainer's on average, nats."""
        self._checks: list[WeightCheck] = []
        """What pulls have shown since they were taken."""
        self.on_refused: Callable[[], None] = lambda: None
        """Called when `take_checks` has one of an instance that was taken out of service."""
        self._probe: tuple[int, ...] = ()

    # -- calling -------------------------------------------------------------------------------------------------

    def actor(self, name: str) -> Any:
        """The actor called `name`, to be handed to another as an argument. Raises ActorLost if it is gone."""
        if name not in self._workers.placed:
            raise ActorLost(f"{name} is gone", name)
        return self._workers.placed[name].actor

    async def ask(
        self, name: str, method: str, *args: Any, deadline: Deadline | None = None, within_s: float | None = None
    ) -> Any:
        """Call an actor, by default within deadlines.call_s. within_s: seconds, where they are not the knob's own; the
        message names the knob if `deadline` is given too. Raises ActorLost as `call_actor` does, unless who is lost can
        be restored: then it is asked again. So it is, a few times, if it says that another is lost, which answers."""
        num_doubts = 0
        while True:
            await self.restoring.settled(name)
            asked_s = now_s()
            try:
                return await self.ask_once(name, method, *args, deadline=deadline, within_s=within_s)
            except ActorLost as error:
                lost = error
            if lost.who == "server" != name and await self.server_answers():
                num_doubts += 1
                logger.warning("%s: %s; it answers now", name, lost)
                if num_doubts <= MAX_FALSE_LOSSES:
                    continue
                lost = ActorLost(f"{name} does not reach the server, which answers: {lost}", name)
            await self.restoring.restored(lost, asked_s)

    async def server_answers(self) -> bool:
        """Whether the trajectory server answers a short call."""
        try:
            await self.ask_once("server", "held_out_notice")
        except ActorLost:
            return False
        return True

    async def ask_once(
        self, name: str, method: str, *args: Any, deadline: Deadline | None = None, within_s: float | None = None
    ) -> Any:
        """`ask`, but a loss is raised whoever it is."""
        knob = deadline or "call_s"
        limit = f"deadlines.{knob}" if deadline or within_s is None else ""
        allowed_s: float = getattr(self._config.deadlines, knob) if within_s is None else within_s
        if knob == "commit_s" or (knob == "call_s" and any(isinstance(arg, ActorArg) for arg in args)):
            allowed_s += self._config.deadlines.call_s
        arguments = [self.actor(arg.name) if isinstance(arg, ActorArg) else arg for arg in args]
        request = call_actor(self.actor(name), method, *arguments, timeout_s=allowed_s, actor_name=name, limit=limit)
        return await (request if knob != "train_s" else self._until_lost(name, request))

    async def _until_lost(self, name: str, request: Coroutine[Any, Any, Any]) -> Any:
        """The result of a call that may take long. Raises ActorLost as soon as it shows in another way that the actor
        is lost: its process may have been stopped."""
        calls = self._long_calls[trainer_group.role_of(name)]
        lost: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer = asyncio.ensure_future(request)
        calls.add(lost)
        try:
            done, _ = await asyncio.wait({answer, lost}, return_when=asyncio.FIRST_COMPLETED)
            return (answer if answer in done else lost).result()
        finally:
            calls.discard(lost)
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)

    # -- placing -------------------------------------------------------------------------------------------------

    async def place_all(self, begin_s: float, resumption: Resumption | None = None) -> None:
        """Place every role, and publish version 0, the base model, or the version that a stored run is resumed from.
        begin_s: the present moment on the run's clock."""
        config, workers = self._config, self._workers
        version = PolicyVersion(0) if resumption is None else resumption.version
        self._earlier_starts = 0 if resumption is None else resumption.earlier_starts
        self._resumed = resumption is not None
        judge = self.place_environment if config.acts else self.place_reward

        def stored() -> bool:  # also by a server that was lost as soon as it had created it
            return (resumption is not None or "server" in self._lost_at) and (self._run_dir / "store").exists()

        await gather_or_cancel(
            self._start("server", begin_s, lambda: self.place_server(begin_s, resumed=stored())),
            self._start("trainer", begin_s, self.place_trainer),
            *(self._start(name, begin_s, partial(judge, name)) for name in config.reward_actors),
            *(self._start_instance(i, begin_s) for i in range(config.rollout.instances)),
        )
        heavy = (workers.placed["trainer"], *(i.placed for i in self.instances.values()))
        await gather_or_cancel(*(self._place_first_parameters(placed) for placed in heavy))
        prompts = await self.ask("server", "held_out", PROBE_PROMPTS, deadline="start_s")
        tokens = [t for prompt in prompts for t in prompt.tokens]
        self._probe = tuple(tokens[: min(PROBE_TOKENS, self._facts.context - 1)])
        await self._publish_first(version, "" if resumption is None else resumption.fingerprint)
        await self._measure_drift(resumption)
        # Version 0 too, which engines have loaded from the model's folder: a mapping of names or a layout that updates
        # get wrong shows before the first step, and what an instance serves is compared from its first token on.
        await gather_or_cancel(*(self._pull_first(i, version, begin_s) for i in list(self.instances.values())))

    async def _start(self, name: str, begin_s: float, place: Callable[[], Awaitable[T]]) -> T:
        """Place an actor as the run starts; one whose process is lost meanwhile is placed again. Raises ActorLost if
        that happens too often, ActorSilent if it misses its deadline and ConfigError if it refuses the first weights,
        as it would again."""
        while True:
            try:
                return await place()
            except ActorSilent:
                raise
            except WeightsRefused as refused:
                raise unusable(refused) from refused
            except ActorLost as lost:
                who = trainer_group.role_of(lost.who)
                if who.partition(".")[0] != name:
                    raise
                self.lose(who, lost, begin_s)

    async def _start_instance(self, index: int, begin_s: float) -> None:
        await self._start(f"rollout-{index}", begin_s, lambda: self.place_instance(index))

    async def _place_first_parameters(self, neighbour: PlacedActor) -> None:
        """Place a host's parameter server. If its process is lost, whose it is will be found out by its own calls, and
        the next fetch places another."""
        try:
            await self._place_parameters(neighbour)
        except ActorLost as lost:
            logger.warning("%s", lost)

    async def _publish_first(self, version: PolicyVersion, fingerprint: str) -> None:
        """`publish_initial`, by another trainer if it is lost meanwhile."""
        while True:
            asked_s = now_s()
            try:
                await self.publish_initial(version, fingerprint)
                return
            except ActorLost as lost:
                await self.restoring.restored(lost, asked_s)

    async def _measure_drift(self, resumption: Resumption | None) -> None:
        """Set the limit of drift by how much engines differ from the trainer in the base model, which they have loaded
        by their own code; a run that goes on keeps the one that was measured. Raises ConfigError if they differ too
        much to be told from wrong weights."""
        if self._config.rollout.logprob_drift_limit:
            return
        if resumption is not None:
            self.drift_limit = resumption.drift_limit or MOST_DRIFT
            return
        published = self._base_logprobs or self._published[PolicyVersion(0)].probe
        measured = 0.0
        for instance in list(self.instances.values()) if self._probe else ():
            try:
                own = await self.ask_once(instance.placed.name, "logprobs", self._probe, deadline="start_s")
            except ActorLost as lost:  # its pull replaces it
                logger.warning("%s", lost)
                continue
            measured = max(measured, mean_difference(own, published))
        if not measured <= MOST_DRIFT:
            raise ConfigError(
                f"rollout.engine computes another model than the trainer: at version 0 logprobs differ by "
                f"{measured:.3g} nats on average, {MOST_DRIFT} at most are allowed; use another engine or dtype, or "
                "set rollout.logprob_drift_limit"
            )
        self.drift_limit = max(self.drift_limit, DRIFT_FACTOR * measured)

    async def _pull_first(self, instance: InstanceHandle, version: PolicyVersion, begin_s: float) -> None:
        """`pull`, by another instance if it is lost meanwhile. Raises ConfigError if it refuses the weights."""
        try:
            await self.pull(instance, version)
        except ActorSilent:
            raise
        except WeightsRefused as refused:
            raise unusable(refused) from refused
        except ActorLost as lost:
            if lost.who != instance.id:
                raise
            self.lose(instance.id, lost, begin_s)
            await self._start_instance(instance.index, begin_s)

    @property
    def starting(self) -> str:
        """How far `place_all` is, for people: which actors it waits for."""
        names = ["server", "trainer", *trainer_group.others(self._config), *self._config.reward_actors]
        names += [f"rollout-{i}" for i in range(self._config.rollout.instances)]
        missing = [name for name in names if name not in self._workers.placed]
        if not missing:
            return f"all {len(names)} ready, publishing the first weights"
        loads = not self._config.emulated and any(n == "trainer" or n.startswith("rollout-") for n in missing)
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        return f"{len(names) - len(missing)} of {len(names)} ready, waiting for {', '.join(missing[:NAMED])}{more}" + (
            f" (loading {self._config.model.path})" if loads else ""
        )

    async def place_reward(self, name: str) -> None:
        """Place a reward worker and have it load its reward function. Raises ConfigError if that cannot be done."""
        settings, call_s = actor_settings.scoring_settings(self._config), self._config.deadlines.call_s
        await self._workers.place(name, "reward", RewardWorker, settings, call_s)
        await self.ask(name, "check", deadline="start_s")

    async def place_environment(self, name: str) -> None:
        """Place an environment host and have it try its environment. Raises ConfigError if that cannot be done."""
        replaces = self._resumed or name in self._lost_at
        settings = actor_settings.environment_settings(self._config, replaces=replaces)
        await self._workers.place(name, "reward", EnvironmentHost, settings, self._config.deadlines.call_s)
        await self.ask(name, "check", deadline="start_s")

    async def move_light(self, name: str) -> None:
        """Place a reward worker or environment host on a worker that the run shares, and give back its own."""
        with contextlib.suppress(Exception):
            await self.ask_once(name, "close", within_s=CLOSE_S)
        if name in self._workers.placed:
            logger.info("%s leaves %s, which another job waits for", name, self._workers.placed[name].address)
            await self._workers.give_back(name)
        await (self.place_environment(name) if self._config.acts else self.place_reward(name))

    def light_at(self, address: str) -> str:
        """The reward worker or environment host that is at an address; empty if there is none."""
        placed = self._workers.placed.values()
        return next((actor.name for actor in placed if actor.address == address and actor.role == "reward"), "")

    async def place_trainer(self) -> PlacedActor:
        """Place the trainer, which has to `publish_initial` first. Raises as Workers.place does."""
        placed = await trainer_group.place(
            self._workers, self.ask_once, self._config, self._folder, self._run_dir / "resume"
        )
        self._trainer_host = placed.host
        return placed

    async def place_server(self, begin_s: float, *, resumed: bool) -> PlacedActor:
        """Place the trajectory server. begin_s: the present moment on the run's clock. resumed: it has the store, and
        what it finds in the spool. It is placed again while the store's bucket fails. Raises as Workers.place does."""
        settings = actor_settings.server_settings(
            self._config, self._run_dir / "store", self._facts.context, resumed=resumed
        )

        def failed(cause: str) -> None:
            logger.warning("%s; the trajectory server waits for its store", cause)

        return await while_bucket_fails(
            lambda: self._workers.place("server", "server", TrajectoryServer, settings, begin_s),
            self._config.deadlines.commit_s,
            failed,
        )

    async def place_instance(self, index: int) -> InstanceHandle:
        """Place instance `index`; under a new name if it replaces one, so that late answers of the old do not match."""
        config = self._config
        attempt = len(self._lost_at.get(f"rollout-{index}", ())) + self._retired.count(index)
        name = f"rollout-{index}" + (f".{attempt}" if attempt else "")
        placed = await self._workers.place(
            name,
            "rollout",
            RolloutInstance,
            actor_settings.engine_settings(
                config, index, self._facts.eos, attempt=attempt, earlier_starts=self._earlier_starts
            ),
            InstanceId(name),
            config.cluster.threads,
            config.deadlines.call_s,
            config.rollout.delivery_interval_s,
            actor_settings.drafts_from_responses(config),
            str(self._run_dir),
            self._resumed,
        )
        instance = InstanceHandle(placed=placed, index=index)
        took_over = self._resumed and await self.ask(name, "took_over", deadline="start_s")
        self.instances[instance.id] = instance
        if took_over:
            logger.warning("%s goes on with an engine that is loaded, on %s", name, placed.address)
        else:
            logger.info("%s %s on %s", name, "takes a lost one's place" if attempt else "joins", placed.address)
        if self._published:
            await self.pull(instance, max(self._published))
        return instance

    async def _place_parameters(self, neighbour: PlacedActor) -> None:
        """Place a parameter server on the neighbour's host if it has none: beside the trajectory server, if that is
        there and answers, else beside the neighbour. Its calls are short and asynchronous."""
        name = f"parameters-{neighbour.host}"
        async with self._placing_parameters[neighbour.host]:
            if name in self._workers.placed:
                return
            server = self._workers.placed.get("server")
            fit = server is not None and server.host == neighbour.host and server.address not in self._unanswering
            beside = server if server is not None and fit else neighbour
            call_s = self._config.deadlines.call_s
            await self._workers.place_beside(beside, name, "parameters", ParameterServer, self._folder, call_s)

    # -- weights -------------------------------------------------------------------------------------------------

    def publish(self, result: PublishedStep) -> None:
        """Note a published version; instances can pull it from now on."""
        self._published[result.version] = result
        self._transfers.publish(
            result.version, self._trainer_host, result.num_bytes, result.delta_bytes, result.fingerprint
        )

    async def train(
        self, step: int, trajectories: tuple[TrajectoryId, ...], versions: tuple[PolicyVersion, ...]
    ) -> PublishedStep:
        """Train a step; `publish` what it returns. A trainer that is lost meanwhile trains it once it is restored."""
        result: PublishedStep = await self.ask(
            "trainer", "train", SERVER, step, trajectories, versions, deadline="train_s"
        )
        self._trained[result.version] = result.fingerprint
        return result

    @property
    def trained(self) -> Mapping[PolicyVersion, str]:
        """Fingerprints of the versions that the trainer came to, from the first of this start on."""
        return self._trained

    async def train_again(self, step: int) -> None:
        """Have a restored trainer train a step on the rows that the server still has, and publish the version. Raises
        ActorLost if it comes to other weights than before."""
        while True:
            asked_s = now_s()
            try:
                result: PublishedStep = await self.ask_once(
                    "trainer", "train", SERVER, step, (), (), deadline="train_s"
                )
                break
            except ActorLost as lost:
                if lost.who != "server":
                    raise
                await self.restoring.restored(lost, asked_s)
        if result.fingerprint != self._trained[result.version]:
            raise ActorLost(
                f"trainer: step {step}, trained again after a loss, gave other weights ({result.fingerprint}) than "
                f"were published ({self._trained[result.version]}): its kernels, or the order in which its ranks add "
                "up, are not the same each time; resume the run, which repeats the step"
            )
        self.publish(result)

    async def publish_initial(self, version: PolicyVersion, fingerprint: str = "") -> None:
        """Have the trainer publish version 0, the base model after supervised fine-tuning if there is any, or a later
        version from its resume point. fingerprint: of the version as it was published before; empty if it was not, or
        nobody knows. Raises StoreError if the point holds other weights."""
        if not version:
            await self._fine_tune()
        initial: PublishedStep = await self.ask_once(
            "trainer", "publish_initial", self._probe, version, fingerprint, deadline="start_s"
        )
        if not initial.as_recorded:
            raise StoreError(
                f"{self._run_dir}/resume: version {version} is {initial.fingerprint}, its step published "
                f"{fingerprint}; remove the damaged resume point to use an older one"
            )
        self._trained[version] = initial.fingerprint
        self.publish(initial)

    async def _fine_tune(self) -> None:
        """Have the trainer do all steps of supervised fine-tuning. The logprobs of the base model, which engines have
        loaded, are kept to compare them."""
        num_steps = self._config.training.sft.steps
        if num_steps and not self._base_logprobs and self._probe:
            self._base_logprobs = await self.ask_once("trainer", "logprobs", self._probe, deadline="start_s")
        for step in range(num_steps):
            metrics = await self.ask_once("trainer", "fine_tune", step, deadline="train_s")
            if metrics:
                logger.info("fine-tuning step %d of %d: loss %.4f", step + 1, num_steps, metrics["loss"])

    @property
    def bytes_arrived(self) -> int:
        """Bytes of weights that have arrived on hosts so far."""
        return self._transfers.bytes_arrived

    @property
    def loading(self) -> bool:
        """Whether an engine loads weights, which has a deadline."""
        return any(instance.loading for instance in self.instances.values())

    async def pull(self, instance: InstanceHandle, version: PolicyVersion) -> None:
        """Load a version on an instance, or the newest if nobody has that one any more, and check that it then holds
        what was published. Raises WeightsRefused if it holds something else."""
        instance.fetching = version
        try:
            await self._pull(instance, version)
        except TransferFailed as failed:  # it went with the host of a lost trainer, which came back on another
            newest = max(self._published)
            logger.warning("%s: %s; it pulls version %d", instance.id, failed, newest)
            instance.fetching = newest
            await self._pull(instance, newest)
        finally:
            instance.fetching, instance.loading = None, False

    async def _pull(self, instance: InstanceHandle, version: PolicyVersion) -> None:
        begin = now_s()
        path = await self._fetch(instance.placed, version)
        within_s = self._transfers.within_s(version)
        instance.loading = True
        published = self._published[version]
        expected = PublishedWeights(
            version=version,
            fingerprint=published.fingerprint,
            probe=self._probe,
            logprobs=published.probe,
            limit=self.drift_limit,
        )
        check: WeightCheck = await self.ask(
            instance.placed.name, "pull", expected, path, deadline="call_s", within_s=within_s
        )
        elapsed_s = now_s() - begin
        level = logging.INFO if elapsed_s > SLOW_PULL_S else logging.DEBUG
        logger.log(level, "%s pulled version %d in %.1f s", instance.id, version, elapsed_s)
        self._checks.append(check)
        if check.refused:
            refused = f"{instance.id} is out of service at version {version}: {check.refused}"
            self.alarms.append(refused)
            logger.error(refused)
            self.on_refused()
            raise WeightsRefused(refused, instance.id)
        instance.version, instance.fingerprint, instance.drift = version, check.fingerprint, check.drift
        if check.outcome == "not verified":
            self._note_unverified(check)

    def _note_unverified(self, check: WeightCheck) -> None:
        """Say once what of the instances' weights cannot be compared."""
        line = (
            f"weights are not verified: {check.weights.line}; only the logprobs of {max(0, len(self._probe) - 1)} "
            "tokens are compared with the trainer's"
        )
        if not self.notes:
            self.notes.append(line)
            logger.warning("%s: %s", check.instance, line)

    def take_checks(self) -> tuple[WeightCheck, ...]:
        """What pulls have shown since the last time."""
        checks, self._checks = tuple(self._checks), []
        return checks

    async def _fetch(self, placed: PlacedActor, version: PolicyVersion) -> str:
        """The path of a version on an actor's host, brought there if it is not there. Waits for as long as nobody can
        hand on the newest: whether those are gone is for their own calls to tell. Raises ActorLost if the actor itself
        is, TransferFailed if nobody hands on an older one."""
        name = f"parameters-{placed.host}"
        while True:
            for actor in (await self._trainer(), placed):
                await self._place_parameters(actor)  # a host's own may be gone with another instance's process
            server = self._workers.placed[name]
            try:
                return await self._transfers.fetch(version, placed.host)
            except TransferFailed as failed:
                if version < max(self._published):
                    raise
                logger.warning("%s waits for weights: %s", placed.name, failed)
                await asyncio.sleep(AGAIN_S)
            except ActorLost as lost:
                if server.address == placed.address:
                    raise ActorLost(f"{placed.name}: {lost}", placed.name) from lost
                if self._workers.placed.get(name) is server:
                    logger.warning("%s on %s does not answer; %s gets another", name, server.address, placed.host)
                    self._workers.forget(name)
                    self._unanswering.add(server.address)

    async def _trainer(self) -> PlacedActor:
        """Where the trainer is, once it is there."""
        while "trainer" not in self._workers.placed:
            await self.restoring.restored(ActorLost("trainer is gone", "trainer"), now_s())
        return self._workers.placed["trainer"]

    async def prune(self, wanted: set[PolicyVersion]) -> None:
        """Remove the versions that no instance uses or fetches and that are not `wanted`. A host where that fails keeps
        them until the next time: whether its instances are there is for others to find out."""
        used = wanted | {i.version for i in self.instances.values()}
        used |= {i.fetching for i in self.instances.values() if i.fetching is not None}
        used |= {version for version, count in self._to_save.items() if count}
        self._transfers.keep(used)
        newest = max(self._published)
        for name, placed in list(self._workers.placed.items()):
            if placed.role == "parameters":
                try:
                    await self.ask(name, "prune", tuple(used), newest)
                except (ActorLost, ActorFailed) as error:
                    logger.info("old versions are kept on %s for now: %s", placed.host, error)

    async def checkpoint(self, name: str, version: PolicyVersion) -> bool:
        """Save a version's weights in the run's folder; it is not pruned before. False if they are gone, as those of an
        older version are with the trainer that published them."""
        folder = self._run_dir / "checkpoints"
        folder.mkdir(exist_ok=True)
        self._to_save[version] += 1
        try:
            saved: bool = await self.ask("trainer", "save_checkpoint", str(folder / name), version, deadline="train_s")
        finally:
            self._to_save[version] -= 1
        if saved:
            logger.info("checkpoint written to %s", folder / name)
        else:
            logger.warning("%s is not written: version %d went with a lost trainer", folder / name, version)
        return saved

    # -- losing --------------------------------------------------------------------------------------------------

    def lose(self, name: str, lost: ActorLost | ActorFailed, now: float) -> None:
        """Record the loss of an actor at second `now` of the run, and free its place. Raises ActorLost once it was lost
        too often."""
        role = name.partition(".")[0]
        self._lost_at.setdefault(role, []).append(now)
        recent = [at for at in self._lost_at[role] if now - at < WITHIN_S]
        self.losses.append(f"{now:.1f} s: {lost}")
        logger.warning("%s; replacing it", lost)
        self.instances.pop(InstanceId(name), None)
        for member in trainer_group.members(name, self._workers.placed):
            self._workers.lose(member)
        for waiting in self._long_calls[name]:
            if not waiting.done():
                waiting.set_exception(ActorLost(str(lost), lost.who))
        if len(recent) > REPLACEMENTS:
            raise ActorLost(f"{role} was lost {len(recent)} times within an hour, last: {lost}") from lost

    async def spare(self) -> bool:
        """Whether there is a worker for a further instance."""
        return await self._workers.spare("rollout")

    async def retire(self, instance: InstanceHandle) -> None:
        """Close an instance that runs nothing, and let its worker leave the cluster. No loss. Never raises."""
        self.instances.pop(instance.id, None)
        self._retired.append(instance.index)
        with contextlib.suppress(Exception):
            await self.ask_once(instance.placed.name, "close", within_s=CLOSE_S)
        if instance.placed.name in self._workers.placed:
            await self._workers.retire(instance.placed.name)

    async def close(self) -> None:
        """Close all actors, the engines first: they may still use what the others hold. Never raises."""
        await self.restoring.end()
        order = {"rollout": 0, "trainer": 1, "reward": 2}
        for placed in sorted(self._workers.placed.values(), key=lambda p: order.get(p.role, 3)):
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await self.ask(placed.name, "close", within_s=CLOSE_S)
