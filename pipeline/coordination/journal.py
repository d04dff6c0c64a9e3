"""The journal of a coordinator's events and commands, one JSON line per event. Replaying the events gives the same
commands.

A long journal has several files. Entries are appended to `events.jsonl`. When that has PART_BYTES, it is closed and
renamed to `events.jsonl.0001`, then `.0002` and so on, and a new file begins with a line that has its number. Closed
parts may be compressed (`events.jsonl.0001.gz`) at any time. Readers read all parts in order.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast, get_args

from staleflow.pipeline.coordination.commands import Command, Discard, Pull, Route, Train
from staleflow.pipeline.coordination.coordinator import MAX_PULLS_PER_EVENT, MAX_ROUTES_PER_EVENT, Coordinator
from staleflow.pipeline.coordination.events import DecodeStats, Event, RunResumed
from staleflow.stores.errors import ConfigError, ProtocolViolation, StoreError, raised_as, strerror
from staleflow.stores.in_flight.in_flight_state import GroupInFlight, MemberInFlight, NewGroup
from staleflow.stores.serialization import Codec
from staleflow.stores.staleness.ledger_groups import Ending
from staleflow.stores.trajectories.records import SourceState
from staleflow.stores.trajectory import AbortReason, Fate

CODEC = Codec(
    tagged=(
        *get_args(Event),
        *get_args(Command),
        NewGroup,
        DecodeStats,
        Ending,
        GroupInFlight,
        MemberInFlight,
        SourceState,
    ),
    runs={Train: {"trajectories": 1, "versions": 0}},
)
OUTCOME_KEY_PATTERN = re.compile(f"({'|'.join(f.value for f in Fate)}):({'|'.join(r.value for r in AbortReason)})")
"""Pattern of a fate and its reason in `RunResumed`."""
PART_BYTES = 64 * 2**20
"""Size at which a journal continues in a new file: about 140,000 trajectories."""
BUFFER_BYTES = 2**20
"""Size of a read from a compressed part."""
PART = "part"
"""Key of a continuing file's first line: {"part": its number}."""
PART_HEADING = b'{"part":'
"""Beginning of that line; no entry begins so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """One event, the time at which it was handled, and the commands that followed."""

    now: float
    event: Event
    commands: tuple[Command, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayComparison:
    """Result of comparing a replayed journal with the recorded one."""

    num_events: int
    num_commands: int
    difference: str
    """The first difference, empty if there is none."""

    def __add__(self, other: ReplayComparison) -> ReplayComparison:
        """Add up the replays of two parts of one run."""
        return ReplayComparison(
            num_events=self.num_events + other.num_events,
            num_commands=self.num_commands + other.num_commands,
            difference=self.difference or other.difference,
        )


class Journal:
    """Appends entries to a file. Each is flushed, so that only the last line of a killed run's journal may be
    incomplete. Writing raises StoreError; closing does not. on_part_closed: called with the path of each closed
    part."""

    def __init__(
        self, path: Path, on_part_closed: Callable[[Path], None] | None = None, part_bytes: int = PART_BYTES
    ) -> None:
        self._path, self._on_part_closed, self._part_bytes = path, on_part_closed, part_bytes
        self._part_number = max(list_closed_parts(path), default=0) + 1
        with self._as_store_error():
            self._file: BinaryIO = path.open("ab")
            _next_file(path).unlink(missing_ok=True)
        self._begin_part()

    def _begin_part(self) -> None:
        self._bytes = self._file.tell()
        if self._part_number > 1 and not self._bytes:
            self._write({PART: self._part_number})

    def _write(self, value: Any) -> None:
        line = json.dumps(value, separators=(",", ":")).encode() + b"\n"
        with self._as_store_error():
            self._file.write(line)
            self._file.flush()
        self._bytes += len(line)

    def append(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        self._write(CODEC.encode(JournalEntry(now=now, event=event, commands=tuple(commands))))
        if self._bytes >= self._part_bytes:
            self._close_part()

    def _close_part(self) -> None:
        part = self._path.with_name(f"{self._path.name}.{self._part_number:04}")
        with self._as_store_error():
            self._file.close()
            self._file = _next_file(self._path).open("ab")
            self._path.rename(part)
            _next_file(self._path).rename(self._path)
            self._part_number += 1
        self._begin_part()
        if self._on_part_closed is not None:
            self._on_part_closed(part)

    def _as_store_error(self) -> contextlib.AbstractContextManager[None]:
        """Raise a failure to write as a StoreError of one line."""
        remedy = "free space or move runs_dir"
        return raised_as(StoreError, f"{self._path}: cannot be written", OSError, remedy=remedy, describe=strerror)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # failed writes have raised already
            self._file.close()


def _next_file(path: Path) -> Path:
    """The file that becomes the journal at `path` when its present part is closed. If only it is there, the writer was
    killed in between; if neither is, a file was removed."""
    return path.with_name(f".{path.name}.next")


def list_start_files(run_dir: Path) -> list[tuple[Path, Path]]:
    """Return the paths (job file, journal) of each start of a run, oldest first."""
    numbers = earlier_start_numbers(run_dir)
    starts = [(run_dir / f"config.{number}.toml", run_dir / f"events.{number}.jsonl") for number in numbers]
    return [*starts, (run_dir / "config.toml", run_dir / "events.jsonl")]


def earlier_start_numbers(run_dir: Path) -> list[int]:
    """Return the numbers of a run's starts before the latest, in order."""
    return sorted(int(p.name.split(".")[1]) for p in run_dir.glob("events.*.jsonl"))


