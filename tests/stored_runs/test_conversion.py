"""Runs of the version before, converted: the same audit, replay and training as that version recorded of them.

tests/earlier has the runs and what was recorded; tests/earlier/make.py made them.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.pipeline.config.job_conversion import RENAMED
from staleflow.pipeline.recovery.run_folder import lock_folder
from staleflow.stores.auditing import snapshot_audit
from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectories.columns import COLUMNS
from staleflow.stores.trajectories.versioned import VersionedStore
from tests.commands import command
from tests.earlier import asking
from tests.support import forking

JOB_FILES = "config explain"
"""The answer about job files, whose keys change with every version."""


@pytest.fixture(scope="module", params=asking.NAMES)
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(name, folder of the converted run) of each run. Tests only read it."""
    return request.param, asking.converted(request.param, tmp_path_factory.mktemp(request.param))


@functools.cache
def recorded(name: str) -> dict[str, Any]:
    answers: dict[str, Any] = json.loads((asking.HERE / f"{name}.json").read_text())
    return answers


def assert_same(now: Any, before: Any, where: str) -> None:
    """What was recorded is said now. New keys are no difference. Fractions may differ by a machine's rounding."""
    if isinstance(before, dict):
        assert isinstance(now, dict), where
        assert not before.keys() - now.keys(), where
        for key, value in before.items():
            assert_same(now[key], value, f"{where} > {key}")
    elif isinstance(before, list):
        assert isinstance(now, list) and len(now) == len(before), where
        for i, value in enumerate(before):
            assert_same(now[i], value, f"{where} > {i}")
    elif isinstance(before, float):
        assert now == pytest.approx(before, rel=1e-6, abs=1e-9), where
    else:
        assert now == before, where


def test_audit_replay_and_rows_are_as_recorded(converted: tuple[str, Path]) -> None:
    name, run = converted
    before = recorded(name)
    for question, answer in asking.ask(run).items():
        if question != JOB_FILES:
            assert_same(answer, before[question], f"{name}: {question}")
    assert before["store audit"]["clean"]
    assert before["replay"]["difference"] == ""
    assert list(snapshot_audit.audit_history(run / "store")) == []


@pytest.mark.parametrize("name", ["finished", "agent"])
def test_training_offline_ends_with_the_same_weights(name: str, tmp_path: Path) -> None:
    run = asking.converted(name, tmp_path)
    now, before = asking.trained_offline(run), recorded(name)["train-offline"]
    assert before["same_steps"] == before["steps"]
    # Other processors round otherwise, and then the weights are not those of the run either.
    if now["same_steps"] == now["steps"]:
        assert now["weights"] == before["weights"]
    assert [now[key] for key in ("steps", "rows", "errors")] == [before[key] for key in ("steps", "rows", "errors")]


def test_branches_are_converted_too(tmp_path: Path) -> None:
    run = asking.converted("finished", tmp_path)
    before = recorded("finished")
    assert_same(json.loads(asking.answer("store", "diff", run, "main", "odd", "--json")), before["store diff"], "diff")
    assert before["store diff"]["changed"] > 0
    assert_same(asking.exported(run, "odd"), before["store export"], "export")
    main, odd, last = (VersionedStore.open(run / "store", branch=name) for name in ("main", "odd", "last"))
    assert odd.lineage["parent"] == last.lineage["parent"] == main.snapshot
    rows = list(last.ended())
    logprobs = [last.rescored(row.trajectory.id) for row in rows]
    assert all(new is not None and np.abs(new - row.trajectory.logprobs).max(initial=0) < 2
               for new, row in zip(logprobs, rows, strict=True))  # fmt: skip
    assert any(new is not None and new.any() for new in logprobs)


def test_undone_steps_stay_readable(tmp_path: Path) -> None:
    run = asking.converted("resumed", tmp_path)
    store = VersionedStore.open(run / "store")
    (undone,) = store.branches()
    assert undone.startswith("undone-")
    other = VersionedStore.open(run / "store", branch=undone)
    assert undone == f"undone-{other.snapshot}"
    assert [record.kind for record in other.steps()] == ["step"] * 4


def test_each_step_is_read_as_it_was_committed(tmp_path: Path) -> None:
    run = asking.converted("finished", tmp_path)
    whole = VersionedStore.open(run / "store").table()["trajectory"].tolist()
    for step in range(4):
        early = VersionedStore.open(run / "store", at_step=step)
        assert early.summary().num_steps == step + 1
        assert early.table()["trajectory"].tolist() == whole[: early.summary().num_rows]


def test_a_column_that_is_newer_than_the_store_reads_its_fill_value(tmp_path: Path) -> None:
    run = asking.converted("credits", tmp_path)
    (column,) = [c for c in COLUMNS if c.name == "dataset_row"]
    store = VersionedStore.open(run / "store")
    assert column.array not in store.array_lengths()
    assert set(store.columns()["dataset_row"].tolist()) == {column.fill}


