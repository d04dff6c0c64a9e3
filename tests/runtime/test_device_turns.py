"""Trainer and instances on the same GPUs in turns: whole runs in virtual time. An engine that is awake while the
trainer computes is an error (tests/support/scripted.py)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from staleflow.pipeline.config.actor_settings import make_workload
from staleflow.pipeline.processes.worker_protocol import NoFreeWorker
from staleflow.pipeline.simulator.simulated_run import SimulatedRun
from staleflow.stores.errors import ActorFailed, RunStuck, TransferFailed
from staleflow.stores.trajectory import InstanceId, PolicyVersion
from tests.support import virtual_time
from tests.support.bodies import Body, Run
from tests.support.in_process import Fault
from tests.support.scripted import World

TURNS = 'cluster.layout="turns"'


@pytest.mark.parametrize("eta", [0, 1, 2])
def test_trainer_and_instances_use_the_gpus_in_turns(body: Body, eta: int) -> None:
    run = body.checked_run(TURNS, f"staleness.eta={eta}", "steps=4", world=long_ones())
    assert len(run.commands("Sleep")) == len(run.events("InstanceSlept")) == 2 * 4
    interrupted = len(run.events("TrajectoryInterrupted"))
    assert interrupted == 0 if eta == 0 else interrupted > 0


@pytest.mark.parametrize("eta", [0, 1])
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(("actor", "method", "nth"), [
    ("rollout-0", "route", 2),
    ("rollout-0", "sleep", 1), ("rollout-0", "sleep", 2), ("rollout-0", "sleep", 3), ("rollout-0", "pull", 2),
    ("rollout-0", "pull", 3), ("rollout-0", "interrupt", 1), ("rollout-0", "__init__", 1),
    ("trainer", "train", 1), ("trainer", "train", 3), ("trainer", "version", 2), ("trainer", "publish_initial", 1),
    ("server", "take_batch", 2), ("server", "deliver", 3),
])  # fmt: skip
def test_a_process_that_dies_in_any_turn_is_replaced(
    body: Body, actor: str, method: str, nth: int, moment: Any, eta: int
) -> None:
    """The ledger loses nothing and the replacement waits for its turn."""
    fault = Fault(actor=actor, method=method, nth=nth, dies=moment)
    run = body.checked_run(TURNS, f"staleness.eta={eta}", "steps=4", faults=[fault], world=long_ones())
    happened = len(run.outcomes.lost_actors) > 0
    assert happened or (method == "interrupt" and eta == 0), "the fault did not happen"


def test_an_instance_wakes_after_the_trainer_has_computed(body: Body) -> None:
    async def pull() -> None:
        slow = Fault(actor="trainer", method="logprobs", late_s=5.0)
        async with body.placed(TURNS, "training.sft.steps=0", faults=[slow]) as stage:
            computing = asyncio.ensure_future(stage.actors.ask_once("trainer", "logprobs", (1, 2), within_s=9.0))
            await asyncio.sleep(0.0)
            begun_s = asyncio.get_running_loop().time()
            await stage.actors.pull(stage.actors.instances[InstanceId("rollout-0")], PolicyVersion(0))
            await computing
            assert stage.workers.calls[-1].at_s >= begun_s + 5.0

    virtual_time.run(pull())


@pytest.mark.parametrize("gets_weights", [True, False])
def test_trainer_and_instance_may_be_lost_in_one_sampling_phase(body: Body, gets_weights: bool) -> None:
    """The restored trainer waits until the instances have sampled a batch and sleep. The replaced instance does not
    wait for the trainer; if no other host can send it the weights, the run ends."""

    async def kill_both(run: Run) -> None:
        while run.driver is None or not run.outcomes.steps or run.world.computing or len(run.world.awake) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        run.workers.kill("trainer")
        run.workers.kill("rollout-1")

    unreachable = Fault(actor="parameters-two", method="ensure_version", nth=0, error=TransferFailed("no route"))
    run = body.run(
        TURNS, "staleness.eta=0", "rollout.engine.max_running=2", "steps=4", hosts=("one",) * 5 + ("two", "one"),
        faults=[] if gets_weights else [unreachable], world=World(length=lambda _: 40), meanwhile=kill_both,
    )  # fmt: skip
    assert len(run.outcomes.lost_actors) == 2
    if gets_weights:
        run.check()
    else:
        assert isinstance(run.raised(), RunStuck)


def test_an_instance_that_fails_to_sleep_at_start_ends_the_run(body: Body) -> None:
    failed = ActorFailed("RuntimeError: CUDA error")
    run = body.run(TURNS, faults=[Fault(actor="rollout-0", method="sleep", error=failed)])
    assert str(run.raised()) == "rollout-0 failed: RuntimeError: CUDA error"


@pytest.mark.parametrize("ending", ["no worker", "retired"])
def test_the_trainer_does_not_wait_for_an_instance_that_is_gone(
    body: Body, caplog: pytest.LogCaptureFixture, ending: str
) -> None:
    async def change(run: Run) -> None:
        while "route" not in run.workers.methods("rollout-1"):
            await asyncio.sleep(0.01)
        if ending == "retired":
            assert run.driver.retire("rollout-1") == ""
        else:
            run.workers.num_spare = 1

    none = Fault(actor="rollout-2", method="__init__", error=NoFreeWorker("no free worker"))
    limits = ("rollout.min_instances=1", "rollout.max_instances=3")
    run = body.checked_run(TURNS, *limits, "steps=4", faults=[none], world=long_ones(), meanwhile=change)
    assert [event.why for _, event in run.events("InstanceLost")] == ["it was retired"] * (ending == "retired")
    assert ("the run continues with 2 of 2 instances: no free worker" in caplog.text) == (ending == "no worker")


@pytest.mark.parametrize("lost", ["dies", "retired"])
def test_the_trainer_does_not_wait_for_a_required_instance_without_a_worker(body: Body, lost: str) -> None:
    """The search for a worker is repeated until the run ends, each time for start_s."""

    async def retire(run: Run) -> None:
        while run.workers.methods("rollout-1").count("route") < 2:
            await asyncio.sleep(0.01)
        assert run.driver.retire("rollout-1") == ""

    error = NoFreeWorker("no free worker")
    faults = [Fault(actor="rollout-1.1", method="__init__", nth=0, late_s=49.0, error=error)]
    if lost == "dies":
        faults.append(Fault(actor="rollout-1", method="pull", nth=2, dies="before"))
    limits = ("rollout.min_instances=1", "staleness.eta=0", "steps=4")
    run = body.checked_run(
        TURNS, *limits, faults=faults, world=World(length=lambda _: 20),
        meanwhile=retire if lost == "retired" else None,
    )  # fmt: skip
    assert run.workers.names.count("rollout-1.1") == 0
    assert run.ended_s < 49.0


def long_ones() -> World:
    return World(length=lambda i: 40 if i % 5 == 3 else 8)


@pytest.mark.parametrize("eta", [0, 1])
def test_the_simulator_predicts_the_duration_of_a_run(body: Body, eta: int) -> None:
    config = body.config(
        TURNS, f"staleness.eta={eta}", "steps=8", "workload.median=30", "simulation.train_s=1.1",
        "simulation.reward_s=0.02", "simulation.pull_s=0", "simulation.switch_s=0.3", "simulation.message_s=0.001",
        "simulation.report_s=0.5", "rollout.cost.k4=0.05",
        *(f"rollout.cost.{k}=0" for k in ("k1", "k2", "k3", "b", "prefill")),
    )  # fmt: skip
    workload = make_workload(config)

    def length(trajectory: int) -> int:
        return workload.turns(*divmod(trajectory, config.batch.group_size))[0].tokens

    run = body.checked_run(config=config, world=World(length=length, switch_s=0.3))
    simulated = SimulatedRun(config, workload, validate_every_event=True).run()
    published_s = [at_s for at_s, _ in run.events("VersionPublished")]
    foretold_s = [step.finished_s for step in simulated.steps]
    assert published_s[-1] == pytest.approx(foretold_s[-1], rel=0.05)
    if eta == 0:  # else a token more or less decides which step takes a group
        assert published_s == pytest.approx(foretold_s, rel=0.05)
