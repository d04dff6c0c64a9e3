"""Runs with the names of commit 9e20fc41 in their jobs and journals, converted: read, audited and replayed as before.

tests/config/previous_jobs and tests/coordination/test_journal_conversion.py have what that commit wrote.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from staleflow.pipeline.config import job_conversion, loading
from staleflow.pipeline.config.job_conversion import RENAMED
from staleflow.pipeline.coordination import journal, journal_conversion
from staleflow.pipeline.recovery.run_folder import lock_folder
from tests.commands import command
from tests.support.simulated_store import stored_simulation

TYPES, FIELDS = (
    {new: old for old, new in names.items()} for names in (journal_conversion.TYPES, journal_conversion.FIELDS)
)


def with_earlier_names(value: Any) -> Any:
    """A journal's entry as that commit wrote it."""
    if isinstance(value, list):
        return [with_earlier_names(item) for item in value]
    if not isinstance(value, dict):
        return value
    renamed = {FIELDS.get(key, key): with_earlier_names(item) for key, item in value.items()}
    for key in ("type", "cause"):
        if isinstance(text := value.get(key), str):
            kind, mark, number = text.partition("#")
            renamed[key] = f"{TYPES.get(kind, kind)}{mark}{number}"
    return renamed


def make_earlier(run: Path) -> None:
    """Rewrite a run of this version as that commit would have stored it. Its last line is cut off, as a kill leaves
    it."""
    job = run / "config.toml"
    text = job.read_text()
    for old, new in RENAMED.items():
        if old.rpartition(".")[0] == new.rpartition(".")[0]:
            (old_name, name) = (f"\n{key.rpartition('.')[2]} = " for key in (old, new))
            assert text.count(name) <= 1 or old_name == name, new
            text = text.replace(name, old_name)
    job.write_text(
        re.sub(r"\ncost_tolerance = (.*)\n(?s:(.*))\[rollout.cost\]", r"\n\2[rollout.cost]\ntolerance = \1", text)
    )
    events = run / "events.jsonl"
    lines = [json.dumps(with_earlier_names(json.loads(line))) for line in events.read_text().splitlines()]
    events.write_text("\n".join(lines) + '\n{"now":')


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A simulated run of this version with drafts and environments, so that most names occur in its journal."""
    return stored_simulation(
        tmp_path, "name=run", "steps=6", "task.multi_turn=yes", "workload.kind=agentic",
        "rollout.engine.speculation.num_speculative_tokens=4", "rollout.cost_tolerance=0.5",
    )  # fmt: skip


def files(folder: Path) -> dict[str, bytes]:
    """The contents of a run's files, but of its locks."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


def answers(run: Path) -> list[Any]:
    """The answers of the commands that read a run."""
    done = [
        command("store", "audit", run, "--json"),
        command("replay", run, "--json"),
        command("store", "show", run, "--json"),
        command("store", "show", run, "--longest", 5, "--json"),
    ]
    assert all(each.stdout for each in done), done
    return [json.loads(each.stdout.replace(str(run), "RUN")) for each in done]


def test_a_converted_run_is_read_and_replayed_as_before(run: Path, tmp_path: Path) -> None:
    config, before = loading.load(run / "config.toml"), answers(run)
    entries = list(journal.read(run / "events.jsonl"))
    make_earlier(run)
    stored = files(run)
    for question in (["resume"], ["replay"], ["simulate", "--from"]):
        refused = command(*question, run)
        assert refused.returncode == 2
        assert f"`staleflow store convert {run}` converts it" in refused.stderr
    converted = command("store", "convert", run, "--out", tmp_path / "out", "--json")
    assert converted.returncode == 0, converted.stderr
    assert json.loads(converted.stdout) == {"out": str(tmp_path / "out"), "jobs": 1, "entries": len(entries)}
    assert files(run) == stored, "the run is not changed"
    copy = files(tmp_path / "out")
    assert copy.keys() == stored.keys()
    assert {name for name in copy if copy[name] != stored[name]} == {"config.toml", "events.jsonl"}
    shutil.rmtree(run)
    (tmp_path / "out").rename(run)
    assert loading.load(run / "config.toml") == config
    read = journal.read(run / "events.jsonl")
    assert (list(read), read.torn_line) == (entries, len(entries) + 1)
    now = answers(run)
    assert now[1].pop("torn") and not before[1].pop("torn")
    assert now == before
    assert before[1]["difference"] == ""


def test_closed_parts_of_a_journal_stay_compressed(run: Path, tmp_path: Path) -> None:
    config = loading.load(run / "config.toml")
    entries = list(journal.read(run / "events.jsonl"))
    make_earlier(run)
    events = run / "events.jsonl"
    closed, _, torn = events.read_bytes().rpartition(b"\n")
    (run / "events.jsonl.0001.gz").write_bytes(gzip.compress(closed + b"\n"))
    events.write_bytes(json.dumps({journal.PART: 2}).encode() + b"\n" + torn)
    assert command("store", "convert", run).returncode == 0
    copy = run.with_name("run-converted")
    assert (copy / "events.jsonl.0001.gz").is_file()
    assert list(journal.read(copy / "events.jsonl")) == entries
    assert loading.load(copy / "config.toml") == config


def test_what_cannot_be_converted_is_refused_in_one_line(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def refused(*words: object) -> str:
        done = command("store", "convert", *map(str, words))
        assert done.returncode == 2, done.stderr
        (line,) = done.stderr.splitlines()
        return line

    assert "already of this version; nothing to convert" in refused(run, "--out", out)
    make_earlier(run)
    with lock_folder(run):
        words = [sys.executable, "-m", "staleflow.cli.main", "store", "convert", str(run)]
        done = subprocess.run(words, capture_output=True, text=True)  # another process
        assert done.returncode == 2
        assert "in use by process" in done.stderr
    out.mkdir()
    assert "already exists; choose another place" in refused(run, "--out", out)
    assert "no such run" in refused(tmp_path / "none")
    shutil.rmtree(run / "store")
    assert "the run has no store" in refused(run)


def test_a_conversion_that_is_killed_leaves_the_run_as_it_was(run: Path, tmp_path: Path) -> None:
    make_earlier(run)
    before = files(run)
    script = (
        "import os, signal\n"
        "from staleflow.pipeline.stored_runs import conversion\n"
        "conversion.convert_entry = lambda entry: os.kill(os.getpid(), signal.SIGKILL)\n"
        "from tests.commands import command\n"
        f"command('store', 'convert', {str(run)!r}, '--out', {str(tmp_path / 'out')!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, env=os.environ)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert files(run) == before
    assert command("store", "convert", run, "--out", tmp_path / "out").returncode == 0
    assert [path.name for path in tmp_path.glob(".*")] == [], "nothing is left of the first conversion"


def test_a_setting_that_is_no_more_is_left_out() -> None:
    job = {"rollout": {"pace_slack": 0.5}, "evaluation": {"fill": False}, "environment": {"isolation": "thread"}}
    assert job_conversion.convert_job(job) == {"rollout": {}, "evaluation": {}, "environment": {"isolation": "auto"}}


def test_a_run_whose_rule_only_simulations_have_is_refused_in_one_line(run: Path, tmp_path: Path) -> None:
    job = run / "config.toml"
    text = job.read_text()
    changed, times = re.subn(r'(\[staleness\.admission\]\nname = )"\w+"', r'\1"credits"', text)
    assert times == 1, text
    job.write_text(changed)
    refused = command("store", "convert", run, "--out", tmp_path / "converted")
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert "staleness.admission = 'credits', which only simulations have now" in line
    assert "read it with the version that wrote it" in line
