"""Atomic writing of files and folders: they appear complete or not at all, even if the writer is killed.

They are written beside their destination under a temporary name, flushed to disk, and renamed. Two writers of one
path do not conflict: the result is what one of them wrote. A reader of a file sees the one or the other. A folder that
replaces another takes two renames: between them the path is absent, and if the writer is killed there, until the next
writer of that path puts the old folder back. What else a killed writer leaves behind is removed by that writer too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from staleflow.stores.errors import ConfigError, StaleflowError, StoreError, raised_as, strerror

TEMPORARY_NAME_CHARS = 50
"""Characters of the final name that a temporary name repeats: at most 200 bytes, where file systems allow 255."""

ErrorTypes = tuple[type[Exception], ...]


@contextlib.contextmanager
def replacing(path: Path, remedy: str, *, error_types: ErrorTypes = (), flush: bool = True) -> Iterator[Path]:
    """Context manager: yields a temporary path, and renames the file to `path` if the block ends without an error.

    A path that is no regular file (a pipe, /dev/stdout) is written to directly. Errors of this package pass through.

    Args:
        path: The file to replace.
        remedy: What to do about a disk that is full or not writable, for the message.
        error_types: Exceptions besides OSError that the block raises when it cannot write.
        flush: False for a file in memory, which is lost with the machine anyway.

    Raises:
        StoreError: `path` is unchanged then.
    """
    with _raised_as_store_error(path, remedy, error_types):
        path = path.resolve()  # a symbolic link is kept
        if path.exists() and not path.is_file():
            yield path
            return
        with _temporary(path, folder=False) as tmp_path:
            yield tmp_path
            if flush:
                _flush(tmp_path)
            tmp_path.replace(path)
        if flush:
            _flush(path.parent)


def replace_text(path: Path, text: str, remedy: str) -> None:
    """Write a text as UTF-8 with `replacing`."""
    with replacing(path, remedy) as tmp_path:
        tmp_path.write_text(text, "utf-8")


@contextlib.contextmanager
def replacing_folder(path: Path, remedy: str, *, error_types: ErrorTypes = ()) -> Iterator[Path]:
    """Context manager: yields a temporary, empty folder, and renames it to `path` if the block ends without an error.
    Raises StoreError; then `path` is unchanged."""
    with _raised_as_store_error(path, remedy, error_types):
        path = path.resolve()
        with _temporary(path, folder=True) as tmp_path:
            yield tmp_path
            flush_all(tmp_path)
            old_path = tmp_path.with_suffix(".old")
            try:
                with contextlib.suppress(FileNotFoundError):
                    path.rename(old_path)  # a folder cannot be renamed onto a full one
                tmp_path.replace(path)
            except BaseException as error:
                # Where another writer's folder has appeared in between, it replaces this one.
                if not isinstance(error, OSError) or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    with contextlib.suppress(OSError):
                        old_path.rename(path)
                    raise
            _flush(path.parent)
            remove(tmp_path)  # exists only if the other writer's folder stays
            with contextlib.suppress(OSError):
                old_path.rename(tmp_path)  # removed under this name: what is called old is whole


def flush_and_rename(tmp_path: Path, path: Path) -> None:
    """Flush a finished file or folder to disk and rename it to `path`. Raises OSError, also if it would replace a
    folder that is not empty."""
    flush_all(tmp_path)
    tmp_path.replace(path)
    _flush(path.parent)


def require_writable_folder(folder: Path) -> None:
    """Create the folder of --out and check that it is writable, before long work. Raises ConfigError."""
    remedy = "choose another folder with --out"
    with raised_as(ConfigError, f"{folder}: cannot be written", OSError, remedy=remedy, describe=strerror):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


@contextlib.contextmanager
def _raised_as_store_error(path: Path, remedy: str, error_types: ErrorTypes) -> Iterator[None]:
    """Raise error_types as a StoreError of one line."""
    caught_types: ErrorTypes = (OSError, *error_types)
    try:
        yield
    except StaleflowError:
        raise
    except caught_types as error:
        lines = strerror(error).strip().splitlines() or [type(error).__name__]
        raise StoreError(f"{path}: cannot be written: {lines[0]}; {remedy}") from error


@contextlib.contextmanager
def _temporary(path: Path, *, folder: bool) -> Iterator[Path]:
    """A temporary file or folder beside `path`, removed at the end unless it was renamed. It is locked until then: one
    that is not locked was left by a writer that has died."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
    while True:
        tmp_path = path.with_name(f".{path.name[:TEMPORARY_NAME_CHARS]}.{secrets.token_hex(8)}.part")
        if folder:
            tmp_path.mkdir()
            fd = os.open(tmp_path, os.O_RDONLY)
        else:
            fd = os.open(tmp_path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            if not _lock(fd) or not tmp_path.exists():
                continue  # another writer sweeps it, or has swept it
            yield tmp_path
            return
        finally:
            os.close(fd)
            remove(tmp_path)


def _lock(fd: int) -> bool:
    """Lock an open file or folder; False if another holds its lock. Where files cannot be locked, nothing can be swept
    either: True."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _remove_leftovers(path: Path) -> None:
    """Remove temporary files of `path` whose writers have died. After a kill between the two renames of
    `replacing_folder`, put the old folder back."""
    name_pattern = re.compile(rf"\.{re.escape(path.name[:TEMPORARY_NAME_CHARS])}\.[0-9a-f]{{16}}\.part")
    for leftover in [p for p in path.parent.iterdir() if name_pattern.fullmatch(p.name)]:
        with contextlib.suppress(OSError):
            # NFS locks only what is open for writing.
            fd = os.open(leftover, os.O_RDONLY if leftover.is_dir() else os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(leftover)
            finally:
                os.close(fd)
    if len(path.name) >= TEMPORARY_NAME_CHARS:
        return  # an old folder may be that of a longer name
    name_pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.old")
    for leftover in [p for p in path.parent.iterdir() if name_pattern.fullmatch(p.name)]:
        if leftover.with_suffix(".part").exists():
            continue  # its writer is about to rename that one
        with contextlib.suppress(OSError):
            if path.exists():
                remove(leftover)
            else:
                leftover.rename(path)


def remove(path: Path) -> None:
    """Remove a file or folder; does nothing if it does not exist or cannot be removed."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def flush_all(path: Path) -> None:
    """Flush a file, or a folder with all its contents, to disk."""
    if path.is_dir():
        for inside in path.rglob("*"):
            if not inside.is_symlink():
                _flush(inside)
    _flush(path)


def _flush(path: Path) -> None:
    """Flush a file's bytes, or a folder's entries, to disk. Folders only where the file system supports it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(fd)
