"""Names that installed packages add to those a job file may use, through entry points.

    [project.entry-points."staleflow.rewards"]
    cosine = "my_package.rewards:cosine"

Names are read from the metadata of packages; the code behind a name is imported when a job selects it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from staleflow.stores.errors import ConfigError, raised_as, with_type


def installed(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group by name; an empty group name has none. Imports none of them."""
    return _installed(group, tuple(sys.path)) if group else {}


@functools.lru_cache(maxsize=64)
def _installed(group: str, path: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    """path: what is imported from; another one may have other packages."""
    return {point.name: point for point in entry_points(group=group)}


def load(group: str, name: str) -> Any:
    """Import the object that a package adds under a name. Raises ConfigError, which names the package."""
    point = installed(group)[name]
    problem, remedy = (
        f"{group}: {name!r} of the package {package_of(point)} cannot be loaded",
        "update or uninstall that package",
    )
    with raised_as(ConfigError, problem, Exception, SystemExit, remedy=remedy, describe=with_type):
        return point.load()


def package_of(point: EntryPoint) -> str:
    """The package of an entry point, with its version."""
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value
