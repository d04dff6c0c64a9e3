"""An engine without a model: continuous batching under a cost model, in wall-clock time.

It keeps the contract of every engine, in its own currency: a response is as long as the workload says, its tokens and
logprobs are functions of trajectory and position, and decode steps take the time the cost model gives them,
`time_scale` times faster. Everything around it is real: actors, transfers, weights files, commits. That is the dry run
of a job, and how the system's own overhead is measured.

The first token of a response says how it is rewarded: REWARD_TOKEN + 0 or 1.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stores.errors import ActorLost
from stores.trajectory import FinishReason, FloatArray, InstanceId, IntArray, PolicyVersion, Segment, TrajectoryId
from tasks.engines.base import Engine, EngineLoad, Failed, Loaded, Request, Sampled
from tasks.engines.decoding import DecodingInstance, Finished
from tasks.engines.settings import EmulatedSettings
from tasks.names import REWARD_TOKEN
from tasks.workload import Turn

if TYPE_CHECKING:
    import torch

EOS = 1
FIRST_WORD, NUM_WORDS = 4, 90
"""Ids that all other tokens have."""
WEIGHTS = "emulated"
"""Name of the one tensor that published weights hold, the version as a number."""

LONGEST_WAIT_S = 86_400.0
"""Beyond this the thread looks again: a platform's timeouts are not infinite."""


def build(settings: EmulatedSettings, instance: InstanceId, threads: int) -> Engine:
    return EmulatedEngine(settings, instance)


def weights(version: int) -> dict[str, torch.Tensor]:
    """What an emulated trainer publishes as `version`."""
    import torch

    return {WEIGHTS: torch.tensor([float(version)])}


def words(key: int, first: int, count: int) -> IntArray:
    """[count] token ids of positions first, first + 1, ... of the response that `key` names."""
    positions = np.arange(first, first + count, dtype=np.uint64)
    mixed = (positions * np.uint64(2654435761) + np.uint64(key % 2**32) * np.uint64(40503)) >> np.uint64(7)
    return (mixed % np.uint64(NUM_WORDS)).astype(np.int32) + FIRST_WORD


def word_logprobs(tokens: IntArray) -> FloatArray:
    """[T] nats: of a token alone, under any version."""
    return (-0.5 - (tokens % 13) / 10).astype(np.float32)


@dataclass(slots=True)
class _Running:
    """A request. marks: (version, response tokens it had when sampling under it began), oldest first."""

    request: Request
    length: int
    """Tokens its response has when it ends, earlier ones counted."""
    stops: bool
    """Whether it ends there by itself."""
    key: int
    reward: float
    marks: list[tuple[PolicyVersion, int]] = field(default_factory=list)


class Clock:
    """The time that an emulated engine lives in: this machine's."""

    def now(self) -> float:
        """Seconds since some moment."""
        return time.monotonic()

    def wait(self, changed: threading.Condition, seconds: float) -> None:
        """Wait so long, or until `changed`, which is held, is notified."""
        changed.wait(min(max(seconds, 0.0), LONGEST_WAIT_S))


