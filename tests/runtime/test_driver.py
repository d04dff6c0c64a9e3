"""The driver over actors in the test's own process: losses in the middle of each call, deadlines, stops, the end.

Whatever happens, `Run.check` or `Run.check_kept` checks a run's promises: conservation, the bound, every token in its
place, the same commands when the journal is replayed.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.runtime.base import NoFreeWorker
from pipeline.runtime.resumption import Resumption
from pipeline.runtime.scoring import SCORE_BATCH
from stores.errors import ActorLost, ConfigError, RunStuck, StoreError
from stores.trajectory import AbortReason, Fate, PolicyVersion, Trajectory
from tasks.actors.parameter_server import Fetched
from tests.support.bodies import Body, Run
from tests.support.in_process import CREATE_S, Fault
from tests.support.scripted import World

# Some responses are long. With RETRY they are interrupted and go on elsewhere, with REDUNDANT they are aborted.
LONG = ("steps=4", "staleness.eta=2", "rollout.max_new_tokens=400")
RETRY = (*LONG, "batch.stragglers=retry", "batch.straggler_patience=0.2", "batch.straggler_share=1")
REDUNDANT = (*LONG, "batch.extra_groups=1", "batch.extra_members=1")
EVALUATED = ("rollout.engine.name=transformers", "model.path=none", "task.eval_prompts=4")


def long_ones() -> World:
    return World(length=lambda trajectory: 150 if trajectory % 5 == 3 else 6 + trajectory % 5)


def consumed(run: Run) -> list[Trajectory]:
    return [row.trajectory for row in run.store.ended() if row.fate is Fate.CONSUMED]


def evaluations(run: Run) -> list[int]:
    return [e.version for e in run.outcomes.evaluations]


def test_a_run_without_faults_does_its_steps_and_keeps_its_promises(body: Body) -> None:
    run = body.run()
    run.check()
    assert run.outcomes.losses == []
    assert run.workers.actor("trainer").saved == [str(run.config.run_dir / "checkpoints" / "step-000003")]
    assert all(run.workers.actor(name).engine.closed for name in ("rollout-0", "rollout-1"))


SHAPES = {
    "synchronous": ("staleness.admission=synchronous", "rollout.synchronization=status"),
    "two instances": ("staleness.eta=3", "rollout.routing=throughput_optimal", "reward.workers=2"),
    "redundancy": ("batch.extra_groups=1", "batch.extra_members=1", "rollout.routing=round_robin"),
    "credits": ("staleness.admission=credits", "staleness.alpha=2", "staleness.eta=2"),
    "backlog": ("staleness.admission=backlog", "staleness.alpha=2"),
    "one step": ("staleness.admission=one_step", "rollout.routing=random"),
    "deadline": ("rollout.routing=deadline", "rollout.synchronization=hypothesis", "rollout.migration=largest_gain"),
    "one instance": ("rollout.instances=1", "staleness.eta=0"),
    "many instances": ("rollout.instances=7", "batch.groups_per_step=9", "reward.workers=3"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_other_shapes_keep_the_promise_too(body: Body, shape: str) -> None:
    run = body.run("steps=5", "rollout.max_new_tokens=400", *SHAPES[shape], world=long_ones())
    run.check()
    header = run.store.header
    assert header.eta == {"credits": 2, "backlog": 5}.get(shape, run.config.staleness.eta)
    if shape == "synchronous":
        assert {row.staleness for row in run.store.ended()} == {0}


def test_stragglers_are_interrupted_and_go_on_elsewhere_from_their_tokens(body: Body) -> None:
    run = body.run(*RETRY, world=long_ones())
    run.check()
    assert run.commands("Interrupt")
    moved = [r for r in run.store.ended() if len({s.instance for s in r.trajectory.segments}) > 1]
    assert moved, "no trajectory has segments of two instances"


def test_groups_without_signal_are_dropped_and_replaced(body: Body) -> None:
    run = body.run("batch.filtering=no_signal", world=World(length=lambda t: 6 + (t % 3) * (t % 4)))
    run.check()
    rows = list(run.store.ended())
    assert {r.fate for r in rows} == {Fate.CONSUMED, Fate.FILTERED}
    for group in {r.trajectory.group for r in rows}:
        members = [r for r in rows if r.trajectory.group == group]
        if AbortReason.RUN_ENDED not in {m.reason for m in members}:
            signal_there = len({r.trajectory.reward for r in members}) > 1
            assert signal_there == (members[0].fate is Fate.CONSUMED)


def test_the_same_run_twice_is_the_same_to_the_last_event(body: Body) -> None:
    first, second = body.run(*REDUNDANT, world=long_ones()), body.run(*REDUNDANT, world=long_ones())
    assert first.entries == second.entries


async def no_nanny(run: Run) -> None:
    run.workers.nanny = False


# -- a rollout instance is lost ------------------------------------------------------------------------------------

SHAPE = {"route": RETRY, "interrupt": RETRY, "abort": REDUNDANT, "pull": RETRY, "next_events": RETRY, "report": RETRY}


def busiest(body: Body, method: str) -> str:
    """An instance of which `method` is called in a run of that shape."""
    run = body.run(*SHAPE[method], world=long_ones())
    return next(c.actor for c in run.workers.calls if c.method == method)


def first_call(run: Run, actor: str, method: str) -> float:
    """When it was called, on the loop's clock."""
    return next(c.at_s for c in run.workers.calls if (c.actor, c.method) == (actor, method))


