"""Encodes observations: the token ids that follow a turn."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from staleflow.stores.context_branches import longest_shared_prefix
from staleflow.stores.errors import ConfigError, raised_as
from staleflow.stores.in_flight.spool_entries import ObservationDelivered
from staleflow.stores.trajectory import Segment, Trajectory
from staleflow.tasks.actors.server_messages import ObservationItem
from staleflow.tasks.rendering.task_source import Message
from staleflow.tasks.rendering.turn_params import role_of, split_params
from staleflow.tasks.sources.prompts import Prompts


class ObservationTokens(NamedTuple):
    """The token ids of an observation. parent_end: if a context branch starts with them, the position behind the last
    token that it keeps of the earlier context; else None."""

    tokens: list[int]
    parent_end: int | None = None


class RenderError(NamedTuple):
    """The chat template cannot render an agent's messages. Only its episode fails."""

    error: str


class ObservationEncoder:
    """Encodes observations as token ids. Safe in any thread. agent_sources: numbers of the task sources whose messages
    are those of agents. Each episode of these has messages of its own."""

    def __init__(self, prompts: Prompts, agent_sources: frozenset[int] = frozenset()) -> None:
        self._prompts, self._agent_sources = prompts, agent_sources

    def encode(
        self, t: Trajectory, item: ObservationItem, max_new_tokens: int
    ) -> ObservationTokens | RenderError | Literal["full", "differs"]:
        """Encode the observation after a trajectory's last turn.

        Args:
            max_new_tokens: the limit of its response.

        Returns:
            The tokens, or the reason to refuse the observation: "full" if no token could be sampled after it, "differs"
            if a replay of earlier turns returned other observations.

        Raises:
            ConfigError: the chat template cannot render the environment's messages, in any episode.
        """
        if item.replayed and not self._replay_matches(t, item.replayed):
            return "differs"
        try:
            observation = self._encode_messages(t, item.messages)
        except ConfigError as error:
            if t.source not in self._agent_sources:
                raise
            return RenderError(str(error))
        return "full" if item.num_tokens + len(observation.tokens) >= max_new_tokens else observation

    def _encode_messages(self, t: Trajectory, messages: tuple[Message, ...]) -> ObservationTokens:
        """Encode the messages that follow a trajectory's newest turn."""
        after_turn = split_params(messages)[0].after_turn
        if after_turn is None or after_turn == len(t.turns):
            return ObservationTokens(self._bridge(t, messages))
        sequence = np.concatenate([t.prompt_tokens, t.response_tokens])
        if after_turn:
            prefix = replace(t, spans=t.spans[: _num_spans_through_turn(t, after_turn)])
            return ObservationTokens(self._bridge(prefix, messages), len(t.prompt_tokens) + prefix.num_tokens)
        request_tokens = np.asarray(self._prompts.render(messages, t.source), np.int32)
        if not len(request_tokens):
            raise ConfigError("the request's conversation has no tokens; send a message with a text")
        num_shared, parent_end = longest_shared_prefix(t.branches, sequence, request_tokens)
        return ObservationTokens(
            request_tokens[num_shared:].tolist(), None if parent_end == len(sequence) else parent_end
        )

    def _bridge(self, t: Trajectory, messages: tuple[Message, ...]) -> list[int]:
        """Return the token ids between a trajectory's newest turn and the next one."""
        context = t.context.tolist()
        turn_start = len(context) - t.num_current_turn_tokens
        with raised_as(ConfigError, f"turn {len(t.turns)}", ConfigError):
            return self._prompts.bridge_tokens(context[:turn_start], context[turn_start:], messages, t.source)

    def _replay_matches(self, t: Trajectory, replayed: tuple[tuple[Message, ...], ...]) -> bool:
        """Return True if the replayed messages encode to the trajectory's first observations."""
        stops = [i for i, span in enumerate(t.spans) if not isinstance(span, Segment)]
        for stop, messages in zip(stops, replayed, strict=False):
            observation = self._encode_messages(replace(t, spans=t.spans[:stop]), messages)
            if observation.tokens != t.spans[stop].tokens.tolist():
                return False
        return len(replayed) <= len(stops)


def observation_entry(
    item: ObservationItem, observation_tokens: ObservationTokens, attempt: int, at_s: float
) -> ObservationDelivered:
    """Build the spool entry of an observation. attempt: number of the attempt at the trajectory's episode."""
    params = split_params(item.messages)[0]
    return ObservationDelivered(
        trajectory=item.trajectory,
        start=item.num_tokens,
        role=role_of(item.messages),
        tokens=np.asarray(observation_tokens.tokens, np.int32),
        seconds=item.seconds,
        at_s=at_s,
        attempt=attempt,
        max_turn_tokens=params.max_tokens,
        parent_end=observation_tokens.parent_end,
        is_next_turn_auxiliary=params.auxiliary,
        stop=params.stop,
    )


def _num_spans_through_turn(t: Trajectory, turn_number: int) -> int:
    """Return the number of spans up to the end of turn `turn_number`, counted from 1, which an observation follows."""
    sampled = [isinstance(span, Segment) for span in t.spans]
    ends = [stop for stop, (before, after) in enumerate(pairwise(sampled), start=1) if before and not after]
    return ends[turn_number - 1]
