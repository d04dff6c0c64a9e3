"""An engine without a model: continuous batching under a cost model, in wall-clock time.

It fulfils the contract of all engines with synthetic results. The workload sets the length of a turn, tokens and
logprobs are functions of trajectory and position, and a decode step takes the cost model's time divided by
`time_scale`. Everything around it is real: actors, transfers, weight files, commits. It is used for dry runs of a job
and for measuring the overhead of the system itself.

The first token of a response encodes its reward: REWARD_TOKEN + 0 or 1.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from staleflow.stores.errors import ActorLost, ProtocolViolation
from staleflow.stores.trajectory import (
    FinishReason,
    FloatArray,
    InstanceId,
    IntArray,
    PolicyVersion,
    Segment,
    TrajectoryId,
)
from staleflow.stores.weights import weight_folder, weight_hash
from staleflow.stores.weights.weight_comparison import compare_by_name
from staleflow.tasks.emulation.batch_simulator import DraftedTokens, FinishedRequest, SimulatedBatch
from staleflow.tasks.emulation.emulated_episodes import remaining_tokens
from staleflow.tasks.emulation.workload import Turn
from staleflow.tasks.engines import adapters
from staleflow.tasks.engines.base import (
    Engine,
    EngineLoad,
    FailedRequest,
    LoadResult,
    PromptResponses,
    Request,
    SampledTokens,
    TokenScores,
)
from staleflow.tasks.engines.engine_settings import EmulatedSettings
from staleflow.tasks.settings.choice_names import REWARD_TOKEN

EOS = 1
FIRST_WORD, NUM_WORDS = 4, 90
"""First id, and number of ids, of tokens that are neither EOS nor a reward."""
WEIGHT_NAME = "emulated"
"""Name of the only tensor in published weights; it holds the version as a number."""

NO_DRAFTS = DraftedTokens()
MAX_WAIT_S = 86_400.0
"""Maximum of one wait, since operating systems limit timeouts."""


def build(settings: EmulatedSettings, instance: InstanceId, threads: int) -> Engine:
    return EmulatedEngine(settings, instance)


def weights(version: int) -> dict[str, weight_hash.Array]:
    """The weights that an emulated trainer publishes as `version`. Does not import torch, which takes a process
    seconds."""
    return {WEIGHT_NAME: np.asarray([version], np.float32)}


def emulated_ids(key: int, start: int, count: int) -> IntArray:
    """[count] token ids at positions start, start + 1, ... of the response that `key` identifies."""
    positions = np.arange(start, start + count, dtype=np.uint64)
    hashes = (positions * np.uint64(2654435761) + np.uint64(key % 2**32) * np.uint64(40503)) >> np.uint64(7)
    return (hashes % np.uint64(NUM_WORDS)).astype(np.int32) + FIRST_WORD


def word_logprobs(tokens: IntArray) -> FloatArray:
    """[T] synthetic logprobs of tokens, in nats. They depend only on the token, not on the version."""
    return (-0.5 - (tokens % 13) / 10).astype(np.float32)


def word_scores(tokens: Sequence[int]) -> TokenScores:
    """Synthetic scores of tokens. Token 0 is the most likely one everywhere."""
    (top_logprob,) = word_logprobs(np.zeros(1, np.int32)).tolist()
    return TokenScores(
        logprobs=tuple(word_logprobs(np.asarray(tokens[1:], np.int32)).tolist()),
        top_tokens=(0,) * len(tokens),
        top_logprobs=(top_logprob,) * len(tokens),
    )


@dataclass(slots=True)
class _RunningRequest:
    """A running request, and the response planned for it."""

    request: Request
    length: int
    """Tokens of its response at the end of this turn, including earlier ones."""
    ends_with_eos: bool
    """Whether it ends with EOS, not by its token limit."""
    key: int
    """Seed of the response's token ids."""
    reward: float
    version_starts: list[tuple[PolicyVersion, int]] = field(default_factory=list)
    """(version, number of response tokens when sampling under it began), oldest first."""


