"""Recovery of a lost trainer, rank or server while engines stay loaded and keep sampling."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from staleflow.pipeline.processes.worker_protocol import NoFreeWorker
from staleflow.stores.errors import ActorFailed, ActorLost
from staleflow.stores.trajectory import PolicyVersion
from tests.support import virtual_time
from tests.support.bodies import Body, Run
from tests.support.driver_runs import MOVES
from tests.support.in_process import Fault
from tests.support.scripted import World


def dying_trainer(method: str = "train", nth: int = 3, moment: Any = "before") -> Fault:
    return Fault(actor="trainer", method=method, nth=nth, dies=moment)


def check_restored(run: Run, losses: int = 1) -> None:
    """Check that the run did all its steps with its first engines and trained each step on the same rows each time."""
    run.check()
    assert len(run.outcomes.lost_actors) == losses
    assert all("trainer" in loss for loss in run.outcomes.lost_actors)
    assert run.workers.names.count("trainer") == 1 + losses
    assert sorted(n for n in run.workers.names if n.startswith("rollout")) == ["rollout-0", "rollout-1"]
    rows: dict[int, set[str]] = {}
    for step, digest in run.world.trained:
        rows.setdefault(step, set()).add(digest)
    assert sorted(rows) == list(range(run.config.steps))
    assert all(len(digests) == 1 for digests in rows.values())


def steps_trained(run: Run) -> list[int]:
    return [step for step, _ in run.world.trained]


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("nth", [1, 3])
def test_a_dead_trainer_resumes_from_its_resume_point(body: Body, nth: int, moment: Any) -> None:
    """The step in progress is sent again."""
    run = body.run("steps=5", faults=[dying_trainer(nth=nth, moment=moment)])
    check_restored(run)
    again = [nth - 1] if moment == "after" else []
    assert sorted(steps_trained(run)) == sorted([*range(5), *again])


def test_engines_sample_during_the_trainer_restore(body: Body) -> None:
    late = Fault(actor="trainer", method="__init__", nth=2, late_s=9.0)
    run = body.run("steps=6", "staleness.eta=3", "rollout.max_new_tokens=400", faults=[dying_trainer(nth=2), late],
                   world=World(length=lambda _: 60))  # fmt: skip
    check_restored(run)
    lost_s = next(c.at_s for c in run.workers.calls if c.method == "train" and c.args[1] == 1)
    begun_s = run.workers.calls[0].at_s
    sampled = [at_s for at_s, _ in run.events("TrajectorySampled")]
    assert sum(lost_s < at_s + begun_s < lost_s + 9.0 for at_s in sampled) >= 4


def test_a_trainer_gets_no_calls_before_its_state_is_restored(body: Body) -> None:
    """The trainer is lost between two steps, and the next batch is ready before it is back."""
    lost = Fault(actor="trainer", method="version", dies="before")
    late = Fault(actor="trainer", method="publish_initial", nth=2, late_s=9.0)
    run = body.run("steps=3", faults=[lost, late], world=World(length=lambda _: 60))
    check_restored(run)
    restored_s = [c.at_s for c in run.workers.calls if c.method == "publish_initial"][1] + 9.0
    assert min(c.at_s for c in run.workers.calls if (c.actor, c.method) == ("trainer", "train")) >= restored_s


@pytest.mark.parametrize("commit_s", [0.0, 2.5])
def test_steps_after_the_resume_point_are_trained_again_on_the_same_rows(body: Body, commit_s: float) -> None:
    """Those rows are in the store or on their way to it."""
    run = body.run("steps=8", "training.resume_every=3", faults=[dying_trainer(nth=6)], world=World(commit_s=commit_s))
    check_restored(run)
    assert steps_trained(run) == [0, 1, 2, 3, 4, 3, 4, 5, 6, 7]


def test_the_server_is_pinged_while_the_trainer_is_restored(body: Body) -> None:
    late = Fault(actor="trainer", method="__init__", nth=2, late_s=15.0)
    run = body.run("steps=4", faults=[dying_trainer(nth=2), late])
    check_restored(run)
    lost_s = next(c.at_s for c in run.workers.calls if c.method == "train" and c.args[1] == 1)
    pings = [c for c in run.workers.calls if c.method == "held_out_notice" and lost_s < c.at_s < lost_s + 15.0]
    assert len(pings) >= 5


async def kill_before_point(run: Run) -> None:
    """Kill the trainer when version 3 is published and has no resume point yet."""
    while run.driver is None or len(run.world.trained) < 3:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    run.workers.kill("trainer")


def test_an_incomplete_resume_point_is_not_used(body: Body) -> None:
    run = body.run("steps=5", world=World(point_s=5.0), meanwhile=kill_before_point)
    check_restored(run)
    assert steps_trained(run) == [0, 1, 2, 2, 3, 4]


def test_a_trainer_that_does_not_reply_is_replaced_after_train_s(body: Body) -> None:
    run = body.run(faults=[Fault(actor="trainer", method="train", nth=2, silent="before")])
    check_restored(run)
    assert "trainer did not answer within 40 s (deadlines.train_s)" in run.outcomes.lost_actors[0]


PATIENT = ("deadlines.train_s=4000", "deadlines.stuck_s=4000", "deadlines.silent_s=9")


def stop_process(name: str, seconds: float | None = None) -> Any:
    """Stop a process during the third training step, for a number of seconds or for ever; no nanny restarts it."""

    async def stop(run: Run) -> None:
        run.workers.nanny = False
        while run.driver is None or run.workers.methods("trainer").count("train") < 3:
            await asyncio.sleep(0.01)
        run.workers.stop(name)
        if seconds is not None:
            await asyncio.sleep(seconds)
            run.workers.go_on(name)

    return stop


def test_a_stopped_trainer_is_replaced_after_silent_s(body: Body) -> None:
    run = body.run("steps=5", *PATIENT, meanwhile=stop_process("trainer"))
    check_restored(run)
    assert "trainer did not answer within 9 s (deadlines.silent_s)" in run.outcomes.lost_actors[0]
    stopped_s = run.events("VersionPublished")[1][0]
    assert run.events("VersionPublished")[2][0] < stopped_s + 9.0 + 10.0


def test_a_slow_trainer_is_not_lost(body: Body) -> None:
    """A step takes ten times silent_s, but the process replies to other calls."""
    run = body.checked_run("steps=3", *PATIENT, world=World(train_s=90.0))
    assert run.outcomes.lost_actors == []


def test_a_trainer_stopped_for_less_than_silent_s_is_not_lost(body: Body) -> None:
    run = body.checked_run("steps=5", *PATIENT, world=World(train_s=12.0), meanwhile=stop_process("trainer", 6.0))
    assert run.outcomes.lost_actors == []


def test_the_loss_of_an_idle_trainer_is_detected(body: Body) -> None:
    async def kill(run: Run) -> None:
        while run.driver is None or "route" not in run.workers.methods("rollout-0"):
            await asyncio.sleep(0.01)
        run.workers.kill("trainer")

    run = body.run(world=World(length=lambda _: 90), meanwhile=kill)
    check_restored(run)
    sampled_s = run.events("TrajectorySampled")[0][0]
    assert float(run.outcomes.lost_actors[0].partition(" ")[0]) < sampled_s, "before there was anything to train on"


def test_a_trainer_restored_on_another_host_serves_its_weights_there(body: Body) -> None:
    """Its first host had no other actor, so its parameter server is gone."""
    run = body.run("steps=6", faults=[dying_trainer(nth=3)], hosts=("one", "two", "one", "one", "one"))
    check_restored(run)
    assert "parameters-two" in run.workers.names
    assert run.workers.placed == {} or run.workers.placed["trainer"].host == "one"


def test_an_interrupted_checkpoint_is_saved_again(body: Body) -> None:
    run = body.run("steps=4", "training.checkpoint_every=2", faults=[dying_trainer("save_checkpoint", 1, "before")])
    check_restored(run)
    assert [f.rpartition("/")[2] for f in run.workers.actor("trainer").saved] == ["step-000002", "step-000004"]


def test_a_trainer_lost_during_its_restore_is_placed_again(body: Body) -> None:
    run = body.run("steps=4", faults=[dying_trainer(nth=2), dying_trainer("publish_initial", 2)])
    check_restored(run, losses=2)


def test_a_server_that_is_slow_while_steps_are_repeated_is_not_lost(body: Body) -> None:
    slow = Fault(actor="server", method="take_batch", nth=4, late_s=4.0)
    run = body.run("steps=5", "training.resume_every=10", faults=[dying_trainer(nth=3), slow])
    check_restored(run)


def test_a_trainer_lost_repeatedly_ends_the_run(body: Body) -> None:
    run = body.run(faults=[dying_trainer(nth=0)])
    assert str(run.raised()).startswith("trainer was lost 4 times within an hour, last: trainer is gone")
    run.check_kept()


def test_a_run_without_a_free_worker_for_its_trainer_ends_with_one_line(body: Body) -> None:
    none = Fault(actor="trainer", method="__init__", nth=2, error=NoFreeWorker("cluster: no free worker for trainer"))
    run = body.run(faults=[dying_trainer(nth=2), none])
    error = run.raised()
    assert isinstance(error, ActorLost)
    assert str(error) == "trainer is gone: connection closed; cluster: no free worker for trainer"
    run.check_kept()


def test_a_role_that_cannot_be_restored_is_not_placed_again(body: Body) -> None:
    none = Fault(actor="trainer", method="__init__", nth=2, error=NoFreeWorker("no free worker"))

    async def ask_twice() -> None:
        async with body.placed(faults=[Fault(actor="trainer", method="version", dies="before"), none]) as stage:
            stage.actors.recovery.start()
            for _ in range(2):
                with pytest.raises(ActorLost, match="no free worker"):
                    await stage.actors.ask("trainer", "version")

    virtual_time.run(ask_twice())


def test_a_run_without_resume_points_ends_with_its_trainer(body: Body) -> None:
    run = body.run("training.resume_every=0", faults=[dying_trainer(nth=2)])
    assert str(run.raised()) == "trainer is gone: connection closed"
    run.check_kept()


def test_a_retrained_step_with_other_weights_ends_the_run(body: Body) -> None:
    """Instances already serve the first weights, and a version must not have two sets of weights."""
    run = body.run("training.resume_every=3", faults=[dying_trainer(nth=3)], world=World(chance="-other"))
    error = run.raised()
    assert isinstance(error, ActorLost)
    assert "trainer: step 0, trained again after a loss, gave other weights (weights-1-other) than" in str(error)
    run.check_kept()


def test_a_retrained_step_with_other_weights_gets_no_resume_point(body: Body) -> None:
    """The run could not be resumed from it."""
    run = body.run("steps=5", world=World(point_s=5.0, chance="-other"), meanwhile=kill_before_point)
    assert "step 2, trained again after a loss, gave other weights" in str(run.raised())
    repetition = next(c for c in reversed(run.workers.calls) if c.method == "train")
    assert repetition.args[1:] == (2, (), (), run.world.fingerprint(PolicyVersion(3)))


# -- a trainer of several ranks ------------------------------------------------------------------------------------

RANKS = ("steps=5", "training.ranks=3")


def check_group_restored(run: Run, losses: int = 1) -> None:
    """Check that all ranks were placed again after each loss and resumed from their resume point."""
    check_restored(run, losses)
    for name in ("trainer-1", "trainer-2"):
        assert run.workers.names.count(name) == 1 + losses


def test_a_trainer_of_several_ranks_trains_like_one_rank(body: Body) -> None:
    run = body.run(*RANKS)
    check_group_restored(run, losses=0)
    assert steps_trained(run) == list(range(5))
    assert run.workers.methods("trainer-2")[-1] == "close"


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("name", ["trainer", "trainer-1", "trainer-2"])
def test_a_rank_lost_during_training_restores_the_whole_trainer(body: Body, name: str, moment: Any) -> None:
    method = "train" if name == "trainer" else "call_policy"
    run = body.run(*RANKS, faults=[Fault(actor=name, method=method, nth=3, dies=moment)])
    check_group_restored(run)
    assert f": {name} is gone" in run.outcomes.lost_actors[0]


@pytest.mark.parametrize("name", ["trainer", "trainer-1"])
def test_a_hung_rank_is_replaced_with_its_group_after_train_s(body: Body, name: str) -> None:
    async def stop(run: Run) -> None:
        run.workers.nanny = False
        while run.driver is None or run.workers.methods("trainer").count("train") < 3:
            await asyncio.sleep(0.01)
        run.workers.stop(name)

    run = body.run(*RANKS, meanwhile=stop)
    check_group_restored(run)
    assert "did not answer within 40 s (deadlines.train_s)" in run.outcomes.lost_actors[0]


@pytest.mark.parametrize("name", ["trainer", "trainer-2"])
def test_a_stopped_rank_is_replaced_with_its_group_after_silent_s(body: Body, name: str) -> None:
    run = body.run(*RANKS, *PATIENT, meanwhile=stop_process(name))
    check_group_restored(run)
    assert f"{name} did not answer within 9 s (deadlines.silent_s)" in run.outcomes.lost_actors[0]


def test_the_loss_of_an_idle_rank_is_detected(body: Body) -> None:
    async def kill(run: Run) -> None:
        while run.driver is None or "route" not in run.workers.methods("rollout-0"):
            await asyncio.sleep(0.01)
        run.workers.kill("trainer-2")

    run = body.run(*RANKS, world=World(length=lambda _: 90), meanwhile=kill)
    check_group_restored(run)
    sampled_s = run.events("TrajectorySampled")[0][0]
    assert float(run.outcomes.lost_actors[0].partition(" ")[0]) < sampled_s, "before there was anything to train on"


@pytest.mark.parametrize("method", ["__init__", "join", "call_policy"])
def test_a_rank_lost_during_the_restore_is_placed_again(body: Body, method: str) -> None:
    nth = {"__init__": 2, "join": 2, "call_policy": 3}[method]
    run = body.checked_run(*RANKS, faults=[dying_trainer(nth=2), dying_rank(method, nth)])
    assert len(run.outcomes.lost_actors) == 2
    assert sorted(set(steps_trained(run))) == list(range(5))


def dying_rank(method: str, nth: int) -> Fault:
    return Fault(actor="trainer-1", method=method, nth=nth, dies="before")


def test_ranks_lost_repeatedly_end_the_run(body: Body) -> None:
    """All ranks count as one role."""
    faults = [
        Fault(actor=f"trainer-{1 + nth % 2}", method="call_policy", nth=3 + nth, dies="before") for nth in range(9)
    ]
    run = body.run(*RANKS, faults=faults)
    assert str(run.raised()).startswith("trainer was lost 4 times within an hour, last: trainer-")
    run.check_kept()


def test_an_error_raised_by_a_rank_ends_the_run(body: Body) -> None:
    """A GPU out of memory would be out of memory again."""
    failed = ActorFailed("RuntimeError: CUDA out of memory")
    run = body.run(*RANKS, faults=[Fault(actor="trainer-1", method="call_policy", nth=3, error=failed)])
    assert str(run.raised()) == "trainer-1 failed: RuntimeError: CUDA out of memory"
    run.check_kept()


# -- the trajectory server -----------------------------------------------------------------------------------------

LONG = ("steps=4", "staleness.eta=2", "rollout.max_new_tokens=400")
SHAPES = {
    "draw": LONG,
    "record_routes": LONG,
    "deliver": (*LONG, *MOVES),
    "scoring_items": LONG,
    "record_rewards": LONG,
    "take_batch": LONG,
    "discard": (*LONG, "batch.extra_groups=1", "batch.extra_members=1"),
    "commit": LONG,
    "held_out_notice": LONG,
}
"""Server methods called during training, and a job in which each is called."""


def test_prompts_of_slow_environments_are_waited_for(body: Body) -> None:
    run = body.run(faults=[Fault(actor="server", method="draw", nth=0, late_s=10.0)])
    run.check()
    assert run.outcomes.lost_actors == []


def check_server_restored(run: Run, losses: int = 1) -> None:
    """Check that no prompt is skipped or used twice and that no engine is loaded again."""
    run.check()
    assert len(run.outcomes.lost_actors) == losses
    assert run.workers.names.count("server") == 1 + losses
    assert sorted(n for n in run.workers.names if n.startswith("rollout")) == ["rollout-0", "rollout-1"]
    groups = {row.trajectory.group for row in run.store.trajectories()}
    assert groups == set(range(len(groups)))


def world_with_long_responses() -> World:
    return World(length=lambda trajectory: 150 if trajectory % 5 == 3 else 6 + trajectory % 5)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("method", SHAPES)
def test_a_server_that_dies_during_a_call_is_restored_from_store_and_spool(
    body: Body, method: str, moment: Any
) -> None:
    """Before or after the call took effect. The call is repeated, and nothing is sampled again."""
    fault = Fault(actor="server", method=method, nth=2, dies=moment)
    run = body.run(*SHAPES[method], world=world_with_long_responses(), faults=[fault])
    check_server_restored(run)
    routed = Counter(c.trajectory for c in run.commands("Route"))
    interrupted = Counter(c.trajectory for c in run.commands("Interrupt"))
    assert all(times <= 1 + interrupted[trajectory] for trajectory, times in routed.items())


def test_a_server_lost_during_sampling_gets_the_tokens_again(body: Body) -> None:
    async def kill(run: Run) -> None:
        while run.driver is None or run.workers.methods("server").count("deliver") < 4:
            await asyncio.sleep(0.01)
        run.workers.kill("server")

    run = body.run(*LONG, world=world_with_long_responses(), meanwhile=kill)
    check_server_restored(run)


def test_callers_that_detect_a_loss_late_only_repeat_their_call(body: Body) -> None:
    """A commit has a longer timeout than other calls, so its caller detects the loss last."""

    async def stop(run: Run) -> None:
        run.workers.nanny = False
        while run.driver is None or "commit" not in run.workers.methods("server"):
            await asyncio.sleep(0.0005)
        run.workers.stop("server")

    run = body.run(*LONG, "deadlines.stuck_s=200", world=world_with_long_responses(), meanwhile=stop)
    check_server_restored(run)


@pytest.mark.parametrize("silent_s", [3.2, 4.2, 5.0, 6.5])
@pytest.mark.parametrize("num_delivered", [2, 9])
def test_a_server_that_continues_after_its_replacement_acknowledges_nothing(
    body: Body, num_delivered: int, silent_s: float
) -> None:
    """Its process also has other actors, so that no nanny restarts it. It commits a step that its replacement has not
    seen, and answers pending calls."""

    async def stop(run: Run) -> None:
        run.workers.nanny = False
        while run.driver is None or run.workers.methods("server").count("deliver") < num_delivered:
            await asyncio.sleep(0.001)
        process = run.workers.placed["server"].future
        process.stopped = True
        await asyncio.sleep(silent_s)
        run.workers.continue_process(process)

    body.checked_run(*LONG, world=world_with_long_responses(), meanwhile=stop)


def test_server_and_trainer_may_be_lost_at_once(body: Body) -> None:
    async def kill(run: Run) -> None:
        while run.driver is None or run.workers.methods("trainer").count("train") < 4:
            await asyncio.sleep(0.01)
        for name in ("server", "trainer", "reward-0"):
            run.workers.kill(name)

    run = body.checked_run("steps=6", "training.resume_every=2", world=world_with_long_responses(), meanwhile=kill)
    assert len(run.outcomes.lost_actors) == 3
    assert sorted(n for n in run.workers.names if n.startswith("rollout")) == ["rollout-0", "rollout-1"]


def test_a_server_lost_repeatedly_ends_the_run(body: Body) -> None:
    run = body.run(faults=[Fault(actor="server", method="record_routes", nth=0, dies="before")])
    assert str(run.raised()).startswith("server was lost 4 times within an hour, last: server ")
    run.check_kept()


def test_a_run_without_a_free_worker_for_its_server_ends_with_one_line(body: Body) -> None:
    none = Fault(actor="server", method="__init__", nth=2, error=NoFreeWorker("cluster: no free worker for server"))
    run = body.run(faults=[Fault(actor="server", method="deliver", nth=2, dies="before"), none])
    error = run.raised()
    assert isinstance(error, ActorLost)
    assert str(error).endswith("; cluster: no free worker for server")
    assert len(run.outcomes.lost_actors) == 1, "no instance that asked it counts as lost"
    run.check_kept()
