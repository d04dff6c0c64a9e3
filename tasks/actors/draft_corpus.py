"""Responses from which engines draft tokens: of finished trajectories of the same group, and from earlier epochs.

Trajectories of the group are in flight. Stored responses are kept in memory by prompt, the latest ones; a resumed run
reads them from its store. Only drafts depend on this, and drafts never change the sampled tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from staleflow.stores.in_flight.in_flight_state import InFlightState
from staleflow.stores.trajectories.reader import StoreReader
from staleflow.stores.trajectory import EndedTrajectory, FinishReason, Trajectory, TrajectoryId
from staleflow.tasks.engines.base import PromptResponses

MAX_STORED_TOKENS = 4_000_000
"""Maximum number of tokens of stored responses in memory, over all prompts, at four bytes each."""
MAX_RESPONSES_PER_PROMPT = 16
"""Maximum number of stored responses in memory for one prompt. The latest are kept: one epoch's group, or several
epochs' if groups are small."""
MAX_RESPONSES_PER_REPLY = 16
"""Maximum number of responses to one prompt in a reply; the next reply has more."""
ROWS_PER_READ = 512
"""Number of rows in one read of the store."""


ResponseKey = tuple[TrajectoryId, int]
"""A response, with its number of tokens: a trajectory between two turns has a longer one later."""


class NewResponses(NamedTuple):
    """Responses to send to an instance, for the prompts of the trajectories that it is running."""

    responses: list[PromptResponses]
    """Responses that the instance does not have yet."""
    known_keys: frozenset[ResponseKey]
    """Keys of all responses that it has once it has received these."""


class DraftCorpus:
    """Responses by prompt, in flight and stored, for drafting.

    Args:
        max_tokens: Maximum number of tokens of stored responses in memory; 0: nothing is indexed.
        store: The store of a resumed run, whose responses are added.
    """

    def __init__(self, in_flight: InFlightState, max_tokens: int, store: StoreReader | None = None) -> None:
        self._in_flight = in_flight
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._stored_responses: OrderedDict[bytes, OrderedDict[TrajectoryId, npt.NDArray[np.int32]]] = OrderedDict()
        """By prompt, the prompt that was stored least recently first."""
        if store is not None and max_tokens:
            self.add(_latest_rows(store, max_tokens))

    def add(self, rows: Iterable[EndedTrajectory]) -> None:
        """Add responses that are being stored."""
        for t in (row.trajectory for row in rows if self._max_tokens and row.trajectory.num_tokens):
            prompt = t.prompt_tokens.tobytes()
            responses = self._stored_responses.setdefault(prompt, OrderedDict())
            self._stored_responses.move_to_end(prompt)
            self._num_tokens += t.num_tokens - len(responses.pop(t.id, ()))
            responses[t.id] = t.response_tokens
            if len(responses) > MAX_RESPONSES_PER_PROMPT:
                self._num_tokens -= len(responses.popitem(last=False)[1])
        while self._num_tokens > self._max_tokens:
            prompt, responses = next(iter(self._stored_responses.items()))
            self._num_tokens -= len(responses.popitem(last=False)[1])
            if not responses:
                del self._stored_responses[prompt]

    def new_responses(self, running: Iterable[TrajectoryId], known_keys: frozenset[ResponseKey]) -> NewResponses:
        """Return responses to the prompts of running trajectories, without those whose keys are in `known_keys`."""
        responses: list[PromptResponses] = []
        new_known_keys: set[ResponseKey] = set()
        prompts: dict[bytes, list[Trajectory]] = {}
        for t in (self._in_flight.live.get(i) for i in running if self._max_tokens):
            if t is not None:
                prompts.setdefault(t.prompt_tokens.tobytes(), []).append(t)
        for prompt, trajectories in prompts.items():
            groups = {t.group: t for t in trajectories}
            tokens_by_id = {i: tokens for t in groups.values() for i, tokens in self._finished_siblings(t)} | dict(
                self._stored_responses.get(prompt, {})
            )
            keys = [(i, len(tokens)) for i, tokens in tokens_by_id.items()]
            unsent_keys = [key for key in keys if key not in known_keys][:MAX_RESPONSES_PER_REPLY]
            new_known_keys |= (known_keys & {*keys}) | {*unsent_keys}
            if unsent_keys:
                unsent = tuple((i, tuple(tokens_by_id[i].tolist())) for i, _ in unsent_keys)
                responses.append(
                    PromptResponses(prompt=tuple(trajectories[0].prompt_tokens.tolist()), responses=unsent)
                )
        return NewResponses(responses, frozenset(new_known_keys))

    def _finished_siblings(self, t: Trajectory) -> Iterator[tuple[TrajectoryId, npt.NDArray[np.int32]]]:
        """Yield the finished siblings of a trajectory in flight, with their tokens."""
        for member in self._in_flight.members_of(t.group):
            sibling = self._in_flight.live.get(member)
            if sibling is not None and member != t.id and sibling.finish is not FinishReason.UNFINISHED:
                yield member, sibling.response_tokens


def _latest_rows(store: StoreReader, min_tokens: int) -> list[EndedTrajectory]:
    """Return the last rows of a store that have at least `min_tokens` tokens together, or all rows."""
    rows_so_far: list[EndedTrajectory] = []
    stop = store.summary().num_rows
    while stop > 0 and min_tokens > 0:
        rows = store.trajectories_in_range(start := max(0, stop - ROWS_PER_READ), stop)
        rows_so_far, stop = rows + rows_so_far, start
        min_tokens -= sum(row.trajectory.num_tokens for row in rows)
    return rows_so_far
