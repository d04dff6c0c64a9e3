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
from pathlib import Path
from typing import NamedTuple

import numpy as np

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
from staleflow.tasks.engines.base import Engine, EngineLoad, LoadResult, Request, SampledTokens, TokenScores
from staleflow.tasks.engines.engine_settings import EmulatedSettings
from staleflow.tasks.engines.engine_thread import EngineThread
from staleflow.tasks.engines.running_requests import RunningRequest
from staleflow.tasks.settings.choice_names import REWARD_TOKEN

EOS = 1
FIRST_TEXT_TOKEN, NUM_TEXT_TOKENS = 4, 90
"""First id, and number of ids, of tokens that are neither EOS nor a reward."""
TENSOR_NAME = "emulated"
"""Name of the only tensor in published weights; it holds the version as a number."""

NO_DRAFTS = DraftedTokens()
MAX_WAIT_S = 86_400.0
"""Maximum of one wait, since operating systems limit timeouts."""


def build(settings: EmulatedSettings, instance: InstanceId, threads: int) -> Engine:
    return EmulatedEngine(settings, instance)


def emulated_weights(version: int) -> dict[str, weight_hash.Array]:
    """The weights that an emulated trainer publishes as `version`. Does not import torch, which takes a process
    seconds."""
    return {TENSOR_NAME: np.asarray([version], np.float32)}


def emulated_ids(key: int, start: int, count: int) -> IntArray:
    """[count] token ids at positions start, start + 1, ... of the response that `key` identifies."""
    positions = np.arange(start, start + count, dtype=np.uint64)
    hashes = (positions * np.uint64(2654435761) + np.uint64(key % 2**32) * np.uint64(40503)) >> np.uint64(7)
    return (hashes % np.uint64(NUM_TEXT_TOKENS)).astype(np.int32) + FIRST_TEXT_TOKEN


def emulated_logprobs(tokens: IntArray) -> FloatArray:
    """[T] synthetic logprobs of tokens, in nats. They depend only on the token, not on the version."""
    return (-0.5 - (tokens % 13) / 10).astype(np.float32)


def emulated_scores(tokens: Sequence[int]) -> TokenScores:
    """Synthetic scores of tokens. Token 0 is the most likely one everywhere."""
    (top_logprob,) = emulated_logprobs(np.zeros(1, np.int32)).tolist()
    return TokenScores(
        logprobs=tuple(emulated_logprobs(np.asarray(tokens[1:], np.int32)).tolist()),
        top_tokens=(0,) * len(tokens),
        top_logprobs=(top_logprob,) * len(tokens),
    )


class PlannedResponse(NamedTuple):
    """The response that a request will get.

    length: tokens of the response at the end of this turn, including earlier ones. ends_with_eos: whether it ends with
    EOS, not by its token limit. seed: seed of its token ids.
    """

    length: int
    ends_with_eos: bool
    seed: int
    reward: float


class Clock:
    """The clock of an emulated engine: the monotonic clock of this machine."""

    def now(self) -> float:
        """Seconds since an arbitrary moment."""
        return time.monotonic()

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        """Wait up to `seconds`, or until the condition, which the caller holds, is notified."""
        condition.wait(min(max(seconds, 0.0), MAX_WAIT_S))


