"""Code blocks and commands of pages: each command has an existing program, subcommand and options; each table has
existing keys.

Blocks of Python are parsed by tests/test_docs.py; those of docs/extending.md and docs/environments.md are run by
tests/config/test_extending.py and tests/tasks/test_tasks_page.py.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest

from staleflow.cli.main import cli
from tests.test_docs import PAGES, job_keys

OUTPUTS = {
    "docs/environments.md": ("<tool_call>",),
    "docs/placement.md": ("One GPU, which trainer and instance share:",),
    "docs/recipes.md": ("sums: met: ",),
    "docs/store.md": ("runs/NAME/",),
}
"""First lines of blocks that show output or stored data, by page."""
OTHER_PROGRAMS = {"cd", "docker", "for", "helm", "kubectl", "sbatch", "source", "ssh-keygen", "tail"}
"""Programs whose options are not checked."""
OWN_KEYS = {"rollout.routing.most", "training.loss.most"}
"""Keys that docs/extending.md adds."""
KEYS = job_keys(json.loads(Path("docs/job.schema.json").read_text()))
FREE_TABLES = ("options", "eval_options", "parts", "sets", "sources")
"""Tables of a job whose keys are names or arguments chosen by the user."""


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Return (language, text) of the fenced blocks of a page."""
    for match in re.finditer(r"^ *```(\S*)\n(.*?)^ *```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
        yield match[1], match[2]


def is_output(page: Path, text: str) -> bool:
    return text.lstrip().startswith(OUTPUTS.get(str(page), ("\0",)))


def commands(page: Path) -> Iterator[str]:
    """Return the commands of a page from its code blocks and inline code, without comments."""
    for language, text in blocks(page):
        if language in ("", "sh") and not is_output(page, text):
            # In docs/commands.md, the description of a command is to the right of it.
            end = r"\s{3,}|\s#\s" if page.name == "commands.md" else r"\s#\s"
            for line in filter(None, text.splitlines()):
                yield from re.split(r"\s&&\s", re.split(end, line)[0].strip())
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    yield from re.findall(r"`((?:staleflow|make|python|pip|pytest)\s[^`]+)`", prose)


def mistake(command: str) -> str:
    """Return what is wrong with a command of a page; empty if nothing is.

    >>> mistake("make demoo")
    'no target demoo'
    """
    words = [word for word in shlex.split(command) if word not in ("...", "&")]
    while words and re.fullmatch(r"\w+=\S*", words[0]):
        del words[0]
    program, rest = (words[0], words[1:]) if words else ("", [])
    if program == "staleflow":
        return staleflow_mistake(rest)
    if program == "make":
        targets = [word for word in rest if "=" not in word and not word.startswith("-")]
        missing = [
            t for t in targets if not re.search(rf"^{re.escape(t)}:", Path("Makefile").read_text(), re.MULTILINE)
        ]
        return f"no target {missing[0]}" if missing else ""
    if program in ("python", "python3"):
        return python_mistake(rest)
    if program == "pytest":
        missing = [word for word in rest if word.startswith("tests/") and not Path(word).exists()]
        return f"no such file: {missing[0]}" if missing else ""
    if program == "pip":
        return extras_mistake(command)
    if program == "dask":
        from distributed.cli.dask_worker import main as dask_worker

        return options_mistake(dask_worker, rest[1:]) if rest[:1] == ["worker"] else f"dask {rest[:1]}"
    return "" if program in OTHER_PROGRAMS else f"no such program: {program}"


def python_mistake(words: Sequence[str]) -> str:
    """Return what is wrong with the module or file that Python runs."""
    name = words[1] if words[0] == "-m" else words[0]
    there = importlib.util.find_spec(name) is not None if words[0] == "-m" else Path(name).exists()
    return "" if there else f"no such module or file: {name}"


def extras_mistake(command: str) -> str:
    """Return what is wrong with the extras of this package in an install command."""
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [name for group in re.findall(r"(?:\.|staleflow)\[([\w,-]+)\]", command) for name in group.split(",")]
    missing = [name for name in named if name not in extras]
    return f"no extra {missing[0]}" if missing else ""


def staleflow_mistake(words: Sequence[str]) -> str:
    """Return what is wrong with a staleflow command: subcommand, options or job keys.

    `A | B` are alternatives for the last subcommand or its argument.
    """
    group: Any = cli
    words = list(words)
    while words and isinstance(group, click.Group) and not words[0].startswith("-"):
        name = words.pop(0)
        if name == "|" or name.isupper():
            return ""
        command = group.get_command(click.Context(group), name)
        if command is None:
            return f"no such command: {name}"
        if not isinstance(command, click.Group):
            rest = words[: words.index("|")] if "|" in words else words
            other = words[words.index("|") + 1 :] if "|" in words else []
            is_command = bool(other) and group.get_command(click.Context(group), other[0]) is not None
            further = alternative_mistake(group, other) if is_command else ""
            return options_mistake(command, rest) or keys_mistake(rest) or further
        group = command
    return options_mistake(group, words)


def alternative_mistake(group: click.Group, words: Sequence[str]) -> str:
    """Return what is wrong with the first invalid alternative in `words`: `NAME ... | NAME ...`, subcommands of a
    group."""
    for part in " ".join(words).split(" | "):
        name, *rest = part.split()
        command = group.get_command(click.Context(group), name)
        if fault := f"no such command: {name}" if command is None else options_mistake(command, rest):
            return fault
    return ""


def options_mistake(command: click.Command, words: Sequence[str]) -> str:
    """Return the first option that a click command does not have."""
    try:
        command.make_parser(click.Context(command, info_name=command.name, **cli.context_settings)).parse_args(
            list(words)
        )
    except click.UsageError as error:
        return error.format_message()
    return ""


def keys_mistake(words: Sequence[str]) -> str:
    """Return the first key of a `--set` or `--sweep` that a job file does not have."""
    values = [value for option, value in itertools.pairwise(words) if option in ("--set", "--sweep")]
    missing = [value for value in values if value.partition("=")[0] not in KEYS]
    return f"no such key: {missing[0]}" if missing else ""


def keys_of_tables(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Return the dotted keys of a part of a job file."""
    for name, value in tree.items():
        yield prefix + name
        entries = value if isinstance(value, list) else [value]
        for entry in entries:
            if isinstance(entry, dict) and name not in FREE_TABLES:
                yield from keys_of_tables(entry, f"{prefix}{name}.")


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=str)
def test_commands_of_a_page_exist_with_their_options(page: Path) -> None:
    assert {command: fault for command in commands(page) if (fault := mistake(command))} == {}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_blocks_of_a_page_are_python_toml_commands_or_a_listed_output(page: Path) -> None:
    found = list(blocks(page))
    assert 2 * len(found) == len(re.findall(r"^ *```", page.read_text(), flags=re.MULTILINE))
    assert {language for language, _ in found} <= {"python", "toml", "sh", ""}
    assert len([text for language, text in found if is_output(page, text)]) == len(OUTPUTS.get(str(page), ()))
    for language, text in found:
        if language == "toml" and not text.startswith("# pyproject.toml"):
            assert set(keys_of_tables(tomllib.loads(text))) - KEYS - OWN_KEYS == set(), text


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("staleflow stor audit RUN", "no such command: stor"),
        ("staleflow store audit RUN --quick", "No such option"),
        ("staleflow run job.toml --set training.rate=1", "no such key: training.rate=1"),
        ("staleflow jobs | state ID", ""),
        ("staleflow jobs | status ID --all", "No such option"),
        ("make demoo", "no target demoo"),
        ("python -m benchmarks.nothing", "no such module or file: benchmarks.nothing"),
        ("python benchmarks/nothing.py", "no such module or file: benchmarks/nothing.py"),
        ("pytest tests/nothing.py", "no such file: tests/nothing.py"),
        ("pip install -e '.[nothing]'", "no extra nothing"),
        ("dask worker tcp://head:8786 --thread 1", "No such option"),
        ("stalefow run job.toml", "no such program: stalefow"),
    ],
)
def test_an_invalid_command_is_detected(command: str, fault: str) -> None:
    assert mistake(command).startswith(fault)
