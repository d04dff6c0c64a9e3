"""The actors of one run: placing them, calling them, sending them weights, replacing lost ones.

`Actors` lives in the driver's process, and only the driver's event loop changes it.

Invariants:
- Every call has a deadline. A lost actor shows as ActorLost, which names the deadline if one was missed.
- If a call passes an actor as an argument (ActorArg), its deadline is extended by call_s. The nested call then times
  out first, and the nested actor, not the caller, is reported lost. The deadline of a commit is extended too: the
  trajectory server itself gives up after commit_s and names the cause. An actor that was slow but answers again is not
  treated as lost.
- Rollout instances, reward workers and environment hosts hold no unique state, so their users replace them. The trainer
  and trajectory server hold state; they are restored (role_recovery.py), and callers wait and then retry.
- Each role, and each instance, may be lost MAX_REPLACEMENTS times within REPLACEMENT_WINDOW_S; one loss more ends the
  run. The losses of an instance's replacements count as its own; retirements do not count.
- A replacement of an instance has a new name, so that late answers of the lost one are not attributed to it.
- In the layout "turns" an instance is asleep when it is placed, and the trainer computes only while all are
  (device_turns.py). An instance that waits for weights is asleep too: the trainer may have to be restored first.
- An instance serves a version only after it has proved that it holds the weights published as that version.
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
from staleflow.pipeline.recovery import certificate
from staleflow.pipeline.recovery.certificate import Certificate
from staleflow.pipeline.recovery.resumption import Resumption
from staleflow.pipeline.recovery.role_recovery import RoleRecovery
from staleflow.pipeline.runtime.device_turns import COMPUTES, DeviceTurns
from staleflow.pipeline.runtime.weight_verification import PROBE_PROMPTS, WeightVerification, unusable_engine_error
from staleflow.pipeline.weights.weight_transfers import WeightTransfers
from staleflow.stores.errors import (
    ActorFailed,
    ActorLost,
    ActorSilent,
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
from staleflow.tasks.actors.reward_worker import RewardWorker
from staleflow.tasks.actors.rollout_instance import RolloutInstance
from staleflow.tasks.actors.store_thread import while_bucket_fails
from staleflow.tasks.actors.trainer import PublishedStep
from staleflow.tasks.actors.trajectory_server import TrajectoryServer

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_REPLACEMENTS, REPLACEMENT_WINDOW_S = 3, 3600.0
"""Replacements that one instance or role may have within so many seconds; one loss more ends the run, as it is hardly
an accident. Older losses do not count, since a run of weeks has four sooner or later."""
MAX_NAMES_SHOWN = 4
"""Missing actors that the line on the start's progress names at most."""
FETCH_RETRY_S = 1.0
"""Seconds before retrying a weight fetch that no host could serve."""
MAX_FALSE_LOSSES = 3
"""Consecutive times an actor may report the trajectory server lost, although the driver can reach it, before the actor
itself counts as lost."""
SLOW_PULL_S = 5.0
"""Pulls that take longer, in seconds, are logged."""
CLOSE_S = 10.0
"""Seconds an actor may take to close before it is left to end with its worker."""
DeadlineKnob = Literal["start_s", "call_s", "train_s", "silent_s", "commit_s"]
"""The knob of [deadlines] that limits a call."""
SERVER = ActorArg("server")
PUBLISHING = "publishing the first weights"


