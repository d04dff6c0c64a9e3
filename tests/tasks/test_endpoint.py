"""The endpoint over HTTP: how sessions continue, branch and end without affecting each other."""

from __future__ import annotations

import asyncio
import json
import traceback
from typing import Any

import httpx
import numpy as np
import pytest

from staleflow.tasks.endpoint.replies import parse_tool_calls
from staleflow.tasks.endpoint.requests import ChatRequest, RequestError
from staleflow.tasks.endpoint.sessions import Sessions
from staleflow.tasks.rendering.task_source import Message
from staleflow.tasks.rendering.turn_params import split_params
from tests.tasks.endpoint_serving import (
    CHAT,
    GENERATE,
    HELLO,
    LOGPROBS,
    answer_turns,
    auth_headers,
    chat,
    serving,
    turn,
)


async def test_chat_replies_contain_exact_token_ids_and_logprobs() -> None:
    async with serving() as (server, client):
        session = server.sessions.open()
        telling = asyncio.ensure_future(
            answer_turns(session, turn("hi"), turn("so so", before=(1, 2, 3, 7, 8, 4), truncated=True))
        )
        first = await chat(client, session, HELLO, logprobs=True, return_token_ids=True, top_logprobs=0)
        assert first.status_code == 200
        parsed = first.json()
        assert parsed["prompt_token_ids"] == [1, 2, 3]
        choice = parsed["choices"][0]
        assert choice["token_ids"] == [7, 8]
        assert [item["token"] for item in choice["logprobs"]["content"]] == ["token_id:7", "token_id:8"]
        told = np.asarray([item["logprob"] for item in choice["logprobs"]["content"]], np.float32)
        assert told.tobytes() == np.asarray(LOGPROBS, np.float32).tobytes()
        assert choice["message"] == {"role": "assistant", "content": "hi"}
        assert choice["finish_reason"] == "stop"
        more = [*HELLO, {"role": "assistant", "content": "hi "}, {"role": "user", "content": "how are you?"}]
        second = (await chat(client, session, more)).json()
        assert second["choices"][0]["finish_reason"] == "length"
        assert second["choices"][0]["logprobs"] is None
        assert second["usage"] == {"prompt_tokens": 6, "completion_tokens": 2, "total_tokens": 8}
        assert await telling == [(Message("user", "hello"),), (Message("user", "how are you?"),)]


async def test_a_repeated_request_waits_for_the_same_turn() -> None:
    """Clients retry after a timeout or a lost connection; the turn is sampled once."""
    async with serving() as (server, client):
        session = server.sessions.open()
        asking = [asyncio.ensure_future(chat(client, session, HELLO)) for _ in range(3)]
        with pytest.raises(httpx.ReadTimeout):
            await client.post(CHAT, headers=auth_headers(session), json={"model": "m", "messages": HELLO}, timeout=0.2)
        assert await answer_turns(session, turn("hi")) == [(Message("user", "hello"),)]
        results = [(await item).json() for item in asking]
        assert results[0] == results[1] == results[2] == (await chat(client, session, HELLO)).json()
        assert not session.next_messages.done()


async def test_refusals_of_ended_sessions_keep_no_requests() -> None:
    """One error is raised for all requests; each raise added its frames to it."""
    sessions = Sessions()
    session = sessions.open()
    sessions.close(session)
    for _ in range(3):
        with pytest.raises(RequestError) as refused:
            sessions.find(session.key)
        with pytest.raises(RequestError):
            await session.request_turn(ChatRequest(model="m"))
    assert len(traceback.extract_tb(refused.value.__traceback__)) < 4


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_are_parsed_from_the_model_text(stream: bool) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    text = 'Now.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ä"}}\n</tool_call>'
    async with serving() as (server, client):
        session = server.sessions.open()
        telling = asyncio.ensure_future(answer_turns(session, turn(text), turn("3", before=(1, 2, 3, 7, 8, 4))))
        response = await chat(client, session, HELLO, tools=tools, stream=stream)
        if stream:
            events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
            assert events[-1] == "[DONE]"
            deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
            (call,) = [call for delta in deltas for call in delta.get("tool_calls", ())]
            content = "".join(delta.get("content", "") for delta in deltas)
            assert json.loads(events[-2])["choices"][0]["finish_reason"] == "tool_calls"
        else:
            choice = response.json()["choices"][0]
            assert choice["finish_reason"] == "tool_calls"
            (call,), content = choice["message"]["tool_calls"], choice["message"]["content"]
        assert content == "Now."
        assert (call["type"], call["id"]) == ("function", "call_0_0")
        assert call["function"]["name"] == "add"
        assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": "ä"}
        # A client may write the call in another way.
        call["function"]["arguments"] = '{"b":"\\u00e4","a":1}'
        past = [*HELLO, {"role": "assistant", "content": "Now.", "tool_calls": [call]}]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        second = await chat(client, session, [*past, result], tools=tools)
        assert second.json()["choices"][0]["message"] == {"role": "assistant", "content": "3"}
        first_said, then = await telling
        assert json.loads(split_params(first_said)[0].tools) == tools
        assert split_params(first_said)[1] == (Message("user", "hello"),)
        assert then == (Message("tool", "3"),)


