"""The command's own messages: wrong commands and options, what is in its way, and outputs that take no more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import command

ROOT = Path(__file__).parents[2]


def alone(words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What `staleflow WORDS` answers as a process of its own, by a shell."""
    shell = f"{sys.executable} -P -m cli.main {words}"
    path = os.pathsep.join((*environment.pop("PYTHONPATH", "").split(), str(ROOT)))
    given = {**os.environ, **environment, "PYTHONPATH": path}
    return subprocess.run(["bash", "-c", shell], capture_output=True, text=True, env=given, timeout=60)


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
def test_a_wrong_command_is_one_line_with_the_nearest_name(words: str, line: str) -> None:
    answer = command(*words.split())
    assert (answer.returncode, answer.stdout, answer.stderr) == (2, "", f"{line}\n")


def test_a_wrong_option_is_one_line_with_the_nearest_name() -> None:
    answer = command("store", "audit", "x", "--jsn")
    assert answer.returncode == 2
    assert answer.stderr.startswith("staleflow store audit: ")
    assert "--json" in answer.stderr
    assert answer.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [(), ("store",), ("store", "audit"), ("config", "explain")])
def test_h_is_help_everywhere(words: tuple[str, ...]) -> None:
    short, long = command(*words, "-h"), command(*words, "--help")
    assert short.returncode == 0
    assert short.stdout == long.stdout
    assert short.stdout.startswith("Usage: staleflow")
    assert "-h, --help" in short.stdout


@pytest.mark.parametrize("words", ["config explain examples/dryrun.toml --no-check", "--help"])
def test_a_full_device_is_one_line(words: str) -> None:
    answer = alone(f"{words} >/dev/full")
    assert answer.returncode == 1
    assert answer.stderr == "staleflow: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("name", ["tasks.py", "stores/__init__.py", "pipeline/__init__.py"])
def test_a_module_of_the_users_own_that_is_in_the_way_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("x = 1\n")
    answer = alone("store ls", PYTHONPATH=str(tmp_path))
    other = path if name == "tasks.py" else path.parent
    assert answer.returncode == 2
    assert answer.stderr == (
        f"staleflow: {other} is imported in place of our own `{other.stem}`; rename it, or take its folder off "
        "PYTHONPATH\n"
    )
