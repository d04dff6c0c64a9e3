"""Environments in virtual time: each turn is sampled, then answered, and the next one is sampled where it fits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from pipeline.config import actor_settings, deciding
from pipeline.config.schema import RunConfig
from pipeline.coordination.commands import Act, Command, Route
from pipeline.coordination.events import EnvironmentAnswered, Event
from pipeline.simulator.body import SimulatedRun
from pipeline.simulator.trace import Trace
from tasks.episodes.emulated import EmulatedEpisodes, left_to_sample
from tasks.workload import Turn
from tests.simulator.test_simulator import job, run

AGENTS: dict[str, Any] = {
    "task__environment": "yes", "workload__kind": "agentic", "workload__turns": 4.0, "workload__tool_s": 0.5,
    "workload__tool_tokens": 7,
}  # fmt: skip


def agents(**changes: Any) -> RunConfig:
    return job(**(AGENTS | changes))


def test_a_turn_ends_where_its_tokens_do() -> None:
    turns = (Turn(5, 3.0, 20), Turn(6, 1.0, 0), Turn(2))
    found = [left_to_sample(turns, tokens) for tokens in (0, 4, 5, 24, 25, 30, 31, 32, 33, 40)]
    assert found == [5, 1, 6, 6, 6, 1, 2, 1, 1, 1]


def test_an_episode_takes_its_turns_and_its_answers_one_after_the_other() -> None:
    alone = {"steps": 1, "batch__groups_per_step": 1, "batch__group_size": 1, "rollout__instances": 1,
             "training__advantage": "reinforce_plus_plus"}  # fmt: skip
    config = agents(**alone, staleness__eta=0, simulation__reward_s=0.25)
    workload, cost = actor_settings.make_workload(config), deciding.cost_model(config)
    heard: list[tuple[float, Event, list[Command]]] = []
    trace = SimulatedRun(config, workload, observe=lambda *one: heard.append(one), validate_each=True).run()
    turns = workload.turns(0, 0)
    assert len(turns) > 1
    assert trace.commands["Act"] == trace.commands["Route"] == len(turns)
    expected_s, context = 0.0, workload.prompt_tokens(0)
    for turn in turns:
        expected_s += cost.prefill * context + cost.decode_s(1, context, turn.tokens) + turn.tool_s
        context += turn.tokens + turn.tool_tokens
    assert trace.steps[0].ready_s == pytest.approx(expected_s + 0.25)
    given = [event.tokens for _, event, _ in heard if isinstance(event, EnvironmentAnswered)]
    assert given == [sum(t.tokens + t.tool_tokens for t in turns[: i + 1]) for i in range(len(turns) - 1)]


def test_each_turn_of_every_episode_is_answered_once() -> None:
    config = agents()
    acts: Counter[int] = Counter()
    routed: Counter[int] = Counter()

    def observe(_: float, __: Event, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Act():
                    acts[command.trajectory] += 1
                case Route():
                    routed[command.trajectory] += 1

    workload = actor_settings.make_workload(config)
    trace = SimulatedRun(config, workload, observe=observe, validate_each=True).run()
    assert trace.ended["consumed"] == config.steps * config.trajectories_per_step
    for trajectory, count in acts.items():
        assert count <= len(workload.turns(*divmod(trajectory, config.members_started)))
        assert count <= routed[trajectory]


def test_environments_answer_what_the_workload_says() -> None:
    config = agents()
    workload = actor_settings.make_workload(config)
    episodes = EmulatedEpisodes(workload, config.members_started)
    turns = workload.turns(2, 1)
    trajectory = 2 * config.members_started + 1
    answers = [episodes.answer(trajectory, number) for number in range(len(turns))]
    assert [a.ended for a in answers] == [False] * (len(turns) - 1) + [True]
    assert [(a.seconds, a.tokens) for a in answers] == [(t.tool_s, t.tool_tokens) for t in turns]
    assert answers[-1].reward == workload.reward(2, 1)
    assert episodes.answer(trajectory, 0, cut=True).ended


def test_the_same_seed_gives_the_same_trace() -> None:
    def traced() -> Trace:
        return run(agents(batch__extra_members=1, simulation__lost_every_s=3.0, simulation__replace_s=1.0))

    assert traced() == traced()
