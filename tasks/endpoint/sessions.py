"""Sessions of the endpoint. A session is an agent's conversation with the policy, and its turns are the trajectory of
an episode.

Invariants:
- A session samples one turn at a time. If a client sends a request again because its connection broke, the request gets
  the same turn; it is not sampled twice.
- A request continues the conversation if its messages start with those of an earlier request and the reply to it, or
  its token ids start with all earlier token ids. A request that continues the last main turn extends the trajectory.
  Any other request starts a branch (stores/context_branches.py) or is refused, depending on endpoint.changed_past.
- Auxiliary turns are sampled and returned, but not trained on, and not part of later contexts. The others are main
  turns.
- A key is random, belongs to one session, and becomes invalid when the session is closed.
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

from staleflow.tasks.endpoint.replies import TurnReply, build_reply, render_tool_calls
from staleflow.tasks.endpoint.requests import ChatMessage, ChatRequest, RequestError, to_model_message
from staleflow.tasks.rendering.sampled_turn import SampledTurn
from staleflow.tasks.rendering.task_source import Message

_KEY = re.compile(r"[0-9a-f]{16}\.[\w-]{32}", re.ASCII)
"""Form of the keys of all endpoints."""
RETRY_S = 1.0
"""Seconds after which a client should send its request again."""
MAX_CLOSED_KEYS = 10_000
"""Number of closed sessions whose keys are remembered, so that a request with one is refused with the reason."""


class _PendingRequest:
    """A request that has not received its turn yet."""

    def __init__(self, request: ChatRequest) -> None:
        self.request = request
        self.reply: asyncio.Future[TurnReply] = asyncio.get_running_loop().create_future()
        # Reads the error of a reply that nobody awaits, so that asyncio does not log it.
        self.reply.add_done_callback(lambda reply: reply.cancelled() or reply.exception())


@dataclass(frozen=True, slots=True, kw_only=True)
class _AnsweredTurn:
    """A turn that was sent to the agent. messages: the conversation up to and including it; empty if the request had
    token ids."""

    messages: tuple[ChatMessage, ...]
    tools: str


class AgentSession:
    """One agent's conversation with the policy. Use from one event loop. allows_branches: whether a request that
    changes earlier messages starts a context branch; otherwise it is refused."""

    def __init__(self, id: str, secret: str, *, allows_branches: bool = True) -> None:
        self.id = id
        self._secret = secret
        self._allows_branches = allows_branches
        self._turns: list[_AnsweredTurn] = []
        """All turns that the agent has received, in order."""
        self._last_main_turn = 0
        """Number of the last main turn, counted from 1; 0 before it."""
        self._token_ids: tuple[int, ...] = ()
        """Token ids of the last main turn: its context and its response."""
        self._sampled_texts: dict[tuple[Any, ...], str] = {}
        """The exact text that was sampled for each turn, by the canonical form of its message."""
        self._latest_request: _PendingRequest | None = None
        """The latest request whose turn was sampled or is being sampled."""
        self._queue: deque[_PendingRequest] = deque()
        """Requests that wait until the turns of earlier requests are sampled."""
        self._next_messages: asyncio.Future[tuple[Message, ...]] = asyncio.get_running_loop().create_future()
        self._refusal: RequestError | None = None
        """The error with which further requests are refused; None while turns are sampled."""
        self.has_refused = False
        """Whether a request was refused since `refuse`."""
        self.pending_bytes = 0
        """Size of the session's unanswered requests."""

    @property
    def key(self) -> str:
        return f"{self.id}.{self._secret}"

    @property
    def num_queued(self) -> int:
        """Number of requests that wait for the turns of earlier requests."""
        return len(self._queue)

    def has_secret(self, secret: str) -> bool:
        """Whether a text is the secret of the session's key. Compares in constant time."""
        return hmac.compare_digest(self._secret.encode(), secret.encode())

    # -- called for the agent's requests -------------------------------------------------------------------------

    async def request_turn(self, request: ChatRequest) -> TurnReply:
        """Return the turn for a request, once it is sampled. Raises RequestError."""
        latest_request = self._latest_request
        for pending in (*self._queue, *([latest_request] if latest_request is not None else ())):
            if _is_same_turn(pending.request, request) and not _failed(pending):
                return await asyncio.shield(pending.reply)
        if self._refusal is not None:
            self.has_refused = True
            raise self._refusal.with_traceback(None)  # shared: each raise would keep its frames and request
        if not self._allows_branches and latest_request is not None and not latest_request.reply.done():
            raise RequestError(
                400,
                "another request of this session waits for its turn; the turns are one conversation, so send requests "
                "one after the other",
                "concurrent_request",
            )
        pending = _PendingRequest(request)
        self._queue.append(pending)
        self._start_next()
        try:
            return await asyncio.shield(pending.reply)
        except asyncio.CancelledError:  # the client has left; the turn is kept in case the request is sent again
            if not pending.reply.done():
                self.pending_bytes += request.num_bytes
                pending.reply.add_done_callback(lambda _: self._release(request.num_bytes))
            raise

    def _release(self, num_bytes: int) -> None:
        self.pending_bytes -= num_bytes

    def _start_next(self) -> None:
        """Start the next request of the queue, if no turn is being sampled."""
        while self._queue and (self._latest_request is None or self._latest_request.reply.done()):
            pending = self._queue.popleft()
            try:
                new_messages = self._new_messages(pending.request)
            except RequestError as refusal:
                pending.reply.set_exception(refusal)
                continue
            self._latest_request = pending
            self._next_messages.set_result(new_messages)

    def _new_messages(self, request: ChatRequest) -> tuple[Message, ...]:
        """Return the messages that a request adds to the conversation; the first one has the turn's parameters. Raises
        RequestError."""
        if not self._last_main_turn:
            return self._first_messages(request)
        if request.auxiliary:
            return self._branch_messages(request)
        if reason := self._find_mismatch(request):
            if self._allows_branches:
                return self._branch_messages(request)
            raise _changed_past_error(reason)
        if self._last_main_turn < len(self._turns):
            return self._branch_messages(request)
        ids = None if request.token_ids is None else request.token_ids[len(self._token_ids) :]
        messages = request.messages[len(self._turns[self._last_main_turn - 1].messages) :]
        return request.turn_params(first=False, ids=ids).prepend_to([to_model_message(message) for message in messages])

    def _first_messages(self, request: ChatRequest) -> tuple[Message, ...]:
        """Return the messages of a session's first request. Raises RequestError."""
        if request.auxiliary:
            raise RequestError(
                400,
                "auxiliary: the first turn of a session answers the task's prompt and is trained on; send auxiliary "
                "requests after it",
                "auxiliary_first",
            )
        if any(message.calls for message in request.messages):
            raise _changed_past_error("messages have tool calls, but no turn was sampled in this session yet")
        params = request.turn_params(first=True, ids=request.token_ids)
        return params.prepend_to([to_model_message(message) for message in request.messages])

    def _find_mismatch(self, request: ChatRequest) -> str:
        """Return why a request does not continue the last main turn; empty if it does."""
        main_turn = self._turns[self._last_main_turn - 1]
        if request.token_ids is not None:
            if request.token_ids[: len(self._token_ids)] == self._token_ids:
                return ""
            pairs = enumerate(zip(self._token_ids, request.token_ids, strict=False))
            position = next((i for i, (a, b) in pairs if a != b), min(len(self._token_ids), len(request.token_ids)))
            return f"token_ids differ from the {len(self._token_ids)} so far from position {position} on"
        if not main_turn.messages:
            return "this session began with token_ids"
        if request.tools != main_turn.tools:
            return "tools differ from those of earlier requests"
        for index, (previous_message, current) in enumerate(zip(main_turn.messages, request.messages, strict=False)):
            if previous_message.canonical != current.canonical:
                return f"messages[{index}], of role {current.role}, differs from the earlier request"
        new_messages = request.messages[len(main_turn.messages) :]
        if not new_messages:
            num_known, num_sent = len(main_turn.messages), len(request.messages)
            return (
                f"{num_sent} messages, where {num_known} are in the conversation already and at least one must follow"
            )
        for index, message in enumerate(new_messages, len(main_turn.messages)):
            if message.role == "assistant":
                return f"messages[{index}] is the assistant's, and was not sampled in this session"
        return ""

    def _branch_messages(self, request: ChatRequest) -> tuple[Message, ...]:
        """Return the messages of a request that starts a branch. These are the messages after the longest earlier
        conversation that the request starts with. Without one it is the complete conversation, rendered again; the
        branch then starts where its token ids differ."""
        if request.token_ids is not None:
            return request.turn_params(first=False, ids=request.token_ids, after_turn=0).prepend_to(())
        canonical = [message.canonical for message in request.messages]
        best = (0, 0)
        for index, turn in enumerate(self._turns, 1):
            new_messages = request.messages[len(turn.messages) :]
            has_answer = any(message.role == "assistant" for message in new_messages)
            if not turn.messages or not new_messages or turn.tools != request.tools or has_answer:
                continue
            if canonical[: len(turn.messages)] == [message.canonical for message in turn.messages]:
                best = max(best, (len(turn.messages), index))
        num_shared, index = best
        if index:
            params = request.turn_params(first=False, after_turn=index)
            return params.prepend_to([to_model_message(message) for message in request.messages[num_shared:]])
        params = request.turn_params(first=True, after_turn=0)
        return params.prepend_to([self._render_again(message) for message in request.messages])

    def _render_again(self, message: ChatMessage) -> Message:
        """Return a message for a conversation that is rendered again. A sampled turn keeps its exact text."""
        text = self._sampled_texts.get(message.canonical) if message.role == "assistant" else None
        return to_model_message(message)._replace(content=render_tool_calls(message) if text is None else text)

    # -- called by the episode -----------------------------------------------------------------------------------

    @property
    def next_messages(self) -> asyncio.Future[tuple[Message, ...]]:
        """Return a future of the messages in the agent's next request. The first message has the parameters of the
        turn."""
        return self._next_messages

    def send_turn(self, turn: SampledTurn) -> None:
        """Send the sampled turn as the reply to the pending request."""
        pending = self._latest_request
        assert pending is not None and self._next_messages.done(), "no request is pending"
        request, turn_index = pending.request, len(self._turns)
        reply = build_reply(f"chatcmpl-{self.id}-{turn_index}", turn_index, int(time.time()), turn, request)
        messages = (*request.messages, reply.message) if request.token_ids is None else ()
        self._turns.append(_AnsweredTurn(messages=messages, tools=request.tools))
        self._sampled_texts[reply.message.canonical] = turn.text
        if not request.auxiliary:
            self._last_main_turn = len(self._turns)
            self._token_ids = (*turn.prompt_tokens, *turn.tokens)
        self._next_messages = asyncio.get_running_loop().create_future()
        pending.reply.set_result(reply)
        self._start_next()

    def refuse(self, refusal: RequestError) -> None:
        """Refuse pending and later requests of this session."""
        self._refusal = refusal
        for pending in (*self._queue, *([self._latest_request] if self._latest_request is not None else ())):
            if not pending.reply.done():
                self.has_refused = True
                pending.reply.set_exception(refusal)
        self._queue.clear()


