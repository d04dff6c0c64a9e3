"""An index of a run's journal by time: versions and load of each instance, when the trainer trained, the number of
trajectories in each phase, and each trajectory's marks (time and kind of an event). Numpy, pure.

The index is built entry after entry from plain JSON values, so that a live run's journal can be followed. The clock of
a resumed run goes back to the resume point; here each start begins where the previous one ended.
"""

from __future__ import annotations

import itertools
import json
import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from staleflow.stores.serialization import decode_runs

JsonObject = Mapping[str, Any]
Floats = npt.NDArray[np.float64]

ARRIVED, ROUTED, SAMPLED, INTERRUPTED, FAILED, SCORED, TRAINED, DISCARDED, ABORTED, LOST = range(10)
TURN_SAMPLED, ENVIRONMENT_REQUESTED, ENVIRONMENT_STEPPED, ENVIRONMENT_FAILED = range(10, 14)
RESUMED_WAITING, RESUMED_SCORING, RESUMED_READY = RESUMED = range(14, 17)
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
    RESUMED_WAITING: ("the run was resumed; it has {detail} tokens", "waiting"),
    RESUMED_SCORING: ("the run was resumed; it has {detail} tokens", "scoring"),
    RESUMED_READY: ("the run was resumed; it has {detail} tokens and a reward", "ready"),
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


class ValueOverTime:
    """A number over time, which stays the same between two changes."""

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
        integrals = np.concatenate([[0.0], np.cumsum(values[:-1] * np.diff(times))])
        integral_past_end = np.maximum(edges - times[-1], 0) * values[-1]
        integrals_at_edges = np.interp(edges, times, integrals, left=0.0) + integral_past_end
        return np.asarray(np.diff(integrals_at_edges) / np.maximum(np.diff(edges), 1e-12))

    def at(self, times: Floats, default: int) -> npt.NDArray[np.int64]:
        """Return the value at each of the given times. default: the value before the first change."""
        values = np.asarray([default, *self.values], np.int64)
        return values[np.searchsorted(np.frombuffer(self.times), times, side="right")]


@dataclass(slots=True)
class InstanceHistory:
    """The history of one rollout instance. version: -1 while it is gone."""

    name: str
    version: ValueOverTime = field(default_factory=ValueOverTime)
    running: ValueOverTime = field(default_factory=ValueOverTime)
    pulling: ValueOverTime = field(default_factory=ValueOverTime)
    max_running: int = 0
    num_running: int = 0


