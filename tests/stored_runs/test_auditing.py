"""An audit with a memory limit and with several processes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import dask
import pytest

from staleflow.pipeline.stored_runs import auditing
from staleflow.pipeline.stored_runs.auditing import audit_within_memory, plan_processes
from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectories.versioned import VersionedStore
from tests.commands import command, error_line
from tests.stores.plain_audit import plain_audit
from tests.stores.test_stores import edit, set_int, valid_store


def test_the_memory_limit_is_divided_among_processes_and_has_a_minimum() -> None:
    for memory in (300, 512, 1024, 4096):
        for workers in (1, 2, 8, 64):
            num_workers, max_tokens = plan_processes(memory, workers, 10**10)
            processes = (
                auditing.PROCESS_WITH_POOL_MIB + num_workers * auditing.WORKER_MIB
                if num_workers
                else auditing.PROCESS_MIB
            )
            reading = (num_workers + 1) * max_tokens * auditing.BYTES_PER_TOKEN / auditing.MIB
            assert processes + reading <= memory
            assert num_workers <= workers
            assert max_tokens >= auditing.MIN_TOKENS
    assert plan_processes(4096, 8, 1000)[0] == 0, "a small store is read here"
    with pytest.raises(ConfigError, match=r"^memory limit of 100 MiB: an audit takes at least 216 MiB"):
        plan_processes(100, 2, 10)


def test_several_processes_find_the_findings_of_one(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auditing, "POOL_MIN_TOKENS", 0)
    path = tmp_path / "store"
    shutil.copytree(stored / "store", path)
    assert audit_within_memory(VersionedStore.open(path), 1024, 2) == plain_audit(VersionedStore.open(path))
    edit(path, lambda root: set_int(root, 9, "v_traj", 3))
    edit(path, lambda root: set_int(root, 2, "step", 3))
    report = audit_within_memory(VersionedStore.open(path), 1024, 2)
    assert report == plain_audit(VersionedStore.open(path))
    assert not report.is_clean


@pytest.mark.usefixtures("short_connect")
def test_a_scheduler_in_the_dask_configuration_is_not_used(stored: Path) -> None:
    """An audit waited for the workers of a busy cluster, or failed without one, only because a scheduler was
    configured."""
    with dask.config.set({"scheduler-address": "tcp://127.0.0.1:9"}):
        assert command("store", "audit", stored).returncode == 0
        line = error_line("store", "audit", stored, "--scheduler", "tcp://127.0.0.1:9")
        assert "no scheduler at tcp://127.0.0.1:9" in line


def test_weights_not_proved_by_any_instance_are_not_verified(stored: Path, tmp_path: Path) -> None:
    assert audit_within_memory(VersionedStore.open(stored / "store"), 1024, 2).weights.verified > 0
    assert re.search(r"weights of instances: \d+ pulls verified, 0 not", command("store", "audit", stored).stdout)
    without_pulls = valid_store(tmp_path / "store", num_steps=1)
    assert audit_within_memory(without_pulls, 1024, 2).weights.verified == 0


@pytest.mark.parametrize("group", [-5, 2**42])
def test_an_audit_of_wrong_groups_reports_them_without_statistics_over_groups(
    stored: Path, tmp_path: Path, group: int
) -> None:
    shutil.copytree(stored, tmp_path / "run")
    edit(tmp_path / "run" / "store", lambda root: set_int(root, 2, "group", group))
    result = command("store", "audit", tmp_path / "run")
    assert result.returncode == 1
    assert f"stored with group {group}, its id is of group" in result.stdout


def test_a_memory_limit_below_the_minimum_gives_a_one_line_error(stored: Path) -> None:
    line = error_line("store", "audit", stored, "--memory", 64)
    assert line == "staleflow: memory limit of 64 MiB: an audit takes at least 216 MiB\n"
    result = command("store", "audit", stored, "--memory", 300, "--json")
    assert result.returncode == 0
    assert json.loads(result.stdout)["clean"]
