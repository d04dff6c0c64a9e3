"""Kinds of task sources: what `KIND:NAME` in a job file stands for. Pure: a kind's code is loaded where it runs.

A package adds a kind as an entry point of the group `staleflow.sources`, which names a SourceKind:

    [project.entry-points."staleflow.sources"]
    dungeon = "my_package.kinds:DUNGEON"

    DUNGEON = SourceKind(form="dungeon:LEVEL", type=SourceType.ENVIRONMENT, opens="my_package.levels:open_level")
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from staleflow.stores.errors import ConfigError
from staleflow.tasks.settings import extensions, user_code

GROUP = "staleflow.sources"
"""The group of entry points that add kinds."""


class SourceType(Enum):
    """What tasks of a kind are, and so what its `opens` is.

    ROWS: rows of a data set; `(name, options, where) -> Rows`. PROCEDURAL: prompts with a verifier, made by code;
    `(name, options, seed, key) -> TaskSource`. ENVIRONMENT: episodes of many turns; `(name, options, where)` returns a
    function that makes objects with reset and step. AGENT: programs that ask for their turns over HTTP;
    `(name, options, where) -> LoadedAgent`.

    where: `task.source = 'KIND:NAME'`, for messages; key: the part before the equals sign.
    """

    ROWS = "rows"
    PROCEDURAL = "procedural"
    ENVIRONMENT = "environment"
    AGENT = "agent"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceKind:
    """A kind of task source."""

    form: str
    """What a job file says, such as `textarena:GAME`."""
    type: SourceType
    opens: str
    """The function that opens a source, as module:function; see SourceType."""
    packages: tuple[str, ...] = ()
    """Packages that must be installed where it runs."""
    install: str = ""
    """What pip installs to have them."""
    repeatable: bool = False
    """Of environments: whether equal turns get equal answers, so that an episode can be played again after a loss."""
    blocking: bool = True
    """Of environments: whether a step keeps its thread, so that each episode needs a process."""
    names_file: bool = False
    """Of rows: whether NAME is always a file or folder; else it may be fetched under that name."""
    names_code: bool = False
    """Whether NAME is user code, file.py:NAME."""
    plays_rows: bool = False
    """Of environments: whether tasks are the rows of the data set that the option `rows` names; `opens` gets them."""
    gets_tokenizer: bool = False
    """Whether the option `tokenizer` is the model's folder unless it is set."""

    @property
    def name(self) -> str:
        return self.form.partition(":")[0]

    @property
    def has_turns(self) -> bool:
        """Whether an environment answers each turn of the model."""
        return self.type in (SourceType.ENVIRONMENT, SourceType.AGENT)

    def check_installed(self, where: str) -> None:
        """Raise ConfigError if a package that it needs is not installed. where: for messages. Loads none."""
        for package in self.packages:
            if not is_installed(package):
                raise ConfigError(f"{where}: needs the package {package}; pip install {self.install or package}")

    def open(self, *arguments: Any, where: str) -> Any:
        """What `opens` returns; see SourceType. Raises ConfigError."""
        self.check_installed(where)
        return user_code.load(self.opens, f"{where}: opens")(*arguments)


