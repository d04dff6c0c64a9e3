"""An engine's running requests with their tokens by version, and its busy time. Not thread-safe: engines lock it.

Invariants of stop strings: the token that completes one is the last token of its turn, however many tokens the string
has. The text is the decoded text of all tokens of the turn without special tokens, as agents receive it. A request
without stop strings has no check and no cost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from staleflow.stores.in_flight.stop_criteria import find_stop
from staleflow.stores.trajectory import FinishReason, InstanceId, PolicyVersion, Segment, TrajectoryId
from staleflow.tasks.engines.base import EngineLoad, Request, SampledTokens
from staleflow.tasks.rendering.chat_tokenizer import Detokenizer, is_special, load_chat_tokenizer, load_detokenizer


@dataclass(slots=True)
class RunningRequest:
    """One running request. key: its name within the engine."""

    request: Request
    key: str = ""
    version: PolicyVersion = PolicyVersion(0)
    """Policy version that it is sampled under now."""
    closed_segments: list[Segment] = field(default_factory=list)
    """Its earlier segments."""
    tokens: list[int] = field(default_factory=list)  # of the current segment
    logprobs: list[float] = field(default_factory=list)
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    stop_check: StopCheck | None = None
    """Searches for its stop strings; None if it has none."""

    @property
    def has_stopped(self) -> bool:
        """Whether it has sampled one of its stop strings."""
        return self.stop_check is not None and self.stop_check.has_stopped

    @property
    def num_sampled(self) -> int:
        return sum(len(part.tokens) for part in self.closed_segments) + len(self.tokens)

    def sampled_tokens(self, finish: FinishReason) -> SampledTokens:
        """Return the tokens it has sampled. Its current segment must be closed."""
        request = self.request
        return SampledTokens(
            trajectory=request.trajectory,
            route_number=request.route_number,
            start=request.num_response_tokens,
            segments=tuple(self.closed_segments),
            finish=finish,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
        )


class RunningRequests:
    """All running requests, by the engine's key and by trajectory, and the versions that are served."""

    def __init__(self, instance: InstanceId) -> None:
        self._num_added = 0
        self.reset(instance)

    def reset(self, instance: InstanceId) -> None:
        """Drop all requests and counts for a new run: the engine belongs to `instance`, and serves version 0. Keys of
        earlier requests are not used again."""
        self.instance = instance
        self.version = PolicyVersion(0)
        """The newest served version."""
        self._served_versions = [self.version]
        self._running: dict[str, RunningRequest] = {}
        self._by_trajectory: dict[TrajectoryId, RunningRequest] = {}
        self._tokens_sampled = self._drafts = self._drafted_tokens = self._accepted_tokens = 0
        self._busy_s = 0.0
        self._busy_since: float | None = None

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[RunningRequest]:
        return iter(tuple(self._running.values()))

    def get(self, key: str) -> RunningRequest | None:
        return self._running.get(key)

    def get_by_trajectory(self, trajectory: TrajectoryId) -> RunningRequest | None:
        return self._by_trajectory.get(trajectory)

    def change_version(self, version: PolicyVersion) -> None:
        """Continue all requests under a new version, which becomes the only served one."""
        for running in self._running.values():
            self.close_segment(running)
            running.version = version
        self.version, self._served_versions = version, [version]

    def drop_old_versions(self, newest: PolicyVersion, num_kept: int) -> list[PolicyVersion]:
        """Stop serving the versions that no request runs under and that are not among the latest `num_kept` up to
        `newest`, which is served next. Returns the dropped versions."""
        versions_in_use = {running.version for running in self._running.values()}
        dropped_versions = [v for v in self._served_versions if v <= newest - num_kept and v not in versions_in_use]
        self._served_versions = [version for version in self._served_versions if version not in dropped_versions]
        return dropped_versions

    def serve(self, version: PolicyVersion) -> None:
        """Add a served version, as the newest."""
        self.version = version
        self._served_versions = sorted({*self._served_versions, version})

    def add(self, running: RunningRequest) -> str:
        """Add a request and choose the version that it runs under: the oldest served one that it accepts, or the newest
        if it accepts none or requires no version. Returns its key, which was never used before."""
        request = running.request
        self._num_added += 1
        accepted_versions = [v for v in self._served_versions if request.version is not None and v >= request.version]
        running.version = min(accepted_versions, default=self._served_versions[-1])
        running.key = f"{request.trajectory}.{request.route_number}.{self._num_added}"
        if not self._running:
            self._busy_since = time.monotonic()
        self._running[running.key] = running
        self._by_trajectory[request.trajectory] = running
        return running.key

    def remove(self, running: RunningRequest) -> None:
        """Remove a request and close its current segment."""
        self.close_segment(running)
        del self._running[running.key]
        if self._by_trajectory.get(running.request.trajectory) is running:
            del self._by_trajectory[running.request.trajectory]
        if not self._running and self._busy_since is not None:
            self._busy_s += time.monotonic() - self._busy_since
            self._busy_since = None

    def extend(
        self, running: RunningRequest, tokens: Sequence[int], logprobs: Sequence[float], num_drafted: int
    ) -> None:
        """Add tokens that a request has sampled in a step under its current version: the accepted ones of `num_drafted`
        draft tokens and one more."""
        running.tokens += tokens
        running.logprobs += logprobs
        self._tokens_sampled += len(tokens)
        if num_drafted:
            running.drafted_tokens += num_drafted
            running.accepted_tokens += len(tokens) - 1
            self._drafts += 1
            self._drafted_tokens += num_drafted
            self._accepted_tokens += len(tokens) - 1

    def close_segment(self, running: RunningRequest) -> None:
        """Close a request's current segment: its version changes, or it leaves."""
        if running.tokens:
            running.closed_segments.append(self._current_segment(running))
            running.tokens, running.logprobs = [], []

    def peek(self) -> list[SampledTokens]:
        """Return the tokens that all requests have sampled so far. Changes nothing."""
        return [
            RunningRequest(
                running.request,
                closed_segments=[*running.closed_segments, *[self._current_segment(running)][: len(running.tokens)]],
            ).sampled_tokens(FinishReason.UNFINISHED)
            for running in self._running.values()
        ]

    def load_statistics(self, waiting: int = 0, preemptions: int = 0) -> EngineLoad:
        """Return the engine's current load. waiting: number of requests outside the batch. preemptions: since start."""
        busy_s = self._busy_s
        if self._busy_since is not None:
            busy_s += time.monotonic() - self._busy_since
        running = self._running.values()
        return EngineLoad(
            version=self.version,
            running=len(running),
            kv_tokens=sum(len(r.request.tokens) + r.num_sampled for r in running),
            busy_s=busy_s,
            tokens_sampled=self._tokens_sampled,
            progress=tuple((r.request.trajectory, r.request.num_response_tokens + r.num_sampled) for r in running),
            waiting=waiting,
            preemptions=preemptions,
            drafts=self._drafts,
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self._accepted_tokens,
        )

    def _current_segment(self, running: RunningRequest) -> Segment:
        return Segment(
            version=running.version,
            instance=self.instance,
            tokens=np.asarray(running.tokens, np.int32),
            logprobs=np.asarray(running.logprobs, np.float32),
        )


