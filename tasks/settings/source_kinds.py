"""Kinds of task sources, which a job file names as `KIND:NAME`. Pure: the code of a kind is loaded where it runs.

A package adds a kind as an entry point of the group `staleflow.sources`, which names a SourceKind:

    [project.entry-points."staleflow.sources"]
    dungeon = "my_package.kinds:DUNGEON"

    DUNGEON = SourceKind(syntax="dungeon:LEVEL", type=SourceType.ENVIRONMENT, opener="my_package.levels:open_level")
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
"""Name of the entry point group for kinds."""


class SourceType(Enum):
    """Types of task sources, with the signature of the function that opens a source of the type.

    In the signatures, `label` is `task.source = 'KIND:NAME'`, for messages, and `key` the part before the equals sign.
    """

    ROWS = "rows"
    """Rows of a data set: `(name, options, label) -> Rows`."""
    PROCEDURAL = "procedural"
    """Generated prompts with a verifier: `(name, options, seed, key) -> TaskSource`."""
    ENVIRONMENT = "environment"
    """Episodes of several turns: `(name, options, label)` returns a function that creates objects with reset and
    step."""
    AGENT = "agent"
    """Programs that request their turns over HTTP: `(name, options, label) -> LoadedAgent`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceKind:
    """A kind of task source."""

    syntax: str
    """Form of a source's name in a job file, such as `textarena:GAME`."""
    type: SourceType
    opener: str
    """The function that opens a source, as module:function; see SourceType for its signature."""
    packages: tuple[str, ...] = ()
    """Packages that must be installed where the source is opened."""
    install: str = ""
    """Argument of `pip install` that installs these packages; empty: their name."""
    repeatable: bool = False
    """For environments: whether equal turns get equal replies, so that a lost episode can be replayed."""
    blocking: bool = True
    """For environments: whether a step blocks its thread, so that each episode needs a process."""
    name_is_path: bool = False
    """For rows: whether NAME is always a file or folder; otherwise it may also name a data set on the hub."""
    name_is_code: bool = False
    """Whether NAME is user code, file.py:NAME."""
    takes_rows: bool = False
    """For environments: whether the tasks are rows of the data set in the option `rows`; `opener` also receives
    the Rows and their DataUse."""
    needs_tokenizer: bool = False
    """Whether the option `tokenizer` defaults to the model's folder."""

    @property
    def name(self) -> str:
        return self.syntax.partition(":")[0]

    @property
    def has_turns(self) -> bool:
        """Whether an environment answers each turn of the model."""
        return self.type in (SourceType.ENVIRONMENT, SourceType.AGENT)

    def check_installed(self, label: str) -> None:
        """Raise ConfigError if a package that the kind needs is not installed. Imports none of them. label: for
        messages."""
        for package in self.packages:
            if not is_installed(package):
                raise ConfigError(f"{label}: needs the package {package}; pip install {self.install or package}")

    def open(self, *arguments: Any, label: str) -> Any:
        """Open a source of this kind: load `opener` and call it. The result depends on the type; see SourceType. Raises
        ConfigError."""
        self.check_installed(label)
        return user_code.load(self.opener, f"{label}: opener")(*arguments)