class JournalIndex:
    """The index of a run's journal so far. members_per_group: number of trajectories per group."""

    def __init__(self, members_per_group: int) -> None:
        self._members_per_group = members_per_group
        self.instances: dict[str, InstanceHistory] = {}
        self.training = ValueOverTime()
        """1 while a step is being trained."""
        self.step = ValueOverTime()
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
        self._instance_indices, self._details = array("h"), array("q")
        self._names: list[str] = []
        self._texts: dict[str, int] = {}
        self._counts = [ValueOverTime() for _ in PHASE_LABELS]
        self._num_in_phase = [0] * len(PHASE_LABELS)
        self._current_phases: dict[int, tuple[int, str]] = {}
        """Phase of each live trajectory, and the instance that runs it."""
        self._clock_s = 0.0
        """Time of the newest entry on its start's clock; infinite before a later start's first entry."""
        self._clock_offset_s = 0.0
        """Difference between the index's time and that clock."""

        self._handlers: dict[str, Callable[[JsonObject, float], None]] = {
            "RunResumed": self._on_run_resumed,
            "GroupsArrived": self._on_groups_arrived,
            "TrajectorySampled": lambda event, now: self._on_sampling_ended(event, now, SAMPLED),
            "TrajectoryInterrupted": lambda event, now: self._on_sampling_ended(event, now, INTERRUPTED),
            "TrajectoryFailed": lambda event, now: self._on_sampling_ended(event, now, FAILED),
            "EnvironmentStepped": lambda event, now: self._on_environment_outcome(
                event, now, ENVIRONMENT_STEPPED, event["tokens"]
            ),
            "EnvironmentFailed": lambda event, now: self._on_environment_outcome(
                event, now, ENVIRONMENT_FAILED, self._text_index(event["error"])
            ),
            "TrajectoryScored": self._on_scored,
            "InstanceJoined": self._on_version_loaded,
            "PullFinished": self._on_version_loaded,
            "InstanceLost": self._on_instance_lost,
            "VersionPublished": self._on_published,
            "StopRequested": self._on_stop_requested,
            "Route": self._on_route,
            "StepEnvironment": self._on_environment_requested,
            "Abort": self._on_abort,
            "Pull": self._on_pull,
            "Train": self._on_train,
            "Discard": self._on_discard,
            "FinishEvaluation": self._on_evaluation_finished,
        }
        """By kind of event or command. Other kinds are ignored."""

    # -- reading -------------------------------------------------------------------------------------------------

    def begin_start(self) -> None:
        """Begin the journal of the run's next start. Trajectories in flight in the previous start are dropped."""
        for instance in self.instances.values():
            self._reset_instance(instance, self.last_s)
        self.training.set(self.last_s, 0)
        self._current_phases.clear()
        self._num_in_phase = [0] * len(PHASE_LABELS)
        self._record_counts(self.last_s)
        if self.starts:
            self._clock_s = math.inf
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
        if now < self._clock_s:  # another clock
            self._clock_offset_s = self.last_s - now
        self._clock_s = now
        self.last_s = now = max(self.last_s, self._clock_offset_s + now)
        self.num_entries += kind != "RunResumed"
        previous_counts = self._num_in_phase.copy()
        if kind in self._handlers:
            self._handlers[kind](event, now)
        for command in commands:
            if command["type"] in self._handlers:
                self._handlers[command["type"]](command, now)
        if previous_counts != self._num_in_phase:
            self._record_counts(now)

    def _on_groups_arrived(self, event: JsonObject, now: float) -> None:
        for group in event["groups"]:
            first_id = group["group"] * self._members_per_group
            for id in range(first_id, first_id + self._members_per_group):
                self._mark(id, now, ARRIVED)
                self._set_phase(id, WAITING)

    def _on_run_resumed(self, event: JsonObject, now: float) -> None:
        for group in event.get("groups", ()):
            for member in group["members"]:
                phase = READY if member.get("scored") else SCORING if member.get("sampled") else WAITING
                kind = {WAITING: RESUMED_WAITING, SCORING: RESUMED_SCORING, READY: RESUMED_READY}[phase]
                self._mark(member["trajectory"], now, kind, detail=member.get("tokens", 0))
                self._set_phase(member["trajectory"], phase)

    def _on_scored(self, event: JsonObject, now: float) -> None:
        if self._current_phases.get(event["trajectory"], (READY, ""))[0] in (SCORING, IN_ENVIRONMENT):
            self._mark(event["trajectory"], now, SCORED, detail=self._text_index(f"{event['reward']:g}"))
            self._set_phase(event["trajectory"], READY)

    def _on_published(self, event: JsonObject, now: float) -> None:
        self.training.set(now, 0)

    def _on_stop_requested(self, event: JsonObject, now: float) -> None:
        self.notices.append((now, f"stop: {event['why']}"))

    def _on_sampling_ended(self, event: JsonObject, now: float, kind: int) -> None:
        instance = self._end_sampling(event["trajectory"], now)
        if instance is not None:  # else an answer to an earlier routing
            self._mark(event["trajectory"], now, kind, instance, event.get("tokens", 0))
            self._set_phase(event["trajectory"], SCORING if kind == SAMPLED else WAITING)

    def _on_environment_requested(self, command: JsonObject, now: float) -> None:
        id = command["trajectory"]
        if self._ids and self._ids[-1] == id and self._kinds[-1] == SAMPLED:
            self._kinds[-1] = TURN_SAMPLED
        else:
            self._mark(id, now, ENVIRONMENT_REQUESTED)
        self._set_phase(id, IN_ENVIRONMENT)

    def _on_environment_outcome(self, event: JsonObject, now: float, kind: int, detail: int) -> None:
        if (
            self._current_phases.get(event["trajectory"], (READY, ""))[0] == IN_ENVIRONMENT
        ):  # else an answer that came too late
            self._mark(event["trajectory"], now, kind, detail=detail)
            self._set_phase(event["trajectory"], WAITING)

    def _on_version_loaded(self, event: JsonObject, now: float) -> None:
        name = event["instance"]
        instance = self.instances.setdefault(name, InstanceHistory(name))
        if name not in self._names:
            self._names.append(name)
        instance.max_running = event.get("max_running", instance.max_running)
        instance.version.set(now, event["version"])
        instance.pulling.set(now, 0)

    def _on_instance_lost(self, event: JsonObject, now: float) -> None:
        instance = self.instances[event["instance"]]
        self.notices.append((now, f"{instance.name} lost: {event['why']}"))
        for id, (phase, name) in list(self._current_phases.items()):
            if phase == RUNNING and name == instance.name:
                self._mark(id, now, LOST, instance)
                self._set_phase(id, WAITING)
        self._reset_instance(instance, now)

    def _on_route(self, command: JsonObject, now: float) -> None:
        instance = self.instances[command["instance"]]
        self._mark(command["trajectory"], now, ROUTED, instance, command["version"])
        self._end_sampling(command["trajectory"], now)
        self._set_phase(command["trajectory"], RUNNING, instance.name)
        instance.num_running += 1
        instance.running.set(now, instance.num_running)

    def _on_abort(self, command: JsonObject, now: float) -> None:
        self._mark(command["trajectory"], now, ABORTED, self._end_sampling(command["trajectory"], now))

    def _on_pull(self, command: JsonObject, now: float) -> None:
        self.instances[command["instance"]].pulling.set(now, 1)

    def _on_train(self, command: JsonObject, now: float) -> None:
        self.training.set(now, 1)
        self.step.set(now, command["step"])
        for id in decode_runs(command["trajectories"], step=1):
            self._mark(id, now, TRAINED, detail=command["step"])
            self._clear_phase(id)

    def _on_discard(self, command: JsonObject, now: float) -> None:
        for ending in command["endings"]:
            id = ending["trajectory"]
            self._end_sampling(id, now)
            self._mark(id, now, DISCARDED, detail=self._text_index(f"{ending['fate']}: {ending['reason']}"))
            self._clear_phase(id)

    def _on_evaluation_finished(self, command: JsonObject, now: float) -> None:
        for id in [id for id in self._current_phases if id < 0]:  # those of evaluations
            self._end_sampling(id, now)
            self._clear_phase(id)

    def _end_sampling(self, id: int, now: float) -> InstanceHistory | None:
        """Remove a trajectory from the instance that runs it; returns the instance, or None if it is not running."""
        phase, name = self._current_phases.get(id, (READY, ""))
        if phase != RUNNING:
            return None
        instance = self.instances[name]
        instance.num_running -= 1
        instance.running.set(now, instance.num_running)
        self._set_phase(id, WAITING)
        return instance

    def _reset_instance(self, instance: InstanceHistory, now: float) -> None:
        instance.num_running = 0
        instance.running.set(now, 0)
        instance.pulling.set(now, 0)
        instance.version.set(now, -1)

    def _set_phase(self, id: int, phase: int, instance: str = "") -> None:
        self._clear_phase(id)
        self._current_phases[id] = (phase, instance)
        self._num_in_phase[phase] += 1

    def _clear_phase(self, id: int) -> None:
        if id in self._current_phases:
            self._num_in_phase[self._current_phases.pop(id)[0]] -= 1

    def _record_counts(self, now: float) -> None:
        for function, count in zip(self._counts, self._num_in_phase, strict=True):
            function.set(now, count)

    def _mark(self, id: int, now: float, kind: int, instance: InstanceHistory | None = None, detail: int = -1) -> None:
        self._ids.append(id)
        self._times.append(now)
        self._kinds.append(kind)
        self._instance_indices.append(-1 if instance is None else self._names.index(instance.name))
        self._details.append(detail)

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
            kind, detail = self._kinds[i], self._details[i]
            location = self._names[self._instance_indices[i]] if self._instance_indices[i] >= 0 else ""
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
            life = marks[self._ids[i]]
            if life and self._kinds[i] in RESUMED and self._kinds[life[-1]] in (TRAINED, DISCARDED):
                life.clear()  # a step that was undone had ended it
            life.append(i)
        return marks

    def phase_intervals(self, trajectories: Sequence[int]) -> list[list[tuple[float, float, str, int]]]:
        """The phases of each of these trajectories: (begin, end in seconds, phase, version that samples; -1 in other
        phases). A sampling phase is split where the instance changed its version. The phase that has not ended is left
        out."""
        marks = self._marks_of(trajectories)
        return [self._phases(marks[id]) for id in trajectories]

    def _phases(self, marks: Sequence[int]) -> list[tuple[float, float, str, int]]:
        phases = []
        for i, next_mark in itertools.pairwise(marks):
            start_s, end_s, phase = self._times[i], self._times[next_mark], MARKS[self._kinds[i]][1]
            if phase != "sampling":
                phases.append((start_s, end_s, phase, -1))
                continue
            version = self.instances[self._names[self._instance_indices[i]]].version
            start = bisect_right(version.times, start_s)
            stop = max(start, bisect_left(version.times, end_s))
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
                    "name": instance.name,
                    "max_running": instance.max_running,
                    "version": instance.version.at(middles, -1).tolist(),
                    "running": np.round(instance.running.means(edges), 3).tolist(),
                    "pulling": np.round(instance.pulling.means(edges), 3).tolist(),
                }
                for _, instance in sorted(self.instances.items(), key=lambda item: (len(item[0]), item[0]))
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