def check_replaced(run: Run, instance: str, why: str) -> None:
    run.check()
    (loss,) = run.outcomes.losses
    assert instance in loss
    assert why in loss
    assert f"{instance}.1" in run.workers.names
    ((_, lost),) = run.events("InstanceLost")
    assert lost.instance == instance
    assert run.losses_said[-1] == 1


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("method", SHAPE)
def test_an_instance_that_dies_in_the_middle_of_a_call_is_replaced(body: Body, method: str, moment: Any) -> None:
    """Before or after it did what it was asked to: its trajectories go on elsewhere and none is lost."""
    victim = busiest(body, method)
    run = body.run(*SHAPE[method], world=long_ones(), faults=[Fault(actor=victim, method=method, dies=moment)])
    check_replaced(run, victim, f"{victim} is gone: connection closed")


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("method", SHAPE)
def test_an_instance_that_never_answers_a_call_is_replaced_after_call_s(body: Body, method: str, moment: Any) -> None:
    victim = busiest(body, method)
    run = body.run(*SHAPE[method], world=long_ones(), faults=[Fault(actor=victim, method=method, silent=moment)])
    # A poll waits half a second by itself, and three of these call the trajectory server, which may take call_s, too.
    allowed_s = {"next_events": 6.5, "route": 6, "interrupt": 6}.get(method, 3)
    check_replaced(run, victim, f"{victim} did not answer within {allowed_s:g} s (deadlines.call_s)")
    begun_s, asked_s = (first_call(run, victim, name) for name in ("next_events", method))
    lost_s, _ = run.events("InstanceLost")[0]
    assert lost_s == pytest.approx(asked_s + allowed_s - begun_s, abs=0.1)


@pytest.mark.parametrize("method", SHAPE)
def test_a_call_that_fails_on_its_way_counts_as_a_loss(body: Body, method: str) -> None:
    victim = busiest(body, method)
    faults = [Fault(actor=victim, method=method, error=OSError("connection reset by peer"))]
    check_replaced(body.run(*SHAPE[method], world=long_ones(), faults=faults), victim, "connection reset by peer")


@pytest.mark.parametrize("method", SHAPE)
def test_an_answer_that_is_late_but_within_its_deadline_is_taken(body: Body, method: str) -> None:
    victim = busiest(body, method)
    run = body.run(*SHAPE[method], world=long_ones(), faults=[Fault(actor=victim, method=method, late_s=2.0)])
    run.check()
    assert run.outcomes.losses == []


def test_a_lost_instances_trajectories_are_sampled_again_from_their_tokens(body: Body) -> None:
    """The only instance: all that ran there runs on its replacement."""
    run = body.run("rollout.instances=1", faults=[Fault(actor="rollout-0", method="report", nth=2, dies="before")])
    check_replaced(run, "rollout-0", "connection closed")
    instances = {s.instance for row in run.store.ended() for s in row.trajectory.segments}
    assert instances in ({"rollout-0", "rollout-0.1"}, {"rollout-0.1"})
    joined = [e.instance for _, e in run.events("InstanceJoined")]
    assert joined == ["rollout-0", "rollout-0.1"]


def test_a_replacement_holds_the_newest_version_before_it_joins(body: Body) -> None:
    run = body.run("steps=5", faults=[Fault(actor="rollout-0", method="pull", nth=2, dies="before")])
    check_replaced(run, "rollout-0", "connection closed")
    joined = next(e for _, e in run.events("InstanceJoined") if e.instance == "rollout-0.1")
    assert joined.version >= 2
    methods = run.workers.methods("rollout-0.1")
    assert methods[0] == "pull"


