"""Scheduler of the embedded engine: which requests are in the batch, and which of their tokens each step computes.

Requests wait in order of arrival. They become rows of the batch while there is a free slot and memory for their
contexts. A step computes the last token of each decoding row, and, up to `max_batch_tokens`, tokens that are still to
be prefilled.

Two kinds of cached contexts are reused, each under one policy version only: the context of a trajectory's last turn, if
its next turn starts with the same tokens; and, except for its last token, a prompt for which several requests wait.

Memory is counted in pages of tokens and never exceeds `kv_tokens`. Running rows evict cached contexts: first prompts,
then contexts whose turns ended first, last those that requests wait for. If that is not enough, the row that entered
last is preempted: it waits again, before all others, and is prefilled anew.

Requests wait in the order they arrive, and enter as rows while there is a place and memory for their contexts. A step
computes the last token of each row that decodes, and, as far as `max_batch_tokens` goes, what rows have yet to prefill.

Two things are found computed: a turn's context, when its trajectory's next turn enters and begins with just the same
tokens; and a prompt for which several requests wait, but for its last token. Each belongs to one policy version.

Memory is counted in pages of tokens, of which `kv_tokens` make a number that is never exceeded. What is kept gives way
to what runs: first prompts, then the contexts whose turns ended first, last those that requests wait for. Then the row
that entered last is preempted: it waits again, before all others, and is computed anew.
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

Context = tuple[PolicyVersion, tuple[int, ...]]
"""Tokens and the version that they are computed under."""


@dataclass(eq=False, slots=True, kw_only=True)
class RequestRow(BatchRow):
    """A request as a row of the batch. tokens: its context so far; the first `length` are computed. max_tokens: maximum
    length of the context. draft: tokens that the next step verifies."""

    running: RunningRequest
    tokens: list[int]
    max_tokens: int
    eos_ids: frozenset[int]
    temperature: float
    context: Context = (PolicyVersion(0), ())
    """What it waits to have computed."""
    is_shared: bool = False
    """Whether others waited for its context when it entered."""
    is_mixed: bool = False
    """Whether it has been computed under several versions."""
    draft: list[int] = field(default_factory=list)

    @property
    def trajectory(self) -> TrajectoryId:
        return self.running.request.trajectory

    @property
    def num_pending(self) -> int:
        """Number of tokens to compute before the next one is sampled."""
        return len(self.tokens) - self.length


@dataclass(frozen=True, slots=True)
class KeptContext:
    """The cached context of a trajectory between two turns."""

    version: PolicyVersion
    tokens: list[int]
    saved: SavedRow


class RowScheduler:
    """The scheduler of one engine; see the module. drafter: None without speculation."""

    def __init__(self, settings: EngineSettings, cache: RowCache, drafter: Drafter | None) -> None:
        self._settings = settings
        self._cache = cache
        self._drafter = drafter
        self._page = settings.page_tokens
        self._pages = -(-settings.kv_tokens // self._page)
        self._waiting: deque[RequestRow] = deque()
        self._awaited: Counter[Context] = Counter()
        self._rows: list[RequestRow] = []
        self._cached_contexts: OrderedDict[TrajectoryId, KeptContext] = OrderedDict()
        self._prompts: dict[Context, SavedRow] = {}
        self.failed: list[RequestRow] = []
        """Rows that can never have memory enough, since the last look; they are in no list any more."""
        self.clear()

    def clear(self) -> None:
        """Drop all cached contexts and counts. No request may be running or waiting."""
        self._cached_contexts.clear()
        self._prompts.clear()
        self.prefilled_tokens = self.cached_tokens = self.preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def kept_tokens(self) -> int:
        """Number of tokens cached for later turns."""
        return sum(
            len(cached.tokens) for cached in tuple(self._cached_contexts.values())
        )  # while the loop may change it

    def add(self, row: RequestRow) -> None:
        """Add a request, which waits for a slot."""
        self._wait(row, first=False)

    def remove(self, row: RequestRow) -> None:
        """Stop a request without caching its context."""
        if row in self._rows:
            self._rows.remove(row)
            self._cache.remove(row)
        elif row in self._waiting:
            self._waiting.remove(row)
            self._no_longer_awaited(row)

    def end(self, row: RequestRow) -> None:
        """End a request that has finished by itself. Its context is cached if its trajectory may have another turn."""
        if row.running.request.keep_kv and not row.is_mixed:
            self.forget(row.trajectory)
            saved = self._cache.save(row)
            self._cached_contexts[row.trajectory] = KeptContext(row.running.version, row.tokens[: row.length], saved)
        self.remove(row)

    def forget(self, trajectory: TrajectoryId) -> None:
        """Drop the cached context of a trajectory."""
        self._cached_contexts.pop(trajectory, None)

    def change_weights(self, *, keep: bool) -> None:
        """Drop all cached contexts after new weights are loaded. keep: whether decoding rows keep their cache;
        otherwise all rows are prefilled again."""
        self._cached_contexts.clear()
        self._prompts.clear()
        for row in reversed(self._rows.copy()):
            if keep and row.num_pending == 1:
                row.is_mixed = True
            else:
                self._stop(row)
        waiting, self._waiting = self._waiting, deque()
        self._awaited.clear()
        for row in waiting:
            self._wait(row, first=False)

    def passes(self) -> Iterator[list[tuple[RequestRow, int]]]:
        """Plan the next step: for each of its forward passes, the rows and the number of pending tokens to compute of
        each. Rows without pending tokens left sample a token or verify their drafts."""
        self._enter()
        self._draft()
        self._fit()
        budget = self._settings.max_batch_tokens
        decoding = [row for row in self._rows if row.length and row.num_pending == 1][:budget]
        budget -= sum(1 + len(row.draft) for row in decoding)
        prefilling: list[tuple[RequestRow, int]] = []
        for row in self._rows:
            if not (row.length and row.num_pending == 1) and budget > 0:
                # A prompt that others wait for is computed without its last token, copied, and then as others go on.
                count = row.num_pending - (row.is_shared and row.num_pending > 1)
                if self._cache.can_split_input:
                    count = min(count, budget)
                elif row.length:
                    count = 1
                prefilling.append((row, count))
                budget -= count
        decodes = [(row, 1) for row in decoding]
        if not self._cache.can_crop:  # nor can rows differ in how many tokens a pass computes of them
            yield from [decodes] if decodes else []
            yield from [[prefill] for prefill in prefilling]
        elif decodes or prefilling:
            yield decodes + prefilling

    # -- inside --------------------------------------------------------------------------------------------------

    def _wait(self, row: RequestRow, *, first: bool) -> None:
        row.context = (row.running.version, tuple(row.tokens))
        self._awaited[row.context] += 1
        if first:
            self._waiting.appendleft(row)
        else:
            self._waiting.append(row)

    def _no_longer_awaited(self, row: RequestRow) -> None:
        self._awaited[row.context] -= 1
        if not self._awaited[row.context]:
            del self._awaited[row.context]
            self._prompts.pop(row.context, None)

    def _stop(self, row: RequestRow) -> None:
        """Have a row wait again, before all others."""
        self._rows.remove(row)
        self._cache.remove(row)
        row.is_shared = row.is_mixed = False
        row.draft = []
        self._wait(row, first=True)

    def _enter(self) -> None:
        """Have requests that wait enter the batch."""
        for row in self._rows:
            if row.is_shared and row.num_pending == 1:
                row.is_shared = False
                if row.context in self._awaited:
                    self._prompts[row.context] = self._cache.save(row)
        under_way = {row.context for row in self._rows if row.is_shared}
        later: list[RequestRow] = []
        while self._waiting and len(self._rows) < self._settings.max_running:
            row = self._waiting[0]
            if row.context not in under_way:
                if not self._make_room_for(row):
                    break
                self._begin(row)
                if row.is_shared:
                    under_way.add(row.context)
            else:
                later.append(self._waiting.popleft())
        self._waiting.extendleft(reversed(later))

    def _begin(self, row: RequestRow) -> None:
        """Have the first of those that wait enter, with what is found computed of it."""
        self._waiting.popleft()
        cached = self._cached_contexts.pop(row.trajectory, None)
        if cached is not None and _continues(row, cached):
            self._cache.restore(row, cached.saved)
        elif (prompt := self._prompts.get(row.context)) is not None:
            self._cache.restore(row, prompt)
        else:
            row.is_shared = self._awaited[row.context] > 1 and len(row.tokens) > 1
        self.cached_tokens += row.length
        self.prefilled_tokens += row.num_pending
        self._rows.append(row)
        self._no_longer_awaited(row)

    def _make_room_for(self, row: RequestRow) -> bool:
        """Whether there is memory for a row that is to enter, and for a page more of each that runs; what is kept gives
        way. One that there never is memory for fails."""
        needed = self._count(len(row.tokens))
        if needed > self._pages:
            self._waiting.popleft()
            self._no_longer_awaited(row)
            self.failed.append(row)
            return False
        while self._used() + needed + len(self._rows) > self._pages + self._pages_of(row):
            if not self._evict_for_running(row):
                return False
        return True

    def _pages_of(self, row: RequestRow) -> int:
        """Pages kept for a row that waits, which it takes over."""
        cached = self._cached_contexts.get(row.trajectory)
        return 0 if cached is None else self._count(len(cached.tokens))

    def _evict_for_running(self, but: RequestRow | None = None) -> bool:
        """Free something that is kept, if anything is. but: a request whose own is not to be."""
        if self._prompts:
            self._prompts.popitem()
            return True
        awaited = [row.trajectory for row in self._waiting if row.trajectory in self._cached_contexts]
        waits = set(awaited)
        order = [trajectory for trajectory in self._cached_contexts if trajectory not in waits] + awaited[::-1]
        for trajectory in order:
            if but is None or trajectory != but.trajectory:
                del self._cached_contexts[trajectory]
                return True
        return False

    def _draft(self) -> None:
        """Draft for rows that decode, while nothing waits or prefills and as far as there is memory."""
        if self._drafter is None:
            return
        busy = bool(self._waiting) or any(row.num_pending > 1 or not row.length for row in self._rows)
        token_budget = self._settings.max_batch_tokens - len(self._rows)
        for row in self._rows:
            max_draft = min(token_budget, row.max_tokens - len(row.tokens) - 1)
            row.draft = [] if busy else self._drafter.draft(row.running.key, max_draft)
            token_budget -= len(row.draft)
        if self._used() > self._pages:
            for row in self._rows:
                row.draft = []

    def _fit(self) -> None:
        """Have what runs fit into the memory."""
        while self._used() > self._pages:
            if self._evict_for_running():
                continue
            last = self._rows[-1]
            if len(self._rows) == 1:
                self.remove(last)
                self.failed.append(last)
            else:
                self._stop(last)
                self.preemptions += 1

    def _used(self) -> int:
        """Pages of all that runs and is kept, after the next step."""
        rows = sum(self._count(len(row.tokens) + len(row.draft)) for row in self._rows)
        kept = sum(self._count(len(cached.tokens)) for cached in self._cached_contexts.values())
        return rows + kept + sum(self._count(saved.length) for saved in self._prompts.values())

    def _count(self, tokens: int) -> int:
        return -(-tokens // self._page)


def _continues(row: RequestRow, cached: KeptContext) -> bool:
    """Whether a row's tokens begin with a kept context and go on."""
    count = len(cached.tokens)
    same_version = row.running.version == cached.version
    return same_version and len(row.tokens) > count and row.tokens[:count] == cached.tokens
