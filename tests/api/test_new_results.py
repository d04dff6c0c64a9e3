"""New results of a stored run: rewards and logprobs on branches, exports, offline training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

import staleflow
from staleflow.pipeline.api.code_objects import branch_file_name
from staleflow.pipeline.config.knob_tree import override_lines
from staleflow.pipeline.recovery.run_folder import FolderInUse, create_and_lock
from staleflow.pipeline.stored_runs.pool import open_pool


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A Dask client of a cluster with one worker process."""
    with open_pool(None, 1, for_models=True) as pool:
        yield pool.client


@pytest.fixture
def run(stored: Path, tmp_path: Path) -> staleflow.Run:
    """A copy of a run of a small model with branches for these tests."""
    shutil.copytree(stored, tmp_path / "run")
    return staleflow.open_run(tmp_path / "run")


def test_rescore_with_a_function_writes_a_branch(run: staleflow.Run, client: Client) -> None:
    most = 3
    before = run.branches

    def length(response: str, record: dict[str, Any]) -> float:
        return float(min(most, len(response)))

    progress: list[tuple[int, int]] = []
    result = run.rescore(
        branch="by length", reward=length, client=client, progress=lambda *counts: progress.append(counts)
    )
    assert (result.errors, result.rows) == ({}, len(run.to_pandas()))
    assert (progress[0], progress[-1]) == ((0, 0), (result.rows, result.rows))
    branch = run.branch("by length")
    assert set(run.branches) == {*before, "by length"}
    for trajectory in branch.trajectories():
        plain = trajectory.messages[0]["content"] if trajectory.messages else ""
        assert trajectory.reward == min(most, len(plain.strip())), trajectory
    file, _, name = branch.lineage["reward"].rpartition(":")
    assert (Path(file).parent, name) == (run.path.resolve() / "code", "length")
    assert "def length(response: str" in Path(file).read_text(), "for readers"
    assert run.diff("main", "by length").mean[1] == pytest.approx(result.mean_after)
    with pytest.raises(staleflow.ConfigError, match="nothing stored is overwritten"):
        run.rescore(branch="by length", reward=lambda response, record: 0.0, client=client)
    assert "def length(response: str" in Path(file).read_text(), "kept like the branch"


def test_a_reward_that_fails_on_every_response_leaves_no_branch(run: staleflow.Run, client: Client) -> None:
    before = run.branches

    def broken(answer: str, record: dict[str, Any]) -> float:
        raise KeyError("grade")

    with pytest.raises(staleflow.ConfigError, match=r"failed on all \d+ responses, so nothing is stored; .*grade"):
        run.rescore(branch="again", reward=broken, client=client)
    assert run.branches == before
    assert not list((run.path / "code").glob("branch_*"))
    run.rescore(branch="again", reward=lambda answer, record: 1.0, client=client)


def test_an_invalid_rescoring_leaves_neither_a_branch_nor_code(run: staleflow.Run, client: Client) -> None:
    before, branches = set((run.path / "code").glob("*")), run.branches
    with pytest.raises(staleflow.ConfigError, match="name the reward"):
        run.rescore(branch="other", client=client)
    with pytest.raises(staleflow.ConfigError, match="only how responses are scored can change"):
        run.rescore(branch="other", reward=lambda response, record: 1.0, changes={"seed": 3}, client=client)
    with pytest.raises(staleflow.ConfigError, match=r"^reward: a int; expected a function"):
        run.rescore(branch="other", reward=3, client=client)  # type: ignore[arg-type]
    with create_and_lock(run.path), pytest.raises(FolderInUse):
        run.rescore(branch="other", reward="task", client=client)
    assert set((run.path / "code").glob("*")) == before
    assert run.branches == branches


async def test_an_asynchronous_client_is_rejected(run: staleflow.Run) -> None:
    with pytest.raises(staleflow.ConfigError, match="it is asynchronous"):
        async with Client(processes=False, n_workers=0, dashboard_address="127.0.0.1:0", asynchronous=True) as client:
            run.export("jsonl", run.path / "out.jsonl", client=client)


def test_export_without_a_client_uses_local_processes(run: staleflow.Run, tmp_path: Path) -> None:
    result = run.export("jsonl", tmp_path / "out.jsonl", where="reward > 0", workers=1)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    expected = [(t.id, t.response) for t in run.trajectories("reward > 0")]
    assert [(line["trajectory"], line["response"]) for line in lines] == expected
    assert (result.rows, result.errors) == (len(lines), {})
    with pytest.raises(staleflow.ConfigError, match="already exists"):
        run.export("jsonl", tmp_path / "out.jsonl", workers=1)


def test_recomputed_logprobs_of_the_sampling_policy_match_the_stored_ones(
    run: staleflow.Run, tiny_model: Path, client: Client
) -> None:
    result = run.recompute_logprobs(tiny_model, where="v_max == 0 and fate == 'consumed'", client=client)
    assert result.rows > 0
    assert all(row.max_abs_log_ratio < 1e-3 and row.ess_tokens > 0.999 for row in result.by_staleness)


def test_train_offline_gives_the_weights_of_the_run(run: staleflow.Run, tmp_path: Path, client: Client) -> None:
    events: list[Any] = []
    result = run.train_offline(tmp_path / "policy", client=client, report=events.append)
    assert (result.steps, result.same_steps) == (len(run.steps()), len(run.steps()))
    assert Path(result.checkpoint).is_dir()
    assert [event["done"] for event in events if "done" in event] == [1, 2, 3]
    with pytest.raises(staleflow.ConfigError, match="cannot be changed offline"):
        run.train_offline(tmp_path / "other", overrides={"rollout.instances": 2}, client=client)


def test_the_journal_replays_to_the_same_commands(run: staleflow.Run) -> None:
    result = run.replay()
    assert result.num_events > 0
    assert (result.difference, result.missing_events, result.story) == ("", "", ())
    assert run.replay(0).story


def test_changes_may_be_mappings_or_lines() -> None:
    assert override_lines(None) == ()
    assert override_lines(["a=1", "b.c=x"]) == ("a=1", "b.c=x")
    assert override_lines({"a": True, "b.c": "x y"}) == ("a=true", 'b.c="x y"')
    with pytest.raises(staleflow.ConfigError, match="pass a mapping or a list"):
        override_lines("a=1")
    with pytest.raises(staleflow.ConfigError, match="pass a mapping or a list"):
        override_lines(3)  # type: ignore[arg-type]
    assert override_lines({"a": np.float64(3), "b": np.arange(2)}) == ("a=3.0", "b=[0, 1]")


def test_branch_names_map_to_different_file_names() -> None:
    names = ["a", "a_b", "a b", "a.b", "a-b"]
    assert len({branch_file_name(name) for name in names}) == len(names)
    assert all(branch_file_name(name).isidentifier() for name in names)
