"""What environments' answers become: the token ids that trajectories are given after their turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from stores.trajectory import FinishReason, Segment, Trajectory
from tasks.actors.server_answers import SaidItem
from tasks.endpoint.turns import SampledTurn
from tasks.prompts import Prompts
from tasks.task_source import Message


class GivenAnswers:
    """Makes answers into token ids, in any thread."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts

    def to_give(self, t: Trajectory, item: SaidItem, max_new_tokens: int) -> list[int] | Literal["full", "differs"]:
        """The tokens of an environment's answer to a trajectory's last turn, or why it is not taken. max_new_tokens:
        most that its response may have."""
        if item.replayed and not self._spoke_alike(t, item.replayed):
            return "differs"
        given = self._given(t, item.messages)
        return "full" if item.tokens + len(given) >= max_new_tokens else given

    def _given(self, t: Trajectory, messages: tuple[Message, ...]) -> list[int]:
        """Token ids that a trajectory is given after its newest turn."""
        whole = [*t.prompt_tokens.tolist(), *t.response_tokens.tolist()]
        middle = len(whole) - t.num_in_turn
        return self._prompts.given(whole[:middle], whole[middle:], messages, len(t.turns))

    def _spoke_alike(self, t: Trajectory, replayed: tuple[tuple[Message, ...], ...]) -> bool:
        """Whether these are the answers that the first turns of a trajectory were given."""
        places = [i for i, span in enumerate(t.spans) if not isinstance(span, Segment)]
        for place, messages in zip(places, replayed, strict=False):
            if self._given(replace(t, spans=t.spans[:place]), messages) != t.spans[place].tokens.tolist():
                return False
        return len(replayed) <= len(places)


def newest_turn(t: Trajectory, text: str) -> SampledTurn:
    """The newest turn of a trajectory, as an agent is told of it: what it is told is what will be stored."""
    whole = (*t.prompt_tokens.tolist(), *t.response_tokens.tolist())
    middle = len(whole) - t.num_in_turn
    return SampledTurn(
        before=whole[:middle],
        tokens=whole[middle:],
        logprobs=tuple(t.logprobs[len(t.response_tokens) - t.num_in_turn :].tolist()),
        text=text,
        cut=t.finish is FinishReason.LENGTH,
    )
