"""Scheduler of the embedded engine: which requests are in the batch, and which of their tokens each step computes.

Requests wait in order of arrival. They become rows of the batch while there is a free slot and memory for their
contexts. A step computes the last token of each decoding row, and, up to `max_batch_tokens`, tokens that are still to
be prefilled.

Two kinds of cached contexts are reused, each under one policy version only: the context of a trajectory's last turn, if
its next turn starts with the same tokens; and, except for its last token, a prompt for which several requests wait.

Memory is counted in pages of tokens, of which running rows and cached contexts have at most `kv_tokens`. The tensors of
running rows have room for more (row_storage.py). Running rows evict cached contexts: first prompts,
then contexts whose turns ended first, last those that requests wait for. If that is not enough, the row that entered
last is preempted: it waits again, before all others, and is prefilled again. Pages do not count the states of recurrent
layers: with these, at most `max_running` trajectories have a cached context.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from staleflow.stores.trajectory import PolicyVersion, TrajectoryId
from staleflow.tasks.engines.engine_settings import EngineSettings
from staleflow.tasks.engines.response_drafter import Drafter
from staleflow.tasks.engines.row_cache import RowCache, SavedRow
from staleflow.tasks.engines.row_storage import BatchRow
from staleflow.tasks.engines.running_requests import RunningRequest

VersionedTokens = tuple[PolicyVersion, tuple[int, ...]]
"""Tokens and the version that they are computed under."""


@dataclass(eq=False, slots=True, kw_only=True)
class RequestRow(BatchRow):
    """A request as a row of the batch. tokens: its context so far; the first `length` are computed.
    max_context_tokens: maximum length of the context. draft: tokens that the next step verifies."""

    running_request: RunningRequest
    tokens: list[int]
    max_context_tokens: int
    eos_ids: frozenset[int]
    temperature: float
    queued_context: VersionedTokens = (PolicyVersion(0), ())
    """Its tokens and version when it started to wait."""
    has_awaited_prompt: bool = False
    """Whether other requests waited for the same context when it was admitted."""
    has_mixed_versions: bool = False
    """Whether it has been computed under several versions."""
    draft: list[int] = field(default_factory=list)

    @property
    def trajectory(self) -> TrajectoryId:
        return self.running_request.request.trajectory

    @property
    def num_pending(self) -> int:
        """Number of tokens to compute before the next one is sampled."""
        return len(self.tokens) - self.length


@dataclass(frozen=True, slots=True)
class CachedContext:
    """The cached context of a trajectory between two turns."""

    version: PolicyVersion
    tokens: list[int]
    saved_row: SavedRow


class RowScheduler:
    """The scheduler of one engine; see the module. drafter: None without speculation."""

    def __init__(self, settings: EngineSettings, cache: RowCache, drafter: Drafter | None) -> None:
        self._settings = settings
        self._cache = cache
        self._drafter = drafter
        self._page_tokens = settings.page_tokens
        self._num_pages = -(-settings.kv_tokens // self._page_tokens)
        self._waiting: deque[RequestRow] = deque()
        self._num_waiting_by_context: Counter[VersionedTokens] = Counter()
        self._rows: list[RequestRow] = []
        self._cached_contexts: OrderedDict[TrajectoryId, CachedContext] = OrderedDict()
        self._cached_prompts: dict[VersionedTokens, SavedRow] = {}
        self.failed_rows: list[RequestRow] = []
        """Rows that need more memory than there is. They were removed; the engine reports and clears them."""
        self.clear()

    def clear(self) -> None:
        """Drop all cached contexts and counts. No request may be running or waiting."""
        self._cached_contexts.clear()
        self._cached_prompts.clear()
        self.prefilled_tokens = self.cached_tokens = self.preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def kept_tokens(self) -> int:
        """Number of tokens cached for later turns."""
        return sum(
            len(context.tokens) for context in tuple(self._cached_contexts.values())
        )  # while the loop may change it

    def add(self, row: RequestRow) -> None:
        """Add a request, which waits for a slot."""
        self._enqueue(row, first=False)

    def remove(self, row: RequestRow) -> None:
        """Stop a request without caching its context."""
        if row in self._rows:
            self._rows.remove(row)
            self._cache.remove(row)
        elif row in self._waiting:
            self._waiting.remove(row)
            self._count_dequeued(row)

    def end(self, row: RequestRow) -> None:
        """End a request that has finished by itself. Its context is cached if its trajectory may have another turn."""
        if row.running_request.request.keep_kv and not row.has_mixed_versions:
            self.forget(row.trajectory)
            version, tokens = row.running_request.version, row.tokens[: row.length]
            self._cached_contexts[row.trajectory] = CachedContext(version, tokens, self._cache.save(row))
            if not self._cache.can_crop and len(self._cached_contexts) > self._settings.max_running:
                self._evict_context()
        self.remove(row)

    def forget(self, trajectory: TrajectoryId) -> None:
        """Drop the cached context of a trajectory."""
        self._cached_contexts.pop(trajectory, None)

    def drop_old_caches(self, *, keep_decoding: bool) -> None:
        """Drop all cached contexts after new weights are loaded. keep_decoding: whether decoding rows keep theirs;
        otherwise all rows are prefilled again."""
        self._cached_contexts.clear()
        self._cached_prompts.clear()
        for row in reversed(self._rows.copy()):
            if keep_decoding and row.num_pending == 1:
                row.has_mixed_versions = True
            else:
                self._preempt(row)
        waiting_rows, self._waiting = self._waiting, deque()
        self._num_waiting_by_context.clear()
        for row in waiting_rows:
            self._enqueue(row, first=False)

    def plan_passes(self) -> Iterator[list[tuple[RequestRow, int]]]:
        """Plan the next step: for each of its forward passes, the rows and the number of pending tokens to compute of
        each. Rows without pending tokens left sample a token or verify their drafts."""
        self._admit_waiting()
        self._draft_tokens()
        self._preempt_to_fit()
        budget = self._settings.max_batch_tokens
        decoding_rows = [row for row in self._rows if row.length and row.num_pending == 1][:budget]
        budget -= sum(1 + len(row.draft) for row in decoding_rows)
        prefilling: list[tuple[RequestRow, int]] = []
        for row in self._rows:
            if not (row.length and row.num_pending == 1) and budget > 0:
                # A prompt that others wait for is computed without its last token, so that it can be copied for them.
                count = row.num_pending - (row.has_awaited_prompt and row.num_pending > 1)
                if self._cache.can_split_input:
                    count = min(count, budget)
                elif row.length:
                    count = 1
                prefilling.append((row, count))
                budget -= count
        passes: dict[object, list[tuple[RequestRow, int]]] = {}
        for row, count in (*((row, 1) for row in decoding_rows), *prefilling):
            # All rows of a pass of recurrent layers have the same number of new tokens, and all have a state or none.
            kind = None if self._cache.can_crop else (count, row.length > 0)
            # A version's adapter may be used for cached tokens, too: those of all rows of the pass.
            version = row.running_request.version if self._cache.has_latents else None
            passes.setdefault((version, kind), []).append((row, count))
        yield from passes.values()

    # -- internals -----------------------------------------------------------------------------------------------

    def _enqueue(self, row: RequestRow, *, first: bool) -> None:
        row.queued_context = (row.running_request.version, tuple(row.tokens))
        self._num_waiting_by_context[row.queued_context] += 1
        if first:
            self._waiting.appendleft(row)
        else:
            self._waiting.append(row)

    def _count_dequeued(self, row: RequestRow) -> None:
        self._num_waiting_by_context[row.queued_context] -= 1
        if not self._num_waiting_by_context[row.queued_context]:
            del self._num_waiting_by_context[row.queued_context]
            self._cached_prompts.pop(row.queued_context, None)

    def _preempt(self, row: RequestRow) -> None:
        """Move a row back to the queue, before all others."""
        self._rows.remove(row)
        self._cache.remove(row)
        row.has_awaited_prompt = row.has_mixed_versions = False
        row.draft = []
        self._enqueue(row, first=True)

    def _admit_waiting(self) -> None:
        """Admit waiting requests to the batch while there are slots and memory."""
        for row in self._rows:
            if row.has_awaited_prompt and row.num_pending == 1:
                row.has_awaited_prompt = False
                if row.queued_context in self._num_waiting_by_context:
                    self._cached_prompts[row.queued_context] = self._cache.save(row)
        contexts_in_prefill = {row.queued_context for row in self._rows if row.has_awaited_prompt}
        postponed_rows: list[RequestRow] = []
        while self._waiting and len(self._rows) < self._settings.max_running:
            row = self._waiting[0]
            if row.queued_context not in contexts_in_prefill:
                if not self._reserve_pages(row):
                    break
                self._admit_first(row)
                if row.has_awaited_prompt:
                    contexts_in_prefill.add(row.queued_context)
            else:
                postponed_rows.append(self._waiting.popleft())
        self._waiting.extendleft(reversed(postponed_rows))

    def _admit_first(self, row: RequestRow) -> None:
        """Admit the first waiting request, with its cached context if there is one."""
        self._waiting.popleft()
        cached_context = self._cached_contexts.pop(row.trajectory, None)
        if cached_context is not None and _continues_cached(row, cached_context):
            self._cache.restore(row, cached_context.saved_row)
        elif (prompt := self._cached_prompts.get(row.queued_context)) is not None:
            self._cache.restore(row, prompt)
        else:
            row.has_awaited_prompt = self._num_waiting_by_context[row.queued_context] > 1 and len(row.tokens) > 1
        self.cached_tokens += row.length
        self.prefilled_tokens += row.num_pending
        self._rows.append(row)
        self._count_dequeued(row)

    def _reserve_pages(self, row: RequestRow) -> bool:
        """Return True if there is memory for a waiting row, and for one more page of each running row. Evicts cached
        contexts. A row that needs more than all memory fails."""
        needed_pages = self._num_pages_of(len(row.tokens))
        if needed_pages > self._num_pages:
            self._waiting.popleft()
            self._count_dequeued(row)
            self.failed_rows.append(row)
            return False
        while self._used_pages() + needed_pages + len(self._rows) > self._num_pages + self._cached_pages(row):
            if not self._evict_cached(row):
                return False
        return True

    def _cached_pages(self, row: RequestRow) -> int:
        """Number of pages of a waiting row's cached context, which it reuses."""
        cached_context = self._cached_contexts.get(row.trajectory)
        return 0 if cached_context is None else self._num_pages_of(len(cached_context.tokens))

    def _evict_cached(self, except_row: RequestRow | None = None) -> bool:
        """Evict one cached context. Returns False if there is none. except_row: a row whose context is not evicted."""
        if self._cached_prompts:
            self._cached_prompts.popitem()
            return True
        return self._evict_context(except_row)

    def _evict_context(self, except_row: RequestRow | None = None) -> bool:
        """Evict one cached context of a trajectory, as `_evict_cached`."""
        awaited = dict.fromkeys(row.trajectory for row in self._waiting if row.trajectory in self._cached_contexts)
        order = [*(trajectory for trajectory in self._cached_contexts if trajectory not in awaited), *reversed(awaited)]
        for trajectory in order:
            if except_row is None or trajectory != except_row.trajectory:
                del self._cached_contexts[trajectory]
                return True
        return False

    def _draft_tokens(self) -> None:
        """Draft tokens for decoding rows, if no row waits or prefills and there is memory."""
        if self._drafter is None:
            return
        is_busy = bool(self._waiting) or any(row.num_pending > 1 or not row.length for row in self._rows)
        token_budget = self._settings.max_batch_tokens - len(self._rows)
        for row in self._rows:
            max_draft = min(token_budget, row.max_context_tokens - len(row.tokens) - 1)
            row.draft = [] if is_busy else self._drafter.draft(row.running_request.key, max_draft)
            token_budget -= len(row.draft)
        if self._used_pages() > self._num_pages:
            for row in self._rows:
                row.draft = []

    def _preempt_to_fit(self) -> None:
        """Evict cached contexts, then preempt rows, until the running rows fit into memory."""
        while self._used_pages() > self._num_pages:
            if self._evict_cached():
                continue
            last_row = self._rows[-1]
            if len(self._rows) == 1:
                self.remove(last_row)
                self.failed_rows.append(last_row)
            else:
                self._preempt(last_row)
                self.preemptions += 1

    def _used_pages(self) -> int:
        """Number of pages of running rows and cached contexts after the next step."""
        lengths = [len(row.tokens) + len(row.draft) for row in self._rows]
        lengths += [len(context.tokens) for context in self._cached_contexts.values()]
        lengths += [prompt.length for prompt in self._cached_prompts.values()]
        return sum(map(self._num_pages_of, lengths))

    def _num_pages_of(self, tokens: int) -> int:
        return -(-tokens // self._page_tokens)


def _continues_cached(row: RequestRow, cached_context: CachedContext) -> bool:
    """Whether a row's tokens start with a cached context of its version and continue it."""
    count = len(cached_context.tokens)
    has_same_version = row.running_request.version == cached_context.version
    return has_same_version and len(row.tokens) > count and row.tokens[:count] == cached_context.tokens