MARGIN_CHARS = 16
"""Characters kept before the part that a match may need, because the first characters of a decoded window may differ
from the full text."""
MAX_TOKENS_PER_CHARACTER = 4
"""Maximum number of tokens of one character: one for each of its bytes."""
FORCED_CUT_FACTOR = 64
"""Length of the window, in multiples of `_window_chars`, above which it is shortened even if it ends in an incomplete
character."""


class StopCheck:
    """Searches the text of one turn for stop strings, token by token. tokens: the turn's tokens so far. Not
    thread-safe."""

    def __init__(self, detokenizer: Detokenizer, strings: Sequence[str], tokens: Sequence[int] = ()) -> None:
        self._detokenizer = detokenizer
        self._strings = tuple(strings)
        self._window_chars = max(map(len, self._strings)) + MARGIN_CHARS
        """Number of characters at the end of the text in which the next match may begin, with a margin."""
        self._window: list[int] = []
        """The last tokens of the turn, without special tokens, which have no text. Their text has at least
        `_window_chars` characters, unless the whole turn is shorter."""
        self._text = ""
        """Text of the window when the last token was added."""
        self.has_stopped = False
        """Whether the text has a stop string. The last token that was added completes it."""
        self.add(tokens)

    def add(self, tokens: Sequence[int]) -> int:
        """Add tokens up to the one that completes a stop string. Returns the number of added tokens."""
        for count, token in enumerate(tokens):
            if self.has_stopped:
                return count
            text = self._detokenizer.text([*self._window, token])
            if text == self._text and is_special(
                self._detokenizer, token
            ):  # else many of them would make each token slow
                continue
            self._window.append(token)
            self._text = text
            self.has_stopped = find_stop(text, self._strings) is not None
            if len(text) > 4 * self._window_chars:
                self._shorten()
        return len(tokens)

    def _shorten(self) -> None:
        """Drop about the first half of the window if the rest has enough text, so that the cost of a token is constant
        on average. The cut is never inside a character, which could not be decoded; it is chosen only when the last
        character is complete."""
        text, middle = self._detokenizer.text(self._window), max(1, len(self._window) // 2)
        if text.endswith("\ufffd") and len(text) < FORCED_CUT_FACTOR * self._window_chars:
            return
        for start in range(middle, min(middle + MAX_TOKENS_PER_CHARACTER, len(self._window))):
            suffix = self._detokenizer.text(self._window[start:])
            if len(suffix) < self._window_chars:
                return
            if text.endswith(suffix[MARGIN_CHARS:]):
                del self._window[:start]
                self._text = suffix
                return


class StopCheckMaker:
    """Creates the StopCheck of each request, and loads the tokenizer for the first request with stop strings. model:
    folder or hub name; None: stop strings are ignored."""

    def __init__(self, model: str | None) -> None:
        self._model = model
        self._detokenizer: Detokenizer | None = None
        self._load_lock = threading.Lock()

    def load_tokenizer_for(self, requests: Sequence[Request]) -> None:
        """Load the tokenizer if these requests need it; call it before locking. Raises ConfigError if that fails."""
        if self._model and self._detokenizer is None and any(request.stop.strings for request in requests):
            with self._load_lock:
                if self._detokenizer is None:  # from tokenizer.json if that decodes equally, which is faster
                    self._detokenizer = load_detokenizer(Path(self._model)) or load_chat_tokenizer(self._model)

    def make_check(self, request: Request) -> StopCheck | None:
        """Create the check for a request; None if it has no stop strings."""
        if not (self._model and request.stop.strings):
            return None
        self.load_tokenizer_for([request])
        assert self._detokenizer is not None
        turn_tokens = request.tokens[len(request.tokens) - request.num_current_turn_tokens :]
        return StopCheck(self._detokenizer, request.stop.strings, turn_tokens)
