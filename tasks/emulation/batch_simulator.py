"""Continuous batching under a cost model, in closed form. Pure: time comes in as an argument.

Between two changes of the batch, n trajectories gain a token per step and the cache grows by n per step, so any number
of steps takes one formula (`CostModel.decode_s`): the cost of simulating a response does not depend on its length.
Changes take effect at the next step boundary, as in a real engine. A prefill delays decoding by the time its tokens
cost. When the cache would overflow, the newest request is preempted and prefilled again later.

What a finished request has computed may stay in the cache for its trajectory's next turn, until running requests need
the memory (least recently used first) or new weights are loaded: a turn that goes on here prefills only what is new.

Under speculation every request gains the same number of tokens a step, the mean at the given acceptance, and a step
boundary is where each has gained a whole token (`CostModel.drafting`). So nothing is drawn, and without drafts the
numbers are the same to the last bit.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from staleflow.tasks.emulation.cost_model import CostModel, tokens_per_step
from staleflow.tasks.emulation.workload import Turn


@dataclass(frozen=True, slots=True)
class DraftedTokens:
    """Mean numbers of draft tokens of one request: verified ones, and accepted ones."""

    drafted: float = 0.0
    accepted: float = 0.0

    def __add__(self, other: DraftedTokens) -> DraftedTokens:
        return DraftedTokens(self.drafted + other.drafted, self.accepted + other.accepted)

    def __sub__(self, other: DraftedTokens) -> DraftedTokens:
        return DraftedTokens(self.drafted - other.drafted, self.accepted - other.accepted)

    def counts(self) -> dict[str, int]:
        """The numbers rounded to whole tokens, by the field names of events and SampledTokens."""
        return {"drafted_tokens": round(self.drafted), "accepted_tokens": round(self.accepted)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """Speculation settings of a simulated instance."""

    length: int = 0
    """Draft tokens of a step and request."""
    max_running: int = 0
    """Requests beyond which it does not draft."""
    acceptance: float = 0.0
    """As in `tokens_per_step`."""


@dataclass(slots=True)
class SimulatedRequest:
    """A request on an instance. `tokens`: number of response tokens at time `since`, including earlier ones and tool
    output."""

    trajectory: int
    route_number: int
    kv_tokens: int
    tokens: int
    turns: Sequence[Turn]
    turn: int
    remaining: int
    """Tokens left to sample in the present turn, as of `since`."""
    to_prefill: int
    ticket: int = 0
    """Number of its last admission or tool call: events scheduled under an older one are void."""
    since: int = 0
    """The instance's step count when this request was last updated."""
    drafts: DraftedTokens = field(default_factory=DraftedTokens)
    drafts_since: DraftedTokens = field(default_factory=DraftedTokens)
    """The instance's drafts of one request when this one was last updated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    trajectory: int
    route_number: int
    tokens: int
    at_s: float
    drafts: DraftedTokens = DraftedTokens()
    """Since it was submitted."""


@dataclass(slots=True)
class WorkTotals:
    """Total work of an instance since its start."""

    decode_s: float = 0.0
    prefill_s: float = 0.0
    pull_s: float = 0.0
    tokens: int = 0
    prefilled: int = 0
    """Tokens prefilled for the first time: prompts and tool output."""
    reprefilled: int = 0
    """Tokens that had been computed before: after an interrupt, a move, a pull or a preemption."""
    preemptions: int = 0
    cached: int = 0
    """Tokens of later turns' contexts that were in the cache, and not prefilled."""
    computed: int = 0
    """Tokens that were prefilled by now, for the first time or again."""
    drafts: float = 0.0
    """Times that a request's step verified drafted tokens."""
    drafted: float = 0.0
    """Drafted tokens that were verified, and those of them that were sampled too: means."""
    accepted: float = 0.0


