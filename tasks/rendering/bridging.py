"""Encodes the messages between two turns of a model, as the environment tokens after the first turn.

What was sampled is never rendered or tokenised again: prompt(t+1) = prompt(t) + sampled(t) + bridge, where the bridge
closes the model's turn, holds what its environment says, and opens the next turn. Rendering the whole conversation
anew would not do: templates drop a newline here and a thought there, and a text's tokens are not always those that were
sampled, so the policy would be trained on contexts that it never saw.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from staleflow.stores.errors import ConfigError
from staleflow.tasks.rendering.chat_tokenizer import ChatTokenizer, is_special
from staleflow.tasks.rendering.task_source import Message

QUESTION, ANSWER, THOUGHT = "Zq asks", "Zq says", "<think>\nZq thinks\n</think>\n\n"
"""Contents of messages with which a template is tested."""
FOLLOW_UP = "Zq hears"
"""Content of a message that follows the answer in such a test."""
USER_ROLES = ("environment", "user")
"""Roles that templates know as the user's."""


class Bridge(Protocol):
    """Encodes the messages between two turns."""

    def check(self, roles: Collection[str]) -> None:
        """Raise ConfigError if messages of these roles cannot follow a turn."""
        ...

    def ids(self, before: Sequence[int], turn: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Encode the messages after a turn, up to the start of the next turn. Raises ConfigError.

        Args:
            before: All tokens before the turn.
            turn: The sampled tokens of the turn.
        """
        ...


def make_bridge(tokenizer: ChatTokenizer, model: str, *, chat: bool, observation_template: str) -> Bridge:
    """Create the bridge of a job. model: its name in the job. observation_template: environment.template."""
    if not chat:
        return PlainBridge(tokenizer, observation_template)
    by_template = TemplateBridge(tokenizer)
    renderer = tokenizer.renderer(model)
    return by_template if renderer is None else RendererBridge(renderer, by_template, tokenizer.lock)


class PlainBridge:
    """Messages as plain texts, without a chat template. Nothing is added to the model's turn.
    observation_template: text around each message."""

    def __init__(self, tokenizer: ChatTokenizer, observation_template: str) -> None:
        self._tokenizer, self._observation_template = tokenizer, observation_template

    def check(self, roles: Collection[str]) -> None:
        """Do nothing: any role may follow."""

    def ids(self, before: Sequence[int], turn: Sequence[int], messages: Sequence[Message]) -> list[int]:
        texts = [self._observation_template.replace("{observation}", message.content) for message in messages]
        return list(self._tokenizer.ids("".join(texts)))


class TemplateBridge:
    """Bridge by the chat template: the text that the template puts after a placeholder assistant message."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._role_cache: dict[str, str] = {}
        """The role under which the template accepts messages of each role, for the roles tried so far."""

    def check(self, roles: Collection[str]) -> None:
        for role in roles:
            self._template_role(role)

    def ids(self, before: Sequence[int], turn: Sequence[int], messages: Sequence[Message]) -> list[int]:
        chat = [message._replace(role=self._template_role(message.role)) for message in messages]
        bridge = list(self._tokenizer.ids(self._text_after(ANSWER, chat)))
        if turn and bridge and is_special(self._tokenizer, turn[-1]) and is_special(self._tokenizer, bridge[0]):
            return bridge[1:]  # the model has closed its turn itself, perhaps by another token that ends responses
        return bridge

    def _text_after(self, content: str, messages: Sequence[Message]) -> str:
        """The text that the template puts after an assistant's message `content`, if `messages` follow. Raises
        ConfigError."""
        while any(content in message.content for message in messages):
            content += "q"
        text = self._tokenizer.chat_text([Message("user", QUESTION), Message("assistant", content), *messages])
        _, answer, after = text.partition(content)
        if not answer:
            raise ConfigError(f"{_TEMPLATE_LABEL} leaves out what the assistant says in earlier turns; {_REMEDY}")
        return after

    def _template_role(self, role: str) -> str:
        """The role that the template knows messages of this role as. Raises ConfigError if they cannot follow a turn in
        it without a change to what comes before them."""
        if role not in self._role_cache:
            known_role = "user" if role in USER_ROLES or not self._renders(role) else role
            self._check_appends(known_role)
            self._role_cache[role] = known_role
        return self._role_cache[role]

    def _renders(self, role: str) -> bool:
        """Return True if the template renders messages of this role at all."""
        message = Message(role, FOLLOW_UP)
        try:
            return message.content in self._text_after(ANSWER, [message])
        except ConfigError:
            return False

    def _check_appends(self, role: str) -> None:
        """Raise ConfigError unless the template only ever appends when a message of this role follows a turn: the text
        must begin with the prompt that the turn was sampled after, and with the turn."""
        head = self._tokenizer.chat_text([Message("user", QUESTION)])
        for content in (ANSWER, THOUGHT + ANSWER):
            messages = [Message("user", QUESTION), Message("assistant", content), Message(role, FOLLOW_UP)]
            text = self._tokenizer.chat_text(messages)
            if text.startswith(head + content):
                continue
            if content != ANSWER and "Zq thinks" not in text:
                why = f"drops the <think> parts of earlier turns when a message of role {role} follows"
            else:
                why = f"renders earlier turns in another way when a message of role {role} follows"
            raise ConfigError(f"{_TEMPLATE_LABEL} {why}, so the model would not go on from what it sampled; {_REMEDY}")


_TEMPLATE_LABEL = "task.chat = true: the chat template"
_REMEDY = "put a template that only appends into the model's folder (chat_template.jinja), or set task.chat = false"


class RendererBridge:
    """Messages by the `renderers` package, which knows the model's family. Messages that it declines use the chat
    template. lock: that of the tokenizer which the renderer uses."""

    def __init__(self, renderer: Any, fallback: TemplateBridge, lock: threading.Lock) -> None:
        self._renderer, self._fallback, self._lock = renderer, fallback, lock

    def check(self, roles: Collection[str]) -> None:
        question = [{"role": "user", "content": QUESTION}]
        with self._lock:
            prompt = list(self._renderer.render_ids(question, add_generation_prompt=True))
        any_turn = prompt[:1]
        for role in roles:
            if self._bridge_tokens(prompt, any_turn, [Message(role, FOLLOW_UP)]) is None:
                self._fallback.check([role])

    def ids(self, before: Sequence[int], turn: Sequence[int], messages: Sequence[Message]) -> list[int]:
        bridge_tokens = self._bridge_tokens(before, turn, messages)
        return self._fallback.ids(before, turn, messages) if bridge_tokens is None else bridge_tokens

    def _bridge_tokens(
        self, before: Sequence[int], turn: Sequence[int], messages: Sequence[Message]
    ) -> list[int] | None:
        """The tokens after the turn; None if the package declines, or would change what was sampled."""
        chat = [{"role": "user" if m.role in USER_ROLES else m.role, "content": m.content} for m in messages]
        try:
            with self._lock:
                rendered = self._renderer.bridge_to_next_turn(list(before), list(turn), chat)
        except Exception:  # noqa: BLE001  the package raises many kinds for messages that a family has no place for
            return None
        context_tokens = [*before, *turn]
        if rendered is None or list(rendered.token_ids[: len(context_tokens)]) != context_tokens:
            return None
        return list(rendered.token_ids[len(context_tokens) :])