KINDS: dict[str, SourceKind] = {
    kind.name: kind
    for kind in (
        SourceKind(
            syntax="reasoning_gym:DATASET",
            type=SourceType.PROCEDURAL,
            opener="staleflow.tasks.sources.reasoning_gym_tasks:ReasoningGym",
            packages=("reasoning_gym",),
            install="reasoning-gym",
        ),
        SourceKind(
            syntax="jsonl:FILE",
            type=SourceType.ROWS,
            opener="staleflow.tasks.sources.dataset_rows:JsonLines",
            name_is_path=True,
        ),
        SourceKind(
            syntax="parquet:FILE",
            type=SourceType.ROWS,
            opener="staleflow.tasks.sources.dataset_rows:ParquetRows",
            packages=("pyarrow",),
            install="'staleflow[datasets]'",
            name_is_path=True,
        ),
        SourceKind(
            syntax="datasets:FOLDER_OR_HUB_NAME",
            type=SourceType.ROWS,
            opener="staleflow.tasks.sources.dataset_rows:DatasetsPackageRows",
            packages=("datasets",),
            install="'staleflow[datasets]'",
        ),
        # Games use Python's global random numbers, and may use the network. Each episode runs in its own process.
        SourceKind(
            syntax="textarena:GAME",
            type=SourceType.ENVIRONMENT,
            opener="staleflow.tasks.episodes.textarena_games:open_game",
            packages=("textarena",),
            install="'staleflow[textarena]'",
            repeatable=True,
        ),
        SourceKind(
            syntax="gymnasium:ID",
            type=SourceType.ENVIRONMENT,
            opener="staleflow.tasks.episodes.gymnasium_games:open_game",
            packages=("gymnasium",),
            install="'staleflow[gymnasium]'",
            repeatable=True,
        ),
        SourceKind(
            syntax="skyrl_gym:ID",
            type=SourceType.ENVIRONMENT,
            opener="staleflow.tasks.episodes.skyrl_games:open_game",
            packages=("skyrl_gym",),
            install="'staleflow[skyrl-gym]'",
            takes_rows=True,
        ),
        SourceKind(
            syntax="agent:FILE.py:NAME",
            type=SourceType.AGENT,
            opener="staleflow.tasks.episodes.agents:load_agent",
            name_is_code=True,
        ),
        SourceKind(
            syntax="verifiers:TASKSET",
            type=SourceType.AGENT,
            opener="staleflow.tasks.episodes.verifiers_agents:load_taskset",
            packages=("verifiers",),
            needs_tokenizer=True,
        ),
        SourceKind(
            syntax="openenv:URL_OR_PACKAGE",
            type=SourceType.AGENT,
            opener="staleflow.tasks.episodes.openenv_agents:load_environment",
            packages=("openenv", "openai"),
        ),
    )
}
"""The built-in kinds, by name."""


def syntax_of_types(*types: SourceType) -> str:
    """Return the syntax of sources of these types, built-in kinds only, for messages."""
    return ", ".join(kind.syntax for kind in KINDS.values() if kind.type in types)


def all_syntax() -> str:
    """Return the syntax of sources of all kinds, for messages; those of installed packages as `KIND:NAME`."""
    package_forms = "".join(f"{name}:NAME, " for name in extensions.entry_points_of(GROUP) if name not in KINDS)
    return (
        f"{syntax_of_types(SourceType.PROCEDURAL, SourceType.ROWS)}, {package_forms}an environment of many turns "
        f"({syntax_of_types(SourceType.ENVIRONMENT)}), an agent that asks over HTTP "
        f"({syntax_of_types(SourceType.AGENT)})"
    )


def kind_of(source: str) -> SourceKind | None:
    """Return the kind of a source `KIND:NAME`; None if the source is user code, or empty. Raises ConfigError if the
    package of the kind cannot be loaded."""
    name, _, rest = source.partition(":")
    # A user's file is no package's name: finding those reads the metadata of every installed package.
    if not rest or name in KINDS or name.endswith(".py") or name not in extensions.entry_points_of(GROUP):
        return KINDS.get(name) if rest else None
    kind = extensions.load(GROUP, name)
    if not isinstance(kind, SourceKind) or kind.name != name:
        raise ConfigError(
            f"{GROUP}: {name!r} of the package {extensions.package_of(extensions.entry_points_of(GROUP)[name])} must "
            f"be a SourceKind whose syntax begins with {name}:, not {kind!r}"
        )
    return kind


def is_environment(source: str, key: str) -> bool:
    """Whether a task source is an environment of several turns. Loads user code, but only the SourceKind of a package.
    Raises ConfigError. key: the key in the job file, for messages."""
    if (kind := kind_of(source)) is not None:
        return kind.has_turns
    return bool(source.partition(":")[2]) and has_turns(user_code.load(source, key))


def is_agent(source: str) -> bool:
    """Whether a task source is an agent, which requests its turns over HTTP. Raises ConfigError."""
    kind = kind_of(source)
    return kind is not None and kind.type is SourceType.AGENT


def has_turns(code: Any) -> bool:
    """Whether a user's class or function is an environment of several turns."""
    if isinstance(code, type):
        return callable(getattr(code, "reset", None)) and callable(getattr(code, "step", None))
    return inspect.iscoroutinefunction(code)


def open_source(type: SourceType, source: str, options: Mapping[str, Any], label: str) -> Any:
    """Open the source `KIND:NAME`, whose kind must have this type. Raises ConfigError. label: its key and name, for
    messages."""
    kind = kind_of(source)
    if kind is None or kind.type is not type:
        raise ConfigError(f"{label}: expected {syntax_of_types(type)}")
    return kind.open(source.partition(":")[2], options, label, label=label)


def is_installed(package: str) -> bool:
    """Whether a package can be imported. Does not import it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # the module in sys.modules has no spec
        return False
