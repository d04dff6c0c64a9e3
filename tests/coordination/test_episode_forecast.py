"""What environments add to lengths is learned from finished episodes, and is nothing where there are none."""

from __future__ import annotations

import pytest

from staleflow.pipeline.config import actor_settings
from staleflow.pipeline.coordination.episode_forecast import EpisodeForecast
from staleflow.pipeline.coordination.forecast import LengthForecast
from staleflow.pipeline.coordination.pacing import Pacing
from staleflow.pipeline.coordination.running_means import Measured, RunningMean
from staleflow.pipeline.simulator.simulated_run import SimulatedRun
from staleflow.stores.trajectory import GroupId
from staleflow.tasks.emulation.cost_model import CostModel
from tests.simulator.test_environments import agents

COST = CostModel(k1=1e-5, k2=0.004, k3=0.0002, k4=0.001, b=0.002, prefill=0.0005)


def test_without_environments_all_tokens_are_sampled() -> None:
    forecast = EpisodeForecast()
    assert (forecast.sampled(123.0), forecast.acting_s(123.0)) == (123.0, 0.0)


def test_the_shares_are_those_of_the_latest_episodes() -> None:
    forecast = EpisodeForecast()
    for _ in range(3000):
        forecast.ended(100, 90, 1.0)
    for _ in range(3000):
        forecast.ended(200, 50, 30.0)
    assert forecast.sampled(400.0) == pytest.approx(300.0, rel=1e-3)
    assert forecast.acting_s(400.0) == pytest.approx(60.0, rel=1e-3)


def test_an_episode_has_less_time_for_a_token_by_what_its_environment_takes() -> None:
    paces = []
    for given_tokens, acting_s in ((0, 0.0), (50, 0.0), (0, 2.0)):
        lengths = LengthForecast(1000, rare=0.01)
        pacing = Pacing(COST, lengths, eta=2, groups=2, group_size=2, slack=1.0, recomputes=True)
        for group in range(200):
            lengths.finished(GroupId(group), 100, 0.0)
            lengths.episodes.ended(100, given_tokens, acting_s)
        pacing.step_started(0, 0.0)
        pacing.step_finished(20.0)
        measured = Measured(prompt_tokens=RunningMean(50.0))
        pacing.replan(1, 8, 10_000, measured)
        plan = pacing.plan.interval_s
        assert plan == pytest.approx(20.0)
        paces.append(pacing.pace_s(1, GroupId(0), 0, 0.0))
    plain, half_given, acting = paces
    assert plain == pytest.approx(20.0 / 100)
    assert half_given == pytest.approx(20.0 / 50)
    assert acting == pytest.approx(18.0 / 100)


def test_a_run_learns_what_its_environments_take() -> None:
    config = agents(simulation__reward_s=0.0, steps=30)
    workload = actor_settings.make_workload(config)
    simulated = SimulatedRun(config, workload)
    simulated.run()
    turns = [workload.turns(group, member) for group in range(150) for member in range(3)]
    tokens = sum(turn.tokens + turn.tool_tokens for response in turns for turn in response)
    given = sum(turn.tool_tokens for response in turns for turn in response)
    tool_s = sum(turn.tool_s for response in turns for turn in response)
    learned = simulated.coordinator.forecast.episodes
    assert learned.sampled(1.0) == pytest.approx(1 - given / tokens, abs=0.05)
    assert learned.acting_s(1.0) == pytest.approx(tool_s / tokens, rel=0.3)