def test_both_instances_may_be_lost_at_once(body: Body) -> None:
    faults = [Fault(actor=name, method="report", nth=2, dies="before") for name in ("rollout-0", "rollout-1")]
    run = body.run(faults=faults)
    run.check()
    assert len(run.outcomes.losses) == 2
    assert {"rollout-0.1", "rollout-1.1"} <= set(run.workers.names)


def test_an_instance_that_is_lost_again_and_again_ends_the_run(body: Body) -> None:
    faults = [Fault(actor="rollout-0", method="route", nth=0, dies="before")]
    run = body.run("rollout.instances=1", "rollout.max_attempts=99", faults=faults)
    error = run.raised()
    assert isinstance(error, ActorLost)
    assert str(error).startswith("rollout-0 was lost 4 times within an hour, last: rollout-0.3 is gone")
    assert len(run.outcomes.losses) == 4
    run.check_kept()


def test_a_lost_instance_that_goes_on_is_no_longer_listened_to(body: Body) -> None:
    """Its process lives; from the moment of its loss on only what was under way comes to an end there."""
    faults = [Fault(actor="rollout-1", method="pull", nth=2, error=OSError("reset"))]
    run = body.run("steps=6", world=long_ones(), faults=faults, meanwhile=no_nanny)
    run.check()
    failed_s = [c.at_s for c in run.workers.calls if (c.actor, c.method) == ("rollout-1", "pull")][1]
    assert all(c.at_s < failed_s + 0.01 for c in run.workers.calls if c.actor == "rollout-1")
    assert run.ended_s > failed_s + 2


def test_a_loss_is_shown_while_the_run_goes_on(body: Body) -> None:
    run = body.run("steps=6", faults=[Fault(actor="rollout-0", method="report", nth=2, dies="before")])
    run.check()
    assert 0 in run.losses_said
    assert run.losses_said.index(1) < len(run.losses_said) - 3


def test_tokens_that_a_given_up_instance_delivers_late_are_not_stored_twice(body: Body) -> None:
    """Its poll was under way, and so brings what is sampled elsewhere by then."""
    faults = [Fault(actor="rollout-1", method="pull", nth=2, error=OSError("reset"))]
    run = body.run("steps=4", world=long_ones(), faults=faults, meanwhile=no_nanny)
    run.check()
    assert len(run.outcomes.losses) == 1


@pytest.mark.parametrize("how", [{"late_s": 8.0}, {"error": OSError("reset")}], ids=["late", "reset"])
@pytest.mark.parametrize("method", SHAPE)
def test_an_instance_that_goes_on_after_it_was_given_up_changes_nothing(
    body: Body, method: str, how: dict[str, Any]
) -> None:
    """Without a nanny its process lives; it samples what is sampled elsewhere too, and answers late."""
    victim = busiest(body, method)
    faults = [Fault(actor=victim, method=method, **how)]
    run = body.run(*SHAPE[method], world=long_ones(), faults=faults, meanwhile=no_nanny)
    run.check()
    assert victim in run.outcomes.losses[0]


NO_WORKER = [Fault(actor="rollout-0", method="__init__", nth=n, error=NoFreeWorker("no free worker")) for n in (2, 3)]


def test_a_run_goes_on_while_a_lost_instance_waits_for_a_worker(body: Body, caplog: pytest.LogCaptureFixture) -> None:
    run = body.run("steps=6", faults=[Fault(actor="rollout-0", method="report", nth=2, dies="before"), *NO_WORKER])
    run.check()
    assert "rollout-0.1" in run.workers.names
    assert caplog.text.count("the run goes on with 1 of 2 instances: no free worker") == 2


@pytest.mark.parametrize("limits", [("rollout.min_instances=2",), ("rollout.instances=1",)])
def test_a_run_with_too_few_instances_and_no_worker_ends(body: Body, limits: tuple[str, ...]) -> None:
    run = body.run(*limits, faults=[Fault(actor="rollout-0", method="report", nth=2, dies="before"), *NO_WORKER])
    assert str(run.raised()) == "no free worker"
    run.check_kept()


# -- a reward worker is lost ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_reward_worker_that_dies_is_replaced_and_scores_again_what_it_held(body: Body, moment: Any) -> None:
    run = body.run(faults=[Fault(actor="reward-0", method="score", nth=2, dies=moment)])
    run.check()
    (loss,) = run.outcomes.losses
    assert "reward-0 is gone" in loss
    assert run.workers.names.count("reward-0") == 2
    scored = [c.args[1] for c in run.workers.calls if (c.actor, c.method) == ("reward-0", "score")]
    assert set(scored[1]) <= {t for batch in scored[2:] for t in batch}


