"""Sessions: an agent's conversation with the policy, which is an episode's trajectory seen from outside.

Invariants:
- One request waits for a turn at a time, and a request that is sent again, after its connection broke, waits for the
  same turn: nothing is sampled twice for it.
- A request goes on from what the model said: its messages begin with those of the request before it and with the answer
  to that, and its token ids with all token ids so far. Any other one is refused, and changes nothing.
- A key belongs to one session, is random, and is void when the session is closed.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections import OrderedDict
from typing import Any

from tasks.endpoint.replies import TurnReply, reply_of
from tasks.endpoint.requests import ChatMessage, ChatRequest, Refused, shown_message
from tasks.endpoint.turns import SampledTurn
from tasks.task_source import Message

KEPT_CLOSED = 10_000
"""Closed sessions of which is remembered why they ended."""


class _Waiting:
    """A request that waits for its turn."""

    def __init__(self, request: ChatRequest) -> None:
        self.request = request
        self.reply: asyncio.Future[TurnReply] = asyncio.get_running_loop().create_future()
        self.reply.add_done_callback(_heard)


class AgentSession:
    """One session. Used from one event loop."""

    def __init__(self, id: str, secret: str) -> None:
        self.id = id
        self._secret = secret
        self._said: list[ChatMessage] = []
        """The conversation so far: of the latest request that was answered, and the answer."""
        self._ids: tuple[int, ...] | None = None
        """All token ids so far, once a turn was sampled."""
        self._latest: _Waiting | None = None
        """The latest request that was not refused, answered or not."""
        self._asked: asyncio.Future[tuple[Message, ...]] = asyncio.get_running_loop().create_future()
        self._num_turns = 0
        self._refused: Refused | None = None
        """Why no further turn is sampled."""

    @property
    def key(self) -> str:
        return f"{self.id}.{self._secret}"

    def holds(self, secret: str) -> bool:
        """Whether this is the secret of its key. Takes as long for every secret that is not."""
        return hmac.compare_digest(self._secret.encode(), secret.encode())

    # -- the agent's side ----------------------------------------------------------------------------------------

    async def ask(self, request: ChatRequest) -> TurnReply:
        """The turn that a request asks for. Raises Refused."""
        latest = self._latest
        if latest is not None and _same(latest.request, request) and not _failed(latest):
            return await asyncio.shield(latest.reply)
        if self._refused is not None:
            raise self._refused
        if latest is not None and not latest.reply.done():
            raise Refused(
                400,
                "another request of this session waits for its turn; its turns are one conversation, so ask one after "
                "the other",
                "concurrent_request",
            )
        new = self._new(request)
        waiting = self._latest = _Waiting(request)
        self._asked.set_result(new)
        return await asyncio.shield(waiting.reply)

    def _new(self, request: ChatRequest) -> tuple[Message, ...]:
        """What a request says beyond what was said before. Raises Refused."""
        first = self._ids is None
        if request.token_ids is not None:
            so_far = self._ids or ()
            if request.token_ids[: len(so_far)] != so_far:
                at = next(
                    (i for i, (a, b) in enumerate(zip(so_far, request.token_ids, strict=False)) if a != b),
                    min(len(so_far), len(request.token_ids)),
                )
                raise _changed(f"token_ids differ from the {len(so_far)} so far from position {at} on")
            return request.directions(first=first, ids=request.token_ids[len(so_far) :]).before(())
        said, latest = self._said, self._latest
        if not first and not said:
            raise _changed("this session began with token_ids")
        if latest is not None and not first and request.tools != latest.request.tools:
            raise _changed("tools are other ones than before")
        for number, (before, now) in enumerate(zip(said, request.messages, strict=False)):
            if before.canonical != now.canonical:
                raise _changed(f"messages[{number}], of role {now.role}, is not what it was")
        new = request.messages[len(said) :]
        if not new:
            raise _changed(f"{len(request.messages)} messages, where {len(said)} were said already and one must follow")
        for number, message in enumerate(new, len(said)):
            if message.role == "assistant" and (not first or message.calls):
                raise _changed(f"messages[{number}] is the assistant's, and was not sampled here")
        return request.directions(first=first).before([shown_message(message) for message in new])

    # -- the episode's side --------------------------------------------------------------------------------------

    @property
    def asked(self) -> asyncio.Future[tuple[Message, ...]]:
        """What the agent says next, with directions."""
        return self._asked

    def answer(self, turn: SampledTurn) -> None:
        """Tell the agent the turn that it waits for."""
        waiting = self._latest
        assert waiting is not None and self._asked.done(), "an answer to nothing"
        reply = reply_of(
            f"chatcmpl-{self.id}-{self._num_turns}", self._num_turns, int(time.time()), turn, waiting.request
        )
        self._num_turns += 1
        self._ids = (*turn.before, *turn.tokens)
        if waiting.request.token_ids is None:
            self._said = [*waiting.request.messages, reply.message]
        self._asked = asyncio.get_running_loop().create_future()
        waiting.reply.set_result(reply)

    def refuse(self, refused: Refused) -> None:
        """Have no further turn: whoever waits and whoever asks from now on is told why."""
        self._refused = refused
        waiting = self._latest
        if waiting is not None and not waiting.reply.done():
            waiting.reply.set_exception(refused)


class Sessions:
    """All sessions of an endpoint, by their keys."""

    def __init__(self) -> None:
        self._open: dict[str, AgentSession] = {}
        self._closed: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def open(self) -> AgentSession:
        """A new session with a random key."""
        session = AgentSession(secrets.token_hex(8), secrets.token_urlsafe(24))
        self._open[session.id] = session
        return session

    def close(self, session: AgentSession, why: str = "the episode has ended") -> None:
        """Make a session's key void."""
        if self._open.pop(session.id, None) is not None:
            session.refuse(Refused(410, f"{why}; its key is void", "session_ended"))
            self._closed[session.id] = why
            while len(self._closed) > KEPT_CLOSED:
                self._closed.popitem(last=False)

    def refuse_all(self, refused: Refused) -> None:
        """Have no further turn in any session: whoever waits and whoever asks from now on is told why."""
        for session in self._open.values():
            session.refuse(refused)

    def find(self, key: str) -> AgentSession:
        """The session of a key. Raises Refused."""
        id, _, secret = key.partition(".")
        session = self._open.get(id)
        if session is not None and session.holds(secret):
            return session
        if id in self._closed:
            raise Refused(401, f"{self._closed[id]}; its key is void", "session_ended")
        raise Refused(401, "no session has this key; use the one that the agent was started with", "invalid_api_key")

    def is_another(self, id: str, found: AgentSession) -> bool:
        """Whether an id is that of another open session than the one that was found."""
        return id.partition(".")[0] in self._open and id.partition(".")[0] != found.id


def _changed(why: str) -> Refused:
    return Refused(
        400,
        f"{why}; a session goes on from what was said and sampled, so send the earlier messages unchanged and append",
        "changed_past",
    )


def _same(first: ChatRequest, second: ChatRequest) -> bool:
    """Whether a request asks for the very turn that another one asks for."""

    def asks(request: ChatRequest) -> tuple[Any, ...]:
        messages = tuple(message.canonical for message in request.messages)
        return messages, request.token_ids, request.tools, request.max_tokens

    return asks(first) == asks(second)


def _failed(waiting: _Waiting) -> bool:
    return waiting.reply.done() and waiting.reply.exception() is not None


def _heard(reply: asyncio.Future[TurnReply]) -> None:
    """Read the error of a reply that nobody may wait for any longer, so that nothing is logged."""
    if not reply.cancelled():
        reply.exception()
