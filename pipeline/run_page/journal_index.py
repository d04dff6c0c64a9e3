"""An index of a run's journal by time: versions and load of each instance, when the trainer trained, the number of
trajectories in each phase, and each trajectory's marks (time and kind of an event). Numpy, pure.

The index is built entry after entry from plain JSON values, so that a live run's journal can be followed. Each start of
a resumed run has a clock of its own; here the next start begins where the one before ended.
"""

from __future__ import annotations

import itertools
import json
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

JsonObject = Mapping[str, Any]
Floats = npt.NDArray[np.float64]

ARRIVED, ROUTED, SAMPLED, INTERRUPTED, FAILED, SCORED, TRAINED, DISCARDED, ABORTED, LOST = range(10)
TURN_SAMPLED, ENVIRONMENT_REQUESTED, ENVIRONMENT_STEPPED, ENVIRONMENT_FAILED = range(10, 14)
"""Kinds of marks in a trajectory's life."""
MARKS = {
    ARRIVED: ("arrived", "waiting"),
    ROUTED: ("routed to {where} at version {detail}", "sampling"),
    SAMPLED: ("sampled to its end, {detail} tokens", "scoring"),
    INTERRUPTED: ("interrupted at {detail} tokens", "waiting"),
    FAILED: ("{where} failed on it", "waiting"),
    SCORED: ("reward {detail}", "ready"),
    TRAINED: ("consumed by step {detail}", ""),
    DISCARDED: ("{detail}", ""),
    ABORTED: ("sampling aborted on {where}", "waiting"),
    LOST: ("{where} was lost", "waiting"),
    TURN_SAMPLED: ("sampled a turn, {detail} tokens so far", "acting"),
    ENVIRONMENT_REQUESTED: ("its environment is asked", "acting"),
    ENVIRONMENT_STEPPED: ("its environment answered, {detail} tokens so far", "waiting"),
    ENVIRONMENT_FAILED: ("its environment failed: {detail}", "waiting"),
}
"""Text of each kind of mark, and the phase that begins with it."""
WAITING, RUNNING, SCORING, READY, IN_ENVIRONMENT = range(5)
"""Phases of a live trajectory, in the order of PHASE_LABELS and of JournalIndex._counts."""
PHASE_LABELS = (
    "waiting for an instance", "being sampled", "being scored", "ready or waiting for siblings",
    "waiting for their environment",
)  # fmt: skip
TEXT_DETAILS = (SCORED, DISCARDED, ENVIRONMENT_FAILED)
"""Kinds of marks whose detail is a text; the mark has the text's number."""
MAX_BINS = 1_000


class StepFunction:
    """A number as a step function of time."""

    def __init__(self) -> None:
        self.times = array("d")
        self.values = array("l")

    def set(self, now: float, value: int) -> None:
        self.times.append(now)
        self.values.append(value)

    def means(self, edges: Floats) -> Floats:
        """[B] mean over each bin, 0 before the first change. edges: [B + 1], ascending."""
        if not self.times or len(edges) < 2:
            return np.zeros(max(0, len(edges) - 1))
        times, values = np.frombuffer(self.times), np.asarray(self.values, np.float64)
        area = np.concatenate([[0.0], np.cumsum(values[:-1] * np.diff(times))])
        area_past_end = np.maximum(edges - times[-1], 0) * values[-1]
        total = np.interp(edges, times, area, left=0.0) + area_past_end
        return np.asarray(np.diff(total) / np.maximum(np.diff(edges), 1e-12))

    def at(self, moments: Floats, before: int) -> npt.NDArray[np.int64]:
        """Return the value at each of the given times. before: the value before the first change."""
        values = np.asarray([before, *self.values], np.int64)
        return values[np.searchsorted(np.frombuffer(self.times), moments, side="right")]


@dataclass(slots=True)
class Lane:
    """The history of one rollout instance. version: -1 while it is gone."""

    name: str
    version: StepFunction = field(default_factory=StepFunction)
    running: StepFunction = field(default_factory=StepFunction)
    pulling: StepFunction = field(default_factory=StepFunction)
    max_running: int = 0
    num_running: int = 0


