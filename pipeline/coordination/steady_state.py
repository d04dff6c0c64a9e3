"""The steady state of an average instance, played out in virtual time: how often a step can be trained if its decode
steps are kept within a limit. Pure; the same question has the same answer.

A formula of means cannot weigh what a limit on decode steps brings against what it costs. It brings an even load in
place of a burst after each publication, and so faster steps for what was started before. It costs the work that it
holds back the beginning of its time: if that is a long response, its step waits for it. Which is more depends on the
whole distribution of lengths, on the bound and on the cache. So a few versions of a run are played with lengths drawn
from those the run has seen, under the ledger's own rules: groups are promised to steps under condition (H) of
docs/protocol.md, and a step begins once it has its groups and leaves nothing behind that is due.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from staleflow.tasks.emulation.cost_model import StepCosts

CYCLES = 5
"""Versions that are played, in multiples of eta + 1: two of them fill the pipeline, the others are measured."""
FILLING = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnResponse:
    """One response. steps: decode steps it needs. acting_s: seconds that its environment takes, at its end."""

    steps: float
    acting_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageInstance:
    """An instance's share of a run. groups: it gets per step. recomputes: new weights have it prefill all contexts."""

    cost: StepCosts
    eta: int
    groups: int
    group_size: int
    max_running: int
    kv_capacity: int
    prompt_tokens: float
    typical_tokens: float
    """Mean KV tokens of a trajectory over the time it runs."""
    train_s: float
    pull_s: float
    recomputes: bool


def interval_s(instance: AverageInstance, responses: Sequence[DrawnResponse], limit_s: float) -> float:
    """Mean seconds between steps if new work waits while it would make a decode step longer than `limit_s`.

    responses: in the order they are drawn; they begin anew when they are used up. O(steps x groups x group_size x log).
    """
    return _SteadyRun(instance, responses, limit_s).interval_s()


@dataclass(slots=True)
class _SteadyRun:
    """One run of an instance. A group's deadline is the version it began under plus eta."""

    one: AverageInstance
    responses: Sequence[DrawnResponse]
    limit_s: float
    now: float = 0.0
    done: float = 0.0  # decode steps so far
    kv: float = 0.0
    version: int = 0
    step: int = 0  # the next one to be trained
    published_s: float = math.inf  # when the step being trained ends
    running: list[tuple[float, int, float, float]] = field(default_factory=list)  # (done at its end, group, steps, s)
    acting: list[tuple[float, int]] = field(default_factory=list)  # (when its environment has answered, group)
    waiting: int = 0  # members of the latest group that have not begun
    groups: int = 0
    drawn: int = 0
    deadlines: dict[int, int] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)  # unfinished members by group
    promised: dict[int, int] = field(default_factory=dict)  # groups by deadline
    finished: list[int] = field(default_factory=list)  # their deadlines, a heap
    begun_s: list[float] = field(default_factory=list)
    no_room: bool = False  # for another group, until a step begins or a version is published
    ready: bool = False  # a group has finished or a version was published since a step could not begin

    def interval_s(self) -> float:
        filling, most = FILLING * (self.one.eta + 1), CYCLES * (self.one.eta + 1)
        while len(self.begun_s) < most:
            self._begin_work()
            if not self._train():
                self._pass()
        return (self.begun_s[-1] - self.begun_s[filling - 1]) / (most - filling)

    def _begin_work(self) -> None:
        one = self.one
        while self.waiting or not self.no_room:
            count = len(self.running)
            if count:
                held = max(self.kv + one.prompt_tokens, (count + 1) * one.typical_tokens)
                if count >= one.max_running or held > one.kv_capacity:
                    return
                if one.cost.step_s(count + 1, self.kv + one.prompt_tokens) > self.limit_s:
                    return
            if not self.waiting:
                due = self.version + one.eta
                room = one.groups * (due - self.step + 1) - sum(n for d, n in self.promised.items() if d <= due)
                if room <= 0:
                    self.no_room = True
                    return
                self.groups += 1
                self.deadlines[self.groups], self.left[self.groups] = due, one.group_size
                self.promised[due] = self.promised.get(due, 0) + 1
                self.waiting = one.group_size
            response = self.responses[self.drawn % len(self.responses)]
            self.drawn += 1
            self.waiting -= 1
            self.now += one.cost.prefill * one.prompt_tokens
            self.kv += one.prompt_tokens
            heappush(self.running, (self.done + response.steps, self.groups, response.steps, response.acting_s))

    def _train(self) -> bool:
        """Begin the next step, if none is trained and it has its groups."""
        one = self.one
        if not self.ready or self.published_s < math.inf or len(self.finished) < one.groups:
            return False
        self.ready = False
        taken: dict[int, int] = {}
        for deadline in sorted(self.finished)[: one.groups]:
            taken[deadline] = taken.get(deadline, 0) + 1
        promised = 0
        for deadline in sorted(self.promised):
            promised += self.promised[deadline] - taken.get(deadline, 0)
            if promised > one.groups * max(0, deadline - self.step):
                return False
        for deadline, count in taken.items():
            self.promised[deadline] -= count
            for _ in range(count):
                heappop(self.finished)
        self.promised = {deadline: count for deadline, count in self.promised.items() if count}
        self.step += 1
        self.no_room = False
        self.begun_s.append(self.now)
        self.published_s = self.now + one.train_s
        return True

    def _pass(self) -> None:
        """Go on to the next thing that happens: a response or an environment ends, or a version is published."""
        cost, count = self.one.cost, len(self.running)
        ends_s = self.now + cost.decode_s(count, self.kv, self.running[0][0] - self.done) if count else math.inf
        answers_s = self.acting[0][0] if self.acting else math.inf
        at = min(ends_s, answers_s, self.published_s)
        if at == ends_s:
            at_step, group, steps, acting_s = heappop(self.running)
            self.kv += count * (at_step - self.done) - self.one.prompt_tokens - steps
            self.now, self.done = ends_s, at_step
            if acting_s:
                heappush(self.acting, (self.now + acting_s, group))
            else:
                self._answer(group)
            return
        passed = cost.steps_within(count, self.kv, at - self.now)
        self.done += passed
        self.kv += count * passed
        self.now = max(self.now, at)
        if at == answers_s:
            self._answer(heappop(self.acting)[1])
            return
        self.version, self.published_s = self.step, math.inf
        self.no_room, self.ready = False, True
        self.now += self.one.pull_s + (cost.prefill * self.kv if self.one.recomputes else 0.0)

    def _answer(self, group: int) -> None:
        """A member of a group is done."""
        self.left[group] -= 1
        if not self.left[group]:
            del self.left[group]
            heappush(self.finished, self.deadlines.pop(group))
            self.ready = True