def test_a_reward_worker_that_never_answers_is_replaced(body: Body) -> None:
    """call_s for itself and for the server that it asks, and reward.timeout_s for each response of the batch."""
    faults = [Fault(actor="reward-0", method="score", silent="before")]
    run = body.run("reward.timeout_s=2", "deadlines.stuck_s=100", faults=faults)
    run.check()
    (held,) = [c.args[1] for c in run.workers.calls if c.method == "score"][:1]
    assert f"reward-0 did not answer within {2 * 3 + 2 * len(held)} s (deadlines.call_s)" in run.outcomes.losses[0]


def test_a_reward_worker_whose_process_stands_still_is_noticed_long_before_its_scores_are_due(body: Body) -> None:
    """A reward may take minutes; a process that is stopped does not answer a short call either."""

    async def stop(run: Run) -> None:
        await until(run, lambda: run.workers.methods("reward-0").count("score") == 2)
        run.workers.stop("reward-0")

    run = body.run("reward.timeout_s=600", "deadlines.stuck_s=100", world=World(reward_s=1.0), meanwhile=stop)
    run.check()
    (loss,) = run.outcomes.losses
    assert "reward-0 did not answer within 3 s (deadlines.call_s)" in loss
    called_s = [c.at_s for c in run.workers.calls if (c.actor, c.method) == ("reward-0", "score")][1]
    placed_s = [c.at_s for c in run.workers.calls if (c.actor, c.method) == ("reward-0", "check")][1]
    assert placed_s - called_s < 2 * 3 + CREATE_S + 0.1


def test_a_reward_that_takes_long_is_waited_for(body: Body) -> None:
    run = body.run("reward.timeout_s=600", "deadlines.stuck_s=100", world=World(reward_s=9.0))
    run.check()
    assert run.outcomes.losses == []


def test_a_reward_worker_that_is_lost_again_and_again_ends_the_run(body: Body) -> None:
    run = body.run(faults=[Fault(actor="reward-0", method="score", nth=0, dies="before")])
    assert str(run.raised()).startswith("reward-0 was lost 4 times within an hour, last: reward-0 is gone")
    run.check_kept()


def test_responses_are_scored_in_batches_and_by_all_workers(body: Body) -> None:
    overrides = ("reward.workers=2", "batch.groups_per_step=20", "batch.group_size=4", "rollout.engine.max_running=64")
    run = body.run(*overrides, world=World(length=lambda _: 9))
    run.check()
    batches = [(c.actor, c.args[1]) for c in run.workers.calls if c.method == "score"]
    assert {name for name, _ in batches} == {"reward-0", "reward-1"}
    assert max(len(b) for _, b in batches) == SCORE_BATCH
    scored = [t for _, b in batches for t in b]
    assert len(scored) == len(set(scored))


def test_a_reward_that_always_fails_ends_the_run_with_its_message(body: Body) -> None:
    run = body.run(world=World(reward_error=lambda _: "KeyError: 'gold'"))
    error = run.raised()
    assert isinstance(error, ConfigError)
    assert "failed on 4 of 4 responses of step 0" in str(error)
    assert "KeyError: 'gold'" in str(error)
    run.check_kept()


def test_a_reward_that_sometimes_fails_is_recorded_by_row(body: Body, caplog: pytest.LogCaptureFixture) -> None:
    """The first failure is told in full, the others are counted: they are many, and alike."""
    world = World(reward_error=lambda text: "a third" if len(text) % 3 == 0 else "")
    run = body.run("steps=4", "reward.max_error_share=1", world=world)
    run.check()
    told = [r.getMessage() for r in caplog.records if "reward failed" in r.getMessage() and r.levelname == "WARNING"]
    assert len(told) == 1
    assert told[0].endswith("reward failed: a third; further ones: steps count them")
    rows = list(run.store.ended())
    failed = [r for r in rows if r.trajectory.error]
    assert 0 < len(failed) < len(rows)
    assert all(not r.loss_mask and r.advantage == 0 and r.trajectory.error == "a third" for r in failed)
    assert all(r.loss_mask for r in rows if not r.trajectory.error)


# -- what cannot be replaced ---------------------------------------------------------------------------------------


ASKED_BY_OTHERS = ["payloads", "deliver", "scoring_items", "rewarded", "batch"]
"""Methods of the server that instances, the reward worker and the trainer call."""


