"""Malformed input to the commands: a helpful one-line error, the right exit code, no traceback.

The table is in malformed.py; cases that need a separate process are run by `python -m tests.cli.malformed`.
"""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path

import pytest

from tests.cli import malformed
from tests.cli.malformed_inputs import Case, furnish
from tests.commands import command

HERE = [case for case in malformed.CASES if not case.alone]


@pytest.fixture(scope="session")
def start_folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, finished_run: Path) -> Path:
    """The folder that cases copy; it is never changed."""
    folder = tmp_path_factory.mktemp("malformed") / "furnished"
    furnish(folder, tiny_model, finished_run)
    return folder


@pytest.fixture(scope="session")
def unprepared_folder(start_folder: Path) -> Path:
    """The folder of all cases that change no file before their command."""
    folder = start_folder.with_name("unprepared")
    malformed.prepare((), folder, start_folder)
    return folder


@pytest.mark.usefixtures("short_connect")
@pytest.mark.parametrize("case", HERE, ids=lambda case: case.name)
def test_malformed_input_gives_a_one_line_error(
    case: Case, start_folder: Path, unprepared_folder: Path, tmp_path: Path
) -> None:
    folder = unprepared_folder
    if case.prepare:
        folder = tmp_path / "here"
        malformed.prepare(case.prepare, folder, start_folder)
    with contextlib.chdir(folder):
        answer = command(*shlex.split(case.command))
    assert malformed.output_faults(case, answer.returncode, answer.stdout, answer.stderr) == []


def test_case_names_are_unique() -> None:
    names = [case.name for case in malformed.CASES]
    assert len(names) == len(set(names)) >= 200
