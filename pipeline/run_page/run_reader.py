"""Reads one run's folder for the run page, and caches what it has read.

Everything read through one `StoredSnapshot` belongs to one snapshot of the store, so a page never mixes two. A live run
is followed by reading only what its latest commits added.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.coordination.journal import (
    PART_HEADING,
    list_files,
    list_start_files,
    open_part,
    uncompressed_bytes,
)
from staleflow.pipeline.recovery.run_folder import is_in_use, load_job, require_run
from staleflow.pipeline.run_page.journal_index import JournalIndex
from staleflow.pipeline.runtime.evaluation_results import Evaluation, read_evaluations, read_suites
from staleflow.pipeline.stored_runs.response_texts import make_display_detokenizer
from staleflow.stores.auditing.drop_bias import compute_drop_bias
from staleflow.stores.auditing.weight_counts import WeightCheckCounter
from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectories.records import CommitRecord
from staleflow.stores.trajectories.repository import MAIN
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.tasks.rendering.chat_tokenizer import Detokenizer, IdDetokenizer

MAX_CACHED_BRANCHES = 2
"""Branches whose columns stay in memory: a comparison reads two; 100,000 trajectories take some 30 MiB each."""


READ_AT_ONCE_BYTES = 16 * 2**20
"""Bytes of a journal read for one request: about a second."""


class StoredSnapshot:
    """One snapshot of a run's store. Columns are read on first use. Thread-safe."""

    def __init__(self, store: VersionedStore, branch: str, records: list[CommitRecord]) -> None:
        self.store = store
        self.branch = branch
        self.records = records
        """All commits, oldest first."""
        self._lock = threading.Lock()

    @property
    def steps(self) -> list[CommitRecord]:
        """The training steps, oldest first."""
        return [r for r in self.records if r.kind == "step"]

    @cached_property
    def weight_lines(self) -> tuple[str, ...]:
        """Counts of verified, unverified and contradicted weights as lines; empty before the first pull."""
        counts = WeightCheckCounter(self.records).counts()
        return counts.lines if counts.verified or counts.not_verified or counts.contradicted else ()

    @property
    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """[R] arrays by the column names of `--where`."""
        with self._lock:
            return self._columns

    @cached_property
    def _columns(self) -> dict[str, npt.NDArray[Any]]:
        return self.store.displayed_columns()

    @cached_property
    def drop_bias_lines(self) -> list[str]:
        """How dropped trajectories differ from trained ones, one line each; see stores/auditing/drop_bias.py."""
        return compute_drop_bias([self.columns]).lines

    def position(self, trajectory: int) -> int:
        """Position of a trajectory in the store. Raises ConfigError."""
        (positions,) = np.nonzero(self.columns["trajectory"] == trajectory)
        if not len(positions):
            raise ConfigError(f"no stored trajectory {trajectory}; it was never started or is still in flight")
        return int(positions[0])


class JournalFollower:
    """Reads the journals of a run's starts, each from where it was read before. members_per_group: trajectories of a
    group."""

    def __init__(self, members_per_group: int) -> None:
        self._members_per_group = members_per_group
        self.index = JournalIndex(members_per_group)
        self._files: list[tuple[int, int, int]] = []
        """(inode, bytes read, lines read) of each file of the journals; no inode of a compressed one."""
        self._incomplete_bytes = 0
        """Bytes of incomplete last lines that the latest call has seen."""

    def follow(self, journals: Sequence[Path], max_bytes: int = READ_AT_ONCE_BYTES) -> None:
        """Read new lines of the journals, at most about `max_bytes` bytes. If a file was replaced, all are read again;
        a part that was renamed or compressed has the same contents."""
        files, inodes, sizes = _list_journal_files(journals)
        known = [inode for inode, *_ in self._files]
        are_same_files = all(now in (0, before) or not before for before, now in zip(known, inodes, strict=False))
        if len(inodes) < len(known) or not are_same_files:
            self._files.clear()
            self.index = JournalIndex(self._members_per_group)
        self._incomplete_bytes = 0
        with contextlib.suppress(FileNotFoundError):  # renamed since it was listed: the next call reads it
            for i, (journal, file) in enumerate(files):
                if i == len(self._files):
                    self._files.append((inodes[i], 0, 0))
                    if i == 0 or files[i - 1][0] != journal:
                        self.index.begin_start()
                max_bytes -= self._read(i, file, inodes[i], sizes[i], max_bytes)
                if max_bytes <= 0:
                    break
        num_bytes_read = self._incomplete_bytes + sum(offset for _, offset, _ in self._files)
        self.index.read_share = min(1.0, num_bytes_read / sum(sizes)) if any(sizes) else 1.0

    def _read(self, number: int, file: Path, inode: int, size: int, max_bytes: int) -> int:
        """Read on in a file that has `size` bytes; returns how many were read. Raises FileNotFoundError."""
        _, start, line_number = self._files[number]
        offset = start
        if offset < size:
            with open_part(file) as lines:
                if inode and os.fstat(lines.fileno()).st_ino != inode:
                    raise FileNotFoundError(file)
                lines.seek(offset)
                while offset < size and offset - start < max_bytes:
                    line = lines.readline()
                    if not line.endswith(b"\n"):  # it is being written, or its writer was killed
                        self._incomplete_bytes += size - offset
                        break
                    line_number += 1
                    offset += len(line)
                    if line_number > 1 or not line.startswith(PART_HEADING):
                        self.index.add(line, f"{file.name}, line {line_number},")
        self._files[number] = (inode, offset, line_number)
        return offset - start


