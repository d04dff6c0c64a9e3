"""Weight transfers between hosts: the source of each fetch."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.pipeline.processes.worker_protocol import PlacedActor
from staleflow.pipeline.weights.weight_transfers import FAN_OUT, BroadcastTree
from staleflow.stores.errors import ActorLost, TransferFailed
from staleflow.stores.trajectory import InstanceId, PolicyVersion
from staleflow.tasks.actors.parameter_server import FetchProgress
from tests.support import virtual_time
from tests.support.bodies import Body, Stage
from tests.support.in_process import Fault
from tests.support.scripted import World

RUN = virtual_time.run

HOSTS = [f"host-{i:02d}" for i in range(16)]
EVENTS = st.lists(st.tuples(st.sampled_from(("join", "arrived", "failed")), st.sampled_from(HOSTS)), max_size=60)


def ancestors(tree: BroadcastTree, host: str) -> list[str]:
    results = []
    while host in tree._parents:
        host = tree._parents[host]
        assert host not in results, "a cycle"
        results.append(host)
    return results


@settings(max_examples=100)
@given(EVENTS)
def test_every_host_is_below_the_root_without_cycles(events: list[tuple[str, str]]) -> None:
    tree = BroadcastTree("root")
    for event, host in events:
        if event == "join":
            sources = tree.join(host)
            assert len(set(sources)) == len(sources) and host not in sources and "root" in sources
            assert tree.join(host) == sources, "asking twice changes nothing"
        elif event == "arrived":
            tree.mark_complete(host)
        else:
            tree.mark_failed(host)
        for item in HOSTS:
            ancestors(tree, item)


@given(st.lists(st.sampled_from(HOSTS), unique=True))
def test_without_failures_no_host_serves_more_than_the_fan_out(hosts: list[str]) -> None:
    tree = BroadcastTree("root")
    for host in hosts:
        tree.join(host)
    served = Counter(tree._parents.values())
    assert max(served.values(), default=0) <= FAN_OUT
    assert served["root"] == min(len(hosts), FAN_OUT)
    assert max((len(ancestors(tree, h)) for h in hosts), default=0) <= 4


def test_a_host_with_a_complete_version_serves_it() -> None:
    tree = BroadcastTree("root")
    assert [tree.join(h)[0] for h in HOSTS[:2]] == ["root", "root"]
    tree.mark_complete(HOSTS[0])
    tree.mark_complete(HOSTS[1])
    assert [tree.join(h)[0] for h in HOSTS[2:8]] == ["host-00", "host-01", "root", "host-00", "host-01", "root"]


def test_a_failed_host_does_not_wait_for_hosts_below_it() -> None:
    tree = BroadcastTree("root")
    for host in HOSTS[:7]:
        tree.join(host)
    tree.mark_failed(HOSTS[0])
    assert tree.join(HOSTS[0]) == ("root",)


# -- as the runtime uses it ----------------------------------------------------------------------------------------

APART = ("one", "one", "one", "two", "three", "four", "five")
"""Hosts of server, trainer, reward worker and four instances."""
V1 = PolicyVersion(1)


def fetch_sources(stage: Stage) -> dict[str, str]:
    """Return the source of each host's fetch."""
    ensured = [c for c in stage.workers.calls if c.method == "ensure_version" and c.args[2]]
    return {c.actor.removeprefix("parameters-"): c.args[2][0].name.removeprefix("parameters-") for c in ensured}


async def test_hosts_fetch_from_each_other(body: Body) -> None:
    late = [Fault(actor=f"parameters-{host}", method="ensure_version", nth=2, late_s=1.0) for host in APART[3:]]
    async with body.placed("rollout.instances=4", hosts=APART, faults=late) as stage:
        stage.publish(V1)
        await asyncio.gather(*(stage.actors.pull(i, V1) for i in stage.actors.instances.values()))
        sources = fetch_sources(stage)
        assert sorted(sources) == ["five", "four", "three", "two"]
        assert Counter(sources.values())["one"] == FAN_OUT
        assert len(set(sources.values())) > 1 and all(host != source for host, source in sources.items())


async def test_a_fetch_may_take_longer_than_a_call(body: Body) -> None:
    """Progress is polled, and each reply arrives in time."""
    on_its_way = FetchProgress(path="", num_bytes=3)
    slow = [
        Fault(actor="parameters-two", method="ensure_version", nth=n, late_s=2.0, change=lambda _: on_its_way)
        for n in range(2, 22)  # the first asks for version 0
    ]
    async with body.placed(hosts=APART, faults=slow) as stage:
        stage.publish(V1)
        two = stage.actors.instances[InstanceId("rollout-0")]
        begin = asyncio.get_running_loop().time()
        await stage.actors.pull(two, V1)
        assert asyncio.get_running_loop().time() - begin > 20 * 2
        assert (two.version, stage.actors.bytes_arrived) == (V1, 3)


async def test_a_failed_source_is_retried_without_a_loss(body: Body) -> None:
    gone = TransferFailed("version 1 cannot be fetched: parameters-one does not hand it on")
    fails = [Fault(actor="parameters-two", method="ensure_version", nth=n, error=gone) for n in range(2, 9)]
    async with body.placed(hosts=APART, faults=fails) as stage:
        stage.publish(V1)
        two = stage.actors.instances[InstanceId("rollout-0")]
        await stage.actors.pull(two, V1)
        assert two.version == V1


