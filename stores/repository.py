"""The Icechunk repository of a store: opening it, its branches and snapshots, and the lock that commits take."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import icechunk

from stores.errors import ConfigError, StoreError

if "ICECHUNK_LOG" not in os.environ:
    # At each opening it warns that several committers on a local disk lose commits; a run has only one.
    icechunk.set_logs_filter("error")

MAIN = "main"
"""The branch that a run commits to."""
INCOMPLETE = "part-"
"""Prefix of the names of incomplete branches, which are never listed."""
MANIFEST_CHUNKS = 64
"""Chunks per manifest: without a limit each commit would rewrite a manifest that grows with the run."""


def repository_at(path: Path) -> Any:
    """The Icechunk repository of an existing store. Raises StoreError."""
    try:
        return open_repository(path)
    except (icechunk.IcechunkError, OSError) as error:
        raise StoreError(f"{path}: the store cannot be opened: {first_line(error)}") from error


def open_repository(path: Path) -> Any:
    """As `repository_at`, but raises Icechunk's own errors."""
    return icechunk.Repository.open(_storage(path), config=_config())


def create_repository(path: Path) -> Any:
    """A new repository. Raises Icechunk's own errors."""
    return icechunk.Repository.create(_storage(path), config=_config())


def branch_names(repository: Any) -> set[str]:
    """The branches that are complete."""
    return {name for name in repository.list_branches() if not name.startswith(INCOMPLETE)}


def snapshot_of(repository: Any, step: int, path: Path) -> str:
    """The snapshot that training step `step` committed. Raises ConfigError."""
    steps = []
    for snapshot in repository.ancestry(branch=MAIN):
        if snapshot.metadata.get("kind") == "step":
            steps.append(snapshot.metadata.get("step"))
            if steps[-1] == step:
                return str(snapshot.id)
    there = f"steps {steps[-1]} to {steps[0]} are stored" if steps else "none is stored yet"
    raise ConfigError(f"{path}: no commit of step {step}; {there}")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time move the head of a store: held for milliseconds; the lock ends with the process."""
    with path.with_name(f".{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def first_line(error: BaseException) -> str:
    """The first line of a message that is not empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _storage(path: Path) -> Any:
    return icechunk.local_filesystem_storage(str(path))


def _config() -> Any:
    split = icechunk.ManifestSplittingConfig.from_dict(
        {icechunk.ManifestSplitCondition.AnyArray(): {icechunk.ManifestSplitDimCondition.Any(): MANIFEST_CHUNKS}}
    )
    return icechunk.RepositoryConfig(manifest=icechunk.ManifestConfig(splitting=split))
