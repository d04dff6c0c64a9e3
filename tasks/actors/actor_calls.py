"""Calls to actors: each has a deadline, and an actor that is gone always raises ActorLost.

Without this, a call to a dead actor can hang forever, or fail with OSError, RuntimeError or CancelledError, depending
on the caller and the moment, even before the call is sent; a stopped process just never answers. So that an actor's own
OSError or RuntimeError is not taken for its loss, classes of actors are decorated with `remote_methods`.

Arguments and results travel pickled as one piece: Dask would pickle each element of a list by itself, which costs six
times as much. A result that is bytes travels as it is, once. An actor that is handed to another travels as its address
and key. Dask's own proxy would make a client of the worker that receives it, and two messages to the scheduler of each
call: that the key is wanted, and that it is not any more.
"""

from __future__ import annotations

import asyncio
import contextvars
import copyreg
import functools
import inspect
import io
import logging
import pickle
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from distributed import Actor, get_worker
from distributed.comm.addressing import parse_host_port

from staleflow.stores.errors import ActorFailed, ActorLost, ActorSilent, StaleflowError

logger = logging.getLogger(__name__)

PICKLED = "staleflow.pickled"
"""Marks arguments and results that are pickled: the first element of the pair."""
PROBE_S = 1.0
"""Seconds between two probes of the address of an actor that has not answered another actor yet."""
MIN_BYTES_PER_S = 25e6
"""The slowest rate at which a host reads, hashes or loads, a fifth of what gigabit Ethernet carries: anything slower
counts as stuck."""

Class = TypeVar("Class", bound=type)

_within_actor: contextvars.ContextVar[bool] = contextvars.ContextVar("within an actor's method", default=False)


def timeout_for(call_s: float, num_bytes: int) -> float:
    """Return the timeout of a call that transfers `num_bytes` bytes. call_s: timeout of a short call, seconds."""
    return call_s + num_bytes / MIN_BYTES_PER_S


def remote_methods(cls: Class) -> Class:
    """Class decorator for actors: lets `call_actor` call their public coroutine methods. Errors other than staleflow's
    own arrive as ActorFailed. Direct calls are unchanged."""
    for name, method in list(vars(cls).items()):
        if inspect.iscoroutinefunction(method) and not name.startswith("_"):
            setattr(cls, name, _answering(method))
    return cls


def _answering(method: Any) -> Any:
    @functools.wraps(method)
    async def answering(self: Any, *args: Any, **kwargs: Any) -> Any:
        pickled = args[:1] == (PICKLED,)
        _enter()
        try:
            result = await method(self, *(pickle.loads(args[1]) if pickled else args), **kwargs)
        except StaleflowError:
            raise
        except Exception as error:
            logger.exception("%s failed", method.__qualname__)
            raise ActorFailed(f"{type(error).__name__}: {error}") from error
        return (PICKLED, pickle.dumps(result, 5)) if pickled and type(result) is not bytes else result

    return answering


def _enter() -> None:
    """Note that the code that runs from here on is an actor's. A function, since classes from a script are pickled with
    their methods, and these with all that they name but functions."""
    _within_actor.set(True)


@dataclass(frozen=True, slots=True)
class RemoteActor:
    """A reference to an actor in another process. rpc: Dask's RPC to the worker that runs it."""

    address: str
    key: str
    rpc: Any

    def __reduce__(self) -> tuple[Any, ...]:
        return _remote_actor, (self.address, self.key)


def _remote_actor(address: str, key: str) -> RemoteActor:
    """Make a RemoteActor of a pickled actor, on the worker that receives it."""
    return RemoteActor(address, key, get_worker().rpc(address))


REDUCERS = {**copyreg.dispatch_table, Actor: lambda actor: (_remote_actor, (actor._address, actor.key))}
"""How arguments are pickled that have no pickling of their own."""


def _packed(args: tuple[Any, ...]) -> bytes:
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, 5)
    pickler.dispatch_table = REDUCERS
    pickler.dump(args)
    return buffer.getvalue()