def list_closed_parts(path: Path) -> dict[int, Path]:
    """The closed parts of the journal at `path`, by number. If a part exists compressed and uncompressed, the
    compressed one is complete."""
    name_pattern = re.compile(rf"{re.escape(path.name)}\.(\d{{4,}})(\.gz)?")
    closed_parts = sorted(
        (p for p in path.parent.glob(f"{path.name}.*") if name_pattern.fullmatch(p.name)), key=lambda p: p.name
    )
    return dict(sorted((int(p.name.removeprefix(f"{path.name}.").partition(".")[0]), p) for p in closed_parts))


def list_files(path: Path) -> list[Path]:
    """The files of the journal at `path`, in order; empty if there is none."""
    return [*list_closed_parts(path).values(), *([path] if path.is_file() else [])]


def open_part(file: Path) -> BinaryIO:
    """Open a file of a journal for reading lines, compressed or not."""
    compressed = file if file.suffix == ".gz" else file.with_name(f"{file.name}.gz")
    if compressed is not file:
        try:
            return file.open("rb")
        except FileNotFoundError:
            if not compressed.is_file():  # else it was compressed after it was listed
                raise
    return io.BufferedReader(cast(io.RawIOBase, gzip.open(compressed)), BUFFER_BYTES)


def uncompressed_bytes(file: Path) -> int:
    """Uncompressed size of a journal file in bytes. Raises OSError."""
    with file.open("rb") as opened_file:
        size = opened_file.seek(0, 2)
        if file.suffix == ".gz":  # gzip stores the size in the last four bytes
            opened_file.seek(max(0, size - 4))
            return int.from_bytes(opened_file.read(4), "little")
        return size


