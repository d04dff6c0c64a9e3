"""Teachers in whole runs over in-process actors: each trained response has their logprobs, whatever is lost."""

from __future__ import annotations

import pytest

from staleflow.pipeline.processes.worker_protocol import NoFreeWorker
from staleflow.stores.trajectories.records import batch_fingerprint
from staleflow.stores.trajectory import Fate
from tests.support.bodies import Body, Run
from tests.support.in_process import Fault
from tests.support.scripted import World, teacher_logprobs

TAUGHT = (
    "rollout.engine.name=transformers", "model.path=none", "task.eval_prompts=0", "training.kl.coefficient=1",
    "teacher.instances=1",
)  # fmt: skip


def check_taught(run: Run) -> None:
    """Check that each response that was trained on has the teacher's logprobs of exactly its tokens."""
    consumed = [row for row in run.store.trajectories() if row.fate is Fate.CONSUMED]
    assert len(consumed) == run.config.steps * run.config.trajectories_per_step
    for t in (row.trajectory for row in consumed):
        assert t.teacher_logprobs is not None, t.id
        assert (
            t.teacher_logprobs[t.sampled].tolist() == teacher_logprobs(t.response_tokens[t.sampled].tolist()).tolist()
        )
        assert not t.teacher_logprobs[~t.sampled].any()
    for record in run.records:
        if record.kind == "step":
            batch = [(row.trajectory, row.advantage) for row in consumed if row.step == record.step]
            assert batch_fingerprint(batch) == record.batch_fingerprint


def test_each_trained_response_has_the_teachers_logprobs(body: Body) -> None:
    run = body.checked_run(*TAUGHT)
    check_taught(run)
    assert run.outcomes.lost_actors == []


def test_a_run_that_compares_with_no_reference_has_no_teacher(body: Body) -> None:
    assert body.config("teacher.instances=2", "training.kl.coefficient=1").teachers == (), "an emulated run"
    run = body.checked_run(*TAUGHT[:-2])
    assert not [name for name in run.workers.names if name.startswith("teacher")]
    assert all(row.trajectory.teacher_logprobs is None for row in run.store.trajectories())


def test_sampling_goes_on_while_a_step_waits_for_a_slow_teacher(body: Body) -> None:
    run = body.checked_run(*TAUGHT, "staleness.eta=2", world=World(teacher_s=4.0))
    check_taught(run)
    (first, *_) = [c.at_s for c in run.workers.calls if c.method == "take_batch"]
    routed = [c.at_s for c in run.workers.calls if c.method == "route" and c.at_s < first]
    num_started = sum(len(c.args[1]) for c in run.workers.calls if c.method == "route" and c.at_s < first)
    assert routed
    assert num_started >= 2 * run.config.trajectories_per_step, "work of the next step was sampled meanwhile"
    assert all(step["teacher_wait_s"] > 4.0 for step in run.outcomes.steps[:1])
    assert all("teacher_wait_s" not in step for step in body.checked_run(*TAUGHT[:-2]).outcomes.steps)


@pytest.mark.parametrize(
    "how", [{"dies": "before"}, {"dies": "after"}, {"silent": "before"}, {"silent": "after"}], ids=str
)
@pytest.mark.parametrize("nth", [1, 2])
def test_a_lost_teacher_is_replaced_and_its_responses_are_computed_again(
    body: Body, how: dict[str, str], nth: int
) -> None:
    fault = Fault(actor="teacher-0", method="score", nth=nth, **how)  # type: ignore[arg-type]
    run = body.checked_run(*TAUGHT, faults=[fault])
    check_taught(run)
    (loss,) = run.outcomes.lost_actors
    assert "teacher-0" in loss
    assert run.workers.names.count("teacher-0") == 2


def test_a_teacher_lost_repeatedly_ends_the_run(body: Body) -> None:
    run = body.run(*TAUGHT, faults=[Fault(actor="teacher-0", method="score", nth=0, dies="before")])
    assert str(run.raised()).startswith("teacher-0 was lost 4 times within an hour, last: teacher-0 is gone")
    run.check_kept()


def test_a_run_continues_with_the_teachers_that_are_left(body: Body, caplog: pytest.LogCaptureFixture) -> None:
    waits = [Fault(actor="teacher-0", method="__init__", nth=2, error=NoFreeWorker("no free worker"))]
    faults = [Fault(actor="teacher-0", method="score", nth=1, dies="before"), *waits]
    run = body.checked_run(*TAUGHT, "teacher.instances=2", faults=faults)
    check_taught(run)
    assert "the run continues without teacher-0: no free worker" in caplog.text
    alone = body.run(*TAUGHT, faults=faults)
    assert str(alone.raised()) == "no free worker"
    alone.check_kept()


@pytest.mark.parametrize("method", ["teacher_items", "record_teacher_logprobs", "take_batch"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_lost_trajectory_server_keeps_the_logprobs_that_it_acknowledged(body: Body, method: str, when: str) -> None:
    run = body.checked_run(*TAUGHT, faults=[Fault(actor="server", method=method, nth=2, dies=when)])  # type: ignore[arg-type]
    check_taught(run)


def test_a_teacher_that_is_lost_at_the_start_is_placed_again(body: Body) -> None:
    run = body.checked_run(*TAUGHT, faults=[Fault(actor="teacher-0", method="__init__", dies="before")])
    check_taught(run)
