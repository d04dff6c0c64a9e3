"""Pauses engines under test once a request has a given number of tokens, until the test has checked or changed the
request. Without it, requests often finished before the test looked at them.

The thread of the engine waits: that of the transformers engine before each pass, that of the emulated engine when it
reads its clock. Other engines have no brake; a test that looks too late fails at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from staleflow.tasks.engines.base import Engine, Request


class Brake:
    """Pauses the engines of this process. Off until `on` is called; one test uses it at a time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._least: int | None = None
        self._prior = 0
        self._looker = 0
        """Id of the thread of the test."""

    def on(self, least: int, prior: int | None = None) -> None:
        """Pause at the first request that has this many tokens. prior: tokens sampled before it was submitted; None: as
        in the previous call."""
        with self._changed:
            self._prior = self._prior if prior is None else prior
            self._least, self._looker = least - self._prior, threading.get_ident()
            self._changed.notify_all()

    def off(self) -> None:
        """Let all engines run."""
        with self._changed:
            self._least = None
            self._changed.notify_all()

    def before_pass(self, sampled: int, goes_on: Callable[[], bool]) -> bool:
        """Called by an engine thread before each pass: blocks while the brake is on and a request has enough tokens.
        sampled: tokens of the longest request. goes_on: returns whether the engine has calls to handle first. Returns
        True in that case, and False once the pass may run."""
        with self._changed:
            while self._least is not None and sampled >= self._least:
                if goes_on():
                    return True
                self._changed.wait(0.001)
        return False

    @property
    def stops_time(self) -> bool:
        """Return whether the clock of an emulated engine is stopped for this thread."""
        return self._least is not None and threading.get_ident() != self._looker


BRAKE = Brake()


@pytest.fixture(autouse=True)
def brake() -> Iterator[None]:
    """Fixture that turns the brake off before and after each test of a module that imports it."""
    BRAKE.off()
    yield
    BRAKE.off()


@pytest.fixture(autouse=True)
def brake_of_transformers(brake: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixture that adds the brake to the loop of the transformers engine for tests of a module that imports it."""
    from staleflow.tasks.engines.transformers import TransformersEngine

    run_calls = TransformersEngine._run_calls

    def braked(self: TransformersEngine) -> bool:
        while run_calls(self):
            sampled = max((running.num_sampled for running in self._requests), default=0)
            if not BRAKE.before_pass(sampled, lambda: bool(self._calls or self._is_closing)):
                return True
        return False

    monkeypatch.setattr(TransformersEngine, "_run_calls", braked)


def check_brake(engine: Engine, requests: Sequence[Request], sampled: Callable[[], object]) -> None:
    """Check that an engine under the brake makes no progress, however late the test looks. sampled: returns the
    progress."""
    before = sampled()
    threading.Event().wait(0.2)
    assert sampled() == before
    stopped = engine.interrupt([request.trajectory for request in requests])
    assert len(stopped) == len(requests)