@pytest.mark.parametrize("method", ASKED_BY_OTHERS)
def test_a_server_that_is_slow_once_is_lost_to_nobody_and_neither_is_who_asked(body: Body, method: str) -> None:
    slow = [Fault(actor="server", method=method, nth=n, late_s=5.0) for n in (2, 4)]
    run = body.run(*RETRY, world=long_ones(), faults=slow)
    run.check()
    assert run.outcomes.losses == []


@pytest.mark.parametrize("method", ASKED_BY_OTHERS)
def test_a_server_that_answers_nobody_any_more_is_who_is_lost(body: Body, method: str) -> None:
    async def mute(run: Run) -> None:
        """The first one, from its second call of the method on."""
        while run.workers.methods("server").count(method) < 2:
            await asyncio.sleep(0.001)
        run.workers.stop("server")

    run = body.run("deadlines.stuck_s=100", meanwhile=mute)
    run.check()
    (loss,) = run.outcomes.losses
    assert "server did not answer within 3 s" in loss
    assert run.workers.names.count("server") == 2


def test_a_stopped_instance_with_its_hosts_parameter_server_costs_the_others_there_nothing(body: Body) -> None:
    """They pull from that parameter server, and it answers nobody."""
    stopped = []

    async def stop(run: Run) -> None:
        await until(run, lambda: run.workers.methods("trainer").count("train") == 2)
        beside = run.workers.placed["parameters-two"].address
        stopped.append(next(n for n, p in run.workers.placed.items() if p.address == beside and p.role == "rollout"))
        run.workers.stop(stopped[0])

    hosts = ("one", "one", "one", "two", "two")
    run = body.run(*LONG[1:], "steps=6", "deadlines.stuck_s=100", hosts=hosts, world=long_ones(), meanwhile=stop)
    run.check()
    (loss,) = run.outcomes.losses
    assert stopped[0] in loss


def test_an_instance_that_alone_does_not_reach_the_server_is_replaced(body: Body) -> None:
    """Calls of that instance never arrive: it is the one that is cut off."""
    slow = [Fault(actor="server", method="payloads", nth=n, late_s=9.0) for n in (1, 2, 3, 4)]
    run = body.run("rollout.instances=1", "deadlines.stuck_s=100", faults=slow)
    run.check()
    (loss,) = run.outcomes.losses
    assert "rollout-0 does not reach the server, which answers: server did not answer within 3 s" in loss


@pytest.mark.parametrize(
    ("actor", "method"), [("server", "held_out"), ("trainer", "publish_initial"), ("reward-0", "check")]
)
def test_an_actor_that_is_not_ready_in_start_s_ends_the_run(body: Body, actor: str, method: str) -> None:
    run = body.run(faults=[Fault(actor=actor, method=method, silent="before")])
    assert str(run.raised()) == f"{actor} did not answer within 50 s (deadlines.start_s)"
    assert run.ended_s == pytest.approx(first_call(run, actor, method) + 50, abs=0.1)


def test_an_actor_that_cannot_start_ends_the_run_at_once(body: Body) -> None:
    """The others are not waited for, and what they were about to do is cancelled."""
    faults = [
        Fault(actor="reward-0", method="__init__", error=ConfigError("reward.function: no such file")),
        Fault(actor="rollout-1", method="__init__", late_s=40.0),
    ]
    run = body.run(faults=faults)
    assert str(run.raised()) == "reward.function: no such file"
    assert run.ended_s < 2
    assert "rollout-1" not in run.workers.placed


def test_a_failing_commit_ends_the_run_and_nothing_is_announced_after_it(body: Body) -> None:
    full = StoreError("store: could not be stored: no space left; free space or move runs_dir")
    run = body.run("steps=6", faults=[Fault(actor="server", method="commit", nth=2, error=full)])
    assert run.raised() is full
    assert [r.step for r in run.records] == [0]
    assert [s["step"] for s in run.outcomes.steps] == [0.0]
    assert run.workers.methods("server").count("commit") == 2
    run.check_kept()


def test_a_commit_that_fails_after_the_last_step_ends_the_run_too(body: Body) -> None:
    full = StoreError("store: could not be stored: no space left; free space or move runs_dir")
    run = body.run(faults=[Fault(actor="server", method="commit", nth=4, error=full)])
    assert run.raised() is full
    assert [r.kind for r in run.records] == ["step"] * 3
    assert "save_checkpoint" not in run.workers.methods("trainer")


# -- order ---------------------------------------------------------------------------------------------------------


