"""Parameters of a turn, such as tools and limits, in a message of a role of its own that no model sees.

A prompt, and what an environment says, are messages. An agent's request has more than those: definitions of tools, ids
in place of messages, limits of the turn that follows. They travel as one more message, the first one, so that whatever
carries messages carries them too, and two prompts are equal only if their directions are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from staleflow.stores.in_flight.stop_criteria import NO_STOP, StopCriteria
from staleflow.tasks.rendering.task_source import Message, Prompt, Record

ROLE = "directions"
"""Role of the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnParams:
    """Parameters of a turn. tools: definitions, as JSON, for the chat template. token_ids: exact ids in place of
    messages; None if there are messages. max_tokens: of the turn; 0 for the job's. stop: what else ends it. after_turn:
    of a request that changes the past: the turn, from 1, that it goes on after; 0: what it says is the whole
    conversation. auxiliary: the turn is not to be trained on."""

    tools: str = ""
    token_ids: tuple[int, ...] | None = None
    max_tokens: int = 0
    after_turn: int | None = None
    auxiliary: bool = False
    stop: StopCriteria = NO_STOP

    def prepend_to(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return messages with these parameters as the first one, if there are any.

        >>> split_params(TurnParams(tools="[]").prepend_to([Message("user", "hi")]))[0].tools
        '[]'
        """
        if self == NONE:
            return tuple(messages)
        fields = {
            name: value
            for name, value in asdict(self).items()
            if name in ALWAYS or getattr(self, name) != getattr(NONE, name)
        }
        return (Message(ROLE, json.dumps(fields, sort_keys=True)), *messages)


ALWAYS = ("tools", "token_ids", "max_tokens")
"""What is said of every turn that has directions: a group's prompt stays the same text from version to version."""
NONE = TurnParams()


def split_params(prompt: Prompt) -> tuple[TurnParams, Prompt]:
    """Split a prompt or an observation into its turn parameters and the messages for the model."""
    if isinstance(prompt, str) or not prompt or prompt[0].role != ROLE:
        return NONE, prompt
    fields: dict[str, Any] = json.loads(prompt[0].content)
    ids, stop = fields.pop("token_ids"), fields.pop("stop", {})
    return TurnParams(
        token_ids=None if ids is None else tuple(ids),
        stop=StopCriteria(**{name: tuple(values) for name, values in stop.items()}),
        **fields,
    ), prompt[1:]


def params_of(record: Record) -> TurnParams:
    """Return the turn parameters of a record's prompt."""
    prompt = record.get("prompt")
    first = prompt[0] if isinstance(prompt, (list, tuple)) and prompt else None
    if not isinstance(first, Mapping) or first.get("role") != ROLE:
        return NONE
    return split_params((Message(ROLE, str(first.get("content"))),))[0]


def role_of(messages: Sequence[Message]) -> str:
    """Return the role of an observation: that of its last message; "agent" for token ids; empty without messages."""
    if not messages:
        return ""
    return "agent" if messages[-1].role == ROLE else messages[-1].role
