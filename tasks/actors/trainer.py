"""The trainer: an actor that runs training steps and publishes each version's weights.

It may be rank 0 of several processes (trainer_rank.py), which callers use in the same way.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from staleflow.stores.errors import ProtocolViolation
from staleflow.stores.trajectory import PolicyVersion, TrajectoryId
from staleflow.stores.weights import weight_folder
from staleflow.stores.weights.resume_points import ResumePoints
from staleflow.stores.weights.weight_folder import WeightFolder
from staleflow.stores.weights.weight_hash import fingerprint
from staleflow.tasks.actors.actor_calls import call_actor, remote_methods
from staleflow.tasks.actors.trainer_rank import DistributedPolicy
from staleflow.tasks.engines import engine_handover
from staleflow.tasks.training.microbatches import BatchMessage, Row
from staleflow.tasks.training.numerics import describe_numerics
from staleflow.tasks.training.policy import Policy, PolicySettings

logger = logging.getLogger(__name__)

T = TypeVar("T")

SAVE_TIMEOUT_S = 5.0
"""Seconds that `close` waits for a resume point that is being written: less than the deadline of the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedStep:
    """The result of a training step: metrics by name (see stores/metrics.py), and the published weights."""

    version: PolicyVersion
    metrics: dict[str, float]
    fingerprint: str
    path: str
    probe_logprobs: tuple[float, ...] = ()
    """Logprobs of the probe's tokens under these weights; see Engine.score."""
    num_bytes: int = 0
    """Size of the published file."""
    matches_record: bool = True
    """True if the weights have the fingerprint that was recorded for this version, or none was recorded."""
    numerics: str = ""
    """Software and hardware that the trainer computes with (tasks/training/numerics.py)."""