def test_a_step_is_queued_for_commit_before_its_version_is_announced(body: Body) -> None:
    """The ledger that is stored with a step is that of before its version, and what ended by it comes before what its
    version ends."""
    run = body.run(*REDUNDANT, world=long_ones())
    run.check()
    stored = [c for c in run.workers.calls if c.actor == "server" and c.method in ("commit", "retire")]
    ordered: list[Any] = []
    for entry in run.entries:
        if type(entry.event).__name__ == "VersionPublished":
            ordered.append(("commit", entry.event.version - 1))
        ordered += [("retire", c.endings) for c in entry.commands if type(c).__name__ == "Retire"]
    ordered.append(("commit", run.config.steps))
    assert ordered == [(c.method, c.args[0].step if c.method == "commit" else c.args[0]) for c in stored]


def test_steps_are_said_in_order_and_only_once_they_are_stored(body: Body) -> None:
    run = body.run("steps=5", faults=[Fault(actor="server", method="commit", nth=2, late_s=2.5)])
    run.check()
    assert [s["step"] for s in run.outcomes.steps] == [0.0, 1.0, 2.0, 3.0, 4.0]
    commits = [c.at_s for c in run.workers.calls if c.method == "commit"]
    assert commits[2] - commits[1] > 2.5, "the third commit waits for the second"


def test_versions_no_instance_needs_are_removed_and_no_other(body: Body) -> None:
    """A pull of a version that is not there would end the run; see PlayedParameterServer."""
    run = body.run(*LONG, "steps=6", hosts=("one", "two"), world=long_ones())
    run.check()
    assert {name for name in run.workers.names if name.startswith("parameters")} == {"parameters-one", "parameters-two"}
    assert all(held <= {5, 6} for held in run.world.weights.values())


@pytest.mark.parametrize("how", [{"silent": "before"}, {"error": OSError("reset")}], ids=["silent", "reset"])
def test_a_parameter_server_that_does_not_remove_old_versions_stops_nothing(body: Body, how: dict[str, Any]) -> None:
    """Its host has more versions than it needs for a while."""
    faults = [Fault(actor="parameters-two", method="prune", **how)]
    run = body.run(*LONG, "steps=6", hosts=("one", "two"), world=long_ones(), faults=faults)
    run.check()
    assert run.outcomes.losses == []
    assert all(held <= {5, 6} for held in run.world.weights.values())


def test_checkpoints_are_saved_as_often_as_asked(body: Body) -> None:
    run = body.run("steps=5", "training.checkpoint_every=2")
    run.check()
    names = [folder.rpartition("/")[2] for folder in run.workers.actor("trainer").saved]
    assert names == ["step-000002", "step-000004", "step-000005"]


# -- nothing happens -----------------------------------------------------------------------------------------------


def test_a_stuck_run_says_what_it_waits_for_and_its_knob(body: Body) -> None:
    run = body.run(faults=[Fault(actor="reward-0", method="score", nth=0, silent="before")])
    error = run.raised()
    assert isinstance(error, RunStuck)
    assert str(error).startswith("no progress for 30 s (deadlines.stuck_s): step 0 waits for 2 more of its 2 groups")
    assert "scoring for" in str(error)
    sampled_s = run.events("TrajectorySampled")[-1][0]
    ended_s = run.entries[-1].now
    assert 29.5 < ended_s - sampled_s < 31.5
    run.check_kept()


def test_responses_that_grow_are_progress_however_long_they_take(body: Body) -> None:
    """Each takes longer than stuck_s; only reports of its tokens come meanwhile."""
    run = body.run(world=World(length=lambda trajectory: 95, tokens_per_s=2.0))
    run.check()
    assert all(len(t.response_tokens) / 2.0 > run.config.deadlines.stuck_s for t in consumed(run))


@pytest.mark.parametrize("arrives", [True, False])
def test_weights_that_arrive_slowly_are_progress(body: Body, arrives: bool) -> None:
    """No instance has version 1 before it has arrived, which takes longer than stuck_s."""
    slow = [
        Fault(actor="parameters-two", method="ensure", nth=n, late_s=2.0,
              change=lambda _, n=n: Fetched(path="", num_bytes=n * 1000 if arrives else 1000))
        for n in range(1, 61)
    ]  # fmt: skip
    hosts = ("one", "one", "one", "two", "two")
    run = body.run("staleness.eta=0", hosts=hosts, faults=slow, world=World(num_bytes=10**6))
    if arrives:
        run.check()
        assert run.outcomes.losses == []
    else:
        assert str(run.raised()).startswith("no progress for 30 s (deadlines.stuck_s)")
        run.check_kept()


