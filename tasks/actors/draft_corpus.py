"""Responses to the same prompts, from which engines draft: by finished siblings of the group, and from earlier epochs.

Siblings are in flight. Of what is stored the latest tokens are remembered, by prompt; a run that is resumed reads them
from its store. Only drafts depend on this, and drafts change nothing that is sampled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from staleflow.stores.in_flight.in_flight_state import InFlightState
from staleflow.stores.trajectories.reader import StoreReader
from staleflow.stores.trajectory import EndedTrajectory, FinishReason, Trajectory, TrajectoryId
from staleflow.tasks.engines.base import PromptResponses

MAX_TOKENS = 4_000_000
"""The most tokens of stored responses that are remembered, of all prompts together: four bytes each."""
OF_PROMPT = 16
"""The most stored responses that are remembered of one prompt, the latest ones: one epoch's group, or those of a few
epochs if groups are small."""
AT_ONCE = 16
"""The most responses to one prompt that are sent in one reply; the others come in the next."""
READ_ROWS = 512
"""The number of rows of the store that are read at once."""


class NewResponses(NamedTuple):
    """Responses that an instance does not have yet, to the prompts of trajectories it is running."""

    responses: list[PromptResponses]
    """Those that the instance does not have yet."""
    sent: frozenset[TrajectoryId]
    """All that it has with these."""


class DraftCorpus:
    """Responses by prompt, in flight and stored, for drafting.

    Args:
        max_tokens: Maximum number of tokens of stored responses in memory; 0: nothing is indexed.
        store: The store of a resumed run, whose responses are added.
    """

    def __init__(self, flight: InFlightState, max_tokens: int, store: StoreReader | None = None) -> None:
        self._flight = flight
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._stored: OrderedDict[bytes, OrderedDict[TrajectoryId, tuple[int, ...]]] = OrderedDict()
        """By prompt, the prompt that was stored least recently first."""
        if store is not None and max_tokens:
            self.add(_latest(store, max_tokens))

    def add(self, rows: Iterable[EndedTrajectory]) -> None:
        """Add responses that are being stored."""
        for t in (row.trajectory for row in rows if self._max_tokens and row.trajectory.num_tokens):
            key = t.prompt_tokens.tobytes()
            of_prompt = self._stored.setdefault(key, OrderedDict())
            self._stored.move_to_end(key)
            self._num_tokens += t.num_tokens - len(of_prompt.pop(t.id, ()))
            of_prompt[t.id] = _tokens(t)
            if len(of_prompt) > OF_PROMPT:
                self._num_tokens -= len(of_prompt.popitem(last=False)[1])
        while self._num_tokens > self._max_tokens:
            key, of_prompt = next(iter(self._stored.items()))
            self._num_tokens -= len(of_prompt.popitem(last=False)[1])
            if not of_prompt:
                del self._stored[key]

    def others(self, running: Iterable[TrajectoryId], sent: frozenset[TrajectoryId]) -> NewResponses:
        """Return responses to the prompts of running trajectories, without those in `sent`."""
        responses: list[PromptResponses] = []
        delivered: set[TrajectoryId] = set()
        prompts: dict[bytes, list[Trajectory]] = {}
        for t in (self._flight.live.get(i) for i in running if self._max_tokens):
            if t is not None:
                prompts.setdefault(t.prompt_tokens.tobytes(), []).append(t)
        for key, trajectories in prompts.items():
            groups = {t.group: t for t in trajectories}
            by_id = {i: tokens for t in groups.values() for i, tokens in self._of_group(t)} | dict(
                self._stored.get(key, {})
            )
            new = [(i, tokens) for i, tokens in by_id.items() if i not in sent][:AT_ONCE]
            delivered |= (sent & by_id.keys()) | {i for i, _ in new}
            if new:
                responses.append(
                    PromptResponses(prompt=tuple(trajectories[0].prompt_tokens.tolist()), responses=tuple(new))
                )
        return NewResponses(responses, frozenset(delivered))

    def _of_group(self, t: Trajectory) -> Iterator[tuple[TrajectoryId, tuple[int, ...]]]:
        """Yield the finished siblings of a trajectory in flight, with their tokens."""
        for member in self._flight.members_of(t.group):
            sibling = self._flight.live.get(member)
            if sibling is not None and member != t.id and sibling.finish is not FinishReason.UNFINISHED:
                yield member, _tokens(sibling)


def _latest(store: StoreReader, tokens: int) -> list[EndedTrajectory]:
    """Return the last rows of a store that have at least `tokens` tokens together, or all rows."""
    latest: list[EndedTrajectory] = []
    stop = store.summary().num_rows
    while stop > 0 and tokens > 0:
        rows = store.rows(start := max(0, stop - READ_ROWS), stop)
        latest, stop = rows + latest, start
        tokens -= sum(row.trajectory.num_tokens for row in rows)
    return latest


def _tokens(t: Trajectory) -> tuple[int, ...]:
    return tuple(t.response_tokens.tolist())
