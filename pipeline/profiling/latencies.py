"""Measures latencies of everything except decoding, and the seconds between ticks, from a run's events and commands.
Pure."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Iterator

from staleflow.pipeline.coordination.commands import Command, FetchPrompts, Pull, Score, StepEnvironment, Train
from staleflow.pipeline.coordination.events import (
    EnvironmentFailed,
    EnvironmentStepped,
    Event,
    GroupsArrived,
    PullFinished,
    Tick,
    TrajectoryScored,
    VersionPublished,
)
from staleflow.pipeline.coordination.journal import JournalEntry

MIN_WARM_LATENCIES = 3
"""Number of latencies after the first training step that suffice to ignore earlier ones, of processes warming up."""


class Latencies:
    """Seconds between commands and the events that complete them. For environment steps, only the overhead: without the
    environment's own time and the wait for a slot."""

    def __init__(self) -> None:
        self._pending: dict[tuple[Hashable, ...], tuple[float, bool]] = {}
        self._warmup: dict[str, list[float]] = {}
        self._sums: dict[str, tuple[int, float]] = {}
        self._warm = False
        self._ticks: tuple[int, float, float] = (0, 0.0, 0.0)  # (count, time of the first, time of the last)

    def observe(self, now: float, event: Event, commands: Iterable[Command]) -> None:
        """Update from an event handled at `now`, and the commands that followed."""
        knob, key = _latency_of(event, self._pending)
        if key in self._pending:
            issued_s, warm = self._pending.pop(key)
            environment_s = _environment_s(event) if key[0] == "act" else 0.0
            if environment_s is None:  # without the environment's own time the overhead is unknown
                pass
            elif warm:
                count, seconds = self._sums.get(knob, (0, 0.0))
                self._sums[knob] = count + 1, seconds + max(0.0, now - issued_s - environment_s)
            else:
                self._warmup.setdefault(knob, []).append(max(0.0, now - issued_s - environment_s))
        if isinstance(event, Tick):
            count, first_s, _ = self._ticks
            self._ticks = count + 1, first_s if count else now, now
        self._warm = self._warm or isinstance(event, VersionPublished)
        self._pending.update(dict.fromkeys(_keys_of(commands), (now, self._warm)))

    @property
    def means(self) -> dict[str, float]:
        """Mean seconds by the name of the setting in [simulation], for latencies that occurred. Means rather than
        medians, because a run also waits for slow ones."""
        means = {}
        count, first_s, last_s = self._ticks
        if count > 1 and last_s > first_s:
            means["report_s"] = (last_s - first_s) / (count - 1)
        for knob in sorted({*self._warmup, *self._sums}):
            count, seconds = self._sums.get(knob, (0, 0.0))
            early = self._warmup.get(knob, [])
            means[knob] = (
                seconds / count if count >= MIN_WARM_LATENCIES else (seconds + sum(early)) / (count + len(early))
            )
        return means


def latencies(entries: Iterable[JournalEntry]) -> dict[str, float]:
    """Measure the latencies of a recorded run; see `Latencies.means`."""
    measured = Latencies()
    for entry in entries:
        measured.observe(entry.now, entry.event, entry.commands)
    return measured.means


def _environment_s(event: Event) -> float | None:
    """Seconds that the environment of a step or score took; None if unknown."""
    return event.seconds if isinstance(event, (EnvironmentStepped, TrajectoryScored)) else None


def _keys_of(commands: Iterable[Command]) -> Iterator[tuple[Hashable, ...]]:
    for command in commands:
        match command:
            case Score():
                yield "score", command.trajectory
            case StepEnvironment():
                yield "act", command.trajectory
            case Pull():
                yield "pull", command.instance, command.version
            case FetchPrompts():
                yield ("draw",)
            case Train():
                yield "train", command.step + 1


def _latency_of(event: Event, pending: Container[tuple[Hashable, ...]]) -> tuple[str, tuple[Hashable, ...]]:
    """For the latency that an event completes: (setting of the latency, key of the command)."""
    match event:
        case TrajectoryScored():
            acted = ("act", event.trajectory)
            return "reward_s", acted if acted in pending else ("score", event.trajectory)
        case EnvironmentStepped():
            return "environment_overhead_s", ("act", event.trajectory)
        case EnvironmentFailed():
            return "", ("act", event.trajectory)
        case PullFinished():
            return "pull_s", ("pull", event.instance, event.version)
        case GroupsArrived():
            return "fetch_prompts_s", ("draw",)
        case VersionPublished():
            return "train_s", ("train", event.version)
        case _:
            return "", ()
