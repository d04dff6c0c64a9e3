"""Calls to actors: each has a deadline, and an actor that is gone always raises ActorLost.

Without this, a call to a dead actor can hang forever, or fail with OSError, RuntimeError or CancelledError, depending
on the caller and the moment, even before the call is sent; a stopped process never answers. Actor classes are decorated
with `remote_methods`, so that an actor's own OSError or RuntimeError is not mistaken for its loss.

Arguments and results are pickled as a whole, because Dask would pickle each element of a list separately, which costs
six times as much. A result of type bytes is sent as it is. An actor as an argument is sent as its address and key.
Dask's own proxy would create a client in the receiving worker, and send the scheduler two messages per call.
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
"""Marks pickled arguments and results, as the first element of a pair."""
PROBE_S = 1.0
"""Seconds between two probes of the called actor's address, while a call between actors is pending."""
MIN_BYTES_PER_S = 25e6
"""Lowest rate at which a host may read, hash or load, a fifth of gigabit Ethernet; a slower host counts as stuck."""

Class = TypeVar("Class", bound=type)

_within_actor: contextvars.ContextVar[bool] = contextvars.ContextVar("within an actor's method", default=False)


def transfer_timeout_s(call_s: float, num_bytes: int) -> float:
    """Return the timeout of a call that transfers `num_bytes` bytes. call_s: timeout of a short call, seconds."""
    return call_s + num_bytes / MIN_BYTES_PER_S


def remote_methods(cls: Class) -> Class:
    """Class decorator for actors: lets `call_actor` call their public coroutine methods. Errors other than staleflow's
    own arrive as ActorFailed, and so do those of pickling. Direct calls are unchanged."""
    for name, method in list(vars(cls).items()):
        if inspect.iscoroutinefunction(method) and not name.startswith("_"):
            setattr(cls, name, _with_actor_errors(method))
    return cls


def _with_actor_errors(method: Any) -> Any:
    @functools.wraps(method)
    async def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_pickled = args[:1] == (PICKLED,)
        _mark_within_actor()
        try:
            result = await method(self, *(pickle.loads(args[1]) if is_pickled else args), **kwargs)
            return (PICKLED, pickle.dumps(result, 5)) if is_pickled and type(result) is not bytes else result
        except StaleflowError:
            raise
        except Exception as error:
            logger.exception("%s failed", method.__qualname__)
            raise ActorFailed(f"{type(error).__name__}: {error}") from error

    return wrapper


def _mark_within_actor() -> None:
    """Record that the current context runs an actor's method. This is a function because a class from a script is
    pickled with its methods and all global values that they use, but a ContextVar cannot be pickled."""
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
    """Create a RemoteActor from a pickled actor, on the worker that receives it."""
    return RemoteActor(address, key, get_worker().rpc(address))


REDUCERS = {**copyreg.dispatch_table, Actor: lambda actor: (_remote_actor, (actor._address, actor.key))}
"""How arguments are pickled whose class cannot pickle itself, by class; an actor is sent as its address and key."""


def _pickle(args: tuple[Any, ...]) -> bytes:
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, 5)
    pickler.dispatch_table = REDUCERS
    pickler.dump(args)
    return buffer.getvalue()


async def _execute(actor: Actor | RemoteActor, method: str, pickled_args: bytes) -> Any:
    """Call a method of an actor on its worker. Raises the method's errors, and OSError or RuntimeError if the actor is
    gone."""
    if isinstance(actor, RemoteActor):
        return await _send(actor, method, pickled_args)
    status = actor._future.status if actor._future is not None else "finished"
    if status not in ("finished", "pending"):
        raise RuntimeError(f"its worker was lost ({status})")
    # The driver of a submitted job runs in a thread of a worker, and its connections belong to the worker's loop.
    loop = actor._io_loop.asyncio_loop
    if loop is asyncio.get_running_loop():
        return await _send(actor, method, pickled_args)
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_send(actor, method, pickled_args), loop))


async def _send(actor: Actor | RemoteActor, method: str, pickled_args: bytes) -> Any:
    """Call a method of an actor from the loop that the connections belong to; see `_execute`."""
    rpc = actor.rpc if isinstance(actor, RemoteActor) else actor._worker_rpc
    try:
        reply = await rpc.actor_execute(function=method, actor=actor.key, args=[PICKLED, pickled_args], kwargs={})
    except KeyError:  # another process has its address by now
        raise RuntimeError("its worker does not have it") from None
    if reply["status"] != "OK":
        raise reply["exception"]
    return reply["result"]


def _start_call(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start a call that is not cancelled with its caller, since cancelling would wait for the other process, which may
    be stopped."""
    task = asyncio.ensure_future(coroutine)
    # Marks its error as retrieved; a waiting caller raises it.
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    return task


async def _await_result(pending: asyncio.Task[Any], address: str, actor_name: str) -> Any:
    """Wait for a call, which continues if its caller is cancelled, and return its result.

    Args:
        address: Address of the actor if another actor calls it, else empty. It is probed, because Dask would retry for
            30 s.

    Raises:
        ActorLost: Nothing listens at the address.
        RuntimeError: The call itself was cancelled; the caller must not take this for its own cancellation.
    """
    while not (await asyncio.wait({pending}, timeout=PROBE_S if address else None))[0]:
        if await _refuses_connections(address):
            raise ActorLost(f"{actor_name} is gone: nothing listens at {address}", actor_name)
    if pending.cancelled():
        raise RuntimeError("the call was cancelled")
    return pending.result()


async def _refuses_connections(address: str) -> bool:
    """Whether connections to an address are refused, which means that its process is gone. False if that is not known
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


async def call_actor(
    actor: Any, method: str, *args: Any, timeout_s: float, actor_name: str, timeout_setting: str = ""
) -> Any:
    """Call `actor.method(*args)` in another process, and return its result.

    Args:
        timeout_s: Seconds within which the actor must answer.
        actor_name: Name of the actor, for messages.
        timeout_setting: The setting that determines timeout_s, for messages.

    Raises:
        ActorLost: The actor, or one that it called, is gone or does not answer in time.
        ActorFailed: The method, or that of an actor that it called, failed.
        StaleflowError: Other errors of staleflow that the method raised.
        Exception: Arguments cannot be pickled, or a result cannot be unpickled here.
    """
    is_local = not isinstance(actor, Actor | RemoteActor)
    pickled_args = b"" if is_local else _pickle(args)  # its errors are not those of the connection below
    try:
        async with asyncio.timeout(timeout_s):  # wait_for may swallow a cancellation that comes with the answer
            if is_local:
                return await getattr(actor, method)(*args)
            pending = _start_call(_execute(actor, method, pickled_args))
            address = actor.address if isinstance(actor, RemoteActor) else actor._address
            result = await _await_result(pending, address if _within_actor.get() else "", actor_name)
    except ActorFailed as error:
        if error.actor:
            raise
        raise ActorFailed(f"{actor_name} failed: {error}", actor_name) from error
    except ActorLost as error:  # raised by the actor about itself, or about an actor that it called
        error.actor = error.actor or actor_name
        raise
    except StaleflowError:
        raise
    except TimeoutError:
        raise ActorSilent(
            f"{actor_name} did not answer within {timeout_s:g} s"
            + (f" ({timeout_setting})" if timeout_setting else ""),
            actor_name,
        ) from None
    except (OSError, RuntimeError) as error:
        raise ActorLost(f"{actor_name} is gone: {error}", actor_name) from error
    return result if type(result) is bytes else pickle.loads(result[1])
