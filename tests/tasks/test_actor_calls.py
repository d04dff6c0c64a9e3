"""Calls between actors: timeouts, cancellation and lost actors."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
from typing import Any

import pytest
from distributed import Client, LocalCluster, get_worker

from staleflow.stores.errors import ActorFailed, ActorLost, ActorSilent, StoreError
from staleflow.tasks.actors import actor_calls
from staleflow.tasks.actors.actor_calls import RemoteActor, call_actor, remote_methods
from tests.support.segments import delivery


class WaitingActor:
    """An actor that replies once `may_answer` is set."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()

    async def answer(self) -> int:
        await self.may_answer.wait()
        return 1

    async def refuse(self) -> None:
        raise StoreError("the disk is full")


@pytest.mark.parametrize("turns", range(8))
async def test_call_actor_can_be_cancelled_when_the_reply_arrives(turns: int) -> None:
    """asyncio.wait_for of Python 3.11 returned a reply that arrived at the moment of the cancellation, so a task that
    calls in a loop never ended."""
    actor = WaitingActor()

    async def calling() -> None:
        while True:
            await call_actor(actor, "answer", timeout_s=60.0, actor_name="it")
            actor.may_answer.clear()

    task = asyncio.ensure_future(calling())
    for _ in range(5):
        await asyncio.sleep(0)
    actor.may_answer.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    ended = task.done()
    task.cancel()
    assert ended


async def test_call_actor_raises_actor_lost_after_the_timeout() -> None:
    with pytest.raises(ActorLost, match=r"^rollout-0 did not answer within 0.01 s \(deadlines.call_s\)$"):
        await call_actor(
            WaitingActor(), "answer", timeout_s=0.01, actor_name="rollout-0", timeout_setting="deadlines.call_s"
        )


async def test_call_actor_passes_on_errors_of_the_method() -> None:
    with pytest.raises(StoreError, match="the disk is full"):
        await call_actor(WaitingActor(), "refuse", timeout_s=60.0, actor_name="server")


@pytest.mark.parametrize(("actor", "named"), [("", "rollout-0"), ("server", "server")])
@pytest.mark.parametrize("kind", [ActorLost, ActorFailed])
def test_an_error_names_the_actor_that_raised_it(kind: type[ActorLost | ActorFailed], actor: str, named: str) -> None:
    """It is the called actor, unless the error already names another one."""

    class Raising:
        async def answer(self) -> None:
            raise kind("connection closed", actor)

    with pytest.raises(kind) as error:
        asyncio.run(call_actor(Raising(), "answer", timeout_s=60.0, actor_name="rollout-0"))
    assert isinstance(error.value, ActorLost | ActorFailed)
    assert error.value.actor == named


class Unpicklable:
    """Raises an error while it is pickled that looks like the loss of an actor."""

    def __reduce__(self) -> Any:
        raise RuntimeError("cannot be pickled")


@remote_methods
class AnsweringActor:
    """An actor on a worker of a Dask cluster."""

    def __init__(self) -> None:
        self.heard: tuple[object, ...] = ()

    async def take(self, *args: object) -> tuple[object, ...]:
        self.heard = args
        return args

    async def read(self, size: int) -> bytes:
        return b"x" * size

    async def fail(self) -> None:
        raise RuntimeError("no memory")

    async def send_unpicklable(self) -> Unpicklable:
        return Unpicklable()


