"""The spool: a write-ahead log of in-flight work, which outlives the processes of a run.

Entries (stores/in_flight/spool_entries.py) are appended to numbered part files in the run's folder. Invariants:

- What is read back is a prefix of what was appended, part by part: each entry is framed by its length and a checksum,
  and reading a part ends at the first incomplete frame. A kill during a write leaves such a frame.
- An entry that `append` returned from survives the end of every process, by kill -9 too: it is in the kernel's page
  cache. It is not flushed to disk; a machine that loses power loses what it had not written back yet, and then the
  trajectories concerned start again.
- No entry is acknowledged that a successor may not have read: `append` raises once another server has begun a part.
- Each commit begins a new part. A part is removed once no group in it or in an earlier part can be needed: each was
  stored by a step that all kept resume points include. So the spool holds in-flight work and what was consumed since
  the oldest resume point.
- A spool that cannot be written does not end the run: it warns once, appends nothing until the next part begins, and
  trajectories whose entries are missing restart from their prompts when the run is resumed. If the trajectory server
  is lost meanwhile, its successor ends the run once a score, batch or commit needs one of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from staleflow.stores.errors import ActorLost
from staleflow.stores.in_flight import spool_entries
from staleflow.stores.trajectory import GroupId, TrajectoryId

logger = logging.getLogger(__name__)

HEADER = b"staleflow spool 1\n"
"""First bytes of a part. Parts of other versions are not read."""
FRAME = struct.Struct("<II")
"""Length of an entry in bytes, and its CRC-32."""


def add_frame(data: bytes) -> bytes:
    """Prepend length and checksum to an entry's bytes."""
    return FRAME.pack(len(data), zlib.crc32(data)) + data


def read_frames(file: BinaryIO) -> Iterator[bytes]:
    """Read the entries of an open part, up to the first incomplete one."""
    remaining_bytes = os.fstat(file.fileno()).st_size - file.tell()
    while len(head := file.read(FRAME.size)) == FRAME.size:
        size, checksum = FRAME.unpack(head)
        remaining_bytes -= FRAME.size + size
        # The length is checked before it is read: it may be damaged.
        if remaining_bytes < 0 or zlib.crc32(data := file.read(size)) != checksum:
            return
        yield data


