"""Audit of earlier snapshots and other branches of a store.

Arrays only grow, except on branches with other rewards. So each chunk that a later commit replaced must equal what the
newest snapshot has in its place, byte for byte, up to the length the array had then: a flipped bit shows even if it
still decodes.
Each stored chunk is read once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import icechunk
import numpy as np
import zarr

from staleflow.stores.auditing.findings import Finding
from staleflow.stores.errors import StoreError, StoreUnavailable
from staleflow.stores.trajectories.reader import elements_per_file
from staleflow.stores.trajectories.repository import (
    MAIN,
    branch_names,
    bucket_fails,
    one_line,
    repository_at,
    store_error,
)
from staleflow.stores.trajectories.versioned import VersionedStore

CHECK = "history"
"""The name of this check in findings."""
DERIVED_KINDS = ("rewards", "logprobs")
"""Kinds of commits that replace values; see stores/trajectories/derived_branches.py."""


def audit_history(path: Path) -> Iterator[Finding]:
    """Check all earlier snapshots and other branches of a store. Raises StoreError if it cannot be opened, and
    StoreUnavailable if its bucket fails, which is not damage."""
    repository = repository_at(path)
    visited_snapshots: set[str] = set()
    for branch in sorted(branch_names(repository), key=lambda name: (name != MAIN, name)):
        if branch != MAIN:
            yield from _damage_findings(path, branch)
        yield from _snapshot_findings(path, repository, branch, visited_snapshots)


def _damage_findings(path: Path, branch: str) -> Iterator[Finding]:
    """Chunks of a branch's newest snapshot that cannot be read."""
    try:
        chunks = list(VersionedStore.open(path, branch=branch).damaged_chunks())
    except StoreUnavailable:
        raise
    except StoreError as error:
        yield Finding(check=CHECK, location=f"branch {branch}", message=str(error))
        return
    for chunk in chunks:
        yield Finding(check=CHECK, location=f"branch {branch}", message=chunk.error)


def _snapshot_findings(path: Path, repository: Any, branch: str, visited_snapshots: set[str]) -> Iterator[Finding]:
    """Compare the earlier snapshots of a branch with its newest one. visited_snapshots: ids of those that were compared
    already; the others are added."""
    replaced_chunks: set[tuple[str, int]] = set()
    newest: Any = None
    snapshots: Any = None
    while True:
        location = f"branch {branch}"
        try:
            snapshots = iter(repository.ancestry(branch=branch)) if snapshots is None else snapshots
            snapshot = next(snapshots, None)
            if snapshot is None or snapshot.id in visited_snapshots or snapshot.parent_id is None:
                return
            visited_snapshots.add(snapshot.id)
            location = f"{branch}, {snapshot.message}"
            if snapshot.metadata.get("kind") in DERIVED_KINDS:
                continue  # it may hold other values, and was read above
            root = zarr.open_group(repository.readonly_session(snapshot_id=snapshot.id).store, mode="r")
            newest = root if newest is None else newest
            changes = repository.diff(from_snapshot_id=snapshot.parent_id, to_snapshot_id=snapshot.id)
        except (icechunk.IcechunkError, OSError, KeyError, ValueError) as error:
            _raise_if_bucket_fails(path, error)
            yield Finding(check=CHECK, location=location, message=f"cannot be read: {one_line(error)}")
            return
        for name in sorted(changes.deleted_arrays):
            yield Finding(check=CHECK, location=location, message=f"{name.strip('/')} was deleted")
        updated = changes.updated_chunks.items()
        chunks = {(name.strip("/"), int(index[0])) for name, indices in updated for index in indices}
        for name, number in sorted(chunks & replaced_chunks):
            if name in newest and (message := _difference(path, root[name], newest[name], number)):
                yield Finding(check=CHECK, location=location, message=f"{name}, chunk {number}: {message}")
        replaced_chunks |= chunks


def _difference(path: Path, earlier_array: Any, newest_array: Any, number: int) -> str:
    """What is wrong with a chunk that was replaced later; empty if it holds the beginning of its successor."""
    size = elements_per_file(earlier_array)
    start, stop = number * size, min(earlier_array.shape[0], (number + 1) * size)
    try:
        earlier, newest = (np.asarray(array[start:stop]).tobytes() for array in (earlier_array, newest_array))
        if earlier == newest:
            return ""
        return "it differs from what the newest snapshot has in its place"
    except Exception as error:  # noqa: BLE001  zarr, numcodecs and icechunk each raise their own for a damaged chunk
        _raise_if_bucket_fails(path, error)
        return f"it is corrupt: {one_line(error)}"


def _raise_if_bucket_fails(path: Path, error: Exception) -> None:
    if bucket_fails(path, error):
        raise store_error(path, "earlier snapshots cannot be read", error) from error
