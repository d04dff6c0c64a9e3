"""Replies to agents as JSON and as event streams, in the form that clients of chat completions and of token ids
validate. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from staleflow.stores.in_flight.stop_criteria import find_stop
from staleflow.tasks.endpoint.requests import ChatMessage, ChatRequest, FunctionCall, RequestError
from staleflow.tasks.engines.base import TokenScores
from staleflow.tasks.rendering.sampled_turn import SampledTurn

CHUNK_CHARS = 24
"""Characters in each event of a streamed reply. The complete turn has been sampled before streaming begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnReply:
    """A turn as an agent receives it. index: index of the turn in its episode, from 0. created_s: Unix time. scores: of
    the prompt, if the request asked for them instead of a turn; prompt_text: its text."""

    id: str
    index: int
    created_s: int
    turn: SampledTurn
    message: ChatMessage
    finish_reason: str
    scores: TokenScores | None = None
    prompt_text: str = ""


def build_reply(id: str, index: int, created_s: int, turn: SampledTurn, request: ChatRequest) -> TurnReply:
    """Build the reply to a request: the turn's text up to a stop string, and its tool calls if the request defines
    tools."""
    content, calls = turn.text, tuple[FunctionCall, ...]()
    if (stop_range := find_stop(content, request.stop.strings)) is not None:
        content = content[: stop_range[1] if request.include_stop else stop_range[0]]
    if request.with_tool_calls:
        content, calls = parse_tool_calls(content)
    message = ChatMessage(role="assistant", content=content, calls=calls)
    finish_reason = "length" if turn.truncated else "tool_calls" if calls else "stop"
    return TurnReply(id=id, index=index, created_s=created_s, turn=turn, message=message, finish_reason=finish_reason)


_TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def parse_tool_calls(text: str) -> tuple[str, tuple[FunctionCall, ...]]:
    """Split a text into content and tool calls of the form <tool_call>{"name": ..., "arguments": {...}}</tool_call>. If
    any call cannot be parsed, the whole text is returned as content.

    >>> parse_tool_calls('Now. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ('Now.', (FunctionCall(name='add', arguments='{"a": 1}'),))
    """
    calls = []
    for call_text in _TOOL_CALL.findall(text):
        try:
            call = json.loads(call_text)
        except (ValueError, RecursionError):
            return text, ()
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return text, ()
        arguments = call.get("arguments", call.get("parameters", {}))
        calls.append(
            FunctionCall(
                name=call["name"],
                arguments=arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
            )
        )
    return (_TOOL_CALL.sub("", text).strip() if calls else text), tuple(calls)


def render_tool_calls(message: ChatMessage) -> str:
    """Render a message with its tool calls as text, the inverse of `parse_tool_calls`."""
    calls = (
        f'<tool_call>{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}</tool_call>'
        for call in message.calls
    )
    return "\n".join(filter(None, (message.content, *calls)))


def chat_completion_body(request: ChatRequest, reply: TurnReply) -> dict[str, Any]:
    """Build the body of a reply to a request to /v1/chat/completions."""
    turn = reply.turn
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": _content(reply), **_calls(reply)},
        "finish_reason": reply.finish_reason,
        "logprobs": {"content": _logprobs(turn)} if request.with_logprobs or request.with_token_ids else None,
    }
    reply_body = _common_fields(request, reply, "chat.completion") | {"choices": [choice], "usage": _usage(turn)}
    if request.with_token_ids:
        choice["token_ids"] = list(turn.tokens)
        reply_body["prompt_token_ids"] = list(turn.prompt_tokens)
    return reply_body


def completions_body(requests: Sequence[ChatRequest], replies: Sequence[TurnReply]) -> dict[str, Any]:
    """Build the body of a reply to a request to /v1/completions. Of each prompt, the first token has no logprob."""
    choices = [
        _completion(index, request, reply) for index, (request, reply) in enumerate(zip(requests, replies, strict=True))
    ]
    usages = [_usage(reply.turn) for reply in replies]
    usage = {name: sum(item[name] for item in usages) for name in usages[0]}
    return _common_fields(requests[0], replies[0], "text_completion") | {"choices": choices, "usage": usage}