@remote_methods
class Trainer:
    """The trainer's Dask actor: fetches batches from the trajectory server, trains in a thread, publishes weights."""

    def __init__(
        self,
        settings: PolicySettings,
        folder: str,
        threads: int,
        call_s: float,
        resume_folder: str,
        steps_per_resume_point: int,
        keep_every: int = 0,
        ranks: int = 1,
    ) -> None:
        """Build the policy, unless there are several ranks.

        Args:
            settings: Settings of the policy.
            folder: Folder of published weights.
            threads: Size of the policy's thread pools.
            call_s: Maximum seconds of a call to the trajectory server.
            resume_folder: Folder of the run's resume points.
            steps_per_resume_point: Steps between two resume points; 0 for none.
            keep_every: Versions between two resume points that are never removed; 0 for none.
            ranks: Number of trainer processes; with more than one, `form_group` must be called first.
        """
        engine_handover.close_orphans()
        self._call_s = call_s
        self._settings, self._threads, self._ranks = settings, threads, ranks
        self._built_policy: Policy | None = settings.build(threads) if ranks == 1 else None
        self._folder = WeightFolder(Path(folder))
        weight_folder.remove_unused_folders(Path(folder).parent)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="resume-point")
        self._probe_tokens: tuple[int, ...] = ()
        self._resume_points = ResumePoints(Path(resume_folder), keep_every)
        self._steps_per_resume_point = steps_per_resume_point
        if steps_per_resume_point:
            self._resume_points.claim()
        self._save_task: asyncio.Task[None] | None = None
        """The latest resume point, written or being written. Its error is raised once."""
        self._version = PolicyVersion(0)
        self._num_fine_tuned = 0
        """Number of finished steps of supervised fine-tuning."""

    async def form_group(self, host: str, *peers: Any) -> None:
        """Connect to the other ranks, in the order of their numbers. host: address of this process for them."""
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()
        args = (self._settings, self._threads, host, peers, loop, context)
        self._built_policy = await self._in_thread(DistributedPolicy, *args)

    async def logprobs(self, tokens: tuple[int, ...]) -> tuple[float, ...]:
        """Return the logprobs of tokens[1:], nats, under the current weights."""
        return await self._while_awake(self._policy.logprobs, tokens)

    async def fine_tune(self, step: int) -> dict[str, float]:
        """Run step `step` of supervised fine-tuning, which precedes version 0, and return its metrics; empty if the
        step was run before."""
        if step < self._num_fine_tuned:
            return {}
        metrics = await self._while_awake(self._policy.fine_tune, step)
        self._num_fine_tuned = step + 1
        return metrics

    async def publish_initial(
        self, probe_tokens: tuple[int, ...], version: PolicyVersion, recorded_fingerprint: str
    ) -> PublishedStep:
        """Publish the base model as version 0, or a later version from its resume point.

        Args:
            probe_tokens: Tokens whose logprobs are published with every version.
            version: The version to publish.
            recorded_fingerprint: The version's fingerprint when it was first published; empty if unknown.
        """
        self._probe_tokens = probe_tokens
        return await self._while_awake(self._publish_initial, version, recorded_fingerprint)

    async def train(
        self,
        server: Any,
        step: int,
        trajectories: tuple[TrajectoryId, ...],
        versions: tuple[PolicyVersion, ...],
        recorded_fingerprint: str = "",
    ) -> PublishedStep:
        """Run training step `step` on trajectories, and publish version step + 1.

        Resume points are written one at a time, while the next steps are trained. A step with a resume point waits
        until the previous one is written. An error in writing is raised by the next call.

        Args:
            versions: The trajectories' v_traj.
            recorded_fingerprint: Fingerprint of version step + 1 when it was first published; empty if it was not.
                Other weights get no resume point: a run could not be resumed from it.
        """
        started_s = time.monotonic()
        rows = await self._fetch_batch(server, step, trajectories, versions)
        fetched_s = time.monotonic()
        is_point_due = self._steps_per_resume_point and (step + 1) % self._steps_per_resume_point == 0
        resume_wait_s = 0.0
        if self._save_task is not None and (is_point_due or self._save_task.done()):
            await self._wait_for_save()
            resume_wait_s = time.monotonic() - fetched_s
        seconds = {"fetch_s": fetched_s - started_s, "resume_wait_s": resume_wait_s}
        result = await self._while_awake(self._train, step, rows, seconds)
        if is_point_due and recorded_fingerprint in ("", result.fingerprint):
            # Queued before the next step, because it copies the state that the next step changes.
            pending_point = self._executor.submit(self._begin_resume_point, result.version)
            self._save_task = asyncio.ensure_future(self._end_resume_point(pending_point))
        return result

    async def version(self) -> PolicyVersion:
        """Return the version that was published last, also while a step is being trained."""
        return self._version

    async def save_checkpoint(self, folder: str, version: PolicyVersion | None = None) -> bool:
        """Save a checkpoint of published weights for `from_pretrained`, in their dtype. version: the latest by default.
        Returns False if that version is not on this host."""
        path = self._folder.path(self._version if version is None else version)
        await self._wait_for_save()
        if not path.is_file():
            return False
        await self._in_thread(self._policy.save, Path(folder), path)
        return True

    async def close(self) -> None:
        await self._finish_saving()
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._saver.shutdown(wait=False)
        if self._built_policy is not None:
            await asyncio.to_thread(self._built_policy.close)
        await asyncio.to_thread(self._folder.remove)

    @property
    def _policy(self) -> Policy:
        if self._built_policy is None:
            raise ProtocolViolation(f"the {self._ranks} ranks of the trainer are not a group yet")
        return self._built_policy

    async def _fetch_batch(
        self, server: Any, step: int, trajectories: tuple[TrajectoryId, ...], versions: tuple[PolicyVersion, ...]
    ) -> list[Row]:
        """Fetch a step's rows, message by message; each call has deadlines.call_s."""
        rows: list[Row] = []
        num_remaining = 1
        while num_remaining:
            message: BatchMessage = await call_actor(
                server,
                "take_batch",
                step,
                trajectories,
                versions,
                len(rows),
                timeout_s=self._call_s,
                actor_name="server",
            )
            rows += await asyncio.to_thread(message.rows)
            num_remaining = message.num_remaining
        return rows

    async def _while_awake(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that needs the policy's device. After a failure the policy stays awake, because the other
        ranks of a lost group may never reply; it is replaced, or the run ends."""

        def call() -> T:
            self._policy.wake()
            result = function(*args)
            self._policy.sleep()
            return result

        return await self._in_thread(call)

    def _publish_initial(self, version: PolicyVersion, recorded_fingerprint: str) -> PublishedStep:
        if version:
            self._policy.load_state(self._resume_points.path(version))
        result = self._publish(version, {})
        if recorded_fingerprint not in ("", result.fingerprint):
            is_equal = self._policy.apply_to_weights(lambda weights: fingerprint(weights) == recorded_fingerprint)
            result = replace(result, matches_record=is_equal)
        return result

    def _train(self, step: int, rows: list[Row], seconds: Mapping[str, float]) -> PublishedStep:
        """Train a step and publish its weights. seconds: durations to add to the step's metrics, by name."""
        started_s = time.monotonic()
        metrics = self._policy.step(step, rows)
        trained_s = time.monotonic()
        result = self._publish(PolicyVersion(step + 1), metrics)
        result.metrics.update(seconds, train_s=trained_s - started_s, publish_s=time.monotonic() - trained_s)
        return result

    def _publish(self, version: PolicyVersion, metrics: dict[str, float]) -> PublishedStep:
        fingerprint = self._policy.apply_to_weights(lambda weights: self._folder.publish(version, weights))
        path = self._folder.path(version)
        self._version = version
        return PublishedStep(
            version=version,
            metrics=dict(metrics),
            fingerprint=fingerprint,
            path=str(path),
            num_bytes=path.stat().st_size,
            probe_logprobs=self._policy.logprobs(self._probe_tokens) if self._probe_tokens else (),
            numerics=describe_numerics(),
        )

    def _begin_resume_point(self, version: PolicyVersion) -> ExitStack:
        """Begin to write a resume point. It exists once the returned context has been left without an error."""
        with ExitStack() as stack:
            tmp_path = stack.enter_context(self._resume_points.writing(version, sharded=self._ranks > 1))
            self._policy.begin_save(tmp_path)
            return stack.pop_all()

    async def _end_resume_point(self, pending_point: Future[ExitStack]) -> None:
        """Finish writing a resume point, in another thread than training."""

        def end(point: ExitStack) -> None:
            with point:
                self._policy.end_save()

        point = await asyncio.wrap_future(pending_point)
        await asyncio.get_running_loop().run_in_executor(self._saver, end, point)

    async def _wait_for_save(self) -> None:
        """Wait until the latest resume point is written. Raises its error, once."""
        if (save_task := self._save_task) is None:
            return
        await asyncio.wait({save_task})
        if self._save_task is save_task:  # else another call has waited for it too, and got its error
            self._save_task = None
            save_task.result()

    async def _finish_saving(self) -> None:
        """Wait up to SAVE_TIMEOUT_S for the latest resume point. Its error is logged, because no caller gets it."""
        save_task, self._save_task = self._save_task, None
        if save_task is None:
            return
        await asyncio.wait({save_task}, timeout=SAVE_TIMEOUT_S)
        if not save_task.done():
            logger.warning("closed while a resume point was being written; the one before it is the newest")
        elif not save_task.cancelled() and (error := save_task.exception()) is not None:
            logger.error("the latest resume point is missing: %s", error)

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)
