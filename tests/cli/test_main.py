"""General errors of the command line: unknown commands and options, conflicting modules, unwritable output."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from staleflow.cli.lazy import LazyGroup
from tests.commands import command, error_line

ROOT = Path(__file__).parents[2]


def run_by_shell(words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `staleflow WORDS` in a separate process by a shell."""
    shell = f"{sys.executable} -P -m staleflow.cli.main {words}"
    path = os.pathsep.join((*environment.pop("PYTHONPATH", "").split(), str(ROOT)))
    values = {**os.environ, **environment, "PYTHONPATH": path}
    return subprocess.run(["bash", "-c", shell], capture_output=True, text=True, env=values, timeout=60)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("rum x", "staleflow: no such command 'rum'; did you mean run or resume?; see staleflow -h"),
        ("audit x", "staleflow: no such command 'audit'; did you mean store audit?; see staleflow -h"),
        ("store lss", "staleflow store: no such command 'lss'; did you mean ls?; see staleflow store -h"),
        ("zzz", "staleflow: no such command 'zzz'; see staleflow -h"),
        ("run", "staleflow run: Missing argument 'CONFIG'; see staleflow run -h"),
    ],
)
def test_an_unknown_command_gives_one_line_with_the_nearest_name(words: str, line: str) -> None:
    assert error_line(*words.split()) == f"{line}\n"


def test_an_unknown_command_imports_no_command() -> None:
    group = LazyGroup(sections={"Commands": {"broken": ("no.such.module", "")}})
    with pytest.raises(click.UsageError, match="no such command 'brok'; did you mean broken"):
        group.resolve_command(click.Context(group), ["brok"])


def test_an_unknown_option_gives_one_line_with_the_nearest_name() -> None:
    line = error_line("store", "audit", "x", "--jsn")
    assert line.startswith("staleflow store audit: ") and "--json" in line


@pytest.mark.parametrize("words", [(), ("store",), ("store", "audit"), ("config", "explain")])
def test_h_is_help_for_every_command(words: tuple[str, ...]) -> None:
    short, long = command(*words, "-h"), command(*words, "--help")
    assert short.returncode == 0
    assert short.stdout == long.stdout
    assert short.stdout.startswith("Usage: staleflow")
    assert "-h, --help" in short.stdout


@pytest.mark.parametrize("words", ["config explain examples/dryrun.toml --no-check", "--help"])
def test_a_full_device_gives_a_one_line_error(words: str) -> None:
    answer = run_by_shell(f"{words} >/dev/full")
    assert answer.returncode == 1
    assert answer.stderr == "staleflow: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("name", ["tasks.py", "stores/__init__.py", "pipeline/__init__.py", "cli/__init__.py"])
def test_user_modules_with_the_names_of_our_packages_change_nothing(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("raise ImportError('a module of the user')\n")
    answer = run_by_shell("store ls", PYTHONPATH=str(tmp_path))
    assert (answer.returncode, answer.stderr) == (0, "")


def test_a_rejected_run_leaves_no_process(tmp_path: Path) -> None:
    """The fork server has started to import torch by then."""
    (tmp_path / "job.toml").write_text('[model]\npath = "runs/none"\n')
    words = [sys.executable, "-m", "staleflow.cli.main", "run", str(tmp_path / "job.toml")]
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        assert process.wait(timeout=60) == 2
    deadline = time.monotonic() + 60.0  # for a kill to be carried out
    while (left := session_processes(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def session_processes(leader: int) -> list[str]:
    """Return the command lines of the running processes of a session."""
    results = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, session = (path / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                results.append((path / "cmdline").read_text().replace("\0", " "))
    return results