def _completion(index: int, request: ChatRequest, reply: TurnReply) -> dict[str, Any]:
    turn, scores = reply.turn, reply.scores
    ids, logprobs, top_logprobs = [*turn.tokens], [*turn.logprobs], None
    if scores is not None:
        ids, logprobs = [*turn.prompt_tokens[1:], *ids], [*scores.logprobs, *logprobs]
        likeliest = zip(scores.top_tokens, scores.top_logprobs, strict=True)
        top_logprobs = [
            {f"token_id:{id}": logprob, f"token_id:{top}": top_logprob}
            for id, logprob, (top, top_logprob) in zip(ids, logprobs, likeliest, strict=False)
        ]
    first = [] if scores is None else [None]
    choice: dict[str, Any] = {
        "index": index,
        "text": reply.prompt_text + reply.message.content,
        "finish_reason": reply.finish_reason,
        "logprobs": {
            "tokens": [f"token_id:{id}" for id in (*turn.prompt_tokens[: len(first)], *ids)],
            "token_logprobs": [*first, *logprobs],
            "top_logprobs": top_logprobs and [*first, *top_logprobs],
        }
        if request.with_logprobs
        else None,
    }
    if request.with_token_ids:
        choice |= {"token_ids": list(turn.tokens), "prompt_token_ids": list(turn.prompt_tokens)}
    return choice


def generate_body(request: ChatRequest, reply: TurnReply) -> dict[str, Any]:
    """Build the body of a reply to a request to /inference/v1/generate."""
    turn = reply.turn
    choice = {
        "index": 0,
        "token_ids": list(turn.tokens),
        "logprobs": {"content": _logprobs(turn)},
        "finish_reason": reply.finish_reason,
    }
    common_fields = {"request_id": reply.id} | _common_fields(request, reply, "generate")
    return common_fields | {"prompt_token_ids": list(turn.prompt_tokens), "choices": [choice], "usage": _usage(turn)}


def stream_events(request: ChatRequest, reply: TurnReply) -> Iterator[str]:
    """Yield a reply to a request to /v1/chat/completions as server-sent events."""
    common_fields = _common_fields(request, reply, "chat.completion.chunk")
    turn = reply.turn

    def event(delta: dict[str, Any], finish_reason: str | None = None, **fields: Any) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, **fields}
        return _server_sent_event({**common_fields, "choices": [choice]})

    yield event({"role": "assistant", "content": ""})
    content = reply.message.content
    for start in range(0, len(content), CHUNK_CHARS):
        yield event({"content": content[start : start + CHUNK_CHARS]})
    for index, call in enumerate(_calls(reply).get("tool_calls", ())):
        yield event({"tool_calls": [{"index": index, **call}]})
    fields: dict[str, Any] = {}
    if request.with_logprobs or request.with_token_ids:
        fields["logprobs"] = {"content": _logprobs(turn)}
    if request.with_token_ids:
        fields["token_ids"] = list(turn.tokens)
        common_fields["prompt_token_ids"] = list(turn.prompt_tokens)
    yield event({}, reply.finish_reason, **fields)
    if request.with_usage:
        yield _server_sent_event({**common_fields, "choices": [], "usage": _usage(turn)})
    yield "data: [DONE]\n\n"


def error_body(error: RequestError) -> dict[str, Any]:
    """Build the body of the reply to a refused request."""
    error_type = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": error.message, "type": error_type, "param": None, "code": error.code}}


def _common_fields(request: ChatRequest, reply: TurnReply, object_type: str) -> dict[str, Any]:
    common_fields: dict[str, Any] = {
        "id": reply.id,
        "object": object_type,
        "created": reply.created_s,
        "model": request.model,
    }
    return common_fields | ({"overridden": dict(request.overridden)} if request.overridden else {})


def _content(reply: TurnReply) -> str | None:
    return None if reply.message.calls and not reply.message.content else reply.message.content


def _calls(reply: TurnReply) -> dict[str, Any]:
    calls = [
        {
            "id": f"call_{reply.index}_{i}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for i, call in enumerate(reply.message.calls)
    ]
    return {"tool_calls": calls} if calls else {}


def _logprobs(turn: SampledTurn) -> list[dict[str, Any]]:
    return [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(turn.tokens, turn.logprobs, strict=True)
    ]


def _usage(turn: SampledTurn) -> dict[str, int]:
    prompt_tokens, sampled_tokens = len(turn.prompt_tokens), len(turn.tokens)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled_tokens,
        "total_tokens": prompt_tokens + sampled_tokens,
    }


def _server_sent_event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n"
