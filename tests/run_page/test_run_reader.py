"""What the run page reads: one snapshot at a time, a small part of a large store, and a live journal incrementally."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.coordination.journal import open_part
from staleflow.pipeline.recovery.run_folder import load_job
from staleflow.pipeline.run_page import run_reader
from staleflow.pipeline.run_page.run_reader import JournalFollower, RunReader
from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectories.versioned import TOKEN_FILE, VersionedStore
from staleflow.stores.trajectory import InstanceId, PolicyVersion
from staleflow.stores.weights.weight_report import WeightCheck, WeightReport
from tests.run_page.page_client import Page
from tests.stores.test_stores import corrupt_tokens
from tests.support.stored_runs import Response, StoredRun


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the elements read of each array of the store."""
    counts: Counter[str] = Counter()
    real = VersionedStore._slice

    def counted(self: VersionedStore, root: Any, name: str, first: int, last: int) -> Any:
        counts[name] += last - first
        return real(self, root, name, first, last)

    monkeypatch.setattr(VersionedStore, "_slice", counted)
    return counts


def run_of(folder: Path, steps: int, groups: int = 8) -> StoredRun:
    run = StoredRun(folder, steps=steps, groups=groups)
    for step in range(steps):
        run.train([(f"{step}.{g}", [Response("yes" * 5, 1.0), Response("no", 0.0)]) for g in range(groups)])
    return run


def test_a_step_page_reads_only_its_tokens_in_a_store_of_any_size(tmp_path: Path, read: Counter[str]) -> None:
    """A page shows 6 of 40 groups; what it reads must not grow with the steps."""
    elements = {}
    for steps in (2, 20):
        page = Page(run_of(tmp_path / str(steps), steps, groups=40).run_dir)
        read.clear()
        answer = page.ask("groups", step=1, page=2)
        assert [g["prompt"] for g in answer["groups"]] == [f"1.{i}" for i in range(6, 12)]
        shown = sum(3 + m["response_tokens"] for g in answer["groups"] for m in g["members"])
        elements[steps] = (read["tokens/ids"], read["tokens/logprobs"])
        assert elements[steps][0] < shown + 20
        assert read["text"] < 40_000 * steps  # records are apart
    assert elements[2][0] <= elements[20][0] <= elements[2][0] + 12  # prompts of later steps are longer


def test_rows_and_records_are_read_once_for_many_pages(tmp_path: Path, read: Counter[str]) -> None:
    run = run_of(tmp_path, 6)
    page = Page(run.run_dir)
    page.ask("trajectories")
    read.clear()
    for sort in ("reward", "-reward", "step", "fate"):
        for number in (1, 2):
            page.ask("trajectories", sort=sort, page=number, where="reward > 0")
    page.ask("distribution", column="response_tokens")
    page.ask("steps")
    assert not read, read


def test_a_list_reads_no_tokens_and_excerpts_only_the_listed_ones(tmp_path: Path, read: Counter[str]) -> None:
    page = Page(run_of(tmp_path, 6).run_dir)
    result = page.ask("trajectories", sort="-response_tokens")
    assert not read["tokens/ids"]
    assert len(result["columns"]["trajectory"]) == 50
    assert (result["total"], result["pages"]) == (96, 2)
    page.ask("excerpts", ids="5 90")
    assert read["tokens/ids"] < 2 * 30
    assert read["tokens/ids"] < TOKEN_FILE


def test_a_live_run_is_followed_by_reading_its_latest_records(tmp_path: Path, read: Counter[str]) -> None:
    run = run_of(tmp_path, 3)
    reader = RunReader(run.run_dir)
    first = reader.read_snapshot()
    assert first is not None
    assert reader.read_snapshot() is first
    read.clear()
    run.train([("late", [Response("a", 1.0), Response("b", 0.0)]) for _ in range(8)])
    later = reader.read_snapshot()
    assert later is not None
    assert [r.step for r in later.steps] == [0, 1, 2, 3]
    assert later.records[:3] == first.records
    assert read["commits"] == 1
    assert len(first.columns["step"]) == 48, "a page begun before keeps to its snapshot"


def test_a_run_whose_last_steps_were_undone_is_read_again(tmp_path: Path) -> None:
    run = run_of(tmp_path, 3)
    page = Page(run.run_dir)
    assert page.ask("steps")["step"] == [0, 1, 2]
    VersionedStore.rewind(run.run_dir / "store", 1)
    assert page.ask("steps")["step"] == [0]
    undone = page.ask("overview")["branches"]
    assert len(undone) == 2
    assert page.ask("steps", branch=undone[1])["step"] == [0, 1, 2]


