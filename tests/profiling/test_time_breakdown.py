"""The time breakdown of a run from its events: sums agree, and a fit to its responses predicts the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from staleflow.pipeline.config import actor_settings, factories, loading
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.coordination import journal
from staleflow.pipeline.coordination.commands import Discard, FetchPrompts, FinishEvaluation, Pull, Route, Score, Train
from staleflow.pipeline.coordination.events import (
    GroupsArrived,
    InstanceJoined,
    InstanceLost,
    InstanceReported,
    PullFinished,
    RunResumed,
    Tick,
    TrajectorySampled,
    TrajectoryScored,
    VersionPublished,
)
from staleflow.pipeline.profiling.diagnosis import make_job_speed
from staleflow.pipeline.profiling.latencies import LatencyTracker
from staleflow.pipeline.profiling.run_profile import make_recorded_overrides, profile_run, write_profile
from staleflow.pipeline.profiling.step_samples import DraftStats
from staleflow.pipeline.profiling.step_times import sum_steady_steps, sum_steps
from staleflow.pipeline.profiling.time_breakdown import TimeTracker
from staleflow.pipeline.recovery.run_folder import load_job
from staleflow.pipeline.simulator.analysis import compute_stats
from staleflow.pipeline.simulator.simulated_run import SimulatedRun
from staleflow.stores.in_flight.in_flight_state import GroupInFlight, MemberInFlight, NewGroup
from staleflow.stores.staleness.ledger_groups import Ending
from staleflow.stores.trajectory import AbortReason, Fate, GroupId, InstanceId, PolicyVersion, TrajectoryId
from staleflow.tasks.emulation.cost_model import CostModel, tokens_per_step
from tests.support.simulated_store import stored_simulation

SMALL_GROUPS = "batch.group_size=4"


def rate(config: RunConfig) -> float:
    return compute_stats(config, SimulatedRun(config, actor_settings.make_workload(config)).run()).steady_tokens_per_s


@pytest.mark.parametrize(
    "overrides",
    [
        ("steps=10", SMALL_GROUPS),
        ("steps=4", "batch.groups_per_step=4", "rollout.instances=1", "rollout.engine.max_running=16"),
        (
            "steps=16",
            SMALL_GROUPS,
            "rollout.engine.speculation.num_speculative_tokens=4",
            "workload.acceptance_rate=0.8",
        ),
    ],
    ids=["plain", "short", "drafts"],
)
def test_a_profile_predicts_the_rate_of_its_run(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    run = stored_simulation(tmp_path, *overrides)
    job = load_job(run)
    # The cost model and the latencies of the job file are not used; those of the journal are.
    wrong: tuple[str, ...] = (
        "rollout.cost.k2=0.5",
        "rollout.cost.prefill=0.01",
        "simulation.train_s=50.0",
        "simulation.report_s=2.0",
    )
    wrong += ("workload.acceptance_rate=0.1",) if any("speculation" in override for override in overrides) else ()
    again = load_job(run, (*wrong, *make_recorded_overrides(run, profile_run(run))))
    assert rate(again) == pytest.approx(rate(job), rel=0.1)


def test_the_fit_recovers_the_cost_model_also_of_a_run_that_was_resumed(tmp_path: Path) -> None:
    run = stored_simulation(tmp_path, "steps=10", "simulation.message_s=0.05")
    profile = profile_run(run)
    true, found = load_job(run).rollout.cost, profile.fit.model
    for running in (1, 8, 32):
        kv_tokens = 250.0 * running
        assert found.step_s(running, kv_tokens) == pytest.approx(true.step_s(running, kv_tokens), rel=0.1)
    assert profile.latencies["report_s"] == pytest.approx(0.5)
    events = run / "events.jsonl"
    events.rename(run / "events.1.jsonl")
    later_start = journal.Journal(events)
    later_start.append(10.0, RunResumed(step=3, num_ended=()), ())  # its clock goes back to the resume point
    for number in range(20):
        later_start.append(10.0 + 0.5 * number, Tick(), ())
    later_start.close()
    resumed = profile_run(run)
    assert resumed.fit == profile.fit
    assert resumed.latencies == pytest.approx(profile.latencies, rel=1e-3)


def test_draft_costs_are_separated_from_verification_steps(tmp_path: Path) -> None:
    drafting = "rollout.engine.speculation={num_speculative_tokens=4, disable_above=64}"
    run = stored_simulation(
        tmp_path, SMALL_GROUPS, "steps=16", drafting, "workload.acceptance_rate=0.75", "rollout.cost.verify_share=0.6"
    )
    profile = profile_run(run)
    true, found = load_job(run).rollout.cost, profile.fit.model
    for computed in (48, 96, 144):  # as its steps did
        kv_tokens = 80.0 * computed
        assert found.step_s(computed, kv_tokens) == pytest.approx(true.step_s(computed, kv_tokens), rel=0.1)
    assert found.verify_share == 0.6
    assert profile.draft_stats.acceptance_rate == pytest.approx(0.75, abs=0.03)
    # A job with the profile and the diagnosis of the run use the measured values.
    out = tmp_path / "profile.json"
    write_profile(out, profile)
    job = loading.load("examples/dryrun.toml", (f"profile={out}", drafting, "simulation.train_s_per_token=0.1"))
    latencies = ("train_s", "train_s_per_token")
    assert [getattr(job.simulation, name) for name in latencies] == [profile.latencies[name] for name in latencies]
    assert job.simulation.cost_error == profile.fit.error_median > 0
    assert job.workload.acceptance_rate == profile.draft_stats.acceptance_rate
    known = make_job_speed(load_job(run, ("workload.acceptance_rate=0.1",)), profile.fit, profile.draft_stats)
    expected_s = factories.job_cost_model_at(load_job(run), 32).step_s(32, 8000.0)
    assert known.token_s(32, 8000.0) == pytest.approx(expected_s, rel=0.1)


def test_acceptance_is_estimated_from_responses_without_instance_reports(tmp_path: Path) -> None:
    drafting = "rollout.engine.speculation={num_speculative_tokens=4, disable_above=64}"
    run = stored_simulation(tmp_path, SMALL_GROUPS, "steps=6", drafting, "workload.acceptance_rate=0.75")
    config = load_job(run)
    watch = TimeTracker(config.rollout.cost, config.members_started_per_group, max_draft_length=4)
    for entry in journal.JournalReader(run / "events.jsonl"):
        event = entry.event
        watch.observe(
            entry.now, replace(event, steps=None) if isinstance(event, InstanceReported) else event, entry.commands
        )
    assert watch.draft_stats.acceptance_rate == pytest.approx(0.75, abs=0.01)


def test_requests_without_a_draft_lower_the_acceptance_and_the_draft_cost() -> None:
    drafts = DraftStats(max_length=2)
    drafts.add_steps(60, 70, 20)
    drafts.add_steps(40, 30, 10)
    assert drafts.acceptance_rate is not None
    assert tokens_per_step(2, drafts.acceptance_rate) == pytest.approx(1.3)
    model = CostModel(k1=0.0, k2=0.0, k3=1.0, k4=0.0, b=0.0, verify_share=0.8, prefill=0.0)
    assert drafts.scale_cost_model(model).verify_share == pytest.approx(
        0.8 / 2
    )  # one a step, where there might have been two
    assert DraftStats().acceptance_rate is None
    assert DraftStats().scale_cost_model(model) == model


def test_the_fit_separates_prefill_from_decoding(tmp_path: Path) -> None:
    """With equal loads and short prompts they cannot be separated."""
    run = stored_simulation(
        tmp_path, SMALL_GROUPS, "steps=10", "simulation.message_s=0.05", "rollout.on_pull=interrupt"
    )
    true, found = load_job(run).rollout.cost, profile_run(run).fit.model
    assert found.prefill == pytest.approx(true.prefill, rel=0.4)


def test_all_seconds_and_tokens_are_counted_once(tmp_path: Path) -> None:
    run = stored_simulation(tmp_path, SMALL_GROUPS, "steps=6")
    config, entries = load_job(run), list(journal.JournalReader(run / "events.jsonl"))
    watch = TimeTracker(config.rollout.cost, config.members_started_per_group)
    for entry in entries:
        watch.observe(entry.now, entry.event, entry.commands)
    whole = sum_steps(watch.finished_steps)
    assert whole.num_steps == len(watch.finished_steps) == 6
    assert whole.total_s == pytest.approx(max(e.now for e in entries if isinstance(e.event, VersionPublished)))
    sampled = [e.event.tokens for e in entries if isinstance(e.event, TrajectorySampled)]
    assert whole.num_tokens == sum(sampled) == sum(load.num_tokens for load in watch.finished_steps)
    assert sum(speed.num_responses for speed in whole.speeds.values()) == len(sampled)
    for part in (whole.waiting, whole.training):
        assert 0 <= part.at_max_running_s + part.out_of_memory_s <= part.total_s + 1e-9
        assert 0 <= part.mean_running <= config.rollout.engine.max_running
    assert sum_steady_steps(watch.finished_steps, 2).num_steps == 5


def test_requests_in_flight_before_a_resume_are_forgotten(tmp_path: Path) -> None:
    run = stored_simulation(tmp_path, SMALL_GROUPS, "steps=4")
    config, entries = load_job(run), list(journal.JournalReader(run / "events.jsonl"))
    alone = TimeTracker(config.rollout.cost, config.members_started_per_group)
    twice = TimeTracker(config.rollout.cost, config.members_started_per_group)
    for entry in entries[: len(entries) // 2]:
        twice.observe(entry.now, entry.event, entry.commands)
    before, begin_s = len(twice.finished_steps), 1000.0
    twice.observe(begin_s, RunResumed(step=0, num_ended=()), ())
    for entry in entries:
        alone.observe(entry.now, entry.event, entry.commands)
        twice.observe(begin_s + entry.now, entry.event, entry.commands)
    for first, second in zip(alone.finished_steps, twice.finished_steps[before:], strict=True):
        assert second.total_s == pytest.approx(first.total_s)
        assert second.waiting.mean_running == pytest.approx(first.waiting.mean_running)


def test_delivered_tokens_of_a_lost_instance_are_not_sampled_again() -> None:
    one, two, group = InstanceId("one"), InstanceId("two"), GroupId(0)
    watch = TimeTracker(CostModel(k1=0, k2=0, k3=0, k4=0.01, b=0, prefill=0), 1)
    result = MemberInFlight(trajectory=TrajectoryId(0), version=PolicyVersion(0), tokens=30)
    watch.observe(
        0.0,
        RunResumed(step=0, num_ended=(), groups=(GroupInFlight(group=group, prompt_tokens=5, members=(result,)),)),
        (),
    )

    def route(route_number: int, instance: InstanceId) -> tuple[Route, ...]:
        return (
            Route(
                trajectory=TrajectoryId(0),
                route_number=route_number,
                instance=instance,
                version=PolicyVersion(0),
            ),
        )

    for name in (one, two):
        watch.observe(0.0, InstanceJoined(instance=name, version=PolicyVersion(0), kv_capacity=999, max_running=9), ())
    watch.observe(0.0, Tick(), route(1, one))
    progress, delivered = ((TrajectoryId(0), 90),), ((TrajectoryId(0), 70),)
    watch.observe(0.6, InstanceReported(instance=one, progress=progress, delivered=delivered), ())
    watch.observe(0.7, InstanceLost(instance=one, why="x"), route(2, two))
    watch.observe(1.0, TrajectorySampled(trajectory=TrajectoryId(0), route_number=2, tokens=100), ())
    watch.observe(1.0, VersionPublished(version=PolicyVersion(1)), ())
    (load,) = watch.finished_steps
    assert load.num_tokens == 30
    assert load.speeds[two].measured_s == pytest.approx(0.3)


def test_groups_that_are_wholly_discarded_are_forgotten() -> None:
    watch = TimeTracker(CostModel(k1=0, k2=0, k3=0, k4=0.01, b=0, prefill=0), 2)
    groups = tuple(NewGroup(group=GroupId(number), prompt_tokens=5) for number in range(3))
    watch.observe(0.0, GroupsArrived(groups=groups), ())
    endings = tuple(
        Ending(trajectory=TrajectoryId(id), group=GroupId(id // 2), fate=Fate.ABORTED,
               reason=AbortReason.SURPLUS_MEMBER, step=0)
        for id in (0, 1, 2)
    )  # fmt: skip
    for ending in endings:
        watch.observe(1.0, Tick(), (Discard(endings=(ending,), versions=(PolicyVersion(0),)),))
    assert watch._prompt_tokens.keys() == {1, 2}
    watch.observe(2.0, Tick(), (Train(step=0, trajectories=(TrajectoryId(3),), versions=(PolicyVersion(0),)),))
    assert watch._prompt_tokens.keys() == watch._num_live.keys() == {2}


def test_overlapping_requests_for_prompts_are_measured_each() -> None:
    tracker = LatencyTracker()
    tracker.observe(0.0, Tick(), [FetchPrompts(num_groups=2)])
    tracker.observe(4.0, Tick(), [FetchPrompts(num_groups=1)])
    for group, now in enumerate((5.0, 6.0, 7.0)):
        tracker.observe(now, GroupsArrived(groups=(NewGroup(group=GroupId(group), prompt_tokens=1),)), ())
    assert tracker.means["fetch_prompts_s"] == pytest.approx((5.0 + 3.0) / 2)


def test_latencies_of_lost_instances_and_discarded_trajectories_are_forgotten() -> None:
    """Their commands stayed pending for the rest of the run."""
    tracker, versions = LatencyTracker(), [PolicyVersion(number) for number in range(3)]
    lost, other = InstanceId("lost"), InstanceId("other")
    pulls = [Pull(instance=instance, version=version) for instance in (lost, other) for version in versions[:2]]
    scores = [Score(trajectory=TrajectoryId(number)) for number in (-8, 0, 1)]
    tracker.observe(0.0, Tick(), [*pulls, *scores])
    ending = Ending(trajectory=TrajectoryId(0), group=GroupId(0), fate=Fate.ABORTED,
                    reason=AbortReason.SURPLUS_MEMBER, step=0)  # fmt: skip
    tracker.observe(1.0, InstanceLost(instance=lost, why=""), [Discard(endings=(ending,), versions=(versions[0],))])
    tracker.observe(1.0, Tick(), [FinishEvaluation(evaluation=1, version=versions[0], abandoned=True)])
    tracker.observe(2.0, PullFinished(instance=other, version=versions[1]), ())
    for instance in (lost, other):
        tracker.observe(50.0, PullFinished(instance=instance, version=versions[0]), ())
    for number in (-8, 0):
        tracker.observe(50.0, TrajectoryScored(trajectory=TrajectoryId(number), reward=0.0, seconds=0.0), ())
    tracker.observe(3.0, TrajectoryScored(trajectory=TrajectoryId(1), reward=0.0, seconds=0.0), ())
    assert (tracker.means["pull_s"], tracker.means["reward_s"]) == (2.0, 3.0)
