"""Worker processes and actors inside the process of the test, with faults scripted per call.

`InProcessWorkers` keeps the contract of pipeline/processes/worker_protocol.py as a Dask cluster does: an actor is
called through a proxy; a call takes a moment to arrive and its result a moment to come back; a caller that stops
waiting does not stop the method; a call to a process that died fails with OSError in flight and with RuntimeError
later, or with OSError again if an actor made it. Arguments and results are copied, so that nothing is shared by
accident.
"""

from __future__ import annotations

import asyncio
import contextvars
import pickle
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from staleflow.pipeline.processes.worker_protocol import NoFreeWorker, PlacedActor
from staleflow.stores.errors import ActorLost, ActorSilent

TRAVEL_S = 0.001
"""Seconds a call takes to arrive, and its result to come back."""
START_S = 50.0
"""Seconds until a new actor in a stopped process counts as lost."""
CREATE_S = 1.0
"""Seconds until a new actor is ready."""

Moment = Literal["before", "after"]
_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("inside an actor", default=False)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault at the n-th call of a method of an actor, counted from 1; at every call if `nth` is 0. Calls to
    replacements count too if the name has no replacement suffix. "__init__" is the creation of the actor.

    dies, silent: the process dies, or never replies to this call, before or after the method ran. late_s: delay of the
    result. error: raised instead of calling. change: applied to the result. twice: the method is called again, and the
    second result is returned. act: called when the call arrives.
    """

    actor: str
    method: str
    nth: int = 1
    dies: Moment | None = None
    silent: Moment | None = None
    late_s: float = 0.0
    error: Exception | None = None
    change: Callable[[Any], Any] | None = None
    twice: bool = False
    act: Callable[[], None] | None = None


NOTHING = Fault(actor="", method="")
"""The default: a call without a fault."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A recorded call."""

    at_s: float
    actor: str
    method: str
    args: tuple[Any, ...]


@dataclass(eq=False)
class Process:
    """A simulated worker process; its actors end with it."""

    address: str
    host: str
    dead: bool = False
    stopped: bool = False
    unanswered: list[tuple[asyncio.Future[Any], Any, Exception | None]] = field(default_factory=list)
    """Results held back while the process is stopped."""
    running: dict[asyncio.Task[None], None] = field(default_factory=dict)
    """Running methods in call order, so that a run is reproducible."""
    waiting: dict[asyncio.Future[Any], None] = field(default_factory=dict)
    """Results with a waiting caller."""
    actors: list[Any] = field(default_factory=list)

    def tasks(self) -> list[asyncio.Task[Any]]:
        """Return the tasks in it: methods, and tasks that its actors started."""
        own = [task for task in asyncio.all_tasks() if _task_object(task) in self.actors]
        return [*self.running, *sorted(own, key=asyncio.Task.get_name)]

    async def running_again(self) -> None:
        """Wait while the process is stopped."""
        while self.stopped:
            await asyncio.sleep(0.1)

    def die(self) -> None:
        """End it as `kill -9` does."""
        self.dead = True
        for actor in self.actors:
            getattr(actor, "process_died", lambda: None)()
        for task in self.tasks():
            task.cancel()
        for answer in list(self.waiting):
            if not answer.done():
                answer.set_exception(OSError("connection closed"))