class JournalIndex:
    """The index of a run's journal so far. members_per_group: number of trajectories per group."""

    def __init__(self, members_per_group: int) -> None:
        self._members_per_group = members_per_group
        self.lanes: dict[str, Lane] = {}
        self.training = StepFunction()
        """1 while a step is being trained."""
        self.step = StepFunction()
        """The step whose training began last."""
        self.starts: list[float] = []
        """When each start of the run began."""
        self.notices: list[tuple[float, str]] = []
        """Times and texts of lost instances and of stops."""
        self.num_entries = 0
        """Entries of the journal, without those of resumes."""
        self.last_s = 0.0
        """Time of the newest entry."""
        self.read_error = ""
        """Message about the first line that could not be read; empty if all could."""
        self.read_share = 1.0
        """Share of the journal that has been read; set by JournalFollower."""
        self._ids, self._times, self._kinds = array("q"), array("d"), array("b")
        self._lane, self._detail = array("h"), array("q")
        self._names: list[str] = []
        self._texts: dict[str, int] = {}
        self._counts = [StepFunction() for _ in PHASE_LABELS]
        self._num_in_phase = [0] * len(PHASE_LABELS)
        self._current_phases: dict[int, tuple[int, str]] = {}
        """Phase of each live trajectory, and the instance that runs it."""
        self._start_offset_s = 0.0
        """Time of the newest start: its entries count from there."""

        self._handlers: dict[str, Callable[[JsonObject, float], None]] = {
            "RunResumed": self._resumed,
            "GroupsArrived": self._arrived,
            "TrajectorySampled": lambda event, now: self._sampling_ended(event, now, SAMPLED),
            "TrajectoryInterrupted": lambda event, now: self._sampling_ended(event, now, INTERRUPTED),
            "TrajectoryFailed": lambda event, now: self._sampling_ended(event, now, FAILED),
            "EnvironmentStepped": lambda event, now: self._environment_replied(
                event, now, ENVIRONMENT_STEPPED, event["tokens"]
            ),
            "EnvironmentFailed": lambda event, now: self._environment_replied(
                event, now, ENVIRONMENT_FAILED, self._text_index(event["error"])
            ),
            "TrajectoryScored": self._scored,
            "InstanceJoined": self._serves,
            "PullFinished": self._serves,
            "InstanceLost": self._lost,
            "VersionPublished": self._published,
            "StopRequested": self._stopped,
            "Route": self._routed,
            "StepEnvironment": self._environment_requested,
            "Abort": self._aborted,
            "Pull": self._pull_began,
            "Train": self._training_began,
            "Discard": self._discarded,
        }
        """By kind of event and command; the kinds that are not here change nothing that is shown."""

    # -- reading -------------------------------------------------------------------------------------------------

    def begin_start(self) -> None:
        """Begin the journal of the run's next start. What was in flight in the start before is dropped."""
        for lane in self.lanes.values():
            self._lose(lane, self.last_s)
        self.training.set(self.last_s, 0)
        self._current_phases.clear()
        self._num_in_phase = [0] * len(PHASE_LABELS)
        self._note_counts(self.last_s)
        self._start_offset_s = self.last_s
        self.starts.append(self.last_s)

    def add(self, line: bytes | str, location: str) -> None:
        """Add a line of the journal. A line that cannot be parsed is skipped, and `read_error` is set. location: file
        and number of the line, for that message."""
        try:
            entry = json.loads(line)
            self._add(entry["event"], entry["commands"], float(entry["now"]))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            self.read_error = (
                self.read_error or f"{location} cannot be read: {type(error).__name__}; it is left out here"
            )

    def _add(self, event: JsonObject, commands: Iterable[JsonObject], now: float) -> None:
        kind = event["type"]
        if kind == "RunResumed":  # its time is on the clock of the previous start
            now = 0.0
        now = max(self.last_s, self._start_offset_s + now)
        self.last_s = now
        self.num_entries += kind != "RunResumed"
        before = self._num_in_phase.copy()
        if kind in self._handlers:
            self._handlers[kind](event, now)
        for command in commands:
            if command["type"] in self._handlers:
                self._handlers[command["type"]](command, now)
        if before != self._num_in_phase:
            self._note_counts(now)

    def _arrived(self, event: JsonObject, now: float) -> None:
        for group in event["groups"]:
            first = group["group"] * self._members_per_group
            for id in range(first, first + self._members_per_group):
                self._mark(id, now, ARRIVED)
                self._move(id, WAITING)

    def _resumed(self, event: JsonObject, now: float) -> None:
        for group in event.get("groups", ()):
            for member in group["members"]:
                self._mark(member["trajectory"], now, ARRIVED)
                phase = READY if member.get("scored") else SCORING if member.get("sampled") else WAITING
                self._move(member["trajectory"], phase)

    def _scored(self, event: JsonObject, now: float) -> None:
        if self._current_phases.get(event["trajectory"], (READY, ""))[0] in (SCORING, IN_ENVIRONMENT):
            self._mark(event["trajectory"], now, SCORED, detail=self._text_index(f"{event['reward']:g}"))
            self._move(event["trajectory"], READY)

    def _published(self, event: JsonObject, now: float) -> None:
        self.training.set(now, 0)

    def _stopped(self, event: JsonObject, now: float) -> None:
        self.notices.append((now, f"stop: {event['why']}"))

    def _sampling_ended(self, event: JsonObject, now: float, kind: int) -> None:
        lane = self._end_sampling(event["trajectory"], now)
        if lane is not None:  # else an answer to an earlier routing
            self._mark(event["trajectory"], now, kind, lane, event.get("tokens", 0))
            self._move(event["trajectory"], SCORING if kind == SAMPLED else WAITING)

    def _environment_requested(self, command: JsonObject, now: float) -> None:
        id = command["trajectory"]
        if self._ids and self._ids[-1] == id and self._kinds[-1] == SAMPLED:
            self._kinds[-1] = TURN_SAMPLED
        else:
            self._mark(id, now, ENVIRONMENT_REQUESTED)
        self._move(id, IN_ENVIRONMENT)

    def _environment_replied(self, event: JsonObject, now: float, kind: int, detail: int) -> None:
        if (
            self._current_phases.get(event["trajectory"], (READY, ""))[0] == IN_ENVIRONMENT
        ):  # else an answer that came too late
            self._mark(event["trajectory"], now, kind, detail=detail)
            self._move(event["trajectory"], WAITING)

    def _serves(self, event: JsonObject, now: float) -> None:
        name = event["instance"]
        lane = self.lanes.setdefault(name, Lane(name))
        if name not in self._names:
            self._names.append(name)
        lane.max_running = event.get("max_running", lane.max_running)
        lane.version.set(now, event["version"])
        lane.pulling.set(now, 0)

    def _lost(self, event: JsonObject, now: float) -> None:
        lane = self.lanes[event["instance"]]
        self.notices.append((now, f"{lane.name} lost: {event['why']}"))
        for id, (phase, name) in list(self._current_phases.items()):
            if phase == RUNNING and name == lane.name:
                self._mark(id, now, LOST, lane)
                self._move(id, WAITING)
        self._lose(lane, now)

    def _routed(self, command: JsonObject, now: float) -> None:
        lane = self.lanes[command["instance"]]
        self._mark(command["trajectory"], now, ROUTED, lane, command["version"])
        self._end_sampling(command["trajectory"], now)
        self._move(command["trajectory"], RUNNING, lane.name)
        lane.num_running += 1
        lane.running.set(now, lane.num_running)

    def _aborted(self, command: JsonObject, now: float) -> None:
        self._mark(command["trajectory"], now, ABORTED, self._end_sampling(command["trajectory"], now))

    def _pull_began(self, command: JsonObject, now: float) -> None:
        self.lanes[command["instance"]].pulling.set(now, 1)

    def _training_began(self, command: JsonObject, now: float) -> None:
        self.training.set(now, 1)
        self.step.set(now, command["step"])
        for id in command["trajectories"]:
            self._mark(id, now, TRAINED, detail=command["step"])
            self._leave(id)

    def _discarded(self, command: JsonObject, now: float) -> None:
        for ending in command["endings"]:
            id = ending["trajectory"]
            self._end_sampling(id, now)
            self._mark(id, now, DISCARDED, detail=self._text_index(f"{ending['fate']}: {ending['reason']}"))
            self._leave(id)

    def _end_sampling(self, id: int, now: float) -> Lane | None:
        """Take a trajectory from the instance it runs on, if any; returns that."""
        phase, name = self._current_phases.get(id, (READY, ""))
        if phase != RUNNING:
            return None
        lane = self.lanes[name]
        lane.num_running -= 1
        lane.running.set(now, lane.num_running)
        self._move(id, WAITING)
        return lane

    def _lose(self, lane: Lane, now: float) -> None:
        lane.num_running = 0
        lane.running.set(now, 0)
        lane.pulling.set(now, 0)
        lane.version.set(now, -1)

    def _move(self, id: int, phase: int, instance: str = "") -> None:
        self._leave(id)
        self._current_phases[id] = (phase, instance)
        self._num_in_phase[phase] += 1

    def _leave(self, id: int) -> None:
        if id in self._current_phases:
            self._num_in_phase[self._current_phases.pop(id)[0]] -= 1

    def _note_counts(self, now: float) -> None:
        for function, count in zip(self._counts, self._num_in_phase, strict=True):
            function.set(now, count)

    def _mark(self, id: int, now: float, kind: int, lane: Lane | None = None, detail: int = -1) -> None:
        self._ids.append(id)
        self._times.append(now)
        self._kinds.append(kind)
        self._lane.append(-1 if lane is None else self._names.index(lane.name))
        self._detail.append(detail)

    def _text_index(self, text: str) -> int:
        return self._texts.setdefault(text, len(self._texts))

    # -- queries -------------------------------------------------------------------------------------------------

    def story(self, trajectory: int) -> list[dict[str, Any]]:
        """Return the marks of a trajectory and its changes of version, in order: seconds, event in words, and the phase
        that begins."""
        indices = self._marks_of([trajectory])[trajectory]
        texts = list(self._texts)
        marks = []
        for i in indices:
            kind, detail = self._kinds[i], self._detail[i]
            location = self._names[self._lane[i]] if self._lane[i] >= 0 else ""
            text, phase = MARKS[kind]
            text_detail = texts[detail] if kind in TEXT_DETAILS else str(detail)
            marks.append(
                {"at_s": self._times[i], "what": text.format(where=location, detail=text_detail), "phase": phase}
            )
        for (_, end, _, _), (start, _, phase, version) in itertools.pairwise(self._phases(indices)):
            if phase == "sampling" and start == end and not any(mark["at_s"] == start for mark in marks):
                marks.append({"at_s": start, "what": f"goes on under version {version}", "phase": phase})
        return sorted(marks, key=lambda mark: float(mark["at_s"]))

    def _marks_of(self, trajectories: Sequence[int]) -> dict[int, list[int]]:
        ids = np.frombuffer(self._ids, np.int64) if self._ids else np.zeros(0, np.int64)
        (indices,) = np.nonzero(np.isin(ids, np.asarray(trajectories, np.int64)))
        marks: dict[int, list[int]] = {id: [] for id in trajectories}
        for i in indices.tolist():
            marks[self._ids[i]].append(i)
        return marks

    def lives(self, trajectories: Sequence[int]) -> list[list[tuple[float, float, str, int]]]:
        """The phases of each of these trajectories: (begin, end in seconds, phase, version that samples; -1 in other
        phases). A sampling phase is split where the instance changed its version. The phase that has not ended is left
        out."""
        marks = self._marks_of(trajectories)
        return [self._phases(marks[id]) for id in trajectories]

    def _phases(self, marks: Sequence[int]) -> list[tuple[float, float, str, int]]:
        phases = []
        for i, after in itertools.pairwise(marks):
            start_s, end_s, phase = self._times[i], self._times[after], MARKS[self._kinds[i]][1]
            if phase != "sampling":
                phases.append((start_s, end_s, phase, -1))
                continue
            version = self.lanes[self._names[self._lane[i]]].version
            start, stop = bisect_right(version.times, start_s), bisect_left(version.times, end_s)
            edges = [start_s, *version.times[start:stop], end_s]
            versions = [version.values[max(0, k - 1)] for k in range(start, stop + 1)]
            phases += [(a, b, phase, v) for (a, b), v in zip(itertools.pairwise(edges), versions, strict=True)]
        return phases

    def window(self, begin_s: float, end_s: float, bins: int) -> dict[str, Any]:
        """The index between two times, in at most MAX_BINS bins of equal width, so that the size does not depend on the
        length of the run. The whole journal if none of it lies between these times. version: at the middle of a bin, -1
        while an instance is gone."""
        bins = max(1, min(bins, MAX_BINS))
        begin_s, end_s = max(0.0, begin_s), min(end_s, self.last_s)
        if end_s <= begin_s:
            begin_s, end_s = 0.0, max(self.last_s, 1e-6)
        edges = np.linspace(begin_s, end_s, bins + 1)
        middles = (edges[:-1] + edges[1:]) / 2
        return {
            "begin_s": begin_s,
            "end_s": end_s,
            "last_s": self.last_s,
            "instances": [
                {
                    "name": lane.name,
                    "max_running": lane.max_running,
                    "version": lane.version.at(middles, -1).tolist(),
                    "running": np.round(lane.running.means(edges), 3).tolist(),
                    "pulling": np.round(lane.pulling.means(edges), 3).tolist(),
                }
                for _, lane in sorted(self.lanes.items(), key=lambda item: (len(item[0]), item[0]))
            ],
            "training": np.round(self.training.means(edges), 3).tolist(),
            "step": self.step.at(middles, -1).tolist(),
            "phases": [
                {"name": name, "count": np.round(function.means(edges), 3).tolist()}
                for name, function in zip(PHASE_LABELS, self._counts, strict=True)
            ],
            "starts": self.starts[1:],
            "events": [[time_s, event] for time_s, event in self.notices if begin_s <= time_s <= end_s],
            "num_events": self.num_entries,
            "read_share": self.read_share,
            "read_error": self.read_error,
        }
