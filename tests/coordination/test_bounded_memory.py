"""Bounded memory: over 10,000 trajectories no container grows beyond its limit."""

from __future__ import annotations

import asyncio
import types
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.pipeline.config import actor_settings
from staleflow.pipeline.coordination import decision_log, forecast
from staleflow.pipeline.coordination.events import DecodeStats, InstanceLost, InstanceReported, PullFinished
from staleflow.pipeline.weights.weight_transfers import WeightTransfers
from staleflow.stores.staleness.ledger_groups import Ending
from staleflow.stores.trajectories.records import CommitRecord, LedgerState
from staleflow.stores.trajectory import (
    AbortReason,
    Fate,
    GroupId,
    InstanceId,
    PolicyVersion,
    TrajectoryId,
)
from staleflow.tasks.actors import trajectory_server
from staleflow.tasks.actors.parameter_server import FetchProgress
from staleflow.tasks.actors.rollout_instance import RequestOutcome
from staleflow.tasks.actors.server_messages import RewardItem
from staleflow.tasks.engines.base import SampledTokens
from staleflow.tasks.sources.reward_process import ScoredResponse
from tests.coordination.test_coordinator import A, Bench
from tests.support import virtual_time
from tests.support.bodies import Body
from tests.support.memory_store import MemoryStore
from tests.support.route_items import route_item
from tests.support.scripted import VirtualEngine, VirtualRolloutInstance, World, server_class
from tests.support.segments import delivery, sampled_segment
from tests.tasks.test_draft_corpus import DraftingSettings

TRAJECTORIES = 10_000
SOME = 200
"""Maximum size of one container in a run with eight trajectories in flight: twelve times as many, and constant
tables."""
LEAVES = (str, bytes, int, float, type, types.FunctionType, types.MethodType, types.ModuleType, np.ndarray)


def container_sizes(root: object, keep_out: tuple[type[Any], ...] = ()) -> Iterator[tuple[str, int]]:
    """Return (path, size) of every container reachable from an object, each once."""
    seen: set[int] = set()
    result: deque[tuple[str, Any]] = deque([(type(root).__name__, root)])
    while result:
        where, thing = result.popleft()
        if isinstance(thing, np.ndarray):
            yield where, thing.size
        if thing is None or isinstance(thing, (*LEAVES, *keep_out)) or id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, dict):
            yield where, len(thing)
            result.extend((f"{where}[]", value) for value in thing.values())
        elif isinstance(thing, (list, tuple, set, frozenset, deque)):
            yield where, len(thing)
            result.extend((f"{where}[]", value) for value in thing)
        else:
            slots = (name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ()))
            names = {*getattr(thing, "__dict__", {}), *slots}
            result.extend(
                (f"{where}.{name}", value) for name in names if (value := getattr(thing, name, None)) is not None
            )


def largest(root: object, keep_out: tuple[type[Any], ...] = ()) -> dict[str, int]:
    """Return the paths whose containers have more than SOME items in total."""
    sizes: Counter[str] = Counter()
    for where, size in container_sizes(root, keep_out):
        sizes[where] += size
    return {where: size for where, size in sizes.items() if size > SOME}


def test_largest_reports_nested_containers() -> None:
    class Holder:
        def __init__(self) -> None:
            self.groups = {i: {"members": list(range(300))} for i in range(3)}
            self.itself = self

    assert largest(Holder()) == {"Holder.groups[][]": 900}


