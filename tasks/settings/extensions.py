"""Names that installed packages add to job files, through entry points.

    [project.entry-points."staleflow.rewards"]
    cosine = "my_package.rewards:cosine"

Names are read from the metadata of packages; the code behind a name is imported when a job selects it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from staleflow.stores.errors import ConfigError, raised_as, type_and_message

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def entry_points_of(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group by name; none for an empty group name. Imports none of them."""
    return _find_entry_points(group, tuple(sys.path)) if group else {}


@functools.lru_cache(maxsize=64)
def _find_entry_points(group: str, path: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    """Find the entry points of a group. path: sys.path, part of the cache key because it determines the packages."""
    from importlib.metadata import entry_points  # importing it takes a fifth of an environment process's start

    return {point.name: point for point in entry_points(group=group)}


def load(group: str, name: str) -> Any:
    """Import the object that a package adds under a name. Raises ConfigError with the package's name."""
    entry_point = entry_points_of(group)[name]
    problem, remedy = (
        f"{group}: {name!r} of the package {package_of(entry_point)} cannot be loaded",
        "update or uninstall that package",
    )
    with raised_as(ConfigError, problem, Exception, SystemExit, remedy=remedy, describe=type_and_message):
        return entry_point.load()


def package_of(entry_point: EntryPoint) -> str:
    """Return the name and version of an entry point's package."""
    return f"{entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist is not None else entry_point.value
