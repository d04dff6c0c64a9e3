"""Places the actors of one run, replaces lost ones, and closes them.

`Actors` lives in the driver's process, and only the driver's event loop changes it. Its base classes call actors
(actor_client.py) and publish weights (weight_publisher.py).

Invariants:
- Rollout instances, reward workers, environment hosts and teachers have no unique state, so their users replace them.
  The trainer and the trajectory server have state, and are restored (role_recovery.py).
- A replacement of an instance has a new name, so that late answers of the lost one are not attributed to it.
- With shared GPUs an instance is asleep when it is placed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from staleflow.pipeline.config import actor_settings
from staleflow.pipeline.config.model_facts import ModelFacts
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.processes import trainer_group
from staleflow.pipeline.processes.background import gather_or_cancel
from staleflow.pipeline.processes.clock import now_s
from staleflow.pipeline.processes.instance_handle import InstanceHandle
from staleflow.pipeline.processes.worker_protocol import PlacedActor, Workers
from staleflow.pipeline.recovery.resumption import Resumption
from staleflow.pipeline.recovery.role_recovery import RoleRecovery
from staleflow.pipeline.runtime.weight_publisher import WeightPublisher
from staleflow.pipeline.runtime.weight_verification import PROBE_PROMPTS
from staleflow.stores.errors import ActorFailed, ActorLost, ActorSilent, ConfigError, WeightsRefused
from staleflow.stores.trajectory import InstanceId, PolicyVersion
from staleflow.tasks.actors.environment_host import EnvironmentHost
from staleflow.tasks.actors.reward_worker import RewardWorker
from staleflow.tasks.actors.rollout_instance import RolloutInstance
from staleflow.tasks.actors.store_thread import retry_while_bucket_fails
from staleflow.tasks.actors.teacher import Teacher
from staleflow.tasks.actors.trajectory_server import TrajectoryServer

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_NAMES_SHOWN = 4
"""Maximum number of missing actors that the line about the start's progress names."""
CLOSE_S = 10.0
"""Seconds an actor may take to close before it is left to end with its worker."""


