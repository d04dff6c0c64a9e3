"""Publishes the trainer's weights to the rollout instances of a run, and saves them as checkpoints.

Invariants:
- An instance serves a version only after it has verified that it has the weights published as that version.
- With shared GPUs an instance that waits for weights is asleep, since the trainer may have to be restored first.
- A version is pruned only if no instance uses or fetches it and no pending checkpoint needs it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, defaultdict
from pathlib import Path

from staleflow.pipeline.config.model_facts import ModelFacts
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.processes.clock import now_s
from staleflow.pipeline.processes.instance_handle import InstanceHandle
from staleflow.pipeline.processes.worker_protocol import PlacedActor, Workers
from staleflow.pipeline.recovery import certificate
from staleflow.pipeline.recovery.certificate import Certificate
from staleflow.pipeline.runtime.actor_client import SERVER, ActorClient
from staleflow.pipeline.runtime.weight_verification import WeightVerification
from staleflow.pipeline.weights.weight_transfers import WeightTransfers
from staleflow.stores.errors import ActorFailed, ActorLost, StoreError, TransferFailed
from staleflow.stores.trajectory import PolicyVersion, TrajectoryId
from staleflow.stores.weights.weight_folder import FOLDER_PREFIX
from staleflow.stores.weights.weight_report import WeightCheck
from staleflow.tasks.actors.parameter_server import ParameterServer
from staleflow.tasks.actors.trainer import PublishedStep

logger = logging.getLogger(__name__)

FETCH_RETRY_S = 1.0
"""Seconds before a weight fetch is retried that no host could serve."""
SLOW_PULL_S = 5.0
"""Pulls that take longer, in seconds, are logged."""
PUBLISHING = "publishing the first weights"


class WeightPublisher(ActorClient):
    """Publishes the versions of one run, and loads them on its instances."""

    def __init__(self, config: RunConfig, workers: Workers, run_dir: Path, facts: ModelFacts) -> None:
        super().__init__(config, workers)
        self._run_dir = run_dir
        self._weights_folder = str(Path(config.cluster.shared_memory) / f"{FOLDER_PREFIX}{config.name}-{facts.nonce}")
        self._trainer_host = ""
        self._parameter_server_locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._unresponsive_addresses: set[str] = set()
        """Processes whose parameter server did not answer: no other parameter server is placed there."""
        self._published_steps: dict[PolicyVersion, PublishedStep] = {}
        self._transfers = WeightTransfers(self, config.deadlines.call_s)
        self._trainer_activity = PUBLISHING
        """What the trainer does before version 0 is published, for display."""
        self.trained_fingerprints: dict[PolicyVersion, str] = {}
        """Fingerprints of the versions that the trainer has published in this start of the run, including the first."""
        self._num_pending_saves: Counter[PolicyVersion] = Counter()
        """Number of checkpoints that are being saved, by version."""
        self.verification = WeightVerification(config, facts.context_length)

    def record_published(self, published: PublishedStep) -> None:
        """Record a published version, which instances can pull from now on."""
        self._published_steps[published.version] = published
        self._transfers.record_published(published.version, self._trainer_host, published.num_bytes)

    async def train(
        self, step: int, trajectories: tuple[TrajectoryId, ...], versions: tuple[PolicyVersion, ...]
    ) -> PublishedStep:
        """Train a step. If the trainer is lost, its replacement trains the step. The caller passes the result to
        `record_published`."""
        published: PublishedStep = await self.ask(
            "trainer", "train", SERVER, step, trajectories, versions, deadline="train_s"
        )
        self.trained_fingerprints[published.version] = published.fingerprint
        return published

    async def repeat_step(self, step: int) -> None:
        """Let a restored trainer repeat a step on rows that the server still has, and publish the version. Raises
        ActorLost if the weights differ from those published before."""
        recorded_fingerprint = self.trained_fingerprints[PolicyVersion(step + 1)]
        published: PublishedStep = await self.ask(
            "trainer", "train", SERVER, step, (), (), recorded_fingerprint, deadline="train_s", is_restore_call=True
        )
        if published.fingerprint != recorded_fingerprint:
            raise ActorLost(
                f"trainer: step {step}, trained again after a loss, gave other weights ({published.fingerprint}) than "
                f"were published ({recorded_fingerprint}): its kernels, or the order in which its ranks add up, are "
                "not the same each time; resume the run, which repeats the step"
            )
        self.record_published(published)

    async def publish_initial(self, version: PolicyVersion, fingerprint: str = "") -> None:
        """Let the trainer publish the first version: 0, the base model after any supervised fine-tuning, or a later one
        from its resume point. Raises StoreError if the resume point has other weights.

        Args:
            fingerprint: Fingerprint of the version when it was first published; empty if it was not, or is unknown.
        """
        if not version:
            await self._fine_tune()
        published: PublishedStep = await self.ask_once(
            "trainer", "publish_initial", self.verification.probe, version, fingerprint, deadline="start_s"
        )
        if not published.matches_record and not version:
            raise StoreError(
                f"version 0 is {published.fingerprint}, the run began with {fingerprint}: model.path or the examples "
                "of training.sft have changed, or fine-tuning gives other weights each time here; start another run"
            )
        if not published.matches_record:
            raise StoreError(
                f"{self._run_dir}/resume: version {version} is {published.fingerprint}, its step published "
                f"{fingerprint}; remove the damaged resume point to use an older one"
            )
        self.trained_fingerprints[version] = published.fingerprint
        self.record_published(published)

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
            self._trainer_activity = f"fine-tuned {step + 1} of {num_steps} steps"
            if metrics:
                logger.info("fine-tuning step %d of %d: loss %.4f", step + 1, num_steps, metrics["loss"])
        self._trainer_activity = PUBLISHING

    @property
    def bytes_arrived(self) -> int:
        """Bytes of weights that hosts have received so far."""
        return self._transfers.bytes_arrived

    @property
    def is_loading(self) -> bool:
        """Whether an engine is loading weights, or waits to fetch them again. Both have deadlines."""
        return any(instance.is_loading or instance.is_fetching_again for instance in self.instances.values())

    async def pull(self, instance: InstanceHandle, version: PolicyVersion) -> PolicyVersion:
        """Load a version on an instance, and verify its weights; the newest version if no host can send the requested
        one. Retries for deadlines.start_s, and beyond that while the trainer is being restored, which publishes its
        versions again. Returns the loaded version. Raises WeightsRefused if the weights differ from the published ones,
        ActorLost if no host could send any version in time."""
        start_s, first_failure_s = self._config.deadlines.start_s, math.inf
        try:
            while True:
                instance.fetched_version = version
                try:
                    await self._pull(instance, version)
                    return version
                except TransferFailed as error:
                    logger.warning("%s waits for weights: %s", instance.id, error)
                    if self.recovery.is_restoring:
                        first_failure_s, instance.is_fetching_again = math.inf, False
                        await self.recovery.wait_while_restoring("trainer")
                    first_failure_s = min(first_failure_s, now_s())
                    if now_s() - first_failure_s >= start_s:
                        raise ActorLost(
                            f"{instance.id} got no weights for {start_s:g} s (deadlines.start_s): {error}", instance.id
                        ) from error
                instance.is_fetching_again = True
                await asyncio.sleep(FETCH_RETRY_S)
                version = max(self._published_steps)
        finally:
            instance.fetched_version, instance.is_loading, instance.is_fetching_again = None, False, False

    async def _pull(self, instance: InstanceHandle, version: PolicyVersion) -> None:
        started_s = now_s()
        path = await self._fetch(instance.placed_actor, version)
        await self._device_turns.wait_and_mark_awake(instance.id)
        within_s = self._transfers.load_timeout_s(version)
        instance.is_loading = True
        expected_weights = self.verification.expected_weights(self._published_steps[version])
        check: WeightCheck = await self.ask(
            instance.placed_actor.name, "pull", expected_weights, path, deadline="call_s", within_s=within_s
        )
        elapsed_s = now_s() - started_s
        level = logging.INFO if elapsed_s > SLOW_PULL_S else logging.DEBUG
        logger.log(level, "%s pulled version %d in %.1f s", instance.id, version, elapsed_s)
        self.verification.record_check(instance, check)
        instance.version, instance.fingerprint, instance.drift = version, check.fingerprint, check.drift

    async def put_to_sleep(self, instance: InstanceHandle) -> None:
        """Free the GPUs of an instance that runs nothing. Its next pull wakes it."""
        await self.ask(instance.id, "sleep")
        self._device_turns.mark_asleep(instance.id)

    async def _fetch(self, actor: PlacedActor, version: PolicyVersion) -> str:
        """Path of a version's weights on an actor's host, fetched if the host does not have it. Raises ActorLost if the
        actor itself is lost, TransferFailed if no host can send the version."""
        name = f"parameters-{actor.host}"
        while True:
            # An earlier one may have ended with another actor's process. A lost trainer is not waited for: this host
            # may have the version.
            if (trainer := self._workers.placed.get("trainer")) is not None:
                await self._place_parameter_server_if_alive(trainer)
            await self._place_parameter_server(actor)
            parameter_server = self._workers.placed[name]
            try:
                return await self._transfers.fetch(version, actor.host)
            except ActorLost as loss_error:
                address = parameter_server.address
                if address == actor.address:
                    raise ActorLost(f"{actor.name}: {loss_error}", actor.name) from loss_error
                if self._workers.placed.get(name) is parameter_server:
                    logger.warning("%s on %s does not answer; another one is placed on %s", name, address, actor.host)
                    self._workers.release_actor(name)
                    self._unresponsive_addresses.add(address)

    async def _place_parameter_server(self, actor: PlacedActor) -> None:
        """Place a parameter server on an actor's host if it has none: in the trajectory server's process if that runs
        there and answers, else in the actor's process. It does not slow them down: its calls are short and
        asynchronous. Raises ActorLost if the actor's process is lost."""
        name = f"parameters-{actor.host}"
        async with self._parameter_server_locks[actor.host]:
            if name in self._workers.placed:
                return
            server = self._workers.placed.get("server")
            if server is not None and server.host == actor.host and server.address not in self._unresponsive_addresses:
                try:
                    await self._place_parameter_server_beside(server, name)
                    return
                except ActorLost as loss_error:
                    logger.warning("%s; it is placed beside %s", loss_error, actor.name)
                    self._unresponsive_addresses.add(server.address)
            try:
                await self._place_parameter_server_beside(actor, name)
            except ActorLost as loss_error:
                raise type(loss_error)(f"{actor.name}: {loss_error}", actor.name) from loss_error

    async def _place_parameter_server_beside(self, actor: PlacedActor, name: str) -> None:
        call_s = self._config.deadlines.call_s
        await self._workers.place_beside(actor, name, ParameterServer, self._weights_folder, call_s)

    async def _place_parameter_server_if_alive(self, actor: PlacedActor) -> None:
        """Like `_place_parameter_server`, but only logs that the actor's process is lost. Its owner's next call reports
        the loss, and the next fetch places a new parameter server."""
        try:
            await self._place_parameter_server(actor)
        except ActorLost as loss_error:
            logger.warning("%s", loss_error)

    async def prune(self, kept_versions: set[PolicyVersion]) -> None:
        """Remove the weights of versions that no instance uses or fetches, no pending checkpoint needs, and are not in
        `kept_versions`. A host where this fails is retried next time."""
        used_versions = kept_versions | {i.version for i in self.instances.values()}
        used_versions |= {i.fetched_version for i in self.instances.values() if i.fetched_version is not None}
        used_versions |= {version for version, count in self._num_pending_saves.items() if count}
        self._transfers.remove_unused(used_versions)
        newest = max(self._published_steps)
        for name, placed in list(self._workers.placed.items()):
            if placed.role == "parameters":
                try:
                    await self.ask(name, "prune", tuple(used_versions), newest)
                except (ActorLost, ActorFailed) as error:
                    logger.info("old versions stay on %s for now: %s", placed.host, error)

    async def checkpoint(self, folder_name: str, version: PolicyVersion) -> bool:
        """Save a version's weights as checkpoints/`folder_name`. They are not pruned before that. The certificate is
        written once the version's step is stored. Returns False if the weights are lost with the trainer that published
        them."""
        checkpoint = self._run_dir / "checkpoints" / folder_name
        checkpoint.parent.mkdir(exist_ok=True)
        self._num_pending_saves[version] += 1
        try:
            saved: bool = await self.ask("trainer", "save_checkpoint", str(checkpoint), version, deadline="train_s")
        finally:
            self._num_pending_saves[version] -= 1
        if saved:
            logger.info("checkpoint written to %s", checkpoint)
            if version and checkpoint.is_dir():
                await self._certify(checkpoint, version)
        else:
            logger.warning("%s is not written: version %d was lost with its trainer", checkpoint, version)
        return saved

    async def _certify(self, checkpoint: Path, version: PolicyVersion) -> None:
        entry: str = await self.ask("server", "chain_entry", version - 1, deadline="commit_s")
        run, store = self._config.name, self._config.store_url
        await asyncio.to_thread(
            certificate.write, checkpoint, Certificate(run=run, store=store, version=version, entry=entry)
        )
