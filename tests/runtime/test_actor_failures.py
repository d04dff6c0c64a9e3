"""The driver when actors die during any call, hang, reply late, or several of these.

Each run is checked with `Run.check` or `Run.check_kept`: conservation, the staleness bound, the order of tokens, and a
journal that replays to the same commands.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from staleflow.pipeline.processes.worker_protocol import NoFreeWorker
from staleflow.pipeline.runtime.scoring import ScoreQueue
from staleflow.stores.auditing.weight_counts import WeightCheckCounter
from staleflow.stores.errors import ActorFailed, ActorLost, ConfigError
from staleflow.stores.trajectory import AbortReason, Fate
from tests.support.bodies import Body, Run
from tests.support.driver_runs import CALLS, IN_RUN, LONG, MOVING, REDUNDANT, first_call, long_ones, until
from tests.support.in_process import CREATE_S, Fault
from tests.support.scripted import World


async def no_nanny(run: Run) -> None:
    run.workers.nanny = False


# -- an engine reports what cannot be stored ----------------------------------------------------------------------


def test_a_response_with_a_non_finite_logprob_is_retried_and_then_fails(body: Body) -> None:
    run = body.checked_run("steps=3", world=World(not_finite=lambda trajectory: trajectory == 3))
    failures = [event for _, event in run.events("TrajectoryFailed")]
    assert {event.trajectory for event in failures} == {3}
    assert len(failures) == run.config.rollout.max_attempts + 1
    assert all("has a logprob of nan" in event.error for event in failures)
    (row,) = (row for row in run.store.trajectories() if row.trajectory.id == 3)
    assert (row.fate, row.reason) == (Fate.ABORTED, AbortReason.ENGINE_FAILED)
    assert row.trajectory.num_tokens == 0


# -- a rollout instance is lost ------------------------------------------------------------------------------------


BUSIEST: dict[str, str] = {}
"""An instance on which a method is called in the run of its configuration, by method; the same one in every run."""


def busiest(body: Body, method: str) -> str:
    """Return an instance on which `method` is called in a run of that configuration."""
    if method not in BUSIEST:
        run = body.run(*CALLS[method], world=long_ones())
        BUSIEST[method] = next(c.actor for c in run.workers.calls if c.method == method)
    return BUSIEST[method]


def check_replaced(run: Run, instance: str, why: str) -> None:
    run.check()
    (loss,) = run.outcomes.lost_actors
    assert instance in loss
    assert why in loss
    assert f"{instance}.1" in run.workers.names
    ((_, lost),) = run.events("InstanceLost")
    assert lost.instance == instance
    assert run.loss_counts[-1] == 1


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("method", CALLS)
def test_an_instance_that_dies_during_a_call_is_replaced(body: Body, method: str, moment: Any) -> None:
    """Before or after the call took effect, its trajectories continue elsewhere and none is lost."""
    victim = busiest(body, method)
    run = body.run(
        *CALLS[method], world=long_ones(), faults=[Fault(actor=victim, method=method, nth=IN_RUN[method], dies=moment)]
    )
    check_replaced(run, victim, f"{victim} is gone: connection closed")


@pytest.mark.parametrize("method", CALLS)
def test_an_instance_that_does_not_reply_is_replaced_after_call_s(body: Body, method: str) -> None:
    victim = busiest(body, method)
    run = body.run(
        *CALLS[method],
        world=long_ones(),
        faults=[Fault(actor=victim, method=method, nth=IN_RUN[method], silent="after")],
    )
    # A poll waits half a second, and three of these methods call the trajectory server, which may also take call_s.
    allowed_s = {"next_events": 6.5, "route": 6, "interrupt": 6}.get(method, 3)
    check_replaced(run, victim, f"{victim} did not answer within {allowed_s:g} s (deadlines.call_s)")
    begun_s, asked_s = (first_call(run, victim, name) for name in ("next_events", method))
    lost_s, _ = run.events("InstanceLost")[0]
    assert lost_s == pytest.approx(asked_s + allowed_s - begun_s, abs=0.1)


@pytest.mark.parametrize("method", CALLS)
def test_a_call_with_a_connection_error_counts_as_a_loss(body: Body, method: str) -> None:
    victim = busiest(body, method)
    faults = [Fault(actor=victim, method=method, nth=IN_RUN[method], error=OSError("connection reset by peer"))]
    check_replaced(body.run(*CALLS[method], world=long_ones(), faults=faults), victim, "connection reset by peer")


@pytest.mark.parametrize("method", CALLS)
def test_a_late_reply_within_its_timeout_is_accepted(body: Body, method: str) -> None:
    victim = busiest(body, method)
    run = body.checked_run(
        *CALLS[method], world=long_ones(), faults=[Fault(actor=victim, method=method, nth=IN_RUN[method], late_s=2.0)]
    )
    assert run.outcomes.lost_actors == []


def test_trajectories_of_a_lost_instance_continue_on_its_replacement(body: Body) -> None:
    """The run has one instance, so everything runs on its replacement."""
    run = body.run("rollout.instances=1", faults=[Fault(actor="rollout-0", method="report", nth=2, dies="before")])
    check_replaced(run, "rollout-0", "connection closed")
    instances = {s.instance for row in run.store.trajectories() for s in row.trajectory.segments}
    assert instances in ({"rollout-0", "rollout-0.1"}, {"rollout-0.1"})
    joined = [e.instance for _, e in run.events("InstanceJoined")]
    assert joined == ["rollout-0", "rollout-0.1"]


def test_a_replacement_pulls_the_newest_version_before_it_joins(body: Body) -> None:
    run = body.run("steps=5", faults=[Fault(actor="rollout-0", method="pull", nth=3, dies="before")])
    check_replaced(run, "rollout-0", "connection closed")
    joined = next(e for _, e in run.events("InstanceJoined") if e.instance == "rollout-0.1")
    assert joined.version >= 2
    methods = run.workers.methods("rollout-0.1")
    assert methods[0] == "pull"


@pytest.mark.parametrize("how", ["weights", "logprobs"])
def test_an_instance_with_wrong_weights_is_refused_before_its_next_token(body: Body, how: str) -> None:
    """The weights differ, or they cannot be compared and their logprobs differ."""

    def wrong(instance: str, version: int) -> bool:
        return instance == "rollout-0" and version == 2

    world = World(loads_wrong=wrong) if how == "weights" else World(computes_wrong=wrong)
    run = body.run("steps=6", world=world)
    check_replaced(run, "rollout-0", "rollout-0 is out of service at version 2: ")
    segments = [s for row in run.store.trajectories() for s in row.trajectory.segments if s.instance == "rollout-0"]
    assert {s.version for s in segments} <= {0, 1}
    checks = WeightCheckCounter(run.records)
    counts = checks.counts()
    assert (counts.contradicted, counts.not_verified) == (1, 0)
    assert counts.verified >= 2 * 6
    (finding,) = checks.findings()
    assert finding.message.startswith("rollout-0 was taken out of service at version 2: ")


def test_a_refusal_is_committed_at_once(body: Body) -> None:
    """Two refusals in one step give two commits."""
    world = World(loads_wrong=lambda instance, version: instance in ("rollout-0", "rollout-1") and version == 2)
    run = body.checked_run("steps=6", world=world)
    refusals = [record for record in run.records if record.kind == "refusal"]
    assert sorted(c.instance for r in refusals for c in r.weight_checks if c.refused) == ["rollout-0", "rollout-1"]
    assert all(record.num_rows == 0 for record in refusals)
    assert not any(check.refused for r in run.records if r.kind != "refusal" for check in r.weight_checks)


def test_weights_that_cannot_be_compared_are_reported_as_not_verified(body: Body) -> None:
    run = body.checked_run(world=World(not_compared="fused in a way that is unknown here"))
    (note,) = (note for note in run.outcomes.notes if "not verified" in note)
    assert "fused in a way that is unknown here" in note
    counts = WeightCheckCounter(run.records).counts()
    assert counts.verified == 0 and counts.not_verified > 0
    assert "NOT VERIFIED at any pull" in counts.lines[0]


def test_both_instances_may_be_lost_at_once(body: Body) -> None:
    faults = [Fault(actor=name, method="report", nth=2, dies="before") for name in ("rollout-0", "rollout-1")]
    run = body.checked_run(faults=faults)
    assert len(run.outcomes.lost_actors) == 2
    assert {"rollout-0.1", "rollout-1.1"} <= set(run.workers.names)


def test_an_instance_lost_repeatedly_ends_the_run(body: Body) -> None:
    faults = [Fault(actor="rollout-0", method="route", nth=0, dies="before")]
    run = body.run("rollout.instances=1", "rollout.max_attempts=99", faults=faults)
    error = run.raised()
    assert isinstance(error, ActorLost)
    assert str(error).startswith("rollout-0 was lost 4 times within an hour, last: rollout-0.3 is gone")
    assert len(run.outcomes.lost_actors) == 4
    run.check_kept()


def test_a_lost_instance_that_keeps_running_gets_no_more_calls(body: Body) -> None:
    """Its process lives, and only calls in progress at the time of its loss finish there."""
    faults = [Fault(actor="rollout-1", method="pull", nth=3, error=OSError("reset"))]
    run = body.checked_run("steps=6", world=long_ones(), faults=faults, meanwhile=no_nanny)
    failed_s = [c.at_s for c in run.workers.calls if (c.actor, c.method) == ("rollout-1", "pull")][2]
    assert all(c.at_s < failed_s + 0.01 for c in run.workers.calls if c.actor == "rollout-1")
    assert run.ended_s > failed_s + 2


def test_the_loss_count_is_shown_during_the_run(body: Body) -> None:
    run = body.checked_run("steps=6", faults=[Fault(actor="rollout-0", method="report", nth=2, dies="before")])
    assert 0 in run.loss_counts
    assert run.loss_counts.index(1) < len(run.loss_counts) - 3


def test_tokens_delivered_late_by_a_lost_instance_are_not_stored_twice(body: Body) -> None:
    """A poll in progress returns tokens that another instance samples by then."""
    faults = [Fault(actor="rollout-1", method="pull", nth=3, error=OSError("reset"))]
    run = body.checked_run("steps=4", world=long_ones(), faults=faults, meanwhile=no_nanny)
    assert len(run.outcomes.lost_actors) == 1


@pytest.mark.parametrize("method", CALLS)
def test_an_instance_that_keeps_running_after_its_loss_changes_nothing(body: Body, method: str) -> None:
    """Without a nanny its process lives, samples the same trajectories and replies late."""
    victim = busiest(body, method)
    faults = [Fault(actor=victim, method=method, nth=IN_RUN[method], late_s=8.0)]
    run = body.checked_run(*CALLS[method], world=long_ones(), faults=faults, meanwhile=no_nanny)
    assert victim in run.outcomes.lost_actors[0]


NO_WORKER = [Fault(actor="rollout-0", method="__init__", nth=n, error=NoFreeWorker("no free worker")) for n in (2, 3)]


def test_a_run_continues_while_a_lost_instance_waits_for_a_worker(body: Body, caplog: pytest.LogCaptureFixture) -> None:
    run = body.checked_run(
        "steps=6", faults=[Fault(actor="rollout-0", method="report", nth=2, dies="before"), *NO_WORKER]
    )
    assert "rollout-0.1" in run.workers.names
    assert caplog.text.count("the run continues with 1 of 2 instances: no free worker") == 2


@pytest.mark.parametrize("limits", [("rollout.min_instances=2",), ("rollout.instances=1",)])
def test_a_run_with_too_few_instances_and_no_worker_ends(body: Body, limits: tuple[str, ...]) -> None:
    run = body.run(*limits, faults=[Fault(actor="rollout-0", method="report", nth=2, dies="before"), *NO_WORKER])
    assert str(run.raised()) == "no free worker"
    run.check_kept()


# -- a reward worker is lost ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_dead_reward_worker_is_replaced_and_its_responses_are_scored_again(body: Body, moment: Any) -> None:
    run = body.checked_run(faults=[Fault(actor="reward-0", method="score", nth=2, dies=moment)])
    (loss,) = run.outcomes.lost_actors
    assert "reward-0 is gone" in loss
    assert run.workers.names.count("reward-0") == 2
    scored = [c.args[1] for c in run.workers.calls if (c.actor, c.method) == ("reward-0", "score")]
    assert set(scored[1]) <= {t for batch in scored[2:] for t in batch}


def test_a_reward_worker_that_does_not_reply_is_replaced(body: Body) -> None:
    """The timeout is call_s for itself and for the server, and reward.timeout_s for each response of the batch."""
    faults = [Fault(actor="reward-0", method="score", silent="before")]
    run = body.checked_run("reward.timeout_s=2", "deadlines.stuck_s=100", faults=faults)
    (held,) = [c.args[1] for c in run.workers.calls if c.method == "score"][:1]
    assert f"reward-0 did not answer within {2 * 3 + 2 * len(held)} s (deadlines.call_s)" in run.outcomes.lost_actors[0]


def test_a_stopped_reward_worker_is_detected_before_its_scoring_timeout(body: Body) -> None:
    """A reward may take minutes, but a stopped process does not reply to a short call either."""

    async def stop(run: Run) -> None:
        await until(run, lambda: run.workers.methods("reward-0").count("score") == 2)
        run.workers.stop("reward-0")

    run = body.checked_run("reward.timeout_s=600", "deadlines.stuck_s=100", world=World(reward_s=1.0), meanwhile=stop)
    (loss,) = run.outcomes.lost_actors
    assert "reward-0 did not answer within 3 s (deadlines.call_s)" in loss
    called_s = [c.at_s for c in run.workers.calls if (c.actor, c.method) == ("reward-0", "score")][1]
    placed_s = [c.at_s for c in run.workers.calls if (c.actor, c.method) == ("reward-0", "check")][1]
    assert placed_s - called_s < 2 * 3 + CREATE_S + 0.1


def test_a_slow_reward_does_not_count_as_a_loss(body: Body) -> None:
    run = body.checked_run("reward.timeout_s=600", "deadlines.stuck_s=100", world=World(reward_s=9.0))
    assert run.outcomes.lost_actors == []


def test_a_reward_worker_released_for_another_job_moves_without_a_loss(body: Body) -> None:
    async def give_back(run: Run) -> None:
        await until(run, lambda: run.workers.methods("reward-1").count("score") == 1)
        address = run.workers.placed["reward-1"].address
        for _ in range(3):  # the scheduler asks until it has the worker
            run.driver.release_worker(address)
        run.driver.release_worker(run.workers.placed["server"].address)

    run = body.checked_run("reward.workers=2", "steps=4", world=World(reward_s=0.5), meanwhile=give_back)
    assert run.outcomes.lost_actors == []
    assert run.workers.names.count("reward-1") == 2
    methods = run.workers.methods("reward-1")
    assert methods.index("close") < methods.index("check", 1), "it has left before another takes its place"
    assert methods.count("score") >= 2
    scored = [t for c in run.workers.calls if c.method == "score" for t in c.args[1]]
    assert len(scored) == len(set(scored)), "none is scored twice"
    assert run.workers.names.count("server") == 1


def test_a_reward_worker_may_move_again(body: Body) -> None:
    async def give_back(run: Run) -> None:
        for number in (1, 2):
            await until(run, lambda number=number: run.workers.methods("reward-1").count("score") > number)
            run.driver.release_worker(run.workers.placed["reward-1"].address)
            await until(run, lambda number=number: run.workers.names.count("reward-1") > number)

    run = body.checked_run("reward.workers=2", "steps=6", world=World(reward_s=0.5), meanwhile=give_back)
    assert run.workers.names.count("reward-1") == 3
    assert run.outcomes.lost_actors == []


async def release_scored(run: Run) -> None:
    """Release the worker of reward-1 once it has scored."""
    await until(run, lambda: run.workers.methods("reward-1").count("score") == 1)
    run.driver.release_worker(run.workers.placed["reward-1"].address)


def test_a_reward_worker_that_dies_while_it_moves_is_replaced(body: Body) -> None:
    dies = Fault(actor="reward-1", method="__init__", nth=2, dies="after")
    run = body.checked_run(
        "reward.workers=2", "steps=4", world=World(reward_s=0.5), meanwhile=release_scored, faults=[dies]
    )
    assert run.workers.names.count("reward-1") == 3
    assert len(run.outcomes.lost_actors) == 1


def test_a_reward_worker_lost_while_a_move_waits_is_placed_once(body: Body) -> None:
    dies = Fault(actor="reward-1", method="score", dies="after")
    run = body.checked_run(
        "reward.workers=2", "steps=4", world=World(reward_s=0.5), meanwhile=release_scored, faults=[dies]
    )
    assert run.workers.names.count("reward-1") == 2
    assert len(run.outcomes.lost_actors) == 1


def test_a_reward_worker_that_fails_after_its_move_does_not_end_the_run(body: Body) -> None:
    fails = Fault(actor="reward-1", method="check", nth=2, error=ActorFailed("OSError: stale file handle"))
    body.checked_run("reward.workers=2", "steps=4", world=World(reward_s=0.5), meanwhile=release_scored, faults=[fails])


def test_no_reward_worker_is_released_before_the_run_trains(body: Body) -> None:
    """Actors are still being placed then."""

    async def give_back(run: Run) -> None:
        await until(run, lambda: "reward-1" in run.workers.placed)
        run.driver.release_worker(run.workers.placed["reward-1"].address)

    run = body.checked_run("reward.workers=2", meanwhile=give_back)
    assert run.workers.names.count("reward-1") == 1


@pytest.mark.parametrize("method", ["__init__", "check"])
def test_a_reward_worker_whose_replacement_dies_while_it_is_placed_is_replaced(body: Body, method: str) -> None:
    faults = [Fault(actor="reward-0", method=m, nth=2, dies="before") for m in ("score", method)]
    assert len(body.checked_run(faults=faults).outcomes.lost_actors) == 2


def test_a_lost_reward_workers_batch_is_scored_by_another_while_it_waits_for_a_worker(
    body: Body, caplog: pytest.LogCaptureFixture
) -> None:
    waits = [
        Fault(actor="reward-0", method="__init__", nth=nth, error=NoFreeWorker("no free worker")) for nth in (2, 3)
    ]
    run = body.checked_run(
        "reward.workers=2", "steps=6", faults=[Fault(actor="reward-0", method="score", nth=2, dies="before"), *waits]
    )
    assert caplog.text.count("the run continues without reward-0: no free worker") == 1
    assert run.workers.names.count("reward-0") == 2
    scores = [c for c in run.workers.calls if c.method == "score"]
    lost = [c for c in scores if c.actor == "reward-0"][1]
    again_s = min(c.at_s for c in scores if c.actor == "reward-1" and set(lost.args[1]) & set(c.args[1]))
    assert again_s - lost.at_s < CREATE_S


def test_a_run_without_a_reward_worker_ends(body: Body) -> None:
    waits = Fault(actor="reward-0", method="__init__", nth=2, error=NoFreeWorker("no free worker"))
    run = body.run(faults=[Fault(actor="reward-0", method="score", nth=2, dies="before"), waits])
    assert str(run.raised()) == "no free worker"
    run.check_kept()


def test_a_reward_worker_lost_repeatedly_ends_the_run(body: Body) -> None:
    run = body.run(faults=[Fault(actor="reward-0", method="score", nth=0, dies="before")])
    assert str(run.raised()).startswith("reward-0 was lost 4 times within an hour, last: reward-0 is gone")
    run.check_kept()


def test_responses_are_scored_in_batches_by_all_workers(body: Body) -> None:
    overrides = ("reward.workers=2", "batch.groups_per_step=20", "batch.group_size=4", "rollout.engine.max_running=64")
    run = body.checked_run(*overrides, world=World(length=lambda _: 9))
    batches = [(c.actor, c.args[1]) for c in run.workers.calls if c.method == "score"]
    assert {name for name, _ in batches} == {"reward-0", "reward-1"}
    assert max(len(b) for _, b in batches) == ScoreQueue.max_batch
    scored = [t for _, b in batches for t in b]
    assert len(scored) == len(set(scored))


def test_a_reward_that_always_fails_ends_the_run_with_its_message(body: Body) -> None:
    run = body.run(world=World(reward_error=lambda _: "KeyError: 'gold'"))
    error = run.raised()
    assert isinstance(error, ConfigError)
    assert "failed on 4 of 4 responses of step 0" in str(error)
    assert "KeyError: 'gold'" in str(error)
    run.check_kept()


def test_occasional_reward_failures_are_recorded_per_row(body: Body, caplog: pytest.LogCaptureFixture) -> None:
    """The first failure is logged in full and the others are counted."""
    world = World(reward_error=lambda text: "a third" if len(text) % 3 == 0 else "")
    run = body.checked_run("steps=4", "reward.max_error_share=1", world=world)
    received = [
        r.getMessage() for r in caplog.records if "reward failed" in r.getMessage() and r.levelname == "WARNING"
    ]
    assert len(received) == 1
    assert received[0].endswith("reward failed: a third; further ones: steps count them")
    rows = list(run.store.trajectories())
    failed = [r for r in rows if r.trajectory.error]
    assert 0 < len(failed) < len(rows)
    assert all(not r.loss_mask and r.advantage == 0 and r.trajectory.error == "a third" for r in failed)
    assert all(r.loss_mask for r in rows if not r.trajectory.error)


# -- the trajectory server or a connection is lost ------------------------------------------------------------------


ASKED_BY_OTHERS = ["record_routes", "deliver", "scoring_items", "record_rewards", "take_batch"]
"""Methods of the server that instances, the reward worker and the trainer call."""


@pytest.mark.parametrize("method", ASKED_BY_OTHERS)
def test_a_server_that_is_slow_once_does_not_count_as_lost(body: Body, method: str) -> None:
    slow = [Fault(actor="server", method=method, nth=n, late_s=5.0) for n in (2, 4)]
    run = body.checked_run(*MOVING, world=long_ones(), faults=slow)
    assert run.outcomes.lost_actors == []


@pytest.mark.parametrize("method", ASKED_BY_OTHERS)
def test_a_server_that_does_not_reply_is_lost_and_its_callers_are_not(body: Body, method: str) -> None:
    async def mute(run: Run) -> None:
        """Stop the first server at the second call of the method."""
        while run.workers.methods("server").count(method) < 2:
            await asyncio.sleep(0.001)
        run.workers.stop("server")

    run = body.checked_run("deadlines.stuck_s=100", meanwhile=mute)
    (loss,) = run.outcomes.lost_actors
    assert "server did not answer within 3 s" in loss
    assert run.workers.names.count("server") == 2


def test_a_stopped_instance_beside_a_parameter_server_does_not_affect_others(body: Body) -> None:
    """The other instances of that host pull from that parameter server."""
    stopped = []

    async def stop(run: Run) -> None:
        await until(run, lambda: run.workers.methods("trainer").count("train") == 2)
        beside = run.workers.placed["parameters-two"].address
        stopped.append(next(n for n, p in run.workers.placed.items() if p.address == beside and p.role == "rollout"))
        run.workers.stop(stopped[0])

    hosts = ("one", "one", "one", "two", "two")
    run = body.checked_run(
        *LONG[1:], "steps=6", "deadlines.stuck_s=100", hosts=hosts, world=long_ones(), meanwhile=stop
    )
    (loss,) = run.outcomes.lost_actors
    assert stopped[0] in loss


def test_an_instance_that_cannot_reach_the_server_is_replaced(body: Body) -> None:
    """Only calls of that instance are lost, so the instance is the cause."""
    slow = [Fault(actor="server", method="record_routes", nth=n, late_s=9.0) for n in (1, 2, 3, 4)]
    run = body.checked_run("rollout.instances=1", "deadlines.stuck_s=100", faults=slow)
    (loss,) = run.outcomes.lost_actors
    assert "rollout-0 does not reach the server, which answers: server did not answer within 3 s" in loss


# -- anything at once ----------------------------------------------------------------------------------------------

WHATS: tuple[dict[str, Any], ...] = (
    {"dies": "before"}, {"dies": "after"}, {"silent": "before"}, {"silent": "after"}, {"late_s": 0.5}, {"late_s": 2.0},
    {"late_s": 6.0}, {"error": OSError("reset")},
)  # fmt: skip
VICTIMS = (*((f"rollout-{i}", method) for i in (0, 1) for method in CALLS), ("reward-0", "score"))


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    actor, method = draw(st.sampled_from(VICTIMS))
    return Fault(actor=actor, method=method, nth=draw(st.integers(1, 6)), **draw(st.sampled_from(WHATS)))


@settings(
    max_examples=settings().max_examples // 4,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    shape=st.sampled_from([MOVING, REDUNDANT, LONG, ("steps=4",)]),
    scripted=st.lists(faults(), min_size=1, max_size=4),
    nanny=st.booleans(),
)
def test_random_faults_end_in_a_complete_run_or_one_error(
    body: Body, shape: tuple[str, ...], scripted: list[Fault], nanny: bool
) -> None:
    async def set_nanny(run: Run) -> None:
        run.workers.nanny = nanny

    overrides = (*shape, "rollout.max_attempts=99", "reward.timeout_s=0.1")
    run = body.run(*overrides, world=long_ones(), faults=scripted, meanwhile=set_nanny)
    if run.error is None:
        run.check()
    else:
        assert isinstance(run.error, ActorLost)
        assert "\n" not in str(run.error)
        run.check_kept()