def test_malformed_tool_calls_stay_text() -> None:
    for text in ("<tool_call>{</tool_call>", '<tool_call>{"arguments": {}}</tool_call>', "<tool_call>" + "[" * 9999):
        assert parse_tool_calls(text) == (text, ())
    assert parse_tool_calls("none") == ("none", ())


async def test_generate_returns_token_ids_and_continues_exactly() -> None:
    async with serving(changed_past="refuse") as (server, client):
        session = server.sessions.open()

        async def generate(ids: list[int]) -> httpx.Response:
            params = {"logprobs": 1, "stop_token_ids": [9], "skip_special_tokens": False}
            body = {"model": "m", "token_ids": ids, "sampling_params": params, "cache_salt": "0"}
            return await client.post(GENERATE, headers=auth_headers(session), json=body)

        telling = asyncio.ensure_future(answer_turns(session, turn(""), turn("", before=(1, 2, 3, 7, 8, 4))))
        first = (await generate([1, 2, 3])).json()
        assert first["prompt_token_ids"] == [1, 2, 3]
        assert first["choices"][0]["token_ids"] == [7, 8]
        assert first["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:7"
        changed = await generate([1, 2, 3, 7, 9, 4])
        assert changed.status_code == 400
        assert "differ from the 5 so far from position 4 on" in changed.json()["error"]["message"]
        assert (await generate([1, 2, 3, 7, 8, 4])).status_code == 200
        assert [split_params(item)[0].token_ids for item in await telling] == [(1, 2, 3), (4,)]


CHANGED: dict[str, tuple[list[Any], str]] = {
    "another beginning": (
        [{"role": "user", "content": "good day"}, {"role": "assistant", "content": "hi"}, *HELLO],
        "messages[0], of role user, differs from the earlier request",
    ),
    "another answer": (
        [*HELLO, {"role": "assistant", "content": "ho"}, *HELLO],
        "messages[1], of role assistant, differs from the earlier request",
    ),
    "nothing new": ([*HELLO, *HELLO], "messages[1], of role user, differs from the earlier request"),
    "shorter": ([{"role": "user", "content": "other"}], "messages[0], of role user, differs from the earlier request"),
    "words put in": (
        [*HELLO, {"role": "assistant", "content": "hi"}, {"role": "assistant", "content": "ho"}, *HELLO],
        "messages[2] is the assistant's, and was not sampled in this session",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
async def test_a_changed_history_is_rejected_without_side_effects(name: str) -> None:
    messages, why = CHANGED[name]
    async with serving(changed_past="refuse") as (server, client):
        session = server.sessions.open()
        telling = asyncio.ensure_future(answer_turns(session, turn("hi"), turn("well", before=(1, 2, 3, 7, 8, 4))))
        assert (await chat(client, session, HELLO)).status_code == 200
        refused = await chat(client, session, messages)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "changed_past"
        assert refused.json()["error"]["message"].startswith(why)
        right = [*HELLO, {"role": "assistant", "content": "hi"}, *HELLO]
        assert (await chat(client, session, right)).json()["choices"][0]["message"]["content"] == "well"
        await telling


def chat_message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


ONE, TWO = chat_message("user", "one"), chat_message("user", "two")
HI, HO = chat_message("assistant", "hi"), chat_message("assistant", "ho")
BRANCHES: dict[str, tuple[list[Any], int, tuple[Message, ...]]] = {
    "goes on": ([*HELLO, HI, ONE, HO, TWO], -1, (Message("user", "two"),)),
    "from the first turn": ([*HELLO, HI, TWO], 1, (Message("user", "two"),)),
    "the same once more": ([*HELLO, HI, ONE, TWO], 1, (Message("user", "one"), Message("user", "two"))),
    "another beginning": ([TWO], 0, (Message("user", "two"),)),
    "old messages dropped": (
        [ONE, HO, TWO], 0, (Message("user", "one"), Message("assistant", "ho!"), Message("user", "two")),
    ),
    "words put in": (
        [*HELLO, HI, ONE, chat_message("assistant", "well"), TWO], 0,
        (
            Message("user", "hello"), Message("assistant", "hi"), Message("user", "one"),
            Message("assistant", "well"), Message("user", "two"),
        ),
    ),
    "shorter": (HELLO, 0, (Message("user", "hello"),)),
}  # fmt: skip
"""After hello, hi, one, ho!: the request, the parent turn of its branch, and the messages passed to the model."""


@pytest.mark.parametrize("name", BRANCHES)
async def test_a_changed_history_starts_a_branch_after_the_last_matching_turn(name: str) -> None:
    messages, after, told = BRANCHES[name]
    async with serving() as (server, client):
        session = server.sessions.open()
        turns = turn("hi"), turn("ho! ", before=(1, 2, 3, 7, 8, 4)), turn("so", before=(9,))
        telling = asyncio.ensure_future(answer_turns(session, *turns))
        assert (await chat(client, session, HELLO)).status_code == 200
        requests = [item | {"content": "ho!"} if item == HO else item for item in [*HELLO, HI, ONE]]
        assert (await chat(client, session, requests)).status_code == 200
        requests = [item | {"content": "ho!"} if item == HO else item for item in messages]
        assert (await chat(client, session, requests)).json()["choices"][0]["message"]["content"] == "so"
        directions, shown = split_params((await telling)[-1])
        assert directions.after_turn == (None if after < 0 else after)
        assert tuple(m._replace(content=m.content.strip()) for m in shown if isinstance(m, Message)) == told


async def test_changed_tools_or_token_ids_start_a_branch() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    async with serving() as (server, client):
        session = server.sessions.open()
        telling = asyncio.ensure_future(answer_turns(session, turn("hi"), turn("ho")))
        await chat(client, session, HELLO)
        assert (await chat(client, session, [*HELLO, HI, ONE], tools=tools)).status_code == 200
        directions, shown = split_params((await telling)[-1])
        assert (directions.after_turn, json.loads(directions.tools)) == (0, tools)
        assert [m.content for m in shown if isinstance(m, Message)] == ["hello", "hi", "one"]
        session = server.sessions.open()
        telling = asyncio.ensure_future(answer_turns(session, turn(""), turn(""), turn("")))
        for ids in ([1, 2, 3], [1, 2, 9], [1, 2, 3, 7, 8, 5]):
            body = {"model": "m", "token_ids": ids, "sampling_params": {"logprobs": 1}}
            assert (await client.post(GENERATE, headers=auth_headers(session), json=body)).status_code == 200
        results = [split_params(element)[0] for element in await telling]
        assert [(item.after_turn, item.token_ids) for item in results] == [
            (None, (1, 2, 3)), (0, (1, 2, 9)), (None, (5,)),
        ]  # fmt: skip


async def test_concurrent_requests_of_a_session_are_served_in_sequence() -> None:
    async with serving() as (server, client):
        session = server.sessions.open()
        telling = asyncio.ensure_future(answer_turns(session, turn("hi"), turn("a"), turn("b")))
        await chat(client, session, HELLO)
        requests = [asyncio.ensure_future(chat(client, session, [*HELLO, HI, item])) for item in (ONE, TWO)]
        results = [(await item).json()["choices"][0]["message"]["content"] for item in requests]
        assert sorted(results) == ["a", "b"]
        assert sorted(element[-1].content for element in (await telling)[1:]) == ["one", "two"]


async def test_queued_requests_fail_when_the_session_closes() -> None:
    async with serving() as (server, client):
        session = server.sessions.open()
        requests = [asyncio.ensure_future(chat(client, session, [item])) for item in (ONE, TWO)]
        await session.next_messages
        while not session.num_queued:
            await asyncio.sleep(0.01)
        server.sessions.close(session, "it is over")
        assert [(await item).status_code for item in requests] == [410, 410]


@pytest.mark.parametrize("changed_past", ["branch", "refuse"])
async def test_a_turn_after_an_auxiliary_turn_continues_the_main_conversation(changed_past: str) -> None:
    async with serving(changed_past=changed_past) as (server, client):
        session = server.sessions.open()
        first = await chat(client, session, HELLO, auxiliary=True)
        assert (first.status_code, first.json()["error"]["code"]) == (400, "auxiliary_first")
        telling = asyncio.ensure_future(answer_turns(session, turn("hi"), turn("t"), turn("s"), turn("ho"), turn("so")))
        await chat(client, session, HELLO)
        title = await chat(client, session, [*HELLO, HI, chat_message("user", "a title")], auxiliary=True)
        assert title.json()["choices"][0]["message"]["content"] == "t"
        headers = {**auth_headers(session), "X-Auxiliary": "1"}
        beside = [chat_message("system", "sum up"), TWO]
        await client.post(CHAT, headers=headers, json={"model": "m", "messages": beside})
        await chat(client, session, [*HELLO, HI, ONE])
        await chat(client, session, [*HELLO, HI, ONE, HO, TWO])
        results = [split_params(element)[0] for element in await telling]
        assert [(item.after_turn, item.auxiliary) for item in results] == [
            (None, False), (1, True), (0, True), (1, False), (None, False),
        ]  # fmt: skip


async def test_sampling_parameters_are_overridden_or_rejected_by_setting() -> None:
    requests = {"temperature": 0.2, "top_p": 0.9, "top_k": 20, "seed": 3, "presence_penalty": 0}
    async with serving() as (server, client):
        session = server.sessions.open()
        telling = asyncio.ensure_future(answer_turns(session, turn("hi")))
        parsed = (await chat(client, session, HELLO, **requests)).json()
        assert parsed["overridden"] == {"temperature": 0.7, "top_p": 1, "top_k": -1, "seed": None}
        await telling
    async with serving(sampling="refuse") as (server, client):
        session = server.sessions.open()
        refused = await chat(client, session, HELLO, **requests)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith("temperature, top_p, top_k, seed: the job samples with")
        telling = asyncio.ensure_future(answer_turns(session, turn("hi")))
        parsed = (await chat(client, session, HELLO, temperature=0.7, top_p=1.0, top_k=-1, n=1)).json()
        assert "overridden" not in parsed
        await telling


async def test_a_key_is_valid_for_its_session_until_it_ends() -> None:
    async with serving() as (server, client):
        first, second = server.sessions.open(), server.sessions.open()
        models = (await client.get("/v1/models", headers=auth_headers(first))).json()
        assert [model["id"] for model in models["data"]] == ["mine"]
        assert (await client.get("/v1/models/mine", headers=auth_headers(first))).json()["id"] == "mine"
        body = {"model": "m", "messages": HELLO}
        for headers, status in (
            ({}, 401),
            ({"Authorization": f"Bearer {first.id}.wrong"}, 401),
            ({"Authorization": f"Bearer {first.id}.{second.key.partition('.')[2]}"}, 401),
            ({"Authorization": "Bearer ä".encode("latin-1").decode("latin-1")}, 401),
            ({**auth_headers(first), "X-Session-ID": second.id}, 403),
        ):
            raw = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
            assert (await client.post(CHAT, json=body, headers=raw)).status_code == status
        telling = asyncio.ensure_future(answer_turns(first, turn("hi")))
        assert (await client.post(f"/session/{first.key}{CHAT}", json=body)).status_code == 200
        assert (await client.post(CHAT, json=body, headers={"X-Session-ID": first.key})).status_code == 200
        await telling
        waiting = asyncio.ensure_future(chat(client, second, HELLO))
        await second.next_messages
        server.sessions.close(second)
        assert (await waiting).status_code == 410
        void = await chat(client, second, HELLO)
        assert (void.status_code, void.json()["error"]["message"]) == (
            410, "the episode has ended; its key is no longer valid",
        )  # fmt: skip
        assert (await chat(client, first, HELLO)).status_code == 200
