"""Placing actors on a Dask cluster: slots and timeouts, with a scripted client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from distributed.comm import CommClosedError

from staleflow.pipeline.cluster import job_registry
from staleflow.pipeline.processes.dask_workers import DaskWorkers
from staleflow.pipeline.processes.worker_protocol import ClusterLost
from staleflow.stores.errors import ActorLost, ConfigError
from tests.support import virtual_time

RUN = virtual_time.run


class PlayedFuture:
    """An actor that is created after a delay, never, or with an error."""

    key, status = "server-1", "pending"

    def __init__(self, seconds: float, error: Exception | None = None) -> None:
        self._seconds, self._error = seconds, error
        self.released = False

    def __await__(self) -> Any:
        return self._made().__await__()

    async def _made(self) -> str:
        await asyncio.sleep(self._seconds)
        if self._error is not None:
            raise self._error
        return "an actor"

    def release(self) -> None:
        self.released = True


class PlayedClient:
    """The Dask client interface that DaskWorkers uses. workers: resources by name; an address is the name after
    tcp://."""

    def __init__(self, workers: dict[str, dict[str, int]]) -> None:
        self.workers = workers
        self.create_s, self.stack_s = 1.0, 0.0
        self.error: Exception | None = None
        self.submitted: list[dict[str, Any]] = []
        self.restarted: list[str] = []
        self.cancelled: list[Any] = []
        """Actors that were released, although another handle may exist."""
        self.retiring: list[str] = []
        """Requests to workers to leave; the scheduler removes a worker at the second one if its actors were
        cancelled."""
        self.scheduler = self
        self.id = "Scheduler-1"

    @contextlib.contextmanager
    def as_current(self) -> Iterator[PlayedClient]:
        yield self

    async def identity(self, n_workers: int) -> dict[str, Any]:
        if not self.id:
            raise OSError("Timed out trying to connect to tcp://head:8786 after 30 s")
        return {
            "id": self.id,
            "workers": {
                f"tcp://{name}": {"name": name, "host": "host", "resources": resources}
                for name, resources in self.workers.items()
            },
        }

    def submit(self, cls: type[Any], *args: Any, **options: Any) -> PlayedFuture:
        self.submitted.append(options)
        return PlayedFuture(self.create_s, self.error)

    async def call_stack(self, keys: list[str]) -> dict[str, dict[str, tuple[str, ...]]]:
        await asyncio.sleep(self.stack_s)
        return {"tcp://a": {keys[0]: ("in load_model\n", "in read\n")}}

    async def retire_workers(self, addresses: list[str]) -> dict[str, Any]:
        self.retiring += addresses
        return dict.fromkeys(addresses) if len(self.retiring) > 1 and self.cancelled else {}

    async def cancel(self, futures: list[Any], force: bool) -> None:
        assert force, "others have handles, too"
        self.cancelled += futures

    async def restart_workers(self, addresses: list[str], timeout: float, raise_for_error: bool) -> None:
        self.restarted += addresses
        await asyncio.sleep(0.7)


@contextlib.asynccontextmanager
async def workers_of(
    workers: list[str] | dict[str, dict[str, int]], num_heavy_actors: int
) -> AsyncIterator[tuple[DaskWorkers, PlayedClient]]:
    """A run on these workers, alone on its cluster."""
    client = PlayedClient(workers if isinstance(workers, dict) else {name: {} for name in workers})
    placing = DaskWorkers(client=client, local=None, run_name="job", start_s=50.0, num_heavy_actors=num_heavy_actors)
    yield placing, client
    await asyncio.gather(*placing.restarts)


async def place(placing: DaskWorkers, *roles: str) -> list[str]:
    """Place actors of these roles; returns their workers."""
    return [(await placing.place(f"{role}-{i}", role, object)).worker for i, role in enumerate(roles)]


async def test_heavy_actors_have_a_process_each_and_light_actors_share() -> None:
    async with workers_of(["a", "b", "c", "d"], num_heavy_actors=3) as (placing, client):
        where = await place(placing, "server", "reward", "reward", "rollout", "rollout", "trainer")
        assert where[:3] == ["a", "a", "a"], "four workers, three of which heavy actors need"
        assert sorted(where[3:]) == ["b", "c", "d"]
        assert all(not options["allow_other_workers"] for options in client.submitted)
        assert len({options["key"] for options in client.submitted}) == 6


async def test_light_actors_have_a_process_each_if_there_are_enough() -> None:
    async with workers_of(["a", "b", "c", "d"], num_heavy_actors=2) as (placing, _):
        where = await place(placing, "server", "reward", "rollout", "trainer")
        assert len(set(where)) == 4


async def test_declared_resources_restrict_the_placement() -> None:
    resources = {"r": {"rollout": 1}, "s": {"server": 1, "reward": 1}, "t": {"trainer": 1}}
    async with workers_of(resources, num_heavy_actors=2) as (placing, _):
        assert await place(placing, "trainer", "rollout", "server", "reward") == ["t", "r", "s", "s"]


