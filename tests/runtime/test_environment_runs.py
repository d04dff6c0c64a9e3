"""Runs with environments over in-process actors in virtual time."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from staleflow.pipeline.coordination.commands import StepEnvironment
from staleflow.pipeline.coordination.events import EnvironmentStepped
from staleflow.pipeline.processes.worker_protocol import NoFreeWorker
from staleflow.pipeline.profiling.latencies import LatencyTracker
from staleflow.pipeline.runtime import environment_hosts
from staleflow.pipeline.runtime.environment_hosts import FAILURE_WINDOW, EnvironmentHosts
from staleflow.stores.errors import ActorFailed, ActorLost, TooManyFailedEnvironments
from staleflow.stores.trajectory import AbortReason, EnvSpan, TrajectoryId
from staleflow.tasks.actors.environment_host import FAILED_BEFORE, EnvStepOutcome
from staleflow.tasks.episodes.emulated_host import EmulatedEnvironments
from staleflow.tasks.episodes.step_results import EpisodeKey, HostedStepResult
from tests.support.bodies import Body, Run
from tests.support.driver_runs import until
from tests.support.in_process import Fault, Moment

AGENTS = (
    "task.multi_turn=yes",
    "workload.kind=agentic",
    "workload.median=20",
    "workload.turns=3",
    "workload.tool_s=2",
    "workload.tool_tokens=3",
    "batch.extra_members=1",
)


@pytest.fixture
def body(tmp_path: Path) -> Body:
    return Body(tmp_path / "runs")


def test_every_turn_has_an_environment_step_and_episodes_are_stored_whole(body: Body) -> None:
    run = body.checked_run(*AGENTS)
    acts, routes = run.commands("StepEnvironment"), run.commands("Route")
    answered = run.events("EnvironmentStepped")
    assert len(acts) > len(run.events("TrajectoryScored")) >= 12
    assert len(answered) > 12
    assert not run.commands("Score")
    assert len({(c.trajectory, c.route_number) for c in routes}) == len(routes)
    rows = [row.trajectory for row in run.store.trajectories()]
    waited = [span.seconds for t in rows for span in t.spans if isinstance(span, EnvSpan)]
    assert all(s > 0 for s in waited)
    assert {span.role for t in rows for span in t.spans if isinstance(span, EnvSpan)} == {"tool"}
    (host,) = run.outcomes.environment_hosts
    assert (host.host, host.slots) == ("environment-0", run.config.environment.concurrency)


def test_environment_overhead_excludes_step_duration_and_queueing(body: Body) -> None:
    run = body.checked_run(*AGENTS, "environment.concurrency=1")
    took = [now - acted for now, acted, _ in environment_steps(run)]
    own = [seconds for _, _, seconds in environment_steps(run)]
    assert min(own) > 0 and max(took) > 3 * min(took)  # one at a time: most wait for their place
    tracker = LatencyTracker()
    for entry in run.entries:
        tracker.observe(entry.now, entry.event, entry.commands)
    result = tracker.means
    assert 0 < result["environment_overhead_s"] < 0.1 * sum(took) / len(took)
    assert 0 < result["reward_s"] < 0.1 * sum(took) / len(took)


def environment_steps(run: Run) -> list[tuple[float, float, float]]:
    """Return (end time, start time, duration of the environment including the wait for a slot) of each step."""
    asked: dict[tuple[int, int], float] = {}
    found: list[tuple[float, float, float]] = []
    for entry in run.entries:
        event = entry.event
        if isinstance(event, EnvironmentStepped):
            assert event.seconds is not None
            found.append((entry.now, asked[event.trajectory, event.route_number], event.seconds))
        asked.update(
            {(c.trajectory, c.route_number): entry.now for c in entry.commands if isinstance(c, StepEnvironment)}
        )
    return found


def test_cached_contexts_are_counted_per_step_and_released_after_episodes(body: Body) -> None:
    run = body.run(*AGENTS)
    steps = run.outcomes.steps
    assert all(step["prefilled_tokens"] > 0 for step in steps)
    assert sum(step["cached_tokens"] for step in steps) > 0
    received = [t for call in run.workers.calls if call.method == "abort" for t in call.args[0]]
    assert {c.trajectory for c in run.commands("ReleaseCache")} <= set(received)
    assert run.commands("ReleaseCache")


def test_surplus_episodes_are_closed(body: Body) -> None:
    run = body.run(*AGENTS)
    dismissed = [c.trajectory for c in run.commands("CloseEnvironment")]
    assert len(dismissed) == len(set(dismissed)) > 0
    handed = [t for call in run.workers.calls if call.method == "close_episodes" for t in call.args[0]]
    assert set(handed) <= set(dismissed)
    surplus = {r.trajectory.id for r in run.store.trajectories() if r.reason is AbortReason.SURPLUS_MEMBER}
    assert set(dismissed) & surplus


@pytest.mark.parametrize("method", ["start_steps", "next_outcomes", "close_episodes"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_lost_environment_host_is_replaced_and_called_again(body: Body, method: str, moment: Moment) -> None:
    run = body.checked_run(*AGENTS, faults=[Fault(actor="environment-0", method=method, nth=2, dies=moment)])
    (loss,) = run.outcomes.lost_actors
    assert "environment-0 is gone" in loss
    assert run.workers.names.count("environment-0") == 2


@pytest.mark.parametrize("method", ["__init__", "check"])
def test_an_environment_host_whose_replacement_dies_while_it_is_placed_is_replaced(body: Body, method: str) -> None:
    faults = [
        Fault(actor="environment-0", method="next_outcomes", nth=3, dies="before"),
        Fault(actor="environment-0", method=method, nth=2, dies="before"),
    ]
    assert len(body.checked_run(*AGENTS, faults=faults).outcomes.lost_actors) == 2


@pytest.mark.parametrize("error", [ActorFailed("OSError: no space left"), ActorLost("it is gone")])
def test_an_environment_host_that_fails_after_its_move_is_replaced(body: Body, error: Exception) -> None:
    async def give_back(run: Run) -> None:
        await until(run, lambda: run.workers.methods("environment-0").count("start_steps") == 2)
        run.driver.release_worker(run.workers.placed["environment-0"].address)

    fails = Fault(actor="environment-0", method="check", nth=2, error=error)
    run = body.checked_run(*AGENTS, faults=[fails], meanwhile=give_back)
    assert len(run.outcomes.lost_actors) == 1
    assert run.workers.names.count("environment-0") == 3


def test_an_environment_host_that_finds_no_free_worker_when_it_moves_is_replaced(body: Body) -> None:
    async def give_back(run: Run) -> None:
        await until(run, lambda: run.workers.methods("environment-0").count("start_steps") == 2)
        run.driver.release_worker(run.workers.placed["environment-0"].address)

    none = Fault(actor="environment-0", method="__init__", nth=2, error=NoFreeWorker("no free worker"))
    run = body.checked_run(*AGENTS, faults=[none], meanwhile=give_back)
    (loss,) = run.outcomes.lost_actors
    assert "environment-0 is gone" in loss
    assert run.workers.names.count("environment-0") == 2


def test_a_slow_replacement_of_an_environment_host_does_not_count_as_stuck(body: Body) -> None:
    faults = [
        Fault(actor="environment-0", method="next_outcomes", nth=3, dies="before"),
        Fault(actor="environment-0", method="__init__", nth=2, late_s=90.0),
    ]
    run = body.checked_run(*AGENTS, "environment.hosts=2", faults=faults)
    assert run.config.deadlines.stuck_s < 90.0
    assert len(run.outcomes.lost_actors) == 1


def test_an_environment_host_that_times_out_is_replaced(body: Body) -> None:
    run = body.checked_run(
        *AGENTS, faults=[Fault(actor="environment-0", method="next_outcomes", nth=3, silent="before")]
    )
    assert "environment-0 did not answer within 5 s (deadlines.call_s)" in run.outcomes.lost_actors[0]


def test_a_lost_trajectory_server_is_restored_during_episodes(body: Body) -> None:
    run = body.checked_run(*AGENTS, faults=[Fault(actor="server", method="add_observations", nth=3, dies="after")])
    assert "server is gone" in run.outcomes.lost_actors[0]


class Unreachable:
    """A server that an environment host does not reach."""

    def __getattr__(self, method: str) -> Any:
        async def refused(*_: object) -> None:
            raise OSError("no route to host")

        return refused


def cut_off(run: Run, fails: Iterable[bool], num_reached: int = 3) -> None:
    """Let the only environment host not reach the server in some steps, after `num_reached` calls."""
    host = run.workers.actor("environment-0")
    reached, calls, remaining = host.start_steps, itertools.count(), iter(fails)

    def start(server: Any, items: Any) -> Any:
        fails_now = next(calls) >= num_reached and next(remaining, False)
        return reached(Unreachable() if fails_now else server, items)

    host.start_steps = start


def test_an_environment_host_that_cannot_reach_the_server_is_replaced(body: Body) -> None:
    """One failure of its replacement is not enough, though it is the first that is known of it."""
    runs: list[Run] = []
    later = iter([True])

    async def disconnect(run: Run) -> None:
        runs.append(run)
        await until(run, lambda: "start_steps" in run.workers.methods("environment-0"))
        cut_off(run, itertools.repeat(True))

    replaced = Fault(actor="environment-0", method="check", nth=2, act=lambda: cut_off(runs[0], later, num_reached=0))
    run = body.checked_run(*AGENTS, "deadlines.stuck_s=100", faults=[replaced], meanwhile=disconnect)
    (loss,) = run.outcomes.lost_actors
    assert "environment-0 does not reach the server, which answers" in loss
    assert run.workers.names.count("environment-0") == 2
    assert not list(later)


def test_an_environment_host_that_reaches_the_server_again_is_not_replaced(body: Body) -> None:
    """It fails to at times, more often than it may in succession."""
    fails = iter([True, False, False, False] * 6)

    async def disconnect(run: Run) -> None:
        await until(run, lambda: "start_steps" in run.workers.methods("environment-0"))
        cut_off(run, fails)

    run = body.checked_run(*AGENTS, "steps=6", "deadlines.stuck_s=100", meanwhile=disconnect)
    assert run.outcomes.lost_actors == []
    assert not list(fails)


def test_a_failed_environment_restarts_and_gives_no_zero_reward(body: Body) -> None:
    run = body.checked_run(*AGENTS, "simulation.failed_step_share=0.1")
    failed = Counter(event.trajectory for _, event in run.events("EnvironmentFailed"))
    assert failed
    assert not any(row.trajectory.error for row in run.store.trajectories())
    reasons = {row.reason for row in run.store.trajectories()}
    assert max(failed.values()) <= 3 or AbortReason.ENVIRONMENT_FAILED in reasons


@pytest.mark.parametrize(("actor", "method"), [("environment-0", "next_outcomes"), ("server", "restart")])
def test_a_failure_with_a_lost_outcome_is_counted_once(body: Body, actor: str, method: str) -> None:
    faults = [Fault(actor=actor, method=method, nth=nth, dies="after") for nth in (2, 4)]
    run = body.run(*AGENTS, "simulation.failed_step_share=0.3", "environment.max_failed_share=1", faults=faults)
    run.check_kept()
    failed = [event for _, event in run.events("EnvironmentFailed")]
    assert any(event.error == FAILED_BEFORE for event in failed)
    assert len({(event.trajectory, event.route_number) for event in failed}) == len(failed)


def test_a_hung_environment_affects_only_its_episode(body: Body) -> None:
    run = body.checked_run(*AGENTS, "simulation.hung_step_share=0.05", "environment.step_timeout_s=8")
    assert any("never ends" in event.error for _, event in run.events("EnvironmentFailed"))


def test_episodes_lost_with_their_host_are_not_failures(body: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes that cannot be set back start again, more often than rollout.max_attempts allows failures, and a single
    failure would end the run."""
    step = EmulatedEnvironments.step

    async def once_begun(self: Any, key: EpisodeKey, record: Any, turns: Any, **more: Any) -> HostedStepResult:
        begun = self.__dict__.setdefault("begun", set())
        if len(turns) > 1 and key not in begun:
            return HostedStepResult(ended=True, error="start it again", lost=True)
        begun.add(key)
        return await step(self, key, record, turns, **more)

    monkeypatch.setattr(EmulatedEnvironments, "step", once_begun)
    monkeypatch.setattr(environment_hosts, "FAILURE_WINDOW", 1)
    faults = [Fault(actor="environment-0", method="next_outcomes", nth=nth, dies="after") for nth in (5, 11, 17)]
    rules = ("environment.max_failed_share=0", "rollout.max_attempts=0", "workload.tool_s=0.5")
    run = body.checked_run(*AGENTS, *rules, faults=faults)
    assert len(run.outcomes.lost_actors) == 3
    assert run.events("EnvironmentFailed")
    assert all(event.lost for _, event in run.events("EnvironmentFailed"))
    assert AbortReason.ENVIRONMENT_FAILED not in {row.reason for row in run.store.trajectories()}


def test_the_share_of_failures_is_that_of_ended_episodes(body: Body) -> None:
    """Episodes that fail at their third step fail all the same. A share that equals the limit does not end the run."""
    config = body.config(*AGENTS, "environment.max_failed_share=0.29")
    hosts = EnvironmentHosts(config, cast(Any, None), lambda event: None)
    step = EnvStepOutcome(trajectory=TrajectoryId(0), route_number=0)
    ends, fails = replace(step, ended=True), replace(step, restart_reason="broken")
    for outcome in [ends] * 71 + [step, step, fails] * 29:
        hosts._check_failures(outcome)
    with pytest.raises(
        TooManyFailedEnvironments, match=r"30 of their latest 100 episodes.* allows 0\.29; last: broken"
    ):
        hosts._check_failures(fails)


def test_environments_that_always_fail_end_the_run(body: Body) -> None:
    run = body.run(*AGENTS, "simulation.failed_step_share=1")
    error = run.raised()
    assert isinstance(error, TooManyFailedEnvironments)
    assert f"environments failed in {FAILURE_WINDOW} of their latest {FAILURE_WINDOW} episodes" in str(error)
    run.check_kept()
