"""Slow commits: training waits for them, nothing else does, and a killed run can be resumed."""

from __future__ import annotations

import asyncio
import re

from staleflow.pipeline.coordination.commands import FetchPrompts
from staleflow.pipeline.runtime.commit_queue import MAX_UNCOMMITTED
from staleflow.stores.weights.resume_points import ResumePoints
from tests.support.bodies import Body, Run
from tests.support.in_process import Fault
from tests.support.scripted import World


def quick_world(commit_s: float) -> World:
    """Return a world with steps of 0.2 s and longer commits."""
    return World(commit_s=commit_s, train_s=0.1, publish_s=0.1, length=lambda _: 2)


def test_a_run_killed_during_slow_commits_has_a_usable_resume_point(body: Body) -> None:
    seen: list[tuple[int, list[int]]] = []

    async def watch(run: Run) -> None:
        """Record the resume points and stored steps, as if the run were killed at any of these moments."""
        points = ResumePoints(run.config.run_dir / "resume")
        while True:
            await asyncio.sleep(0.05)
            stored = len([r for r in run.records if r.kind == "step"]) if run.world.stores else 0
            seen.append((stored, [int(v) for v in points.complete_versions()]))

    body.checked_run("steps=12", world=quick_world(2.0), meanwhile=watch)
    assert max(stored for stored, _ in seen) > 3
    for stored, points in seen:
        assert stored == 0 or any(point <= stored for point in points), f"{stored} steps stored, points of {points}"


def test_at_most_two_trained_steps_wait_for_their_commit(body: Body) -> None:
    run = body.checked_run("steps=8", world=quick_world(2.0))
    commits = [c.at_s for c in run.workers.calls if c.method == "commit"]
    trained = [c.at_s for c in run.workers.calls if c.method == "train"]
    for step, began_s in enumerate(trained):
        stored = sum(at_s + 2.0 < began_s for at_s in commits)
        assert step - stored < MAX_UNCOMMITTED, f"step {step} began with {stored} stored"


def test_seconds_of_a_run_are_in_its_report_at_each_stored_step(body: Body) -> None:
    run = body.checked_run("steps=3", world=quick_world(2.0))
    assert len(run.wall_s) == 3
    assert 0 < run.wall_s[0] < run.wall_s[1] < run.wall_s[2] < run.outcomes.seconds_by_activity["wall_s"]


def test_a_commit_longer_than_call_s_is_reported_and_not_a_loss(body: Body) -> None:
    """Prompts are drawn meanwhile, and nothing counts as lost or stuck."""
    run = body.checked_run("steps=5", "deadlines.stuck_s=5", world=quick_world(7.0))
    assert run.outcomes.lost_actors == []
    received = [what for _, what in run.phases if what.startswith("committing")]
    assert received[0] == (
        "committing step 0 for 3 s (deadlines.commit_s allows 60); sampling continues within the staleness bound, "
        "training up to 2 steps ahead"
    )
    assert len(received) >= 2 * 5


def test_the_reported_seconds_of_a_slow_commit_include_slow_answers(body: Body) -> None:
    late = Fault(actor="server", method="outage", nth=0, late_s=2.5)
    run = body.checked_run(world=quick_world(20.0), faults=[late])
    called_s = next(c.at_s for c in run.workers.calls if c.method == "commit")
    reports = [(at_s, re.search(r"committing step 0 for (\d+) s", what)) for at_s, what in run.phases]
    seconds = [(at_s - called_s, float(report[1])) for at_s, report in reports if report]
    assert len(seconds) > 2
    assert all(abs(actual - reported) <= 0.6 for actual, reported in seconds)


def test_prompts_are_drawn_during_a_commit(body: Body) -> None:
    run = body.checked_run("steps=8", world=quick_world(2.5))
    arrived = [at_s for at_s, _ in run.events("GroupsArrived")]
    drawn = [entry.now for entry in run.entries for command in entry.commands if isinstance(command, FetchPrompts)]
    assert len(arrived) > 3
    assert max(a - d for a, d in zip(arrived, drawn, strict=False)) < 0.1


def test_a_commit_longer_than_commit_s_is_retried_and_then_ends_the_run(body: Body) -> None:
    """Each attempt uses a new server, since the old one hangs."""
    run = body.run("deadlines.commit_s=9", world=quick_world(20.0))
    why = "server did not answer within 12 s (deadlines.commit_s)"
    assert str(run.raised()) == f"server was lost 4 times within an hour, last: {why}"
    assert len(run.outcomes.lost_actors) == 4


def test_a_bucket_outage_of_minutes_does_not_end_the_run(body: Body) -> None:
    """Training waits after two steps, sampling continues, and the report has the cause and the duration."""
    world = quick_world(0.5)
    world.length, world.outage = (lambda _: 60), (3.0, 303.0)
    run = body.checked_run("steps=12", "deadlines.commit_s=400", world=world)
    assert run.outcomes.lost_actors == []
    reported = [(at_s, what) for at_s, what in run.phases if "the provided token has expired" in what]
    assert reported[0][0] < 3.0 + 5.0
    assert "it is tried again (deadlines.commit_s allows 400); sampling continues" in reported[0][1]
    assert max(float(re.search(r"for (\d+) s", what)[1]) for _, what in reported) >= 297  # type: ignore[index]
    requests = [c for c in run.workers.calls if c.method == "commit"]
    assert len(requests) == 13, "the server tries again, the driver does not ask again"
    during = [event for at_s, event in run.events("TrajectorySampled") if 3.0 < at_s < 303.0]
    assert len(during) >= 4 * MAX_UNCOMMITTED
    trained = [c for c in run.workers.calls if c.method == "train" and 3.0 < c.at_s < 303.0]
    assert len(trained) == MAX_UNCOMMITTED


def test_a_bucket_outage_longer_than_commit_s_ends_the_run_with_its_cause(body: Body) -> None:
    world = quick_world(0.5)
    world.outage = (3.0, 500.0)
    run = body.run("steps=12", "deadlines.commit_s=60", world=world)
    assert "the provided token has expired; tried again for 60 s (deadlines.commit_s)" in str(run.raised())
    assert run.outcomes.lost_actors == []


def test_a_server_lost_during_a_bucket_outage_is_restored_after_it(body: Body) -> None:
    world = quick_world(0.5)
    world.outage = (3.0, 63.0)
    lost = Fault(actor="server", method="outage", nth=5, dies="before")
    run = body.checked_run("steps=12", "deadlines.commit_s=400", world=world, faults=[lost])
    assert len(run.outcomes.lost_actors) == 1