async def test_a_role_without_a_matching_worker_is_named_after_start_s() -> None:
    async with workers_of(["a"], num_heavy_actors=2) as (placing, _):
        await place(placing, "rollout")
        begin = asyncio.get_running_loop().time()
        waits = asyncio.ensure_future(placing.place("rollout-1", "rollout", object))
        await asyncio.sleep(10.0)
        assert placing.waiting_actors == {
            "rollout-1": "a free worker process, with resource rollout=1 if any declare resources"
        }
        with pytest.raises(
            ConfigError, match=r"no free worker for rollout-1 after 50 s \(deadlines.start_s\).*rollout=1"
        ):
            await waits
        assert asyncio.get_running_loop().time() - begin == pytest.approx(50.0, abs=0.3)
        assert placing.waiting_actors == {}


@pytest.mark.parametrize(
    ("id", "why"), [("Scheduler-2", "was restarted"), ("", r"does not answer any more \(Timed out.* 30 s\)")]
)
async def test_placement_fails_once_the_scheduler_is_lost(id: str, why: str) -> None:
    """A new scheduler does not know the run and would never give it a worker."""
    async with workers_of(["a"], num_heavy_actors=2) as (placing, client):
        await place(placing, "rollout")
        begin = asyncio.get_running_loop().time()
        waits = asyncio.ensure_future(placing.place("rollout-1", "rollout", object))
        await asyncio.sleep(5.0)
        client.id = id
        with pytest.raises(ClusterLost, match=rf"^cluster: the scheduler {why}.*`staleflow resume` continues the run$"):
            await waits
        assert asyncio.get_running_loop().time() - begin < 6.0
        assert placing.waiting_actors == {}


async def test_placement_fails_if_the_connection_to_the_scheduler_breaks_during_a_call_of_the_registry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def closed(*_: Any, **__: Any) -> None:
        raise CommClosedError("ConnectionResetError: [Errno 104] Connection reset by peer")

    async with workers_of(["a"], num_heavy_actors=2) as (placing, _):
        monkeypatch.setattr(job_registry, "ask", closed)
        placing.is_shared = True
        with pytest.raises(ClusterLost, match=r"^cluster: the scheduler does not answer any more \(ConnectionReset.*"):
            await placing.place("rollout-1", "rollout", object)


async def test_an_actor_waits_for_a_worker_that_joins() -> None:
    async with workers_of(["a"], num_heavy_actors=2) as (placing, client):
        await place(placing, "rollout")
        waits = asyncio.ensure_future(placing.place("rollout-1", "rollout", object))
        await asyncio.sleep(30.0)
        client.workers["b"] = {}
        assert (await waits).worker == "b"