class EmulatedEngine:
    """A thread waits for the next moment at which something ends."""

    def __init__(self, settings: EmulatedSettings, instance: InstanceId, clock: Clock | None = None) -> None:
        from stores import parameters  # takes seconds to load: now, and not within the first pull

        self._parameters = parameters
        self._settings = settings
        self._instance = instance
        self._version = PolicyVersion(0)
        self._batch = DecodingInstance(settings.cost, kv_capacity=settings.kv_tokens, max_running=settings.max_running)
        self._running: dict[TrajectoryId, _Running] = {}
        self._ended: list[Sampled | Failed] = []
        self._changed = threading.Condition()
        self._clock = clock or Clock()
        self._begin = self._clock.now()
        self._stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"emulated-{instance}", daemon=True)
        self._thread.start()

    @property
    def version(self) -> PolicyVersion:
        return self._version

    def submit(self, requests: Sequence[Request]) -> None:
        with self._changed:
            now = self._asked()
            for request in requests:
                held = self._running.get(request.trajectory)
                if held is not None and held.request.epoch >= request.epoch:
                    continue
                if held is not None:
                    self._batch.remove(now, request.trajectory)
                prior, prompt = request.num_prior, max(0, len(request.tokens) - request.num_prior)
                running = self._response(request)
                running.marks.append((self._version, prior))
                self._running[request.trajectory] = running
                turns = (Turn(running.length),)
                self._batch.submit(now, request.trajectory, request.epoch, prompt, prior, turns)
            self._changed.notify_all()

    def interrupt(self, trajectories: Sequence[TrajectoryId]) -> list[Sampled]:
        with self._changed:
            now = self._asked()
            stopped = []
            for trajectory in trajectories:
                removed = self._batch.remove(now, trajectory)
                if removed is not None:
                    running = self._running.pop(trajectory)
                    stopped.append(self._sampled(running, removed[1], FinishReason.UNFINISHED))
            self._collect()  # the boundary that stopped them may have ended others
            self._changed.notify_all()
            return stopped

    def abort(self, trajectories: Sequence[TrajectoryId]) -> None:
        with self._changed:
            self.interrupt(trajectories)
            gone = set(trajectories)
            self._ended = [e for e in self._ended if e.trajectory not in gone]

    def load(self, version: PolicyVersion, weights: Path) -> Loaded:
        begin = self._clock.now()
        loaded = self._parameters.read(weights)
        self._parameters.check_shapes(self._parameters.shapes(_held()), self._parameters.shapes(loaded), weights)
        settings = self._settings
        with self._changed:
            done_s = self._batch.load(self._asked(), settings.pull_s, keep=settings.keep)
            self._collect()
            for trajectory, tokens in self._batch.progress(self._batch.clock):
                self._running[TrajectoryId(trajectory)].marks.append((version, tokens))
            self._version = version
            self._changed.notify_all()
        time.sleep(max(0.0, done_s / settings.time_scale - (self._clock.now() - self._begin)))
        fingerprint, elapsed_s = self._parameters.fingerprint(loaded), self._clock.now() - begin
        return Loaded(version=version, fingerprint=fingerprint, elapsed_s=elapsed_s, stalled_s=elapsed_s)

    def events(self, timeout_s: float) -> list[Sampled | Failed]:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._failure or self._stopping, timeout_s)
            self._check()
            ended, self._ended = self._ended, []
            return ended

    def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        with self._changed:
            self._check()
        return tuple(word_logprobs(np.asarray(tokens[1:], np.int32)).tolist())

    def load_statistics(self) -> EngineLoad:
        with self._changed:
            now = self._asked()
            work = self._batch.work
            progress = tuple((TrajectoryId(t), n) for t, n in self._batch.progress(now))
            return EngineLoad(
                version=self._version,
                running=len(progress),
                kv_tokens=sum(len(self._running[t].request.tokens) for t, _ in progress)
                + sum(n - self._running[t].request.num_prior for t, n in progress),
                busy_s=(work.decode_s + work.prefill_s + work.pull_s) / self._settings.time_scale,
                tokens_sampled=work.tokens,
                progress=progress,
            )

    def close(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout=5)

    # -- inside --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._changed:
                while not self._stopping:
                    now = self._catch_up()
                    wait_s = (self._batch.next_s() - now) / self._settings.time_scale
                    self._clock.wait(self._changed, wait_s)
        except Exception as error:  # noqa: BLE001  told to whoever waits in events
            self._failure = error
            with self._changed:
                self._changed.notify_all()

    def _check(self) -> None:
        if self._failure is not None or not self._thread.is_alive():
            raise ActorLost(f"{self._instance}: the decoding loop has ended: {self._failure}")

    def _asked(self) -> float:
        """Now, for a verb: what has happened by now has happened. Raises ActorLost if nothing happens any more."""
        self._check()
        return self._catch_up()

    def _catch_up(self) -> float:
        """Let happen what has happened by now; returns now in the cost model's seconds."""
        now = (self._clock.now() - self._begin) * self._settings.time_scale
        self._finish(self._batch.advance(now))
        return now

    def _collect(self) -> None:
        """Take what a command's step boundary has ended."""
        self._finish(self._batch.advance(self._batch.clock))

    def _finish(self, finished: Sequence[Finished]) -> None:
        for one in finished:
            running = self._running.pop(TrajectoryId(one.trajectory))
            reason = FinishReason.STOP if running.stops else FinishReason.LENGTH
            self._ended.append(self._sampled(running, one.tokens, reason))
        if finished:
            self._changed.notify_all()

    def _response(self, request: Request) -> _Running:
        """How this request will go, as the workload has it; greedy ones depend on the prompt only."""
        workload, members = self._settings.workload, self._settings.members
        key = sum(request.tokens[: len(request.tokens) - request.num_prior]) if request.greedy else request.trajectory
        group, member = divmod(abs(int(key)), members)
        length = sum(t.tokens for t in workload.turns(group, member))
        if length <= request.num_prior:  # longer already than it would be: it goes on for as long again
            length += request.num_prior
        allowed = request.num_prior + request.max_new_tokens
        return _Running(
            request=request,
            length=max(request.num_prior + 1, min(length, allowed)),
            stops=length <= allowed,
            key=int(key),
            reward=workload.reward(group, member),
        )

    def _sampled(self, running: _Running, tokens: int, finish: FinishReason) -> Sampled:
        segments = []
        ends = [*(begin for _, begin in running.marks[1:]), tokens]
        for (version, begin), end in zip(running.marks, ends, strict=True):
            if end > begin:
                ids = words(running.key, begin, end - begin)
                if begin == 0:
                    ids[0] = REWARD_TOKEN + (running.reward > 0)
                if end == running.length and finish is FinishReason.STOP:
                    ids[-1] = EOS
                segments.append(
                    Segment(version=version, instance=self._instance, tokens=ids, logprobs=word_logprobs(ids))
                )
        request = running.request
        return Sampled(trajectory=request.trajectory, epoch=request.epoch, segments=tuple(segments), finish=finish)


def _held() -> dict[str, torch.Tensor]:
    return weights(0)
