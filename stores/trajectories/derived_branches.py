"""Derived branches of a store: the same trajectories with other rewards or logprobs. The original is never changed.

A branch shares all chunks of unchanged arrays with its parent snapshot, and records how it was made, its lineage. It
is created atomically: until it is complete it has a temporary name that is never listed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr

from staleflow.stores.errors import ConfigError, StoreError
from staleflow.stores.trajectories import reader
from staleflow.stores.trajectories.repository import (
    MAIN,
    TEMPORARY_PREFIX,
    branch_names,
    raised_as_store_error,
    repository_at,
    temporary_branch,
)
from staleflow.stores.trajectory import NO_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchRewards:
    """The columns that a branch replaces, with one element per row in stored order. errors: by trajectory id; None
    leaves those of the rows."""

    rewards: npt.NDArray[np.float32]  # [R]
    advantages: npt.NDArray[np.float32]  # [R], 0 where nothing was trained
    loss_mask: npt.NDArray[np.bool_]  # [R], whether its tokens would carry gradient
    errors: Mapping[int, str] | None


BRANCH_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@ -]*")
MAX_NAME_CHARS = 200
"""Most characters of a branch's name: it becomes that of a file."""


def check_branch_name(path: Path, name: str) -> None:
    """Raise ConfigError if a branch cannot have this name."""
    if name and not (BRANCH_NAME.fullmatch(name) and len(name) <= MAX_NAME_CHARS):
        raise ConfigError(
            f"a branch cannot be called {name[:60]!r}: use letters, digits and . _ + @ - and spaces, beginning with a "
            f"letter or digit, at most {MAX_NAME_CHARS} in all"
        )
    branches = branch_names(repository_at(path))
    if name in branches or name == MAIN or not name or name.startswith(("undone-", TEMPORARY_PREFIX)):
        names = ", ".join(sorted(branches))
        raise ConfigError(f"{path}: a branch cannot be called {name!r}; taken: {names}; nothing stored is overwritten")


def derive_rewards(
    store: reader.StoreReader, path: Path, name: str, rewards: BranchRewards, lineage: Mapping[str, Any]
) -> str:
    """Create branch `name` with other rewards from the snapshot that `store` reads. Returns the new snapshot. Raises
    ConfigError, StoreError; then no branch is left."""

    def change(root: Any) -> None:
        count = len(rewards.rewards)
        if reader.num_rows(root) != count:
            raise StoreError(f"{path}: {reader.num_rows(root)} rows, but rewards for {count}")
        root["rows/reward"][:] = rewards.rewards
        root["rows/advantage"][:] = rewards.advantages
        _change_masks(root, rewards.loss_mask)
        root["rows/loss_mask"][:] = rewards.loss_mask
        if rewards.errors is not None:
            root.attrs["errors"] = {str(trajectory): error for trajectory, error in rewards.errors.items()}

    return _commit_branch(store, path, name, "rewards", change, lineage)


def _change_masks(root: Any, loss_mask: npt.NDArray[np.bool_]) -> None:
    """Write the token masks of the rows whose loss mask changes, file by file."""
    table = {name: np.asarray(root[f"rows/{name}"][:]) for name in ("loss_mask", *reader.TOKEN_POSITION_COLUMNS)}
    rows = np.flatnonzero(table["loss_mask"] != loss_mask)
    starts = (table["offset"] + table["prompt_tokens"])[rows]
    ends = starts + table["response_tokens"][rows]
    mask, versions = root["tokens/mask"], root["tokens/versions"]
    file_elements = reader.elements_per_file(mask)
    for start_token in range(0, int(mask.shape[0]), file_elements):
        overlaps = (starts < start_token + file_elements) & (ends > start_token) & (starts < ends)
        if not overlaps.any():
            continue
        values = np.asarray(mask[start_token : start_token + file_elements])
        sampled = np.asarray(versions[start_token : start_token + file_elements]) != NO_VERSION
        for start, end, mask_value in zip(starts[overlaps], ends[overlaps], loss_mask[rows[overlaps]], strict=True):
            token_range = slice(max(0, start - start_token), end - start_token)
            values[token_range] = sampled[token_range] & mask_value
        mask[start_token : start_token + file_elements] = values


def derive_logprobs(
    store: reader.StoreReader, path: Path, name: str, logprobs: npt.NDArray[np.float32], lineage: Mapping[str, Any]
) -> str:
    """Create branch `name` from the snapshot that `store` reads, with the array RECOMPUTED_LOGPROBS beside the stored
    logprobs. Returns the new snapshot. Raises ConfigError, StoreError; then no branch is left. logprobs: [T], may
    be memory-mapped."""

    def change(root: Any) -> None:
        stored_logprobs = root["tokens/logprobs"]
        if stored_logprobs.shape != logprobs.shape:
            raise StoreError(f"{path}: {stored_logprobs.shape[0]} tokens, but logprobs for {len(logprobs)}")
        if reader.RECOMPUTED_LOGPROBS in root:
            del root[reader.RECOMPUTED_LOGPROBS]
        array = root.create_array(
            reader.RECOMPUTED_LOGPROBS, shape=logprobs.shape, chunks=stored_logprobs.chunks,
            shards=stored_logprobs.shards, compressors=stored_logprobs.compressors, dtype="float32", fill_value=0,
            dimension_names=("tokens_rescored",),
        )  # fmt: skip
        file_elements = reader.elements_per_file(array)
        for start_token in range(0, len(logprobs), file_elements):
            array[start_token : start_token + file_elements] = logprobs[start_token : start_token + file_elements]

    return _commit_branch(store, path, name, "logprobs", change, lineage)


def _commit_branch(
    store: reader.StoreReader,
    path: Path,
    name: str,
    kind: str,
    change: Callable[[Any], None],
    lineage: Mapping[str, Any],
) -> str:
    check_branch_name(path, name)
    repository = repository_at(path)
    parent = store.snapshot
    with (
        raised_as_store_error(path, f"branch {name!r} could not be stored"),
        temporary_branch(repository, parent) as temporary_name,
    ):
        session = repository.writable_session(temporary_name)
        root: Any = zarr.open_group(session.store, mode="r+")
        change(root)
        root.attrs["lineage"] = {**lineage, "parent": parent}
        snapshot = str(session.commit(f"{kind}: {name}", metadata={"kind": kind}))
        repository.create_branch(name, snapshot)
        return snapshot
