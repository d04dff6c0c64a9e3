"""Latencies of everything but decoding, and the seconds between ticks, from a run's events and commands. Pure."""

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

FEWEST_LATER = 3
"""Latencies since the end of the first training step that are enough to leave out those before: processes warm up."""


class Latencies:
    """Seconds between commands and their outcomes; of an act, beyond those of the environment itself and until it had a
    place."""

    def __init__(self) -> None:
        self._asked: dict[tuple[Hashable, ...], tuple[float, bool]] = {}
        self._early: dict[str, list[float]] = {}
        self._later: dict[str, tuple[int, float]] = {}
        self._warm = False
        self._ticks: tuple[int, float, float] = (0, 0.0, 0.0)  # their number, when the first and the last were

    def observe(self, now: float, event: Event, commands: Iterable[Command]) -> None:
        """Take in an event, when it was handled, and the commands that followed."""
        knob, key = _answered(event, self._asked)
        if key in self._asked:
            asked_s, warm = self._asked.pop(key)
            own_s = _own_s(event) if key[0] == "act" else 0.0
            if own_s is None:  # it is not known what the environment took, so neither is the rest
                pass
            elif warm:
                count, seconds = self._later.get(knob, (0, 0.0))
                self._later[knob] = count + 1, seconds + max(0.0, now - asked_s - own_s)
            else:
                self._early.setdefault(knob, []).append(max(0.0, now - asked_s - own_s))
        if isinstance(event, Tick):
            count, first_s, _ = self._ticks
            self._ticks = count + 1, first_s if count else now, now
        self._warm = self._warm or isinstance(event, VersionPublished)
        self._asked.update(dict.fromkeys(_asked(commands), (now, self._warm)))

    @property
    def means(self) -> dict[str, float]:
        """Mean seconds by the name of their setting in [simulation]; latencies that did not occur are absent. Not
        medians: a run waits for the slow ones too."""
        means = {}
        count, first_s, last_s = self._ticks
        if count > 1 and last_s > first_s:
            means["report_s"] = (last_s - first_s) / (count - 1)
        for knob in sorted({*self._early, *self._later}):
            count, seconds = self._later.get(knob, (0, 0.0))
            early = self._early.get(knob, [])
            means[knob] = seconds / count if count >= FEWEST_LATER else (seconds + sum(early)) / (count + len(early))
        return means


def latencies(entries: Iterable[JournalEntry]) -> dict[str, float]:
    """The latencies of a recorded run; see `Latencies.means`."""
    found = Latencies()
    for entry in entries:
        found.observe(entry.now, entry.event, entry.commands)
    return found.means


def _own_s(event: Event) -> float | None:
    """Seconds that an environment took for what it answered; None if that is not known."""
    return event.seconds if isinstance(event, (EnvironmentStepped, TrajectoryScored)) else None


def _asked(commands: Iterable[Command]) -> Iterator[tuple[Hashable, ...]]:
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


def _answered(event: Event, asked: Container[tuple[Hashable, ...]]) -> tuple[str, tuple[Hashable, ...]]:
    """Setting that an event gives a latency of, and the key of the command it answers, one of those `asked` if any."""
    match event:
        case TrajectoryScored():
            acted = ("act", event.trajectory)
            return "reward_s", acted if acted in asked else ("score", event.trajectory)
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