class SimulatedBatch:
    """The running batch of one simulated instance. `clock` is the step boundary it has reached. Commands at `now` take
    effect at the next boundary."""

    def __init__(
        self, cost: CostModel, *, kv_capacity: int, max_running: int, drafting: DraftSettings | None = None
    ) -> None:
        self._plain = cost
        self._set_drafting(drafting or DraftSettings())
        self._drafts = DraftedTokens()  # of a request that was there all the time
        self._kv_capacity = kv_capacity
        self._max_running = max_running
        self.clock = 0.0
        self.work = WorkTotals()
        self._steps = 0
        self._kv = 0  # tokens of requests that decode
        self._kv_in_tool = 0  # tokens of requests that wait for a tool
        self._decoding: dict[int, SimulatedRequest] = {}
        self._waiting: deque[SimulatedRequest] = deque()
        self._in_tool: dict[int, SimulatedRequest] = {}
        self._cached_for_turns: OrderedDict[int, int] = (
            OrderedDict()
        )  # tokens kept for later turns by trajectory, oldest first
        self._kv_cached = 0
        self._stops: list[tuple[int, int, SimulatedRequest]] = []  # step at which a turn ends; void if it left before
        self._returns: list[tuple[float, int, SimulatedRequest]] = []  # when a tool answers
        self._order = 0
        self._finished: list[Finished] = []

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def _cost(self) -> CostModel:
        """The model of the steps of what decodes now."""
        return self._drafted if self._drafts_now else self._plain

    @property
    def _drafts_now(self) -> bool:
        return bool(self._drafting.length) and len(self._decoding) <= self._drafting.max_running

    @property
    def num_requests(self) -> int:
        return len(self._decoding) + len(self._waiting) + len(self._in_tool)

    @property
    def num_decoding(self) -> int:
        return len(self._decoding)

    @property
    def kv_tokens(self) -> int:
        """KV tokens of running requests at `clock`."""
        return self._kv + self._kv_in_tool

    @property
    def kept_tokens(self) -> int:
        """KV tokens cached for later turns at `clock`. They are evicted when running requests need the memory."""
        return self._kv_cached

    def next_s(self) -> float:
        """Time of the next event, or of the earliest one not returned yet; infinite if there is none."""
        return min(self._change_s(), self._finished[0].at_s) if self._finished else self._change_s()

    def _change_s(self) -> float:
        steps = self._steps_to_stop()
        change_s = math.inf if steps is None else self.clock + self._cost.decode_s(len(self._decoding), self._kv, steps)
        while self._returns and not _still_valid(self._in_tool, self._returns[0]):
            heapq.heappop(self._returns)
        return min(change_s, max(self.clock, self._returns[0][0])) if self._returns else change_s

    def progress(self, now: float) -> tuple[tuple[int, int], ...]:
        """(trajectory, response tokens) of all requests, at `now`."""
        running = len(self._decoding)
        passed = int(self._cost.steps_within(running, self._kv, now - self.clock)) if running else 0
        steps = self._steps + passed
        rows = [(d.trajectory, d.tokens + min(d.remaining, steps - d.since)) for d in self._decoding.values()]
        rows += [(d.trajectory, d.tokens) for d in (*self._waiting, *self._in_tool.values())]
        return tuple(rows)

    def work_by(self, now: float) -> WorkTotals:
        """The totals, including the steps that have ended by `now`."""
        work, steps = replace(self.work), self._steps_to_stop()
        if steps is not None and now > self.clock:
            running = len(self._decoding)
            steps = min(steps, int(self._cost.steps_within(running, self._kv, now - self.clock)))
            self._count(work, steps, self._cost.decode_s(running, self._kv, steps))
        return work

    # -- time ----------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> list[Finished]:
        """Decode up to `now`. Returns the requests that ended, in order."""
        while (change_s := self._change_s()) <= now:
            steps = self._steps_to_stop()
            stop_s = math.inf
            if steps is not None:
                stop_s = self.clock + self._cost.decode_s(len(self._decoding), self._kv, steps)
            if steps is not None and stop_s <= change_s:
                self._step(steps)
            else:
                self._to_boundary(change_s)
            self._settle()
        # A command's step boundary may lie after the command; what ended there is not returned before that time.
        finished = [f for f in self._finished if f.at_s <= now]
        self._finished = self._finished[len(finished) :]
        return finished

    # -- commands ------------------------------------------------------------------------------------------------

    def submit(
        self,
        now: float,
        trajectory: int,
        route_number: int,
        prompt_tokens: int,
        tokens: int,
        turns: Sequence[Turn],
        *,
        num_env_tokens: int = 0,
    ) -> None:
        """Start or continue a response. Call `advance(now)` before every command.

        Args:
            now: Time of the command.
            trajectory: Its id.
            route_number: Of the routing.
            prompt_tokens: Length of the prompt.
            tokens: Tokens that the response has already.
            turns: The turns of the response.
            num_env_tokens: The last of `tokens`, if no instance has computed them yet: an observation.
        """
        turn, remaining, done = 0, turns[0].tokens, tokens
        while done >= remaining and turn < len(turns) - 1:  # a tool that was waited for has answered meanwhile
            done -= remaining + turns[turn].tool_tokens
            turn += 1
            remaining = turns[turn].tokens
        context = prompt_tokens + tokens + max(0, -done)
        request = SimulatedRequest(
            trajectory=trajectory,
            route_number=route_number,
            kv_tokens=context,
            tokens=tokens + max(0, -done),
            turns=turns,
            turn=turn,
            remaining=max(1, remaining - max(0, done)),
            to_prefill=context,
        )
        self._to_boundary(now)
        if not tokens:
            self._forget(trajectory)  # an episode that begins again
        self.work.reprefilled += prompt_tokens + tokens - num_env_tokens if tokens else 0
        self.work.prefilled += num_env_tokens + max(0, -done) if tokens else prompt_tokens
        self._waiting.append(request)
        self._settle()

    def set_draft_length(self, now: float, length: int) -> None:
        """Set the number of draft tokens per request and step."""
        self._to_boundary(now)
        self._settle()
        self._set_drafting(replace(self._drafting, length=length))

    def forget(self, trajectory: int) -> None:
        """Drop the cached context of a trajectory. Running requests are not affected."""
        self._forget(trajectory)

    def remove(self, now: float, trajectory: int) -> SimulatedRequest | None:
        """Stop a request and return it; None if it is unknown."""
        self._to_boundary(now)
        self._settle()
        decoding = self._decoding.get(trajectory)
        if decoding is not None:
            self._leave(decoding)
            self._settle()
            return decoding
        request = self._in_tool.pop(trajectory, None)
        if request is not None:
            self._kv_in_tool -= request.kv_tokens
            return request
        for waiting in self._waiting:
            if waiting.trajectory == trajectory:
                self._waiting.remove(waiting)
                return waiting
        return None

    def load(self, now: float, seconds: float, *, keep: bool = False) -> float:
        """Load new weights, which takes `seconds`. Returns the time at which they are loaded. keep: keep the KV cache
        of the old weights instead of prefilling all contexts again."""
        self._to_boundary(now)
        self._settle()
        self._cached_for_turns.clear()
        self._kv_cached = 0
        self.clock += seconds
        loaded_s = self.clock
        self.work.pull_s += seconds
        if keep:
            return loaded_s
        self._prefill(self._kv + self._kv_in_tool)
        self.work.reprefilled += self._kv + self._kv_in_tool
        return loaded_s

    # -- inside --------------------------------------------------------------------------------------------------

    def _set_drafting(self, drafting: DraftSettings) -> None:
        self._drafting = drafting
        self._drafted = self._plain.drafting(drafting.length, drafting.acceptance)

    def _steps_to_stop(self) -> int | None:
        """Decode steps until a turn ends or the cache is full; None if nothing decodes."""
        if not self._decoding:
            return None
        while not _still_valid(self._decoding, self._stops[0]):
            heapq.heappop(self._stops)
        steps = self._stops[0][0] - self._steps
        free_tokens = self._kv_capacity - self._kv - self._kv_in_tool
        if len(self._decoding) > 1:
            steps = min(steps, max(0, free_tokens // len(self._decoding)))
        return steps

    def _to_boundary(self, now: float) -> None:
        """Bring the clock to the first step boundary at or after `now`."""
        if now <= self.clock:
            return
        if not self._decoding:
            self.clock = now
            return
        passed = self._cost.steps_within(len(self._decoding), self._kv, now - self.clock)
        steps = self._steps_to_stop()
        assert steps is not None
        self._step(min(steps, math.ceil(passed - 1e-9)))

    def _step(self, steps: int) -> None:
        running = len(self._decoding)
        seconds = self._cost.decode_s(running, self._kv, steps)
        self.clock += seconds
        self._steps += steps
        self._kv += steps * running
        self._make_room()
        self._count(self.work, steps, seconds)
        if self._drafts_now:
            real = steps / tokens_per_step(self._drafting.length, self._drafting.acceptance)
            self._drafts += DraftedTokens(real * self._drafting.length, steps - real)

    def _count(self, work: WorkTotals, steps: int, seconds: float) -> None:
        """Add so many steps of what decodes, which take so long."""
        running = len(self._decoding)
        work.decode_s += seconds
        work.tokens += steps * running
        if self._drafts_now:
            real = steps / tokens_per_step(self._drafting.length, self._drafting.acceptance)
            work.drafts += running * real
            work.drafted += running * real * self._drafting.length
            work.accepted += running * (steps - real)

    def _settle(self) -> None:
        """Process a step boundary: end turns, preempt on overflow, take tool output, admit waiting requests."""
        while self._stops and self._stops[0][0] <= self._steps:
            stop = heapq.heappop(self._stops)
            if _still_valid(self._decoding, stop):
                self._leave(stop[2])
                self._end_turn(stop[2])
        while len(self._decoding) > 1 and self._kv + self._kv_in_tool + len(self._decoding) > self._kv_capacity:
            newest = self._decoding[next(reversed(self._decoding))]
            self._leave(newest)
            newest.to_prefill = newest.kv_tokens
            self._waiting.appendleft(newest)
            self.work.preemptions += 1
            self.work.reprefilled += newest.kv_tokens
        while self._returns and self._returns[0][0] <= self.clock:
            answered = heapq.heappop(self._returns)
            if _still_valid(self._in_tool, answered):
                request = answered[2]
                del self._in_tool[request.trajectory]
                self._kv_in_tool -= request.kv_tokens
                answer = request.turns[request.turn - 1].tool_tokens
                request.kv_tokens += answer
                request.tokens += answer
                request.to_prefill = answer
                self.work.prefilled += answer
                self._waiting.appendleft(request)
        while self._waiting and len(self._decoding) < self._max_running:
            needed = self._kv + self._kv_in_tool + self._waiting[0].kv_tokens + len(self._decoding) + 1
            if needed > self._kv_capacity and self._decoding:
                break
            self._admit(self._waiting.popleft())

    def _admit(self, request: SimulatedRequest) -> None:
        cached_tokens = min(self._forget(request.trajectory), request.to_prefill)
        self.work.cached += cached_tokens
        self.work.reprefilled -= cached_tokens
        self._prefill(request.to_prefill - cached_tokens)
        request.since = self._steps
        request.drafts_since = self._drafts
        self._kv += request.kv_tokens
        self._make_room()
        self._decoding[request.trajectory] = request
        self._order += 1
        request.ticket = self._order
        heapq.heappush(self._stops, (self._steps + request.remaining, self._order, request))

    def _prefill(self, tokens: int) -> None:
        seconds = self._cost.prefill * tokens
        self.clock += seconds
        self.work.prefill_s += seconds
        self.work.computed += tokens

    def _leave(self, decoding: SimulatedRequest) -> None:
        """Bring a request up to date and take it out of the batch."""
        gained = self._steps - decoding.since
        decoding.tokens += gained
        decoding.remaining -= gained
        decoding.kv_tokens += gained
        decoding.since = self._steps
        decoding.drafts += self._drafts - decoding.drafts_since
        decoding.drafts_since = self._drafts
        self._kv -= decoding.kv_tokens
        del self._decoding[decoding.trajectory]

    def _end_turn(self, decoding: SimulatedRequest) -> None:
        done = decoding.turns[decoding.turn]
        decoding.turn += 1
        if decoding.turn == len(decoding.turns):
            self._finished.append(
                Finished(
                    trajectory=decoding.trajectory,
                    route_number=decoding.route_number,
                    tokens=decoding.tokens,
                    at_s=self.clock,
                    drafts=decoding.drafts,
                )
            )
            self._cached_for_turns[decoding.trajectory] = decoding.kv_tokens
            self._kv_cached += decoding.kv_tokens
            return
        decoding.remaining = decoding.turns[decoding.turn].tokens
        self._in_tool[decoding.trajectory] = decoding
        self._kv_in_tool += decoding.kv_tokens
        self._order += 1
        decoding.ticket = self._order
        heapq.heappush(self._returns, (self.clock + done.tool_s, self._order, decoding))

    def _make_room(self) -> None:
        """Evict what is kept for later turns, as far as running requests need the memory."""
        while self._cached_for_turns and self._kv + self._kv_in_tool + self._kv_cached > self._kv_capacity:
            self._forget(next(iter(self._cached_for_turns)))

    def _forget(self, trajectory: int) -> int:
        """Remove a trajectory's cached context; returns its tokens."""
        tokens = self._cached_for_turns.pop(trajectory, 0)
        self._kv_cached -= tokens
        return tokens


def _still_valid(requests: dict[int, SimulatedRequest], scheduled: tuple[float, int, SimulatedRequest]) -> bool:
    """Whether a scheduled event is still valid: its request has not left `requests` since it was scheduled."""
    request = scheduled[2]
    return requests.get(request.trajectory) is request and request.ticket == scheduled[1]