def test_weights_that_take_long_to_load_are_no_stuck_run(body: Body) -> None:
    """The deadline of a load goes by its bytes."""
    slow = [Fault(actor=f"rollout-{i}", method="pull", late_s=45.0) for i in range(2)]
    run = body.run("staleness.eta=0", faults=slow, world=World(num_bytes=10**9 + 10**8))
    run.check()
    assert run.outcomes.losses == []


def test_a_long_training_step_is_no_stuck_run(body: Body) -> None:
    """Longer than stuck_s, shorter than train_s."""
    run = body.run("staleness.eta=0", world=World(train_s=38.0))
    run.check()


# -- stops ---------------------------------------------------------------------------------------------------------


async def until(run: Run, condition: Any) -> None:
    while run.driver is None or not condition():
        await asyncio.sleep(0.01)


def test_a_stop_while_it_trains_lets_the_step_finish_and_stores_it(body: Body) -> None:
    def stop() -> None:
        stopping.driver.stop("interrupted")

    async def meanwhile(run: Run) -> None:
        nonlocal stopping
        stopping = run

    stopping: Any = None
    faults = [Fault(actor="trainer", method="train", nth=2, act=stop)]
    run = body.run("steps=9", faults=faults, meanwhile=meanwhile)
    assert run.error is None
    assert not run.stopped_at_once
    assert run.outcomes.stopped == "interrupted"
    assert [(r.kind, r.step) for r in run.records] == [("step", 0), ("step", 1), ("end", 2)]
    assert run.workers.actor("trainer").saved[-1].endswith("step-000002")
    run.check_kept()
    given_up = [row for row in run.store.ended() if row.reason is AbortReason.RUN_ENDED]
    assert given_up, "what was in flight is stored as given up"
    assert run.records[-1].ledger.num_live == 0


def test_a_stop_is_heard_although_the_next_step_could_begin_at_once(body: Body) -> None:
    """With training slower than sampling there is a batch ready whenever a step ends."""

    async def meanwhile(run: Run) -> None:
        await until(run, lambda: run.workers.methods("trainer").count("train") == 3)
        run.driver.stop("interrupted")

    run = body.run("steps=9", world=World(train_s=9.0, length=lambda _: 5), meanwhile=meanwhile)
    assert run.outcomes.stopped == "interrupted"
    assert [(r.kind, r.step) for r in run.records] == [("step", 0), ("step", 1), ("step", 2), ("end", 3)]
    assert run.workers.methods("trainer").count("train") == 3
    run.check_kept()


def test_a_stop_while_it_does_not_train_ends_it_within_a_second(body: Body) -> None:
    when = 0.0

    async def meanwhile(run: Run) -> None:
        nonlocal when
        await until(run, lambda: "route" in run.workers.methods("rollout-0"))
        when = asyncio.get_running_loop().time()
        run.driver.stop("terminated")

    run = body.run(world=World(length=lambda _: 90), meanwhile=meanwhile)
    assert run.error is None
    assert run.outcomes.stopped == "terminated"
    assert [r.kind for r in run.records] == ["end"]
    assert run.ended_s - when < 1.1
    run.check_kept()


def test_a_second_stop_does_not_wait_for_the_training_step(body: Body) -> None:
    when = 0.0

    async def meanwhile(run: Run) -> None:
        nonlocal when
        await until(run, lambda: "train" in run.workers.methods("trainer"))
        run.driver.stop("interrupted")
        await asyncio.sleep(2.0)
        assert run.ended_s == 0.0, "the first stop waits for the step"
        run.driver.stop("interrupted again")
        when = asyncio.get_running_loop().time()

    run = body.run(world=World(train_s=30.0), meanwhile=meanwhile)
    assert run.stopped_at_once
    assert run.outcomes.stopped == "interrupted"
    assert run.ended_s - when < 0.1
    assert run.records == []


def test_a_stop_while_actors_start_ends_it_at_once(body: Body) -> None:
    async def meanwhile(run: Run) -> None:
        await asyncio.sleep(0.5)
        run.driver.stop("interrupted")

    run = body.run(meanwhile=meanwhile)
    assert run.stopped_at_once
    assert run.ended_s < 0.6
    assert run.workers.placed == {}


# -- evaluation and the end ----------------------------------------------------------------------------------------


def test_instances_pull_the_last_version_side_by_side(body: Body) -> None:
    late = [Fault(actor=f"rollout-{i}", method="pull", nth=0, late_s=2.0) for i in range(3)]
    run = body.run(*EVALUATED, "rollout.instances=3", "staleness.eta=2", faults=late)
    run.check()
    pulled = [c.at_s for c in run.workers.calls if c.method == "pull" and c.args[0] == run.config.steps]
    assert len(pulled) == 3
    assert max(pulled) - min(pulled) < 1.0


