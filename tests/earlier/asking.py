"""The questions the tests ask about a run of an earlier version, by the command line and plain files alone."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.commands import command

HERE = Path(__file__).parent
MADE_IN = "/tmp/earlier"
"""Folder the runs were made in; their job files name it."""
NAMES = ("finished", "killed", "resumed", "agent", "credits")
"""The fixtures: NAME.tar.gz and NAME.json."""
FEW_WORDS = 12
"""Of a column, that are counted one by one."""


def unpack(name: str, folder: Path) -> Path:
    """The run of a fixture, in a folder of its own together with its model and rewards, as if it was made there."""
    with tarfile.open(HERE / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    (run,) = (folder / "runs").iterdir()
    for job in run.glob("config*.toml"):
        job.write_text(job.read_text().replace(MADE_IN, str(folder)))
    return run


def converted(name: str, folder: Path) -> Path:
    """As `unpack`, converted to this version, in the same place."""
    run = unpack(name, folder)
    copy = run.with_name("converted")
    answer("store", "convert", run, "--out", copy)
    shutil.rmtree(run)
    return copy.rename(run)


def ask(run: Path) -> dict[str, Any]:
    """The answers of the command line about a run, by the question; its folder reads as {run} in them."""
    jobs = {
        job.name: json.loads(answer("config", "explain", job, "--json", "--no-check"))
        for job in sorted(run.glob("config*.toml"))
    }
    steps = json.loads(answer("store", "show", run, "--json"))
    (listed,) = json.loads(answer("store", "ls", run.parent, "--json"))
    audited = json.loads(answer("store", "audit", run, "--json"))
    audited.pop("num_tokens", None)  # of the arrays' extent, fill included; what is stored is summed below
    answers = {
        "config explain": {name: {row["key"]: row["value"] for row in rows} for name, rows in jobs.items()},
        "store ls": listed,
        "store audit": audited,
        "store show": steps,
        "store show --at-step": {
            str(record["step"]): json.loads(answer("store", "show", run, "--at-step", record["step"], "--json"))
            for record in steps
            if record["kind"] == "step"
        },
        "store show --longest": summed(json.loads(answer("store", "show", run, "--longest", 10**6, "--json"))),
        "replay": {k: v for k, v in json.loads(answer("replay", run, "--json")).items() if k != "story"},
        "replay --story": {
            str(id): len(json.loads(answer("replay", run, "--trajectory", id, "--json"))["story"])
            for id in range(0, 20, 5)
        },
    }
    named: dict[str, Any] = json.loads(json.dumps(answers).replace(str(run.parent.parent), "{folder}"))
    return named


def answer(*words: str | int | Path) -> str:
    """What `staleflow WORDS` prints, which must succeed."""
    done = command(*words)
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout


def exported(run: Path, branch: str) -> dict[str, Any]:
    """What `store export` writes of a branch, summed."""
    out = run.parent.parent / f"{branch}.jsonl"
    answer("store", "export", run, "--to", "jsonl", "--branch", branch, "--workers", 1, "--out", out)
    return summed([json.loads(line) for line in out.read_text().splitlines()])


def summed(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows by column, in the order of their ids: numbers by their sum and a digest of each, words by how often they
    occur if they are few. What is nested has columns of its own."""
    in_order = sorted(rows, key=lambda row: row["trajectory"] if "trajectory" in row else row["id"])
    columns: dict[str, list[Any]] = {}
    for row in in_order:
        for name, value in _leaves(row, ""):
            columns.setdefault(name, []).append(value)
    return {name: _sum(values) for name, values in columns.items()}


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _leaves(below, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for below in value:
            yield from _leaves(below, name)
    else:
        yield name, value


def _sum(values: list[Any]) -> Any:
    if all(isinstance(v, str) for v in values) and len(counts := Counter(values)) <= FEW_WORDS:
        return dict(sorted(counts.items()))
    numbers = [float(v) for v in values if isinstance(v, (int, float))]
    text = json.dumps([float(v) if isinstance(v, (int, float)) else v for v in values])
    return {"sum": math.fsum(numbers), "digest": hashlib.sha256(text.encode()).hexdigest()[:16]}


def trained_offline(run: Path) -> dict[str, Any]:
    """The result of `train-offline`, and the weights that it ends with, as a hash."""
    done: dict[str, Any] = json.loads(answer("train-offline", run, "--json"))
    (weights,) = Path(done["checkpoint"]).glob("*.safetensors")
    named = {key: value for key, value in done.items() if key not in ("out", "checkpoint", "before", "after")}
    scores = {
        key: {name: value for name, value in done[key].items() if isinstance(value, (int, float)) and name[-2:] != "_s"}
        for key in ("before", "after")
        if done[key]
    }
    return {**named, **scores, "weights": hashlib.sha256(weights.read_bytes()).hexdigest()}


def clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
