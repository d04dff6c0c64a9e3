"""Resuming stored runs: after a kill -9 of all processes, after a stop, with more steps, and rejected cases."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from staleflow.pipeline.config import loading
from staleflow.pipeline.recovery import resumption
from staleflow.pipeline.recovery.run_folder import find_checkpoint, prepare_run_dir, write_job
from staleflow.stores.errors import ConfigError, StoreError
from staleflow.stores.in_flight.spool import Spool
from staleflow.stores.in_flight.spool_entries import TokensDelivered, TrajectoriesDiscarded
from staleflow.stores.trajectories.repository import repository_at
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import AbortReason, Fate, PolicyVersion
from staleflow.stores.weights.resume_points import ResumePoints
from staleflow.stores.weights.retention import NUM_LATEST_KEPT
from tests.commands import command, error_line
from tests.runtime.test_run import ENVIRONMENT, check, run, staleflow
from tests.support import forking


def start(job: Path, *overrides: str) -> subprocess.Popen[str]:
    """Start a run with its workers in a new process group."""
    sets = [word for o in ("task.eval_prompts=0", *overrides) for word in ("--set", o)]
    command = [sys.executable, "-m", "staleflow.cli.main", "run", str(job), *sets]
    return forking.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, start_new_session=True)


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder by its relative path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def until_step(process: subprocess.Popen[str], step: int) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(f"step {step}/"):
            return
    pytest.fail(f"the run ended before step {step}")


def test_a_copy_of_a_run_with_all_processes_killed_resumes_and_passes_the_audit(job: Path, tmp_path: Path) -> None:
    """While it runs, a second run of its name, with another bound, and a resume are rejected."""
    original = job.parent / "runs" / "job"
    with start(job, "steps=400") as process:
        until_step(process, 3)
        written = (original / "config.toml").read_bytes()
        refused = error_line("run", job, "--set", "staleness.eta=4"), error_line("resume", original)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert all(f"in use by process {process.pid}" in line for line in refused)
    assert (original / "config.toml").read_bytes() == written
    deadline = time.monotonic() + 60
    with contextlib.suppress(ProcessLookupError):  # the last of the group has ended
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.05)
    folder = tmp_path / "elsewhere" / "copy"
    shutil.copytree(original, folder)
    before = contents(original)
    stored = check(folder, len(VersionedStore.open(folder / "store").commits()))
    trained = len(stored.commits())
    entries = list(Spool(folder / "spool", group_size=stored.header.group_size).read())
    ended = {e.trajectory.id for e in stored.trajectories()}
    ended |= {ending.trajectory for e in entries if isinstance(e, TrajectoriesDiscarded) for ending in e.endings}
    assert trained >= 3
    assert len(ResumePoints(folder / "resume").versions()) <= NUM_LATEST_KEPT

    resumed = staleflow("resume", folder, "--set", f"steps={trained + 3}", "-v")
    assert resumed.returncode == 0, resumed.stderr
    assert contents(original) == before
    assert "resuming from version" in resumed.stderr
    for logged in ("rollout-0 joins", f"step {trained + 2}/", "resume point of version", "checkpoint written"):
        assert resumed.stderr.count(logged) >= 1, resumed.stderr
    store = check(folder, trained + 3)
    assert store.header.eta == 1
    (record,) = [r for r in store.commits() if r.kind == "resume"]
    assert record.num_rows == 0, "nothing was given up"
    took, kept_tokens, restarted = (
        int(record.metrics[name]) for name in ("taken_up", "taken_up_tokens", "started_again")
    )
    counts = f"{took:,} in-flight responses ({kept_tokens:,} tokens); {restarted:,} restart from their prompts"
    assert f"resumed {counts}" in resumed.stderr
    sampled = {  # tokens of versions that are trained again are dropped
        e.trajectory
        for e in entries
        if isinstance(e, TokensDelivered) and any(s.version <= record.step for s in e.segments)
    }
    assert took == len(sampled - ended)
    lost = [e for e in store.trajectories() if e.reason is AbortReason.RUN_ENDED]
    assert all(e.fate is Fate.ABORTED and len(e.trajectory.prompt_tokens) for e in lost)
    assert sorted(e.trajectory.id for e in store.trajectories()) == list(range(store.commits()[-1].ledger.num_started))
    assert "the same commands" in command("replay", folder).stdout


def test_a_run_killed_between_its_last_step_and_its_end_is_completed(job: Path) -> None:
    """The reward changes in between, so the evaluations before and after are not compared."""
    reward = job.parent / "mine.py"
    reward.write_text("def even(answer, record):\n    assert len(answer) % 3\n    return float(len(answer) % 2)\n")
    end = run(job, "steps=2", f"reward.function={reward}:even", "reward.max_error_share=1")
    repository = repository_at(end.run_dir / "store")
    (last_step,) = (
        s.id for s in repository.ancestry(branch="main") if s.metadata == {**s.metadata, "kind": "step", "step": 1}
    )
    repository.reset_branch("main", last_step)
    (end.run_dir / "summary.json").unlink()
    evaluations: Any = end.summary["evaluations"]
    (end.run_dir / "evaluations.json").write_text(json.dumps(evaluations[:1]))
    reward.write_text("def even(answer, record):\n    return float(len(answer) % 2)\n")
    resumed = staleflow("resume", end.run_dir)
    assert resumed.returncode == 0, resumed.stderr
    check(end.run_dir, 2)
    assert VersionedStore.open(end.run_dir / "store").commits()[-1].kind == "end"
    summary = json.loads((end.run_dir / "summary.json").read_text())
    before, after = summary["evaluations"]
    assert (before["version"], after["version"]) == (0, 2)
    assert before["reward"] != after["reward"]
    assert before["data"] == after["data"] != ""
    assert after["sampled_failed"] == after["greedy_failed"] == 0
    (changed,) = after["changed"]
    assert changed.startswith("reward changed since the run began: code was ")
    assert changed in resumed.stderr
    compared = "held-out rewards at versions 0 and 2 cannot be compared: different reward functions"
    assert compared in resumed.stderr
    assert {changed, compared} <= set(summary["notes"])


def test_an_incomplete_resume_point_is_skipped(stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer of the previous start finishes another one while the folder is prepared, which does not count."""
    folder = tmp_path / "copy"
    shutil.copytree(stored, folder)
    config = dataclasses.replace(loading.load(folder / "config.toml"), runs_dir=str(tmp_path), name="copy", steps=5)
    points = ResumePoints(folder / "resume")
    assert resumption.find_resume_version(config) == 3
    newest = points.path(PolicyVersion(3))
    newest.write_bytes(newest.read_bytes()[:-1000])
    assert resumption.find_resume_version(config) == 2
    remove_after, previous_trainer = ResumePoints.remove_after, ResumePoints(folder / "resume")
    previous_trainer.claim()

    def remove_while_one_is_written(points: ResumePoints, version: PolicyVersion) -> None:
        remove_after(points, version)
        with contextlib.suppress(StoreError), previous_trainer.writing(PolicyVersion(3)) as part:
            part.touch()

    with monkeypatch.context() as patch:
        patch.setattr(ResumePoints, "remove_after", remove_while_one_is_written)
        undone = resumption.prepare(config)
    assert (folder / "checkpoints" / "step-000003-undone").is_dir()
    with pytest.raises(ConfigError, match="the run has no checkpoint"):
        find_checkpoint(folder)
    assert (undone.version, undone.num_earlier_starts) == (2, 1)
    assert points.versions()[-1] == 2
    (folder / "events.jsonl").write_text("")  # as of a run that continued from there
    assert resumption.prepare(config).num_earlier_starts == 2
    assert sum(r.kind == "step" for r in VersionedStore.open(folder / "store").commits()) == 2


