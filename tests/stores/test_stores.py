"""Both stores under the conformance suite, features of the versioned store, and corrupt data."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import icechunk
import numpy as np
import pytest
import zarr
from zarr.storage import LocalStore

from staleflow.stores.auditing.audit import audit
from staleflow.stores.auditing.chain import check_chain
from staleflow.stores.errors import ConfigError, StoreError, StoreUnavailable
from staleflow.stores.trajectories import derived_branches, versioned
from staleflow.stores.trajectories.layout import COMMIT_COLUMN_INDEX
from staleflow.stores.trajectories.reader import ArrayCache, UnreadableRow
from staleflow.stores.trajectories.records import (
    CommitRecord,
    LedgerState,
    RunHeader,
    batch_fingerprint,
    id_ranges,
)
from staleflow.stores.trajectories.repository import repository_at
from staleflow.stores.trajectories.versioned import TOKEN_FILE, VersionedStore
from staleflow.stores.trajectory import EndedTrajectory, Fate, InstanceId, PolicyVersion, TrajectoryId
from staleflow.stores.weights.weight_report import WeightCheck, WeightReport
from tests.stores.store_conformance import HEADER, TrajectoryStoreTests, ended, record, verified, with_teacher
from tests.support.memory_store import MemoryStore, TrajectoryStore


class TestMemoryStore(TrajectoryStoreTests):
    def make(self, folder: Path) -> TrajectoryStore:
        return MemoryStore(HEADER)


class TestVersionedStore(TrajectoryStoreTests):
    def make(self, folder: Path) -> TrajectoryStore:
        return VersionedStore.create(folder, HEADER)

    def test_rows_are_there_after_reopening(self, tmp_path: Path, rng: Any) -> None:
        VersionedStore.create(tmp_path / "s", HEADER).commit(record(0), [ended(rng, 0, 0)])
        reopened = VersionedStore.open(tmp_path / "s")
        reopened.commit(record(1), [ended(rng, 4, 1)])
        assert [e.trajectory.id for e in VersionedStore.open(tmp_path / "s").trajectories()] == [0, 4]

    def test_time_travel(self, tmp_path: Path, rng: Any) -> None:
        store = VersionedStore.create(tmp_path / "s", HEADER)
        for step in range(3):
            store.commit(record(step), [ended(rng, step, step)])
        assert [e.trajectory.id for e in VersionedStore.open(tmp_path / "s", at_step=1).trajectories()] == [0, 1]
        with pytest.raises(ConfigError, match="no commit of step 7"):
            VersionedStore.open(tmp_path / "s", at_step=7)

    def test_a_rewound_store_continues_and_keeps_the_undone_commits(self, tmp_path: Path, rng: Any) -> None:
        path = tmp_path / "s"
        store = VersionedStore.create(path, HEADER)
        for step in range(4):
            store.commit(record(step), [ended(rng, step, step)])
        store.commit(record(4, "end"), [])
        assert VersionedStore.rewind(path, 4) == 0
        with pytest.raises(StoreError, match="cannot be set back to 5 steps: 4 are stored"):
            VersionedStore.rewind(path, 5)
        assert [r.kind for r in VersionedStore.open(path).commits()][-1] == "end"
        assert VersionedStore.rewind(path, 4, undo_end=True) == 0
        assert [(r.kind, r.step) for r in VersionedStore.open(path).commits()][-2:] == [("step", 3), ("refusal", 4)]
        VersionedStore.open(path).commit(record(4, "resume"), [])
        assert VersionedStore.rewind(path, 4, undo_end=True) == 0
        assert [r.kind for r in VersionedStore.open(path).commits()][-1] == "resume"
        opened = repository_at(path)
        (ended_once,) = opened.list_branches() - {"main"}
        assert VersionedStore.rewind(path, 2) == 2
        reopened = VersionedStore.open(path)
        reopened.commit(record(2), [ended(rng, 7, 2)])
        assert [e.trajectory.id for e in VersionedStore.open(path).trajectories()] == [0, 1, 7]
        repository = repository_at(path)
        (undone,) = repository.list_branches() - {"main", ended_once}
        root: Any = zarr.open_group(repository.readonly_session(undone).store, mode="r")
        assert root["rows/trajectory"][:].tolist() == [0, 1, 2, 3]

    def test_a_rewound_store_keeps_refused_instances(self, tmp_path: Path, rng: Any) -> None:
        check = WeightCheck(
            instance=InstanceId("rollout-0"), version=PolicyVersion(2), fingerprint="w2",
            weights=WeightReport(verified=1), drift=float("nan"), limit=1.0, refused="its logprobs differ",
        )  # fmt: skip
        store = VersionedStore.create(tmp_path / "s", HEADER)
        for step in range(3):
            store.commit(record(step), [ended(rng, step, step)])
            store.commit(replace(record(step + 1, "refusal"), weight_checks=(check,) if step == 1 else ()), [])
        assert VersionedStore.rewind(tmp_path / "s", 1) == 2
        first, last = VersionedStore.open(tmp_path / "s").commits()
        assert (last.kind, last.num_rows) == ("refusal", 0)
        assert first.ledger.num_ended == last.ledger.num_ended == {"consumed:none": 4}
        assert [item.refused for item in last.weight_checks if item.refused] == ["its logprobs differ"]

    def test_a_rewind_keeps_the_checks_of_weights_that_resumed_work_was_sampled_with(
        self, tmp_path: Path, rng: Any
    ) -> None:
        def check(version: int) -> WeightCheck:
            return WeightCheck(
                instance=InstanceId("rollout-0"), version=PolicyVersion(version), fingerprint=f"w{version}",
                weights=WeightReport(verified=1), drift=0.0, limit=1.0,
            )  # fmt: skip

        store = VersionedStore.create(tmp_path / "s", HEADER)
        for step in range(3):
            store.commit(replace(record(step), weight_checks=(check(step),)), [ended(rng, step, step)])
        assert VersionedStore.rewind(tmp_path / "s", 1) == 2
        checks = [item.version for r in VersionedStore.open(tmp_path / "s").commits() for item in r.weight_checks]
        assert checks == [0, 1], "work of version 2 is dropped"

    @pytest.mark.parametrize("method", ["create_branch", "commit", "reset_branch", "delete_branch"])
    def test_an_interrupted_rewind_is_repeated(
        self, tmp_path: Path, rng: Any, method: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The branch of the undone steps was there already, or the refusals were not committed again."""
        refused = WeightCheck(
            instance=InstanceId("rollout-0"), version=PolicyVersion(2), fingerprint="w2",
            weights=WeightReport(verified=1), drift=float("nan"), limit=1.0, refused="its logprobs differ",
        )  # fmt: skip
        path = tmp_path / "s"
        store = VersionedStore.create(path, HEADER)
        for step in range(3):
            store.commit(replace(record(step), weight_checks=(refused,) if step == 2 else ()), [ended(rng, step, step)])
        owner = icechunk.Session if method == "commit" else icechunk.Repository
        real = getattr(owner, method)

        def interrupted(self: Any, *args: Any, **kwargs: Any) -> None:
            real(self, *args, **kwargs)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(owner, method, interrupted)
            with pytest.raises(KeyboardInterrupt):
                VersionedStore.rewind(path, 1)
        VersionedStore.rewind(path, 1)
        records = VersionedStore.open(path).commits()
        assert [r.kind for r in records] == ["step", "refusal"]
        assert [item.refused for r in records for item in r.weight_checks] == ["its logprobs differ"]
        VersionedStore.open(path).commit(record(1), [ended(rng, 7, 1)])

    def test_a_negative_zero_is_stored_with_its_sign(self, tmp_path: Path, rng: Any) -> None:
        """A chunk of zeros was left out, though one of them was -0.0, which the fingerprint distinguishes."""
        row = ended(rng, 0, 0)
        row = replace(row, trajectory=replace(row.trajectory, reward=-0.0), advantage=-0.0)
        store = VersionedStore.create(tmp_path / "s", HEADER)
        store.commit(record(0), [row])
        (stored,) = store.trajectories()
        assert np.signbit([stored.trajectory.reward, stored.advantage]).all()
        fingerprints = [batch_fingerprint([(e.trajectory, e.advantage)]) for e in (row, stored)]
        assert fingerprints[0] == fingerprints[1]

    @pytest.mark.parametrize("url", ["", "s3://bucket/run"])
    def test_a_commit_with_a_value_out_of_range_is_not_repeated(
        self, tmp_path: Path, rng: Any, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No repetition can succeed, and the bucket is not at fault."""
        store, row = VersionedStore.create(tmp_path / "s", HEADER), ended(rng, 0, 0)
        row = replace(row, trajectory=replace(row.trajectory, source=40_000))
        monkeypatch.setattr(versioned, "url_of", lambda path: url)
        with pytest.raises(StoreError, match="step 0 has a value that cannot be stored: Python integer 40000") as info:
            store.commit(record(0), [row])
        assert not isinstance(info.value, StoreUnavailable)
        store.commit(record(0), [ended(rng, 0, 0)])

    def test_a_commit_after_another_process_committed_raises(self, tmp_path: Path, rng: Any) -> None:
        old = VersionedStore.create(tmp_path / "s", HEADER)
        old.commit(record(0), [ended(rng, 0, 0)])
        new = VersionedStore.open(tmp_path / "s")
        new.commit(record(1), [ended(rng, 1, 1)])
        with pytest.raises(StoreError, match="another process has committed since"):
            old.commit(record(1), [ended(rng, 2, 1)])
        # Nor one whose steps were undone for a resumption.
        VersionedStore.rewind(tmp_path / "s", 1)
        with pytest.raises(StoreError, match="another process has committed since"):
            new.commit(record(2), [ended(rng, 3, 2)])
        assert [e.trajectory.id for e in VersionedStore.open(tmp_path / "s").trajectories()] == [0]

    def test_a_commit_that_the_server_before_this_one_applied_is_not_an_error(self, tmp_path: Path, rng: Any) -> None:
        """A server that is slow is replaced, and may still apply the commit that its successor repeats."""
        old = VersionedStore.create(tmp_path / "s", HEADER)
        new = VersionedStore.open(tmp_path / "s")
        rows = [ended(rng, 0, 0)]
        assert old.commit(record(0), rows) == new.commit(record(0), rows)
        new.commit(record(1), [ended(rng, 1, 1)])
        store = VersionedStore.open(tmp_path / "s")
        assert [e.trajectory.id for e in store.trajectories()] == [0, 1]
        assert check_chain(store).findings == []

    def test_each_commit_starts_at_a_chunk_boundary(self, tmp_path: Path, rng: Any) -> None:
        store = VersionedStore.create(tmp_path / "s", HEADER)
        for step in range(3):
            store.commit(record(step), [ended(rng, step, step)])
        assert store.stored_columns()["offset"].tolist() == [0, TOKEN_FILE, 2 * TOKEN_FILE]

    def test_a_missing_or_invalid_store_gives_a_one_line_error(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="no store here"):
            VersionedStore.open(tmp_path / "none")
        (tmp_path / "junk").mkdir()
        with pytest.raises(StoreError, match="cannot be opened"):
            VersionedStore.open(tmp_path / "junk")

    def test_a_store_of_another_format_is_rejected(self, tmp_path: Path) -> None:
        VersionedStore.create(tmp_path / "s", HEADER)
        edit(tmp_path / "s", lambda root: root.attrs.update({"format": 99}))
        with pytest.raises(ConfigError, match="store format 99, this version reads 'columns'"):
            VersionedStore.open(tmp_path / "s")

    def test_a_failed_commit_changes_nothing(self, tmp_path: Path, rng: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        store = VersionedStore.create(tmp_path / "s", HEADER)
        store.commit(record(0), [ended(rng, 0, 0)])

        def full(self: Any, *args: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(VersionedStore, "_append", full)
            with pytest.raises(StoreError, match="No space left on device; free space or move runs_dir"):
                store.commit(record(1), [ended(rng, 1, 1)])
        store.commit(record(1), [ended(rng, 1, 1)])
        assert [e.trajectory.id for e in store.trajectories()] == [0, 1]

    def test_a_process_killed_during_commits_leaves_whole_steps(self, tmp_path: Path) -> None:
        """kill -9 at random moments of a committing process: the readable content is a prefix of whole steps."""
        script = textwrap.dedent(
            """
            import sys
            from pathlib import Path
            import numpy as np
            from staleflow.stores.trajectories.versioned import VersionedStore
            from tests.stores.store_conformance import HEADER, ended, record
            store = VersionedStore.create(Path(sys.argv[1]), HEADER)
            rng = np.random.default_rng(0)
            for step in range(10_000):
                store.commit(record(step), [ended(rng, 4 * step + i, step) for i in range(4)])
                print(step, flush=True)
            """
        )
        for attempt in range(3):
            folder = tmp_path / f"s{attempt}"
            with subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                for _ in range(5 + attempt):
                    last = int(process.stdout.readline())
                os.kill(process.pid, signal.SIGKILL)
            store = VersionedStore.open(folder)
            steps = [r.step for r in store.commits()]
            assert steps == list(range(len(steps)))
            assert len(steps) >= last + 1
            assert [e.trajectory.id for e in store.trajectories()] == list(range(4 * len(steps)))
            assert not [f for f in audit(store).findings if f.check in ("arrays", "bound", "once")]

    def test_a_process_killed_during_creation_leaves_no_store(self, tmp_path: Path) -> None:
        script = textwrap.dedent(
            """
            import os, sys
            from pathlib import Path
            from staleflow.stores.trajectories import versioned
            from tests.stores.store_conformance import HEADER
            versioned.zarr.open_group = lambda *args, **kwargs: os._exit(9)
            versioned.VersionedStore.create(Path(sys.argv[1]), HEADER)
            """
        )
        folder = tmp_path / "s"
        assert subprocess.run([sys.executable, "-c", script, str(folder)], timeout=60).returncode == 9
        assert not folder.exists()
        assert VersionedStore.create(folder, HEADER).commits() == []
        assert [p.name for p in tmp_path.iterdir()] == ["s"]
        with pytest.raises(StoreError, match="cannot be created: there is one already"):
            VersionedStore.create(folder, HEADER)


def valid_store(folder: Path, num_steps: int = 4) -> VersionedStore:
    """Return a store as a run without faults writes it."""
    shutil.copytree(_valid_store(num_steps), folder)
    return VersionedStore.open(folder)


@functools.cache
def _valid_store(num_steps: int) -> Path:
    """The store that others are copied from, in a folder that is removed at exit."""
    made = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, made)
    folder = Path(made) / "store"
    rng = np.random.default_rng(1)
    header = RunHeader(run="r", eta=1, groups_per_step=2, group_size=2, members_started_per_group=2)
    store = VersionedStore.create(folder, header)
    for step in range(num_steps):
        batch = [ended(rng, 4 * step + i, step) for i in range(4)]
        batch = [with_teacher(row) if row.trajectory.id % 4 == 3 else row for row in batch]
        store.commit(
            CommitRecord(
                kind="step",
                step=step,
                ledger=LedgerState(
                    num_started=4 * (step + 1) + 2,
                    num_ended={"consumed:none": 4 * (step + 1)},
                    live=id_ranges([4 * (step + 1), 4 * (step + 1) + 1]),
                    next_step=step + 1,
                    version=step,
                ),
                weight_fingerprint=f"w{step + 1}",
                weight_checks=(verified("rollout-0", step, f"w{step}"),) if step else (),
                batch_fingerprint=batch_fingerprint((e.trajectory, e.advantage) for e in batch),
            ),
            batch,
        )
    last = [ended(rng, 4 * num_steps + i, num_steps, Fate.ABORTED) for i in range(2)]
    ledger = LedgerState(
        num_started=4 * num_steps + 2,
        num_ended={"consumed:none": 4 * num_steps, "aborted:run_ended": 2},
        live=(),
        next_step=num_steps,
        version=num_steps,
    )
    store.commit(CommitRecord(kind="end", step=num_steps, ledger=ledger), last)
    return folder


def edit(folder: Path, change: Callable[[Any], Any]) -> None:
    """Change a store in a separate commit."""
    repository = repository_at(folder)
    session = repository.writable_session("main")
    change(zarr.open_group(session.store, mode="r+"))
    session.commit("tampered")


def set_int(root: Any, row: int, column: str, value: int) -> None:
    root[f"rows/{column}"][row] = value


def change_logprob(root: Any, value: float = -9.0) -> None:
    offset, prompt = int(root["rows/offset"][5]), int(root["rows/prompt_tokens"][5])
    root["tokens/logprobs"][offset + prompt] = value


def test_a_valid_store_passes_the_audit(tmp_path: Path) -> None:
    result = audit(valid_store(tmp_path / "s"))
    assert result.findings == ()
    assert (result.num_steps, result.num_trajectories, result.max_staleness) == (4, 18, 1)


def test_the_audit_counts_tokens_without_chunk_padding(tmp_path: Path) -> None:
    store = valid_store(tmp_path / "s")
    rows = list(store.trajectories())
    assert audit(store).num_tokens == sum(len(r.trajectory.prompt_tokens) + r.trajectory.num_tokens for r in rows)


def corrupt_tokens(store: VersionedStore) -> None:
    """Overwrite the end of a chunk of tokens on disk."""
    for chunk in sorted((store.path / "chunks").iterdir(), key=lambda p: p.stat().st_size, reverse=True):
        data = chunk.read_bytes()
        chunk.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
        if [d.array for d in VersionedStore.open(store.path).damaged_chunks() if d.array.startswith("tokens/")]:
            return
        chunk.write_bytes(data)
    raise AssertionError("no chunk of tokens is large enough to be damaged")


def test_a_corrupt_chunk_is_named(tmp_path: Path) -> None:
    store = valid_store(tmp_path / "s")
    damaged = VersionedStore.open(tmp_path / "s")
    corrupt_tokens(damaged)
    (chunk,) = damaged.damaged_chunks()
    (finding, *_) = audit(damaged).findings
    assert (finding.check, finding.location) == ("arrays", chunk.array)
    assert f"{chunk.array}, chunk {chunk.chunk_index}, is corrupt" in finding.message
    assert "of 18 trajectories; the others can be read" in finding.message
    assert store.get(TrajectoryId(10**6)) is None

    # What lies elsewhere is read as before, wherever a reader begins.
    rows = list(damaged.trajectories_at(range(18)))
    lost = {r.trajectory: r.error for r in rows if isinstance(r, UnreadableRow)}
    assert 0 < len(lost) < 18
    assert all(f"{chunk.array}, chunk {chunk.chunk_index}, is corrupt" in what for what in lost.values())
    kept = [r for r in rows if isinstance(r, EndedTrajectory)]
    assert sorted([*lost, *(r.trajectory.id for r in kept)]) == list(range(18))
    for row in kept:
        again = damaged.get(row.trajectory.id)
        assert again is not None
        np.testing.assert_array_equal(again.trajectory.response_tokens, row.trajectory.response_tokens)
    with pytest.raises(StoreError, match=f"chunk {chunk.chunk_index}, is corrupt"):
        damaged.get(next(iter(lost)))


def test_a_flipped_bit_in_text_gives_a_one_line_error(tmp_path: Path) -> None:
    """In the text of a row and in the record of a step."""
    store = valid_store(tmp_path / "s")
    offset = int(store.stored_columns()["text_offset"][5])

    def flip(name: str, at: int) -> Callable[[Any], Any]:
        return lambda root: root[name].__setitem__(slice(at, at + 1), np.frombuffer(b"\xff", np.uint8))

    edit(tmp_path / "s", flip("text", offset))
    damaged = VersionedStore.open(tmp_path / "s")
    lost = [r for r in damaged.trajectories_at(range(18)) if isinstance(r, UnreadableRow)]
    assert [(r.trajectory, "its record is corrupt" in r.error) for r in lost] == [(5, True)]
    assert [f.check for f in audit(damaged).findings] == ["arrays"]

    shutil.copytree(tmp_path / "s", tmp_path / "t")
    edit(
        tmp_path / "t",
        lambda root: flip("records", int(root["commits"][2, COMMIT_COLUMN_INDEX["record_offset"]]))(root),
    )
    worse = VersionedStore.open(tmp_path / "t")
    with pytest.raises(StoreError, match="the record of step 2 is corrupt"):
        worse.commits()
    assert not audit(worse).is_clean


def test_staleness_of_a_row_that_was_not_consumed_is_minus_one() -> None:
    rng = np.random.default_rng(0)
    row: EndedTrajectory = ended(rng, 0, 3, Fate.FILTERED)
    assert row.staleness == -1


NEW_REWARDS = derived_branches.BranchRewards(
    rewards=np.full(1, 2.0, np.float32), advantages=np.zeros(1, np.float32), loss_mask=np.ones(1, bool), errors={}
)


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (StoreError("it has other rows"), StoreError),
        (StoreUnavailable("it does not answer"), StoreUnavailable),
        (KeyError("rows/offset"), StoreError),
        (icechunk.IcechunkError("no space"), StoreError),
    ],
)
def test_an_error_of_a_branch_that_cannot_be_stored_names_the_store_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: Exception, kind: type[StoreError]
) -> None:
    store = VersionedStore.create(tmp_path / "s", HEADER)
    store.commit(record(0), [ended(np.random.default_rng(0), 0, 0)])

    def fail(root: Any, loss_mask: Any) -> None:
        if isinstance(raised, StoreError):
            raise type(raised)(f"{tmp_path}: {raised}")
        raise raised

    monkeypatch.setattr(derived_branches, "_change_masks", fail)
    with pytest.raises(StoreError, match=str(tmp_path)) as caught:
        derived_branches.derive_rewards(store, tmp_path / "s", "other", NEW_REWARDS, {})
    assert type(caught.value) is kind
    assert str(caught.value).count(str(tmp_path)) == 1


def test_a_branch_is_stored_although_its_temporary_one_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = VersionedStore.create(tmp_path / "s", HEADER)
    store.commit(record(0), [ended(np.random.default_rng(0), 0, 0)])
    repository = repository_at(tmp_path / "s")

    class Refusing:
        """The repository, of which requests about branches are refused once the new one is there."""

        def __getattr__(self, name: str) -> Any:
            if name in ("list_branches", "delete_branch") and "other" in repository.list_branches():
                raise icechunk.IcechunkError("refused")
            return getattr(repository, name)

    monkeypatch.setattr(derived_branches, "repository_at", lambda path: Refusing())
    derived_branches.derive_rewards(store, tmp_path / "s", "other", NEW_REWARDS, {})
    assert [e.trajectory.reward for e in VersionedStore.open(tmp_path / "s", branch="other").trajectories()] == [2.0]


@pytest.mark.parametrize("text", ['{"zarr_format" 3}', '{"zarr_format": 3, "node_type": "arry"}', "\ufffd"])
def test_damaged_metadata_of_an_array_is_a_store_error(tmp_path: Path, text: str) -> None:
    """A changed bit in it gave a traceback of the JSON parser."""
    zarr.create_group(tmp_path).create_array("ids", shape=(3,), dtype="int32")
    (tmp_path / "ids" / "zarr.json").write_text(text)
    arrays = ArrayCache(SimpleNamespace(store=LocalStore(tmp_path)), "a store")
    with pytest.raises(StoreError, match=r"^a store: ids cannot be read: "):
        arrays["ids"]
    (tmp_path / "zarr.json").write_text(text)
    with pytest.raises(StoreError, match=r"^a store: the store cannot be read: "):
        ArrayCache(SimpleNamespace(store=LocalStore(tmp_path)), "a store")