class Sessions:
    """All sessions of an endpoint, by key. allows_branches: see AgentSession. now: returns seconds of any clock."""

    def __init__(self, *, allows_branches: bool = True, now: Callable[[], float] = time.monotonic) -> None:
        self._allows_branches = allows_branches
        self._now = now
        self._predecessor_keys_until = -math.inf
        self._open: dict[str, AgentSession] = {}
        self._closed: OrderedDict[str, RequestError] = OrderedDict()
        """The errors of requests to closed sessions, by key."""

    def __len__(self) -> int:
        return len(self._open)

    def open(self) -> AgentSession:
        """Open a session with a random key."""
        session = AgentSession(secrets.token_hex(8), secrets.token_urlsafe(24), allows_branches=self._allows_branches)
        self._open[session.id] = session
        return session

    def close(self, session: AgentSession, reason: str = "the episode has ended") -> None:
        """Close a session and make its key invalid."""
        if self._open.pop(session.id, None) is not None:
            error = RequestError(410, f"{reason}; its key is no longer valid", "session_ended")
            session.refuse(error)
            self._closed[session.key] = error
            while len(self._closed) > MAX_CLOSED_KEYS:
                self._closed.popitem(last=False)

    def refuse_all(self, refusal: RequestError) -> None:
        """Refuse pending and later requests of all sessions."""
        for session in self._open.values():
            session.refuse(refusal)

    def expect_predecessor_keys(self, duration_s: float) -> None:
        """For `duration_s` seconds, reply to unknown keys with status 503 instead of 401: they may belong to a lost
        endpoint whose episodes are being restarted."""
        self._predecessor_keys_until = self._now() + duration_s

    def find(self, key: str) -> AgentSession:
        """Return the session of a key. Raises RequestError."""
        id, _, secret = key.partition(".")
        session = self._open.get(id)
        if session is not None and session.has_secret(secret):
            return session
        if (error := self._closed.get(key)) is not None:
            raise error.with_traceback(None)  # shared: each raise would keep its frames and request
        if self._now() < self._predecessor_keys_until and _KEY.fullmatch(key):
            reason = "this endpoint has just replaced one that was lost, and does not know this key yet; try again"
            raise RequestError(503, reason, "replaced", RETRY_S)
        raise RequestError(
            401, "no session has this key; use the one that the agent was started with", "invalid_api_key"
        )

    def belongs_to_other(self, id: str, session: AgentSession) -> bool:
        """Whether an id belongs to an open session other than `session`."""
        return id.partition(".")[0] in self._open and id.partition(".")[0] != session.id


def _changed_past_error(reason: str) -> RequestError:
    return RequestError(
        400,
        f"{reason}; a session continues its conversation, so send the earlier messages unchanged and append, "
        'or set endpoint.changed_past = "branch"',
        "changed_past",
    )


def _is_same_turn(first: ChatRequest, second: ChatRequest) -> bool:
    """Return True if two requests are for the same turn, that is if one repeats the other."""

    def key(request: ChatRequest) -> tuple[Any, ...]:
        messages = tuple(message.canonical for message in request.messages)
        return messages, request.token_ids, request.tools, request.max_tokens, request.stop, request.auxiliary

    return key(first) == key(second)


def _failed(pending: _PendingRequest) -> bool:
    return pending.reply.done() and pending.reply.exception() is not None
