"""A run whose store is in a bucket: killed, resumed, audited, shown, rescored and trained offline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.soaking.bucket import BUCKET, served
from benchmarks.soaking.job import Job
from staleflow.stores.trajectories.versioned import VersionedStore
from tests.commands import command, error_line
from tests.jobs.test_resume import until_step
from tests.runtime.test_run import check
from tests.stores.store_conformance import HEADER
from tests.support import forking

LOCAL = ("--set", "cluster.kind=local", "--set", "cluster.scheduler_file=")
URL = f"s3://{BUCKET}/runs"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with served() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield


def staleflow(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command whose workers have the environment of this test."""
    return forking.run(
        [sys.executable, "-m", "staleflow.cli.main", *map(str, words)], capture_output=True, text=True, timeout=250
    )


@pytest.mark.usefixtures("bucket")
def test_a_killed_run_resumes_and_commands_accept_its_url(tmp_path: Path) -> None:
    bucket_job = Job(folder=tmp_path, seed=1)
    bucket_job.write()
    folder, url = bucket_job.run_dir, f"{URL}/{bucket_job.run_dir.name}"
    wrong = error_line("run", bucket_job.file, *LOCAL, "--store", "s3://nobodys-bucket/runs")
    assert "the bucket cannot be used: The specified bucket does not exist" in wrong
    assert not folder.exists()
    VersionedStore.create(tmp_path / "failed", replace(HEADER, url=url, job="seed = 9"))
    other = error_line("run", bucket_job.file, *LOCAL, "--store", URL)
    assert "another job has created its store there, without trajectories so far; choose another name, or" in other
    assert not folder.exists()
    url = f"{URL}/other/{bucket_job.run_dir.name}"

    sets = ("--set", "steps=400", "--set", "batch.groups_per_step=2", "--set", "rollout.instances=1", *LOCAL)
    stores = url.rpartition("/")[0]
    start = [sys.executable, "-m", "staleflow.cli.main", "run", str(bucket_job.file), "--store", stores, *sets]
    with forking.Popen(start, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        until_step(process, 2)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert (folder / "store").read_text() == f"{url}\n"
    trained = sum(r.kind == "step" for r in VersionedStore.open(folder / "store").commits())
    resumed = staleflow("resume", folder, "--set", f"steps={trained + 1}")
    assert resumed.returncode == 0, resumed.stderr
    check(folder, trained + 1)

    audited = json.loads(command("store", "audit", url, "--json").stdout)
    assert (audited["clean"], audited["num_steps"]) == (True, trained + 1)
    for where, name in ((url, url), (tmp_path / "runs", str(folder))):
        (row,) = json.loads(command("store", "ls", where, "--json").stdout)
        assert (row["run"], row["steps"], row["state"]) == (name, trained + 1, "ended")
    shown = command("store", "show", url, "--trajectory", 3, "--json")
    assert json.loads(shown.stdout)[0]["trajectory"] == 3, shown.stderr
    repeated = error_line("run", bucket_job.file, "--store", stores, *LOCAL, "--set", f"runs_dir={tmp_path}/others")
    assert "there is a run's store or other data already" in repeated
    for verb in ("resume", "replay"):
        assert "a bucket has only the store; name the run's folder" in error_line(verb, url)
    assert f"{stores}/nothing" in error_line("store", "audit", f"{stores}/nothing")


@pytest.mark.slow  # by default tests/stores/test_bucket.py has a branch with other rewards
@pytest.mark.usefixtures("bucket")
def test_a_store_in_a_bucket_is_rescored_and_trained_offline(job: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def even(answer, record):\n    return float(len(answer) % 2)\n")
    ran = staleflow("run", job, "--store", URL, "--set", "steps=2", "--set", "task.eval_prompts=0")
    assert ran.returncode == 0, ran.stderr
    url, folder = f"{URL}/job", tmp_path / "runs" / "job"
    scored = staleflow("store", "rescore", url, "--reward", f"{tmp_path}/mine.py:even", "--branch", "even")
    assert scored.returncode == 0, scored.stderr
    compared = command("store", "diff", folder, "main", "even")  # the branch is in the bucket
    assert compared.returncode == 0, compared.stderr
    offline = staleflow("train-offline", url, "--out", tmp_path / "offline", "--json")
    assert json.loads(offline.stdout)["same_steps"] == 2, offline.stderr