class Clock:
    """The clock of an emulated engine: the monotonic clock of this machine."""

    def now(self) -> float:
        """Seconds since an arbitrary moment."""
        return time.monotonic()

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        """Wait up to `seconds`, or until the condition, which the caller holds, is notified."""
        condition.wait(min(max(seconds, 0.0), MAX_WAIT_S))


class EmulatedEngine:
    """An engine whose thread sleeps until the next request ends."""

    def __init__(self, settings: EmulatedSettings, instance: InstanceId, clock: Clock | None = None) -> None:
        self._settings = settings
        self._instance = instance
        self._version = PolicyVersion(0)
        self._served_versions = [self._version]
        """The versions that requests may be sampled under."""
        self._weights = weights(self._version)
        self._batch = self._new_batch()
        self._running: dict[TrajectoryId, _RunningRequest] = {}
        self._outputs: list[SampledTokens | FailedRequest] = []
        self._contexts: dict[TrajectoryId, tuple[PolicyVersion, tuple[int, ...]]] = {}
        """Cached contexts of trajectories between turns: the version that computed a context, and its tokens."""
        self._condition = threading.Condition()
        self._clock = clock or Clock()
        self._start_s = self._clock.now()
        self._asleep = False
        self._stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"emulated-{instance}", daemon=True)
        self._thread.start()

    @property
    def version(self) -> PolicyVersion:
        return self._version

    def submit(self, requests: Sequence[Request]) -> None:
        with self._condition:
            now = self._begin_call()
            for request in requests:
                previous = self._running.get(request.trajectory)
                if previous is not None and previous.request.route_number >= request.route_number:
                    continue
                if previous is not None:
                    self._batch.remove(now, request.trajectory)
                    self._collect_ended()  # it may have ended at this step boundary
                version = adapters.version_for(self._served_versions, request.version)
                context_version, cached_tokens = self._contexts.pop(request.trajectory, (version, ()))
                if context_version != version or request.tokens[: len(cached_tokens)] != cached_tokens:
                    self._batch.release_cache(request.trajectory)
                prior, num_prompt_tokens = request.num_prior, max(0, len(request.tokens) - request.num_prior)
                running = self._plan_response(request)
                running.version_starts.append((version, prior))
                self._running[request.trajectory] = running
                turns = (Turn(running.length),)
                self._batch.submit(now, request.trajectory, request.route_number, num_prompt_tokens, prior, turns)
            self._condition.notify_all()

    def interrupt(self, trajectories: Sequence[TrajectoryId]) -> list[SampledTokens]:
        with self._condition:
            now = self._begin_call()
            outputs = []
            for trajectory in trajectories:
                removed_request = self._batch.remove(now, trajectory)
                if removed_request is not None:
                    running = self._running.pop(trajectory)
                    finish_reason = FinishReason.UNFINISHED
                    outputs.append(
                        self._sampled_tokens(running, removed_request.tokens, finish_reason, removed_request.drafts)
                    )
            self._collect_ended()  # others may have ended at the same step boundary
            self._condition.notify_all()
            return outputs

    def peek(self) -> list[SampledTokens]:
        with self._condition:
            progress = [(self._running[TrajectoryId(t)], n) for t, n in self._batch.progress(self._begin_call())]
            # The last token depends on how the response ends, which is not known before it does.
            return [self._sampled_tokens(r, min(n, r.length - 1), FinishReason.UNFINISHED) for r, n in progress]

    def abort(self, trajectories: Sequence[TrajectoryId]) -> None:
        with self._condition:
            self.interrupt(trajectories)
            for trajectory in trajectories:
                self._forget(trajectory)
            aborted_trajectories = set(trajectories)
            self._outputs = [e for e in self._outputs if e.trajectory not in aborted_trajectories]

    def load(self, version: PolicyVersion, weights: Path) -> LoadResult:
        published = weight_folder.read_arrays(weights)
        weight_folder.check_shapes(weight_folder.shapes(self._weights), weight_folder.shapes(published), weights)
        self._weights = published
        settings = self._settings
        if settings.num_served_versions:
            self._load_adapter(version)
        else:
            with self._condition:
                done_s = self._batch.load(self._begin_call(), settings.pull_s, keep_cache=settings.keep_cache)
                self._collect_ended()
                for trajectory, tokens in self._batch.progress(self._batch.clock):
                    self._running[TrajectoryId(trajectory)].version_starts.append((version, tokens))
                self._contexts.clear()
                self._version, self._served_versions, self._asleep = version, [version], False
                self._condition.notify_all()
            time.sleep(max(0.0, done_s / settings.time_scale - (self._clock.now() - self._start_s)))
        return LoadResult(
            fingerprint=weight_hash.fingerprint(published), weights=compare_by_name(self._weights, published)
        )

    def sleep(self) -> None:
        with self._condition:
            self._begin_call()
            if self._running:
                raise ProtocolViolation(f"{self._instance} is put to sleep while it runs {len(self._running)} requests")
            if self._asleep:
                return
            self._asleep = True
            self._contexts.clear()
            self._batch.clear_cache()
        time.sleep(self._settings.switch_s / self._settings.time_scale)

    def events(self, timeout_s: float) -> list[SampledTokens | FailedRequest]:
        with self._condition:
            self._condition.wait_for(lambda: self._outputs or self._failure or self._stopping, timeout_s)
            self._check()
            outputs, self._outputs = self._outputs, []
            return outputs

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[TokenScores]:
        with self._condition:
            self._check()
        return [word_scores(tokens) for tokens in sequences]

    def load_statistics(self) -> EngineLoad:
        with self._condition:
            now = self._begin_call()
            work = self._batch.work_by(now)
            progress = tuple((TrajectoryId(t), n) for t, n in self._batch.progress(now))
            return EngineLoad(
                version=self._version,
                running=len(progress),
                kv_tokens=sum(len(self._running[t].request.tokens) for t, _ in progress)
                + sum(n - self._running[t].request.num_prior for t, n in progress),
                busy_s=(work.decode_s + work.prefill_s + work.pull_s) / self._settings.time_scale,
                tokens_sampled=work.sampled_tokens,
                progress=progress,
                waiting=self._batch.num_waiting,
                preemptions=work.preemptions,
                kept_tokens=self._batch.kept_tokens,
                prefilled_tokens=work.all_prefill_tokens,
                cached_tokens=work.cached_tokens,
                drafts=round(work.num_drafts),
                drafted_tokens=round(work.drafted_tokens),
                accepted_tokens=round(work.accepted_tokens),
            )

    def drafting_trajectories(self) -> tuple[TrajectoryId, ...]:
        return ()

    def add_draft_responses(self, responses: Sequence[PromptResponses]) -> None:
        """Do nothing: this engine has no drafter."""

    def reset(self, instance: InstanceId) -> None:
        with self._condition:
            self._check()
            self._instance, self._version = instance, PolicyVersion(0)
            self._served_versions = [self._version]
            self._batch = self._new_batch()
            self._running, self._outputs, self._contexts = {}, [], {}
            self._start_s = self._clock.now()
            self._condition.notify_all()

    def close(self) -> None:
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        self._thread.join(timeout=5)

    # -- internals -----------------------------------------------------------------------------------------------

    def _new_batch(self) -> SimulatedBatch:
        settings = self._settings
        return SimulatedBatch(
            settings.cost,
            kv_capacity=settings.kv_tokens,
            max_running=settings.max_running,
            draft_settings=settings.drafting,
        )

    def _load_adapter(self, version: PolicyVersion) -> None:
        """Load a version as an adapter and serve it beside the others. Decoding continues meanwhile."""
        time.sleep(self._settings.pull_s / self._settings.time_scale)
        with self._condition:
            self._check()
            self._version = version
            served_versions = sorted({*self._served_versions, version})
            running = [version for request in self._running.values() for version, _ in request.version_starts[-1:]]
            dropped_versions = adapters.unused_versions(
                served_versions, version, self._settings.num_served_versions, running
            )
            self._served_versions = [candidate for candidate in served_versions if candidate not in dropped_versions]

    def _run(self) -> None:
        try:
            with self._condition:
                while not self._stopping:
                    now = self._catch_up()
                    wait_s = (self._batch.next_s() - now) / self._settings.time_scale
                    self._clock.wait(self._condition, wait_s)
        except Exception as error:  # noqa: BLE001  raised by `events`
            self._failure = error
            with self._condition:
                self._condition.notify_all()

    def _check(self) -> None:
        if self._failure is not None or not self._thread.is_alive():
            raise ActorLost(f"{self._instance}: the decoding loop has ended: {self._failure}")

    def _begin_call(self) -> float:
        """Start a call: decode up to the present time and return it. Raises ActorLost if the decoding loop has
        ended."""
        self._check()
        return self._catch_up()

    def _catch_up(self) -> float:
        """Decode up to the present time, and return that time in the cost model's seconds."""
        now = (self._clock.now() - self._start_s) * self._settings.time_scale
        self._finish(self._batch.advance(now))
        return now

    def _collect_ended(self) -> None:
        """Collect the requests that ended at a command's step boundary."""
        self._finish(self._batch.advance(self._batch.clock))

    def _finish(self, finished_requests: Sequence[FinishedRequest]) -> None:
        for request in finished_requests:
            running = self._running.pop(TrajectoryId(request.trajectory))
            reason = FinishReason.STOP if running.ends_with_eos else FinishReason.LENGTH
            sampled = self._sampled_tokens(running, request.tokens, reason, request.drafts)
            self._outputs.append(sampled)
            if running.request.keep_kv:
                ids = (int(token) for segment in sampled.segments for token in segment.tokens)
                self._contexts[sampled.trajectory] = running.version_starts[-1][0], (*running.request.tokens, *ids)
            else:
                self._forget(sampled.trajectory)
        if finished_requests:
            self._condition.notify_all()

    def _forget(self, trajectory: TrajectoryId) -> None:
        """Drop the cached context of a trajectory."""
        self._contexts.pop(trajectory, None)
        self._batch.release_cache(trajectory)

    def _plan_response(self, request: Request) -> _RunningRequest:
        """Plan the response to a request according to the workload. A greedy one depends on the prompt only."""
        workload, members = self._settings.workload, self._settings.members_per_group
        key = sum(request.prompt_tokens) if request.greedy else request.trajectory
        group, member = divmod(abs(int(key)), members)
        turns = workload.turns(group, member)
        planned_tokens = sum(turn.tokens + turn.tool_tokens for turn in turns)
        length = request.num_prior + remaining_tokens(turns, request.num_prior)
        if planned_tokens <= request.num_prior:  # already longer than planned: it continues for as long again
            length = planned_tokens + request.num_prior
        max_length = request.num_prior + request.max_new_tokens
        return _RunningRequest(
            request=request,
            length=max(request.num_prior + 1, min(length, max_length)),
            ends_with_eos=length <= max_length,
            key=int(key),
            reward=workload.reward(group, member),
        )

    def _sampled_tokens(
        self, running: _RunningRequest, tokens: int, finish: FinishReason, drafts: DraftedTokens = NO_DRAFTS
    ) -> SampledTokens:
        segments = []
        ends = [*(start for _, start in running.version_starts[1:]), tokens]
        for (version, start), end in zip(running.version_starts, ends, strict=True):
            if end > start:
                ids = emulated_ids(running.key, start, end - start)
                if end == running.length and finish is FinishReason.STOP:
                    ids[-1] = EOS
                if start == 0:  # also of a response of one token
                    ids[0] = REWARD_TOKEN + (running.reward > 0)
                segments.append(
                    Segment(version=version, instance=self._instance, tokens=ids, logprobs=word_logprobs(ids))
                )
        request = running.request
        return SampledTokens(
            trajectory=request.trajectory,
            route_number=request.route_number,
            start=request.num_prior,
            segments=tuple(segments),
            finish=finish,
            **drafts.counts(),
        )
