"""A scheduler for transformers' continuous batching that keeps what a turn has computed for the turn after it.

A request whose key says that its trajectory may return leaves its pages where they are when it ends. The trajectory's
next request takes them over if its tokens begin with exactly those that they were computed from, and it is of the same
version; else they are freed.

Invariants: a page belongs to one key, that of a request or that of a kept context. Kept contexts give way, the one that
ended first before the others, before a request that runs is preempted and before a new one has to wait, unless a
request that waits is about to take them over. They are of the version that their key names: whoever overwrites its
weights calls `forget_all`.

All but `add_waiting_request`'s callers run in the manager's own thread, or while it is paused. This builds on what is
beneath transformers' public manager, in the versions that pyproject.toml allows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler

from staleflow.stores.trajectory import PolicyVersion, TrajectoryId
from staleflow.tasks.engines.response_drafter import Drafter
from staleflow.tasks.engines.running_requests import version_of
from staleflow.tasks.engines.stop_strings import StopCheck

NAME = "staleflow"
"""Of this scheduler, in ContinuousBatchingConfig.scheduler_type."""


@dataclass(frozen=True, slots=True)
class KeptContext:
    """What is kept of a trajectory. key: of the request that has computed it, which its pages are still under. tokens:
    those that it has computed: all but the last one that it has sampled."""

    key: str
    tokens: list[int]


class KeepingScheduler(FIFOScheduler):
    """Serves requests in the order they arrive, as its base does. Keys are those of `RunningRequests`. With a drafter,
    requests that decode get drafted tokens to verify while nothing waits or prefills, as far as there is room."""

    drafter: Drafter | None = None
    scheduled: Callable[[list[tuple[PolicyVersion, int]]], object] | None = None
    """Called before each pass with the versions of its tokens, and how many are of each, in their order."""

    def reset(self) -> None:
        super().reset()
        self.returning: set[str] = set()
        """Keys of requests whose trajectories may return; added to before the request is."""
        self.stops: dict[str, StopCheck] = {}
        """Of requests that have stop strings, by key; added to before the request is."""
        self.prefilled_tokens = 0
        self.cached_tokens = 0
        self.kept_tokens = 0
        self._kept: OrderedDict[str, KeptContext] = OrderedDict()

    def kept_key(self, trajectory: TrajectoryId) -> str | None:
        """The key that a trajectory's kept context is under; cancelling it as a request's frees the context."""
        kept = self._kept.get(str(trajectory))
        return kept.key if kept else None

    def sampled(self, key: str, first: int) -> tuple[list[int], list[float]]:
        """Tokens that a request has sampled, from the first-th on, and their logprobs: all under the manager's pause,
        else all but what the present step adds. Nothing of one that has ended."""
        state = self.active_requests.get(key) or self.waiting_requests.get(key)
        if state is None:
            return [], []
        tokens, logprobs, before = state.generated_tokens, state.logprobs, state._true_initial_tokens
        if before:  # it was preempted: its earlier ones have become part of its prompt
            tokens = [*state.initial_tokens[before:], *tokens]
        last = len(logprobs)  # which are added after their tokens
        return tokens[first:last], logprobs[first:last]

    def forget_all(self) -> None:
        """Free all that is kept."""
        for trajectory in list(self._kept):
            self._forget(trajectory)

    # -- what the base calls -------------------------------------------------------------------------------------

    def add_waiting_request(self, state: Any) -> None:
        trajectory = _trajectory(state.request_id)
        if trajectory in self._kept and self._taken_over(state) is None:
            self._forget(trajectory)
        if (stop := self.stops.get(state.request_id)) is not None:
            _stop_with(state, stop)
        super().add_waiting_request(state)

    def clear_cancelled_requests(self) -> Any:
        for key in self._requests_to_cancel:
            self.returning.discard(key)
            self.stops.pop(key, None)
            self._end_drafts(key)
            kept = self._kept.get(_trajectory(key))
            if kept is not None and kept.key == key:
                self._forget(_trajectory(key))
        return super().clear_cancelled_requests()

    def schedule_batch(self, token_budget: int, cache_budget: int) -> Any:
        if not self.active_requests:
            # After a preemption the base lets nothing begin until a request ends; those that ran may have been stopped.
            self.block_new_requests = False
        if self._kept:
            self._make_room(token_budget)
        if self.drafter is not None:
            self._draft(self.drafter, token_budget)
        found = super().schedule_batch(token_budget, cache_budget)
        if self.scheduled is not None and found[0]:
            self.scheduled([(version_of(one.state.request_id), one.query_length) for one in found[0]])
        return found

    def finish_request(self, request_id: str) -> None:
        state = self.active_requests.get(request_id)
        held = all(request_id in one.block_table for one in self._allocators())
        if held:
            self.stops.pop(request_id, None)
        # One that is preempted is finished too; it has no pages then, and returns under the same key.
        if state is not None and state.status == RequestStatus.FINISHED and held and request_id in self.returning:
            self.returning.discard(request_id)
            self._end_drafts(request_id)
            del self.active_requests[request_id]
            self._keep(request_id, (state.initial_tokens + state.generated_tokens)[: state.position_offset])
            return
        if held:
            self.returning.discard(request_id)
            self._end_drafts(request_id)
        super().finish_request(request_id)

    def _infer_request_tokens(self, state: Any, request_ids_to_remove_from_waiting: set[str]) -> Any:
        """Have a request that enters the batch take over what is kept for it, as the base does with shared pages."""
        if state.status == RequestStatus.PENDING:
            kept = self._taken_over(state)
            if kept is not None and self._fits([self._wanted(state, self.cache.max_batch_tokens)]):
                self._kept.pop(_trajectory(state.request_id))
                count = len(kept.tokens)
                self.kept_tokens -= count
                for one in self._allocators():
                    one.block_table[state.request_id] = one.block_table.pop(kept.key)
                self.active_requests[state.request_id] = state
                self.waiting_requests.pop(state.request_id, None)
                request_ids_to_remove_from_waiting.add(state.request_id)
                state.status = RequestStatus.PREFILLING
                state.remaining_prefill_tokens = state.remaining_prefill_tokens[count:]
                state.position_offset = count
                self.cached_tokens += count
                self.prefilled_tokens += len(state.remaining_prefill_tokens)
        return super()._infer_request_tokens(state, request_ids_to_remove_from_waiting)

    def _schedule_request(self, state: Any, request_tokens: list[int], *args: Any) -> None:
        if state.status == RequestStatus.PENDING:
            self.prefilled_tokens += len(request_tokens)
        super()._schedule_request(state, request_tokens, *args)

    # -- inside --------------------------------------------------------------------------------------------------

    def _allocators(self) -> Iterable[Any]:
        """One for each kind of attention; each has a table of the pages by key."""
        return self.cache.cache_allocators.values()  # type: ignore[no-any-return]  # untyped

    def _keep(self, key: str, tokens: list[int]) -> None:
        trajectory = _trajectory(key)
        self._forget(trajectory)
        self._kept[trajectory] = KeptContext(key, tokens)
        self.kept_tokens += len(tokens)

    def _forget(self, trajectory: str) -> None:
        kept = self._kept.pop(trajectory, None)
        if kept is not None:
            self.kept_tokens -= len(kept.tokens)
            self.cache.free_blocks(kept.key)

    def _taken_over(self, state: Any) -> KeptContext | None:
        """What is kept of the trajectory of a request that has computed nothing yet, if its tokens continue that."""
        kept = self._kept.get(_trajectory(state.request_id))
        if kept is None or len(state.initial_tokens) <= len(kept.tokens):
            return None
        if version_of(kept.key) != version_of(state.request_id):
            return None
        return kept if state.initial_tokens[: len(kept.tokens)] == kept.tokens else None

    def _wanted(self, state: Any, most: int) -> dict[str, int]:
        """Pages of each kind that a request needs for its next step, of at most so many tokens."""
        key, held, tokens = state.request_id, state.current_len(), len(state.remaining_prefill_tokens)
        kept = self._taken_over(state) if state.status == RequestStatus.PENDING else None
        if kept is not None:
            key, held, tokens = kept.key, len(kept.tokens), tokens - len(kept.tokens)
        step = len(state.tokens_to_process) if state.status == RequestStatus.DECODING else min(tokens, most)
        return {name: one.needs_new_blocks(key, held, step) for name, one in self.cache.cache_allocators.items()}

    def _draft(self, drafter: Drafter, token_budget: int) -> None:
        """Give the requests that decode drafted tokens to compute after their last ones, or none."""
        active = list(self.active_requests.values())
        decoding = [state for state in active if state.status == RequestStatus.DECODING]
        for state in decoding:
            del state.tokens_to_process[1:]  # what was drafted for a step that it was not part of
        if self.waiting_requests or len(decoding) < len(active):
            return
        room = token_budget - len(decoding)
        for state in decoding:
            draft = drafter.draft(state.request_id, min(room, state._new_tokens_limit - state.generated_len() - 1))
            state.tokens_to_process += draft
            room -= len(draft)
        if not self._fits([self._wanted(state, token_budget) for state in decoding]):
            for state in decoding:
                del state.tokens_to_process[1:]

    def _end_drafts(self, key: str) -> None:
        if self.drafter is not None:
            self.drafter.end(key)

    def _fits(self, wanted: list[dict[str, int]]) -> bool:
        return self.cache.count_storable_requests(wanted) == len(wanted)  # type: ignore[no-any-return]  # untyped

    def _make_room(self, token_budget: int) -> None:
        """Free kept contexts, as far as what runs and what could begin now needs their pages."""
        waiting: list[Any] = []
        budget = token_budget
        if not self.block_new_requests:
            room = max(0, self.max_requests_per_batch - len(self.active_requests))
            for state in islice(self._get_waiting_candidates(), room):
                if budget <= 0:
                    break
                kept = self._taken_over(state)
                budget -= len(state.remaining_prefill_tokens) - (len(kept.tokens) if kept else 0)
                waiting.append(state)
        awaited = [_trajectory(state.request_id) for state in waiting]
        begins = bool(waiting) or any(s.status == RequestStatus.PREFILLING for s in self.active_requests.values())
        others = [trajectory for trajectory in self._kept if trajectory not in set(awaited)]
        for trajectory in others:
            if not self._short(waiting, token_budget, begins=begins):
                return
            self._forget(trajectory)
        # The first of those that wait can go on in any case, so that what waits never waits for what is kept for it.
        for trajectory in reversed(awaited):
            if not self._short(waiting[:1], token_budget, begins=False):
                return
            self._forget(trajectory)

    def _short(self, waiting: list[Any], token_budget: int, *, begins: bool) -> bool:
        """Whether there is too little free memory for all that runs and these. begins: whether the base's reserve is to
        be free too, without which it lets only one request begin at a time."""
        self.cache.pool.try_to_free_sectors()
        if begins and self.cache.compute_free_capacity() < self.safety_margin:
            return True
        return not self._fits([self._wanted(s, token_budget) for s in (*self.active_requests.values(), *waiting)])


def _stop_with(state: Any, stop: StopCheck) -> None:
    """Have a request end with the token that completes one of its stop strings."""
    update = state.update_and_check_completion

    def updated(token: int, logprob: float | None) -> bool:
        if state.status != RequestStatus.DECODING:
            return bool(update(token, logprob))
        stop.add([token])
        if not update(token, logprob) and stop.found:
            state.status = RequestStatus.FINISHED
        return bool(state.status == RequestStatus.FINISHED)

    state.update_and_check_completion = updated


def _trajectory(key: str) -> str:
    return key.partition(".")[0]


SCHEDULER_MAPPING[NAME] = KeepingScheduler
