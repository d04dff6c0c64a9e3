"""The contract of a rollout engine. One conformance suite (tests/tasks/engine_conformance.py) tests every engine.

An engine samples continuations of token ids. Every sampled token comes back with its logprob under the sampling policy
and the version of that policy. Requests are identified by (trajectory, route_number). An engine sees text only where a
request has stop strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from staleflow.stores.in_flight.stop_criteria import NO_STOP, StopCriteria
from staleflow.stores.trajectory import FinishReason, InstanceId, PolicyVersion, Segment, TrajectoryId
from staleflow.stores.weights.weight_report import WeightReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to sample up to `max_new_tokens` tokens after `tokens`, which are the prompt and the response so
    far."""

    trajectory: TrajectoryId
    route_number: int
    tokens: tuple[int, ...]
    max_new_tokens: int
    num_response_tokens: int = 0
    """Number of tokens that its response has so far, sampled on this or another instance or given by environments."""
    prompt: tuple[int, ...] | None = None
    """Prompt of its trajectory, if `tokens` is not the prompt followed by sampled tokens, as in a context branch."""
    num_current_turn_tokens: int = 0
    """Number of the last `tokens` that belong to the current turn, in whose text stop strings are searched."""
    stop: StopCriteria = NO_STOP
    """Stop strings and tokens that end the turn, besides those that end a response. The token that completes one is the
    last sampled token."""
    greedy: bool = False
    temperature: float | None = None
    """Sampling temperature; None for the engine's own."""
    keep_kv: bool = False
    """Whether its trajectory may continue with another turn after these and the sampled tokens. If so, an engine may
    keep the KV cache when the request ends."""
    version: PolicyVersion | None = None
    """Minimum policy version. If several versions are served, all tokens are sampled under the oldest of them that is
    not older than this one; None: under the newest. It is the trajectory's v_traj, so that a turn or a continuation is
    sampled under the same version as earlier tokens, if that is served."""

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """The prompt of the request's trajectory."""
        return self.tokens[: len(self.tokens) - self.num_response_tokens] if self.prompt is None else self.prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """Tokens that a request has sampled, one segment per policy version. start: position of the first token in the
    response. finish: UNFINISHED unless the request ended by itself."""

    trajectory: TrajectoryId
    route_number: int
    start: int
    segments: tuple[Segment, ...]
    finish: FinishReason
    drafted_tokens: int = 0
    """Number of draft tokens that were verified for it."""
    accepted_tokens: int = 0
    """Number of draft tokens that were accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Logprobs of the tokens of a sequence, and of the most likely token at each position, each given all tokens
    before it, nats."""

    logprobs: tuple[float, ...]
    """Of tokens[1:]."""
    top_tokens: tuple[int, ...]
    """The most likely token after each token; the last one would continue the sequence."""
    top_logprobs: tuple[float, ...]
    """Of top_tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResponses:
    """Responses to one prompt, as token ids by trajectory."""

    prompt: tuple[int, ...]
    responses: tuple[tuple[TrajectoryId, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRequest:
    """A request that the engine cannot continue."""

    trajectory: TrajectoryId
    route_number: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The current load of an engine.

    Args:
        version: Newest version that is served.
        kv_tokens: Tokens in the contexts of all running requests, also of those outside the current batch.
        progress: (trajectory, number of tokens sampled in total).
        waiting: Number of running requests outside the current batch.
        preemptions: Number of preemptions since start, for lack of KV memory.
        delivered: (trajectory, tokens) that the trajectory server got since the last report. Set by the instance, not
            by its engine.

    Every time a request enters the batch, each token of its context is either computed or found cached; the two counts
    since start are `prefilled_tokens` and `cached_tokens`. So a context that is computed again counts again, after an
    interrupt, a move, a preemption or new weights. The context of a turn is all of Request.tokens and, where it goes on
    after a preemption or new weights, what it has sampled so far.
    """

    version: PolicyVersion
    running: int
    kv_tokens: int
    busy_s: float
    """Seconds since start in which it had at least one request."""
    tokens_sampled: int
    progress: tuple[tuple[TrajectoryId, int], ...]
    waiting: int = 0
    preemptions: int = 0
    kept_tokens: int = 0
    """KV tokens cached for later turns of trajectories that are not running. They are evicted when running requests
    need memory."""
    prefilled_tokens: int = 0
    """Tokens of contexts that were computed."""
    cached_tokens: int = 0
    """Tokens of contexts that were found in the cache."""
    drafts: int = 0
    """Number of times since start that a request's step verified draft tokens."""
    drafted_tokens: int = 0
    """Draft tokens verified since start."""
    accepted_tokens: int = 0
    """Draft tokens accepted since start."""
    delivered: tuple[tuple[TrajectoryId, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """The result of loading weights."""

    fingerprint: str
    """Fingerprint of the published weights as this process has read them."""
    weights: WeightReport
    """Comparison of the engine's weights with the published ones, part by part, on every worker."""


class Engine(Protocol):
    """A rollout engine. One control thread may call any method while another waits in `events`. Once decoding has
    failed, each method raises ActorLost. While decoding stalls or weights are loaded, `events` and `load_statistics`
    still return."""

    @property
    def version(self) -> PolicyVersion:
        """The newest version that is served."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Start sampling; returns at once. A request with a newer route number replaces the running one of its
        trajectory; a repeated or older one is ignored."""
        ...

    def interrupt(self, trajectories: Sequence[TrajectoryId]) -> list[SampledTokens]:
        """Stop requests and return what they have sampled, with finish UNFINISHED. Takes at most one decode step.
        Requests that have ended by themselves are not included; `events` returns them."""
        ...

    def peek(self) -> list[SampledTokens]:
        """The tokens sampled so far by running requests, which continue without delay."""
        ...

    def abort(self, trajectories: Sequence[TrajectoryId]) -> None:
        """Stop requests, drop their tokens, and drop the cached contexts of their trajectories. Unknown requests are
        ignored."""
        ...

    def load(self, version: PolicyVersion, weights: Path) -> LoadResult:
        """Load new weights, and compare the weights in the engine with the published ones. Running requests continue
        under the new weights, after their tokens are prefilled again. Cached contexts of earlier turns are dropped.

        If versions are adapters, several are served: running requests and cached contexts are not affected, and later
        requests may be sampled under this version. A version that is not among the latest is dropped once no request
        runs under it.

        An engine that sleeps is awake afterwards.

        Raises StoreError if the file cannot be read or has other tensors than the engine's: nothing has changed then.
        Raises WeightsRefused if loading failed half-way.
        """
        ...

    def sleep(self) -> None:
        """Free the device: drop the weights and all caches until the next `load`. Idempotent. After it, `submit` and
        `score` may be called again only once weights are loaded. Raises ProtocolViolation if a request is
        running."""
        ...

    def events(self, timeout_s: float) -> list[SampledTokens | FailedRequest]:
        """Wait up to `timeout_s` for a request to end. Returns those that have ended since the last call."""
        ...

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[TokenScores]:
        """Compute the logprobs of sequences' tokens under the current weights, of several sequences in a forward pass.
        Running requests go on between two passes, unless both are of one long sequence. Called by several threads at
        once, and with a temperature other than 1 only if the settings' `scores_at_any_temperature`."""
        ...

    def load_statistics(self) -> EngineLoad:
        """Return the current load."""
        ...

    def drafting_trajectories(self) -> tuple[TrajectoryId, ...]:
        """The running trajectories for which the engine drafts from earlier responses to the same prompt. Empty for
        engines without such a drafter."""
        ...

    def add_draft_responses(self, responses: Sequence[PromptResponses]) -> None:
        """Add responses that were sampled by other instances or in earlier steps. They are used for drafts only."""
        ...

    def reset(self, instance: InstanceId) -> None:
        """Reset to the state after creation, for a new run: no requests, cached contexts or counts. The weights stay
        loaded as version 0. Tokens sampled from now on belong to `instance`. Not safe during other calls."""
        ...

    def close(self) -> None:
        """Stop sampling, and free what the engine holds."""
        ...
