"""Resume points of a run: the trainer's full state at a version. The latest few are kept, and on request one in every
so many versions.

A trainer of one process writes a file; one of several a folder, into which each process writes its shards. Either
becomes visible by rename (stores/files.py), so a process that resumes sees all of it or nothing. Any number of
processes can resume from either.

Invariant: after `claim`, no point of an earlier claimant becomes visible. After its driver is lost, a trainer still
finishes its step and writes a point. The resumed run never had these weights, and must not take the point for its own.
The exception is a writer that is stopped for longer than CLAIM_LOCK_S just before its rename, and then goes on.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import re
import secrets
import shutil
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

from staleflow.stores.errors import StoreError, raised_as
from staleflow.stores.files import flush_all, remove, replacing, replacing_folder
from staleflow.stores.trajectory import PolicyVersion
from staleflow.stores.weights.retention import NUM_LATEST_KEPT, kept_versions

CLAIM_LOCK_S = 5.0
"""Seconds to wait for the lock of the claim file; after that the lock is ignored."""
POINT_NAME = re.compile("v([0-9]{8}|[1-9][0-9]{8,17})")
"""The name of a point, without its suffix."""
SHARD_METADATA = ".metadata"
"""File in a folder of shards that says which shard has each tensor."""
REMEDY = "free space, move runs_dir or set training.resume_every"
LOAD_ERRORS = (
    OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, EOFError, pickle.UnpicklingError,
    zipfile.BadZipFile,
)  # fmt: skip
"""Exceptions that reading a file can raise if it is not a complete resume point of the job."""
SHORT_WRITE_MARKS = ("inline_container", "PytorchStreamWriter")
"""Texts in torch's errors if it could not write the whole file."""


class ResumePoints:
    """The resume points of one run, in one folder. keep_every: points of versions that this number divides are not
    removed by later writes; 0: only the latest are kept."""

    def __init__(self, folder: Path, keep_every: int = 0) -> None:
        self.folder = folder
        self._keep_every = keep_every
        self._claim_file = folder.with_name(f".{folder.name}.writer")
        """File with the token of the latest claimant. Writers lock it."""
        self._claim_token = b""

    def claim(self) -> None:
        """Become the only writer of points. Earlier writers can publish no more points. Raises StoreError."""
        token = secrets.token_hex(8).encode()
        with raised_as(StoreError, f"{self._claim_file}: cannot be written", OSError, remedy=REMEDY):
            self._claim_file.parent.mkdir(parents=True, exist_ok=True)
            with self._locked() as fd:
                os.ftruncate(fd, 0)
                os.pwrite(fd, token, 0)
        self._claim_token = token

    def path(self, version: PolicyVersion, *, sharded: bool | None = None) -> Path:
        """Path of a version's point. sharded: True for a folder, False for a file, None for whichever exists."""
        file, folder = self.folder / f"v{version:08d}.pt", self.folder / f"v{version:08d}.shards"
        return folder if sharded or (sharded is None and folder.exists()) else file

    def versions(self) -> list[PolicyVersion]:
        """The versions that have a resume point, oldest first."""
        paths = (*self.folder.glob("v*.pt"), *self.folder.glob("v*.shards"))
        return sorted({PolicyVersion(int(path.stem[1:])) for path in paths if POINT_NAME.fullmatch(path.stem)})

    def latest_versions(self) -> list[PolicyVersion]:
        """The versions of the latest points, oldest first: those that a run may be resumed from without loss."""
        return self.versions()[-NUM_LATEST_KEPT:]

    def complete_versions(self) -> list[PolicyVersion]:
        """The versions whose resume point is complete.

        A folder is complete if it has the file that is written last; a torch file if it is a zip archive, since the zip
        directory is written last.
        """
        candidates = ((version, self.path(version)) for version in self.versions())
        return [
            version for version, path in candidates if (path / SHARD_METADATA).is_file() or zipfile.is_zipfile(path)
        ]

    def remove_after(self, version: PolicyVersion) -> None:
        """Remove the points of later versions, including those that a killed writer had moved aside.

        A run that continues from `version` makes these anew, with other weights: what is left of the old ones would be
        taken for them if it is killed before it has written its own.
        """
        for later in self.versions():
            if later > version:
                self._remove(later)
        for aside in self.folder.glob(".v*.old"):
            if int(aside.name[2:].partition(".")[0]) > version:
                remove(aside)

    @contextlib.contextmanager
    def writing(self, version: PolicyVersion, *, sharded: bool = False) -> Iterator[Path]:
        """Context manager: yields a temporary path, for the file of `version` or an existing folder to fill. It becomes
        the point if the block ends without an error, and the points that are not kept are removed. Raises
        StoreError."""
        path = self.path(version, sharded=sharded)
        # torch.save raises RuntimeError on a full disk.
        replacement = replacing_folder if sharded else replacing
        with contextlib.ExitStack() as until_renamed:
            with (
                replacement(path, REMEDY, error_types=(RuntimeError,)) as tmp_path,
                _explain_short_writes(tmp_path.parent),
            ):
                yield tmp_path
                flush_all(tmp_path)  # gigabytes take longer than the claim may be locked
                until_renamed.enter_context(self._checked_claim(path))
            # A file and a folder of one version must not exist together: they are of different numbers of processes.
            remove(self.path(version, sharded=not sharded))
            versions = self.versions()
            for other in {*versions} - {*kept_versions(versions, self._keep_every)}:
                self._remove(other)

    @contextlib.contextmanager
    def _checked_claim(self, path: Path) -> Iterator[None]:
        """Context manager that locks the claim. Raises StoreError if another writer has claimed the points since."""
        if not self._claim_token:
            yield
            return
        with self._locked() as fd:
            if os.pread(fd, len(self._claim_token) + 1, 0) != self._claim_token:
                raise StoreError(f"{path}: is not written: the run goes on with another trainer")
            yield

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Context manager with the locked claim file. It is not locked if the file system has no locks, or if another
        process keeps it locked for longer than CLAIM_LOCK_S, for example a stopped one. Raises OSError."""
        fd = os.open(self._claim_file, os.O_RDWR | os.O_CREAT, 0o666)
        deadline = time.monotonic() + CLAIM_LOCK_S
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() < deadline:
                        time.sleep(0.01)
                        continue
                except OSError:
                    pass  # this file system has no locks
                break
            yield fd
        finally:
            os.close(fd)

    def _remove(self, version: PolicyVersion) -> None:
        for sharded in (False, True):
            remove(self.path(version, sharded=sharded))


@contextlib.contextmanager
def _explain_short_writes(folder: Path) -> Iterator[None]:
    """Raise torch's short-write error as a disk-full error: torch names only a position in the file."""
    try:
        yield
    except RuntimeError as error:
        if not any(mark in str(error) for mark in SHORT_WRITE_MARKS):
            raise
        free_bytes = shutil.disk_usage(folder).free
        raise RuntimeError(
            f"a write was cut short, as on a full disk ({free_bytes / 2**20:.1f} MiB are free)"
        ) from error


@contextlib.contextmanager
def loading(path: Path) -> Iterator[None]:
    """Context manager: raises the errors of loading a resume point with torch or numpy as a StoreError with a
    remedy."""
    try:
        yield
    except LOAD_ERRORS as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise StoreError(f"{path}: no resume point of this job: {reason}; remove it to use an older one") from error