def test_a_run_before_its_first_step_is_shown_as_starting(tmp_path: Path) -> None:
    run = run_of(tmp_path, 1)
    (run.run_dir / "store").rename(run.run_dir / "elsewhere")
    (run.run_dir / ".running").write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    page = Page(run.run_dir)
    shown = page.ask("overview")
    assert (shown["state"], shown["num_steps"], shown["snapshot"]) == ("starting", 0, "")
    assert "nothing is stored yet" in page.get("/api/steps").json["error"]
    (run.run_dir / "elsewhere").rename(run.run_dir / "store")
    assert page.ask("overview")["state"] == "running"
    run.end()
    assert page.ask("overview")["state"] == "finished"


def test_weight_checks_are_counted_while_a_run_is_in_progress(tmp_path: Path) -> None:
    run = run_of(tmp_path, 1)
    (run.run_dir / ".running").write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    page = Page(run.run_dir)
    assert page.ask("overview")["notes"] == []
    (record,) = run.store.commits()
    checks = [
        WeightCheck(
            instance=InstanceId("rollout-0"), version=PolicyVersion(1), fingerprint="", drift=0.0, limit=1.0,
            weights=WeightReport(verified=4), refused=refused,
        )
        for refused in ("", "", "its logprobs differ")
    ]  # fmt: skip
    run.store.commit(replace(record, kind="refusal", weight_checks=tuple(checks)), [])
    counts = "weights of instances: 2 pulls verified, 0 not verified, 1 contradicted"
    assert page.ask("overview")["state"] == "running"
    assert page.ask("overview")["notes"][0] == counts
    run.end()
    assert page.ask("overview")["notes"][0] == counts  # its summary is not written yet
    (run.run_dir / "summary.json").write_text(json.dumps({"weights": {"lines": ["those of the summary"]}}))
    assert page.ask("overview")["notes"] == ["those of the summary"]


def test_a_run_whose_process_died_is_interrupted(tmp_path: Path) -> None:
    run = run_of(tmp_path, 1)
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    (run.run_dir / ".running").write_text(f"process {int(ended.stdout)} on {socket.gethostname()}\n")
    assert RunReader(run.run_dir).state() == "interrupted"
    (run.run_dir / ".running").write_text("process 1 on another-machine\n")
    assert RunReader(run.run_dir).state() == "running"  # it began just now
    os.utime(run.run_dir / ".running", (0, 0))
    assert RunReader(run.run_dir).state() == "interrupted"  # nothing was written for long: no journal at all
    (run.run_dir / "events.jsonl").write_text("")
    assert RunReader(run.run_dir).state() == "running"
    (run.run_dir / ".running").write_text("garbage")
    assert RunReader(run.run_dir).state() == "interrupted"


def test_a_run_that_ended_early_is_running_once_it_is_resumed(tmp_path: Path) -> None:
    run = StoredRun(tmp_path, steps=3, groups=1)
    run.train([("one", [Response("a", 1.0), Response("b", 0.0)])])
    run.end()
    assert RunReader(run.run_dir).state() == "ended early"
    (run.run_dir / ".running").write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    assert RunReader(run.run_dir).state() == "running"


def test_a_job_is_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path, 1)
    loaded: list[Path] = []

    def load(folder: Path) -> RunConfig:
        loaded.append(folder)
        return load_job(folder)

    monkeypatch.setattr(run_reader, "load_job", load)
    reader = RunReader(run.run_dir)
    assert (reader.config.steps, reader.config.steps, loaded) == (1, 1, [run.run_dir])


def test_a_folder_without_a_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such run; `staleflow store ls` lists runs"):
        RunReader(tmp_path)


def test_a_job_changed_by_a_resume_is_shown_with_its_new_values(tmp_path: Path) -> None:
    run = run_of(tmp_path, 1)
    page = Page(run.run_dir)
    assert page.ask("overview")["steps"] == 1
    job = run.run_dir / "config.toml"
    job.write_text(job.read_text().replace("steps = 1\n", "steps = 70\n"))
    os.utime(job, ns=(1, 1))
    assert page.ask("overview")["steps"] == 70


