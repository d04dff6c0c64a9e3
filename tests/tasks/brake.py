"""A brake for engines under test: they sample until a request has so many tokens, and not past that before a test has
done with it what it is about. Without it a test had to look while a request runs, and on a busy machine came too late.

An engine's own thread brakes: that of transformers before each pass, that of the emulated engine at each look at its
clock. Other engines have no brake; there a test that comes too late fails at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

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

    def on(self, least: int, prior: int | None = None) -> None:
        """Brake at the first request that has this many tokens. prior: that were sampled before it was submitted; None:
        as many as was said before."""
        with self._changed:
            self._prior = self._prior if prior is None else prior
            self._least, self._looker = least - self._prior, threading.get_ident()
            self._changed.notify_all()

    def off(self) -> None:
        """Let everything run."""
        with self._changed:
            self._least = None
            self._changed.notify_all()

    def before_pass(self, sampled: int, goes_on: Callable[[], bool]) -> bool:
        """Wait, in an engine's thread, while it is on and a request has enough tokens, of which the longest has so
        many. goes_on: whether the engine is asked to do something else first. Returns whether it is."""
        with self._changed:
            while self._least is not None and sampled >= self._least:
                if goes_on():
                    return True
                self._changed.wait(0.001)
        return False

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
    """Have the loop of the engine on transformers brake, in tests of a module that imports this."""
    from staleflow.tasks.engines.transformers import TransformersEngine

    run_calls = TransformersEngine._run_calls

    def braked(self: TransformersEngine) -> bool:
        while run_calls(self):
            sampled = max((running.num_sampled for running in self._requests), default=0)
            if not BRAKE.before_pass(sampled, lambda: bool(self._calls or self._closing)):
                return True
        return False

    monkeypatch.setattr(TransformersEngine, "_run_calls", braked)


def check_that_it_brakes(engine: Engine, requests: Sequence[Request], sampled: Callable[[], object]) -> None:
    """An engine that runs requests under the brake goes no further, however late a test comes. sampled: what it has."""
    before = sampled()
    threading.Event().wait(0.2)
    assert sampled() == before
    stopped = engine.interrupt([request.trajectory for request in requests])
    assert len(stopped) == len(requests)
