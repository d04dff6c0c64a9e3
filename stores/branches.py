"""Branches of a store: the same trajectories with other rewards or other logprobs, never over the original.

A branch shares every chunk with the snapshot it was made from but those of the columns that differ. It says how it was
made: its lineage. It is there whole or not at all: what is under way has a name of its own, which nobody is shown.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import icechunk
import numpy as np
import numpy.typing as npt
import zarr

from stores.errors import ConfigError, StoreError
from stores.layout import FLOAT_COLUMNS, INT_COLUMNS
from stores.versioned import MAIN, UNDER_WAY, VersionedStore, branch_names, repository_at

RESCORED = "tokens/rescored"
"""float32 [T]: what another model makes of each response token, nats; 0 elsewhere."""
PIECE = 16 * 65_536
"""Elements copied at once: 4 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """What a branch differs in, a row each in the order stored. errors: by trajectory id."""

    rewards: npt.NDArray[np.float32]  # [R]
    advantages: npt.NDArray[np.float32]  # [R], 0 where nothing was trained
    loss_mask: npt.NDArray[np.bool_]  # [R], whether its tokens would carry gradient
    errors: Mapping[int, str]


def refuse(path: Path, name: str) -> None:
    """Raise ConfigError if a branch of that name cannot be made."""
    branches = branch_names(repository_at(path))
    if name in branches or name == MAIN or not name or name.startswith(("undone-", UNDER_WAY)):
        taken = ", ".join(sorted(branches))
        raise ConfigError(f"{path}: a branch cannot be called {name!r}; taken: {taken}; nothing stored is overwritten")


def derive(store: VersionedStore, path: Path, name: str, new: Rewards, lineage: Mapping[str, Any]) -> str:
    """Make branch `name` from what `store` reads, with other rewards; returns its snapshot. Raises StoreError; then
    there is no such branch."""

    def change(root: Any) -> None:
        count = len(new.rewards)
        if root["rows/float"].shape[0] != count:
            raise StoreError(f"{path}: {root['rows/float'].shape[0]} rows, rewards for {count}")
        root["rows/float"][:, FLOAT_COLUMNS.index("reward")] = new.rewards
        root["rows/float"][:, FLOAT_COLUMNS.index("advantage")] = new.advantages
        root["rows/int"][:, INT_COLUMNS.index("loss_mask")] = new.loss_mask.astype(np.int64)
        root.attrs["errors"] = {str(trajectory): error for trajectory, error in new.errors.items()}

    return _made(store, path, name, "rewards", change, lineage)


def derive_logprobs(
    store: VersionedStore, path: Path, name: str, logprobs: npt.NDArray[np.float32], lineage: Mapping[str, Any]
) -> str:
    """Make branch `name` from what `store` reads, with RESCORED beside the stored logprobs; returns its snapshot.
    logprobs: [T], perhaps mapped from a file. Raises StoreError; then there is no such branch."""

    def change(root: Any) -> None:
        tokens = root["tokens/logprobs"]
        if tokens.shape != logprobs.shape:
            raise StoreError(f"{path}: {tokens.shape[0]} tokens, logprobs for {len(logprobs)}")
        if RESCORED in root:
            del root[RESCORED]
        array = root.create_array(
            RESCORED, shape=tokens.shape, chunks=tokens.chunks, dtype="float32", compressors=tokens.compressors,
            fill_value=0, dimension_names=("tokens_rescored",),
        )  # fmt: skip
        for first in range(0, len(logprobs), PIECE):
            array[first : first + PIECE] = logprobs[first : first + PIECE]

    return _made(store, path, name, "logprobs", change, lineage)


def _made(
    store: VersionedStore,
    path: Path,
    name: str,
    kind: str,
    change: Callable[[Any], None],
    lineage: Mapping[str, Any],
) -> str:
    refuse(path, name)
    repository = repository_at(path)
    parent = store.snapshot
    _remove(repository, (b for b in repository.list_branches() if b.startswith(UNDER_WAY)))  # of those killed
    under_way = f"{UNDER_WAY}{secrets.token_hex(4)}"
    repository.create_branch(under_way, parent)
    try:
        session = repository.writable_session(under_way)
        root: Any = zarr.open_group(session.store, mode="r+")
        change(root)
        root.attrs["lineage"] = {**lineage, "parent": parent}
        snapshot = str(session.commit(f"{kind}: {name}", metadata={"kind": kind}))
        repository.create_branch(name, snapshot)
        return snapshot
    except (icechunk.IcechunkError, OSError) as error:
        raise StoreError(f"{path}: branch {name!r} could not be stored: {error}") from error
    finally:
        _remove(repository, [under_way])


def _remove(repository: Any, names: Iterable[str]) -> None:
    for name in list(names):
        repository.delete_branch(name)