def test_a_run_killed_before_its_first_resume_point_starts_again(stored: Path, tmp_path: Path) -> None:
    """While a resume point may have been on its way; later one must exist."""
    folder = tmp_path / "copy"
    shutil.copytree(stored, folder)
    config = dataclasses.replace(loading.load(folder / "config.toml"), runs_dir=str(tmp_path), name="copy", steps=5)
    for point in list((folder / "resume").iterdir()):
        point.unlink()
    with pytest.raises(ConfigError, match="3 steps are stored but there is no complete resume point"):
        resumption.find_resume_version(config)
    rarely = dataclasses.replace(config, training=dataclasses.replace(config.training, resume_every=2))
    assert resumption.find_resume_version(rarely) == 0
    assert resumption.prepare(rarely).version == 0
    assert VersionedStore.open(folder / "store").commits() == []


def test_a_run_whose_store_is_missing_does_not_start_again(stored: Path, tmp_path: Path) -> None:
    """Its weights, evaluations and events cannot be undone by a resume."""
    folder = tmp_path / "copy"
    shutil.copytree(stored, folder)
    config = dataclasses.replace(loading.load(folder / "config.toml"), runs_dir=str(tmp_path), name="copy", steps=5)
    (folder / "store").rename(tmp_path / "elsewhere")
    (folder / "store").symlink_to(tmp_path / "unmounted")
    for sign in ("store", "resume", "checkpoints", "summary.json"):
        before = sorted(folder.rglob("*"))
        with pytest.raises(ConfigError, match=r"is missing, but the run has trained; .* under another name") as caught:
            resumption.prepare(config)
        assert "\n" not in str(caught.value)
        assert sorted(folder.rglob("*")) == before
        if (folder / sign).is_dir():
            shutil.rmtree(folder / sign)
        else:
            (folder / sign).unlink()
    assert resumption.prepare(config).version == 0
    assert (folder / "events.1.jsonl").exists() and not (folder / "events.jsonl").exists()


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_a_schedule_keeps_its_length_when_steps_are_added(kind: str, job: Path) -> None:
    prepare_run_dir(loading.load(job, (f"training.schedule={kind}",)), {})
    folder = job.parent / "runs" / "job"
    further = resumption.load(folder, ("steps=9",))
    assert (further.steps, further.training.schedule_steps) == (9, 5)
    assert resumption.schedule_note(further) == (
        f"the {kind} schedule ends after 5 of 9 steps (training.schedule_steps); later ones train at a learning rate "
        "of 0.0001"
    )
    write_job(further)
    assert resumption.load(folder, ("steps=20",)).training.schedule_steps == 5
    anew = resumption.load(folder, ("steps=20", "training.schedule_steps=0"))
    assert (anew.training.schedule_steps, resumption.schedule_note(anew)) == (0, "")
    assert resumption.load(folder).training.schedule_steps == 5


def test_a_failed_resume_point_gives_an_error_with_a_remedy(tmp_path: Path) -> None:
    points = ResumePoints(tmp_path / "resume")
    with points.writing(PolicyVersion(1)) as part:
        part.touch()

    def write_half() -> None:
        with points.writing(PolicyVersion(2)) as part:
            part.write_text("half")
            raise OSError("No space left on device")

    with pytest.raises(StoreError, match="cannot be written: No space left"):
        write_half()
    assert points.versions() == [1]
    assert [p.name for p in (tmp_path / "resume").iterdir()] == ["v00000001.pt"]
