"""Parameters of a turn, such as tools and limits, which are passed as a message with its own role. The model does not
see that message.

Prompts and observations are messages. An agent's request has more: definitions of tools, token ids in place of
messages, limits of the next turn. These are encoded as one additional message before the others, so that all code that
passes messages on passes them too, and prompts with different parameters are different.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from staleflow.stores.in_flight.stop_criteria import NO_STOP, StopCriteria
from staleflow.tasks.rendering.task_source import Message, Prompt, Record

PARAMS_ROLE = "directions"
"""Role of the message that has the parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnParams:
    """Parameters of one turn."""

    tools: str = ""
    """Definitions of tools, as JSON, for the chat template."""
    token_ids: tuple[int, ...] | None = None
    """Exact token ids in place of messages; None if there are messages."""
    max_tokens: int = 0
    """Token limit of the turn; 0 for the job's."""
    after_turn: int | None = None
    """None if the request continues the latest turn. Otherwise the number of the turn that it continues, from 1; 0 for
    a new conversation."""
    auxiliary: bool = False
    """Whether the turn is not trained on."""
    stop: StopCriteria = NO_STOP
    """Stop criteria besides the end-of-sequence token."""

    def prepend_to(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return messages with these parameters as the first message; unchanged messages if no parameter is set.

        >>> split_params(TurnParams(tools="[]").prepend_to([Message("user", "hi")]))[0].tools
        '[]'
        """
        if self == NO_PARAMS:
            return tuple(messages)
        fields = {
            name: value
            for name, value in asdict(self).items()
            if name in ALWAYS_WRITTEN or getattr(self, name) != getattr(NO_PARAMS, name)
        }
        return (Message(PARAMS_ROLE, json.dumps(fields, sort_keys=True)), *messages)


ALWAYS_WRITTEN = ("tools", "token_ids", "max_tokens")
"""Parameters that are always encoded; others only if they are set, so that adding a parameter changes no stored
prompt."""
NO_PARAMS = TurnParams()


def split_params(prompt: Prompt) -> tuple[TurnParams, Prompt]:
    """Split a prompt or an observation into its turn parameters and the messages for the model."""
    if isinstance(prompt, str) or not prompt or prompt[0].role != PARAMS_ROLE:
        return NO_PARAMS, prompt
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
    first_message = prompt[0] if isinstance(prompt, (list, tuple)) and prompt else None
    if not isinstance(first_message, Mapping) or first_message.get("role") != PARAMS_ROLE:
        return NO_PARAMS
    return split_params((Message(PARAMS_ROLE, str(first_message.get("content"))),))[0]


def role_of(messages: Sequence[Message]) -> str:
    """Return the role of an observation: that of its last message. "agent" if only parameters of the turn are left, as
    with token ids; empty without messages."""
    if not messages:
        return ""
    return "agent" if messages[-1].role == PARAMS_ROLE else messages[-1].role
