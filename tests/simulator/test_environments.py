"""Environments in virtual time: each turn is sampled, followed by an environment step, and continued where it fits."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import Counter
from typing import Any, cast

import numpy as np
import pytest

from staleflow.pipeline.config import actor_settings
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.coordination.commands import Command, Route, StepEnvironment
from staleflow.pipeline.coordination.events import EnvironmentFailed, EnvironmentStepped, Event
from staleflow.pipeline.simulator.analysis import Trace, compute_stats, explain_step_time
from staleflow.pipeline.simulator.simulated_run import SimulatedRun
from staleflow.tasks.emulation.batch_simulator import SimulatedBatch
from staleflow.tasks.emulation.emulated_episodes import EmulatedEpisodes, StepFaults, remaining_tokens
from staleflow.tasks.emulation.workload import Turn
from staleflow.tasks.episodes.emulated_host import EmulatedHostSettings
from staleflow.tasks.episodes.step_results import EpisodeKey, HostedStepResult
from tests.simulator.test_simulator import COST, job, run

AGENTS: dict[str, Any] = {
    "task__multi_turn": "yes", "workload__kind": "agentic", "workload__turns": 4.0, "workload__tool_s": 0.5,
    "workload__tool_tokens": 7,
}  # fmt: skip


PLAIN = actor_settings.make_workload(job(workload__kind="agentic", batch__group_size=2))


def agents(**changes: Any) -> RunConfig:
    return job(**(AGENTS | changes))


def test_remaining_tokens_end_at_the_turn_boundary() -> None:
    turns = (Turn(5, 3.0, 20), Turn(6, 1.0, 0), Turn(2))
    results = [remaining_tokens(turns, tokens) for tokens in (0, 4, 5, 24, 25, 30, 31, 32, 33, 40)]
    assert results == [5, 1, 6, 6, 6, 1, 2, 1, 1, 1]


def test_turns_and_environment_steps_of_an_episode_are_sequential() -> None:
    alone = {"steps": 1, "batch__groups_per_step": 1, "batch__group_size": 1, "rollout__instances": 1,
             "training__advantage": "reinforce_plus_plus"}  # fmt: skip
    config = agents(**alone, staleness__eta=0, simulation__reward_s=0.25)
    workload, cost = actor_settings.make_workload(config), config.rollout.cost
    heard: list[tuple[float, Event, list[Command]]] = []
    trace = SimulatedRun(config, workload, observe=lambda *one: heard.append(one), validate_every_event=True).run()
    turns = workload.turns(0, 0)
    assert len(turns) > 1
    assert trace.command_counts["StepEnvironment"] == trace.command_counts["Route"] == len(turns)
    expected_s, context = cost.prefill * workload.prompt_tokens(0), workload.prompt_tokens(0)
    for turn in turns:
        expected_s += cost.decode_s(1, context, turn.tokens) + turn.tool_s + cost.prefill * turn.tool_tokens
        context += turn.tokens + turn.tool_tokens
    assert trace.steps[0].ready_s == pytest.approx(expected_s + 0.25)
    values = [event.tokens for _, event, _ in heard if isinstance(event, EnvironmentStepped)]
    assert values == [sum(t.tokens + t.tool_tokens for t in turns[: i + 1]) for i in range(len(turns) - 1)]


def test_each_turn_has_one_environment_step() -> None:
    config = agents()
    acts: Counter[int] = Counter()
    routed: Counter[int] = Counter()

    def observe(_: float, __: Event, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case StepEnvironment():
                    acts[command.trajectory] += 1
                case Route():
                    routed[command.trajectory] += 1

    workload = actor_settings.make_workload(config)
    trace = SimulatedRun(config, workload, observe=observe, validate_every_event=True).run()
    assert trace.ending_counts["consumed"] == config.steps * config.trajectories_per_step
    for trajectory, count in acts.items():
        assert count <= len(workload.turns(*divmod(trajectory, config.members_started_per_group)))
        assert count <= routed[trajectory]


def test_emulated_episodes_follow_the_workload() -> None:
    config = agents()
    workload = actor_settings.make_workload(config)
    episodes = EmulatedEpisodes(workload)
    turns = workload.turns(2, 1)
    answers = [episodes.step_result(2, 1, number) for number in range(len(turns))]
    assert [a.ended for a in answers] == [False] * (len(turns) - 1) + [True]
    assert [(a.seconds, a.tokens) for a in answers] == [(t.tool_s, t.tool_tokens) for t in turns]
    assert answers[-1].reward == workload.reward(2, 1)
    assert episodes.step_result(2, 1, 0, truncated=True).ended


def test_the_same_seed_gives_the_same_trace() -> None:
    def traced() -> Trace:
        return run(agents(batch__extra_members=1, simulation__mean_loss_interval_s=3.0, simulation__replace_s=1.0))

    assert traced() == traced()


def test_only_a_failed_or_hung_episode_is_restarted() -> None:
    for faults in ({"simulation__failed_step_share": 0.1}, {"simulation__hung_step_share": 0.1}):
        config = agents(
            **faults, environment__step_timeout_s=2.0, rollout__max_attempts=1000, workload__tool_latency="constant"
        )
        failed: Counter[int] = Counter()
        waits: list[float] = []
        asked: dict[int, float] = {}

        def observe(
            now: float,
            event: Event,
            commands: list[Command],
            failed: Counter[int] = failed,
            waits: list[float] = waits,
            asked: dict[int, float] = asked,
        ) -> None:
            if isinstance(event, EnvironmentFailed):
                failed[event.trajectory] += 1
                waits.append(now - asked[event.trajectory])
            asked.update({c.trajectory: now for c in commands if isinstance(c, StepEnvironment)})

        workload = actor_settings.make_workload(config)
        trace = SimulatedRun(config, workload, observe=observe).run()
        assert failed.total() > 20
        assert trace.ending_counts["consumed"] == config.steps * config.trajectories_per_step
        assert set(trace.ending_counts) <= {"consumed", "aborted:run_ended", "aborted:surplus_group"}
        assert compute_stats(config, trace).wasted_tokens > 0
        if "simulation__hung_step_share" in faults:
            assert waits == pytest.approx([2.0] * len(waits))


def test_step_faults_depend_on_task_and_attempt_only() -> None:
    answers = [EmulatedEpisodes(PLAIN, StepFaults(fail_share=0.5, seed=3)).step_result(g, 0, 0) for g in range(400)]
    assert sum(bool(a.error) for a in answers) == pytest.approx(200, abs=40)
    again = EmulatedEpisodes(PLAIN, StepFaults(fail_share=0.5, seed=3))
    assert [again.step_result(g, 0, 0) for g in range(400)] == answers
    assert [again.step_result(g, 0, 0, attempt=1) for g in range(400)] != answers
    assert EmulatedEpisodes(PLAIN, StepFaults(hang_share=1.0)).step_result(0, 0, 0).seconds == math.inf


@pytest.mark.parametrize(("latency", "mean_s", "deviation_s"), [
    ("constant", 10.0, 0.0), ("normal", 10.0, 5.0), ("lognormal", 10 * math.exp(0.125), 5.85),
])  # fmt: skip
def test_tool_durations_follow_their_distribution(latency: str, mean_s: float, deviation_s: float) -> None:
    spread = {"constant": 9.0, "normal": 5.0, "lognormal": 0.5}[latency]
    config = agents(
        workload__tool_s=10.0,
        workload__tool_latency=latency,
        workload__tool_spread=spread,
        workload__fixed_turns=True,
        workload__sigma=0.1,
    )
    workload = actor_settings.make_workload(config)
    turns = [workload.turns(group, 0) for group in range(700)]
    calls = np.array([turn.tool_s for response in turns for turn in response[:-1]])
    assert {len(response) for response in turns} == {4}
    assert calls.min() >= 0
    assert calls.mean() == pytest.approx(mean_s, rel=0.05)
    assert calls.std() == pytest.approx(deviation_s, rel=0.1)
    later = actor_settings.make_workload(dataclasses.replace(config, workload=dataclasses.replace(
        config.workload, reset_s=100.0)))  # fmt: skip
    first = [later.turns(g, 0)[0].tool_s - turns[g][0].tool_s for g in range(50)]
    assert first == pytest.approx([100.0] * 50)


def test_env_tokens_count_toward_the_response_limit() -> None:
    config = agents(rollout__max_new_tokens=60, workload__turns=9.0)
    trace = run(config, validate_every_event=True)
    assert max(step.longest_tokens for step in trace.steps) <= 60
    capped = run(agents(environment__max_turns=2), validate_every_event=True)
    assert (
        capped.command_counts["StepEnvironment"]
        <= 2 * capped.command_counts["Train"] * config.trajectories_per_step + 200
    )


def test_emulated_environments_end_an_episode_at_its_limits() -> None:
    long = {"workload__turns": 9.0, "workload__fixed_turns": True, "workload__tool_s": 2.0,
            "workload__tool_latency": "constant", "rollout__engine__time_scale": 1e4}  # fmt: skip

    def steps(num_turns: int, **limits: Any) -> HostedStepResult:
        settings = actor_settings.environment_settings(agents(**long, **limits))
        environments = cast(EmulatedHostSettings, settings).build()
        key = EpisodeKey(group=1)
        return asyncio.run(environments.step(key, {}, [""] * num_turns, truncated=False))

    assert not steps(2).ended and steps(2, environment__max_turns=2).ended
    assert not steps(2, environment__episode_timeout_s=5.0).error
    late = steps(3, environment__episode_timeout_s=5.0)
    assert late.error == "step 3 takes 2 s, environment.episode_timeout_s = 5 s" and late.environment_s == 1.0


def test_steps_wait_for_a_slot_when_concurrency_is_reached() -> None:
    plenty, few = agents(), agents(environment__concurrency=2)
    assert plenty.environment.concurrency > plenty.max_trajectories_in_flight
    assert run(few).finished_s > 2 * run(plenty).finished_s


def test_a_later_turn_prefills_only_new_tokens_while_cached() -> None:
    instance = SimulatedBatch(COST, kv_capacity=100, max_running=4)
    instance.submit(0.0, 0, 1, 10, 0, (Turn(20),))
    (first,) = instance.advance(1e3)
    assert (instance.kv_tokens, instance.kept_tokens) == (0, 30)
    instance.submit(first.at_s, 0, 2, 10, 25, (Turn(40),), num_env_tokens=5)
    (second,) = instance.advance(1e3)
    assert second.at_s - first.at_s == pytest.approx(COST.prefill * 5 + COST.decode_s(1, 35, 15))
    work = instance.work
    assert (work.new_prefill_tokens, work.cached_tokens, work.repeated_prefill_tokens, instance.kept_tokens) == (
        15,
        30,
        0,
        50,
    )
    # Running requests need the memory: the least recently used goes first.
    instance.submit(second.at_s, 1, 1, 10, 0, (Turn(10),))
    (third,) = instance.advance(1e3)
    assert instance.kept_tokens == 70
    instance.submit(third.at_s, 2, 1, 30, 0, (Turn(15),))
    (fourth,) = instance.advance(1e3)
    assert instance.kept_tokens == 20 + 45
    instance.submit(fourth.at_s, 1, 2, 10, 12, (Turn(14),), num_env_tokens=2)
    instance.advance(1e3)
    assert (work.cached_tokens, work.repeated_prefill_tokens) == (50, 0)
    instance.load(1e3, 1.0)
    assert instance.kept_tokens == 0
    instance.submit(1e4, 0, 3, 10, 45, (Turn(50),), num_env_tokens=5)
    instance.advance(1e5)
    assert (work.cached_tokens, work.repeated_prefill_tokens) == (50, 50)


def test_cache_affinity_reduces_prefill() -> None:
    long = {"workload__turns": 10.0, "workload__median": 200.0, "rollout__max_new_tokens": 1000,
            "rollout__engine__kv_tokens": 20_000, "workload__tool_tokens": 20,
            "rollout__routing": "benchmarks.routing_rules:Random"}  # fmt: skip
    measured = {}
    for affinity in (True, False):
        config = agents(**long, rollout__cache_affinity=affinity)
        trace = run(config)
        m = compute_stats(config, trace)
        measured[affinity] = m
        prefilled = sum(i.work.new_prefill_tokens for i in trace.instances)
        assert m.cached_tokens + m.reprefilled_tokens > 2 * prefilled
    shares = {a: m.cached_tokens / (m.cached_tokens + m.reprefilled_tokens) for a, m in measured.items()}
    assert shares[True] > 0.8
    assert shares[False] < shares[True] - 0.2
    assert "were still cached" in "\n".join(explain_step_time(measured[True]))
    assert 0 < measured[True].max_kept_tokens <= 20_000


def test_with_synchronous_turns_a_turn_takes_as_long_as_the_slowest_environment() -> None:
    calls = {"workload__tool_latency": "normal", "workload__tool_s": 10.0, "workload__tool_spread": 10.0,
             "workload__fixed_turns": True, "workload__turns": 5.0, "workload__sigma": 0.0,
             "environment__step_timeout_s": 250.0, "environment__episode_timeout_s": 1e9,
             "environment__concurrency": 1000}  # fmt: skip
    batch = {"steps": 1, "staleness__eta": 0, "batch__groups_per_step": 16, "batch__group_size": 8,
             "rollout__engine__max_running": 128, "rollout__engine__kv_tokens": 100_000}  # fmt: skip
    config = agents(**calls, **batch)
    free, locked = (
        run(dataclasses.replace(config, simulation=dataclasses.replace(config.simulation, lock_step=locked)))
        for locked in (False, True)
    )
    workload = actor_settings.make_workload(config)
    seconds = np.array([[t.tool_s for t in workload.turns(g, m)[:-1]] for g in range(16) for m in range(8)])
    assert free.steps[0].ready_s == pytest.approx(seconds.sum(1).max(), abs=5)
    assert locked.steps[0].ready_s == pytest.approx(seconds.max(0).sum(), abs=5)
    assert free.steps[0].tokens == locked.steps[0].tokens


def test_truncated_episodes_count_their_sampled_tokens() -> None:
    """Two observations of 300 tokens do not fit into 400 tokens, so episodes end after a sampled turn."""
    trace = run(agents(rollout__max_new_tokens=400, workload__tool_tokens=300, workload__median=100.0))
    assert all(step.tokens >= step.longest_tokens > 0 and step.context_tokens >= 0 for step in trace.steps)
