"""Branches of a store: the same trajectories with other rewards, never over the original.

A branch shares every chunk with the snapshot it was made from but those of the columns that differ. It says how it was
made: its lineage. It is there whole or not at all, since it becomes visible with its one commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import icechunk
import numpy as np
import numpy.typing as npt
import zarr

from stores.errors import ConfigError, StoreError
from stores.versioned import FLOAT_COLUMNS, INT_COLUMNS, MAIN, VersionedStore, repository_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """What a branch differs in, a row each in the order stored. errors: by trajectory id."""

    rewards: npt.NDArray[np.float32]  # [R]
    advantages: npt.NDArray[np.float32]  # [R], 0 where nothing was trained
    loss_mask: npt.NDArray[np.bool_]  # [R], whether its tokens would carry gradient
    errors: Mapping[int, str]


def refuse(path: Path, name: str) -> None:
    """Raise ConfigError if a branch of that name cannot be made."""
    branches = repository_at(path).list_branches()
    if name in branches or name == MAIN or not name or name.startswith("undone-"):
        taken = ", ".join(sorted(branches))
        raise ConfigError(f"{path}: a branch cannot be called {name!r}; taken: {taken}; nothing stored is overwritten")


def derive(store: VersionedStore, path: Path, name: str, new: Rewards, lineage: Mapping[str, Any]) -> str:
    """Make branch `name` from what `store` reads, with other rewards; returns its snapshot. Raises StoreError; then
    there is no such branch."""
    refuse(path, name)
    repository = repository_at(path)
    parent = store.snapshot
    repository.create_branch(name, parent)
    try:
        session = repository.writable_session(name)
        root: Any = zarr.open_group(session.store, mode="r+")
        count = len(new.rewards)
        if root["rows/float"].shape[0] != count:
            raise StoreError(f"{path}: {root['rows/float'].shape[0]} rows, rewards for {count}")
        root["rows/float"][:, FLOAT_COLUMNS.index("reward")] = new.rewards
        root["rows/float"][:, FLOAT_COLUMNS.index("advantage")] = new.advantages
        root["rows/int"][:, INT_COLUMNS.index("loss_mask")] = new.loss_mask.astype(np.int64)
        root.attrs["errors"] = {str(trajectory): error for trajectory, error in new.errors.items()}
        root.attrs["lineage"] = {**lineage, "parent": parent}
        return str(session.commit(f"rewards: {name}", metadata={"kind": "rewards"}))
    except (icechunk.IcechunkError, OSError) as error:
        repository.delete_branch(name)
        raise StoreError(f"{path}: branch {name!r} could not be stored: {error}") from error
    except BaseException:
        repository.delete_branch(name)
        raise
