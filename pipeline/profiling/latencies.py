"""Latencies of everything but decoding, from the journal of a recorded run. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterable, Iterator

from pipeline.coordination.commands import Command, Draw, Pull, Score, Train
from pipeline.coordination.events import Event, GroupsArrived, PullFinished, TrajectoryScored, VersionPublished
from pipeline.coordination.journal import JournalEntry


def latencies(entries: Iterable[JournalEntry]) -> dict[str, float]:
    """Median seconds between a command and its outcome, by the name of its setting in [simulation]; latencies that
    did not occur in the run are absent."""
    asked: dict[Hashable, float] = {}
    took: dict[str, list[float]] = {}
    for entry in entries:
        knob, key = _answered(entry.event)
        if key in asked:
            took.setdefault(knob, []).append(entry.now - asked.pop(key))
        asked.update(dict.fromkeys(_asked(entry.commands), entry.now))
    return {knob: statistics.median(seconds) for knob, seconds in sorted(took.items())}


def _asked(commands: Iterable[Command]) -> Iterator[Hashable]:
    for command in commands:
        match command:
            case Score():
                yield "score", command.trajectory
            case Pull():
                yield "pull", command.instance, command.version
            case Draw():
                yield "draw"
            case Train():
                yield "train", command.step + 1


def _answered(event: Event) -> tuple[str, Hashable]:
    """Setting that an event gives a latency of, and the key of the command it answers."""
    match event:
        case TrajectoryScored():
            return "reward_s", ("score", event.trajectory)
        case PullFinished():
            return "pull_s", ("pull", event.instance, event.version)
        case GroupsArrived():
            return "draw_s", "draw"
        case VersionPublished():
            return "train_s", ("train", event.version)
        case _:
            return "", None