def test_a_coordinator_uses_bounded_memory_over_ten_thousand_trajectories() -> None:
    """Groups are trained, filtered and aborted; instances pull, report and are lost during pulls."""
    bench = Bench(eta=1, groups=2, size=2, filtering="no_signal", max_attempts=1)
    bench.coordinator._validate_every_event = False  # other tests do
    bench.join(A)
    name, group, trained = A, 0, 0
    steps = DecodeStats(running=4, kv_tokens=40, seconds=1.0, tokens=20)
    while 2 * group < TRAJECTORIES:
        bench.arrive(group, group + 1)
        for member in range(2 * group, 2 * group + 4):
            bench.tell(InstanceReported(instance=name, progress=((TrajectoryId(member), 3),), steps=steps))
            bench.sampled(member, tokens=5 + member % 17)
        # Of each ten groups one has no signal, and is replaced by another.
        for member in range(2 * group, 2 * group + 4):
            bench.scored(member, float(member % 2 and (member // 2) % 10 > 0))
        group += 2
        if bench.coordinator.is_training:
            trained += 1
            bench.publish(trained)
            if trained % 50 == 0:
                bench.tell(InstanceLost(instance=name, why="killed while it pulls"))
                name = InstanceId(f"a.{trained}")
                bench.join(name, version=trained)
            else:
                bench.tell(PullFinished(instance=name, version=PolicyVersion(trained)))
    limits = {
        "_notes": decision_log.MAX_NOTES, "_latest_lengths": forecast.WINDOW_LENGTHS,
        "_sorted_lengths": forecast.WINDOW_LENGTHS, "_refreshed_lengths": forecast.WINDOW_LENGTHS,
        "_tail_sums": forecast.WINDOW_LENGTHS + 1, "_errors": forecast.WINDOW_LENGTHS,
        "_notes[]": 4 * decision_log.MAX_NOTES, "_notes[][]": 2 * decision_log.MAX_NOTES,
        "_errors[]": 2 * forecast.WINDOW_LENGTHS,
    }  # fmt: skip
    sizes = {where.rpartition(".")[2]: size for where, size in largest(bench.coordinator).items()}
    assert sizes.keys() <= limits.keys(), sizes
    assert all(size <= limits[name] for name, size in sizes.items()), sizes
    assert bench.coordinator.ledger.num_started >= TRAJECTORIES


def response_of(trajectory: TrajectoryId) -> SampledTokens:
    return delivery(trajectory, sampled_segment((7, 7, 7), -1.0))


def test_a_trajectory_server_uses_bounded_memory_over_ten_thousand_trajectories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step draws, samples, scores and stores forty groups of two, and drops ten of them."""
    groups, remembered = 40, SOME
    monkeypatch.setattr(trajectory_server, "MAX_STORED_TOKENS", remembered)

    async def scenario() -> None:
        settings = actor_settings.server_settings(Body(tmp_path).config(), tmp_path / "store", 128)
        server = server_class(World())(replace(settings, serves_drafts=True, writes_resume_points=False), 0.0)
        ended = {"consumed:none": 0, "aborted:surplus_group": 0}
        for step in range(TRAJECTORIES // (2 * groups)):
            first = step * groups
            await server.draw(first, groups)
            ids = [TrajectoryId(i) for i in range(2 * first, 2 * (first + groups))]
            await server.record_routes(tuple(map(route_item, ids)))
            await server.deliver([response_of(i) for i in ids])
            items = await server.scoring_items(tuple(ids), (1,) * len(ids))
            await server.record_rewards(
                [RewardItem(*item[:3], ScoredResponse(reward=float(item[0] % 2))) for item in items]
            )
            dropped = ids[-20:]
            await server.take_batch(step, tuple(ids[:-20]), (PolicyVersion(step),) * (len(ids) - 20), 0)
            endings = tuple(
                Ending(
                    trajectory=i, group=GroupId(i // 2), fate=Fate.ABORTED, reason=AbortReason.SURPLUS_GROUP, step=step
                )
                for i in dropped
            )
            await server.discard(endings, (PolicyVersion(step),) * 20)
            ended["consumed:none"] += len(ids) - 20
            ended["aborted:surplus_group"] += 20
            ledger = LedgerState(
                num_started=ids[-1] + 1, num_ended=dict(ended), live=(), next_step=step + 1, version=step
            )
            await server.commit(CommitRecord(kind="step", step=step, ledger=ledger))
            await asyncio.sleep(0)
        assert largest(server, (MemoryStore,)) == {}
        assert server._draft_corpus._num_tokens <= remembered, "of stored responses, for drafts"
        assert not server._in_flight.live and not server._spool._stored_at_step
        parts = list((tmp_path / "spool").iterdir())
        assert len(parts) == 1, "stored groups are in no part of the spool"
        await server.close()

    virtual_time.run(scenario())


def test_a_rollout_instance_uses_bounded_memory_over_many_trajectories(tmp_path: Path) -> None:
    """Of each group one member ends first, and the instance drafts from its response for the other."""
    world = World(length=lambda trajectory: 45 if trajectory % 2 else 9)

    async def scenario() -> None:
        settings = actor_settings.server_settings(Body(tmp_path).config(), tmp_path / "store", 128)
        server = server_class(world)(replace(settings, serves_drafts=True), 0.0)
        instance = VirtualRolloutInstance(DraftingSettings(world), InstanceId("one"), 1, 30.0, 1.0, True)
        num_delivered = num_known = 0
        for group in range(SOME + 10):
            await server.draw(group, 1)
            await instance.route(server, (route_item(2 * group), route_item(2 * group + 1)))
            outcomes: list[RequestOutcome] = []
            while len(outcomes) < 2:
                outcomes += await instance.next_events(server, 5.0)
                num_delivered += len((await instance.report()).delivered)
                num_known += len(instance._known_response_keys)
        assert min(num_delivered, num_known) > SOME
        assert largest(instance, (VirtualEngine,)) == {}

    virtual_time.run(scenario())


async def test_transfers_forget_versions_that_are_not_used() -> None:
    class Servers:
        """Parameter servers that have half of a version at first."""

        has_all = True

        def actor(self, name: str) -> Any:
            return name

        async def ask(self, name: str, method: str, *args: Any) -> FetchProgress:
            self.has_all = not self.has_all
            return FetchProgress(path="v" if self.has_all else "", num_bytes=5)

    transfers = WeightTransfers(Servers(), 5.0)
    for version in map(PolicyVersion, range(SOME + 10)):
        transfers.record_published(version, "one", 10)
        assert await transfers.fetch(version, "two") == "v"
        transfers.remove_unused(())
    assert transfers.bytes_arrived == 5 * (SOME + 10)
    assert largest(transfers, (Servers,)) == {}
