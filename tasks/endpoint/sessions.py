"""Sessions: an agent's conversation with the policy, which is an episode's trajectory seen from outside.

Invariants:
- One request has its turn sampled at a time, and a request that is sent again, after its connection broke, waits for
  the same turn: nothing is sampled twice for it.
- A request goes on from what the model said: its messages begin with those of a request before it and with the answer
  to that, and its token ids with token ids so far. One that goes on from the newest turn extends the trajectory; any
  other one begins a branch (stores/context_branches.py), or is refused and changes nothing, as the job says.
- Auxiliary turns are sampled and returned, not trained on. Later turns do not see them.
- A key belongs to one session, is random, and is void when the session is closed.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import re
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from staleflow.tasks.endpoint.replies import TurnReply, render_tool_calls, reply_of
from staleflow.tasks.endpoint.requests import ChatMessage, ChatRequest, RequestError, to_model_message
from staleflow.tasks.rendering.sampled_turn import SampledTurn
from staleflow.tasks.rendering.task_source import Message

_KEY = re.compile(r"[0-9a-f]{16}\.[\w-]{32}", re.ASCII)
"""What keys look like, those of other endpoints too."""
RETRY_S = 1.0
"""Seconds after which a client is told to try again."""
KEPT_CLOSED = 10_000
"""Closed sessions whose keys are remembered, and why they ended."""


class _PendingRequest:
    """A request whose turn is pending."""

    def __init__(self, request: ChatRequest) -> None:
        self.request = request
        self.reply: asyncio.Future[TurnReply] = asyncio.get_running_loop().create_future()
        self.reply.add_done_callback(_consume_error)


@dataclass(frozen=True, slots=True, kw_only=True)
class _AnsweredTurn:
    """A turn that the agent has received. messages: the conversation up to it; empty for requests of token ids."""

    messages: tuple[ChatMessage, ...]
    tools: str


class AgentSession:
    """An agent's session. branches: whether a request that changes earlier messages starts a context branch; else it is
    refused. Used from one event loop."""

    def __init__(self, id: str, secret: str, *, branches: bool = True) -> None:
        self.id = id
        self._secret = secret
        self._branches = branches
        self._turns: list[_AnsweredTurn] = []
        """All turns that the agent has received, in order."""
        self._main = 0
        """The newest turn that is not auxiliary, from 1."""
        self._ids: tuple[int, ...] = ()
        """All token ids of its context, and its own."""
        self._texts: dict[tuple[Any, ...], str] = {}
        """The model's text of each turn, by the message's canonical form."""
        self._latest: _PendingRequest | None = None
        """The latest request whose turn was sampled or is being sampled."""
        self._queue: deque[_PendingRequest] = deque()
        """Requests that wait for the turns before theirs."""
        self._next_messages: asyncio.Future[tuple[Message, ...]] = asyncio.get_running_loop().create_future()
        self._refused: RequestError | None = None
        """Why no further turn is sampled."""
        self.pending_bytes = 0
        """Bytes of its requests that are read, or wait for their turns."""

    @property
    def key(self) -> str:
        return f"{self.id}.{self._secret}"

    @property
    def waiting(self) -> int:
        """Requests that wait for the turns before theirs."""
        return len(self._queue)

    def holds(self, secret: str) -> bool:
        """Return True if this is the secret of the session's key. Compares in constant time."""
        return hmac.compare_digest(self._secret.encode(), secret.encode())

    # -- the agent's side ----------------------------------------------------------------------------------------

    async def ask(self, request: ChatRequest) -> TurnReply:
        """Return the turn that a request asks for. Raises RequestError."""
        latest = self._latest
        for waiting in (*self._queue, *([latest] if latest is not None else ())):
            if _same(waiting.request, request) and not _failed(waiting):
                return await asyncio.shield(waiting.reply)
        if self._refused is not None:
            raise self._refused
        if not self._branches and latest is not None and not latest.reply.done():
            raise RequestError(
                400,
                "another request of this session waits for its turn; its turns are one conversation, so ask one after "
                "the other",
                "concurrent_request",
            )
        waiting = _PendingRequest(request)
        self._queue.append(waiting)
        self._ask_next()
        try:
            return await asyncio.shield(waiting.reply)
        except asyncio.CancelledError:  # its client is gone, and it waits for whoever sends it again
            if not waiting.reply.done():
                self.pending_bytes += request.num_bytes
                waiting.reply.add_done_callback(lambda _: self._release(request.num_bytes))
            raise

    def _release(self, num_bytes: int) -> None:
        self.pending_bytes -= num_bytes

    def _ask_next(self) -> None:
        """Request the next pending turn, if none is being sampled."""
        while self._queue and (self._latest is None or self._latest.reply.done()):
            waiting = self._queue.popleft()
            try:
                new = self._new(waiting.request)
            except RequestError as refused:
                waiting.reply.set_exception(refused)
                continue
            self._latest = waiting
            self._next_messages.set_result(new)

    def _new(self, request: ChatRequest) -> tuple[Message, ...]:
        """Return the messages that a request adds to the conversation, with the turn's parameters. Raises
        RequestError."""
        if not self._main:
            return self._first(request)
        if request.auxiliary:
            return self._branch(request)
        if reason := self._difference(request):
            if self._branches:
                return self._branch(request)
            raise _changed(reason)
        if self._main < len(self._turns):
            return self._branch(request)
        ids = None if request.token_ids is None else request.token_ids[len(self._ids) :]
        messages = request.messages[len(self._turns[self._main - 1].messages) :]
        return request.turn_params(first=False, ids=ids).prepend_to([to_model_message(message) for message in messages])

    def _first(self, request: ChatRequest) -> tuple[Message, ...]:
        """Return the messages of a session's first request. Raises RequestError."""
        if request.auxiliary:
            raise RequestError(
                400,
                "auxiliary: the first request of a session is its task's prompt, and its turn is trained on; ask "
                "this afterwards",
                "auxiliary_first",
            )
        if any(message.calls for message in request.messages):
            raise _changed("messages have calls of tools, and nothing was sampled here yet")
        directions = request.turn_params(first=True, ids=request.token_ids)
        return directions.prepend_to([to_model_message(message) for message in request.messages])

    def _difference(self, request: ChatRequest) -> str:
        """Return why a request does not continue the newest turn that is not auxiliary; empty if it does."""
        main = self._turns[self._main - 1]
        if request.token_ids is not None:
            if request.token_ids[: len(self._ids)] == self._ids:
                return ""
            pairs = enumerate(zip(self._ids, request.token_ids, strict=False))
            position = next((i for i, (a, b) in pairs if a != b), min(len(self._ids), len(request.token_ids)))
            return f"token_ids differ from the {len(self._ids)} so far from position {position} on"
        if not main.messages:
            return "this session began with token_ids"
        if request.tools != main.tools:
            return "tools are other ones than before"
        for index, (before, now) in enumerate(zip(main.messages, request.messages, strict=False)):
            if before.canonical != now.canonical:
                return f"messages[{index}], of role {now.role}, is not what it was"
        new = request.messages[len(main.messages) :]
        if not new:
            num_known, num_sent = len(main.messages), len(request.messages)
            return f"{num_sent} messages, where {num_known} were said already and one must follow"
        for index, message in enumerate(new, len(main.messages)):
            if message.role == "assistant":
                return f"messages[{index}] is the assistant's, and was not sampled here"
        return ""

    def _branch(self, request: ChatRequest) -> tuple[Message, ...]:
        """Return the messages of a request that branches: those after the turn with the longest agreement, else the
        complete conversation, which is rendered anew: the branch then starts where its token ids differ."""
        if request.token_ids is not None:
            return request.turn_params(first=False, ids=request.token_ids, after_turn=0).prepend_to(())
        canonical = [message.canonical for message in request.messages]
        best = (0, 0)
        for index, turn in enumerate(self._turns, 1):
            new = request.messages[len(turn.messages) :]
            if not turn.messages or not new or turn.tools != request.tools or any(m.role == "assistant" for m in new):
                continue
            if canonical[: len(turn.messages)] == [message.canonical for message in turn.messages]:
                best = max(best, (len(turn.messages), index))
        count, index = best
        if index:
            directions = request.turn_params(first=False, after_turn=index)
            return directions.prepend_to([to_model_message(message) for message in request.messages[count:]])
        directions = request.turn_params(first=True, after_turn=0)
        return directions.prepend_to([self._shown_again(message) for message in request.messages])

    def _shown_again(self, message: ChatMessage) -> Message:
        """Return a message of a conversation that is rendered anew. A turn of the model keeps its exact text."""
        text = self._texts.get(message.canonical) if message.role == "assistant" else None
        return to_model_message(message)._replace(content=render_tool_calls(message) if text is None else text)

    # -- the episode's side --------------------------------------------------------------------------------------

    @property
    def next_messages(self) -> asyncio.Future[tuple[Message, ...]]:
        """The messages of the agent's next request, with the turn's parameters."""
        return self._next_messages

    def answer(self, turn: SampledTurn) -> None:
        """Reply to the pending request with its turn."""
        waiting = self._latest
        assert waiting is not None and self._next_messages.done(), "an answer to nothing"
        request, number = waiting.request, len(self._turns)
        reply = reply_of(f"chatcmpl-{self.id}-{number}", number, int(time.time()), turn, request)
        messages = (*request.messages, reply.message) if request.token_ids is None else ()
        self._turns.append(_AnsweredTurn(messages=messages, tools=request.tools))
        self._texts[reply.message.canonical] = turn.text
        if not request.auxiliary:
            self._main = len(self._turns)
            self._ids = (*turn.prompt_tokens, *turn.tokens)
        self._next_messages = asyncio.get_running_loop().create_future()
        waiting.reply.set_result(reply)
        self._ask_next()

    def refuse(self, refused: RequestError) -> None:
        """Refuse pending and later requests of this session."""
        self._refused = refused
        for waiting in (*self._queue, *([self._latest] if self._latest is not None else ())):
            if not waiting.reply.done():
                waiting.reply.set_exception(refused)
        self._queue.clear()


