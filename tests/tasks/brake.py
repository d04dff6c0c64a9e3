"""A brake for engines under test: they sample until a request has so many tokens, and not past that before a test has
done with it what it is about. Without it a test had to look while a request runs, and on a busy machine came too late.

An engine's own thread brakes: that of transformers before each pass, that of the emulated engine at each look at its
clock. Other engines have no brake; there a test that comes too late fails at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from staleflow.tasks.engines.base import Engine, Request


class Brake:
    """That of the engines of this process, which one test uses at a time. Off until `on` is called."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._least: int | None = None
        self._prior = 0
        self._looker = 0
        """The thread of the test."""
        self._earlier: dict[int, set[str]] | None = None
        """By loop: requests that it had before those that are submitted now; None: all count."""

    def on(self, least: int, prior: int | None = None) -> None:
        """Brake at the first request that has this many tokens, of those that are submitted from now on. prior: tokens
        that were sampled before that; None: they have been submitted, with as many as was said then."""
        with self._changed:
            self._earlier = None if prior is None else {}
            self._prior = self._prior if prior is None else prior
            self._least, self._looker = least - self._prior, threading.get_ident()
            self._changed.notify_all()

    def off(self) -> None:
        """Let everything run."""
        with self._changed:
            self._least = None
            self._changed.notify_all()

    def before_pass(self, loop: int, sampled: dict[str, int], goes_on: Callable[[], bool]) -> None:
        """Wait, in an engine's thread, while it is on and a request has enough tokens. loop: which of them asks.
        sampled: tokens by request. goes_on: whether it is asked to pause or to end, which it does before the pass."""
        with self._changed:
            while self._least is not None and self._most(loop, sampled) >= self._least and not goes_on():
                self._changed.wait(0.001)

    def _most(self, loop: int, sampled: dict[str, int]) -> int:
        earlier: set[str] = set()
        if self._earlier is not None:  # what was stopped by now is among them until the loop looks
            earlier = self._earlier.setdefault(loop, set(sampled))
        return max((count for key, count in sampled.items() if key not in earlier), default=0)

    @property
    def stops_time(self) -> bool:
        """Whether the time of an emulated engine stands still for this thread: it passes as the test looks at it."""
        return self._least is not None and threading.get_ident() != self._looker


BRAKE = Brake()


@pytest.fixture(autouse=True)
def brake() -> Iterator[None]:
    """Off before and after each test of a module that imports this."""
    BRAKE.off()
    yield
    BRAKE.off()


@pytest.fixture(autouse=True)
def brake_of_transformers(brake: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the loops of transformers brake, in tests of a module that imports this."""
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

    prepare = ContinuousBatchProcessor.prepare_next_batch

    def braked(self: Any) -> Any:
        status = self.background_thread_status
        running = self.scheduler.active_requests
        BRAKE.before_pass(
            id(self),
            {key: len(state.generated_tokens) for key, state in running.items()},
            lambda: status.is_pause_requested() or status.local_status != status.DONT_STOP,
        )
        return prepare(self)

    monkeypatch.setattr(ContinuousBatchProcessor, "prepare_next_batch", braked)


def check_that_it_brakes(engine: Engine, requests: Sequence[Request], sampled: Callable[[], object]) -> None:
    """An engine that runs requests under the brake goes no further, however late a test comes. sampled: what it has."""
    before = sampled()
    threading.Event().wait(0.2)
    assert sampled() == before
    stopped = engine.interrupt([one.trajectory for one in requests])
    assert len(stopped) == len(requests)