class Spool:
    """The spool of one run. One process appends to it, from one thread. For a resumed run call `resume`
    first.

    group_size: trajectories started per group.
    """

    def __init__(self, folder: Path, group_size: int) -> None:
        self.folder = folder
        self._group_size = group_size
        self._parts: dict[int, set[GroupId]] = {}
        """Groups with entries in a part, by part number, oldest first."""
        self._stored_at_step: dict[GroupId, int] = {}
        """The step whose commit stored the last of a group, for groups in these parts."""
        self._size = 0
        """Bytes of the current part; 0 before there is one."""
        self._failed = False
        """Whether the current part cannot be written: nothing is appended until the next one begins."""
        self._has_warned = False

    def resume(self) -> Iterator[spool_entries.Entry]:
        """Begin a new part, and return the entries of earlier ones as `read` does. If this process replaces one that is
        only silent, that one acknowledges and removes nothing from here on."""
        self._parts = {_part_number(path): set() for path in self._part_paths()}
        self._begin_part()
        return self.read()

    def read(self) -> Iterator[spool_entries.Entry]:
        """Read all entries, oldest first. Skips parts that cannot be read."""
        for path in self._part_paths():
            groups = self._parts.setdefault(_part_number(path), set())
            try:
                with path.open("rb") as file:
                    if file.read(len(HEADER)) != HEADER:
                        continue
                    for data in read_frames(file):
                        entry = spool_entries.decode(data)
                        groups |= self._groups(entry)
                        yield entry
            except (OSError, ValueError) as error:
                logger.warning("%s: the rest cannot be read: %s", path, error)

    def append(self, entries: Sequence[spool_entries.Entry]) -> bool:
        """Append entries in one write. Returns False if they could not be written. Raises ActorLost if another server
        has replaced this one, and may have read the spool before they were written."""
        if not (self._size or self._failed):
            self._begin_part()
        self._require_current()
        is_written = not self._failed and self._try_append(entries)
        self._require_current()  # who begins a part after this reads these entries
        return is_written

    def _require_current(self) -> None:
        if self._is_replaced():
            raise ActorLost("the trajectory server was replaced by another one", "server")

    def _try_append(self, entries: Sequence[spool_entries.Entry]) -> bool:
        data = b"".join(add_frame(spool_entries.encode(entry)) for entry in entries)
        try:
            self._write(data)
        except OSError as error:
            self._fail(error)
            return False
        self._size += len(data)
        groups = self._parts[max(self._parts)]
        for entry in entries:
            groups |= self._groups(entry)
            if isinstance(entry, spool_entries.GroupDrawn):  # evaluations of a resumed run use the same numbers again
                self._stored_at_step.pop(entry.group, None)
        return True

    def mark_stored(self, step: int, groups: Iterable[GroupId]) -> None:
        """Record that the commit of `step` has stored the last trajectories of these groups."""
        for group in groups:
            self._stored_at_step[group] = step

    def rotate(self, oldest_resume_version: int | None) -> None:
        """Start a new part, and remove parts that no resume point needs.

        oldest_resume_version: Version of the oldest resume point; None if there is none and stored work is not needed
        again.
        """
        self._begin_part()
        if self._is_replaced():
            return
        for number in sorted(self._parts)[:-1]:
            steps = [self._stored_at_step.get(group) for group in self._parts[number]]
            if any(s is None or (oldest_resume_version is not None and s >= oldest_resume_version) for s in steps):
                break
            with contextlib.suppress(OSError):
                self._path(number).unlink(missing_ok=True)
            del self._parts[number]
        groups = self.groups
        self._stored_at_step = {group: step for group, step in self._stored_at_step.items() if group in groups}

    @property
    def groups(self) -> set[GroupId]:
        """Groups with entries in any part."""
        return set().union(*self._parts.values())

    def clear(self) -> None:
        """Remove all entries."""
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                path.unlink()
        self._parts, self._stored_at_step, self._size = {}, {}, 0

    def _begin_part(self) -> None:
        """Begin a new part, unless the current one is empty."""
        if self._is_replaced() or (self._size == len(HEADER) and not self._failed):
            return
        number = max(self._parts, default=0) + 1
        self._parts[number] = set()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._path(number).open("xb") as file:  # a server that replaces this one may have begun the part
                file.write(HEADER)
        except OSError as error:
            if isinstance(error, FileExistsError) and self.folder.is_dir():
                del self._parts[number]
            self._fail(error)
        else:
            self._size, self._failed = len(HEADER), False

    def _is_replaced(self) -> bool:
        """Whether another server has begun a part: the folder is its own from then on."""
        return any(_part_number(path) > max(self._parts, default=0) for path in self._part_paths())

    def _write(self, data: bytes) -> None:
        """Append to the newest part; it is opened each time, so that nothing has to be closed."""
        with self._path(max(self._parts)).open("ab", buffering=0) as file:
            num_written = 0
            while num_written < len(data):
                num_written += file.write(memoryview(data)[num_written:])

    def _fail(self, error: OSError) -> None:
        """Stop writing the current part: entries are lost from here on, and none may follow in it. Warns once."""
        self._failed = True
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s cannot be written: %s; the run goes on, and what is in flight now starts again if it is resumed",
                self.folder,
                error.strerror or error,
            )

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{number:08d}.log"

    def _part_paths(self) -> list[Path]:
        return sorted(self.folder.glob("part-*.log"))

    def _groups(self, entry: spool_entries.Entry) -> set[GroupId]:
        if isinstance(entry, spool_entries.EpisodeEntry):
            return {self._group(entry.trajectory)}
        match entry:
            case spool_entries.GroupDrawn():
                return {entry.group}
            case spool_entries.TrajectoriesRouted():
                return {self._group(trajectory) for trajectory, _ in entry.routed}
            case spool_entries.BatchTaken():
                return {self._group(trajectory) for trajectory in entry.trajectories}
            case spool_entries.TrajectoriesDiscarded():
                return {ending.group for ending in entry.endings}
            case spool_entries.InFlightResumed() | spool_entries.EvaluationEnded():
                return set()

    def _group(self, trajectory: TrajectoryId) -> GroupId:
        return GroupId(trajectory // self._group_size)


def _part_number(path: Path) -> int:
    return int(path.stem.removeprefix("part-"))