def test_a_corrupt_trajectory_is_marked_and_others_are_shown(tmp_path: Path) -> None:
    run = StoredRun(tmp_path, group=2)
    long = "".join(random.Random(0).choices("abcdefgh", k=4_000))
    run.train([("one", [Response(long, 1.0), Response(long[::-1], 0.0)])])
    run.train([("two", [Response("c", 1.0), Response("d", 0.0)])])
    corrupt_tokens(run.store)
    page = Page(run.run_dir)
    members = page.ask("groups", step=0)["groups"][0]["members"]
    assert all("is corrupt" in m["damaged"] for m in members)
    assert "is corrupt" in page.ask("trajectory", id=0)["damaged"]
    assert "is corrupt" in page.ask("excerpts", ids="0")["texts"]["0"]["damaged"]
    assert [m["text"] for m in page.ask("groups", step=1)["groups"][0]["members"]] == ["c", "d"]


# -- the journal -------------------------------------------------------------------------------------------------------


def line(now: float, event: dict[str, Any], *commands: dict[str, Any]) -> str:
    return json.dumps({"now": now, "event": event, "commands": commands}) + "\n"


JOINED = line(0.0, {"type": "InstanceJoined", "instance": "rollout-0", "version": 0, "max_running": 4})


def tick(now: float) -> str:
    return line(now, {"type": "Tick"})


def test_a_journal_is_read_incrementally_and_a_partial_line_waits(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    follower = JournalFollower(1)
    follower.follow([path])
    assert (follower.index.num_entries, follower.index.read_share) == (0, 1.0)
    path.write_text(JOINED + tick(1.0)[:10])
    follower.follow([path])
    assert (follower.index.num_entries, follower.index.read_share) == (1, 1.0)
    path.write_text(JOINED + tick(1.0) + tick(2.0))
    follower.follow([path])
    assert (follower.index.num_entries, follower.index.last_s, follower.index.read_error) == (3, 2.0, "")


def test_a_long_journal_is_read_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(JOINED + "".join(tick(i / 10) for i in range(100)))
    follower = JournalFollower(1)
    shares: list[float] = []
    while follower.index.read_share < 1 or not shares:
        follower.follow([path], max_bytes=1000)
        shares.append(follower.index.read_share)
    assert len(shares) > 4
    assert shares == sorted(shares)
    assert follower.index.num_entries == 101


def test_journals_of_a_resumed_run_are_read_in_order(tmp_path: Path) -> None:
    now, before = tmp_path / "events.jsonl", tmp_path / "events.1.jsonl"
    now.write_text(JOINED + tick(5.0))
    follower = JournalFollower(1)
    follower.follow([now])
    now.rename(before)
    now.write_text(line(3.0, {"type": "RunResumed", "step": 0, "num_ended": []}) + tick(3.0) + tick(5.0))
    follower.follow([before, now])
    assert follower.index.last_s == 7.0
    assert follower.index.starts == [0.0, 5.0]
    assert follower.index.num_entries == 4


def test_the_incomplete_last_line_of_a_killed_start_counts_as_read(tmp_path: Path) -> None:
    now, before = tmp_path / "events.jsonl", tmp_path / "events.1.jsonl"
    before.write_text(JOINED + tick(1.0)[:10])
    now.write_text(JOINED + tick(2.0))
    follower = JournalFollower(1)
    for _ in range(2):
        follower.follow([before, now])
        assert (follower.index.num_entries, follower.index.read_share) == (3, 1.0)


@pytest.mark.parametrize("continues", [False, True])
def test_a_part_that_is_renamed_while_it_is_read_is_read_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, continues: bool
) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(JOINED + tick(1.0))

    def rename_and_open(file: Path) -> Any:
        monkeypatch.setattr(run_reader, "open_part", open_part)
        path.rename(tmp_path / "events.jsonl.0001")
        if continues:
            path.write_text('{"part":2}\n' + tick(2.0))
        return open_part(file)

    monkeypatch.setattr(run_reader, "open_part", rename_and_open)
    follower = JournalFollower(1)
    follower.follow([path])
    assert follower.index.num_entries == 0
    follower.follow([path])
    assert (follower.index.num_entries, follower.index.read_share) == (2 + continues, 1.0)


def test_an_invalid_line_is_named_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(JOINED + "{not json}\n" + '{"now": 1}\n' + "[" * 5000 + "\n" + tick(3.0))
    follower = JournalFollower(1)
    follower.follow([path])
    assert follower.index.num_entries == 2
    assert follower.index.read_error.startswith("events.jsonl, line 2, cannot be read")
