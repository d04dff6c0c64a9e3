"""The full audit also verifies data that only earlier snapshots or other branches use."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import icechunk
import numpy as np
import pytest
import zarr

from staleflow.stores.auditing import snapshot_audit
from staleflow.stores.auditing.audit import audit
from staleflow.stores.auditing.findings import Finding
from staleflow.stores.errors import StoreError, StoreUnavailable
from staleflow.stores.trajectories import derived_branches, repository
from staleflow.stores.trajectories.derived_branches import BranchRewards
from staleflow.stores.trajectories.records import batch_fingerprint
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import Fate
from tests.stores.store_conformance import HEADER, ended, record


@pytest.fixture
def store(tmp_path: Path) -> VersionedStore:
    """A store of three steps; each commit replaces the last chunk of most arrays."""
    rng = np.random.default_rng(0)
    made = VersionedStore.create(tmp_path / "store", HEADER)
    for step in range(3):
        made.commit(record(step), [ended(rng, 100 * step + i, step) for i in range(100)])
    return made


def flip(path: Path) -> bytes:
    """Flip a bit in the middle of a file; returns the previous content."""
    before = path.read_bytes()
    data = bytearray(before)
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    return before


def history_findings(store: VersionedStore) -> list[Finding]:
    return list(snapshot_audit.audit_history(store.path))


def test_a_valid_store_has_no_findings(store: VersionedStore) -> None:
    count = len(store.stored_columns()["trajectory"])
    new = BranchRewards(rewards=np.ones(count, np.float32), advantages=np.zeros(count, np.float32),
                  loss_mask=np.ones(count, bool), errors={})  # fmt: skip
    derived_branches.derive_rewards(store, store.path, "other", new, {})
    VersionedStore.rewind(store.path, 2)
    assert len(store.branches()) == 2
    assert history_findings(VersionedStore.open(store.path)) == []


def test_a_bucket_failure_is_not_damage_of_an_earlier_snapshot(
    store: VersionedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses the list of snapshots, or a chunk."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise icechunk.IcechunkError("object store error: 503 Slow Down")

    array = store._read_root()["rows/reward"]
    refusing = type("Refusing", (), {"shape": array.shape, "__getitem__": refuse})()
    monkeypatch.setattr(repository, "url_of", lambda path: "s3://bucket/run")
    with pytest.raises(StoreUnavailable, match="503 Slow Down"):
        snapshot_audit._difference(store.path, array, refusing, 0)
    monkeypatch.setattr(icechunk.Repository, "ancestry", refuse)
    monkeypatch.setattr(snapshot_audit, "repository_at", lambda path: store._repository)
    with pytest.raises(StoreUnavailable, match="503 Slow Down"):
        history_findings(store)


def test_a_changed_sign_of_a_zero_is_found(store: VersionedStore) -> None:
    zeros = zarr.array(np.zeros(3, np.float32))
    assert snapshot_audit._difference(store.path, zeros, zeros, 0) == ""
    assert snapshot_audit._difference(store.path, zeros, zarr.array(-np.zeros(3, np.float32)), 0)


def test_a_flipped_bit_in_an_earlier_snapshot_is_found(store: VersionedStore) -> None:
    """In one file after another, until it is in texts that only earlier steps read."""
    earlier: Counter[str] = Counter()
    sound = audit(store).findings
    for path in sorted((store.path / "chunks").iterdir(), key=lambda path: path.stat().st_size):
        before = flip(path)
        if findings := history_findings(store):
            assert {finding.check for finding in findings} == {snapshot_audit.CHECK}
            assert all(finding.location.startswith("main, step ") for finding in findings)
            if audit(VersionedStore.open(store.path)).findings == sound:
                earlier.update(finding.message.partition(",")[0] for finding in findings)
        path.write_bytes(before)
        if earlier["text"]:
            break
    # Small chunks, such as columns of few rows, are kept in manifests; of texts some earlier ones are files.
    assert earlier["text"], earlier


def test_every_corrupt_chunk_is_found(tmp_path: Path) -> None:
    """A bit is flipped in one file and the next one is truncated, including data that no other check reads: times,
    reward parts, masks, dropped responses, earlier steps."""
    rng = np.random.default_rng(0)
    store = VersionedStore.create(tmp_path / "store", HEADER)
    for step in range(2):
        rows = [ended(rng, 2000 * step + i, step, Fate.CONSUMED if i % 5 else Fate.ABORTED) for i in range(200)]
        batch = batch_fingerprint((r.trajectory, r.advantage) for r in rows if r.fate is Fate.CONSUMED)
        store.commit(replace(record(step), batch_fingerprint=batch), rows)

    sound = audit(store).findings
    assert not history_findings(store)
    named = set()
    for number, path in enumerate(sorted((store.path / "chunks").iterdir())):
        before = flip(path)
        if number % 2:
            path.write_bytes(before[: len(before) // 2])
        new = [f for f in audit(VersionedStore.open(store.path)).findings if f not in sound] or history_findings(store)
        assert new, f"{path.name}, {len(before)} bytes"
        named |= {f.location for f in new}
        path.write_bytes(before)
    assert {"tokens/ids", "tokens/logprobs", "tokens/mask", "rows/reward", "rows/offset", "text"} <= named


@pytest.mark.parametrize("message", ["snapshots", "manifests"])
def test_a_broken_file_of_an_earlier_snapshot_is_a_finding(store: VersionedStore, message: str) -> None:
    broken = 0
    for path in sorted((store.path / message).iterdir())[
        :: 12 if message == "manifests" else 1
    ]:  # of each column one a commit
        before = path.read_bytes()
        path.write_bytes(before[: len(before) // 2])
        try:
            broken += bool(history_findings(VersionedStore.open(store.path)))
        except StoreError:
            broken += 1  # of the newest snapshot: the store cannot be opened
        path.write_bytes(before)
    assert broken >= 4
