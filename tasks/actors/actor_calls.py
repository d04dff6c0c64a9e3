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
"""Before what is pickled, in arguments and results."""
LOOK_S = 1.0
"""Seconds after which an actor that waits for another's answer looks whether that one's process is there."""
LEAST_BYTES_PER_S = 25e6
"""Bytes a second that a host reads, hashes or loads at least, a fifth of what gigabit Ethernet carries: what is slower
counts as stuck."""

Class = TypeVar("Class", bound=type)

_within_actor: contextvars.ContextVar[bool] = contextvars.ContextVar("within an actor's method", default=False)


def within(call_s: float, num_bytes: int) -> float:
    """Seconds that work on so many bytes may take, if short calls are answered within call_s."""
    return call_s + num_bytes / LEAST_BYTES_PER_S


def remote_methods(cls: Class) -> Class:
    """Class decorator: public coroutine methods understand `call`, and raise errors that are not ours as ActorFailed.
    Called directly they are as they were written."""
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
    """Note that what follows is an actor's. A function, since classes from a script are pickled with their methods, and
    these with all that they name but functions."""
    _within_actor.set(True)


@dataclass(frozen=True, slots=True)
class RemoteActor:
    """An actor of another process, as it is known to one that it was handed to. rpc: calls of the worker it is on."""

    address: str
    key: str
    rpc: Any

    def __reduce__(self) -> tuple[Any, ...]:
        return _remote_actor, (self.address, self.key)


def _remote_actor(address: str, key: str) -> RemoteActor:
    """What has become of an actor's proxy on the worker that it has come to."""
    return RemoteActor(address, key, get_worker().rpc(address))


REDUCERS = {**copyreg.dispatch_table, Actor: lambda actor: (_remote_actor, (actor._address, actor.key))}
"""How arguments are pickled, where that is not by their own methods."""


def _packed(args: tuple[Any, ...]) -> bytes:
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, 5)
    pickler.dispatch_table = REDUCERS
    pickler.dump(args)
    return buffer.getvalue()


async def _execute(actor: Actor | RemoteActor, method: str, packed: bytes) -> Any:
    """Have an actor's worker call a method. Raises what the method raises; OSError or RuntimeError if it is gone."""
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
    """`_execute`, on the loop that the connections belong to."""
    rpc = actor.rpc if isinstance(actor, RemoteActor) else actor._worker_rpc
    try:
        answer = await rpc.actor_execute(function=method, actor=actor.key, args=[PICKLED, packed], kwargs={})
    except KeyError:  # another process has its address by now
        raise RuntimeError("its worker does not have it") from None
    if answer["status"] != "OK":
        raise answer["exception"]
    return answer["result"]


def _begun(asked: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A call that goes on although nobody waits for it any more: ending it would wait for the other side, which may
    have been stopped."""

    def heard(task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            task.exception()  # whoever waits for it raises it

    task = asyncio.ensure_future(asked)
    task.add_done_callback(heard)
    return task


async def _watched(asked: asyncio.Task[Any], address: str, who: str) -> Any:
    """The result of an actor's call to another. Dask would try for half a minute to connect; so it is looked whether
    there is anybody. Raises ActorLost if not."""
    while not (await asyncio.wait({asked}, timeout=LOOK_S))[0]:
        if await _refused(address):
            raise ActorLost(f"{who} is gone: nothing listens at {address}", who)
    return _answer(asked)


async def _waited(asked: asyncio.Task[Any]) -> Any:
    """The result of an actor's call, which goes on if the caller is cancelled."""
    await asyncio.wait({asked})
    return _answer(asked)


def _answer(asked: asyncio.Task[Any]) -> Any:
    """The result of a call that has ended. One that was cancelled on its way, as by a connection that is closed, is
    not the caller's cancellation: who takes that for his own ends though nobody has asked him to."""
    if asked.cancelled():
        raise RuntimeError("the call was cancelled")
    return asked.result()


async def _refused(address: str) -> bool:
    """Whether the machine is there and the process is not. False of what cannot be told within LOOK_S."""
    try:
        host, port = parse_host_port(address)
        async with asyncio.timeout(LOOK_S):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError, TimeoutError):  # another kind of address, such as one within this process
        return False
    writer.transport.abort()
    return False


async def call(actor: Any, method: str, *args: Any, within_s: float, who: str, limit: str = "") -> Any:
    """Return the result of `actor.method(*args)`. Raises ActorLost if the actor, `who` in messages, is gone or does not
    answer within `within_s` seconds, ActorFailed if the method fails; a StaleflowError of the method itself is passed
    on, and so is the loss or failure of an actor that it called in turn. limit: the knob that sets within_s, for the
    message."""
    try:
        async with asyncio.timeout(within_s):  # wait_for may swallow a cancellation that comes with the answer
            if not isinstance(actor, Actor | RemoteActor):  # it is in this process
                return await getattr(actor, method)(*args)
            asked = _begun(_execute(actor, method, _packed(args)))
            address = actor.address if isinstance(actor, RemoteActor) else actor._address
            result = await (_watched(asked, address, who) if _within_actor.get() else _waited(asked))
            return result if type(result) is bytes else pickle.loads(result[1])
    except ActorFailed as error:
        if error.who:
            raise
        raise ActorFailed(f"{who} failed: {error}", who) from error
    except ActorLost as error:  # by its own account, or an actor that it called
        error.who = error.who or who
        raise
    except StaleflowError:
        raise
    except TimeoutError:
        raise ActorSilent(
            f"{who} did not answer within {within_s:g} s" + (f" ({limit})" if limit else ""), who
        ) from None
    except (OSError, RuntimeError) as error:
        raise ActorLost(f"{who} is gone: {error}", who) from error
