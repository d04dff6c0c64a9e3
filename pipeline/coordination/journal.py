"""The record of what the coordinator heard and answered, a JSON line an event. Replayed, it gives the same commands."""

from __future__ import annotations

import dataclasses
import enum
import json
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from pipeline.coordination import commands, events
from pipeline.coordination.commands import Command
from pipeline.coordination.coordinator import Coordinator
from pipeline.coordination.events import Event
from stores.errors import ConfigError
from stores.staleness import Ending

_TYPES: dict[str, type[Any]] = {
    t.__name__: t for t in (*typing.get_args(Event), *typing.get_args(Command), events.NewGroup, Ending)
}
assert commands.Route.__name__ in _TYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """One event, when it was heard, and what was answered."""

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
        """Of two parts of one run."""
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
        line = {"now": now, "event": to_json(event), "commands": [to_json(c) for c in answered]}
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> Iterator[JournalEntry]:
    """The entries of a journal; a torn last line is left out."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):
                return
            raise ConfigError(f"{path}, line {number}: not JSON") from None
        yield JournalEntry(
            now=value["now"],
            event=from_json(value["event"]),
            commands=tuple(from_json(c) for c in value["commands"]),
        )


def replay(coordinator: Coordinator, entries: Iterator[JournalEntry]) -> Replay:
    """Feed the recorded events to a fresh coordinator and compare its commands with the recorded ones."""
    num_events = num_commands = 0
    for entry in entries:
        answered = coordinator.handle(entry.event, entry.now)
        num_events += 1
        num_commands += len(answered)
        if tuple(answered) != entry.commands:
            what = f"event {num_events}, {entry.event}: answered {answered}, recorded {list(entry.commands)}"
            return Replay(num_events=num_events, num_commands=num_commands, difference=what)
    return Replay(num_events=num_events, num_commands=num_commands, difference="")


def to_json(value: Any) -> Any:
    """Plain values; a dataclass becomes {"type": name, field: value, ...} without its default-valued fields."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: to_json(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if f.default is dataclasses.MISSING or getattr(value, f.name) != f.default
        }
        return {"type": type(value).__name__, **fields}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [to_json(v) for v in value]
    return value


def from_json(value: dict[str, Any]) -> Any:
    """The inverse of `to_json` for events and commands."""
    cls = _TYPES[value["type"]]
    hints = typing.get_type_hints(cls)
    return cls(**{k: _typed(v, hints[k]) for k, v in value.items() if k != "type"})


def _typed(value: Any, hint: Any) -> Any:
    if isinstance(value, dict):
        return from_json(value)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and isinstance(value, list):
        inner = [args[0]] * len(value) if len(args) == 2 and args[1] is ... else list(args)
        return tuple(_typed(v, h) for v, h in zip(value, inner, strict=True))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(value)
    return value
