"""Evaluations during training over in-process actors: one version each, not in the store, and every result written once
despite losses."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from staleflow.pipeline.config.actor_settings import make_workload
from staleflow.pipeline.processes.instance_handle import InstanceHandle
from staleflow.pipeline.runtime import evaluation_driver
from staleflow.pipeline.runtime.actors import Actors
from staleflow.pipeline.runtime.evaluation_driver import BestCheckpoint
from staleflow.pipeline.runtime.evaluation_figures import compute_figures
from staleflow.pipeline.runtime.evaluation_results import read_evaluations, read_rewards
from staleflow.stores.errors import StoreError, TransferFailed
from staleflow.stores.trajectory import PolicyVersion, is_evaluation
from staleflow.tasks.sources.evaluation_items import group_of
from tests.runtime.test_resumed_runs import SHAPES, kill_when, resumption_of
from tests.support.bodies import Body, Run
from tests.support.in_process import Fault
from tests.support.scripted import World

EVALUATED = ("rollout.engine.name=transformers", "model.path=none", "task.eval_prompts=4", "evaluation.every=1")


def versions(run: Run) -> list[int]:
    return [e.version for e in run.outcomes.evaluations]


def check(run: Run) -> None:
    """Check the invariants of the run, and that nothing of an evaluation is in its store or in a batch."""
    run.check()
    assert not any(is_evaluation(row.trajectory.id) for row in run.store.trajectories())
    assert all(first >= 0 for record in run.records for first, _ in record.ledger.live)
    written = json.loads((run.config.run_dir / "evaluations.json").read_text())
    assert [row["version"] for row in written] == versions(run)


def test_every_version_is_evaluated_during_training(body: Body) -> None:
    run = body.run(*EVALUATED, world=World(train_s=4.0))
    check(run)
    assert versions(run) == [0, 1, 2, 3]
    for evaluation in run.outcomes.evaluations:
        assert (evaluation.num_prompts, evaluation.sampled_failed, evaluation.greedy_failed) == (4, 0, 0)
        assert evaluation.tokens > 0 and evaluation.seconds > 0
    steps = [now for now, _ in run.events("VersionPublished")]
    requested = [now for now, _ in run.events("EvaluationRequested")]
    assert requested[0] < steps[0], "the first version is evaluated while the first step is sampled"


def test_a_run_is_evaluated_before_and_after_by_default(body: Body) -> None:
    run = body.run(*EVALUATED, "evaluation.every=0", "task.eval_prompts=12")
    check(run)
    assert versions(run) == [0, 3]
    before, after = (evaluation.figures for evaluation in run.outcomes.evaluations)
    rewards = [read_rewards(run.config.run_dir, version)["held-out"] for version in (0, 3)]
    assert before.sampled_change is None and after.sampled_change is not None
    assert [len(of.sampled) + len(of.greedy) for version in rewards for of in version.values()] == [2] * 24
    differences = [after.sampled[0] - rewards[0][prompt].sampled[0] for prompt, after in rewards[1].items()]
    assert after.sampled_change.mean == pytest.approx(sum(differences) / 12)


def test_figures_are_computed_beside_the_event_loop(body: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 10,000 prompts take seconds, in which the driver would do nothing else."""
    tasks: list[Any] = []

    def compute(*args: Any) -> Any:
        task = asyncio.current_task()
        tasks.append(task and task.get_name())
        return compute_figures(*args)

    monkeypatch.setattr(evaluation_driver, "compute_figures", compute)
    check(body.run(*EVALUATED, "evaluation.every=0"))
    assert tasks == ["executor", "executor"]


def test_a_resumed_run_that_is_stopped_at_once_has_only_evaluations_of_stored_versions(body: Body) -> None:
    first = body.run(*EVALUATED, "steps=4", world=World(train_s=4.0))
    check(first)
    resumption = resumption_of(first, undone=2)
    stop = Fault(actor="server", method="__init__", act=lambda: second_driver[0].stop("interrupted"))
    second_driver: list[Any] = []

    async def meanwhile(run: Run) -> None:
        second_driver.append(run.driver)

    second = body.run(config=first.config, world=first.world, resumption=resumption, faults=[stop], meanwhile=meanwhile)
    assert second.stopped_at_once
    assert versions(second) == [0, 1, 2]
    assert len(second.outcomes.steps) == 2
    assert [e.version for e in read_evaluations(first.config.run_dir)] == [0, 1, 2]