async def test_arguments_and_results_survive_the_trip_to_a_cluster_actor() -> None:
    """Arguments are pickled as one object, including numbers, bytes and None."""
    async with (
        LocalCluster(n_workers=1, processes=False, asynchronous=True, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        actor = await client.submit(AnsweringActor, actor=True)
        sent = (1, b"two", None, [delivery(3)], {"a": (1.5,)})
        assert await call_actor(actor, "take", *sent, timeout_s=30.0, actor_name="it") == sent
        assert await call_actor(actor, "read", 5, timeout_s=30.0, actor_name="it") == b"xxxxx"
        assert await call_actor(actor, "take", timeout_s=30.0, actor_name="it") == ()
        with pytest.raises(ActorFailed, match=r"^it failed: RuntimeError: no memory$"):
            await call_actor(actor, "fail", timeout_s=30.0, actor_name="it")
        with pytest.raises(ActorFailed, match=r"^it failed: RuntimeError: cannot be pickled$"):
            await call_actor(actor, "send_unpicklable", timeout_s=30.0, actor_name="it")
        with pytest.raises(RuntimeError, match=r"^cannot be pickled$"):
            await call_actor(actor, "take", Unpicklable(), timeout_s=30.0, actor_name="it")


class CancellingRpc:
    """RPC of a worker that cancels each call, as Dask does when it closes connections."""

    async def actor_execute(self, **asked: Any) -> Any:
        raise asyncio.CancelledError


@pytest.mark.parametrize("within_actor", [False, True])
async def test_a_call_cancelled_in_transit_raises_actor_lost_in_the_caller(within_actor: bool) -> None:
    remote_actor = RemoteActor("inproc://none", "key", CancellingRpc())
    calls = (
        RelayingActor().relay(remote_actor, "wait")
        if within_actor
        else call_actor(remote_actor, "wait", timeout_s=60.0, actor_name="other")
    )
    with pytest.raises(ActorLost, match=r"^other is gone: the call was cancelled$"):
        await calls


class LateErrorRpc:
    """RPC of a worker that replies to each call with an error once `may_answer` is set."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.may_answer = error, asyncio.Event()

    async def actor_execute(self, **asked: Any) -> Any:
        await self.may_answer.wait()
        raise self.error


@pytest.mark.parametrize("error", [OSError("broken"), asyncio.CancelledError()])
async def test_the_error_of_an_abandoned_call_is_not_logged(error: BaseException) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    rpc = LateErrorRpc(error)
    with pytest.raises(ActorSilent):
        await call_actor(RemoteActor("inproc://none", "key", rpc), "wait", timeout_s=0.01, actor_name="other")
    rpc.may_answer.set()
    for _ in range(10):
        await asyncio.sleep(0)
    gc.collect()
    assert reported == []


async def test_actors_probe_the_address_of_a_silent_actor_and_drivers_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_calls, "PROBE_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        remote_actor = RemoteActor(address, "key", LateErrorRpc(OSError()))
        with pytest.raises(ActorSilent):
            await asyncio.create_task(RelayingActor().relay(remote_actor, "wait", timeout_s=0.1))
    with pytest.raises(ActorSilent):
        await call_actor(remote_actor, "wait", timeout_s=0.1, actor_name="other")
    with pytest.raises(ActorLost, match=f"^other is gone: nothing listens at {address}$"):
        await asyncio.create_task(RelayingActor().relay(remote_actor, "wait"))


@remote_methods
class RelayingActor:
    """An actor that calls another one or is called."""

    async def process(self) -> int:
        return os.getpid()

    async def wait(self) -> None:
        await asyncio.sleep(60.0)

    async def relay(self, other: Any, method: str, *args: Any, timeout_s: float = 60.0) -> Any:
        return await call_actor(other, method, *args, timeout_s=timeout_s, actor_name="other")

    async def is_client(self) -> bool:
        return get_worker()._client is not None


async def test_a_call_between_actors_fails_at_once_when_the_target_dies() -> None:
    """Dask alone would wait until the key of the lost actor is back, or try to connect for 30 s."""
    async with (
        LocalCluster(n_workers=2, asynchronous=True, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster, asynchronous=True, direct_to_workers=True) as client,
    ):
        here, there = (w.worker_address for w in cluster.workers.values())
        one = await client.submit(RelayingActor, actor=True, workers=[here], key="one")
        held = client.submit(RelayingActor, actor=True, workers=[there], key="other")
        other = await held
        process = await call_actor(one, "relay", other, "process", timeout_s=30.0, actor_name="one")
        calls = [asyncio.ensure_future(call_actor(one, "relay", other, "wait", timeout_s=30.0, actor_name="one"))]
        await asyncio.sleep(0.5)
        os.kill(process, signal.SIGKILL)
        for pause_s in (0.0, 3.0, 0.0):  # while it was called; once everybody knows of its end; again
            await asyncio.sleep(pause_s)
            async with asyncio.timeout(10.0):
                with pytest.raises(ActorLost, match=r"^other is gone"):
                    await calls.pop()
            calls.append(
                asyncio.ensure_future(call_actor(one, "relay", other, "wait", timeout_s=30.0, actor_name="one"))
            )
        calls.pop().cancel()


async def test_an_actor_passed_to_another_is_called_without_the_scheduler() -> None:
    """Dask's own proxy creates a client on each worker, which reports every call to the scheduler twice and keeps the
    actor alive without its driver."""
    async with (
        LocalCluster(n_workers=2, asynchronous=True, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster, asynchronous=True, direct_to_workers=True) as client,
    ):
        here, there = (w.worker_address for w in cluster.workers.values())
        one = await client.submit(RelayingActor, actor=True, workers=[here], key="one")
        other = await client.submit(RelayingActor, actor=True, workers=[there], key="other")
        own = await call_actor(one, "process", timeout_s=30.0, actor_name="one")
        assert await call_actor(one, "relay", other, "process", timeout_s=30.0, actor_name="one") != own
        # Handed on twice, it calls back.
        assert await call_actor(one, "relay", other, "relay", one, "process", timeout_s=30.0, actor_name="one") == own
        for actor in (one, other):
            assert not await call_actor(actor, "is_client", timeout_s=30.0, actor_name="it")


def calling_from_a_thread(other: Any) -> list[int]:
    """Call an actor as the driver of a submitted job does: on a new event loop in a thread of a worker process."""

    async def scenario() -> list[int]:
        data = b"x" * 100_000
        results = []
        for _ in range(20):
            asked = (call_actor(other, "take", data, timeout_s=60.0, actor_name="other") for _ in range(20))
            results += [len(answer[0]) for answer in await asyncio.gather(*asked)]
        return results

    return asyncio.run(scenario())


async def test_a_driver_in_a_worker_process_calls_on_the_worker_loop() -> None:
    """Two threads that write to one connection corrupt it."""
    async with (
        LocalCluster(n_workers=2, asynchronous=True, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster, asynchronous=True, direct_to_workers=True) as client,
    ):
        here, there = (w.worker_address for w in cluster.workers.values())
        other = await client.submit(AnsweringActor, actor=True, workers=[there], key="other")
        assert await client.submit(calling_from_a_thread, other, workers=[here]) == [100_000] * 400