@pytest.mark.parametrize(
    ("stack_s", "stack"),
    [(0.0, "its stack is\nin load_model\nin read\n"), (1e6, "its stack is not known: TimeoutError")],
    ids=["busy", "stopped"],
)
async def test_an_actor_that_does_not_start_is_lost_after_start_s_and_its_stack_is_logged(
    stack_s: float, stack: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with workers_of(["a"], num_heavy_actors=1) as (placing, client):
        client.create_s, client.stack_s = 1e6, stack_s
        with pytest.raises(ActorLost, match=r"rollout-0 was not ready within 50 s \(deadlines.start_s\)"):
            await place(placing, "rollout")
        assert asyncio.get_running_loop().time() == pytest.approx(50.0 + min(stack_s, 5.0))
        assert caplog.messages == [f"rollout-0 is not ready (pending): {stack}"]


async def test_an_actor_whose_worker_leaves_during_creation_is_lost_at_once() -> None:
    async with workers_of(["a", "b"], num_heavy_actors=2) as (placing, client):
        client.create_s = 1000.0
        begin = asyncio.get_running_loop().time()
        waits = asyncio.ensure_future(placing.place("rollout-0", "rollout", object))
        await asyncio.sleep(3.5)
        del client.workers["a"]
        with pytest.raises(ActorLost, match=r"^rollout-0 could not start on tcp://a: the worker is gone$"):
            await waits
        assert asyncio.get_running_loop().time() - begin < 5.0
        client.create_s = 1.0
        assert (await placing.place("rollout-0.1", "rollout", object)).worker == "b"


async def test_the_slot_of_an_actor_that_failed_to_start_is_free_again() -> None:
    async with workers_of(["a"], num_heavy_actors=1) as (placing, client):
        client.error = ConfigError("rollout: no such thing")
        with pytest.raises(ConfigError, match="no such thing"):
            await place(placing, "rollout")
        client.error = ValueError("no")
        with pytest.raises(ActorLost, match=r"rollout-0 could not start on tcp://a: ValueError: no"):
            await place(placing, "rollout")
        client.error = TimeoutError(110, "Connection timed out", "/nfs/model")
        with pytest.raises(ActorLost, match=r"rollout-0 could not start on tcp://a: TimeoutError: .*'/nfs/model'"):
            await place(placing, "rollout")
        client.error = None
        beside = await placing.place("rollout-0", "rollout", object)
        assert beside.worker == "a"
        client.error = ValueError("no")
        with pytest.raises(ActorLost):
            await placing.place_beside(beside, "parameters-host", object)
        assert placing.roles_by_worker == {"a": ["rollout"]}


async def test_a_process_in_which_an_actor_did_not_start_is_restarted_and_not_chosen_again() -> None:
    async with workers_of(["a", "b"], num_heavy_actors=1) as (placing, client):
        client.create_s = 1e6
        with pytest.raises(ActorLost):
            await place(placing, "rollout")
        client.create_s = 1.0
        assert await place(placing, "rollout") == ["b"]
        assert client.restarted == ["tcp://a"]


async def test_an_actor_has_the_whole_of_start_s_on_a_worker_that_became_free_late() -> None:
    async with workers_of([], num_heavy_actors=1) as (placing, client):
        client.create_s = 10.0
        waits = asyncio.ensure_future(placing.place("rollout-0", "rollout", object))
        await asyncio.sleep(45.0)
        client.workers["a"] = {}
        assert (await waits).worker == "a"


async def test_the_process_of_a_lost_actor_is_restarted_and_not_chosen_again() -> None:
    """A hung worker is still listed."""
    async with workers_of(["a", "b"], num_heavy_actors=1) as (placing, client):
        lost = await placing.place("rollout-0", "rollout", object)
        beside = await placing.place_beside(lost, "parameters-host", object)
        assert beside.address == lost.address
        placing.mark_lost("rollout-0")
        assert placing.placed == {}, "actors beside it are gone too"
        assert lost.future.released
        assert beside.future.released
        assert (await placing.place("rollout-0.1", "rollout", object)).worker == "b"
        assert client.restarted == ["tcp://a"]
        del client.workers["a"]
        waits = asyncio.ensure_future(placing.place("rollout-1", "rollout", object))
        await asyncio.sleep(1.0)
        client.workers["a"] = {}
        assert (await waits).worker == "a", "restarted at a fixed port"


async def test_a_process_with_an_irreplaceable_actor_is_not_restarted() -> None:
    async with workers_of(["a", "b", "c"], num_heavy_actors=2) as (placing, client):
        assert await place(placing, "server", "reward", "rollout", "trainer") == ["a", "a", "b", "c"]
        await placing.place_beside(placing.placed["server-0"], "parameters-host", object)
        placing.mark_lost("reward-1")
        assert placing.placed.keys() == {"server-0", "rollout-2", "trainer-3"}, (
            "the next fetch places a parameter server"
        )
        await asyncio.sleep(5.0)
        assert client.restarted == []
        placing.mark_lost("server-0")
        await asyncio.sleep(5.0)
        assert client.restarted == ["tcp://a"]


async def test_a_parameter_server_is_lost_with_the_server_although_a_reward_worker_may_live() -> None:
    """An idle reward worker is not called, so its loss in the same process may be noticed late or never."""
    async with workers_of(["a", "b", "c"], num_heavy_actors=2) as (placing, _):
        assert await place(placing, "server", "reward", "rollout", "trainer") == ["a", "a", "b", "c"]
        await placing.place_beside(placing.placed["server-0"], "parameters-host", object)
        placing.mark_lost("server-0")
        assert placing.placed.keys() == {"reward-1", "rollout-2", "trainer-3"}


async def test_the_process_of_the_driver_is_not_restarted() -> None:
    """The server of a submitted job runs beside its driver, which would end with it."""
    async with workers_of(["a", "b"], num_heavy_actors=1) as (placing, client):
        placing.own_worker = (await placing.place("server-0", "server", object)).address
        placing.mark_lost("server-0")
        await asyncio.sleep(5.0)
        assert (placing.placed, client.restarted) == ({}, [])


async def test_a_retired_worker_leaves_the_cluster_when_it_has_no_actor() -> None:
    async with workers_of(["a", "b"], num_heavy_actors=1) as (placing, client):
        leaving = await placing.place("rollout-0", "rollout", object)
        beside = await placing.place_beside(leaving, "parameters-host", object)
        await placing.retire("rollout-0")
        assert (placing.placed, client.restarted) == ({}, [])
        assert leaving.future.released
        assert beside.future.released
        assert client.cancelled == [leaving.future, beside.future]
        assert client.retiring == ["tcp://a", "tcp://a"]
        assert (await placing.place("rollout-0.1", "rollout", object)).worker == "b", (
            "not placed there again if it stays"
        )


async def test_a_worker_without_actors_is_spare() -> None:
    async with workers_of(["a", "b"], num_heavy_actors=2) as (placing, client):
        assert await placing.has_spare_worker()
        await place(placing, "rollout", "trainer")
        assert not await placing.has_spare_worker()
        client.workers["c"] = {}
        assert await placing.has_spare_worker()
        client.workers = {"a": {"rollout": 1}, "b": {"trainer": 1}, "c": {"server": 1}}
        assert not await placing.has_spare_worker(), "it is for another role"
