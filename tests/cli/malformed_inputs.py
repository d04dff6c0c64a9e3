"""Inputs of the cases of malformed.py: a folder with a valid job, data, model and run, and functions that corrupt
it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.simulated_store import stored_simulation

JOB = """
name = "mine"
steps = 2

[model]
path = "model"

[task]
source = "jsonl:data.jsonl"
eval_prompts = 2

[batch]
groups_per_step = 2
group_size = 2

[rollout]
max_new_tokens = 16

[rollout.engine]
max_running = 8
kv_tokens = 512

[cluster]
dashboard = false
"""
ROW = '{"prompt": "1 + 2 =", "answer": "3"}\n'
ROWS = "".join(ROW.replace("1 + 2", f"{i} + 2").replace('"3"', f'"{i + 2}"') for i in range(20))

Prepare = Callable[[Path], object]
"""Changes the folder in which the command then runs."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A malformed input. command: arguments of `staleflow` in a folder made by `furnish`. says: words of the error
    line. code: exit code. alone: whether it needs a separate process. lines: maximum number of output lines."""

    name: str
    command: str
    says: tuple[str, ...]
    code: int = 2
    prepare: tuple[Prepare, ...] = ()
    alone: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    redirect: str = ""
    lines: int = 1


def furnish(folder: Path, model: Path, run: Path) -> None:
    """Create a folder with a valid job.toml and its data.jsonl, a model, and the stored runs runs/finished (a copy of
    `run`) and runs/emulated."""
    shutil.copytree(model, folder / "model")
    shutil.copytree(run, folder / "runs/finished")
    for job in (folder / "runs/finished").glob("config*.toml"):
        job.write_text(job.read_text().replace(str(model), str(folder / "model")))
    stored_simulation(folder / "runs", "name=emulated")
    (folder / "job.toml").write_text(JOB)
    (folder / "data.jsonl").write_text(ROWS)


def replace_run_folder(folder: Path, before: Path) -> None:
    """Replace a folder in the job files of the stored runs."""
    for job in folder.glob("runs/*/config*.toml"):
        job.write_text(job.read_text().replace(str(before), str(folder)))


# -- preparations ----------------------------------------------------------------------------------------------------


def write_text(name: str, content: str | bytes) -> Prepare:
    """Write a file."""

    def prepare(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    return prepare


def rewrite(name: str, change: Callable[[str], str]) -> Prepare:
    """Rewrite a text file."""

    def prepare(folder: Path) -> None:
        path = folder / name
        path.write_text(change(path.read_text()))

    return prepare


def replace_text(name: str, old: str, new: str) -> Prepare:
    """Replace a text in a file that contains it."""

    def change(before: str) -> str:
        assert old in before, (name, old)
        return before.replace(old, new)

    return rewrite(name, change)


def truncate(name: str, share: float) -> Prepare:
    """Truncate a file to a share of its size."""

    def prepare(folder: Path) -> None:
        path = folder / name
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * share)])

    return prepare


def remove(name: str) -> Prepare:
    """Remove a file or folder."""

    def prepare(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return prepare


def make_empty_folder(name: str) -> Prepare:
    return lambda folder: (folder / name).mkdir(parents=True)


def flip_bits(pattern: str) -> Prepare:
    """Flip bits in the middle of the largest matching file."""

    def prepare(folder: Path) -> None:
        path = max(folder.glob(pattern), key=lambda p: p.stat().st_size)
        data = bytearray(path.read_bytes())
        for i in range(len(data) // 2, min(len(data), len(data) // 2 + 16)):
            data[i] ^= 0xFF
        path.write_bytes(data)

    return prepare


def write_reward(body: str) -> Prepare:
    """Write mine.py with a reward function f of this body."""
    return write_text("mine.py", "import os, sys, time\n\ndef f(answer, record):\n    " + body + "\n")


def make_run_without_steps(folder: Path) -> None:
    """Create runs/early, a run killed before its first step was stored."""
    from staleflow.stores.trajectories.records import RunHeader
    from staleflow.stores.trajectories.versioned import VersionedStore

    shutil.copytree(folder / "runs/finished", folder / "runs/early", ignore=shutil.ignore_patterns("store", "resume"))
    header = RunHeader(run="early", eta=1, groups_per_step=4, group_size=4, members_started_per_group=5)
    VersionedStore.create(folder / "runs/early/store", header)


def make_small_vocabulary(folder: Path) -> None:
    """Create small/, the model with its first three tokens only."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(folder / "model", folder / "small")
    config = folder / "small/config.json"
    config.write_text(re.sub(r'"vocab_size": \d+', '"vocab_size": 3', config.read_text()))
    weights = folder / "small/model.safetensors"
    tensors = load_file(weights)
    save_file({k: v[:3].copy() if "embed" in k or "lm_head" in k else v for k, v in tensors.items()}, weights)