def test_a_killed_run_is_resumed_with_what_was_in_flight(tmp_path: Path) -> None:
    run = asking.converted("killed", tmp_path)
    trained = sum(record["kind"] == "step" for record in recorded("killed")["store show"])
    words = ["resume", str(run), "--set", f"steps={trained + 2}", "--set", "rollout.instances=1", "--json"]
    done = forking.run(
        [sys.executable, "-m", "staleflow.cli.main", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = asking.ask(run)
    assert answers["store audit"]["clean"]
    assert answers["store audit"]["num_steps"] == trained + 2
    assert answers["replay"]["difference"] == ""
    (resumed,) = [record for record in VersionedStore.open(run / "store").steps() if record.kind == "resume"]
    assert resumed.metrics["taken_up"] > 0


OTHER_COMMANDS = [
    ["store", "show", "RUN"], ["store", "audit", "RUN"], ["store", "export", "RUN", "--to", "jsonl"],
    ["store", "diff", "RUN", "main", "odd"], ["store", "rescore", "RUN", "--reward", "task", "--branch", "b"],
    ["store", "recompute-logprobs", "RUN", "--model", "x"], ["train-offline", "RUN"], ["simulate", "--from", "RUN"],
    ["resume", "RUN", "--set", "steps=9"],
]  # fmt: skip


@pytest.mark.parametrize("words", OTHER_COMMANDS, ids=lambda words: " ".join(words[:2]))
def test_every_other_command_names_the_conversion(words: list[str], tmp_path: Path) -> None:
    run = asking.unpack("finished", tmp_path)
    done = command(*(str(run) if word == "RUN" else word for word in words))
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert f"written by an earlier version; `staleflow store convert {run}` converts it" in line


def test_what_cannot_be_converted_is_refused_in_one_line(tmp_path: Path) -> None:
    run = asking.unpack("credits", tmp_path)
    out = tmp_path / "out"

    def refused(*words: object) -> str:
        done = command("store", "convert", *map(str, words))
        assert done.returncode == 2, done.stderr
        (line,) = done.stderr.splitlines()
        return line

    with lock_folder(run):
        words = [sys.executable, "-m", "staleflow.cli.main", "store", "convert", str(run)]
        done = subprocess.run(words, capture_output=True, text=True)  # another process
        assert done.returncode == 2
        assert "in use by process" in done.stderr
    out.mkdir()
    assert "already exists; choose another place" in refused(run, "--out", out)
    assert "no such run" in refused(tmp_path / "none")
    out.rmdir()
    asking.answer("store", "convert", run, "--out", out)
    assert "already of this version; nothing to convert" in refused(out, "--out", tmp_path / "again")


def test_a_conversion_that_is_killed_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    run = asking.unpack("credits", tmp_path)
    before = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    script = (
        "import os, signal, sys\n"
        "from staleflow.stores.trajectories import store_conversion\n"
        "append, count = store_conversion._append, iter(range(9))\n"
        "def killed(*args):\n"
        "    if next(count) == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    append(*args)\n"
        "store_conversion._append = killed\n"
        "from tests.commands import command\n"
        f"command('store', 'convert', {str(run)!r}, '--out', {str(tmp_path / 'out')!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    after = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file() and path.name != ".running"}
    assert after == {path: data for path, data in before.items() if path.name != ".running"}
    asking.answer("store", "convert", run, "--out", tmp_path / "out")
    assert VersionedStore.open(tmp_path / "out" / "store").summary().num_steps == 4
    with pytest.raises(ConfigError):
        VersionedStore.open(run / "store")


def test_a_run_whose_store_is_of_this_version_gets_a_job_with_the_new_keys(tmp_path: Path) -> None:
    """As commit 9e20fc41 wrote it: the same store, a job whose keys were renamed since."""
    run = asking.converted("credits", tmp_path)
    job = run / "config.toml"
    converted = job.read_text()
    for old, new in RENAMED.items():
        (old_name, name) = (f"\n{key.rpartition('.')[2]} = " for key in (old, new))
        assert converted.count(name) <= 1 or old_name == name, new
        job.write_text(job.read_text().replace(name, old_name))
    assert job.read_text() != converted
    refused = command("store", "audit", run)
    assert f"`staleflow store convert {run}` converts it" in refused.stderr or refused.returncode == 0
    asking.answer("store", "convert", run, "--out", tmp_path / "out")
    assert tomllib.loads((tmp_path / "out" / "config.toml").read_text()) == tomllib.loads(converted)
    before = recorded("credits")
    shutil.rmtree(run)
    answers = asking.ask((tmp_path / "out").rename(run))
    for question in ("store audit", "store show", "replay"):
        assert_same(answers[question], before[question], question)


def test_a_converted_run_that_kept_no_bound_is_not_said_to_hold_one(tmp_path: Path) -> None:
    """The version before wrote the number of steps as its bound, which any trajectory keeps."""
    run = asking.unpack("credits", tmp_path)
    job = run / "config.toml"
    assert 'admission = "credits"' in job.read_text()
    job.write_text(job.read_text().replace('admission = "credits"', 'admission = "backlog"'))
    assert command("store", "convert", run, "--out", tmp_path / "converted").returncode == 0
    audited = command("store", "audit", tmp_path / "converted")
    assert audited.returncode == 0
    assert "bound         not verified: the run keeps no bound" in audited.stdout