class JournalReader:
    """Iterates over the entries of a journal. An incomplete last line, which a killed process may leave, is skipped.
    incomplete_line_number: number of that line once it has been reached; 0 if there is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.incomplete_line_number = 0

    def __iter__(self) -> Iterator[JournalEntry]:
        """Iterate over the entries. Raises ConfigError, naming the line, for an invalid one, and naming the file for a
        part that is missing or damaged."""
        parts = list_closed_parts(self.path)
        missing = [n for n in range(1, max(parts, default=0) + 1) if n not in parts]
        if missing:
            name = f"{self.path.name}.{missing[0]:04}"
            raise ConfigError(f"{self.path.with_name(name)}: this part of the journal is missing; restore it")
        for number, file in parts.items():
            yield from self._read_file(file, number, is_last=False)
        if self.path.exists() or not _next_file(self.path).exists():
            yield from self._read_file(self.path, len(parts) + 1, is_last=True)

    def _read_file(self, file: Path, part_number: int, *, is_last: bool) -> Iterator[JournalEntry]:
        line_number = 0
        try:
            with open_part(file) as lines:
                for line_number, line in enumerate(lines, 1):
                    try:
                        value = json.loads(line)
                    except (ValueError, RecursionError):
                        if is_last and not lines.read(1):
                            self.incomplete_line_number = line_number
                            return
                        raise ConfigError(f"{file}, line {line_number}: not JSON") from None
                    if line_number == 1 and part_number > 1:
                        self._require_heading(file, value, part_number)
                        continue
                    try:
                        entry = CODEC.decode(value, JournalEntry)
                        _check_entry(entry)
                    except (ValueError, LookupError, TypeError) as error:
                        raise ConfigError(f"{file}, line {line_number}: {error}") from error
                    yield entry
            if not line_number and not is_last:
                raise ConfigError(f"{file}: damaged: it is empty; restore it")
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ConfigError(f"{file}: damaged after line {line_number}: {error}; restore it") from error
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error

    def _require_heading(self, file: Path, value: object, part_number: int) -> None:
        """Raise ConfigError unless a file's first line has the number of this part."""
        number = value.get(PART) if isinstance(value, dict) else None
        if not isinstance(number, int):
            raise ConfigError(f"{file}, line 1: not the heading of part {part_number} of a journal; restore the file")
        if number != part_number:
            missing = self.path.with_name(f"{self.path.name}.{part_number:04}")
            raise ConfigError(f"{missing}: this part of the journal is missing; {file.name} is {number}")


def _check_entry(entry: JournalEntry) -> None:
    """Raise ValueError for values of the right type that cannot be replayed."""
    if not math.isfinite(entry.now):
        raise ValueError(f"now: {entry.now} is not a time")
    if isinstance(entry.event, RunResumed):
        for key, count in entry.event.num_ended:
            if not OUTCOME_KEY_PATTERN.fullmatch(key) or count < 0:
                raise ValueError(f"event.num_ended: {key!r}: {count} is not a count of a fate and its reason")


def replay(coordinator: Coordinator, entries: Iterable[JournalEntry]) -> ReplayComparison:
    """Feed recorded events to a new coordinator, and compare its commands with the recorded ones."""
    num_events = num_commands = 0
    for entry in entries:
        num_events += 1
        num_routes, num_pulls = (sum(isinstance(c, kind) for c in entry.commands) for kind in (Route, Pull))
        try:  # earlier versions may have had other limits
            commands = coordinator.handle(
                entry.event, entry.now, max(MAX_ROUTES_PER_EVENT, num_routes), max(MAX_PULLS_PER_EVENT, num_pulls)
            )
        except ProtocolViolation as violation:
            difference = f"event {num_events}: {str(violation).splitlines()[0]}"
            return ReplayComparison(num_events=num_events, num_commands=num_commands, difference=difference)
        num_commands += len(commands)
        size = coordinator.ledger.group_size
        replayed, recorded = ([_without_order(c, size) for c in cs] for cs in (commands, entry.commands))
        if replayed != recorded:
            difference = f"event {num_events}, {entry.event}: commands {commands}, recorded {list(entry.commands)}"
            return ReplayComparison(num_events=num_events, num_commands=num_commands, difference=difference)
    return ReplayComparison(num_events=num_events, num_commands=num_commands, difference="")


def _without_order(command: Command, group_size: int) -> object:
    """A command without the orders that were others in earlier versions: those of the members of a group that is
    trained on, and of trajectories that end together."""
    match command:
        case Train():
            members = list(zip(command.trajectories, command.versions, strict=False))
            return command.step, [sorted(members[i : i + group_size]) for i in range(0, len(members), group_size)]
        case Discard():
            return sorted(zip(command.endings, command.versions, strict=False), key=lambda pair: pair[0].trajectory)
        case _:
            return command
