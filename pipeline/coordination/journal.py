"""The journal of a coordinator's events and commands, a JSON line per event. Replayed, it gives the same commands."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, get_args

from pipeline.coordination.commands import Command
from pipeline.coordination.coordinator import Coordinator
from pipeline.coordination.events import Event, NewGroup, RunResumed
from stores.codec import Codec
from stores.errors import ConfigError, ProtocolViolation
from stores.in_flight import GroupInFlight, MemberInFlight
from stores.staleness import Ending
from stores.trajectory import AbortReason, Fate

CODEC = Codec(tagged=(*get_args(Event), *get_args(Command), NewGroup, Ending, GroupInFlight, MemberInFlight))
ENDED = re.compile(f"({'|'.join(f.value for f in Fate)}):({'|'.join(r.value for r in AbortReason)})")
"""A fate and its reason, as `RunResumed` has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """One event, when it was handled, and the commands it led to."""

    now: float
    event: Event
    commands: tuple[Command, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How a replayed journal compares with the recorded one."""

    num_events: int
    num_commands: int
    difference: str
    """The first difference, empty if there is none."""

    def __add__(self, later: Replay) -> Replay:
        """Add up the replays of two parts of one run."""
        return Replay(
            num_events=self.num_events + later.num_events,
            num_commands=self.num_commands + later.num_commands,
            difference=self.difference or later.difference,
        )


class Journal:
    """Appends entries to a file; flushed every entry, so that a killed run's journal is whole but for its last line."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a")

    def append(self, now: float, event: Event, answered: Sequence[Command]) -> None:
        line = CODEC.encode(JournalEntry(now=now, event=event, commands=tuple(answered)))
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Entries:
    """The entries of a journal, read as they are asked for. torn_line: number of its last line, once that was found to
    be cut off, as it is if its writer was killed; such a line is left out. 0 if it is whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn_line = 0

    def __iter__(self) -> Iterator[JournalEntry]:
        """Iterate over the entries. Raises ConfigError, naming the line, for an invalid one."""
        try:
            with self.path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    try:
                        value = json.loads(line)
                    except (ValueError, RecursionError):
                        if not file.read(1):
                            self.torn_line = number
                            return
                        raise ConfigError(f"{self.path}, line {number}: not JSON") from None
                    try:
                        entry = CODEC.decode(value, JournalEntry)
                        _check(entry)
                    except ValueError as error:
                        raise ConfigError(f"{self.path}, line {number}: {error}") from error
                    yield entry
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read: {error.strerror}") from error


def _check(entry: JournalEntry) -> None:
    """Raise ValueError for what has the right type and still cannot be replayed."""
    if not math.isfinite(entry.now):
        raise ValueError(f"now: {entry.now} is no time")
    if isinstance(entry.event, RunResumed):
        for key, count in entry.event.num_ended:
            if not ENDED.fullmatch(key) or count < 0:
                raise ValueError(f"event.num_ended: {key!r}: {count} is no count of a fate and its reason")


def read(path: Path) -> Entries:
    """The entries of a journal."""
    return Entries(path)


def replay(coordinator: Coordinator, entries: Iterable[JournalEntry]) -> Replay:
    """Feed the recorded events to a fresh coordinator and compare its commands with the recorded ones."""
    num_events = num_commands = 0
    for entry in entries:
        num_events += 1
        try:
            answered = coordinator.handle(entry.event, entry.now)
        except ProtocolViolation as violation:
            what = f"event {num_events}: {str(violation).splitlines()[0]}"
            return Replay(num_events=num_events, num_commands=num_commands, difference=what)
        num_commands += len(answered)
        if tuple(answered) != entry.commands:
            what = f"event {num_events}, {entry.event}: answered {answered}, recorded {list(entry.commands)}"
            return Replay(num_events=num_events, num_commands=num_commands, difference=what)
    return Replay(num_events=num_events, num_commands=num_commands, difference="")