KINDS: dict[str, SourceKind] = {
    kind.name: kind
    for kind in (
        SourceKind(
            form="reasoning_gym:DATASET",
            type=SourceType.PROCEDURAL,
            opens="staleflow.tasks.sources.reasoning_gym_tasks:ReasoningGym",
            packages=("reasoning_gym",),
            install="reasoning-gym",
        ),
        SourceKind(
            form="jsonl:FILE",
            type=SourceType.ROWS,
            opens="staleflow.tasks.sources.dataset_rows:JsonLines",
            names_file=True,
        ),
        SourceKind(
            form="parquet:FILE",
            type=SourceType.ROWS,
            opens="staleflow.tasks.sources.dataset_rows:ParquetRows",
            packages=("pyarrow",),
            install="'staleflow[datasets]'",
            names_file=True,
        ),
        SourceKind(
            form="datasets:FOLDER_OR_HUB_NAME",
            type=SourceType.ROWS,
            opens="staleflow.tasks.sources.dataset_rows:DatasetRows",
            packages=("datasets",),
            install="'staleflow[datasets]'",
        ),
        # A game may search the network, and textarena's draw from Python's own random numbers; the process that each
        # has to itself makes those its own.
        SourceKind(
            form="textarena:GAME",
            type=SourceType.ENVIRONMENT,
            opens="staleflow.tasks.episodes.textarena_games:open_game",
            packages=("textarena",),
            install="'staleflow[textarena]'",
            repeatable=True,
        ),
        SourceKind(
            form="gymnasium:ID",
            type=SourceType.ENVIRONMENT,
            opens="staleflow.tasks.episodes.gymnasium_games:open_game",
            packages=("gymnasium",),
            install="'staleflow[gymnasium]'",
            repeatable=True,
        ),
        SourceKind(
            form="skyrl_gym:ID",
            type=SourceType.ENVIRONMENT,
            opens="staleflow.tasks.episodes.skyrl_games:open_game",
            packages=("skyrl_gym",),
            install="'staleflow[skyrl-gym]'",
            plays_rows=True,
        ),
        SourceKind(
            form="agent:FILE.py:NAME",
            type=SourceType.AGENT,
            opens="staleflow.tasks.episodes.agents:load_agent",
            names_code=True,
        ),
        SourceKind(
            form="verifiers:TASKSET",
            type=SourceType.AGENT,
            opens="staleflow.tasks.episodes.verifiers_agents:load_taskset",
            packages=("verifiers",),
            gets_tokenizer=True,
        ),
        SourceKind(
            form="openenv:URL_OR_PACKAGE",
            type=SourceType.AGENT,
            opens="staleflow.tasks.episodes.openenv_agents:load_environment",
            packages=("openenv", "openai"),
        ),
    )
}
"""Our own kinds by name."""


def forms(*types: SourceType) -> str:
    """What a job file may say, of our own kinds of these types."""
    return ", ".join(kind.form for kind in KINDS.values() if kind.type in types)


def all_forms() -> str:
    """What a job file may say, of all kinds; those of installed packages as `KIND:NAME`."""
    added = "".join(f"{name}:NAME, " for name in extensions.installed(GROUP) if name not in KINDS)
    return (
        f"{forms(SourceType.PROCEDURAL, SourceType.ROWS)}, {added}an environment of many turns "
        f"({forms(SourceType.ENVIRONMENT)}), an agent that asks over HTTP ({forms(SourceType.AGENT)})"
    )


def kind_of(source: str) -> SourceKind | None:
    """The kind of a source; None if it names user code, or nothing. Raises ConfigError for a kind whose package cannot
    be loaded."""
    name, _, rest = source.partition(":")
    if not rest or name in KINDS or name not in extensions.installed(GROUP):
        return KINDS.get(name) if rest else None
    kind = extensions.load(GROUP, name)
    if not isinstance(kind, SourceKind) or kind.name != name:
        raise ConfigError(
            f"{GROUP}: {name!r} of the package {extensions.package_of(extensions.installed(GROUP)[name])} must be a "
            f"SourceKind whose form begins with {name}:, not {kind!r}"
        )
    return kind


def is_environment(source: str, key: str) -> bool:
    """Whether a task source is an environment of many turns. key: of the job file. Loads a user's file, and of a
    package only what describes its kind. Raises ConfigError."""
    if (kind := kind_of(source)) is not None:
        return kind.has_turns
    return bool(source.partition(":")[2]) and has_turns(user_code.load(source, key))


def is_agent(source: str) -> bool:
    """Whether a task source is an agent that asks for its turns over HTTP. Raises ConfigError."""
    kind = kind_of(source)
    return kind is not None and kind.type is SourceType.AGENT


def has_turns(code: Any) -> bool:
    """Whether a user's class or function is an environment of many turns."""
    if isinstance(code, type):
        return callable(getattr(code, "reset", None)) and callable(getattr(code, "step", None))
    return inspect.iscoroutinefunction(code)


def open_source(type: SourceType, source: str, options: Mapping[str, Any], where: str) -> Any:
    """Open a source named `KIND:NAME`, of a kind of this type. where: its key and name, for messages. Raises
    ConfigError."""
    kind = kind_of(source)
    if kind is None or kind.type is not type:
        raise ConfigError(f"{where}: expected {forms(type)}")
    return kind.open(source.partition(":")[2], options, where, where=where)


def is_installed(package: str) -> bool:
    """Whether a package can be imported. Does not import it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # it is marked as one that cannot be imported
        return False
