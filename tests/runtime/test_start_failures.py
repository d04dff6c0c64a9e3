"""Actors whose processes die during the start are replaced like any other loss."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from staleflow.stores.errors import ActorFailed, ActorLost, ConfigError
from tests.support.bodies import Body, Run
from tests.support.in_process import Fault
from tests.support.scripted import World

RANKS = ("steps=2", "training.ranks=2")
CALLS = [
    ("trainer", "__init__"), ("trainer", "form_group"), ("trainer", "publish_initial"), ("trainer-1", "__init__"),
    ("trainer-1", "join"), ("trainer-1", "call_policy"), ("server", "__init__"), ("server", "held_out"),
    ("server", "held_out_notice"), ("server", "set_clock"), ("reward-0", "__init__"), ("reward-0", "check"),
    ("rollout-0", "__init__"), ("rollout-1", "__init__"), ("rollout-1", "pull"), ("parameters-one", "__init__"),
]  # fmt: skip


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(("actor", "method"), CALLS)
def test_an_actor_that_dies_during_start_is_replaced(body: Body, actor: str, method: str, moment: Any) -> None:
    run = body.checked_run(*RANKS, faults=[Fault(actor=actor, method=method, dies=moment)])
    role = "trainer" if actor.startswith("trainer") else actor
    expected = 0 if actor.startswith("parameters") else 1
    assert len(run.outcomes.lost_actors) == expected
    assert all(role in loss for loss in run.outcomes.lost_actors)
    assert run.loss_counts[-1] == expected


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(
    ("method", "nth"), [("logprobs", 1), ("fine_tune", 1), ("fine_tune", 3), ("publish_initial", 1), ("train", 1)]
)
def test_a_trainer_that_dies_after_fine_tuning_is_tuned_again(body: Body, method: str, nth: int, moment: Any) -> None:
    """Until there is a later version to resume from."""
    run = body.checked_run(
        *RANKS, "training.sft.steps=3", faults=[Fault(actor="trainer", method=method, nth=nth, dies=moment)]
    )
    assert len(run.outcomes.lost_actors) == 1
    assert len(run.world.tuned) in (1, 2) and all(tuned == [0, 1, 2] for tuned in run.world.tuned)


def test_repeated_fine_tuning_steps_are_not_logged_again(body: Body, caplog: pytest.LogCaptureFixture) -> None:
    """The reply to such a step is empty."""
    caplog.set_level("INFO", "staleflow")
    body.run(
        *RANKS, "training.sft.steps=2", faults=[Fault(actor="trainer", method="fine_tune", nth=2, twice=True)]
    ).check()
    assert [m for m in caplog.messages if "fine-tuning" in m] == ["fine-tuning step 1 of 2: loss 1.0000"]


def test_a_trainer_resumed_from_a_resume_point_is_not_fine_tuned(body: Body) -> None:
    run = body.checked_run(
        "steps=4", "training.sft.steps=3", faults=[Fault(actor="trainer", method="train", nth=3, dies="before")]
    )
    assert run.world.tuned == [[0, 1, 2], []]


@pytest.mark.parametrize(
    ("actor", "method"), [("trainer", "publish_initial"), ("trainer-1", "join"), ("reward-0", "check")]
)
def test_an_actor_that_dies_at_each_start_ends_the_run(body: Body, actor: str, method: str) -> None:
    run = body.run(*RANKS, faults=[Fault(actor=actor, method=method, nth=0, dies="before")])
    error = run.raised()
    assert isinstance(error, ActorLost)
    role = "trainer" if actor.startswith("trainer") else actor
    assert str(error).startswith(f"{role} was lost 4 times within an hour, last: {actor}")


@pytest.mark.parametrize(("actor", "method"), [("trainer", "publish_initial"), ("trainer-1", "join")])
def test_an_actor_error_during_start_ends_the_run_at_once(body: Body, actor: str, method: str) -> None:
    failed = ActorFailed("RuntimeError: CUDA out of memory")
    run = body.run(*RANKS, faults=[Fault(actor=actor, method=method, error=failed)])
    assert str(run.raised()) == f"{actor} failed: RuntimeError: CUDA out of memory"
    assert run.outcomes.lost_actors == []


@pytest.mark.parametrize(
    ("world", "message"),
    [
        (World(refuses="3 tensors differ from the model's"), r"cannot load version 0: 3 tensors differ"),
        (
            World(loads_wrong=lambda instance, version: True),
            r"is out of service at version 0: .* 1 contradicted \(norm.weight\)",
        ),
    ],
)
def test_weights_that_engines_cannot_load_end_the_run_before_the_first_step(
    body: Body, world: World, message: str
) -> None:
    """Every instance and every replacement would reject them."""
    run = body.run(*RANKS, world=world)
    error = run.raised()
    assert isinstance(error, ConfigError)
    assert re.match(rf"rollout.engine cannot be updated by this trainer: rollout-[01] .*{message}", str(error))
    assert run.outcomes.lost_actors == []
    assert not run.workers.methods("rollout-0").count("route")


def test_an_instance_that_dies_before_its_parameter_server_is_placed_is_replaced(body: Body) -> None:
    """It is alone on its host."""
    never_up = [Fault(actor="parameters-two", method="__init__", nth=n, dies="before") for n in (1, 2)]

    async def kill(run: Run) -> None:
        while "rollout-1" not in run.workers.placed:
            await asyncio.sleep(0.01)
        run.workers.kill("rollout-1")

    run = body.checked_run(hosts=("one", "one", "one", "one", "two"), faults=never_up, meanwhile=kill)
    (loss,) = run.outcomes.lost_actors
    assert "rollout-1: parameters-two could not start" in loss
