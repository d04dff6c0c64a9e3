"""Files and folders that appear whole or not at all, whatever kills their writer.

They are made beside their place, under a name of the writer's own, flushed to disk, and renamed. Two writers of one
place do not meet: the later rename wins, and each reader sees the one or the other. What a killed writer leaves is
removed by the next one of that place.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from stores.errors import StoreError

NAME_CHARS = 50
"""Of the final name, how much a part's own name repeats: at most 200 bytes, where file systems allow 255."""

Failures = tuple[type[Exception], ...]


def replace_file(
    path: Path, write: Callable[[Path], object], remedy: str, *, failures: Failures = (), flush: bool = True
) -> None:
    """Have `write` fill a file, given where, and put it at `path` when it is whole.

    remedy: what to do about a disk that is full or not writable, for the message. failures: what `write` raises of its
    own when it cannot write. flush: False for what need not outlive the machine's memory. What is no regular file (a
    pipe, /dev/stdout) is written to directly. Raises StoreError; then `path` is as it was.
    """
    with _said(path, remedy, failures):
        path = path.resolve()  # a link stays one
        if path.exists() and not path.is_file():
            write(path)
            return
        with _part(path, folder=False) as part:
            write(part)
            if flush:
                _flush(part)
            part.replace(path)
        if flush:
            _flush(path.parent)


def replace_text(path: Path, text: str, remedy: str) -> None:
    """`replace_file` for a text, as UTF-8."""
    replace_file(path, lambda part: part.write_text(text, encoding="utf-8"), remedy)


def replace_folder(path: Path, write: Callable[[Path], object], remedy: str, *, failures: Failures = ()) -> None:
    """Have `write` fill an empty folder, given where, and put it at `path` when it is whole. Raises StoreError; then
    `path` is as it was."""
    with _said(path, remedy, failures):
        path = path.resolve()
        with _part(path, folder=True) as part:
            write(part)
            if not path.exists():
                publish(part, path)
                return
            _flush_all(part)
            old = part.with_suffix(".old")
            path.rename(old)  # a folder cannot be renamed onto a full one
            try:
                part.replace(path)
            except OSError:
                old.rename(path)
                raise
            _flush(path.parent)
            with contextlib.suppress(OSError):
                old.rename(part)  # removed under this name: what is called old is whole


def publish(part: Path, path: Path) -> None:
    """Flush a finished file or folder to disk and give it its name. Raises OSError, also where a folder would replace
    one that is not empty."""
    _flush_all(part)
    part.replace(path)
    _flush(path.parent)


@contextlib.contextmanager
def _said(path: Path, remedy: str, failures: Failures) -> Iterator[None]:
    """Failures in one line."""
    expected: Failures = (OSError, *failures)
    try:
        yield
    except StoreError:
        raise
    except expected as error:
        lines = str(getattr(error, "strerror", None) or error).strip().splitlines() or [type(error).__name__]
        raise StoreError(f"{path}: cannot be written: {lines[0]}; {remedy}") from error


@contextlib.contextmanager
def _part(path: Path, *, folder: bool) -> Iterator[Path]:
    """A new file or folder beside `path`, gone at the end if it still has that name. It is locked for as long: what is
    not locked was left by a writer that is gone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path)
    while True:
        part = _beside(path, "part")
        if folder:
            part.mkdir()
            held = os.open(part, os.O_RDONLY)
        else:
            held = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            if not _lock(held) or not part.exists():
                continue  # another writer sweeps it, or has swept it
            yield part
            return
        finally:
            os.close(held)
            _remove(part)


def _lock(held: int) -> bool:
    """Lock an open file or folder; False if another holds its lock. Where files cannot be locked, nothing can be swept
    either: True."""
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _sweep(path: Path) -> None:
    """Remove the parts of `path` whose writers are gone. Of one killed between the two renames of `replace_folder`, put
    the old folder back."""
    called = re.compile(rf"\.{re.escape(path.name[:NAME_CHARS])}\.[0-9a-f]{{16}}\.part")
    for left in [p for p in path.parent.iterdir() if called.fullmatch(p.name)]:
        with contextlib.suppress(OSError):
            held = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(left)
            finally:
                os.close(held)
    if len(path.name) >= NAME_CHARS:
        return  # an old folder may be that of a longer name
    called = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.old")
    for left in [p for p in path.parent.iterdir() if called.fullmatch(p.name)]:
        if left.with_suffix(".part").exists():
            continue  # its writer is about to rename that one
        with contextlib.suppress(OSError):
            if path.exists():
                _remove(left)
            else:
                left.rename(path)


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name[:NAME_CHARS]}.{secrets.token_hex(8)}.{kind}")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _flush_all(path: Path) -> None:
    """A file, or a folder with all that is in it."""
    if path.is_dir():
        for inside in path.rglob("*"):
            if not inside.is_symlink():
                _flush(inside)
    _flush(path)


def _flush(path: Path) -> None:
    """Have a file's bytes, or a folder's names, on disk. Where a file system cannot flush folders, it is left to it."""
    held = os.open(path, os.O_RDONLY)
    try:
        os.fsync(held)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(held)
