"""Instances that join later, are retired, or fail to start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from staleflow.pipeline.processes.worker_protocol import ClusterLost, NoFreeWorker
from tests.support.bodies import Body, Run
from tests.support.in_process import Fault
from tests.support.scripted import World

LONG = ("steps=6", "staleness.eta=2", "rollout.max_new_tokens=400")


def long_ones() -> World:
    return World(length=lambda trajectory: 60 + trajectory % 40)


async def until(run: Run, condition: Callable[[], Any]) -> None:
    while run.driver is None or not condition():
        await asyncio.sleep(0.01)


def instances(run: Run) -> list[str]:
    return sorted(name for name in run.workers.names if name.startswith("rollout"))


def lines(run: Run) -> list[str]:
    """Return the distinct lines about instances that the run reported."""
    return list(dict.fromkeys(line for line in run.instance_lines if line))


# -- joining later -------------------------------------------------------------------------------------------------


def test_workers_that_join_later_become_instances(body: Body) -> None:
    async def join(run: Run) -> None:
        await until(run, lambda: run.workers.methods("rollout-0").count("route") > 1)
        run.workers.num_spare = 3

    run = body.checked_run(*LONG, "rollout.max_instances=4", world=long_ones(), meanwhile=join)
    assert instances(run) == ["rollout-0", "rollout-1", "rollout-2", "rollout-3"], (
        "four, though a fifth worker is there"
    )
    sampled = {s.instance for row in run.store.trajectories() for s in row.trajectory.segments}
    assert sampled == set(instances(run))
    assert lines(run)[0] == "2 of 2 instances, at most 4"
    assert lines(run)[-1] == "4 of 2 instances, at most 4"


@pytest.mark.parametrize("most", [(), ("rollout.max_instances=2",)])
def test_a_run_has_at_most_max_instances(body: Body, most: tuple[str, ...]) -> None:
    async def join(run: Run) -> None:
        run.workers.num_spare = 9

    run = body.checked_run(*most, meanwhile=join)
    assert instances(run) == ["rollout-0", "rollout-1"]


def test_a_lost_extra_instance_is_replaced_only_when_a_worker_is_free(body: Body) -> None:
    async def join(run: Run) -> None:
        await until(run, lambda: "route" in run.workers.methods("rollout-0"))
        run.workers.num_spare = 1
        await until(run, lambda: "report" in run.workers.methods("rollout-2"))
        run.workers.kill("rollout-2")
        await asyncio.sleep(5.0)
        run.workers.num_spare = 1

    none = Fault(actor="rollout-2", method="__init__", nth=2, error=NoFreeWorker("no free worker"))
    run = body.checked_run(*LONG, "rollout.max_instances=3", world=long_ones(), faults=[none], meanwhile=join)
    assert "rollout-2.1" in instances(run)
    assert len(run.outcomes.lost_actors) == 1


def test_an_instance_that_fails_to_start_is_placed_elsewhere(body: Body) -> None:
    dies = Fault(actor="rollout-0", method="report", nth=2, dies="before")
    never_up = Fault(actor="rollout-0", method="__init__", nth=2, dies="before")
    run = body.checked_run(*LONG, world=long_ones(), faults=[dies, never_up])
    assert "rollout-0.2" in instances(run)
    assert len(run.outcomes.lost_actors) == 2


@pytest.mark.parametrize(
    ("actor", "method"), [("rollout-0", "report"), ("trainer", "train"), ("server", "commit"), ("reward-0", "score")]
)
def test_a_run_whose_cluster_is_lost_ends_at_the_next_placement(body: Body, actor: str, method: str) -> None:
    dies = Fault(actor=actor, method=method, nth=2, dies="before")
    gone = Fault(actor=actor, method="__init__", nth=2, error=ClusterLost("cluster: the scheduler was started anew"))
    run = body.run(*LONG, "rollout.min_instances=1", faults=[dies, gone])
    assert str(run.raised()) == "cluster: the scheduler was started anew"
    assert isinstance(run.raised(), ClusterLost)
    run.check_kept()
    lost_s = float(run.outcomes.lost_actors[0].partition(" ")[0])
    last_s = max(c.at_s for c in run.workers.calls if c.method not in ("close", "flush")) - run.workers.calls[0].at_s
    assert last_s < lost_s + 5.0


def test_a_run_reports_its_missing_instances(body: Body) -> None:
    dies = Fault(actor="rollout-0", method="report", nth=4, dies="before")
    late = Fault(actor="rollout-0", method="__init__", nth=2, late_s=4.0)
    run = body.checked_run(*LONG, world=long_ones(), faults=[dies, late])
    assert lines(run) == ["2 of 2 instances", "1 of 2 instances; waiting for rollout-0"]
    assert run.instance_lines[-1] == "2 of 2 instances"


# -- retiring ------------------------------------------------------------------------------------------------------


def run_with_retirement(
    body: Body, *overrides: str, by: Callable[[Run], str] = lambda _: "rollout-1", **kwargs: Any
) -> Run:
    """Run a job whose second instance is retired while it samples."""
    answers = []

    async def retire(run: Run) -> None:
        await until(run, lambda: run.workers.methods("rollout-1").count("report") > 3)
        answers.append(run.driver.retire(by(run)))
        answers.append(run.driver.retire(by(run)))

    run = body.checked_run(*LONG, *overrides, world=long_ones(), meanwhile=retire, **kwargs)
    assert answers == ["", ""]
    return run


def test_trajectories_of_a_retired_instance_continue_elsewhere(body: Body) -> None:
    run = run_with_retirement(body)
    assert run.outcomes.lost_actors == []
    moved = [r for r in run.store.trajectories() if len({s.instance for s in r.trajectory.segments}) > 1]
    assert moved, "no trajectory has tokens of two instances"
    assert "close" in run.workers.methods("rollout-1")
    assert "rollout-1.1" in instances(run), "another worker takes its place"
    (lost,) = [e for _, e in run.events("InstanceLost")]
    assert (lost.instance, lost.why) == ("rollout-1", "it was retired")
    closed_s = next(c.at_s for c in run.workers.calls if (c.actor, c.method) == ("rollout-1", "close"))
    assert all(c.at_s <= closed_s for c in run.workers.calls if c.actor == "rollout-1")


def test_a_worker_is_retired_by_its_address(body: Body) -> None:
    run = run_with_retirement(body, by=lambda run: "process-4")
    assert "close" in [c.method for c in run.workers.calls if c.actor.startswith("rollout")]
    assert run.outcomes.lost_actors == []


def test_a_retired_instance_returns_when_a_worker_is_free(body: Body) -> None:
    none = [Fault(actor="rollout-1", method="__init__", nth=n, error=NoFreeWorker("none")) for n in (2, 3)]
    run = run_with_retirement(body, faults=none)
    assert "rollout-1.1" in instances(run)


def test_an_instance_that_dies_during_retirement_is_a_loss(body: Body, caplog: pytest.LogCaptureFixture) -> None:
    run = run_with_retirement(body, faults=[Fault(actor="rollout-1", method="interrupt", dies="before")])
    assert len(run.outcomes.lost_actors) == 1
    assert instances(run) == ["rollout-0", "rollout-1", "rollout-1.1"], "it is replaced once"
    assert [event.instance for _, event in run.events("InstanceLost")] == ["rollout-1"]
    assert "rollout-1 was lost before it was retired; if process-" in caplog.text, "its worker may have been restarted"


@pytest.mark.parametrize("host", ["rollout-0", "rollout-1"])
def test_an_instance_retired_during_an_evaluation_hands_it_over(body: Body, host: str) -> None:
    async def retire(run: Run) -> None:
        await until(run, lambda: any(c.trajectory < 0 for c in run.commands("Route")))
        assert run.driver.retire(host) == ""

    evaluated = ("rollout.engine.name=transformers", "model.path=none", "task.eval_prompts=4")
    run = body.checked_run(*evaluated, meanwhile=retire)
    assert [e.version for e in run.outcomes.evaluations] == [0, 3]
    assert all(e.sampled_failed == 0 for e in run.outcomes.evaluations)
    assert run.outcomes.lost_actors == []


@pytest.mark.parametrize(
    ("worker", "least", "answer"),
    [
        ("process-99", 1, "process-99: no rollout instance of this run is there; it has rollout-0, rollout-1"),
        (
            "rollout-1",
            2,
            "rollout-1: the run has no more than 2 instances (rollout.min_instances); start a worker first",
        ),
    ],
)
def test_a_rejected_retirement_returns_its_reason(body: Body, worker: str, least: int, answer: str) -> None:
    answers = []

    async def retire(run: Run) -> None:
        await until(run, lambda: run.workers.methods("rollout-1").count("report") > 1)
        answers.append(run.driver.retire(worker))

    body.checked_run(f"rollout.min_instances={least}", meanwhile=retire)
    assert [a.replace("rollout-1, rollout-0", "rollout-0, rollout-1") for a in answers] == [answer]


def test_an_instance_that_is_being_placed_cannot_be_retired_yet(body: Body) -> None:
    answers = []

    async def retire(run: Run) -> None:
        await until(run, lambda: "report" in run.workers.methods("rollout-1"))
        run.workers.kill("rollout-1")
        await until(run, lambda: "rollout-1.1" in run.actors.instances)
        answers.append(run.driver.retire("rollout-1.1"))
        await until(run, lambda: any(event.instance == "rollout-1.1" for _, event in run.events("InstanceJoined")))
        answers.append(run.driver.retire("rollout-1.1"))

    slow = Fault(actor="rollout-1.1", method="pull", late_s=1.0)
    run = body.checked_run(*LONG, world=long_ones(), faults=[slow], meanwhile=retire)
    assert answers == ["rollout-1.1: rollout-1.1 is still being placed; retry when it has joined", ""]
    assert "rollout-1.2" in instances(run)
