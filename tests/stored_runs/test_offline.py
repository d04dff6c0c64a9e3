"""Work on stored runs: showing, exporting, recomputing logprobs, offline training."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.pipeline.config import loading
from staleflow.pipeline.stored_runs import (
    exporting,
    logprob_recompute,
    repeated_steps,
    training,
    views,
)
from staleflow.pipeline.stored_runs import pool as pools
from staleflow.pipeline.stored_runs.pool import Pool, open_pool
from staleflow.pipeline.stored_runs.verification import verify_run
from staleflow.stores.errors import ActorLost, ConfigError, ProtocolViolation, StoreError
from staleflow.stores.printable import printable
from staleflow.stores.trajectories.records import batch_fingerprint
from staleflow.stores.trajectories.selection import Selection
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import EndedTrajectory, TrajectoryId
from staleflow.tasks.rendering.task_source import distinct_held_out
from staleflow.tasks.sources.reasoning_gym_tasks import ReasoningGym
from staleflow.tasks.training.loss import Clip
from tests.commands import command, error_line
from tests.runtime.test_run import ENVIRONMENT, staleflow
from tests.stores.test_stores import change_logprob, corrupt_tokens, edit
from tests.support import forking


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with open_pool(None, 1) as workers:
        yield workers


@pytest.fixture
def run_copy(stored: Path, tmp_path: Path) -> Path:
    """A copy of the run that tests may change."""
    shutil.copytree(stored, tmp_path / "copy")
    return tmp_path / "copy"


def rows_of(run: Path, where: str = "", branch: str = "main") -> list[EndedTrajectory]:
    store = VersionedStore.open(run / "store", branch=branch)
    mask = Selection(where).mask(store.displayed_columns())
    return [row for row, chosen in zip(store.trajectories(), mask, strict=True) if chosen]


# -- the workers -------------------------------------------------------------------------------------------------------


def test_every_call_is_made_once_for_any_number_of_calls(pool: Pool) -> None:
    for count in (1, 2, 3, 4, 5, 20):
        assert sorted(pool.run(abs, [(i,) for i in range(count)])) == list(range(count))


def address_after(seconds: float) -> str:
    from distributed import get_worker

    time.sleep(seconds)
    address: str = get_worker().address
    return address


def test_calls_run_on_free_workers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on idle workers of jobs either, which Dask lets steal tasks."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(2, processes=False, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
        open_pool(client, 0) as pool,
    ):
        address = next(iter(pool.free_workers()))
        monkeypatch.setattr(Pool, "free_workers", lambda self, for_models=False: {address: 1})
        assert set(pool.run(address_after, [(0.1,)] * 15)) == {address}


def test_workers_are_known_while_dask_updates_its_own_view_of_them() -> None:
    """The client's periodic update has no workers."""
    import dask
    from distributed import Client, LocalCluster

    with (
        dask.config.set({"distributed.client.scheduler-info-interval": "1ms"}),
        LocalCluster(1, processes=False, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
        open_pool(client, 0) as pool,
    ):
        assert all(len(pool.free_workers()) == 1 for _ in range(200))


def die_once(path: str) -> str:
    if not Path(path).exists():
        Path(path).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


def test_calls_of_lost_workers_run_again_on_their_replacements(
    tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "CHECK_S", 0.1)
    monkeypatch.setattr(pools, "WORKER_RESTART_S", 300.0)
    (lost_worker,) = pool.free_workers()
    assert list(pool.run(die_once, [(str(tmp_path / "dead"),)])) == ["done"]
    assert lost_worker not in pool.free_workers()


def test_workers_that_die_again_and_again_end_the_work(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "CHECK_S", 0.1)
    monkeypatch.setattr(pools, "MAX_LOSSES", 0)
    monkeypatch.setattr(pools, "WORKER_RESTART_S", 300.0)
    with pytest.raises(ActorLost, match="all workers died 1 times"):
        list(pool.run(os._exit, [(1,)]))
    assert pool.wait_for_workers(1)


def test_blocks_keep_all_threads_of_workers_busy(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pool, "free_workers", lambda self, for_models=False: {"one": 1, "other": 4})
    monkeypatch.setattr(pools, "MIN_BLOCK_ROWS", 1)
    assert len(list(pool.split_rows(4000))) == 5 * pools.MIN_BLOCKS_PER_THREAD


def test_an_error_of_a_report_reaches_the_caller(pool: Pool) -> None:
    events = []

    def report(event: Mapping[str, Any]) -> None:
        events.append(event)
        raise ValueError("the report failed")

    log_event = operator.methodcaller("__call__", {"say": "line"})
    with pytest.raises(ValueError, match="the report failed"):
        pools.run_training(operator.call, log_event, 1, pool.client, report)
    assert [event["say"] for event in events] == ["line"]


def test_a_local_pool_has_at_least_one_process() -> None:
    with pytest.raises(ConfigError, match="workers = 0: at least 1 process is needed"), open_pool(None, 0):
        pass


def test_a_row_without_a_result_stores_nothing(
    stored: Path, tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from staleflow.pipeline.stored_runs import reward_rescoring

    run = Pool.run

    def forgetful(self: Pool, function: Any, calls: Any, *, for_models: bool = False) -> Iterator[Any]:
        return run(self, function, list(calls)[1:], for_models=for_models)

    monkeypatch.setattr(Pool, "run", forgetful)
    monkeypatch.setattr(pools, "MIN_BLOCK_ROWS", 8)
    with pytest.raises(ProtocolViolation, match=r"returned results for .* nothing was stored"):
        reward_rescoring.rescore(stored, "task", "forgotten", client=pool.client)
    assert "forgotten" not in VersionedStore.open(stored / "store").branches()
    monkeypatch.setattr(exporting, "PART_ROWS", 8)
    with pytest.raises(ProtocolViolation):
        exporting.export(stored, "parquet", tmp_path / "out", client=pool.client)
    assert not (tmp_path / "out").exists()


# -- looking -----------------------------------------------------------------------------------------------------------


def test_the_batch_of_a_step_has_its_recorded_fingerprint(stored: Path, run_copy: Path) -> None:
    for record in VersionedStore.open(stored / "store").commits():
        if record.kind == "step":
            store = VersionedStore.open(stored / "store", at_step=record.step)
            batch = [(row.trajectory, row.advantage) for row in store.trajectories(step=record.step)]
            assert batch_fingerprint(batch) == record.batch_fingerprint
    shown = command("store", "show", stored, "--at-step", 1, "--json")
    assert shown.returncode == 0, shown.stderr
    value = json.loads(shown.stdout)
    assert value["fingerprint"] == value["recorded_fingerprint"]
    assert len(value["trajectories"]) == 16

    edit(run_copy / "store", change_logprob)
    store = VersionedStore.open(run_copy / "store")
    batch = [(row.trajectory, row.advantage) for row in store.trajectories(step=0)]
    assert batch_fingerprint(batch) != store.commits()[0].batch_fingerprint


def test_worst_best_and_longest_rows_are_selected(stored: Path) -> None:
    store = VersionedStore.open(stored / "store")
    rows = {row.trajectory.id: row for row in store.trajectories()}
    scored = [row for row in rows.values() if row.trajectory.timings.rewarded_s > 0]
    worst = [rows[i] for i in views.sorted_ids(store, "worst", 5, "")]
    best = [rows[i] for i in views.sorted_ids(store, "best", 5, "step == 1")]
    longest = [rows[i] for i in views.sorted_ids(store, "longest", 5, "fate == 'consumed'")]
    assert [r.trajectory.reward for r in worst] == sorted(r.trajectory.reward for r in scored)[:5]
    assert best[0].trajectory.reward == max(r.trajectory.reward for r in scored if r.step == 1)
    lengths = sorted((r.trajectory.num_tokens for r in rows.values() if r.staleness >= 0), reverse=True)
    assert [r.trajectory.num_tokens for r in longest] == lengths[:5]

    printed = command("store", "show", stored, "--best", 1)
    assert "response" in printed.stdout and "tokens on rollout-" in printed.stdout


def test_a_view_has_every_token_with_its_version_and_ratio(stored: Path, tiny_model: Path) -> None:
    store = VersionedStore.open(stored / "store")
    (row, *_) = rows_of(stored, "step == 0 and response_tokens > 4")
    (seen,) = views.make_views(stored, store, [row.trajectory.id], model=str(tiny_model))
    assert "".join(t.text for t in seen.tokens) == seen.response
    assert [t.id for t in seen.tokens] == row.trajectory.response_tokens.tolist()
    assert {t.version for t in seen.tokens} == {0}
    # Version 0 is this very model.
    assert all(t.ratio == pytest.approx(1.0, abs=1e-3) for t in seen.tokens)
    (plain,) = views.make_views(stored, store, [row.trajectory.id])
    assert all(t.ratio is None for t in plain.tokens)
    with pytest.raises(ConfigError, match="no stored trajectory 999999"):
        views.make_views(stored, store, [TrajectoryId(999_999)])


def test_control_characters_in_responses_are_escaped() -> None:
    assert printable("so\x1b[2J\x07 \u4f60\n\tend\r") == "so\\x1b[2J\\x07 \u4f60\n\tend\\x0d"


def test_partial_characters_belong_to_the_token_that_completes_them() -> None:
    class Bytes:
        def text(self, tokens: Any, *, keep_special: bool = False) -> str:
            return bytes(tokens).decode(errors="replace")

    from staleflow.tasks.rendering.chat_tokenizer import split_by_token

    tokens = list("a\u00e9\u4f60b".encode())
    texts = split_by_token(Bytes(), tokens)
    assert "".join(texts) == "a\u00e9\u4f60b"
    assert texts == ["a", "", "\u00e9", "", "", "\u4f60", "b"]


# -- exporting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["parquet", "jsonl", "hf"])
def test_exported_rows_equal_stored_rows(
    stored: Path, tmp_path: Path, pool: Pool, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyarrow import parquet

    monkeypatch.setattr(exporting, "PART_ROWS", 20)  # several files
    out = tmp_path / f"out.{to}"
    result = exporting.export(stored, to, out, client=pool.client, where="fate == 'consumed'")
    rows = {int(r.trajectory.id): r for r in rows_of(stored, "fate == 'consumed'")}
    if to == "jsonl":
        read = [json.loads(line) for line in out.read_text().splitlines()]
    else:
        files = sorted((out / "data" if to == "hf" else out).glob("*.parquet"))
        assert len(files) == math.ceil(len(rows) / 20)
        read = [r for file in files for r in parquet.read_table(file).to_pylist()]
    assert [r["trajectory"] for r in read] == list(rows)
    assert result.rows == len(rows)
    views_of = views.make_views(
        stored, VersionedStore.open(stored / "store"), [TrajectoryId(i) for i in list(rows)[:3]]
    )
    response = "completion" if to == "hf" else "response"
    for got, seen in zip(read, views_of, strict=False):
        assert got["prompt"] == seen.prompt
        assert got[response] == re.sub("<(pad|eos|unk)>", "", seen.response)
    for got in read:
        row = rows[got["trajectory"]]
        t = row.trajectory
        assert (got["fate"], got["staleness"], got["group"]) == ("consumed", row.staleness, t.group)
        assert np.float32(got["reward"]) == np.float32(t.reward)
        np.testing.assert_array_equal(got["response_ids"], t.response_tokens)
        np.testing.assert_array_equal(np.asarray(got["logprobs"], np.float32), t.logprobs)
        np.testing.assert_array_equal(got["versions"], t.versions)
    assert not list(tmp_path.glob(".*"))
    if to == "hf":
        assert "path: data/train-*.parquet" in (out / "README.md").read_text()
    with pytest.raises(ConfigError, match="already exists"):
        exporting.export(stored, to, out, client=pool.client)


def test_rows_in_a_corrupt_chunk_are_named_and_the_others_are_exported(run_copy: Path, tmp_path: Path) -> None:
    corrupt_tokens(VersionedStore.open(run_copy / "store"))
    completed = staleflow(
        "store", "export", run_copy, "--to", "jsonl", "--out", tmp_path / "o.jsonl", "--workers", "1", "--json"
    )
    assert completed.returncode == 1, completed.stderr
    result = json.loads(completed.stdout)
    written = [json.loads(line)["trajectory"] for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    ids = VersionedStore.open(run_copy / "store").stored_columns()["trajectory"].tolist()
    assert 0 < len(result["errors"]) < len(ids)
    assert sorted([*written, *map(int, result["errors"])]) == sorted(ids)
    assert all("is corrupt" in what for what in result["errors"].values())
    shown = command("store", "show", run_copy, "--trajectory", next(iter(result["errors"])))
    assert (shown.returncode, shown.stderr.count("\n")) == (1, 1)
    assert "is corrupt" in shown.stderr
    assert command("store", "show", run_copy, "--trajectory", written[0]).returncode == 0
    output = command("store", "audit", run_copy)
    assert output.returncode == 1
    assert "is corrupt" in output.stdout and "the others can be read" in output.stdout


# -- reading under other weights ---------------------------------------------------------------------------------------


def test_recomputed_logprobs_agree_for_the_same_model_and_differ_for_another(
    stored: Path, tiny_model: Path, pool: Pool
) -> None:
    same = logprob_recompute.recompute_logprobs(
        stored, str(tiny_model), client=pool.client, where="v_max == 0 and fate == 'consumed'"
    )
    assert same.rows == len(rows_of(stored, "v_max == 0 and fate == 'consumed'"))
    assert all(row.max_abs_log_ratio < 1e-3 and row.kl < 1e-6 and row.clipped == 0 for row in same.by_staleness)
    assert all(row.ess_tokens == pytest.approx(1, abs=1e-4) for row in same.by_staleness)
    last = stored / "checkpoints" / "step-000003"
    other = logprob_recompute.recompute_logprobs(stored, str(last), client=pool.client, where="fate == 'consumed'")
    assert sum(row.trajectories for row in other.by_staleness) == 48
    assert max(row.kl for row in other.by_staleness) > 100 * max(row.kl for row in same.by_staleness)
    assert all(0 < row.ess_sequences <= 1 and 0 < row.ess_tokens < 1 for row in other.by_staleness)


def test_logprob_statistics_match_their_definitions(stored: Path, pool: Pool) -> None:
    """Against the formulas, with the logprobs stored on a branch."""
    last = str(stored / "checkpoints" / "step-000003")
    result = logprob_recompute.recompute_logprobs(stored, last, client=pool.client, branch="under-last")
    store = VersionedStore.open(stored / "store", branch="under-last")
    assert store.lineage["logprobs"] == last and len(store.lineage["weights"]) == 64
    rows = [row for row in store.trajectories() if row.staleness == 1]
    (found,) = (row for row in result.by_staleness if row.staleness == 1)
    kept = [store.recomputed_logprobs(row.trajectory.id) for row in rows]
    ratios = [
        np.exp(new.astype(np.float64) - row.trajectory.logprobs)
        for new, row in zip(kept, rows, strict=True)
        if new is not None
    ]
    tokens = np.concatenate(ratios)
    weights = np.asarray([r.prod() for r in ratios])
    assert found.tokens == len(tokens)
    assert found.kl == pytest.approx((tokens - 1 - np.log(tokens)).mean())
    assert found.ess_tokens == pytest.approx(tokens.sum() ** 2 / (len(tokens) * (tokens**2).sum()))
    assert found.ess_sequences == pytest.approx(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))
    loss = loading.load(stored / "config.toml").training.loss
    assert isinstance(loss, Clip)
    assert found.clipped == pytest.approx(((tokens < 1 - loss.clip_low) | (tokens > 1 + loss.clip_high)).mean())
    (seen,) = views.make_views(stored, store, [rows[0].trajectory.id])
    assert [t.ratio for t in seen.tokens] == pytest.approx(ratios[0].tolist())


def test_responses_with_non_finite_logprobs_are_named_and_excluded(
    run_copy: Path, tiny_model: Path, pool: Pool
) -> None:
    """They made the statistics of their staleness NaN."""

    def spoil(root: Any) -> None:
        change_logprob(root, np.nan)

    edit(run_copy / "store", spoil)
    result = logprob_recompute.recompute_logprobs(run_copy, str(tiny_model), client=pool.client)
    row = VersionedStore.open(run_copy / "store").stored_columns()["trajectory"].tolist()[5]
    assert result.errors == {row: "1 of its tokens have a stored or computed logprob that is not finite"}
    assert all(np.isfinite(of.kl) for of in result.by_staleness)
    with pytest.raises(StoreError, match=rf"'one' is not made: 1 responses .* first is trajectory {row}: 1 of its tok"):
        logprob_recompute.recompute_logprobs(run_copy, str(tiny_model), client=pool.client, branch="one")
    assert command("store", "audit", run_copy).returncode == 1


# -- training again ----------------------------------------------------------------------------------------------------


def test_offline_training_on_the_stored_batches_gives_the_weights_of_the_run(
    stored: Path, tmp_path: Path, pool: Pool
) -> None:
    from safetensors.torch import load_file

    received: list[Mapping[str, Any]] = []
    out = tmp_path / "again"
    plan = training.make_plan(stored, out, ("task.eval_prompts=48",))
    result = training.execute_plan(plan, pool.client, received.append)
    assert (result.steps, result.rows, result.same_steps) == (3, 48, 3)
    ours = load_file(Path(result.checkpoint) / "model.safetensors")
    theirs = load_file(stored / "checkpoints" / "step-000003" / "model.safetensors")
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    assert result.before is not None and result.after is not None
    # Of 48 held-out prompts, for which the run kept none apart, it was trained on some.
    source = ReasoningGym("chain_sum", loading.load(stored / "config.toml").task.options, 3)
    held_out = {task.prompt for task in distinct_held_out(source, 48)}
    trained = {source.task(row.trajectory.group).prompt for row in rows_of(stored) if row.staleness >= 0}
    assert held_out & trained
    assert result.before.num_prompts == result.after.num_prompts == len(held_out - trained) < len(held_out) == 48
    messages = [event.get("say", "") for event in received]
    assert not any(line.startswith("task.eval_prompts") for line in messages)
    assert (
        f"leaving out {len(held_out & trained)} of {len(held_out)} held-out prompts: they were trained on" in messages
    )
    assert result.before.reward_fingerprint == result.after.reward_fingerprint != ""
    assert json.loads((out / "offline.json").read_text())["snapshot"] == VersionedStore.open(stored / "store").snapshot
    assert not list(tmp_path.glob(".*"))


def test_a_killed_training_resumes_and_ends_with_the_same_weights(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(Exception):
        pass

    def die_after_two(event: Mapping[str, Any]) -> None:
        if event.get("done") == 2:
            raise Killed

    monkeypatch.setattr(training, "RESUME_POINT_S", 0.0)
    plan = training.make_plan(stored, tmp_path / "out", ("task.eval_prompts=0",), "main", "", 1)
    with pytest.raises(Killed):
        training.train(plan, die_after_two)
    assert not (tmp_path / "out").exists()
    steps: list[int] = []
    result = training.train(plan, lambda event: steps.append(event.get("done", 0)))
    assert [s for s in steps if s] == [3]  # only the remaining steps
    assert (result.steps, result.same_steps) == (3, 3)
    # Another plan does not resume from it.
    with pytest.raises(Killed):
        training.train(training.make_plan(stored, tmp_path / "b", (), "main", "reward > 0", 2), die_after_two)
    other = training.make_plan(stored, tmp_path / "b", ("task.eval_prompts=0",), "main", "", 1)
    assert training.train(other, lambda _: None).same_steps == 3


def test_several_ranks_train_offline_as_one_rank(stored: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    with open_pool(None, 2) as two:
        changes = ("task.eval_prompts=0", "training.ranks=2")
        plan = training.make_plan(stored, tmp_path / "two", changes)
        result = training.execute_plan(plan, two.client, lambda _: None)
    assert (result.steps, result.rows, result.same_steps) == (3, 48, None)
    ours = load_file(Path(result.checkpoint) / "model.safetensors")
    theirs = load_file(stored / "checkpoints" / "step-000003" / "model.safetensors")
    off = np.concatenate([np.abs(ours[name].numpy() - weights.numpy()).ravel() for name, weights in theirs.items()])
    # AdamW divides a gradient by its own size: of one that is next to nothing, the order of the sums decides how much
    # of a whole update it becomes, and which weights these are depends on what the run sampled. So single weights are
    # not compared: all others are off by the rounding of six updates, each half of 2^-23, and the gradients themselves
    # by that of their sums.
    assert np.mean(off > 1e-6) < 1e-3
    records = [r.metrics for r in VersionedStore.open(stored / "store").commits() if r.kind == "step"]
    history = [json.loads(line) for line in (tmp_path / "two" / "history.jsonl").read_text().splitlines()]
    for run, again in zip(records, history, strict=True):
        assert again["grad_norm"] == pytest.approx(run["grad_norm"], rel=1e-5)
        assert again["loss"] == pytest.approx(run["loss"], rel=1e-5, abs=1e-7)


@pytest.mark.slow
def test_a_lost_rank_ends_offline_training_and_the_same_command_resumes(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a resume point after each step, also in the workers."""
    changes = ("task.eval_prompts=0", "training.ranks=2")
    done: list[int] = []
    first = threading.Event()

    def note(event: Mapping[str, Any]) -> None:
        done.append(event.get("done", 0))
        if event.get("done") == 1:
            first.set()

    def kill_the_other(client: Any) -> None:
        assert first.wait(60.0)
        (follower,) = (a for a, keys in client.has_what().items() if any("FollowerRank" in key for key in keys))
        os.kill(client.run(os.getpid)[follower], signal.SIGKILL)

    plan = training.make_plan(stored, tmp_path / "two", changes, epochs=40)
    with open_pool(None, 2) as two:
        two.client.run(setattr, training, "RESUME_POINT_S", 0.0)
        killer = threading.Thread(target=kill_the_other, args=(two.client,))
        killer.start()
        with pytest.raises(ActorLost, match="a rank of the training was lost: "):
            training.execute_plan(plan, two.client, note)
        killer.join()
    done.clear()
    with open_pool(None, 2) as two:
        result = training.execute_plan(plan, two.client, note)
    assert result.steps == 120
    assert 1 not in done and done[-1] == 120


def test_selected_rows_and_other_rewards_give_another_policy(stored: Path, tmp_path: Path, pool: Pool) -> None:
    from staleflow.pipeline.stored_runs import reward_rescoring

    reward_rescoring.rescore(stored, f"{stored.parent.parent}/mine.py:length", "for-training", client=pool.client)
    chosen = "staleness <= 1 and advantage > 0"
    changes = ("task.eval_prompts=0", "training.learning_rate=2e-3")
    plan = training.make_plan(stored, tmp_path / "out", changes, "for-training", chosen, epochs=2)
    result = training.execute_plan(plan, pool.client, lambda _: None)
    rows = [r for r in rows_of(stored, chosen, "for-training") if r.staleness >= 0]
    assert 0 < len(rows) < 48
    assert (result.rows, result.same_steps, result.before) == (2 * len(rows), None, None)
    history = json.loads((tmp_path / "out" / "offline.json").read_text())["metrics"]
    assert sum(h["rows"] for h in history) == 2 * len(rows)
    assert all(h["learning_rate"] == 2e-3 for h in history)


@pytest.mark.parametrize("loss", ["{name='topr', ratio_of='segment'}", "decoupled_ppo_loglinear", "sequence_mis"])
def test_a_stored_run_is_trained_with_another_objective(
    loss: str, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a checkpoint of the run as reference, named by a relative path."""
    monkeypatch.chdir(stored)
    (checkpoint,) = (stored / "checkpoints").iterdir()
    overrides = (
        f"training.loss={loss}", "training.entropy_bonus=0.01", "training.epochs=2",
        f"training.kl={{coefficient=0.1, reference='checkpoints/{checkpoint.name}'}}", "training.schedule=linear",
        "training.minibatches=2", "task.eval_prompts=0",
    )  # fmt: skip
    plan = training.make_plan(stored, tmp_path / "out", overrides, "main", "", 1)
    assert plan.config.training.kl.reference == str(checkpoint.resolve())
    monkeypatch.chdir(tmp_path)
    result = training.train(plan, lambda event: None)
    history = json.loads((tmp_path / "out" / "offline.json").read_text())["metrics"]
    assert len(history) == result.steps == 3
    assert all(h["kl_reference"] > 0 and h["entropy"] > 0 and 0 < h["ess"] <= 1 for h in history)
    assert all(h["updates_dropped"] == 0 and np.isfinite(h["grad_norm"]) for h in history)
    assert history[0]["learning_rate"] > history[1]["learning_rate"] > history[2]["learning_rate"] > 0
    with pytest.raises(ConfigError, match=r"training\.kl\.reference = 'runs/none': no such folder"):
        training.make_plan(
            stored, tmp_path / "more", ("training.kl={coefficient=0.1, reference='runs/none'}",), "main", "", 1
        )


@pytest.mark.slow  # a separate run
@pytest.mark.parametrize("teachers", [0, 1])
def test_distillation_from_a_teacher_is_repeated_bit_for_bit(
    stored: Path, job: Path, tmp_path: Path, teachers: int
) -> None:
    """Groups of one, whose stored rewards do not affect training. The teacher is in the trainer or an actor."""
    from tests.runtime.test_run import run

    (teacher,) = (stored / "checkpoints").iterdir()
    kl = f"training.kl={{coefficient=1.0, estimator='k1', place='advantage', reference='{teacher}'}}"
    result = run(
        job,
        kl,
        "training.advantage=none",
        "batch.group_size=1",
        "batch.groups_per_step=8",
        "steps=3",
        f"teacher.instances={teachers}",
    )
    assert command("store", "audit", result.run_dir).returncode == 0
    if teachers:
        with pytest.raises(ConfigError, match=r"stored those of .*set teacher\.instances=0"):
            training.make_plan(result.run_dir, tmp_path / "other", ("training.kl.reference=elsewhere",), "main", "", 1)
    plan = training.make_plan(result.run_dir, tmp_path / "again", ("task.eval_prompts=0",), "main", "", 1)
    assert training.train(plan, lambda event: None).same_steps == 3
    history = json.loads((tmp_path / "again" / "offline.json").read_text())["metrics"]
    assert all(h["kl_reference"] > 0 and h["grad_norm"] > 0 and h["tokens_trained"] > 0 for h in history)


def test_rejection_sampling_is_the_cross_entropy_of_the_chosen_responses(stored: Path, tmp_path: Path) -> None:
    """Each stored step trains on its chosen tokens regardless of their advantages."""
    rows = [row for row in rows_of(stored, "reward == 0") if row.staleness >= 0]
    where, overrides = "reward == 0", ("training.loss=sft", "training.minibatches=1", "task.eval_prompts=0")
    assert training.train(training.make_plan(stored, tmp_path / "out", overrides, "main", where, 1), lambda event: None)
    history = json.loads((tmp_path / "out" / "offline.json").read_text())["metrics"]
    (step, first), *_ = ((h, [r for r in rows if r.step == h["step"]]) for h in history)
    assert step["rows"] == len(first) > 0
    # In the first step the policy is the one that sampled.
    logprobs = np.concatenate([row.trajectory.logprobs for row in first])
    assert step["loss"] == pytest.approx(-logprobs.mean(), rel=1e-5)
    for h in history:
        assert h["tokens_trained"] == sum(row.trajectory.num_sampled for row in rows if row.step == h["step"])


def test_stored_pairs_are_preferred(stored: Path, tmp_path: Path) -> None:
    """Pairs of the best and worst response of each stored group, with the base model as reference."""
    overrides = ("training.loss={name='dpo', beta=0.5}", "training.minibatches=1", "task.eval_prompts=0")
    training.train(training.make_plan(stored, tmp_path / "out", overrides, "main", "", 3), lambda event: None)
    history = json.loads((tmp_path / "out" / "offline.json").read_text())["metrics"]
    losses = [h["loss"] for h in history if h["tokens_trained"]]
    assert losses[0] == pytest.approx(math.log(2), rel=1e-5)
    assert losses[-1] < losses[0] - 0.01


def test_the_policy_of_offline_tasks_stays_on_its_device(stored: Path) -> None:
    """No rollout instance takes turns with it, so that nothing would wake it."""
    from staleflow.tasks.training.policy_trainer import PolicyTrainer

    config = loading.load(stored / "config.toml", ("cluster.layout=turns",))
    with repeated_steps.open_policy(config, config, 1, 0) as policy:
        assert isinstance(policy, PolicyTrainer) and not policy.settings.shares_device


@pytest.mark.slow  # a separate run
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_after_fine_tuning_is_repeated_bit_for_bit(ranks: int, job: Path, tmp_path: Path) -> None:
    """Examples come from a file, and the number of evaluation prompts differs; without fine-tuning the run differs."""
    from tests.runtime.test_run import run

    examples = tmp_path / "examples.jsonl"
    rows = [{"prompt": f"{i} + 1 =", "answer": f"{i}+1={i + 1};so{i + 1}."} for i in range(8)]
    examples.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    sft = f"training.sft={{steps=4, examples_per_step=6, learning_rate=3e-3, source='jsonl:{examples}'}}"
    result = run(job, sft, "steps=2", f"training.ranks={ranks}", "training.resume_every=1")
    assert command("store", "audit", result.run_dir).returncode == 0
    assert verify_run(result.run_dir, steps=2).repeated_steps == (0, 1)
    if ranks > 1:
        return
    for changes, same in (("task.eval_prompts=48",), 2), (("training.sft.steps=0", "training.sft.source="), 0):
        plan = training.make_plan(result.run_dir, tmp_path / f"again-{same}", changes, "main", "", 1)
        plan = dataclasses.replace(plan, is_unchanged=True)
        assert training.train(plan, lambda event: None).same_steps == same


@pytest.mark.slow  # a separate run
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_with_examples_in_its_steps_is_repeated_bit_for_bit_after_a_kill(
    ranks: int, job: Path, tmp_path: Path
) -> None:
    """Its trainer is killed after a step, and its end is resumed."""
    from tests.runtime.test_run import run_and_strike

    examples = tmp_path / "examples.jsonl"
    rows = [{"prompt": f"{i} + 1 =", "answer": f"{i}+1={i + 1};so{i + 1}."} for i in range(8)]
    examples.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    overrides = (
        f"training.sft={{weight=0.5, steps=1, examples_per_step=3, source='jsonl:{examples}'}}", "steps=4",
        f"training.ranks={ranks}", "task.eval_prompts=0",
    )  # fmt: skip
    driver = run_and_strike(job, overrides, "trainer", signal.SIGKILL)
    assert len(driver.report.lost_actors) == 1
    folder = job.parent / "runs" / "job"
    resumed = staleflow("resume", folder, "--set", "steps=6")
    assert resumed.returncode == 0, resumed.stderr
    metrics = [record.metrics for record in VersionedStore.open(folder / "store").commits() if record.kind == "step"]
    assert all(step["sft_loss"] > 0 and step["sft_tokens"] > 3 for step in metrics)
    assert verify_run(folder, steps=6).repeated_steps == tuple(range(6))
    if ranks > 1:
        return
    for weight, same in ((0.5, 6), (0, 0)):
        plan = training.make_plan(folder, tmp_path / f"again-{weight}", (f"training.sft.weight={weight}",), "main", "")
        plan = dataclasses.replace(plan, is_unchanged=True)
        assert training.train(plan, lambda event: None).same_steps == same


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_a_store_of_another_format_is_rejected_by_each_command(stored: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(stored, other)
    edit(other / "store", lambda root: root.attrs.update({"format": 99}))
    refused: list[tuple[list[str | int | Path], str]] = [
        (["store", "show", other], "store format 99, this version reads 'columns'"),
        (["store", "audit", other], "store format 99"),
        (["store", "export", other, "--to", "jsonl"], "store format 99"),
        (["store", "recompute-logprobs", other, "--model", "x"], "store format 99"),
        (["train-offline", other], "store format 99"),
        (["simulate", "--from", other], "store format 99"),
    ]
    for arguments, message in refused:
        assert message in error_line(*arguments)


def test_simulate_from_a_stored_run_varies_its_settings(stored: Path) -> None:
    result = command("simulate", "--from", stored, "--set", "steps=3", "--sweep", "staleness.eta=0,2", "--json")
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    assert [row["row"] for row in rows] == ["eta=0", "eta=2"]
    assert set(rows[0]["staleness"]) == {"0"}
    assert rows[1]["tokens_per_s"] > rows[0]["tokens_per_s"]


def test_the_offline_example_runs(stored: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(stored, run)
    root = Path(__file__).parents[2]
    result = forking.run(
        [sys.executable, "-m", "examples.offline"], cwd=root, env={**ENVIRONMENT, "RUN": str(run)}, capture_output=True,
        text=True, timeout=200,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "audit clean: True" in result.stdout
    assert (tmp_path / "run-offline-example" / "policy" / "checkpoints").is_dir()


# -- two at once, and copies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["jsonl", "parquet"])
def test_a_concurrent_export_is_kept(
    run_copy: Path, tmp_path: Path, pool: Pool, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / f"out.{to}"

    def opened(path: Path, branch: str) -> VersionedStore:
        out.write_text("the other's")  # which ended while this one read the store
        return store_open(path, branch=branch)

    store_open = VersionedStore.open
    monkeypatch.setattr(VersionedStore, "open", opened)
    with pytest.raises(ConfigError, match=r"out\.\w+ already exists"):
        exporting.export(run_copy, to, out, client=pool.client)
    assert out.read_text() == "the other's"
    assert not list(tmp_path.glob(".out.*"))


def test_a_concurrent_training_output_is_kept(run_copy: Path, tmp_path: Path) -> None:
    out = tmp_path / "trained"
    plan = training.make_plan(run_copy, out, (), "main", "", 1)
    out.mkdir()
    with pytest.raises(ConfigError, match="trained already exists"):
        training.train(plan, lambda _: pytest.fail("it has begun"))
    assert not list(tmp_path.glob(".trained.*"))


def test_a_copied_run_uses_the_code_in_its_folder(run_copy: Path, finished_run: Path, tmp_path: Path) -> None:
    """The config of a submitted run names the code in its original folder."""
    job = (run_copy / "config.toml").read_text()
    named = job.replace('function = "task"', f'function = "{finished_run}/code/reward_mine.py:score"')
    assert named != job
    (run_copy / "config.toml").write_text(named)
    plan = training.make_plan(run_copy, tmp_path / "out", (), "main", "", 1)
    assert plan.config.reward.function == f"{run_copy}/code/reward_mine.py:score"
    assert plan.store_path == str(run_copy / "store")
