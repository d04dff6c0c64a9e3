"""Continuous batching under a cost model, in closed form. Pure: time comes in as an argument.

Between two changes of the batch, n trajectories gain a token per step and the cache grows by n per step, so the time of
any number of steps is one formula (`CostModel.decode_s`): simulating a response costs the same for every length.
Changes take effect at the next step boundary, as in a real engine. A prefill delays decoding by the time for its
tokens. When the cache would overflow, the newest request is preempted and prefilled again later.

The KV cache of a finished request may be kept for its trajectory's next turn, until running requests need the memory
(least recently used first) or new weights are loaded. The next turn on the same instance then prefills only new tokens.

With speculation every request gains the same number of tokens per step, the mean at the acceptance rate, and a step
boundary is where each has gained a whole token (`CostModel.with_drafts`). So there are no random numbers, and a draft
length of 0 gives exactly the same numbers as no speculation.
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
    """Mean numbers of draft tokens of one request: `drafted` were verified, `accepted` of them were sampled."""

    drafted: float = 0.0
    accepted: float = 0.0

    def __add__(self, other: DraftedTokens) -> DraftedTokens:
        return DraftedTokens(self.drafted + other.drafted, self.accepted + other.accepted)

    def __sub__(self, other: DraftedTokens) -> DraftedTokens:
        return DraftedTokens(self.drafted - other.drafted, self.accepted - other.accepted)

    def counts(self) -> dict[str, int]:
        """Round to whole tokens. Returns them by the field names of events and SampledTokens."""
        return {"drafted_tokens": round(self.drafted), "accepted_tokens": round(self.accepted)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """Speculation settings of a simulated instance."""

    length: int = 0
    """Draft tokens per request and step; 0: no speculation."""
    max_running: int = 0
    """Maximum running requests with speculation; with more requests, steps have no drafts."""
    acceptance: float = 0.0
    """Probability that a draft token is accepted; see `tokens_per_step`."""


@dataclass(slots=True)
class SimulatedRequest:
    """A request on an instance. Its numbers of tokens are those at step `updated_step`."""

    trajectory: int
    route_number: int
    kv_tokens: int
    """Prompt and response tokens."""
    tokens: int
    """Response tokens, with tool output and the tokens of earlier instances."""
    turns: Sequence[Turn]
    turn_index: int
    remaining_tokens: int
    """Tokens left to sample in the current turn."""
    prefill_tokens: int
    """Tokens to prefill when it is admitted, if none of them are cached."""
    schedule_number: int = 0
    """Number of the request's last scheduled event. Events with smaller numbers are not valid any longer."""
    updated_step: int = 0
    """The instance's step count when this request was last updated."""
    drafts: DraftedTokens = field(default_factory=DraftedTokens)
    drafts_at_update: DraftedTokens = field(default_factory=DraftedTokens)
    """The instance's total of draft tokens per request when this request was last updated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """A request that has ended. tokens: number of response tokens. at_s: time of its end."""

    trajectory: int
    route_number: int
    tokens: int
    at_s: float
    drafts: DraftedTokens = DraftedTokens()
    """Draft tokens since the request was submitted."""


@dataclass(slots=True)
class WorkTotals:
    """Total work of an instance since its start."""

    decode_s: float = 0.0
    prefill_s: float = 0.0
    pull_s: float = 0.0
    sampled_tokens: int = 0
    new_prefill_tokens: int = 0
    """Tokens prefilled for the first time: prompts and tool output."""
    repeated_prefill_tokens: int = 0
    """Tokens prefilled again: after an interrupt, a migration, a pull or a preemption."""
    preemptions: int = 0
    cached_tokens: int = 0
    """Context tokens of later turns that were cached, and so not prefilled."""
    all_prefill_tokens: int = 0
    """All tokens prefilled until now."""
    num_drafts: float = 0.0
    """Number of drafts that were verified: decode steps with speculation, summed over requests."""
    drafted_tokens: float = 0.0
    """Mean number of draft tokens that were verified."""
    accepted_tokens: float = 0.0
    """Mean number of draft tokens that were sampled, too."""


class SimulatedBatch:
    """The running batch of one simulated instance. `clock`: time of the current step boundary. Commands at `now` take
    effect at the first boundary after it."""

    def __init__(
        self, cost: CostModel, *, kv_capacity: int, max_running: int, draft_settings: DraftSettings | None = None
    ) -> None:
        self._base_cost = cost
        self._draft_settings = draft_settings or DraftSettings()
        self._cost_with_drafts = cost.with_drafts(self._draft_settings.length, self._draft_settings.acceptance)
        self._drafts = DraftedTokens()  # of a request that has decoded since the start
        self._kv_capacity = kv_capacity
        self._max_running = max_running
        self.clock = 0.0
        self.work = WorkTotals()
        self._steps = 0
        self._decoding_kv_tokens = 0  # KV tokens of decoding requests
        self._tool_kv_tokens = 0  # KV tokens of requests that wait for a tool
        self._running: dict[int, SimulatedRequest] = {}
        self._waiting: deque[SimulatedRequest] = deque()
        self._in_tool: dict[int, SimulatedRequest] = {}
        # Cached KV tokens for later turns, by trajectory, least recently used first.
        self._cached_for_turns: OrderedDict[int, int] = OrderedDict()
        self._cached_kv_tokens = 0
        self._turn_ends: list[tuple[int, int, SimulatedRequest]] = []  # (step, schedule_number, request)
        self._tool_results: list[tuple[float, int, SimulatedRequest]] = []  # (seconds, schedule_number, request)
        self._num_scheduled = 0
        self._outputs: list[FinishedRequest] = []

    # -- queries -------------------------------------------------------------------------------------------------

    @property
    def _cost(self) -> CostModel:
        """Cost model of the current batch's steps, with or without drafts."""
        return self._cost_with_drafts if self._is_drafting else self._base_cost

    @property
    def _is_drafting(self) -> bool:
        return bool(self._draft_settings.length) and len(self._running) <= self._draft_settings.max_running

    @property
    def num_requests(self) -> int:
        return len(self._running) + len(self._waiting) + len(self._in_tool)

    @property
    def num_decoding(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of requests outside the batch, for lack of room in it."""
        return len(self._waiting)

    @property
    def kv_tokens(self) -> int:
        """KV tokens of running requests at `clock`."""
        return self._decoding_kv_tokens + self._tool_kv_tokens

    @property
    def kept_tokens(self) -> int:
        """KV tokens cached for later turns at `clock`. They are evicted when running requests need the memory."""
        return self._cached_kv_tokens

    def next_change_s(self) -> float:
        """Time of the next change of the batch, or of the earliest end that `advance` has not returned; inf: none."""
        return min(self._next_batch_change_s(), self._outputs[0].at_s) if self._outputs else self._next_batch_change_s()

    def _next_batch_change_s(self) -> float:
        steps = self._steps_to_turn_end()
        change_s = (
            math.inf
            if steps is None
            else self.clock + self._cost.decode_s(len(self._running), self._decoding_kv_tokens, steps)
        )
        while self._tool_results and not _still_valid(self._in_tool, self._tool_results[0]):
            heapq.heappop(self._tool_results)
        return min(change_s, max(self.clock, self._tool_results[0][0])) if self._tool_results else change_s

    def progress(self, now: float) -> tuple[tuple[int, int], ...]:
        """Return (trajectory, response tokens) of all requests at `now`."""
        running = len(self._running)
        num_steps = int(self._cost.steps_within(running, self._decoding_kv_tokens, now - self.clock)) if running else 0
        steps = self._steps + num_steps
        rows = [
            (d.trajectory, d.tokens + min(d.remaining_tokens, steps - d.updated_step)) for d in self._running.values()
        ]
        rows += [(d.trajectory, d.tokens) for d in (*self._waiting, *self._in_tool.values())]
        return tuple(rows)

    def work_until(self, now: float) -> WorkTotals:
        """Return the totals, including the steps that have ended by `now`."""
        work, steps = replace(self.work), self._steps_to_turn_end()
        if steps is not None and now > self.clock:
            running = len(self._running)
            steps = min(steps, int(self._cost.steps_within(running, self._decoding_kv_tokens, now - self.clock)))
            self._add_work(work, steps, self._cost.decode_s(running, self._decoding_kv_tokens, steps))
        return work

    # -- time ----------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> list[FinishedRequest]:
        """Decode up to `now`. Returns the requests that ended, in order."""
        while (change_s := self._next_batch_change_s()) <= now:
            steps = self._steps_to_turn_end()
            stop_s = math.inf
            if steps is not None:
                stop_s = self.clock + self._cost.decode_s(len(self._running), self._decoding_kv_tokens, steps)
            if steps is not None and stop_s <= change_s:
                self._step(steps)
            else:
                self._advance_to_boundary(change_s)
            self._process_boundary()
        # A command's step boundary may be later than the command. Requests that end there are returned at that time.
        finished_requests = [f for f in self._outputs if f.at_s <= now]
        self._outputs = self._outputs[len(finished_requests) :]
        return finished_requests

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
            route_number: Number of its routing.
            prompt_tokens: Length of the prompt.
            tokens: Number of tokens that the response already has.
            turns: The turns of the response.
            num_env_tokens: Number of the last `tokens` that are a new observation, not computed by any instance yet.
        """
        turn, remaining, done = 0, turns[0].tokens, tokens
        while done >= remaining and turn < len(turns) - 1:  # the tool result of this turn has arrived
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
            turn_index=turn,
            remaining_tokens=max(1, remaining - max(0, done)),
            prefill_tokens=context,
        )
        self._advance_to_boundary(now)
        if not tokens:
            self._pop_cached(trajectory)  # the episode restarts
        self.work.repeated_prefill_tokens += prompt_tokens + tokens - num_env_tokens if tokens else 0
        self.work.new_prefill_tokens += num_env_tokens + max(0, -done) if tokens else prompt_tokens
        self._waiting.append(request)
        self._process_boundary()

    def release_cache(self, trajectory: int) -> None:
        """Drop the cached context of a trajectory. Running requests are not affected."""
        self._pop_cached(trajectory)

    def clear_cache(self) -> None:
        """Drop the cached contexts of all trajectories. Running requests are not affected."""
        self._cached_for_turns.clear()
        self._cached_kv_tokens = 0

    def remove(self, now: float, trajectory: int) -> SimulatedRequest | None:
        """Remove a request and return it; None if there is no such request."""
        self._advance_to_boundary(now)
        self._process_boundary()
        decoding = self._running.get(trajectory)
        if decoding is not None:
            self._remove_from_batch(decoding)
            self._process_boundary()
            return decoding
        request = self._in_tool.pop(trajectory, None)
        if request is not None:
            self._tool_kv_tokens -= request.kv_tokens
            return request
        for waiting in self._waiting:
            if waiting.trajectory == trajectory:
                self._waiting.remove(waiting)
                return waiting
        return None

    def load(self, now: float, seconds: float, *, keep_cache: bool = False) -> float:
        """Load new weights, which takes `seconds`. Returns the time at which they are loaded. keep_cache: keep the KV
        cache of the old weights instead of prefilling all contexts again."""
        self._advance_to_boundary(now)
        self._process_boundary()
        self.clear_cache()
        self.clock += seconds
        loaded_s = self.clock
        self.work.pull_s += seconds
        if keep_cache:
            return loaded_s
        self._prefill(self._decoding_kv_tokens + self._tool_kv_tokens)
        self.work.repeated_prefill_tokens += self._decoding_kv_tokens + self._tool_kv_tokens
        return loaded_s

    # -- internal ------------------------------------------------------------------------------------------------

    def _steps_to_turn_end(self) -> int | None:
        """Decode steps until a turn ends or the cache is full; None if nothing decodes."""
        if not self._running:
            return None
        while not _still_valid(self._running, self._turn_ends[0]):
            heapq.heappop(self._turn_ends)
        steps = self._turn_ends[0][0] - self._steps
        free_tokens = self._kv_capacity - self._decoding_kv_tokens - self._tool_kv_tokens
        if len(self._running) > 1:
            steps = min(steps, max(0, free_tokens // len(self._running)))
        return steps

    def _advance_to_boundary(self, now: float) -> None:
        """Advance the clock to the first step boundary at or after `now`."""
        if now <= self.clock:
            return
        if not self._running:
            self.clock = now
            return
        exact_steps = self._cost.steps_within(len(self._running), self._decoding_kv_tokens, now - self.clock)
        num_steps, steps = math.ceil(exact_steps - 1e-9), self._steps_to_turn_end()
        assert steps is not None
        self._step(min(steps, num_steps))
        if num_steps <= steps:
            self.clock = max(self.clock, now)  # by rounding the boundary may be earlier, and what happens now be missed

    def _step(self, steps: int) -> None:
        running = len(self._running)
        seconds = self._cost.decode_s(running, self._decoding_kv_tokens, steps)
        self.clock += seconds
        self._steps += steps
        self._decoding_kv_tokens += steps * running
        self._evict_cached()
        self._add_work(self.work, steps, seconds)
        if self._is_drafting:
            verify_steps = steps / tokens_per_step(self._draft_settings.length, self._draft_settings.acceptance)
            self._drafts += DraftedTokens(verify_steps * self._draft_settings.length, steps - verify_steps)

    def _add_work(self, work: WorkTotals, steps: int, seconds: float) -> None:
        """Add `steps` steps of the current batch, which take `seconds`, to the totals."""
        running = len(self._running)
        work.decode_s += seconds
        work.sampled_tokens += steps * running
        if self._is_drafting:
            verify_steps = steps / tokens_per_step(self._draft_settings.length, self._draft_settings.acceptance)
            work.num_drafts += running * verify_steps
            work.drafted_tokens += running * verify_steps * self._draft_settings.length
            work.accepted_tokens += running * (steps - verify_steps)

    def _process_boundary(self) -> None:
        """Process a step boundary: end turns, preempt on overflow, append tool output, admit waiting requests."""
        while self._turn_ends and self._turn_ends[0][0] <= self._steps:
            stop = heapq.heappop(self._turn_ends)
            if _still_valid(self._running, stop):
                self._remove_from_batch(stop[2])
                self._end_turn(stop[2])
        while (
            len(self._running) > 1
            and self._decoding_kv_tokens + self._tool_kv_tokens + len(self._running) > self._kv_capacity
        ):
            newest = self._running[next(reversed(self._running))]
            self._remove_from_batch(newest)
            newest.prefill_tokens = newest.kv_tokens
            self._waiting.appendleft(newest)
            self.work.preemptions += 1
            self.work.repeated_prefill_tokens += newest.kv_tokens
        while self._tool_results and self._tool_results[0][0] <= self.clock:
            event = heapq.heappop(self._tool_results)
            if _still_valid(self._in_tool, event):
                request = event[2]
                del self._in_tool[request.trajectory]
                self._tool_kv_tokens -= request.kv_tokens
                env_tokens = request.turns[request.turn_index - 1].tool_tokens
                request.kv_tokens += env_tokens
                request.tokens += env_tokens
                request.prefill_tokens = env_tokens
                self.work.new_prefill_tokens += env_tokens
                self._waiting.appendleft(request)
        while self._waiting and len(self._running) < self._max_running:
            needed_tokens = (
                self._decoding_kv_tokens + self._tool_kv_tokens + self._waiting[0].kv_tokens + len(self._running) + 1
            )
            if needed_tokens > self._kv_capacity and self._running:
                break
            self._admit(self._waiting.popleft())

    def _admit(self, request: SimulatedRequest) -> None:
        cached_tokens = min(self._pop_cached(request.trajectory), request.prefill_tokens)
        self.work.cached_tokens += cached_tokens
        self.work.repeated_prefill_tokens -= cached_tokens
        self._prefill(request.prefill_tokens - cached_tokens)
        request.updated_step = self._steps
        request.drafts_at_update = self._drafts
        self._decoding_kv_tokens += request.kv_tokens
        self._evict_cached()
        self._running[request.trajectory] = request
        self._num_scheduled += 1
        request.schedule_number = self._num_scheduled
        heapq.heappush(self._turn_ends, (self._steps + request.remaining_tokens, self._num_scheduled, request))

    def _prefill(self, tokens: int) -> None:
        seconds = self._cost.prefill * tokens
        self.clock += seconds
        self.work.prefill_s += seconds
        self.work.all_prefill_tokens += tokens

    def _remove_from_batch(self, request: SimulatedRequest) -> None:
        """Update a request's counts and remove it from the batch."""
        new_tokens = self._steps - request.updated_step
        request.tokens += new_tokens
        request.remaining_tokens -= new_tokens
        request.kv_tokens += new_tokens
        request.updated_step = self._steps
        request.drafts += self._drafts - request.drafts_at_update
        request.drafts_at_update = self._drafts
        self._decoding_kv_tokens -= request.kv_tokens
        del self._running[request.trajectory]

    def _end_turn(self, request: SimulatedRequest) -> None:
        finished_turn = request.turns[request.turn_index]
        request.turn_index += 1
        if request.turn_index == len(request.turns):
            self._outputs.append(
                FinishedRequest(
                    trajectory=request.trajectory,
                    route_number=request.route_number,
                    tokens=request.tokens,
                    at_s=self.clock,
                    drafts=request.drafts,
                )
            )
            self._cached_for_turns[request.trajectory] = request.kv_tokens
            self._cached_kv_tokens += request.kv_tokens
            return
        request.remaining_tokens = request.turns[request.turn_index].tokens
        self._in_tool[request.trajectory] = request
        self._tool_kv_tokens += request.kv_tokens
        self._num_scheduled += 1
        request.schedule_number = self._num_scheduled
        heapq.heappush(self._tool_results, (self.clock + finished_turn.tool_s, self._num_scheduled, request))

    def _evict_cached(self) -> None:
        """Evict cached contexts of later turns until running requests have enough memory."""
        while (
            self._cached_for_turns
            and self._decoding_kv_tokens + self._tool_kv_tokens + self._cached_kv_tokens > self._kv_capacity
        ):
            self._pop_cached(next(iter(self._cached_for_turns)))

    def _pop_cached(self, trajectory: int) -> int:
        """Remove a trajectory's cached context. Returns its number of tokens, 0 if there is none."""
        tokens = self._cached_for_turns.pop(trajectory, 0)
        self._cached_kv_tokens -= tokens
        return tokens


def _still_valid(requests: dict[int, SimulatedRequest], event: tuple[float, int, SimulatedRequest]) -> bool:
    """Whether a scheduled event is still valid, that is, whether its request has been in `requests` ever since."""
    request = event[2]
    return requests.get(request.trajectory) is request and request.schedule_number == event[1]
