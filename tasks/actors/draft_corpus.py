"""Responses to the same prompts, for engines that draft from them: finished siblings of the group, and what earlier
epochs have sampled.

Siblings are in flight. Of what is stored the latest tokens are remembered, by prompt; a run that is resumed reads them
from its store. Only drafts depend on this, and drafts change nothing that is sampled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from staleflow.stores.in_flight.in_flight_state import InFlightState
from staleflow.stores.trajectories.reader import StoreReader
from staleflow.stores.trajectory import Ended, FinishReason, Trajectory, TrajectoryId
from staleflow.tasks.engines.base import PromptResponses

MOST_TOKENS = 4_000_000
"""Tokens of stored responses that are remembered, of all prompts together: four bytes each."""
OF_PROMPT = 16
"""Stored responses remembered of one prompt, the latest ones: an epoch's group, or a few epochs' of small groups."""
AT_ONCE = 16
"""Responses told of one prompt in one answer; the others in the next."""
READ_ROWS = 512
"""Rows of the store that are read together."""


class NewResponses(NamedTuple):
    """Other responses to the prompts of running trajectories. found: those that the asker has not been told. told: all
    of them that it has been told by now."""

    found: list[PromptResponses]
    told: frozenset[TrajectoryId]


class DraftCorpus:
    """The other responses to prompts, by what is in flight and what was stored. most_tokens: remembered of what was
    stored; 0: nothing is looked up at all. store: of a run that is resumed."""

    def __init__(self, flight: InFlightState, most_tokens: int, store: StoreReader | None = None) -> None:
        self._flight = flight
        self._most_tokens = most_tokens
        self._num_tokens = 0
        self._stored: OrderedDict[bytes, OrderedDict[TrajectoryId, tuple[int, ...]]] = OrderedDict()
        """By prompt, the prompt that was stored least recently first."""
        if store is not None and most_tokens:
            self.add(_latest(store, most_tokens))

    def add(self, rows: Iterable[Ended]) -> None:
        """Remember responses that are being stored."""
        for t in (row.trajectory for row in rows if self._most_tokens and row.trajectory.num_tokens):
            key = t.prompt_tokens.tobytes()
            of_prompt = self._stored.setdefault(key, OrderedDict())
            self._stored.move_to_end(key)
            self._num_tokens += t.num_tokens - len(of_prompt.pop(t.id, ()))
            of_prompt[t.id] = _tokens(t)
            if len(of_prompt) > OF_PROMPT:
                self._num_tokens -= len(of_prompt.popitem(last=False)[1])
        while self._num_tokens > self._most_tokens:
            key, of_prompt = next(iter(self._stored.items()))
            self._num_tokens -= len(of_prompt.popitem(last=False)[1])
            if not of_prompt:
                del self._stored[key]

    def others(self, running: Iterable[TrajectoryId], told: frozenset[TrajectoryId]) -> NewResponses:
        """Responses to the prompts of running trajectories, but for those of `told`."""
        found: list[PromptResponses] = []
        still: set[TrajectoryId] = set()
        prompts: dict[bytes, list[Trajectory]] = {}
        for t in (self._flight.live.get(i) for i in running if self._most_tokens):
            if t is not None:
                prompts.setdefault(t.prompt_tokens.tobytes(), []).append(t)
        for key, alike in prompts.items():
            groups = {t.group: t for t in alike}
            own = {i: tokens for t in groups.values() for i, tokens in self._of_group(t)} | dict(
                self._stored.get(key, {})
            )
            new = [(i, tokens) for i, tokens in own.items() if i not in told][:AT_ONCE]
            still |= (told & own.keys()) | {i for i, _ in new}
            if new:
                found.append(PromptResponses(prompt=tuple(alike[0].prompt_tokens.tolist()), responses=tuple(new)))
        return NewResponses(found, frozenset(still))

    def _of_group(self, t: Trajectory) -> Iterator[tuple[TrajectoryId, tuple[int, ...]]]:
        """The finished siblings of a trajectory in flight."""
        for member in self._flight.members_of(t.group):
            sibling = self._flight.live.get(member)
            if sibling is not None and member != t.id and sibling.finish is not FinishReason.UNFINISHED:
                yield member, _tokens(sibling)


def _latest(store: StoreReader, tokens: int) -> list[Ended]:
    """The last rows of a store that have so many tokens together, or all."""
    latest: list[Ended] = []
    last = store.summary().num_rows
    while last > 0 and tokens > 0:
        rows = store.rows(first := max(0, last - READ_ROWS), last)
        latest, last = rows + latest, first
        tokens -= sum(row.trajectory.num_tokens for row in rows)
    return latest


def _tokens(t: Trajectory) -> tuple[int, ...]:
    return tuple(t.response_tokens.tolist())
