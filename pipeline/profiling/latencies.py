"""Measures latencies of everything except decoding, and the seconds between ticks, from a run's events and commands.
Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

from staleflow.pipeline.coordination import events
from staleflow.pipeline.coordination.commands import (
    Command,
    Discard,
    FetchPrompts,
    FinishEvaluation,
    Pull,
    Score,
    StepEnvironment,
    Train,
)
from staleflow.stores.trajectory import is_evaluation

MIN_WARM_LATENCIES = 3
"""Number of latencies after the first training step that suffice to ignore earlier ones, when processes warm up."""


class LatencyTracker:
    """Seconds between commands and the events that complete them. For environment steps, only the overhead: without the
    environment's own time and the wait for a slot."""

    def __init__(self) -> None:
        self._pending_commands: dict[tuple[Hashable, ...], tuple[float, bool]] = {}
        self._num_requested = self._num_arrived = 0
        """Numbers of groups; a request for prompts is known by its first one, because several may be under way."""
        self._sums: dict[tuple[str, bool], tuple[int, float]] = {}
        """(count, sum in seconds) by setting, and by whether processes were warm."""
        self._is_warm = False
        self._last_tick_s: float | None = None

    def observe(self, now: float, event: events.Event, commands: Iterable[Command]) -> None:
        """Update from an event handled at `now`, and the commands that followed."""
        if isinstance(event, events.RunResumed):  # another clock, and new processes
            self._pending_commands.clear()
            self._num_requested = self._num_arrived = 0
            self._is_warm, self._last_tick_s = False, None
        commands = tuple(commands)
        setting, key = self._completed_latency(event)
        if key in self._pending_commands:
            issued_s, is_warm = self._pending_commands.pop(key)
            environment_s = _environment_s(event) if key[0] == "act" else 0.0
            if environment_s is not None:  # without the environment's own time the overhead is unknown
                self._add(setting, max(0.0, now - issued_s - environment_s), is_warm=is_warm)
        if isinstance(event, events.Tick):
            if self._last_tick_s is not None:
                self._add("report_s", now - self._last_tick_s, is_warm=True)
            self._last_tick_s = now
        self._is_warm = self._is_warm or isinstance(event, events.VersionPublished)
        self._forget_obsolete(event, commands)
        self._pending_commands.update(dict.fromkeys(self._command_keys(commands), (now, self._is_warm)))

    def _forget_obsolete(self, event: events.Event, commands: Iterable[Command]) -> None:
        """Forget pending commands that no later event completes."""
        obsolete: list[tuple[Hashable, ...]] = []
        if isinstance(event, (events.InstanceLost, events.PullFinished)):  # it may have pulled a newer version
            obsolete += [key for key in self._pending_commands if key[:2] == ("pull", event.instance)]
        for command in commands:
            if isinstance(command, Discard):
                obsolete += [(kind, e.trajectory) for e in command.endings for kind in ("act", "score")]
            elif isinstance(command, FinishEvaluation):
                obsolete += [k for k in self._pending_commands if isinstance(k[1], int) and is_evaluation(k[1])]
        for key in obsolete:
            self._pending_commands.pop(key, None)

    @property
    def means(self) -> dict[str, float]:
        """Mean seconds by the name of the setting in [simulation], for latencies that occurred. Means rather than
        medians, because a run also waits for slow ones."""
        means = {}
        for setting in sorted({setting for setting, _ in self._sums}):
            count, seconds = self._sums.get((setting, True), (0, 0.0))
            if count < MIN_WARM_LATENCIES:
                warmup_count, warmup_seconds = self._sums.get((setting, False), (0, 0.0))
                count, seconds = count + warmup_count, seconds + warmup_seconds
            means[setting] = seconds / count
        return means

    def _add(self, setting: str, seconds: float, *, is_warm: bool) -> None:
        count, total_s = self._sums.get((setting, is_warm), (0, 0.0))
        self._sums[setting, is_warm] = count + 1, total_s + seconds

    def _command_keys(self, commands: Iterable[Command]) -> Iterator[tuple[Hashable, ...]]:
        """Keys of the commands that an event will complete."""
        for command in commands:
            match command:
                case Score():
                    yield "score", command.trajectory
                case StepEnvironment():
                    yield "act", command.trajectory
                case Pull():
                    yield "pull", command.instance, command.version
                case FetchPrompts():
                    yield "draw", self._num_requested
                    self._num_requested += command.num_groups
                case Train():
                    yield "train", command.step + 1

    def _completed_latency(self, event: events.Event) -> tuple[str, tuple[Hashable, ...]]:
        """The latency that an event completes: (its setting in [simulation], key of the command)."""
        match event:
            case events.TrajectoryScored():
                step_key = ("act", event.trajectory)
                return "reward_s", step_key if step_key in self._pending_commands else ("score", event.trajectory)
            case events.EnvironmentStepped():
                return "environment_overhead_s", ("act", event.trajectory)
            case events.EnvironmentFailed():
                return "", ("act", event.trajectory)
            case events.PullFinished():
                return "pull_s", ("pull", event.instance, event.version)
            case events.GroupsArrived():
                first, self._num_arrived = self._num_arrived, self._num_arrived + len(event.groups)
                return "fetch_prompts_s", ("draw", first)  # a request may be answered by several events
            case events.VersionPublished():
                return "train_s", ("train", event.version)
            case _:
                return "", ()


def _environment_s(event: events.Event) -> float | None:
    """Seconds that the environment of a step or score took, with the wait for a slot; None if unknown."""
    return event.seconds if isinstance(event, (events.EnvironmentStepped, events.TrajectoryScored)) else None
