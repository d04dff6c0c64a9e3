"""What a rollout engine must do. One conformance suite (tests/tasks/engine_conformance.py) runs on every engine.

An engine samples continuations of token ids. Every sampled token comes back with its logprob under the sampling policy
and the version of that policy. Requests are named by (trajectory, epoch); an engine never sees text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stores.trajectory import FinishReason, PolicyVersion, Segment, TrajectoryId


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Sample up to `max_new_tokens` after `tokens` (the prompt and what was sampled before)."""

    trajectory: TrajectoryId
    epoch: int
    tokens: tuple[int, ...]
    max_new_tokens: int
    num_prior: int = 0
    """How many of `tokens` were sampled before, on this or another instance."""
    greedy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A request ended by itself. One segment for each version it was sampled under."""

    trajectory: TrajectoryId
    epoch: int
    segments: tuple[Segment, ...]
    finish: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The engine cannot go on with a request."""

    trajectory: TrajectoryId
    epoch: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What an engine is doing. progress: (trajectory, tokens sampled in all). waiting: of those that run, how many have
    no place in its batch now. preemptions: since start, for want of KV memory."""

    version: PolicyVersion
    running: int
    kv_tokens: int
    busy_s: float
    """Seconds since start in which it had at least one request."""
    tokens_sampled: int
    progress: tuple[tuple[TrajectoryId, int], ...]
    waiting: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Weights are in place. fingerprint: of what the engine holds now, not of what it read; empty if it cannot tell.
    elapsed_s: the load in all; stalled_s: how long decoding stood still for it. probe: see Engine.logprobs."""

    version: PolicyVersion
    fingerprint: str
    elapsed_s: float
    stalled_s: float
    probe: tuple[float, ...] = ()


class Engine(Protocol):
    """All methods may be called from one control thread while another waits in `events`. Once decoding has ended, each
    of them raises ActorLost; while it only stands still, `events` and `load_statistics` answer as ever."""

    @property
    def version(self) -> PolicyVersion: ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Start sampling. Returns at once. Asked twice, it samples once; a newer epoch replaces an older one."""
        ...

    def interrupt(self, trajectories: Sequence[TrajectoryId]) -> list[Sampled]:
        """Stop these and give back what they have, finish UNFINISHED; at most one decode step later. Those that ended
        by themselves meanwhile are left out: their event tells."""
        ...

    def abort(self, trajectories: Sequence[TrajectoryId]) -> None:
        """Stop these and forget them. Unknown ones are ignored."""
        ...

    def load(self, version: PolicyVersion, weights: Path) -> Loaded:
        """Put new weights in place. Requests that run continue under them with the tokens they have, re-prefilled."""
        ...

    def events(self, timeout_s: float) -> list[Sampled | Failed]:
        """What ended since the last call; waits up to `timeout_s` for something."""
        ...

    def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Of tokens[1:], nats, each given all before it, at temperature 1, under the weights in place. What runs goes
        on, a decode step later at most."""
        ...

    def load_statistics(self) -> EngineLoad: ...

    def close(self) -> None: ...