@pytest.mark.parametrize(("eta", "first"), [(0, 1), (0, 3), (8, 3)])
def test_an_instance_whose_host_gets_no_weights_for_start_s_is_replaced(body: Body, eta: int, first: int) -> None:
    """Whether the run waits for it or publishes new versions meanwhile; also at the start. first: number of the first
    fetch that fails."""
    gone = TransferFailed("it cannot be fetched: no route")
    fails = [Fault(actor="parameters-two", method="ensure_version", nth=n, error=gone) for n in range(first, 99)]
    run = body.checked_run("steps=12", f"staleness.eta={eta}", hosts=("one", "one", "one", "one", "two"), faults=fails)
    (loss,) = run.outcomes.lost_actors
    assert loss.endswith("rollout-1 got no weights for 50 s (deadlines.start_s): it cannot be fetched: no route")


async def test_a_fetch_that_waits_for_the_trainer_has_no_deadline(body: Body) -> None:
    """A restored trainer publishes its versions again."""
    gone = TransferFailed("it cannot be fetched: no route")
    fails = [Fault(actor="parameters-two", method="ensure_version", nth=n, error=gone) for n in range(2, 5)]
    async with body.placed(hosts=APART, faults=fails) as stage:
        stage.publish(V1)
        restored = stage.actors.recovery._restorations["trainer"] = asyncio.ensure_future(asyncio.sleep(60.0))
        restored.add_done_callback(lambda _: stage.actors.recovery._restorations.clear())
        two = stage.actors.instances[InstanceId("rollout-0")]
        pulling = asyncio.ensure_future(stage.actors.pull(two, V1))
        await asyncio.sleep(30.0)
        assert not stage.actors.is_loading, "only the restoration has a deadline"
        await pulling
        assert two.version == V1


async def test_a_parameter_server_is_placed_elsewhere_if_the_trajectory_server_is_lost(
    body: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instance that needs it is not."""
    async with body.placed() as stage:
        stage.workers.release_actor("parameters-one")
        server, place_beside = stage.workers.placed["server"], stage.workers.place_beside

        async def fail_beside_server(actor: PlacedActor, name: str, *args: Any) -> PlacedActor:
            if actor is server:
                raise ActorLost(f"{name} could not start", name)
            return await place_beside(actor, name, *args)

        monkeypatch.setattr(stage.workers, "place_beside", fail_beside_server)
        stage.publish(V1)
        one = stage.actors.instances[InstanceId("rollout-0")]
        await stage.actors.pull(one, V1)
        assert one.version == V1
        assert stage.workers.placed["parameters-one"].address == stage.workers.placed["trainer"].address


async def test_a_stopped_instance_beside_a_parameter_server_is_lost_and_its_caller_is_not(body: Body) -> None:
    hosts = ("one", "one", "one", "two", "two")
    async with body.placed(
        hosts=hosts, faults=[Fault(actor="parameters-two", method="ensure_version", nth=3, silent="before")]
    ) as stage:
        carrier, other = stage.actors.instances.values()
        assert (
            stage.workers.placed["parameters-two"].address == carrier.placed_actor.address != other.placed_actor.address
        )
        stage.publish(V1)
        await stage.actors.pull(other, V1)
        assert other.version == V1
        assert stage.workers.placed["parameters-two"].address == other.placed_actor.address
        with_it = [c.actor for c in stage.workers.calls if c.method == "pull" and c.args[0].version == V1]
        assert with_it == [other.id]


async def test_an_instance_whose_process_does_not_reply_is_lost(body: Body) -> None:
    hosts = ("one", "one", "one", "two", "two")
    async with body.placed(
        hosts=hosts, faults=[Fault(actor="parameters-two", method="ensure_version", nth=3, silent="before")]
    ) as stage:
        carrier, _ = stage.actors.instances.values()
        stage.publish(V1)
        with pytest.raises(ActorLost, match="parameters-two did not answer within 3 s"):
            await stage.actors.pull(carrier, V1)


async def test_versions_published_during_a_prune_are_kept(body: Body) -> None:
    """The prune may start late on a host, when some of them are being loaded."""
    async with body.placed(world=World(prune_s=1.0)) as stage:
        stage.publish(V1)
        removing = asyncio.ensure_future(stage.actors.prune(set()))
        await asyncio.sleep(0.5)
        for version in (2, 3):
            stage.publish(PolicyVersion(version))
        await removing
        assert stage.world.weights["one"] == {0, 1, 2, 3}
        for instance in stage.actors.instances.values():
            await stage.actors.pull(instance, PolicyVersion(2))
        await stage.actors.prune({PolicyVersion(3)})
        assert stage.world.weights["one"] == {2, 3}


async def test_the_load_timeout_grows_with_the_number_of_bytes(body: Body, caplog: pytest.LogCaptureFixture) -> None:
    """The timeout is 3 s, and 4 s more for 100 MB at the minimum rate. Only slow pulls are logged."""
    caplog.set_level("INFO", "staleflow")
    slow = [Fault(actor="rollout-0", method="pull", nth=2, late_s=6.0)]
    async with body.placed(faults=slow, world=World(num_bytes=100_000_000)) as stage:
        one = stage.actors.instances[InstanceId("rollout-0")]
        stage.publish(V1)
        pull = asyncio.ensure_future(stage.actors.pull(one, V1))
        await asyncio.sleep(5.0)
        assert one.is_loading and stage.actors.is_loading, "it need not sample"
        await pull
        assert one.version == V1 and not stage.actors.is_loading
        assert [line for line in caplog.messages if "pulled" in line] == ["rollout-0 pulled version 1 in 6.0 s"]