class Actors(WeightPublisher):
    """The actors of one run, on any kind of workers."""

    def __init__(self, config: RunConfig, workers: Workers, run_dir: Path, facts: ModelFacts) -> None:
        super().__init__(config, workers, run_dir, facts)
        self._facts = facts
        self._retired_indices: list[int] = []
        """Index of each retired instance, once per retirement."""
        self._num_earlier_starts = 0
        self._is_resumed = False
        self.recovery = RoleRecovery(
            self, run_dir / "resume", config.training.resume_every, trainer_group.follower_names(config)
        )

    # -- placing -------------------------------------------------------------------------------------------------

    async def place_all(self, resumption: Resumption | None = None) -> None:
        """Place all actors, and publish the first version: 0, the base model, or the version from which a stored run
        resumes."""
        config, workers = self._config, self._workers
        version = PolicyVersion(0) if resumption is None else resumption.version
        self._num_earlier_starts = 0 if resumption is None else resumption.num_earlier_starts
        self._is_resumed = resumption is not None

        def store_exists() -> bool:  # a lost server may have created it at the start of the run
            return (resumption is not None or "server" in self._loss_times) and (self._run_dir / "store").exists()

        await gather_or_cancel(
            self._place_at_start("server", lambda: self.place_server(resumed=store_exists())),
            self._place_at_start("trainer", self.place_trainer),
            *(
                self._place_at_start(name, partial(self.place_stateless, name))
                for name in (*config.reward_actors, *config.teachers)
            ),
            *(
                self._place_at_start(f"rollout-{index}", partial(self.place_instance, index))
                for index in range(config.rollout.instances)
            ),
        )
        weight_holders = (workers.placed["trainer"], *(i.placed_actor for i in self.instances.values()))
        await gather_or_cancel(*(self._place_parameter_server_if_alive(actor) for actor in weight_holders))
        prompts = await self.ask("server", "held_out", PROBE_PROMPTS, deadline="start_s")
        self.verification.set_probe(prompts)
        engine_logprobs = await self.verification.measure_engine_logprobs(
            list(self.instances.values()), self._probe_logprobs, resumption
        )
        if self._device_turns.shares_gpus:
            await gather_or_cancel(*map(self._try_put_to_sleep, self.instances.values()))
        await self._publish_first(version, "" if resumption is None else resumption.fingerprint)
        self.verification.set_drift_limit(engine_logprobs, self._published_steps[version], resumption)
        # Instances pull version 0 too, although engines have loaded it from the model's folder: a wrong mapping of
        # names shows before the first step, and weights are verified before the first token is sampled.
        await gather_or_cancel(
            *(
                self._place_at_start(f"rollout-{i.index}", partial(self._pull_first, i, version))
                for i in list(self.instances.values())
            )
        )

    async def _place_at_start(self, name: str, place: Callable[[], Awaitable[T]]) -> T:
        """Place an actor at the start of the run, again if its process is lost meanwhile. Raises ActorLost if it is
        lost too often; ActorSilent if it misses its deadline and ConfigError if it refuses the first weights, since
        both would happen again."""
        while True:
            try:
                return await place()
            except ActorSilent:
                raise
            except WeightsRefused as error:
                raise ConfigError(
                    f"rollout.engine cannot be updated by this trainer: {error}; use another engine or model"
                ) from error
            except ActorLost as loss_error:
                role = trainer_group.restored_actor(loss_error.actor)
                if role.partition(".")[0] != name:
                    raise
                self.record_loss(role, loss_error)

    async def _publish_first(self, version: PolicyVersion, fingerprint: str) -> None:
        """Like `publish_initial`, but retries with the restored trainer if the trainer is lost."""
        while True:
            called_s = now_s()
            try:
                await self.publish_initial(version, fingerprint)
                return
            except ActorLost as loss_error:
                await self.recovery.wait_until_restored(loss_error, called_s)

    async def _probe_logprobs(self, instance: InstanceHandle) -> tuple[float, ...]:
        logprobs: tuple[float, ...] = await self.ask_once(
            instance.id, "logprobs", self.verification.probe, deadline="start_s"
        )
        return logprobs

    async def _pull_first(self, instance: InstanceHandle, version: PolicyVersion) -> None:
        """Load the first version on an instance, or on another in its place if it is lost."""
        if instance.id not in self.instances:
            await self.place_instance(instance.index)
            return
        await self.pull(instance, version)
        if self._device_turns.shares_gpus:
            await self.put_to_sleep(instance)

    @property
    def start_progress(self) -> str:
        """Progress of `place_all` as a line for display: which actors are missing."""
        names = ["server", "trainer", *trainer_group.follower_names(self._config), *self._config.reward_actors]
        names += [*self._config.teachers, *(f"rollout-{i}" for i in range(self._config.rollout.instances))]
        missing_names = [name for name in names if name not in self._workers.placed]
        if not missing_names:
            return f"all {len(names)} ready, {self._trainer_activity}"
        policy, models = self._config.model.path, list[str]()
        if any(name == "trainer" or name.startswith("rollout-") for name in missing_names):
            models.append(policy)
        if any(name.startswith("teacher-") for name in missing_names):
            models.append(self._config.training.kl.reference or policy)
        shown_names = ", ".join(missing_names[:MAX_NAMES_SHOWN])
        suffix = f" and {len(missing_names) - MAX_NAMES_SHOWN} more" if len(missing_names) > MAX_NAMES_SHOWN else ""
        loads_models = models and not self._config.emulated
        loading = f" (loading {', '.join(dict.fromkeys(models))})" if loads_models else ""
        return f"{len(names) - len(missing_names)} of {len(names)} ready, waiting for {shown_names}{suffix}{loading}"

    async def place_stateless(self, name: str) -> None:
        """Place a reward worker, an environment host or a teacher. Raises ConfigError if it cannot load the job's code
        or model."""
        if name in self._config.teachers:
            await self.place_teacher(name)
        else:
            await (self.place_environment(name) if self._config.has_environment else self.place_reward(name))

    async def replace_stateless(self, name: str) -> None:
        """Place a reward worker, environment host or teacher that was lost, again if its replacement is lost while it
        is placed. Raises ActorLost if it is lost too often, and as Workers.place does."""
        while True:
            try:
                await self.place_stateless(name)
                return
            except (ActorLost, ActorFailed) as loss_error:
                if loss_error.actor != name:
                    raise
                self.record_loss(name, loss_error)

    async def place_reward(self, name: str) -> None:
        """Place a reward worker, which loads the reward function. Raises ConfigError if that fails."""
        settings, call_s = actor_settings.scoring_settings(self._config), self._config.deadlines.call_s
        await self._workers.place(name, "reward", RewardWorker, settings, call_s)
        await self.ask(name, "check", deadline="start_s")

    async def place_environment(self, name: str) -> None:
        """Place an environment host, which creates its environment once. Raises ConfigError if that fails."""
        is_replacement = self._is_resumed or name in self._loss_times
        settings = actor_settings.environment_settings(self._config, is_replacement=is_replacement)
        await self._workers.place(name, "reward", EnvironmentHost, settings, self._config.deadlines.call_s)
        await self.ask(name, "check", deadline="start_s")

    async def place_teacher(self, name: str) -> None:
        """Place a teacher, which loads the reference model."""
        config = self._config
        settings: Any = actor_settings.teacher_engine_settings(config, self._facts.eos)
        await self._workers.place(
            name,
            "teacher",
            Teacher,
            settings,
            InstanceId(name),
            config.cluster.threads,
            config.rollout.temperature,
            config.deadlines.call_s,
            config.model.path if settings.model != config.model.path else "",
        )

    async def move_reward_actor(self, name: str) -> None:
        """Move a reward worker or environment host to a Dask worker that other actors of the run use, and release its
        own."""
        with contextlib.suppress(Exception):
            await self.ask_once(name, "close", within_s=CLOSE_S)
        if name in self._workers.placed:
            logger.info("%s leaves %s, which another job waits for", name, self._workers.placed[name].address)
            await self._workers.return_light_worker(name)
        await self.place_stateless(name)

    def is_other_placed(self, name: str, names: Iterable[str]) -> bool:
        """Whether another of the actors `names` than `name` is placed."""
        return any(other in self._workers.placed for other in names if other != name)

    def reward_actor_at(self, address: str) -> str:
        """Name of the reward worker or environment host at a Dask worker's address; empty if there is none."""
        actors = self._workers.placed.values()
        return next((actor.name for actor in actors if actor.address == address and actor.role == "reward"), "")

    async def place_trainer(self) -> PlacedActor:
        """Place the trainer; `publish_initial` must be its first call. Raises as Workers.place does."""
        actor = await trainer_group.place_trainer(
            self._workers, self.ask_once, self._config, self._weights_folder, self._run_dir / "resume"
        )
        self._trainer_host = actor.host
        return actor

    async def place_server(self, *, resumed: bool) -> PlacedActor:
        """Place the trajectory server; retries while the store's bucket fails. Raises as Workers.place does. resumed:
        whether it opens the existing store and reads the spool, instead of creating a store."""
        settings = actor_settings.server_settings(
            self._config, self._run_dir / "store", self._facts.context_length, resumed=resumed
        )

        def log_failure(cause: str) -> None:
            logger.warning("%s; the trajectory server waits for its store", cause)

        return await retry_while_bucket_fails(
            lambda: self._workers.place("server", "server", TrajectoryServer, settings, self.clock.elapsed_s),
            self._config.deadlines.commit_s,
            log_failure,
        )

    async def place_instance(self, index: int) -> InstanceHandle:
        """Place instance `index`, under a new name if it replaces another one. It pulls the newest version, or sleeps
        if it uses its GPU in turns."""
        config = self._config
        attempt = len(self._loss_times.get(f"rollout-{index}", ())) + self._retired_indices.count(index)
        name = f"rollout-{index}" + (f".{attempt}" if attempt else "")
        try:
            actor = await self._workers.place(
                name,
                "rollout",
                RolloutInstance,
                actor_settings.engine_settings(
                    config, index, self._facts.eos, attempt=attempt, num_earlier_starts=self._num_earlier_starts
                ),
                InstanceId(name),
                config.cluster.threads,
                config.deadlines.call_s,
                config.rollout.delivery_interval_s,
                actor_settings.drafts_from_responses(config),
                str(self._run_dir),
                self._is_resumed,
                before_creation=partial(self._device_turns.wait_and_mark_awake, name),
            )
        except BaseException:
            self._device_turns.mark_asleep(name)
            raise
        has_taken_over_engine = self._is_resumed and await self.ask(name, "took_over", deadline="start_s")
        instance = InstanceHandle(placed_actor=actor, index=index, has_taken_over_engine=has_taken_over_engine)
        self.instances[instance.id] = instance
        if has_taken_over_engine:
            logger.warning("%s continues with an engine that is already loaded, on %s", name, actor.address)
        else:
            logger.info("%s %s on %s", name, "replaces another instance" if attempt else "joins", actor.address)
        if self._published_steps and self._device_turns.shares_gpus:
            instance.version = max(self._published_steps)
            await self.put_to_sleep(instance)
        elif self._published_steps:
            await self.pull(instance, max(self._published_steps))
        return instance

    # -- weights -------------------------------------------------------------------------------------------------

    async def _try_put_to_sleep(self, instance: InstanceHandle) -> None:
        """Like `put_to_sleep` at the start of the run: the first pull of an instance that is lost replaces it."""
        try:
            await self.put_to_sleep(instance)
        except ActorLost as loss_error:
            if loss_error.actor != instance.id:
                raise
            logger.warning("%s", loss_error)
            self._device_turns.mark_asleep(instance.id)

    # -- losses and closing --------------------------------------------------------------------------------------

    async def has_spare_worker(self) -> bool:
        """Whether a Dask worker is free for one more instance."""
        return await self._workers.has_spare_worker()

    async def retire(self, instance: InstanceHandle) -> None:
        """Close an idle instance, and let its worker leave the cluster. This is not a loss. Never raises."""
        self._remove_instance(instance.id)
        self._retired_indices.append(instance.index)
        with contextlib.suppress(Exception):
            await self.ask_once(instance.placed_actor.name, "close", within_s=CLOSE_S)
        self._device_turns.mark_asleep(instance.id)
        if instance.placed_actor.name in self._workers.placed:
            await self._workers.retire(instance.placed_actor.name)

    async def close(self) -> None:
        """Close all actors, engines first because they may still read data of the others. Never raises."""
        await self.recovery.stop()
        order = {"rollout": 0, "teacher": 0, "trainer": 1, "reward": 2}
        by_order = defaultdict(list)
        for actor in self._workers.placed.values():
            by_order[order.get(actor.role, 3)].append(actor.name)
        for _, names in sorted(by_order.items()):
            with contextlib.suppress(asyncio.CancelledError):
                calls = [self.ask(name, "close", within_s=CLOSE_S) for name in names]
                await asyncio.gather(*calls, return_exceptions=True)