def test_an_instance_lost_while_it_pulls_the_last_version_is_replaced(body: Body) -> None:
    plain = body.run(*EVALUATED)
    last = sum(c.method == "pull" and c.actor == "rollout-0" for c in plain.workers.calls)
    run = body.run(*EVALUATED, faults=[Fault(actor="rollout-0", method="pull", nth=last, dies="before")])
    run.check()
    assert evaluations(run) == [0, 3]
    assert len(run.outcomes.losses) == 1


@pytest.mark.parametrize("actor", ["rollout-0", "trainer", "reward-0", "server", "parameters-one"])
@pytest.mark.parametrize("how", ["dies", "silent", "error"])
def test_closing_never_raises_and_waits_for_nobody_for_ever(body: Body, actor: str, how: str) -> None:
    fault = {"error": ValueError("no")} if how == "error" else {how: "before"}
    run = body.run(faults=[Fault(actor=actor, method="close", **fault)])
    run.check()
    closed = [c for c in run.workers.calls if c.method == "close"]
    assert {c.actor for c in closed[:2]} == {"rollout-0", "rollout-1"}, "engines first"
    assert len(closed) == 6
    assert closed[-1].at_s - closed[0].at_s < 10.5


# -- going on with a stored run ------------------------------------------------------------------------------------


def test_a_stopped_run_is_resumed_where_it_was(body: Body) -> None:
    async def stop(run: Run) -> None:
        await until(run, lambda: run.workers.methods("server").count("commit") == 2)
        run.driver.stop("interrupted")

    overrides = ("steps=5", "batch.extra_members=1")
    first = body.run(*overrides, meanwhile=stop)
    trained = sum(r.kind == "step" for r in first.records)
    assert trained == 3
    folder = first.config.run_dir
    (folder / "events.jsonl").rename(folder / "events.1.jsonl")
    (folder / "store").mkdir()
    steps = tuple(dict(s) for s in first.outcomes.steps)
    resumption = Resumption(
        version=PolicyVersion(trained), fingerprint=f"weights-{trained}", steps=steps, elapsed_s=steps[-1]["elapsed_s"]
    )
    second = body.run(config=first.config, world=first.world, resumption=resumption)
    if second.error is not None:
        raise second.error
    second.check_kept()
    assert [s["step"] for s in second.outcomes.steps] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [r.step for r in second.records if r.kind == "step"] == [0, 1, 2, 3, 4]
    assert all(a["elapsed_s"] < b["elapsed_s"] for a, b in pairwise(second.outcomes.steps))
    assert second.entries[0].now >= resumption.elapsed_s
    pulled = [c for c in second.workers.calls if c.method == "pull"]
    assert [c.args[0] for c in pulled[:2]] == [trained, trained]


def test_weights_that_are_not_those_of_the_stored_step_are_refused(body: Body) -> None:
    resumption = Resumption(version=PolicyVersion(2), fingerprint="others")
    run = body.run(resumption=resumption)
    error = run.raised()
    assert isinstance(error, StoreError)
    assert "version 2 is weights-2, its step published others; remove the damaged resume point" in str(error)


# -- anything at once ----------------------------------------------------------------------------------------------

WHATS: tuple[dict[str, Any], ...] = (
    {"dies": "before"}, {"dies": "after"}, {"silent": "before"}, {"silent": "after"}, {"late_s": 0.5}, {"late_s": 2.0},
    {"late_s": 6.0}, {"error": OSError("reset")},
)  # fmt: skip
VICTIMS = (*((f"rollout-{i}", method) for i in (0, 1) for method in SHAPE), ("reward-0", "score"))


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
    shape=st.sampled_from([RETRY, REDUNDANT, LONG, ("steps=4",)]),
    scripted=st.lists(faults(), min_size=1, max_size=4),
    nanny=st.booleans(),
)
def test_whatever_goes_wrong_at_once_the_run_ends_well_or_with_one_story(
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


def test_the_start_says_what_it_waits_for(body: Body) -> None:
    late = Fault(actor="rollout-1", method="__init__", late_s=9.0)
    run = body.run("rollout.instances=2", faults=(late,))
    run.check()
    said = [what for _, _, _, what in run.said if what.startswith("starting actors")]
    stages = ("", ": 4 of 5 ready, waiting for rollout-1", ": all 5 ready, publishing the first weights")
    assert said == [f"starting actors{stage}" for stage in stages]