def _list_journal_files(journals: Sequence[Path]) -> tuple[list[tuple[Path, Path]], list[int], list[int]]:
    """The journals' files, each with its journal; their inodes, 0 of compressed ones; their sizes uncompressed."""
    while True:
        files = [(journal, file) for journal in journals for file in list_files(journal)]
        try:
            inodes = [0 if file.suffix == ".gz" else file.stat().st_ino for _, file in files]
            return files, inodes, [uncompressed_bytes(file) for _, file in files]
        except FileNotFoundError:
            continue  # compressed or renamed meanwhile


class RunReader:
    """Reads a run's folder. Thread-safe. Raises ConfigError if the folder has no run."""

    def __init__(self, run_dir: Path) -> None:
        require_run(run_dir)
        self.run_dir = run_dir
        self._job: tuple[int, RunConfig] | None = None
        """Modification time of config.toml in nanoseconds, and its job; None until it is read."""
        self._snapshots: dict[str, StoredSnapshot] = {}
        """The latest snapshots by branch, least recently read first."""
        self._lock = threading.Lock()
        self._journal = JournalFollower(self.config.members_started_per_group)
        self._journal_lock = threading.Lock()

    @property
    def config(self) -> RunConfig:
        """The run's current job, which a resume may change. Raises ConfigError."""
        try:
            modified_ns = (self.run_dir / "config.toml").stat().st_mtime_ns
        except OSError:
            modified_ns = self._job[0] if self._job else -1  # being replaced
        if self._job is None or modified_ns != self._job[0]:
            self._job = (modified_ns, load_job(self.run_dir))
        return self._job[1]

    def read_snapshot(self, branch: str = MAIN) -> StoredSnapshot | None:
        """The current state of the store; None if the run has stored nothing yet. Raises ConfigError, StoreError."""
        path = self.run_dir / "store"
        if not path.exists():
            return None
        with self._lock:
            store = VersionedStore.open_pinned(path, branch)
            snapshot = self._snapshots.pop(branch, None)
            if snapshot is None or snapshot.store.snapshot != store.snapshot:
                records = (
                    snapshot.records if snapshot is not None and store.is_at_or_after(snapshot.store.snapshot) else []
                )
                snapshot = StoredSnapshot(store, branch, [*records, *store.commits(len(records))])
            self._snapshots[branch] = snapshot
            while len(self._snapshots) > MAX_CACHED_BRANCHES:
                del self._snapshots[next(iter(self._snapshots))]
            return snapshot

    @cached_property
    def detokenizer(self) -> Detokenizer:
        """The detokenizer of the run."""
        return make_display_detokenizer(self.config)

    @property
    def token_ids_note(self) -> str:
        """Why token ids are shown instead of text; empty if text is shown."""
        if not isinstance(self.detokenizer, IdDetokenizer):
            return ""
        if self.config.emulated:
            return "the engine was emulated, its tokens have no text: token ids are shown"
        return f"the tokenizer of model.path = {self.config.model.path!r} cannot be loaded: token ids are shown"

    def evaluations(self) -> list[Evaluation]:
        """Rewards on held-out prompts so far, and figures of benchmark tasks. Raises StoreError."""
        return [*read_evaluations(self.run_dir), *read_suites(self.run_dir)]

    @contextlib.contextmanager
    def journal_index(self) -> Iterator[JournalIndex]:
        """Context manager: the index of the run's journal, for one reader at a time. Each call reads a limited part of
        a long journal; the index says how much it has read."""
        with self._journal_lock:
            self._journal.follow([events for _, events in list_start_files(self.run_dir)])
            yield self._journal.index

    def state(self) -> str:
        """ "starting", "running", "finished", "ended early" or "interrupted". A run that ended early counts as running
        while its folder is in use, because it may have been resumed."""
        snapshot = self.read_snapshot()
        has_ended = snapshot is not None and bool(snapshot.records) and snapshot.records[-1].kind == "end"
        if has_ended and snapshot is not None and len(snapshot.steps) >= self.config.steps:
            return "finished"
        if is_in_use(self.run_dir):
            return "running" if snapshot is not None else "starting"
        return "ended early" if has_ended else "interrupted"
