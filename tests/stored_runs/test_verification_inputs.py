"""`staleflow verify` with damaged and malformed files: one line and exit code 2 for invalid input, a report and exit
code 1 for a contradicted run, never a traceback, and never "verified" for what was not checked."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from staleflow.pipeline.stored_runs import training
from tests.commands import command, error_line
from tests.stored_runs.in_process import repeat_in_this_process  # noqa: F401  used by name

CHECKPOINT = "checkpoints/step-000003"
CERTIFICATE = f"{CHECKPOINT}/certificate.json"
POINT = "resume/v00000001.pt"
DEEP = "[" * 100_000
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def offline(stored: Path) -> Path:
    """An offline training of the stored run."""
    out = stored.parent / "offline"
    training.train(training.make_plan(stored, out), lambda _: None)
    return out


def text(name: str, content: str | bytes) -> Change:
    return lambda run: (run / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def remove(name: str) -> Change:
    return lambda run: (run / name).unlink()


def truncate(name: str, num_bytes: int) -> Change:
    return lambda run: os.truncate(run / name, num_bytes)


def values(name: str, **changes: Any) -> Change:
    """Change values of a JSON file."""

    def change(run: Path) -> None:
        (run / name).write_text(json.dumps({**json.loads((run / name).read_text()), **changes}))

    return change


def without_key(name: str, key: str) -> Change:
    def change(run: Path) -> None:
        kept = json.loads((run / name).read_text())
        del kept[key]
        (run / name).write_text(json.dumps(kept))

    return change


def last_line(**changes: Any) -> Change:
    """Change values of the last line of a history."""

    def change(run: Path) -> None:
        *before, last = (run / "history.jsonl").read_text().splitlines()
        lines = [*before, json.dumps({**json.loads(last), **changes})]
        (run / "history.jsonl").write_text("".join(f"{line}\n" for line in lines))

    return change


def point(state: Any) -> Change:
    return lambda run: torch.save(state, run / POINT)


def link_file(run: Path) -> None:
    (run / "code").mkdir()
    (run / "code" / os.fsdecode(b"\xff.py")).write_text("x = 1\n")


NO_CERTIFICATE: list[tuple[str, Change]] = [
    *((str(content)[:9], text(CERTIFICATE, content)) for content in ("", "{", b"\xff", "[]", "3", "NaN", DEEP)),
    *(
        (f"version {value}", values(CERTIFICATE, version=value))
        for value in ("3", 0, -1, 2.5, True, None, 10**30, float("nan"), float("inf"))
    ),
    *((f"entry {value}", values(CERTIFICATE, entry=value)) for value in ("none", "", None, 3, "a\x1b[2J")),
    ("version 9, entry none", values(CERTIFICATE, version=9, entry="none")),
    ("store", values(CERTIFICATE, store=["s3://"])),
    *((f"no {key}", without_key(CERTIFICATE, key)) for key in ("run", "store", "version", "entry")),
    ("none", remove(CERTIFICATE)),
]
CONTRADICTED: list[tuple[str, Change, str]] = [
    ("a later version", values(CERTIFICATE, version=9), "certificate.json: it names the entry"),
    ("another entry", values(CERTIFICATE, entry="0" * 64), "certificate.json: it names the entry"),
    ("no weights", remove(f"{CHECKPOINT}/model.safetensors"), "cannot be loaded"),
    ("cut weights", truncate(f"{CHECKPOINT}/model.safetensors", 1000), "cannot be loaded"),
    ("empty weights", truncate(f"{CHECKPOINT}/model.safetensors", 0), "cannot be loaded"),
    ("no architecture", remove(f"{CHECKPOINT}/config.json"), "cannot be loaded"),
    ("another architecture", values(f"{CHECKPOINT}/config.json", rope_theta=9.0), "config.json is not the file"),
    ("no tokenizer", remove(f"{CHECKPOINT}/tokenizer.json"), "tokenizer.json is missing"),
    ("another file", text(f"{CHECKPOINT}/more.bin", "{}"), "more.bin: the run saves no such"),
    ("another type", point([1, 2]), "resume point of version 1"),
    ("an empty state", point({}), "resume point of version 1"),
    ("another state", point({"model": 3}), "resume point of version 1"),
    ("fingerprints", text("fingerprints.json", DEEP), "fingerprints.json: "),
    ("fingerprints that are none", text("fingerprints.json", "[]"), "fingerprints.json: "),
    ("code of a name that is no text", link_file, "code: it is not the user code"),
]
NO_TRAINING: list[tuple[str, Change]] = [
    *(
        (f"history {str(content)[:9]}", text("history.jsonl", content))
        for content in ("", "{", b"\xff\n", "[]\n", DEEP)
    ),
    *((f"record {content[:9]}", text("offline.json", content)) for content in ("{", "[]", DEEP)),
    *(
        (f"{key} {value}", values("offline.json", **{key: value}))
        for key in ("store", "snapshot", "steps", "epochs", "start")
        for value in (None, -1, [1], "")
    ),
    ("no where", without_key("offline.json", "where")),
    *((f"{key} of the last line", last_line(**{key: None})) for key in ("batch", "weights", "numerics", "previous")),
    ("no end", lambda run: truncate("history.jsonl", (run / "history.jsonl").stat().st_size - 1)(run)),
]


def copy_run(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def verify_error(*args: str | Path) -> str:
    """Return the line by which `staleflow verify` rejects its input."""
    line = error_line("verify", *args)
    assert line.startswith("staleflow: ") and "Traceback" not in line and "\x1b" not in line
    return line


@pytest.mark.parametrize("change", [pytest.param(c, id=name) for name, c in NO_CERTIFICATE])
def test_a_malformed_certificate_is_rejected(stored: Path, tmp_path: Path, change: Change) -> None:
    run = copy_run(stored, tmp_path)
    change(run)
    assert "certificate.json" in verify_error(run / CHECKPOINT)


@pytest.mark.parametrize(("change", "message"), [pytest.param(c, says, id=name) for name, c, says in CONTRADICTED])
def test_damage_contradicts_the_run(stored: Path, tmp_path: Path, change: Change, message: str) -> None:
    run = copy_run(stored, tmp_path)
    change(run)
    result = command("verify", run / CHECKPOINT, "--steps", 3)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert result.stdout.startswith(f"{run / CHECKPOINT}: CONTRADICTED")
    (found,) = (line for line in result.stdout.splitlines() if line.startswith("  contradicted: "))
    assert message in found


@pytest.mark.parametrize("change", [pytest.param(c, id=name) for name, c in NO_TRAINING])
def test_a_malformed_offline_training_is_rejected(offline: Path, tmp_path: Path, change: Change) -> None:
    folder = copy_run(offline, tmp_path)
    change(folder)
    verify_error(folder)


def test_a_history_whose_last_line_is_not_the_checkpoint_is_contradicted(offline: Path, tmp_path: Path) -> None:
    folder = copy_run(offline, tmp_path)
    last_line(reward=2.0)(folder)
    result = command("verify", folder / CHECKPOINT)
    assert result.returncode == 1 and "contradicted: history.jsonl: its last line, 2, is not the one" in result.stdout
    shutil.rmtree(folder / "checkpoints")
    result = command("verify", folder)
    assert "not verified: the last line of history.jsonl" in result.stdout
    assert "not verified: the weights of step-000003" in result.stdout


def test_a_moved_checkpoint_names_its_run(stored: Path, tmp_path: Path) -> None:
    run = copy_run(stored, tmp_path)
    moved = Path(shutil.move(run / CHECKPOINT, tmp_path / "moved"))
    for store in ("", str(run / "store"), "s3:/x"):
        values("certificate.json", store=store)(moved)
        assert "move it into checkpoints/ of job" in verify_error(moved)


@pytest.mark.parametrize("steps", ["0", "-1", "x"])
def test_a_number_of_steps_out_of_range_is_rejected(stored: Path, steps: str) -> None:
    assert "--steps" in error_line("verify", stored, "--steps", steps)


def test_an_invalid_path_is_rejected() -> None:
    verify_error("x" * 5000)


def test_files_without_a_resume_point_name_are_ignored(stored: Path, tmp_path: Path) -> None:
    run = copy_run(stored, tmp_path)
    shutil.copy(run / POINT, run / "resume" / "vabc.pt")
    (run / "resume" / "v00000002.shards").mkdir()
    result = command("verify", run, "--steps", 1_000_000)
    assert result.returncode == 0, result.stdout
    assert "3 of 3 steps repeated bit for bit" in result.stdout