class Actors:
    """The actors of one run, on any kind of workers."""

    def __init__(self, config: RunConfig, workers: Workers, run_dir: Path, facts: ModelFacts) -> None:
        self._config = config
        self._workers = workers
        self._run_dir = run_dir
        self._facts = facts
        self._weights_folder = str(Path(config.cluster.shared_memory) / f"{FOLDER_PREFIX}{config.name}-{facts.nonce}")
        self._lost_at: dict[str, list[float]] = {}
        self._loss_futures: dict[str, set[asyncio.Future[Any]]] = defaultdict(set)
        """Per actor, futures set to ActorLost when it is lost, to abort its pending long calls."""
        self._retired_indices: list[int] = []
        """Index of each retired instance, once per retirement."""
        self._earlier_starts = 0
        self._resumed = False
        self._trainer_host = ""
        self._parameter_server_locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._unresponsive_addresses: set[str] = set()
        """Processes whose parameter server did not answer: no other parameter server is placed there."""
        self._published: dict[PolicyVersion, PublishedStep] = {}
        self._transfers = WeightTransfers(self, config.deadlines.call_s)
        self._first_work = PUBLISHING
        """What the trainer does before version 0 is there, for people."""
        self._trained_fingerprints: dict[PolicyVersion, str] = {}
        self._num_pending_saves: Counter[PolicyVersion] = Counter()
        """Checkpoints that are being saved, per version."""
        self.recovery = RoleRecovery(
            self, run_dir / "resume", config.training.resume_every, trainer_group.follower_names(config)
        )
        self.instances: dict[InstanceId, InstanceHandle] = {}
        self.loss_messages: list[str] = []
        self.verification = WeightVerification(config, facts.context)
        self._turns = DeviceTurns(shared=config.turns)

    # -- calling -------------------------------------------------------------------------------------------------

    def actor(self, name: str) -> Any:
        """The actor `name`, for use as an argument of calls to other actors. Raises ActorLost if it is not placed."""
        if name not in self._workers.placed:
            raise ActorLost(f"{name} is gone", name)
        return self._workers.placed[name].actor

    async def ask(
        self, name: str, method: str, *args: Any, deadline: DeadlineKnob | None = None, within_s: float | None = None
    ) -> Any:
        """Call a method of an actor. If the lost actor can be restored, waits and retries. Also retries up to
        MAX_FALSE_LOSSES times if the actor reports the server lost although it answers. Otherwise raises ActorLost.

        Args:
            deadline: The knob that limits the call, by default call_s. Errors name it.
            within_s: Overrides the knob's value; then errors name the knob only if `deadline` is given.
        """
        num_doubts = 0
        while True:
            await self.recovery.wait_until_settled(name)
            called_s = now_s()
            try:
                return await self.ask_once(name, method, *args, deadline=deadline, within_s=within_s)
            except ActorLost as error:
                lost = error
            if lost.actor == "server" != name and await self.server_answers():
                num_doubts += 1
                logger.warning("%s: %s; it answers now", name, lost)
                if num_doubts <= MAX_FALSE_LOSSES:
                    continue
                lost = ActorLost(f"{name} does not reach the server, which answers: {lost}", name)
            await self.recovery.wait_until_restored(lost, called_s)

    async def server_answers(self) -> bool:
        """Whether the trajectory server answers a call within deadlines.call_s."""
        try:
            await self.ask_once("server", "held_out_notice")
        except ActorLost:
            return False
        return True

    async def ask_once(
        self, name: str, method: str, *args: Any, deadline: DeadlineKnob | None = None, within_s: float | None = None
    ) -> Any:
        """Like `ask`, but raises every ActorLost instead of retrying."""
        if name == trainer_group.TRAINER and method in COMPUTES:
            async with self._turns.training():
                return await self._call(name, method, *args, deadline=deadline, within_s=within_s)
        return await self._call(name, method, *args, deadline=deadline, within_s=within_s)

    async def _call(
        self, name: str, method: str, *args: Any, deadline: DeadlineKnob | None, within_s: float | None
    ) -> Any:
        """Call a method of an actor that is placed."""
        knob = deadline or "call_s"
        limit = f"deadlines.{knob}" if deadline or within_s is None else ""
        allowed_s: float = getattr(self._config.deadlines, knob) if within_s is None else within_s
        if knob == "commit_s" or (knob == "call_s" and any(isinstance(arg, ActorArg) for arg in args)):
            allowed_s += self._config.deadlines.call_s
        arguments = [self.actor(arg.name) if isinstance(arg, ActorArg) else arg for arg in args]
        request = call_actor(self.actor(name), method, *arguments, timeout_s=allowed_s, actor_name=name, limit=limit)
        return await (request if knob != "train_s" else self._result_or_loss(name, request))

    async def _result_or_loss(self, name: str, request: Coroutine[Any, Any, Any]) -> Any:
        """Wait for the result of a long call. Raises ActorLost as soon as the actor's loss is recorded: another,
        shorter call may notice it first."""
        futures = self._loss_futures[trainer_group.role_of(name)]
        loss: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        result = asyncio.ensure_future(request)
        futures.add(loss)
        try:
            done, _ = await asyncio.wait({result, loss}, return_when=asyncio.FIRST_COMPLETED)
            return (result if result in done else loss).result()
        finally:
            futures.discard(loss)
            result.cancel()
            await asyncio.gather(result, return_exceptions=True)

    # -- placing -------------------------------------------------------------------------------------------------

    async def place_all(self, begin_s: float, resumption: Resumption | None = None) -> None:
        """Place all actors, and publish the first version: 0, the base model, or the version from which a stored run
        resumes. begin_s: current time on the run's clock."""
        config, workers = self._config, self._workers
        version = PolicyVersion(0) if resumption is None else resumption.version
        self._earlier_starts = 0 if resumption is None else resumption.earlier_starts
        self._resumed = resumption is not None
        place_scorer = self.place_environment if config.has_environment else self.place_reward

        def store_exists() -> bool:  # a server that was lost right after its start may have created it
            return (resumption is not None or "server" in self._lost_at) and (self._run_dir / "store").exists()

        await gather_or_cancel(
            self._start("server", begin_s, lambda: self.place_server(begin_s, resumed=store_exists())),
            self._start("trainer", begin_s, self.place_trainer),
            *(self._start(name, begin_s, partial(place_scorer, name)) for name in config.reward_actors),
            *(self._start_instance(i, begin_s) for i in range(config.rollout.instances)),
        )
        weight_holders = (workers.placed["trainer"], *(i.placed for i in self.instances.values()))
        await gather_or_cancel(*(self._place_first_parameter_server(placed) for placed in weight_holders))
        prompts = await self.ask("server", "held_out", PROBE_PROMPTS, deadline="start_s")
        self.verification.set_probe(prompt.tokens for prompt in prompts)
        engine_logprobs = await self.verification.engine_logprobs(
            list(self.instances.values()), self._probe_logprobs, resumption
        )
        if self._turns.shared:
            await gather_or_cancel(*map(self._sleep_or_lose, self.instances.values()))
        await self._publish_first(version, "" if resumption is None else resumption.fingerprint)
        self.verification.measure_drift(engine_logprobs, self._published[version], resumption)
        # Version 0 too, which engines have loaded from the model's folder: a mapping of names or a layout that updates
        # get wrong shows before the first step, and what an instance serves is compared from its first token on.
        await gather_or_cancel(*(self._pull_first(i, version, begin_s) for i in list(self.instances.values())))

    async def _start(self, name: str, begin_s: float, create: Callable[[], Awaitable[T]]) -> T:
        """Place an actor at the start of the run, again if its process is lost meanwhile. Raises ActorLost if it is
        lost too often; ActorSilent if it misses its deadline and ConfigError if it refuses the first weights, since
        both would happen again."""
        while True:
            try:
                return await create()
            except ActorSilent:
                raise
            except WeightsRefused as refused:
                raise unusable_engine_error(refused) from refused
            except ActorLost as lost:
                role = trainer_group.role_of(lost.actor)
                if role.partition(".")[0] != name:
                    raise
                self.record_loss(role, lost, begin_s)

    async def _start_instance(self, index: int, begin_s: float) -> None:
        await self._start(f"rollout-{index}", begin_s, lambda: self.place_instance(index))

    async def _place_first_parameter_server(self, neighbour: PlacedActor) -> None:
        """Place a host's parameter server. If the hosting process dies, its owner's next call reports the loss; the
        next fetch places a new parameter server."""
        try:
            await self._place_parameter_server(neighbour)
        except ActorLost as lost:
            logger.warning("%s", lost)

    async def _publish_first(self, version: PolicyVersion, fingerprint: str) -> None:
        """Like `publish_initial`, but retries with the restored trainer if the trainer is lost."""
        while True:
            called_s = now_s()
            try:
                await self.publish_initial(version, fingerprint)
                return
            except ActorLost as lost:
                await self.recovery.wait_until_restored(lost, called_s)

    async def _probe_logprobs(self, instance: InstanceHandle) -> tuple[float, ...]:
        logprobs: tuple[float, ...] = await self.ask_once(
            instance.id, "logprobs", self.verification.probe, deadline="start_s"
        )
        return logprobs

    async def _pull_first(self, instance: InstanceHandle, version: PolicyVersion, begin_s: float) -> None:
        """Like `pull`, but replaces the instance if it is lost. Raises ConfigError if it refuses the weights."""
        try:
            await self.pull(instance, version)
            if self._turns.shared:
                await self.put_to_sleep(instance)
        except ActorSilent:
            raise
        except WeightsRefused as refused:
            raise unusable_engine_error(refused) from refused
        except ActorLost as lost:
            if lost.actor != instance.id:
                raise
            self.record_loss(instance.id, lost, begin_s)
            await self._start_instance(instance.index, begin_s)

    @property
    def start_progress(self) -> str:
        """Progress of `place_all` as a line for display: which actors are missing."""
        names = ["server", "trainer", *trainer_group.follower_names(self._config), *self._config.reward_actors]
        names += [f"rollout-{i}" for i in range(self._config.rollout.instances)]
        missing = [name for name in names if name not in self._workers.placed]
        if not missing:
            return f"all {len(names)} ready, {self._first_work}"
        loads = not self._config.emulated and any(n == "trainer" or n.startswith("rollout-") for n in missing)
        shown_names = ", ".join(missing[:MAX_NAMES_SHOWN])
        more = f" and {len(missing) - MAX_NAMES_SHOWN} more" if len(missing) > MAX_NAMES_SHOWN else ""
        loading = f" (loading {self._config.model.path})" if loads else ""
        return f"{len(names) - len(missing)} of {len(names)} ready, waiting for {shown_names}{more}{loading}"

    async def place_reward(self, name: str) -> None:
        """Place a reward worker, which loads the reward function. Raises ConfigError if that fails."""
        settings, call_s = actor_settings.scoring_settings(self._config), self._config.deadlines.call_s
        await self._workers.place(name, "reward", RewardWorker, settings, call_s)
        await self.ask(name, "check", deadline="start_s")

    async def place_environment(self, name: str) -> None:
        """Place an environment host, which creates its environment once. Raises ConfigError if that fails."""
        is_replacement = self._resumed or name in self._lost_at
        settings = actor_settings.environment_settings(self._config, is_replacement=is_replacement)
        await self._workers.place(name, "reward", EnvironmentHost, settings, self._config.deadlines.call_s)
        await self.ask(name, "check", deadline="start_s")

    async def move_reward_actor(self, name: str) -> None:
        """Move a reward worker or environment host to a Dask worker that other actors of the run use, and release its
        own."""
        with contextlib.suppress(Exception):
            await self.ask_once(name, "close", within_s=CLOSE_S)
        if name in self._workers.placed:
            logger.info("%s leaves %s, which another job waits for", name, self._workers.placed[name].address)
            await self._workers.release_shared(name)
        await (self.place_environment(name) if self._config.has_environment else self.place_reward(name))

    def reward_actor_at(self, address: str) -> str:
        """Name of the reward worker or environment host at a Dask worker's address; empty if there is none."""
        placed = self._workers.placed.values()
        return next((actor.name for actor in placed if actor.address == address and actor.role == "reward"), "")

    async def place_trainer(self) -> PlacedActor:
        """Place the trainer; `publish_initial` must be its first call. Raises as Workers.place does."""
        placed = await trainer_group.place(
            self._workers, self.ask_once, self._config, self._weights_folder, self._run_dir / "resume"
        )
        self._trainer_host = placed.host
        return placed

    async def place_server(self, begin_s: float, *, resumed: bool) -> PlacedActor:
        """Place the trajectory server; retries while the store's bucket fails. Raises as Workers.place does.

        Args:
            begin_s: The current time on the run's clock.
            resumed: Whether it opens the existing store and reads the spool, instead of creating a store.
        """
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
        """Place instance `index`, under a new name if it replaces another one. It pulls the newest version, or sleeps
        if it uses its GPU in turns."""
        config = self._config
        attempt = len(self._lost_at.get(f"rollout-{index}", ())) + self._retired_indices.count(index)
        name = f"rollout-{index}" + (f".{attempt}" if attempt else "")
        await self._turns.wake(name)
        try:
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
        except BaseException:
            self._turns.leave(name)
            raise
        instance = InstanceHandle(placed=placed, index=index)
        took_over = self._resumed and await self.ask(name, "took_over", deadline="start_s")
        self.instances[instance.id] = instance
        if took_over:
            logger.warning("%s goes on with an engine that is loaded, on %s", name, placed.address)
        else:
            logger.info("%s %s on %s", name, "takes a lost one's place" if attempt else "joins", placed.address)
        if self._published and self._turns.shared:
            instance.version = max(self._published)
            await self.put_to_sleep(instance)
        elif self._published:
            await self.pull(instance, max(self._published))
        return instance

    async def _place_parameter_server(self, neighbour: PlacedActor) -> None:
        """Place a parameter server on the neighbour's host if it has none: in the trajectory server's process if that
        runs there and answers, else in the neighbour's. It does not slow them down: its calls are short and
        asynchronous."""
        name = f"parameters-{neighbour.host}"
        async with self._parameter_server_locks[neighbour.host]:
            if name in self._workers.placed:
                return
            server = self._workers.placed.get("server")
            bad = self._unresponsive_addresses
            server_usable = server is not None and server.host == neighbour.host and server.address not in bad
            beside = server if server is not None and server_usable else neighbour
            call_s = self._config.deadlines.call_s
            await self._workers.place_beside(beside, name, "parameters", ParameterServer, self._weights_folder, call_s)

    # -- weights -------------------------------------------------------------------------------------------------

    def publish(self, result: PublishedStep) -> None:
        """Record a published version, which instances can pull from now on."""
        self._published[result.version] = result
        self._transfers.publish(result.version, self._trainer_host, result.num_bytes)

    async def train(
        self, step: int, trajectories: tuple[TrajectoryId, ...], versions: tuple[PolicyVersion, ...]
    ) -> PublishedStep:
        """Train a step. If the trainer is lost, its replacement trains the step. The caller passes the result to
        `publish`."""
        result: PublishedStep = await self.ask(
            "trainer", "train", SERVER, step, trajectories, versions, deadline="train_s"
        )
        self._trained_fingerprints[result.version] = result.fingerprint
        return result

    @property
    def trained_fingerprints(self) -> Mapping[PolicyVersion, str]:
        """Fingerprints of the versions that the trainer has published in this start of the run, including the first."""
        return self._trained_fingerprints

    async def repeat_step(self, step: int) -> None:
        """Let a restored trainer repeat a step on rows that the server still has, and publish the version. Raises
        ActorLost if the weights differ from those published before."""
        while True:
            called_s = now_s()
            try:
                result: PublishedStep = await self.ask_once(
                    "trainer", "train", SERVER, step, (), (), deadline="train_s"
                )
                break
            except ActorLost as lost:
                if lost.actor != "server":
                    raise
                await self.recovery.wait_until_restored(lost, called_s)
        if result.fingerprint != self._trained_fingerprints[result.version]:
            raise ActorLost(
                f"trainer: step {step}, trained again after a loss, gave other weights ({result.fingerprint}) than "
                f"were published ({self._trained_fingerprints[result.version]}): its kernels, or the order in which "
                "its ranks add up, are not the same each time; resume the run, which repeats the step"
            )
        self.publish(result)

    async def publish_initial(self, version: PolicyVersion, fingerprint: str = "") -> None:
        """Let the trainer publish the first version: 0, the base model after any supervised fine-tuning, or a later one
        from its resume point. Raises StoreError if the resume point has other weights.

        Args:
            fingerprint: Fingerprint of the version when it was first published; empty if it was not, or is unknown.
        """
        if not version:
            await self._fine_tune()
        initial: PublishedStep = await self.ask_once(
            "trainer", "publish_initial", self.verification.probe, version, fingerprint, deadline="start_s"
        )
        if not initial.as_recorded and not version:
            raise StoreError(
                f"version 0 is {initial.fingerprint}, the run began with {fingerprint}: model.path or the examples of "
                "training.sft have changed, or fine-tuning gives other weights each time here; start another run"
            )
        if not initial.as_recorded:
            raise StoreError(
                f"{self._run_dir}/resume: version {version} is {initial.fingerprint}, its step published "
                f"{fingerprint}; remove the damaged resume point to use an older one"
            )
        self._trained_fingerprints[version] = initial.fingerprint
        self.publish(initial)

    async def _fine_tune(self) -> None:
        """Have the trainer do all steps of supervised fine-tuning. It computes the base model's logprobs first, which
        are compared with those of the engines: these have loaded the base model."""
        num_steps, verification = self._config.training.sft.steps, self.verification
        if num_steps and not verification.base_logprobs and verification.probe:
            verification.base_logprobs = await self.ask_once(
                "trainer", "logprobs", verification.probe, deadline="start_s"
            )
        for step in range(num_steps):
            metrics = await self.ask_once("trainer", "fine_tune", step, deadline="train_s")
            self._first_work = f"fine-tuned {step + 1} of {num_steps} steps"
            if metrics:
                logger.info("fine-tuning step %d of %d: loss %.4f", step + 1, num_steps, metrics["loss"])
        self._first_work = PUBLISHING

    @property
    def bytes_arrived(self) -> int:
        """Bytes of weights that hosts have received so far."""
        return self._transfers.bytes_arrived

    @property
    def loading(self) -> bool:
        """Whether an engine is loading weights, which has a deadline."""
        return any(instance.loading for instance in self.instances.values())

    async def pull(self, instance: InstanceHandle, version: PolicyVersion) -> None:
        """Load a version on an instance, and verify its weights; the newest version if no host has the requested one
        any more. Raises WeightsRefused if the weights differ from the published ones."""
        instance.fetching = version
        try:
            await self._pull(instance, version)
        except TransferFailed as failed:  # the only host that had it was that of a lost trainer
            newest = max(self._published)
            logger.warning("%s: %s; it pulls version %d", instance.id, failed, newest)
            instance.fetching = newest
            await self._pull(instance, newest)
        finally:
            instance.fetching, instance.loading = None, False

    async def _pull(self, instance: InstanceHandle, version: PolicyVersion) -> None:
        started_s = now_s()
        path = await self._fetch(instance.placed, version)
        await self._turns.wake(instance.id)
        within_s = self._transfers.timeout_s(version)
        instance.loading = True
        expected = self.verification.expected(self._published[version])
        check: WeightCheck = await self.ask(
            instance.placed.name, "pull", expected, path, deadline="call_s", within_s=within_s
        )
        elapsed_s = now_s() - started_s
        level = logging.INFO if elapsed_s > SLOW_PULL_S else logging.DEBUG
        logger.log(level, "%s pulled version %d in %.1f s", instance.id, version, elapsed_s)
        self.verification.record(instance, check)
        instance.version, instance.fingerprint, instance.drift = version, check.fingerprint, check.drift

    async def put_to_sleep(self, instance: InstanceHandle) -> None:
        """Free the GPUs of an instance that runs nothing. Its next pull wakes it."""
        await self.ask(instance.id, "sleep")
        self._turns.leave(instance.id)

    async def _sleep_or_lose(self, instance: InstanceHandle) -> None:
        """Like `put_to_sleep` at the start of the run: the first pull of an instance that is lost replaces it."""
        try:
            await self.put_to_sleep(instance)
        except ActorLost as lost:
            if lost.actor != instance.id:
                raise
            logger.warning("%s", lost)
            self._turns.leave(instance.id)

    async def _fetch(self, placed: PlacedActor, version: PolicyVersion) -> str:
        """Path of a version's weights on an actor's host, fetched if the host does not have it. Waits while no host can
        serve the newest version. Raises ActorLost if the actor itself is lost, TransferFailed if no host can serve an
        older version."""
        name = f"parameters-{placed.host}"
        while True:
            for actor in (await self._trainer(), placed):
                await self._place_parameter_server(actor)  # the former one may have ended with another actor's process
            parameter_server = self._workers.placed[name]
            try:
                return await self._transfers.fetch(version, placed.host)
            except TransferFailed as failed:
                if version < max(self._published):
                    raise
                logger.warning("%s waits for weights: %s", placed.name, failed)
                await asyncio.sleep(FETCH_RETRY_S)
            except ActorLost as lost:
                address = parameter_server.address
                if address == placed.address:
                    raise ActorLost(f"{placed.name}: {lost}", placed.name) from lost
                if self._workers.placed.get(name) is parameter_server:
                    logger.warning("%s on %s does not answer; %s gets another", name, address, placed.host)
                    self._workers.forget(name)
                    self._unresponsive_addresses.add(address)

    async def _trainer(self) -> PlacedActor:
        """Wait until the trainer is placed, and return its place."""
        while "trainer" not in self._workers.placed:
            await self.recovery.wait_until_restored(ActorLost("trainer is gone", "trainer"), now_s())
        return self._workers.placed["trainer"]

    async def prune(self, wanted: set[PolicyVersion]) -> None:
        """Remove the weights of all versions that no instance uses or fetches, no checkpoint needs, and are not
        `wanted`. A host where this fails is retried next time."""
        used = wanted | {i.version for i in self.instances.values()}
        used |= {i.fetching for i in self.instances.values() if i.fetching is not None}
        used |= {version for version, count in self._num_pending_saves.items() if count}
        self._transfers.keep(used)
        newest = max(self._published)
        for name, placed in list(self._workers.placed.items()):
            if placed.role == "parameters":
                try:
                    await self.ask(name, "prune", tuple(used), newest)
                except (ActorLost, ActorFailed) as error:
                    logger.info("old versions stay on %s for now: %s", placed.host, error)

    async def checkpoint(self, name: str, version: PolicyVersion) -> bool:
        """Save a version's weights as checkpoints/`name`; they are not pruned before. The certificate is written once
        the version's step is stored. Returns False if the weights are lost with the trainer that published them."""
        folder = self._run_dir / "checkpoints"
        folder.mkdir(exist_ok=True)
        self._num_pending_saves[version] += 1
        try:
            saved: bool = await self.ask("trainer", "save_checkpoint", str(folder / name), version, deadline="train_s")
        finally:
            self._num_pending_saves[version] -= 1
        if saved:
            logger.info("checkpoint written to %s", folder / name)
            if version and (folder / name).is_dir():
                await self._certify(folder / name, version)
        else:
            logger.warning("%s is not written: version %d went with a lost trainer", folder / name, version)
        return saved

    async def _certify(self, checkpoint: Path, version: PolicyVersion) -> None:
        entry: str = await self.ask("server", "entry", version - 1, deadline="commit_s")
        run, store = self._config.name, self._config.store_url
        await asyncio.to_thread(
            certificate.write, checkpoint, Certificate(run=run, store=store, version=version, entry=entry)
        )

    # -- losses and closing --------------------------------------------------------------------------------------

    def record_loss(self, name: str, lost: ActorLost | ActorFailed, now: float) -> None:
        """Record the loss of an actor at second `now` of the run, and release its worker. Raises ActorLost if it and
        its predecessors were lost more than MAX_REPLACEMENTS times within REPLACEMENT_WINDOW_S."""
        slot = name.partition(".")[0]
        self._lost_at.setdefault(slot, []).append(now)
        recent = [lost_s for lost_s in self._lost_at[slot] if now - lost_s < REPLACEMENT_WINDOW_S]
        self.loss_messages.append(f"{now:.1f} s: {lost}")
        logger.warning("%s; replacing it", lost)
        self.instances.pop(InstanceId(name), None)
        self._turns.leave(name)
        for member in trainer_group.members(name, self._workers.placed):
            self._workers.mark_lost(member)
        for future in self._loss_futures[name]:
            if not future.done():
                future.set_exception(ActorLost(str(lost), lost.actor))
        if len(recent) > MAX_REPLACEMENTS:
            raise ActorLost(f"{slot} was lost {len(recent)} times within an hour, last: {lost}") from lost

    async def has_spare_worker(self) -> bool:
        """Whether a Dask worker is free for one more instance."""
        return await self._workers.has_spare_worker("rollout")

    async def retire(self, instance: InstanceHandle) -> None:
        """Close an idle instance, and let its worker leave the cluster. This is not a loss. Never raises."""
        self.instances.pop(instance.id, None)
        self._retired_indices.append(instance.index)
        with contextlib.suppress(Exception):
            await self.ask_once(instance.placed.name, "close", within_s=CLOSE_S)
        self._turns.leave(instance.id)
        if instance.placed.name in self._workers.placed:
            await self._workers.retire(instance.placed.name)

    async def close(self) -> None:
        """Close all actors, engines first because they may still read data of the others. Never raises."""
        await self.recovery.end()
        order = {"rollout": 0, "trainer": 1, "reward": 2}
        for placed in sorted(self._workers.placed.values(), key=lambda p: order.get(p.role, 3)):
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await self.ask(placed.name, "close", within_s=CLOSE_S)
