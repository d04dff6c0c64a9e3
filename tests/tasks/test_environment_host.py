"""Calls of the environment host to the trajectory server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectory import GroupId, TrajectoryId
from staleflow.tasks.actors.environment_host import EnvironmentHost, EnvStepItem, EnvStepOutcome
from staleflow.tasks.actors.server_messages import EpisodeState, ObservationItem, ObservationReceipt, RewardItem
from staleflow.tasks.episodes.step_results import EpisodeKey, HostedStepResult
from staleflow.tasks.rendering.sampled_turn import SampledTurn
from staleflow.tasks.rendering.task_source import Message, Record
from staleflow.tasks.sources.reward_process import ScoredResponse
from tests.support import virtual_time

RUN = virtual_time.run


class Environments:
    """Environments whose even tasks continue and whose odd tasks end."""

    def build(self) -> Environments:
        return self

    async def check(self) -> None: ...

    needs_token_ids = False

    async def step(
        self,
        key: EpisodeKey,
        record: Record,
        turns: tuple[str, ...],
        *,
        truncated: bool,
        latest_turn: SampledTurn | None = None,
    ) -> HostedStepResult:
        await asyncio.sleep(0)
        return (
            HostedStepResult(ended=True, reward=key.group)
            if key.group % 2
            else HostedStepResult(messages=(Message("user", turns[-1]),))
        )

    async def end(self, key: EpisodeKey, record: Record) -> HostedStepResult:
        return HostedStepResult(ended=True)

    def cancel(self, keys: Iterable[EpisodeKey]) -> None: ...

    async def close(self) -> None: ...


@dataclass
class Server:
    """A server whose trajectory i has i tokens and task i. From 90 on, trajectories are not live."""

    calls: list[tuple[str, int]] = field(default_factory=list)
    rewards: dict[TrajectoryId, float] = field(default_factory=dict)
    fails: bool = False

    async def episode_states(self, keys: list[tuple[TrajectoryId, int]]) -> list[EpisodeState | None]:
        self.calls.append(("episode_states", len(keys)))
        if self.fails:
            raise OSError("it is gone")
        none: dict[str, Any] = {"is_full": False, "has_observation": False, "restarted": False, "score": None}
        return [
            EpisodeState(group=GroupId(i), member=0, attempt=0, record={}, turns=(f"{i}",), num_tokens=i, **none)
            if i < 90
            else None
            for i, _ in keys
        ]

    async def add_observations(self, items: list[ObservationItem]) -> list[ObservationReceipt]:
        self.calls.append(("add_observations", len(items)))
        return [ObservationReceipt(item.num_tokens + int(item.messages[0].content)) for item in items]

    async def record_rewards(self, scored: list[RewardItem]) -> list[ScoredResponse | None]:
        self.calls.append(("record_rewards", len(scored)))
        self.rewards.update((item.trajectory, item.score.reward) for item in scored)
        return [item.score for item in scored]


def run_steps(
    server: Server, dismissed: tuple[int, ...] = (), environments: Any = None
) -> dict[TrajectoryId, EnvStepOutcome]:
    """Return the outcomes of 100 concurrent steps."""

    async def acted() -> list[EnvStepOutcome]:
        host = EnvironmentHost(environments or Environments(), call_s=5)
        await host.start_steps(
            server, tuple(EnvStepItem(trajectory=TrajectoryId(i), route_number=0, truncated=False) for i in range(100))
        )
        await asyncio.sleep(0)
        await host.close_episodes(tuple(map(TrajectoryId, dismissed)))
        results: list[EnvStepOutcome] = []
        while more := await host.next_outcomes(0.2):
            results += more
        await host.close()
        return results

    return {item.trajectory: item for item in asyncio.run(acted())}


def test_concurrent_steps_are_batched_into_one_call_per_method() -> None:
    server = Server()
    result = run_steps(server)
    assert set(result) == set(range(90))
    assert all(one.num_tokens == 2 * i and not one.ended for i, one in result.items() if i % 2 == 0)
    assert server.rewards == {i: i for i in range(1, 90, 2)}
    assert all(one.ended and one.reward == i for i, one in result.items() if i % 2)
    assert server.calls == [("episode_states", 100), ("add_observations", 45), ("record_rewards", 45)]


def test_a_closed_episode_does_not_affect_other_episodes() -> None:
    assert set(run_steps(Server(), dismissed=(3, 4, 5))) == set(range(90)) - {3, 4, 5}


def test_a_lost_server_is_reported_for_every_step() -> None:
    result = run_steps(Server(fails=True))
    assert set(result) == set(range(100))
    assert all(item.server_lost for item in result.values())


class SlowStepEnvironments(Environments):
    """Environments whose steps and ends take time and wait for a slot."""

    async def step(self, key: EpisodeKey, *_: object, **options: object) -> HostedStepResult:
        return HostedStepResult(messages=(Message("user", "0"),), environment_s=1.0, waited_s=2.0)

    async def end(self, key: EpisodeKey, record: Record) -> HostedStepResult:
        return HostedStepResult(ended=True, reward=0.5, environment_s=4.0, waited_s=8.0)


class FullServer(Server):
    """A server on which observations of odd trajectories do not fit into the context."""

    async def add_observations(self, items: list[ObservationItem]) -> list[ObservationReceipt]:
        receipts = await super().add_observations(items)
        return [
            ObservationReceipt(r.num_tokens, "full" if item.trajectory % 2 else "")
            for r, item in zip(receipts, items, strict=True)
        ]


def test_an_outcome_has_the_duration_of_its_step_and_its_end() -> None:
    server = FullServer()
    result = run_steps(server, environments=SlowStepEnvironments())
    assert {(item.ended, item.seconds) for i, item in result.items() if i % 2 == 0} == {(False, 3.0)}
    assert {(item.ended, item.reward, item.seconds) for i, item in result.items() if i % 2} == {(True, 0.5, 15.0)}


class BrokenEnvironments(Environments):
    """Environments that fail after some time."""

    async def step(self, key: EpisodeKey, *_: object, **options: object) -> HostedStepResult:
        return HostedStepResult(ended=True, error="it broke", environment_s=60.0, waited_s=2.0)


class RestartingServer(Server):
    """A server that restarts all episodes."""

    async def restart(self, keys: list[tuple[TrajectoryId, int, int]]) -> list[bool]:
        return [True for _ in keys]


def test_an_outcome_of_a_failed_environment_has_the_duration_of_its_step() -> None:
    result = run_steps(RestartingServer(), environments=BrokenEnvironments())
    assert {(item.restart_reason, item.seconds) for item in result.values()} == {("it broke", 62.0)}


class RecordingEnvironments(Environments):
    """Environments that record which episodes are cancelled."""

    def __init__(self) -> None:
        self.cancelled_tasks: list[int] = []

    def cancel(self, keys: Iterable[EpisodeKey]) -> None:
        self.cancelled_tasks += [key.group for key in keys]


class DifferentServer(Server):
    """A server whose stored observation differs from the delivered one. It restarts every other such episode; the
    others have changed meanwhile."""

    async def add_observations(self, items: list[ObservationItem]) -> list[ObservationReceipt]:
        return [ObservationReceipt(item.num_tokens, "differs") for item in items]

    async def restart(self, keys: list[tuple[TrajectoryId, int, int]]) -> list[bool]:
        return [trajectory % 4 == 0 for trajectory, _, _ in keys]


def test_an_episode_with_a_different_observation_is_cancelled_and_restarted() -> None:
    environments = RecordingEnvironments()
    result = run_steps(DifferentServer(), environments=environments)
    assert {i: bool(item.restart_reason) for i, item in result.items()} == {
        i: i % 4 == 0 for i in range(90) if i % 4 != 2
    }
    assert all(item.host_lost for item in result.values() if item.restart_reason), "it is no failure"
    assert sorted(environments.cancelled_tasks) == list(range(0, 90, 2))


async def test_available_outcomes_are_returned_at_once() -> None:
    host = EnvironmentHost(environments := RecordingEnvironments(), call_s=5)
    await host.start_steps(Server(), step_items(False, False))
    await asyncio.sleep(1.0)
    begin = asyncio.get_running_loop().time()
    assert [outcome.ended for outcome in await host.next_outcomes(60.0)] == [False, True]
    assert asyncio.get_running_loop().time() == begin
    await host.close_episodes((TrajectoryId(0), TrajectoryId(1)))
    assert environments.cancelled_tasks == [0], "the other one has ended"
    await host.close()


@dataclass
class SlowEnvironments(Environments):
    """Environments whose calls take a second, and whose steps take two minutes or fail after a second."""

    error: Exception | None = None
    begun: list[bool] = field(default_factory=list)
    """Whether the turn was truncated, for each started step."""
    num_cancelled: int = 0
    closed: bool = False

    async def check(self) -> None:
        await asyncio.sleep(1.0)
        if self.error is not None:
            raise self.error

    async def step(self, key: EpisodeKey, *_: object, truncated: bool, **options: object) -> HostedStepResult:
        self.begun.append(truncated)
        try:
            await self.check()
            await asyncio.sleep(120.0)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return HostedStepResult(ended=True)

    async def close(self) -> None:
        await asyncio.sleep(1.0)
        self.closed = True


def step_items(*truncated: bool) -> tuple[EnvStepItem, ...]:
    return tuple(EnvStepItem(trajectory=TrajectoryId(i), route_number=0, truncated=t) for i, t in enumerate(truncated))


async def test_an_error_outside_episodes_is_raised_at_once() -> None:
    host = EnvironmentHost(SlowEnvironments(error=ConfigError("no template")), call_s=5)
    with pytest.raises(ConfigError, match="no template"):
        await host.check()
    await host.start_steps(Server(), step_items(False))
    begin = asyncio.get_running_loop().time()
    with pytest.raises(ConfigError, match="no template"):
        await host.next_outcomes(60.0)
    assert asyncio.get_running_loop().time() - begin < 2.0
    await host.close()


async def test_a_running_step_is_not_started_again_and_is_cancelled_by_close() -> None:
    environments = SlowEnvironments()
    host = EnvironmentHost(environments, call_s=5)
    for _ in range(2):
        await host.start_steps(Server(), step_items(False, True))
        assert await host.next_outcomes(3.0) == []
    assert environments.begun == [False, True]
    await host.close()
    assert environments.closed
    await asyncio.sleep(0.0)
    assert environments.num_cancelled == 2