async def _execute(actor: Actor | RemoteActor, method: str, packed: bytes) -> Any:
    """Call a method of an actor on its worker. Raises what the method raises; OSError or RuntimeError if it is gone."""
    if isinstance(actor, RemoteActor):
        return await _sent(actor, method, packed)
    status = actor._future.status if actor._future is not None else "finished"
    if status not in ("finished", "pending"):
        raise RuntimeError(f"its worker was lost ({status})")
    # A submitted job's driver is in a thread of a worker, whose connections belong to that one's loop.
    loop = actor._io_loop.asyncio_loop
    if loop is asyncio.get_running_loop():
        return await _sent(actor, method, packed)
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_sent(actor, method, packed), loop))


async def _sent(actor: Actor | RemoteActor, method: str, packed: bytes) -> Any:
    """Call a method of an actor from the loop that the connections belong to; see `_execute`."""
    rpc = actor.rpc if isinstance(actor, RemoteActor) else actor._worker_rpc
    try:
        answer = await rpc.actor_execute(function=method, actor=actor.key, args=[PICKLED, packed], kwargs={})
    except KeyError:  # another process has its address by now
        raise RuntimeError("its worker does not have it") from None
    if answer["status"] != "OK":
        raise answer["exception"]
    return answer["result"]


def _begun(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start a call that outlives its caller: cancelling it would wait for the other side, which may be stopped."""

    def heard(task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            task.exception()  # whoever waits for it raises it

    task = asyncio.ensure_future(coroutine)
    task.add_done_callback(heard)
    return task


async def _ended(pending: asyncio.Task[Any], address: str, actor_name: str) -> Any:
    """Return the result of a call, which goes on if its caller is cancelled. address: of the actor, if another actor
    calls it: once nothing listens there, ActorLost is raised; Dask would retry for 30 s. Raises RuntimeError if the
    call itself was cancelled, so that the caller does not take it as its own cancellation."""
    while not (await asyncio.wait({pending}, timeout=PROBE_S if address else None))[0]:
        if await _refused(address):
            raise ActorLost(f"{actor_name} is gone: nothing listens at {address}", actor_name)
    if pending.cancelled():
        raise RuntimeError("the call was cancelled")
    return pending.result()


async def _refused(address: str) -> bool:
    """Return True if the machine at an address refuses connections: its process is gone. False if that does not show
    within PROBE_S."""
    try:
        host, port = parse_host_port(address)
        async with asyncio.timeout(PROBE_S):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError, TimeoutError):  # another kind of address, such as one within this process
        return False
    writer.transport.abort()
    return False


async def call_actor(actor: Any, method: str, *args: Any, timeout_s: float, actor_name: str, limit: str = "") -> Any:
    """Return the result of `actor.method(*args)`, called on another process.

    Args:
        timeout_s: seconds within which it must answer.
        actor_name: the actor, in messages.
        limit: the knob that sets timeout_s, in messages.

    Raises:
        ActorLost: the actor is gone or does not answer in time; or an actor that it called is.
        ActorFailed: the method failed, or that of an actor that it called.
        StaleflowError: what the method itself raised of our errors.
    """
    try:
        async with asyncio.timeout(timeout_s):  # wait_for may swallow a cancellation that comes with the answer
            if not isinstance(actor, Actor | RemoteActor):  # it is in this process
                return await getattr(actor, method)(*args)
            pending = _begun(_execute(actor, method, _packed(args)))
            address = actor.address if isinstance(actor, RemoteActor) else actor._address
            result = await _ended(pending, address if _within_actor.get() else "", actor_name)
            return result if type(result) is bytes else pickle.loads(result[1])
    except ActorFailed as error:
        if error.actor:
            raise
        raise ActorFailed(f"{actor_name} failed: {error}", actor_name) from error
    except ActorLost as error:  # by its own account, or an actor that it called
        error.actor = error.actor or actor_name
        raise
    except StaleflowError:
        raise
    except TimeoutError:
        raise ActorSilent(
            f"{actor_name} did not answer within {timeout_s:g} s" + (f" ({limit})" if limit else ""), actor_name
        ) from None
    except (OSError, RuntimeError) as error:
        raise ActorLost(f"{actor_name} is gone: {error}", actor_name) from error
