"""An asyncio event loop whose clock jumps to the next timer when no task is ready.

A timeout of a minute takes microseconds, and the order of events depends on the program only. Invariants:
- Time passes only while every task waits, and then exactly up to the earliest timer.
- A loop in which every task waits and no timer runs would wait for ever: `run` raises Deadlock, naming the tasks and
  the lines they wait on. It also does if tasks run without advancing time, or time exceeds LIMIT_S.
- Tasks that outlive the coroutine of `run` raise LeftOver.
- Calls given to an executor run in the loop's own thread, one at a time per executor, in order. They take no time,
  unless they return a coroutine: then they take as long as it does. Like a thread, a call may outlive its caller.
"""

from __future__ import annotations

import asyncio
import inspect
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")

TURNS = 20_000
"""Number of loop iterations without time passing that count as endless: a run of thousands of events needs far
fewer."""

LIMIT_S = 600.0
"""Virtual seconds after which a run counts as endless."""


class Deadlock(AssertionError):
    """No task can proceed, or tasks run for ever without advancing time."""


class LeftOver(AssertionError):
    """Tasks outlived the coroutine that was run."""


class _JumpingSelector(selectors.SelectSelector):
    """A selector that advances virtual time where the loop would sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.turns = 0
        """Number of loop iterations since time last passed."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = [] if timeout == 0 else super().select(0)  # callbacks are ready: files are looked at before time passes
        if timeout is None and not ready:
            raise Deadlock("every task waits and no timer runs")
        if timeout:
            self.now_s += timeout
            self.turns = 0
        if self.now_s > LIMIT_S:
            self.now_s = 0.0  # for the code that ends the tasks
            raise Deadlock(f"no end after {LIMIT_S:g} s")
        self.turns += 1
        if self.turns > TURNS:
            raise Deadlock(f"{TURNS} turns at {self.now_s:g} s and no end")
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """The event loop described in the module docstring."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._queues: dict[int, asyncio.Lock] = {}
        self.threads: set[asyncio.Task[Any]] = set()
        """Running calls of the executors."""

    def begin_anew(self) -> None:
        """Restart the count of iterations after a deadlock."""
        self._jumping.turns = 0

    def time(self) -> float:
        return self._jumping.now_s

    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]  # may return an awaitable
        """Run a call; cancelling the returned future does not cancel the call, as with threads."""

        async def work() -> Any:
            async with self._queues.setdefault(id(executor), asyncio.Lock()):
                result = func(*args)
                return await result if inspect.isawaitable(result) else result

        async def alone() -> Any:
            result = func(*args)
            return await result if inspect.isawaitable(result) else result

        task = self.create_task(alone() if executor is None else work(), name="executor")
        self.threads.add(task)
        task.add_done_callback(self.threads.discard)
        return asyncio.shield(task)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time starting at 0."""
    loop = VirtualTimeLoop()
    try:
        result = loop.run_until_complete(main)
        _cancel(loop, set(loop.threads))
        if asyncio.all_tasks(loop):
            raise LeftOver(f"still there when the run had ended:\n{_waiting(loop)}")
        return result
    except Deadlock as deadlock:
        raise Deadlock(f"{deadlock}:\n{_waiting(loop)}") from None
    finally:
        _cancel(loop, asyncio.all_tasks(loop))
        loop.close()


def _waiting(loop: VirtualTimeLoop) -> str:
    """Return the unfinished tasks and the line each waits on."""
    return "\n".join(f"  {task.get_name()}: {_where(task)}" for task in asyncio.all_tasks(loop))


def _where(task: asyncio.Task[Any]) -> str:
    coroutine: Any = task.get_coro()
    calls = []
    while getattr(coroutine, "cr_frame", None) is not None:
        calls.append(f"{coroutine.__qualname__}:{coroutine.cr_frame.f_lineno}")
        coroutine = coroutine.cr_await
    return " > ".join(calls)


def _cancel(loop: VirtualTimeLoop, tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    loop.begin_anew()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=60))
