"""Stop strings: where a turn ends, what the reply contains, and how the session continues."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from staleflow.stores.in_flight.stop_criteria import NO_STOP, StopCriteria, find_stop
from staleflow.tasks.endpoint.requests import ChatRequest, SamplingRule, parse_chat, parse_generate
from staleflow.tasks.engines.running_requests import StopCheck
from staleflow.tasks.rendering.chat_tokenizer import ChatTokenizer, FileDetokenizer
from staleflow.tasks.rendering.task_source import Message
from staleflow.tasks.rendering.turn_params import TurnParams, split_params
from tests.tasks.chat_models import chat_tokenizer
from tests.tasks.endpoint_serving import GENERATE, HELLO, answer_turns, auth_headers, chat, serving, turn

TEXTS = ChatTokenizer(chat_tokenizer("smollm2"))
USER = {"role": "user", "content": "more"}


class CountingTokenizer:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self) -> None:
        self.decoded = 0

    def text(self, tokens: Any, *, keep_special: bool = False) -> str:
        self.decoded += len(tokens)
        return TEXTS.text(tokens, keep_special=keep_special)


def stopped_text(text: str, *strings: str, ids: tuple[int, ...] = ()) -> str | None:
    """Return the text of a turn up to its end, or None if no stop string ends it."""
    tokens = ids or TEXTS.ids(text)
    check = StopCheck(TEXTS, strings)
    count = check.add(tokens)
    assert check.has_stopped or count == len(tokens)
    return TEXTS.text(tokens[:count]) if check.has_stopped else None


def test_a_stop_string_is_found_under_any_tokenization() -> None:
    assert stopped_text("one, two; three", "; ") == "one, two; "
    assert stopped_text("one the other", "n") == "on"
    assert stopped_text("to the 12", "e") == "to the"
    assert stopped_text("to the 12", "h") == "to the"  # in the middle of a token, which is whole
    assert stopped_text("a 12b", "1") == "a 12"
    assert stopped_text("nothing of it", "none") is None
    assert stopped_text("ababac", "abac", "xyz") == "ababac"
    assert stopped_text("stop", "stop", "to") == "sto"
    assert stopped_text("aé日本b", "日本") == "aé日本"
    assert stopped_text("🙂🙃!", "🙃") == "🙂🙃"
    assert stopped_text("aé", "é", "x") == "aé"


@pytest.mark.parametrize("lead", range(6))
def test_a_stop_string_is_found_after_a_long_run_of_byte_tokens(lead: int) -> None:
    """The tokenizer writes unknown characters as bytes and cannot decode a run that starts inside a character."""
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)} | {"a": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    texts, stop = FileDetokenizer(tokenizer), "\u17d4"
    said = [257] * lead + [byte + 1 for byte in ("\u1781\u17d2\u1789\u17bb\u17c6" * 40 + stop).encode()]
    check = StopCheck(texts, [stop])
    assert check.add([*said, 257, 257]) == len(said)
    assert check.has_stopped


def test_special_tokens_are_not_in_the_text() -> None:
    (end,) = TEXTS.ids("<|im_end|>")
    assert stopped_text("", "<|im_end|>", ids=(end,)) is None
    assert stopped_text("", "ab", ids=(*TEXTS.ids("a"), end, *TEXTS.ids("b"))) == "ab"


def test_tokens_before_an_interrupt_count_toward_the_stop_string() -> None:
    tokens = TEXTS.ids("so. The END of it")
    whole = StopCheck(TEXTS, ["END of"])
    count = whole.add(tokens)
    assert whole.has_stopped and TEXTS.text(tokens[:count]) == "so. The END of"
    for cut in range(count):
        rest = StopCheck(TEXTS, ["END of"], tokens[:cut])
        assert rest.add(tokens[cut:]) == count - cut and rest.has_stopped
    assert StopCheck(TEXTS, ["END of"], tokens[:count]).has_stopped
    assert whole.add(tokens) == 0, "nothing comes after it"


def test_stop_check_matches_a_brute_force_search() -> None:
    """Also for tokens that no text encodes to."""
    rng = random.Random(0)
    result = 0
    for _ in range(300):
        tokens = rng.choices(TEXTS.ids("abéé日 the\n\n12🙂"), k=rng.randint(1, 60))
        strings = [
            "".join(rng.choices("abé日th 1🙂\n", k=rng.randint(1, 3))) for _ in range(rng.randint(1, 3))
        ]  # fmt: skip
        plain = next((n for n in range(1, len(tokens) + 1) if find_stop(TEXTS.text(tokens[:n]), strings)), None)
        check = StopCheck(TEXTS, strings)
        assert check.add(tokens) == (plain or len(tokens))
        assert check.has_stopped == (plain is not None)
        result += check.has_stopped
    assert 50 < result < 290


@pytest.mark.parametrize("said", ["word and another ", "<|im_end|><|im_start|><|im_end|>"])
def test_stop_check_cost_per_token_is_constant(said: str) -> None:
    texts = CountingTokenizer()
    check = StopCheck(texts, ["never said"])
    check.add(TEXTS.ids("A turn: "))
    tokens = TEXTS.ids(said)
    for _ in range(20):
        check.add(tokens)
    first = texts.decoded
    for _ in range(20):
        check.add(tokens)
    assert texts.decoded - first < 1.5 * first
    check.add(TEXTS.ids("it is never"))
    assert not check.has_stopped
    check.add(TEXTS.ids(" said"))
    assert check.has_stopped


# -- requests ----------------------------------------------------------------------------------------------------


def read_request(**more: Any) -> ChatRequest:
    body = {"model": "m", "messages": HELLO, **more}
    (request,) = parse_chat(body, temperature=1.0, sampling=SamplingRule.REFUSE)
    return request


def test_stop_accepts_a_string_or_a_list() -> None:
    assert read_request(stop=None, stop_token_ids=None).stop == read_request(stop=[]).stop == NO_STOP
    assert read_request(stop="END").stop == StopCriteria(("END",))
    assert read_request(stop=["a", "b"] * 8, stop_token_ids=[7]).stop == StopCriteria(("a", "b") * 8, (7,))
    assert not read_request(stop="END", stop_token_ids=[3]).overridden
    params = {"logprobs": 1, "stop_token_ids": [3, 5], "stop": ["END"], "include_stop_str_in_output": True}
    (result,) = parse_generate(
        {"model": "m", "token_ids": [1], "sampling_params": params}, temperature=1.0, sampling=SamplingRule.REFUSE
    )
    assert result.stop == StopCriteria(("END",), (3, 5))


def test_stop_criteria_are_part_of_the_turn_parameters() -> None:
    stop = StopCriteria(("\n\n", "é"), (5, 7))
    text = (
        read_request(stop=list(stop.strings), stop_token_ids=list(stop.token_ids))
        .turn_params(first=True)
        .prepend_to([])
    )
    assert split_params(text)[0].stop == stop
    assert "stop" not in read_request(max_tokens=3).turn_params(first=True).prepend_to([])[0].content, (
        "prompts stay what they were"
    )


# -- sessions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "more", "content_expected"),
    [
        ("END", {}, "It is 3. "),
        (["\n\n", "END"], {}, "It is 3. "),
        ("END", {"include_stop_str_in_output": True}, "It is 3. END"),
        (["none", "3. E"], {}, "It is "),
        ("It", {}, ""),
        ("none", {}, "It is 3. END of"),
    ],
)
async def test_a_reply_has_the_text_up_to_the_stop_string_and_all_token_ids(
    stop: Any, more: dict[str, Any], content_expected: str, stream: bool
) -> None:
    async with serving(changed_past="refuse") as (server, client):
        session = server.sessions.open()
        turns = turn("It is 3. END of"), turn("yes", before=(1, 2, 3, 7, 8, 4))
        telling = asyncio.ensure_future(answer_turns(session, *turns))
        requests = {"stop": stop, "return_token_ids": True, "stream": stream, **more}
        result = await chat(client, session, HELLO, **requests)
        if stream:
            events = [json.loads(line[6:]) for line in result.text.splitlines() if line and line[6:] != "[DONE]"]
            choices = [event["choices"][0] for event in events]
            content = "".join(choice["delta"].get("content", "") for choice in choices)
        else:
            choices = result.json()["choices"]
            content = choices[0]["message"]["content"]
        assert content == content_expected
        assert (choices[-1]["finish_reason"], choices[-1]["token_ids"]) == ("stop", [7, 8])
        assert len(choices[-1]["logprobs"]["content"]) == 2
        # The next messages follow all sampled tokens, and the text of the reply.
        past = [*HELLO, {"role": "assistant", "content": content}, USER]
        assert (await chat(client, session, past, stop=stop)).status_code == 200
        first, then = await telling
        criteria = StopCriteria((stop,) if isinstance(stop, str) else tuple(stop))
        assert [split_params(item)[0].stop for item in (first, then)] == [criteria, criteria]
        assert split_params(then) == (TurnParams(stop=criteria), (Message("user", "more"),))


async def test_a_stop_string_may_end_a_tool_call() -> None:
    text = 'Now. <tool_call>{"name": "add", "arguments": {}}</tool_call> and'
    tools = [{"type": "function", "function": {"name": "add"}}]
    async with serving() as (server, client):
        session = server.sessions.open()
        telling = asyncio.ensure_future(answer_turns(session, turn(text)))
        result = (await chat(client, session, HELLO, tools=tools, stop="</tool_call>")).json()["choices"][0]
        assert (result["message"]["content"], result["finish_reason"]) == ("Now.", "tool_calls")
        assert result["message"]["tool_calls"][0]["function"]["name"] == "add"
        await telling


async def test_a_repeated_request_needs_the_same_stop_strings() -> None:
    async with serving(changed_past="refuse") as (server, client):
        session = server.sessions.open()
        telling = asyncio.ensure_future(answer_turns(session, turn("hi; ho")))
        results = [(await chat(client, session, HELLO, stop=[";"])).json() for _ in range(2)]
        assert results[0] == results[1]
        assert results[0]["choices"][0]["message"]["content"] == "hi"
        for stop in (None, ["!"], [";", "!"]):
            other = await chat(client, session, HELLO, stop=stop)
            assert (other.status_code, other.json()["error"]["code"]) == (400, "changed_past")
        limited = await chat(client, session, HELLO, stop=";", max_tokens=5)
        assert (limited.status_code, limited.json()["error"]["code"]) == (400, "changed_past")
        await telling


async def test_token_ids_replies_include_the_stop_tokens() -> None:
    async with serving() as (server, client):
        session = server.sessions.open()
        telling = asyncio.ensure_future(answer_turns(session, turn("hi; ho")))
        params = {"logprobs": 1, "stop": ";", "stop_token_ids": [9, 8]}
        body = {"model": "m", "token_ids": [1, 2, 3], "sampling_params": params}
        parsed = (await client.post(GENERATE, headers=auth_headers(session), json=body)).json()
        assert (parsed["choices"][0]["token_ids"], parsed["choices"][0]["finish_reason"]) == ([7, 8], "stop")
        (said,) = await telling
        assert split_params(said)[0].stop == StopCriteria((";",), (9, 8))


async def test_a_truncated_turn_has_finish_reason_length_despite_stop() -> None:
    async with serving() as (server, client):
        session = server.sessions.open()
        telling = asyncio.ensure_future(answer_turns(session, turn("hi", truncated=True)))
        result = (await chat(client, session, HELLO, stop=";")).json()["choices"][0]
        assert (result["message"]["content"], result["finish_reason"]) == ("hi", "length")
        await telling
