"""What environments' answers become: the token ids that trajectories are given after their turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from staleflow.stores.context_branches import longest_shared_prefix
from staleflow.stores.errors import ConfigError
from staleflow.stores.in_flight.spool_entries import AnswerGiven
from staleflow.stores.trajectory import FinishReason, Segment, Trajectory
from staleflow.tasks.actors.server_messages import ObservationItem
from staleflow.tasks.rendering.sampled_turn import SampledTurn
from staleflow.tasks.rendering.task_source import Message
from staleflow.tasks.rendering.turn_params import role_of, split
from staleflow.tasks.sources.prompts import Prompts


class ObservationTokens(NamedTuple):
    """What a trajectory is given after its newest turn. after: if a branch begins with it, see Given."""

    tokens: list[int]
    after: int | None = None


class RenderError(NamedTuple):
    """Why the messages of an agent's request are no tokens: they are its own, so this concerns its episode alone."""

    why: str


class ObservationEncoder:
    """Makes answers into token ids, in any thread."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts

    def to_give(
        self, t: Trajectory, item: ObservationItem, max_new_tokens: int
    ) -> ObservationTokens | RenderError | Literal["full", "differs"]:
        """The tokens of an environment's answer to a trajectory's last turn, or why it is not taken. max_new_tokens:
        most that its response may have. Raises ConfigError if the chat template has no place for what an environment
        says, in this episode as in any other."""
        if item.replayed and not self._spoke_alike(t, item.replayed):
            return "differs"
        try:
            given = self._given(t, item.messages)
        except ConfigError as error:
            if split(item.messages)[0].after_turn is None:
                raise
            return RenderError(str(error))
        return "full" if item.tokens + len(given.tokens) >= max_new_tokens else given

    def _given(self, t: Trajectory, messages: tuple[Message, ...]) -> ObservationTokens:
        """What a trajectory is given after its newest turn."""
        after_turn = split(messages)[0].after_turn
        if after_turn is None or after_turn == len(t.turns):
            return ObservationTokens(self._bridge(t, messages))
        whole = np.concatenate([t.prompt_tokens, t.response_tokens])
        if after_turn:
            earlier = replace(t, spans=t.spans[: _turn_end(t, after_turn)])
            return ObservationTokens(self._bridge(earlier, messages), len(t.prompt_tokens) + earlier.num_tokens)
        ids = np.asarray(self._prompts.conversation(messages), np.int32)
        if not len(ids):
            raise ConfigError("the request's conversation has no tokens; send a message with a text")
        common, after = longest_shared_prefix(t.branches, whole, ids)
        return ObservationTokens(ids[common:].tolist(), None if after == len(whole) else after)

    def _bridge(self, t: Trajectory, messages: tuple[Message, ...]) -> list[int]:
        """Token ids between a trajectory's newest turn and the next, which goes on after it."""
        context = t.context.tolist()
        middle = len(context) - t.num_in_turn
        return self._prompts.given(context[:middle], context[middle:], messages, len(t.turns))

    def _spoke_alike(self, t: Trajectory, replayed: tuple[tuple[Message, ...], ...]) -> bool:
        """Whether these are the answers that the first turns of a trajectory were given."""
        places = [i for i, span in enumerate(t.spans) if not isinstance(span, Segment)]
        for place, messages in zip(places, replayed, strict=False):
            given = self._given(replace(t, spans=t.spans[:place]), messages)
            if given.tokens != t.spans[place].tokens.tolist():
                return False
        return len(replayed) <= len(places)


def answer_entry(item: ObservationItem, given: ObservationTokens, attempt: int, at_s: float) -> AnswerGiven:
    """An environment's answer that is taken, as it is kept. attempt: of its trajectory's episode."""
    directions = split(item.messages)[0]
    return AnswerGiven(
        trajectory=item.trajectory,
        first=item.tokens,
        role=role_of(item.messages),
        tokens=np.asarray(given.tokens, np.int32),
        seconds=item.seconds,
        at_s=at_s,
        attempt=attempt,
        turn_tokens=directions.max_tokens,
        after=given.after,
        auxiliary=directions.auxiliary,
        stop=directions.stop,
    )


def newest_turn(t: Trajectory, text: str) -> SampledTurn:
    """The newest turn of a trajectory, as an agent is told of it: what it is told is what will be stored."""
    context = tuple(t.context.tolist())
    middle = len(context) - t.num_in_turn
    return SampledTurn(
        before=context[:middle],
        tokens=context[middle:],
        logprobs=tuple(t.logprobs[len(t.response_tokens) - t.num_in_turn :].tolist()),
        text=text,
        cut=t.finish is FinishReason.LENGTH,
    )


def _turn_end(t: Trajectory, number: int) -> int:
    """How many spans a trajectory has up to the end of a turn, from 1."""
    count = 0
    for place, span in enumerate(t.spans):
        ends = place + 1 == len(t.spans) or not isinstance(t.spans[place + 1], Segment)
        count += isinstance(span, Segment) and ends
        if count == number:
            return place + 1
    raise ValueError(f"a trajectory of {count} turns has no turn {number}")