class Proxy:
    """An actor proxy as used by callers."""

    def __init__(self, workers: InProcessWorkers, name: str, process: Process, actor: Any) -> None:
        self._workers, self._name, self._process, self._actor = workers, name, process, actor

    def __getattr__(self, method: str) -> Callable[..., asyncio.Future[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)

        def call(*args: Any) -> asyncio.Future[Any]:
            return self._workers.carry(self._name, self._process, self._actor, method, args)

        return call

    def __reduce__(self) -> tuple[Any, ...]:
        _PROXIES[id(self)] = self
        return _proxy, (id(self),)


_PROXIES: weakref.WeakValueDictionary[int, Proxy] = weakref.WeakValueDictionary()
"""Proxies that have been arguments or results, by id."""


def _proxy(key: int) -> Proxy:
    """Return the proxy itself: a copy of a message has the same one."""
    return _PROXIES[key]


def _copy(message: Any) -> Any:
    """Copy arguments or a result as sending them would."""
    return pickle.loads(pickle.dumps(message))


class InProcessWorkers:
    """Workers with one process per actor, shared only on request. actors: factories by requested class. hosts:
    processes are distributed over them in turn."""

    def __init__(
        self, actors: dict[type[Any], Callable[..., Any]], faults: Sequence[Fault] = (), hosts: Sequence[str] = ("one",)
    ) -> None:
        self._actors = actors
        self._faults = faults
        self._counts: dict[tuple[str, str], int] = {}
        self._hosts = hosts
        self._processes: list[Process] = []
        self._objects: dict[str, Any] = {}
        self.placed: dict[str, PlacedActor] = {}
        self.names: list[str] = []
        """All actors ever placed."""
        self.calls: list[Call] = []
        self.num_spare = 0
        """Number of workers without actors; each placed actor takes one."""
        self.nanny = True
        """Whether the process of a lost actor is killed; if not, it may continue and reply late."""

    # -- the contract --------------------------------------------------------------------------------------------

    async def place(
        self,
        name: str,
        role: str,
        cls: type[Any],
        *args: Any,
        before_creation: Callable[[], Awaitable[None]] | None = None,
    ) -> PlacedActor:
        self.num_spare = max(0, self.num_spare - 1)
        number = len(self._processes)
        process = Process(address=f"process-{number}", host=self._hosts[number % len(self._hosts)])
        self._processes.append(process)
        return await self._create(process, name, role, cls, args, before_creation)

    async def place_beside(self, actor: PlacedActor, name: str, cls: type[Any], *args: Any) -> PlacedActor:
        return await self._create(actor.future, name, "parameters", cls, args)

    def release_actor(self, name: str) -> None:
        del self.placed[name]

    async def return_light_worker(self, name: str) -> None:
        self.placed.pop(name).future.die()

    async def has_spare_worker(self) -> bool:
        return self.num_spare > 0

    async def retire(self, name: str) -> None:
        process = self.placed[name].future
        for other in [p for p in self.placed.values() if p.future is process]:
            del self.placed[other.name]
        process.die()

    def mark_lost(self, name: str) -> None:
        lost = self.placed.pop(name)
        neighbors = [p for p in self.placed.values() if p.future is lost.future]
        for other in neighbors:
            if other.role == "parameters":
                del self.placed[other.name]
        if self.nanny and all(p.role == "parameters" for p in neighbors):
            lost.future.die()

    # -- for tests -----------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """End the process of an actor at once."""
        self.placed[name].future.die()

    def stop(self, name: str) -> None:
        """Stop the process of an actor as SIGSTOP does: it replies to no call."""
        self.placed[name].future.stopped = True

    def go_on(self, name: str) -> None:
        """Continue a stopped process as SIGCONT does: it then replies to pending calls."""
        self.continue_process(self.placed[name].future)

    def continue_process(self, process: Process) -> None:
        """Like `go_on`, also for a process whose actors have been replaced."""
        process.stopped = False
        unanswered, process.unanswered = process.unanswered, []
        for answer, result, error in unanswered:
            _put(answer, result, error)

    def actor(self, name: str) -> Any:
        """Return the object of an actor, also of a lost one."""
        return self._objects[name]

    def methods(self, actor: str) -> list[str]:
        """Return the calls to an actor in order."""
        return [c.method for c in self.calls if c.actor == actor]

    async def end(self) -> None:
        """End all processes."""
        running = [task for process in self._processes for task in process.tasks()]
        for process in self._processes:
            process.die()
        await asyncio.gather(*running, return_exceptions=True)

    # -- calls ---------------------------------------------------------------------------------------------------

    async def _create(
        self,
        process: Process,
        name: str,
        role: str,
        cls: type[Any],
        args: tuple[Any, ...],
        before_creation: Callable[[], Awaitable[None]] | None = None,
    ) -> PlacedActor:
        assert role != "rollout" or name not in self.names, f"{name} was another's name: its late answers would match"
        fault = self._fault(name, "__init__")
        if before_creation is not None and not isinstance(fault.error, NoFreeWorker):
            await before_creation()
        await asyncio.sleep(CREATE_S + fault.late_s)
        if process.stopped:
            await asyncio.sleep(START_S)
            raise ActorSilent(f"{name} was not ready on {process.address}", name)
        if fault.act is not None:
            fault.act()
        if fault.error is not None:
            raise fault.error
        self.names.append(name)
        if fault.dies or fault.silent:
            raise ActorLost(f"{name} could not start on {process.address}", name)
        actor = self._actors[cls](process.host, *_copy(args))
        self._objects[name] = actor
        process.actors.append(actor)
        proxy = Proxy(self, name, process, actor)
        placed = PlacedActor(
            name=name, role=role, worker=process.address, address=process.address, host=process.host, actor=proxy,
            future=process,
        )  # fmt: skip
        self.placed[name] = placed
        return placed

    def carry(self, name: str, process: Process, actor: Any, method: str, args: tuple[Any, ...]) -> asyncio.Future[Any]:
        """Run a method in a process; returns the future of its result."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self.calls.append(Call(at_s=loop.time(), actor=name, method=method, args=args))
        if process.dead:
            inside = _inside.get()
            answer.set_exception(
                OSError("refused") if inside else RuntimeError("the worker holding this actor was lost")
            )
            return answer
        process.waiting[answer] = None
        answer.add_done_callback(lambda done: process.waiting.pop(done, None))
        serving = self._serve(process, actor, method, _copy(args), self._fault(name, method), answer)
        task = loop.create_task(serving, name=f"{name}.{method}")
        process.running[task] = None
        task.add_done_callback(lambda done: process.running.pop(done, None))
        return answer

    async def _serve(
        self,
        process: Process,
        actor: Any,
        method: str,
        args: tuple[Any, ...],
        fault: Fault,
        answer: asyncio.Future[Any],
    ) -> None:
        _inside.set(True)
        await asyncio.sleep(TRAVEL_S)
        if fault.act is not None:
            fault.act()
        await process.running_again()
        if fault.dies == "before":
            process.die()
        if fault.error is not None:
            _put(answer, None, fault.error)
        if fault.error is not None or "before" in (fault.dies, fault.silent):
            return
        result, error = await self._outcome(actor, method, args)
        if fault.twice:
            result, error = await self._outcome(actor, method, args)
        if fault.dies == "after":
            process.die()
        if "after" in (fault.dies, fault.silent):
            return
        if fault.change is not None:
            result = fault.change(result)
        await asyncio.sleep(fault.late_s + TRAVEL_S)
        if process.stopped:
            process.unanswered.append((answer, _copy(result), error))
            return
        _put(answer, _copy(result), error)

    async def _outcome(self, actor: Any, method: str, args: tuple[Any, ...]) -> tuple[Any, Exception | None]:
        try:
            return await getattr(actor, method)(*args), None
        except Exception as error:  # noqa: BLE001  passed on to the caller
            return None, error

    def _fault(self, name: str, method: str) -> Fault:
        plain = name.partition(".")[0]
        for key in dict.fromkeys((name, plain)):
            self._counts[key, method] = self._counts.get((key, method), 0) + 1
        for fault in self._faults:
            if (
                fault.method == method
                and fault.actor in (name, plain)
                and fault.nth in (0, self._counts[fault.actor, method])
            ):
                return fault
        return NOTHING


def _task_object(task: asyncio.Task[Any]) -> Any:
    """Return the object whose method a task runs."""
    frame = getattr(task.get_coro(), "cr_frame", None)
    return None if frame is None else frame.f_locals.get("self")


def _put(answer: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    """Set a result if the future is still pending."""
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)
