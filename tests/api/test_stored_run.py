"""A stored run as one object, live and finished."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import staleflow
from benchmarks.soaking import bucket
from staleflow.pipeline.recovery.run_folder import create_and_lock
from staleflow.pipeline.run_page.run_reader import RunReader
from staleflow.stores.trajectories.records import batch_fingerprint
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import AbortReason, Fate
from tests.stores.test_stores import corrupt_tokens
from tests.support.stored_runs import Response, StoredRun

STEPS = 3


def store_step(run: StoredRun) -> None:
    """Store a step of one group with a correct and a wrong response, and a dropped group."""
    right = Response(f"{run.step + 1}", 1.0, versions=(max(0, run.step - 1), run.step), parts={"sum": 1.0})
    surplus = Response("late", fate=Fate.ABORTED, reason=AbortReason.SURPLUS_GROUP)
    run.train([(f"{run.step}+1=", [right, Response("no", 0.0)]), ("0+0=", [surplus, surplus])])


@pytest.fixture(scope="module")
def stored_run(tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    """A finished run of three steps; tests must not change it."""
    run = StoredRun(tmp_path_factory.mktemp("written"), steps=STEPS)
    for _ in range(STEPS):
        store_step(run)
    run.end()
    return run


@pytest.fixture
def run(stored_run: StoredRun) -> staleflow.Run:
    return staleflow.open_run(stored_run.run_dir)


@pytest.fixture
def run_copy(stored_run: StoredRun, tmp_path: Path) -> staleflow.Run:
    """A copy of the run that tests may change."""
    shutil.copytree(stored_run.run_dir, tmp_path / "page")
    return staleflow.open_run(tmp_path / "page")


def test_a_run_has_its_name_path_and_state(run: staleflow.Run, stored_run: StoredRun) -> None:
    assert (run.path, run.source, run.url) == (stored_run.run_dir, str(stored_run.run_dir), "")
    assert (run.name, run.eta, run.bound, run.job) == ("page", 1, "staleness bound eta = 1", stored_run.config)
    assert (run.live, run.finished, run.branches) == (False, True, ("main",))
    assert (run.lineage, run.evaluations()) == ({}, [])
    summary = run.summary()
    assert summary is not None
    assert (summary.num_steps, summary.num_rows) == (3, 12)


def test_steps_have_metrics_and_fingerprints(run: staleflow.Run) -> None:
    steps = run.steps()
    assert [(s.kind, s.step, s.num_rows) for s in steps] == [("step", 0, 4), ("step", 1, 4), ("step", 2, 4)]
    assert [c.kind for c in run.commits()] == ["step", "step", "step", "end"]
    assert all(s.batch_fingerprint and s.metrics["reward"] == 0.5 for s in steps)
    frame = run.metrics()
    assert frame.index.name == "step"
    assert frame.elapsed_s.tolist() == [2.0, 4.0, 6.0]


def test_trajectories_are_flat_records_with_texts(run: staleflow.Run) -> None:
    first, second = run.trajectories("fate == 'consumed'", step=1)
    assert (first.id, first.group, first.step, first.fate, first.reason) == (4, 2, 1, "consumed", "none")
    assert (first.prompt, first.response, second.response) == ("1+1=", "2", "no")
    assert first.messages == ({"role": "assistant", "content": "2", "tokens": 1, "seconds": 0.0},)
    assert (first.reward, first.advantage, first.reward_parts) == (1.0, 0.5, {"sum": 1.0})
    assert (first.v_traj, first.staleness, first.finish) == (0, 1, "stop")
    assert (first.arrived_s, first.rewarded_s) == (1.0, 4.0)
    assert first.versions.tolist() == [0]
    assert (first.v_min, first.v_max, first.num_sampled) == (0, 0, 1)
    assert first.response_ids.shape == first.logprobs.shape == first.sampled.shape
    assert repr(first) == "<StoredTrajectory 4, consumed at step 1, reward 1.000: '1+1=' -> '2'>"


def test_trajectories_match_the_store(run: staleflow.Run) -> None:
    store = VersionedStore.open(run.path / "store")
    for found, row in zip(run.trajectories(texts=False), store.trajectories(), strict=True):
        assert (found.prompt, found.response, found.messages) == ("", "", ())
        assert found.id == row.trajectory.id
        assert np.array_equal(found.logprobs, row.trajectory.logprobs)
    assert run.trajectory(4).response == "2"


def test_step_zero_excludes_trajectories_dropped_in_it(run: staleflow.Run) -> None:
    assert [t.id for t in run.trajectories(step=0)] == [0, 1], "dropped trajectories are excluded"
    assert [t.id for t in run.trajectories("reward > 0 or reward < 0", step=0)] == [0]


def test_the_batch_of_a_step_has_its_recorded_fingerprint(run: staleflow.Run, run_copy: staleflow.Run) -> None:
    batch = run.batch(1)
    assert batch.is_intact
    assert [t.id for t in batch.trajectories] == [4, 5]
    rows = list(VersionedStore.open(run.path / "store").trajectories(step=1))
    assert batch.fingerprint == batch_fingerprint((row.trajectory, row.advantage) for row in rows)
    with pytest.raises(staleflow.ConfigError, match="no commit of step 7"):
        run.batch(7)


def test_a_run_at_a_step_does_not_change(tmp_path: Path) -> None:
    written = StoredRun(tmp_path)
    store_step(written)
    run = staleflow.open_run(written.run_dir)
    then = run.at_step(0)
    store_step(written)
    assert [len(r.steps()) for r in (run, then)] == [2, 1]
    assert (then.finished, len(then.to_pandas())) == (False, 4)
    with pytest.raises(staleflow.ConfigError, match="no commit of step 5"):
        run.at_step(5)
    with pytest.raises(staleflow.ConfigError, match="leave out branch"):
        staleflow.open_run(written.run_dir, branch="other", at_step=0)
    with pytest.raises(staleflow.ConfigError, match="as of a step; open it without at_step"):
        then.export("jsonl", tmp_path / "out.jsonl")


def test_a_live_run_is_followed_without_refreshing(tmp_path: Path) -> None:
    written = StoredRun(tmp_path)
    run = staleflow.open_run(written.run_dir)
    assert (run.steps(), run.finished, len(run.metrics())) == ([], False, 0)
    with create_and_lock(run.path):
        assert (run.live, run.finished) == (True, False)
        for step in range(2):
            store_step(written)
            assert len(run.steps()) == step + 1
            assert len(run.to_pandas()) == 4 * (step + 1)
        assert "state live, steps 2, trajectories 8" in repr(run)
    assert not run.live, "this process goes on, but no longer works on it"
    assert "state unfinished" in repr(run)
    written.end()
    assert run.finished


def test_a_run_without_a_store_has_no_steps(stored_run: StoredRun, tmp_path: Path) -> None:
    shutil.copy(stored_run.run_dir / "config.toml", tmp_path)
    run = staleflow.open_run(tmp_path)
    assert (run.steps(), run.summary(), run.finished, run.evaluations()) == ([], None, False, [])
    assert repr(run).endswith("state unfinished, steps 0, trajectories 0, tokens 0>")
    with pytest.raises(staleflow.ConfigError, match="no store here"):
        run.to_pandas()


def test_a_run_is_shown_with_its_state_and_size(run: staleflow.Run) -> None:
    assert repr(run) == (
        f"<Run {run.source}: branch main, state finished, steps 3, trajectories 12, tokens "
        f"{sum(s.num_tokens for s in run.steps())}, reward 0.500>"
    )
    assert "as of step 1" in repr(run.at_step(1))


def test_best_and_worst_trajectories(run: staleflow.Run) -> None:
    assert run.sorted_ids("best", 2) == [0, 4]
    assert run.sorted_ids("worst", 1, step=2) == [9]
    assert run.sorted_ids("longest", 1, "step == 2 and fate == 'consumed'") == [9]
    with pytest.raises(staleflow.ConfigError, match="order = 'last': choose one of worst, best, longest"):
        run.sorted_ids("last", 1)  # type: ignore[arg-type]
    (view,) = run.view(4)
    assert [(t.text, t.version) for t in view.tokens] == [("2", 0)]


def test_tables_of_pandas_dask_and_xarray(run: staleflow.Run) -> None:
    frame = run.to_pandas("reward > 0")
    assert frame.prompt.tolist() == ["0+1=", "1+1=", "2+1="]
    assert frame.response.tolist() == ["1", "2", "3"]
    assert "prompt" not in run.to_pandas(texts=False)
    assert run.to_dask().reward.sum().compute() == 3
    assert run.to_dask("reward > 0").response.compute().tolist() == run.to_pandas("reward > 0").response.tolist()
    assert dict(run.to_xarray().sizes)["trajectory"] == 12
    dataset = run.to_dataset("fate == 'consumed'")
    assert len(dataset) == 6
    assert dataset[0]["prompt"] == "0+1="
    assert dataset[0]["completion"] == "1"
    assert len(run.to_dataset("reward > 1")) == 0


def test_invalid_queries_give_a_one_line_error(run: staleflow.Run, tmp_path: Path) -> None:
    with pytest.raises(staleflow.ConfigError, match="there is no column 'rewrd'; did you mean 'reward'"):
        run.trajectories("rewrd > 0")
    with pytest.raises(staleflow.ConfigError, match="no stored trajectory 99"):
        run.trajectory(99)
    with pytest.raises(staleflow.ConfigError, match="no branch 'other'; there are main"):
        run.branch("other")
    with pytest.raises(staleflow.ConfigError, match="no such run"):
        staleflow.open_run(tmp_path)
    with pytest.raises(staleflow.ConfigError, match="no such folder"):
        staleflow.list_runs(tmp_path / "none")


def test_texts_need_the_tokenizer_and_numbers_do_not(run_copy: staleflow.Run, tmp_path: Path) -> None:
    job = (run_copy.path / "config.toml").read_text()
    (run_copy.path / "config.toml").write_text(
        job.replace(json.dumps(run_copy.job.model.path), json.dumps(f"{tmp_path}/gone"))
    )
    assert len(run_copy.to_pandas(texts=False)) == 12
    with pytest.raises(staleflow.ConfigError, match="gone"):
        run_copy.to_pandas()


def test_a_corrupt_trajectory_raises_an_error_with_a_remedy(tmp_path: Path) -> None:
    written = StoredRun(tmp_path)
    letters = np.random.default_rng(0).integers(97, 123, 4000).astype(np.uint8).tobytes().decode()
    written.train([("", [Response(letters, 1.0), Response(letters[::-1])])])
    corrupt_tokens(written.store)
    run = staleflow.open_run(written.run_dir)
    with pytest.raises(staleflow.StoreError, match=r"tokens/\w+, chunk 0, is corrupt.*where=\"trajectory != 0\"$"):
        next(run.trajectories(texts=False))
    assert len(run.steps()) == 1, "steps are read without them"
    report = run.audit()
    assert (report.is_clean, report.as_dict()["num_steps"]) == (False, None)


def test_audit_covers_the_stored_steps(run: staleflow.Run, run_copy: staleflow.Run) -> None:
    report = run.audit(full=True)
    assert (report.is_clean, report.num_steps, report.max_staleness) == (True, 3, 1)
    assert report.checks[-1] == "history"
    assert run.at_step(1).audit().num_steps == 2
    assert run.drop_bias().consumed.trajectories == 6
    with pytest.raises(staleflow.ConfigError, match="no recorded events"):
        run.replay()


def test_runs_lists_the_runs_of_a_folder(
    stored_run: StoredRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run,) = staleflow.list_runs(stored_run.run_dir.parent)
    assert (run.name, run.finished) == ("page", True)
    monkeypatch.chdir(tmp_path)
    assert staleflow.list_runs() == [], "the default folder is made by the first run"


def test_a_run_in_a_bucket_is_opened_by_its_url(
    stored_run: StoredRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{bucket.BUCKET}/runs/page"
    with bucket.served() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        run = StoredRun(tmp_path, store=f"s3://{bucket.BUCKET}/runs")
        store_step(run)
        for source in (url, run.run_dir):
            opened = staleflow.open_run(source)
            assert (opened.url, opened.source, opened.name, opened.live) == (url, str(source), "page", False)
            assert [t.response for t in opened.trajectories("reward > 0")] == ["1"]
            assert opened.audit().is_clean
            assert RunReader(opened.path).state() == "interrupted", "the page reads it, too"
        with pytest.raises(staleflow.ConfigError, match=r"a bucket has only the store; name the run's folder"):
            staleflow.open_run(url).replay()
        assert staleflow.open_run(url).branch("main").source == url
        with pytest.raises(staleflow.ConfigError, match="no store can be read there"):
            staleflow.open_run(f"{url}-none")
