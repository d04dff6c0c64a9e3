"""An environment host that was replaced keeps running and replies late; the trajectory server follows its
replacement."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from staleflow.pipeline.config import actor_settings
from staleflow.stores.trajectory import Trajectory, TrajectoryId
from staleflow.tasks.actors.environment_host import EnvironmentHost, EnvStepItem, EnvStepOutcome
from staleflow.tasks.actors.server_messages import EpisodeState, RewardItem
from staleflow.tasks.actors.trajectory_server import TrajectoryServer
from staleflow.tasks.episodes.step_results import EpisodeKey, HostedStepResult
from staleflow.tasks.rendering.sampled_turn import SampledTurn
from staleflow.tasks.rendering.task_source import Message, Record
from staleflow.tasks.sources.reward_process import ScoredResponse
from tests.support import virtual_time
from tests.support.bodies import Body
from tests.support.route_items import route_item
from tests.support.scripted import World, server_class
from tests.support.segments import delivery, sampled_segment

RUN = virtual_time.run

ID = TrajectoryId(0)


class ScriptedEnvironments:
    """Environments that return one step result after a delay."""

    def __init__(self, answer: HostedStepResult, after_s: float = 0.0, *, needs_token_ids: bool = False) -> None:
        self._answer, self._after_s, self.needs_token_ids = answer, after_s, needs_token_ids
        self.latest_turns: list[SampledTurn | None] = []

    def build(self) -> ScriptedEnvironments:
        return self

    async def check(self) -> None: ...

    async def step(
        self,
        key: EpisodeKey,
        record: Record,
        turns: tuple[str, ...],
        *,
        truncated: bool,
        latest_turn: SampledTurn | None = None,
    ) -> HostedStepResult:
        self.latest_turns.append(latest_turn)
        await asyncio.sleep(self._after_s)
        return self._answer

    async def end(self, key: EpisodeKey, record: Record) -> HostedStepResult:
        return HostedStepResult(ended=True)

    def cancel(self, keys: Iterable[EpisodeKey]) -> None: ...

    async def close(self) -> None: ...


def answer(tokens: int) -> HostedStepResult:
    return HostedStepResult(messages=(Message("tool", str(tokens)),))


def reward(score: float) -> HostedStepResult:
    return HostedStepResult(ended=True, reward=score)


FAILED = HostedStepResult(ended=True, error="it broke")


class HostScene:
    """A server with one trajectory, and hosts that run its environment steps."""

    def __init__(self, server: TrajectoryServer) -> None:
        self.server = server
        self.route_number = 0

    @classmethod
    async def create(cls, folder: Path) -> HostScene:
        """Return a scene whose trajectory has a turn of three tokens."""
        config = Body(folder).config("rollout.max_new_tokens=100")
        scene = cls(server_class(World())(actor_settings.server_settings(config, folder / "store", 128), 0.0))
        await scene.server.draw(0, 1)
        await scene.turn(3)
        return scene

    @property
    def trajectory(self) -> Trajectory:
        return self.server._in_flight.live[ID]

    @property
    def reward(self) -> float | None:
        return self.trajectory.reward if ID in self.server._in_flight.scored else None

    async def turn(self, tokens: int) -> None:
        """Sample a whole turn."""
        self.route_number += 1
        await self.server.record_routes((route_item(ID, self.route_number),))
        first = self.trajectory.num_tokens
        sampled = delivery(ID, sampled_segment(range(tokens)), route_number=self.route_number, start=first)
        assert await self.server.deliver([sampled]) == {ID: first + tokens}

    async def step(self, environments: ScriptedEnvironments, server: Any = None) -> list[EnvStepOutcome]:
        """Run the environment step of the current turn. server: replaces the server as seen by the host."""
        host = EnvironmentHost(environments, call_s=5.0)
        await host.start_steps(
            server or self.server, (EnvStepItem(trajectory=ID, route_number=self.route_number, truncated=False),)
        )
        outcomes = await host.next_outcomes(10.0)
        await host.close()
        return outcomes


Meanwhile = Callable[[HostScene], Awaitable[None]]


async def next_turn_of_equal_length(scene: HostScene) -> None:
    await scene.step(ScriptedEnvironments(answer(2)))
    await scene.turn(3)


async def answered_with_nothing(scene: HostScene) -> None:
    await scene.step(ScriptedEnvironments(answer(0)))


async def answered(scene: HostScene) -> None:
    await scene.step(ScriptedEnvironments(answer(2)))


async def restarted_to_equal_length(scene: HostScene) -> None:
    await scene.step(ScriptedEnvironments(FAILED))
    scene.route_number += 1  # a restart's own
    await scene.turn(3)


async def rewarded(scene: HostScene) -> None:
    (told,) = await scene.step(ScriptedEnvironments(reward(0.25)))
    assert (told.ended, told.reward) == (True, 0.25)


# Either reply may be used, so each one has what the server stored.
@pytest.mark.parametrize("late", [answer(4), reward(1.0), FAILED], ids=["an answer", "a reward", "a failure"])
@pytest.mark.parametrize(
    "meanwhile", [next_turn_of_equal_length, answered, answered_with_nothing, restarted_to_equal_length, rewarded]
)
async def test_a_late_reply_of_a_replaced_host_changes_nothing(
    tmp_path: Path, meanwhile: Meanwhile, late: HostedStepResult
) -> None:
    scene = await HostScene.create(tmp_path)
    old = asyncio.create_task(scene.step(ScriptedEnvironments(late, after_s=5.0)))
    await asyncio.sleep(1.0)
    await meanwhile(scene)
    held, route_number, score = scene.trajectory, scene.server._in_flight.route_number(ID), scene.reward
    outcomes = await old
    assert scene.trajectory is held
    assert scene.server._in_flight.route_number(ID) == route_number
    assert scene.reward == score
    (told,) = outcomes
    assert (told.ended, told.reward) == ((True, 0.25) if meanwhile is rewarded else (False, 0.0))
    if meanwhile in (answered, answered_with_nothing):
        assert told.num_tokens == scene.trajectory.num_tokens, "of the accepted answer"
    elif meanwhile is not rewarded:
        assert told.restart_reason, "of an earlier route number"


@pytest.mark.parametrize("earlier", [answer(2), reward(0.25), FAILED], ids=["an answer", "a reward", "a failure"])
async def test_the_outcome_of_a_lost_host_is_returned_without_another_step(
    tmp_path: Path, earlier: HostedStepResult
) -> None:
    """The server has it, but the driver did not receive it."""
    scene = await HostScene.create(tmp_path)
    (first,) = await scene.step(ScriptedEnvironments(earlier))
    environments = ScriptedEnvironments(answer(4))
    (second,) = await scene.step(environments)
    assert environments.latest_turns == []
    assert (second.ended, second.reward, second.num_tokens) == (first.ended, first.reward, first.num_tokens)
    assert bool(second.restart_reason) == bool(first.restart_reason) == (earlier is FAILED)


class DelayedServer:
    """The server as seen by a host that sleeps between its calls."""

    def __init__(self, scene: HostScene, meanwhile: Meanwhile) -> None:
        self._scene, self._meanwhile = scene, meanwhile

    async def episode_states(self, asked: list[tuple[TrajectoryId, int]]) -> list[EpisodeState | None]:
        result = await self._scene.server.episode_states(asked)
        meanwhile, self._meanwhile = self._meanwhile, no_change
        await meanwhile(self._scene)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scene.server, name)


async def no_change(scene: HostScene) -> None: ...


@pytest.mark.parametrize(
    "meanwhile",
    [no_change, next_turn_of_equal_length, answered, answered_with_nothing, restarted_to_equal_length, rewarded],
)
async def test_a_late_host_gives_its_agent_no_turn_of_another_host(tmp_path: Path, meanwhile: Meanwhile) -> None:
    """The host is delayed between its call for the episode and that for the newest turn."""
    scene = await HostScene.create(tmp_path)
    says = ScriptedEnvironments(answer(4), needs_token_ids=True)
    (told,) = await scene.step(says, DelayedServer(scene, meanwhile))
    if meanwhile is no_change:
        (turn,) = says.latest_turns
        assert turn is not None and turn.tokens == (0, 1, 2)
        return
    assert says.latest_turns == [], "its agent received the next attempt or an accepted reply"
    assert (told.ended, told.reward) == ((True, 0.25) if meanwhile is rewarded else (False, 0.0))


async def test_a_trajectory_that_has_ended_has_no_episode_state(tmp_path: Path) -> None:
    scene = await HostScene.create(tmp_path)
    ended, live = await scene.server.episode_states([(TrajectoryId(9), 1), (ID, scene.route_number)])
    assert ended is None
    assert live is not None and live.num_tokens == 3


async def test_scoring_a_response_again_returns_the_first_reward(tmp_path: Path) -> None:
    scene = await HostScene.create(tmp_path)
    (asked,) = await scene.server.scoring_items((ID,), (3,))
    first, second = ScoredResponse(reward=0.5), ScoredResponse(reward=0.75)
    assert await scene.server.record_rewards([RewardItem(ID, asked.num_tokens, asked.route_number, first)]) == [first]
    assert await scene.server.record_rewards([RewardItem(ID, asked.num_tokens, asked.route_number, second)]) == [first]
    assert scene.reward == 0.5
    other = RewardItem(TrajectoryId(1), 1, 0, first)
    assert await scene.server.record_rewards([other]) == [None], "it has no such tokens"
