"""The episode forecast learns the share of env tokens from finished episodes; without environments it is zero."""

from __future__ import annotations

import pytest

from staleflow.pipeline.config import actor_settings
from staleflow.pipeline.coordination.forecast import AVERAGED_EPISODES, SampledTokenShare
from staleflow.pipeline.simulator.simulated_run import SimulatedRun
from tests.simulator.test_environments import agents


def test_without_environments_all_tokens_are_sampled() -> None:
    forecast = SampledTokenShare()
    assert forecast.expected_sampled_tokens(123.0) == 123.0


def test_shares_are_those_of_the_latest_episodes() -> None:
    forecast = SampledTokenShare()
    for _ in range(3000):
        forecast.observe(100, 90)
    for _ in range(3000):
        forecast.observe(200, 50)
    assert forecast.expected_sampled_tokens(400.0) == pytest.approx(300.0, rel=1e-3)


def test_an_episode_has_the_weight_of_one_averaged_episode() -> None:
    forecast = SampledTokenShare()
    forecast.observe(100, 90)
    forecast.observe(200, 50)
    earlier = 1 - 1 / AVERAGED_EPISODES
    assert forecast.expected_sampled_tokens(1.0) == pytest.approx(
        1 - (90 * earlier + 50) / (100 * earlier + 200), rel=1e-12
    )


def test_a_run_learns_the_tokens_and_times_of_its_environments() -> None:
    config = agents(simulation__reward_s=0.0, steps=30)
    workload = actor_settings.make_workload(config)
    simulated = SimulatedRun(config, workload)
    simulated.run()
    turns = [workload.turns(group, member) for group in range(150) for member in range(3)]
    tokens = sum(turn.tokens + turn.tool_tokens for response in turns for turn in response)
    given = sum(turn.tool_tokens for response in turns for turn in response)
    learned = simulated.coordinator.forecast.sampled_token_share
    assert learned.expected_sampled_tokens(1.0) == pytest.approx(1 - given / tokens, abs=0.05)