class EmulatedEngine(EngineThread):
    """An engine whose thread sleeps until the next request ends. Any thread that holds the lock may advance the batch
    to the present time."""

    def __init__(self, settings: EmulatedSettings, instance: InstanceId, clock: Clock | None = None) -> None:
        super().__init__(instance, model=None)
        self._settings = settings
        self._weights = emulated_weights(0)
        self._clock = clock or Clock()
        self._drop_caches_and_counts()
        self._thread.start()

    def peek(self) -> list[SampledTokens]:
        with self._condition:
            self._check()
            for trajectory, num_tokens in self._batch.progress(self._catch_up()):
                running = self._running_request(trajectory)
                # The last token depends on how the response ends, which is not known before it does.
                self._extend(running, min(num_tokens, self._planned_responses[running.request.trajectory].length - 1))
            return super().peek()

    def load(self, version: PolicyVersion, weights: Path) -> LoadResult:
        published = weight_folder.read_arrays(weights)
        weight_folder.check_shapes(weight_folder.shapes(self._weights), weight_folder.shapes(published), weights)
        self._weights = published
        settings = self._settings
        if settings.num_served_versions:
            time.sleep(settings.pull_s / settings.time_scale)
        end_s = self._call(lambda: self._load(version)).result()
        time.sleep(max(0.0, end_s / settings.time_scale - (self._clock.now() - self._start_s)))
        return LoadResult(
            fingerprint=weight_hash.fingerprint(published), weights=compare_by_name(self._weights, published)
        )

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[TokenScores]:
        with self._condition:
            self._check()
        return [emulated_scores(tokens) for tokens in sequences]

    # -- the engine's thread -------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Decode up to the present time, and wait for the next change of the batch or the next call."""
        with self._condition:
            wait_s = (self._batch.next_change_s() - self._catch_up()) / self._settings.time_scale
            if not (self._calls or self._is_closing):
                self._clock.wait(self._condition, wait_s)

    def _load(self, version: PolicyVersion) -> float:
        """Serve a version, instead of the others or beside them. Returns when the pull ends, in the cost model's
        seconds."""
        settings = self._settings
        with self._condition:
            if settings.num_served_versions:
                self._requests.drop_old_versions(version, settings.num_served_versions)
                self._requests.serve(version)
                return 0.0
            end_s = self._batch.load(self._catch_up(), settings.pull_s, keep_cache=settings.keep_cache)
            self._finish(self._batch.advance(self._batch.clock))
            for trajectory, num_tokens in self._batch.progress(self._batch.clock):
                self._extend(self._running_request(trajectory), num_tokens)
            self._requests.change_version(version)
            self._contexts.clear()
            self._is_asleep = False
            return end_s

    def _admit(self, running: RunningRequest) -> None:
        request, trajectory = running.request, running.request.trajectory
        with self._condition:
            context_version, cached_tokens = self._contexts.pop(trajectory, (running.version, ()))
            if context_version != running.version or request.tokens[: len(cached_tokens)] != cached_tokens:
                self._batch.release_cache(trajectory)
            prior = request.num_response_tokens
            response = self._planned_responses[trajectory] = self._plan_response(request)
            turns = (Turn(response.length),)
            now = self._catch_up()
            self._batch.submit(now, trajectory, request.route_number, max(0, len(request.tokens) - prior), prior, turns)

    def _remove(self, requests: Sequence[RunningRequest]) -> None:
        for running in requests:
            removed_request = self._batch.remove(self._catch_up(), running.request.trajectory)
            if removed_request is not None:
                self._extend(running, removed_request.tokens, removed_request.drafts)
        self._finish(self._batch.advance(self._batch.clock))  # some may have ended at the same step boundary

    def _drop_request(self, running: RunningRequest) -> None:
        self._planned_responses.pop(running.request.trajectory, None)
        super()._drop_request(running)

    def _abort(self, trajectories: frozenset[TrajectoryId]) -> None:
        super()._abort(trajectories)
        with self._condition:
            for trajectory in trajectories:
                self._forget(trajectory)

    def _drop_caches_and_counts(self) -> None:
        settings = self._settings
        self._batch = SimulatedBatch(
            settings.cost,
            kv_capacity=settings.kv_tokens,
            max_running=settings.max_running,
            draft_settings=settings.drafting,
        )
        self._planned_responses: dict[TrajectoryId, PlannedResponse] = {}
        """The responses that running requests will get."""
        self._contexts: dict[TrajectoryId, tuple[PolicyVersion, tuple[int, ...]]] = {}
        """Cached contexts of trajectories between turns: the version that computed a context, and its tokens."""
        self._start_s = self._clock.now()

    def _free_device(self) -> None:
        with self._condition:
            self._contexts.clear()
            self._batch.clear_cache()
        time.sleep(self._settings.switch_s / self._settings.time_scale)

    def _load_statistics(self) -> EngineLoad:
        now = self._catch_up()
        work = self._batch.work_until(now)
        progress = tuple((TrajectoryId(t), n) for t, n in self._batch.progress(now))
        requests = [(self._running_request(t).request, n) for t, n in progress]
        return EngineLoad(
            version=self.version,
            running=len(progress),
            kv_tokens=sum(len(request.tokens) + n - request.num_response_tokens for request, n in requests),
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

    # -- internals; the caller holds the lock --------------------------------------------------------------------

    def _catch_up(self) -> float:
        """Decode up to the present time, and return that time in the cost model's seconds."""
        now = (self._clock.now() - self._start_s) * self._settings.time_scale
        self._finish(self._batch.advance(now))
        return now

    def _finish(self, finished_requests: Sequence[FinishedRequest]) -> None:
        for finished in finished_requests:
            running = self._running_request(finished.trajectory)
            request = running.request
            self._extend(running, finished.tokens, finished.drafts)
            has_stopped = self._planned_responses[request.trajectory].ends_with_eos
            self._drop_request(running)
            sampled = running.sampled_tokens(FinishReason.STOP if has_stopped else FinishReason.LENGTH)
            self._emit(sampled)
            if request.keep_kv:
                ids = (int(token) for segment in sampled.segments for token in segment.tokens)
                self._contexts[request.trajectory] = running.version, (*request.tokens, *ids)
            else:
                self._forget(request.trajectory)

    def _running_request(self, trajectory: int) -> RunningRequest:
        """The running request of a trajectory in the batch."""
        running = self._requests.get_by_trajectory(TrajectoryId(trajectory))
        assert running is not None, "requests leave the batch and the engine together"
        return running

    def _extend(self, running: RunningRequest, num_tokens: int, drafts: DraftedTokens = NO_DRAFTS) -> None:
        """Give a request the tokens of its response up to `num_tokens`, under its current version. drafts: of the whole
        request."""
        running.drafted_tokens, running.accepted_tokens = round(drafts.drafted), round(drafts.accepted)
        start = running.request.num_response_tokens + running.num_sampled
        if num_tokens <= start:
            return
        response = self._planned_responses[running.request.trajectory]
        ids = emulated_ids(response.seed, start, num_tokens - start)
        if response.ends_with_eos and num_tokens == response.length:
            ids[-1] = EOS
        if start == 0:  # also of a response of one token
            ids[0] = REWARD_TOKEN + (response.reward > 0)
        segments = running.closed_segments
        if segments and segments[-1].version == running.version:
            ids = np.concatenate([segments.pop().tokens, ids])
        segments.append(
            Segment(version=running.version, instance=self._instance, tokens=ids, logprobs=emulated_logprobs(ids))
        )

    def _forget(self, trajectory: TrajectoryId) -> None:
        """Drop the cached context of a trajectory."""
        self._contexts.pop(trajectory, None)
        self._batch.release_cache(trajectory)

    def _plan_response(self, request: Request) -> PlannedResponse:
        """Plan the response to a request according to the workload. A greedy one depends on the prompt only."""
        workload, members = self._settings.workload, self._settings.members_per_group
        seed = int(sum(request.prompt_tokens) if request.greedy else request.trajectory)
        group, member = divmod(abs(seed), members)
        turns = workload.turns(group, member)
        planned_tokens = sum(turn.tokens + turn.tool_tokens for turn in turns)
        length = request.num_response_tokens + remaining_tokens(turns, request.num_response_tokens)
        if planned_tokens <= request.num_response_tokens:  # already longer than planned: it continues for as long again
            length = planned_tokens + request.num_response_tokens
        max_length = request.num_response_tokens + request.max_new_tokens
        return PlannedResponse(
            length=max(request.num_response_tokens + 1, min(length, max_length)),
            ends_with_eos=length <= max_length,
            seed=seed,
            reward=workload.reward(group, member),
        )