def test_an_instance_pulls_after_its_evaluation_is_done(body: Body) -> None:
    """Responses of 60 tokens at 20 tokens/s take longer than two steps: the host lags and the other instance pulls."""
    world = World(length=lambda trajectory: 60 if is_evaluation(trajectory) else 8)
    run = body.run(*EVALUATED, "evaluation.every=0", "steps=6", "staleness.eta=1", world=world)
    check(run)
    assert versions(run) == [0, 6]
    pulls = {name: [c.args[0].version for c in run.workers.calls if c.method == "pull" and c.actor == name]
             for name in ("rollout-0", "rollout-1")}  # fmt: skip
    skipped = [len(set(range(1, 7)) - set(pulled)) for pulled in pulls.values()]
    assert min(skipped) == 0 < max(skipped)


def test_an_evaluation_whose_version_no_host_has_any_more_is_made_of_the_next(
    body: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instances that are to evaluate version 1 can only load version 2, after trajectories were routed to them."""
    pull = Actors._pull

    async def fail_for_version_1(actors: Actors, instance: InstanceHandle, version: PolicyVersion) -> None:
        if version == 1:
            while max(actors._published_steps) == 1:
                await asyncio.sleep(0.01)
            raise TransferFailed("version 1 cannot be fetched: no host has it")
        await pull(actors, instance, version)

    monkeypatch.setattr(Actors, "_pull", fail_for_version_1)
    kept: list[bool] = []

    async def look(run: Run) -> None:
        while len(run.outcomes.evaluations) < 2:
            await asyncio.sleep(0.1)
        assert "save_checkpoint" in run.workers.methods("trainer")
        kept.append((run.config.run_dir / "checkpoints" / "evaluated-000001").exists())

    run = body.run(*EVALUATED, "staleness.eta=2", "evaluation.best_checkpoint_set=held-out", meanwhile=look)
    check(run)
    assert versions(run) == [0, 2, 3]
    assert kept == [False], "a version whose evaluation was abandoned"
    assert any("evaluation of version 1 was abandoned" in note for note in run.outcomes.notes)


@pytest.mark.parametrize("how", ["dies", "silent"])
@pytest.mark.parametrize("nth", range(1, 12, 3))
@pytest.mark.parametrize("actor", ["rollout-0", "rollout-1"])
def test_an_instance_lost_during_an_evaluation_changes_no_result(body: Body, actor: str, nth: int, how: str) -> None:
    loss: dict[str, Any] = {how: "after"}
    run = body.run(*EVALUATED, faults=[Fault(actor=actor, method="next_events", nth=nth, **loss)])
    check(run)
    assert versions(run)[-1] == 3
    assert versions(run) == sorted(set(versions(run)))
    assert len(run.outcomes.lost_actors) == 1


SLOW_S = 4.0
"""Seconds of a step after which an evaluation is over before the next is due, though a server is replaced."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with slow steps and without faults."""
    return Body(tmp_path_factory.mktemp("undisturbed")).run(*EVALUATED, world=World(train_s=SLOW_S))


@pytest.mark.parametrize(
    "method", ["record_routes", "deliver", "record_rewards", "evaluated_responses", "evaluation_items"]
)
def test_a_lost_trajectory_server_has_its_evaluation_restarted(body: Body, undisturbed: Run, method: str) -> None:
    fault = Fault(actor="server", method=method, nth=2, dies="after")
    run = body.run(*EVALUATED, faults=[fault], world=World(train_s=SLOW_S))
    check(run)
    if method != "evaluation_items":
        assert [(e.version, e.sampled, e.greedy) for e in run.outcomes.evaluations] == [
            (e.version, e.sampled, e.greedy) for e in undisturbed.outcomes.evaluations
        ]


def test_a_lost_reward_worker_scores_an_evaluation_again(body: Body) -> None:
    run = body.run(*EVALUATED, faults=[Fault(actor="reward-0", method="score", nth=1, dies="before")])
    check(run)
    assert versions(run)[-1] == 3


@pytest.mark.parametrize("undone", [0, 1, 3])
@pytest.mark.parametrize("steps", [2, 3, 4, 6])
def test_a_resumed_run_neither_repeats_nor_loses_an_evaluation(body: Body, steps: int, undone: int) -> None:
    """The run is killed after some of its six steps, mostly during an evaluation. Undone versions are evaluated again
    after they are trained again."""
    world = World(length=lambda trajectory: 70 if is_evaluation(trajectory) else 8, train_s=2.0)
    job = (*EVALUATED, "evaluation.every=2", "steps=6")
    first = body.run(*job, world=world, meanwhile=kill_when(lambda run: len(run.outcomes.steps) >= steps))
    had = versions(first)
    resumption = resumption_of(first, undone)
    second = body.run(config=first.config, world=world, resumption=resumption)
    if second.error is not None:
        raise second.error
    second.check_kept()
    result = versions(second)
    kept = [v for v in had if v <= resumption.version]
    assert result[: len(kept)] == kept
    assert result == sorted(set(result)) and result[-1] == 6
    assert json.loads((second.config.run_dir / "evaluations.json").read_text())[0]["version"] == result[0]
    again = [e for _, e in second.events("EvaluationRequested")]
    assert len(again) == len(result) - len(kept)


def test_two_evaluation_sets_have_their_prompts_samples_and_limits(body: Body) -> None:
    sets = ("evaluation.sets.short.prompts=3", "evaluation.sets.short.samples=2", "evaluation.sets.short.greedy=false",
            "evaluation.sets.short.max_new_tokens=5")  # fmt: skip
    run = body.run(*EVALUATED, *sets, world=World(train_s=4.0))
    check_names = {(e.name, e.num_prompts, e.samples, e.greedy is None) for e in run.outcomes.evaluations}
    run.check()
    assert check_names == {("held-out", 4, 1, False), ("short", 3, 2, True)}
    short = [e for e in run.outcomes.evaluations if e.name == "short"]
    assert [e.version for e in short] == [0, 1, 2, 3]
    assert all(e.tokens == 3 * 2 * 5 for e in short)


def test_evaluation_episodes_end_at_the_token_limit_of_their_set(body: Body) -> None:
    """Turns of 8 and then 1 tokens with observations of 3: two turns fit into 13 tokens."""
    job = (*SHAPES["agents"], "steps=3", "evaluation.every=1", "task.eval_prompts=4", "simulation.failed_step_share=0",
           "evaluation.sets.short.prompts=4", "evaluation.sets.short.max_new_tokens=13")  # fmt: skip
    run = body.run(*job, world=World(train_s=4.0, length=lambda _: 8))
    check(run)
    workload, found = make_workload(run.config), run.outcomes.evaluations
    assert [e.name for e in found] == ["held-out", "short"] * (len(found) // 2) and found[-1].version == 3
    for number, (held_out, short) in enumerate(zip(found[::2], found[1::2], strict=True)):
        turns = [len(workload.turns(-group_of(number, i, 16), 0)) for i in range(16)]
        assert max(turns) > 2
        assert held_out.tokens == sum(7 + count for count in turns[:8])
        assert short.tokens == sum(7 + min(count, 2) for count in turns[8:])


BEST = (*EVALUATED, "evaluation.best_checkpoint_set=held-out", "steps=6")


def world_with_rewards(figure: Callable[[int], float], **changes: Any) -> World:
    """Return a world in which the reward after `n` steps is figure(n), and evaluations take longer than steps."""
    world = World(length=lambda trajectory: 30 if is_evaluation(trajectory) else 8, train_s=2.0, **changes)
    world.reward = lambda text: figure(len(world.trained))
    return world


def best_checkpoint_version(run: Run) -> int:
    """Return the version of checkpoints/best, and check that no other file of an evaluation is there."""
    checkpoints = run.config.run_dir / "checkpoints"
    assert not list(checkpoints.glob("*evaluated-*"))
    parsed = json.loads((checkpoints / "best" / "evaluation.json").read_text())
    assert (checkpoints / "best" / "version").read_text() == str(parsed["version"]), "it has the weights of its version"
    (found,) = [e for e in run.outcomes.evaluations if e.version == parsed["version"]]
    assert parsed["reward"] == found.mean_reward
    return int(parsed["version"])


def best_of(run: Run) -> int:
    """Return the version after the first one with the best evaluation."""
    return max((e for e in run.outcomes.evaluations if e.version), key=lambda e: (e.mean_reward, -e.version)).version


FIGURES = {"rises": float, "falls": lambda n: float(-n), "peaks": lambda n: float(-abs(n - 3))}


@pytest.mark.parametrize("shape", FIGURES)
@pytest.mark.parametrize(("every", "save_s"), [(1, 7.0), (2, 0.0)])
def test_the_best_evaluated_version_is_kept(body: Body, every: int, save_s: float, shape: str) -> None:
    """Most evaluations become due during another one, so later versions are evaluated, and the trainer may save a
    version that is pruned everywhere else."""
    run = body.run(*BEST, f"evaluation.every={every}", world=world_with_rewards(FIGURES[shape], save_s=save_s))
    check(run)
    assert len(run.outcomes.evaluations) > 2
    assert best_checkpoint_version(run) == best_of(run)


@pytest.mark.parametrize("undone", [0, 3])
@pytest.mark.parametrize("steps", [2, 4, 5])
def test_a_resumed_run_keeps_the_best_of_its_remaining_evaluations(body: Body, steps: int, undone: int) -> None:
    """A better result of an undone version does not count, and leftovers of the kill are removed."""
    killed_then = kill_when(lambda run: len(run.outcomes.steps) >= steps)
    first = body.run(*BEST, world=world_with_rewards(lambda n: 50.0 + n), meanwhile=killed_then)
    resumption = resumption_of(first, undone)
    latest = max(versions(first), default=0)
    world = world_with_rewards(lambda n: 9.0 - n)
    world.stores = first.world.stores
    second = body.run(config=first.config, world=world, resumption=resumption)
    if second.error is not None:
        raise second.error
    second.check_kept()
    new = [result.version for result in second.evaluations]
    assert versions(second)[-len(new) :] == new
    assert second.steps == list(range(int(resumption.version), second.config.steps)), "each step is reported once"
    assert best_checkpoint_version(second) == (
        latest if 0 < latest <= resumption.version else next(v for v in new if v)
    )


@pytest.mark.parametrize("save_s", [0.0, 7.0])
def test_a_run_that_ends_during_an_evaluation_leaves_no_saved_version(body: Body, save_s: float) -> None:
    """Whether its weights are saved already, or the trainer still saves them."""

    async def stop(run: Run) -> None:
        while "save_checkpoint" not in run.workers.methods("trainer"):
            await asyncio.sleep(0.1)
        for _ in range(2):
            run.driver.stop("interrupted")

    run = body.run(*BEST, world=world_with_rewards(float, save_s=save_s), meanwhile=stop)
    assert run.stopped_at_once
    assert not list((run.config.run_dir / "checkpoints").glob("*evaluated-*"))


def test_a_former_best_that_cannot_be_renamed_gives_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = tmp_path / "checkpoints" / "best"
    best.mkdir(parents=True)
    (best / "evaluation.json").write_text('{"version": 5, "reward": 0.5}')
    (tmp_path / "checkpoints" / "best-undone" / "weights").mkdir(parents=True)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    actors: Any = None
    with pytest.raises(StoreError, match=r"best: cannot be renamed to .*best-undone: .*; remove it"):
        BestCheckpoint(actors, tmp_path, "held-out").clean_up(PolicyVersion(2), [])


def test_a_stopped_run_abandons_its_evaluation(body: Body) -> None:
    async def stop(run: Run) -> None:
        await asyncio.sleep(2.0)
        run.driver.stop("interrupted")

    run = body.run(*EVALUATED, meanwhile=stop)
    assert run.error is None
    run.check_kept()