class Sessions:
    """All sessions of an endpoint, by their keys. branches: see AgentSession. now: seconds on any clock."""

    def __init__(self, *, branches: bool = True, now: Callable[[], float] = time.monotonic) -> None:
        self._branches = branches
        self._now = now
        self._unsure_until = -math.inf
        self._open: dict[str, AgentSession] = {}
        self._closed: OrderedDict[str, RequestError] = OrderedDict()
        """What the clients of closed sessions are told, by their keys."""

    def __len__(self) -> int:
        return len(self._open)

    def open(self) -> AgentSession:
        """Open a session with a random key."""
        session = AgentSession(secrets.token_hex(8), secrets.token_urlsafe(24), branches=self._branches)
        self._open[session.id] = session
        return session

    def close(self, session: AgentSession, why: str = "the episode has ended") -> None:
        """Make a session's key void."""
        if self._open.pop(session.id, None) is not None:
            void = RequestError(410, f"{why}; its key is void", "session_ended")
            session.refuse(void)
            self._closed[session.key] = void
            while len(self._closed) > KEPT_CLOSED:
                self._closed.popitem(last=False)

    def refuse_all(self, refused: RequestError) -> None:
        """Refuse pending and later requests of all sessions."""
        for session in self._open.values():
            session.refuse(refused)

    def expect_predecessor_keys(self, within_s: float) -> None:
        """For `within_s`, answer unknown keys with 503, not 401: they may be those of a lost endpoint, whose episodes
        are being restarted."""
        self._unsure_until = self._now() + within_s

    def find(self, key: str) -> AgentSession:
        """Return the session of a key. Raises RequestError."""
        id, _, secret = key.partition(".")
        session = self._open.get(id)
        if session is not None and session.holds(secret):
            return session
        if (void := self._closed.get(key)) is not None:
            raise void
        if self._now() < self._unsure_until and _KEY.fullmatch(key):
            why = "this endpoint has just taken the place of one that was lost, and does not know this key; try again"
            raise RequestError(503, why, "replaced", RETRY_S)
        raise RequestError(
            401, "no session has this key; use the one that the agent was started with", "invalid_api_key"
        )

    def is_another(self, id: str, session: AgentSession) -> bool:
        """Return True if an id belongs to another open session than `session`."""
        return id.partition(".")[0] in self._open and id.partition(".")[0] != session.id


def _changed(why: str) -> RequestError:
    return RequestError(
        400,
        f"{why}; a session goes on from what was said and sampled, so send the earlier messages unchanged and append, "
        'or set endpoint.changed_past = "branch"',
        "changed_past",
    )


def _same(first: ChatRequest, second: ChatRequest) -> bool:
    """Return True if two requests ask for the same turn."""

    def asks(request: ChatRequest) -> tuple[Any, ...]:
        messages = tuple(message.canonical for message in request.messages)
        return messages, request.token_ids, request.tools, request.max_tokens, request.stop, request.auxiliary

    return asks(first) == asks(second)


def _failed(waiting: _PendingRequest) -> bool:
    return waiting.reply.done() and waiting.reply.exception() is not None


def _consume_error(reply: asyncio.Future[TurnReply]) -> None:
    """Read the error of a reply that nobody awaits, so that asyncio does not log it."""
    if not reply.cancelled():
        reply.exception()
