"""The endpoint used by unmodified clients: openai, the train client of verifiers, and the capture server of OpenEnv."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.tasks.endpoint.server import EndpointServer
from staleflow.tasks.endpoint.sessions import AgentSession
from staleflow.tasks.rendering.sampled_turn import SampledTurn
from staleflow.tasks.settings.endpoint_settings import EndpointSettings
from tests.tasks.chat_models import chat_tokenizer

TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "strict": True, "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def sampled(before: Sequence[int], count: int, text: str) -> SampledTurn:
    """Return a turn of this many tokens, with logprobs that are exact in float32."""
    rng = np.random.default_rng(len(before))
    logprobs = np.log(rng.random(count).astype(np.float32))
    return SampledTurn(
        prompt_tokens=tuple(before),
        tokens=tuple(int(t) for t in rng.integers(0, 200, count)),
        logprobs=tuple(logprobs.tolist()),
        text=text,
    )


@asynccontextmanager
async def serving(*texts: str) -> AsyncIterator[tuple[EndpointServer, AgentSession, list[SampledTurn]]]:
    """An endpoint with one session whose policy returns these texts in order."""
    server = EndpointServer(EndpointSettings())
    await server.start()
    session = server.sessions.open()
    received: list[SampledTurn] = []

    async def tell() -> None:
        ids = [1, 2, 3]
        for text in texts:
            await session.next_messages
            received.append(sampled(ids, 5 + len(text) % 7, text))
            ids = [*ids, *received[-1].tokens, 4, 5]
            session.send_turn(received[-1])

    telling = asyncio.ensure_future(tell())
    try:
        yield server, session, received
    finally:
        telling.cancel()
        await server.stop()


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_over_several_turns_with_a_tool(stream: bool) -> None:
    openai = pytest.importorskip("openai")
    async with (
        serving(f"I add. {CALL}", "It is 3.") as (server, session, turns),
        openai.AsyncOpenAI(base_url=server.base_url, api_key=session.key, max_retries=0) as client,
    ):
        messages: list[Any] = [{"role": "user", "content": "1 + 2"}]

        async def ask() -> Any:
            if not stream:
                answer = await client.chat.completions.create(
                    model="m", messages=messages, tools=TOOLS, extra_body={"return_token_ids": True}
                )
                assert tuple(answer.prompt_token_ids) == turns[-1].prompt_tokens
                assert tuple(answer.choices[0].token_ids) == turns[-1].tokens
                result = np.asarray([x.logprob for x in answer.choices[0].logprobs.content], np.float32)
                assert result.tobytes() == np.asarray(turns[-1].logprobs, np.float32).tobytes()
                return answer.choices[0].message
            async with client.chat.completions.stream(
                model="m", messages=messages, tools=TOOLS, stream_options={"include_usage": True}
            ) as events:
                async for _ in events:
                    pass
                final = await events.get_final_completion()
            assert final.usage.completion_tokens == len(turns[-1].tokens)
            return final.choices[0].message

        message = await ask()
        assert message.content == "I add."
        (call,) = message.tool_calls
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 1, "b": 2}')
        messages.append(message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
        assert (await ask()).content == "It is 3."
        assert [m.id for m in (await client.models.list()).data] == ["policy"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_openai_client_receives_a_turn_up_to_its_stop_string(stream: bool) -> None:
    openai = pytest.importorskip("openai")
    async with (
        serving("It is 3; or so", "yes") as (server, session, turns),
        openai.AsyncOpenAI(base_url=server.base_url, api_key=session.key, max_retries=0) as client,
    ):
        messages: list[Any] = [{"role": "user", "content": "1 + 2"}]
        more = {"extra_body": {"return_token_ids": True}}
        if stream:
            text = ""
            async for part in await client.chat.completions.create(
                model="m", messages=messages, stop=[";", "!"], stream=True
            ):
                text += part.choices[0].delta.content or ""
        else:
            answer = await client.chat.completions.create(model="m", messages=messages, stop=[";", "!"], **more)
            text = answer.choices[0].message.content
            assert tuple(answer.choices[0].token_ids) == turns[0].tokens
            assert answer.choices[0].finish_reason == "stop"
        assert text == "It is 3"
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "sure?"}]
        answer = await client.chat.completions.create(model="m", messages=messages, stop=";", **more)
        assert answer.choices[0].message.content == "yes"
        with pytest.raises(openai.BadRequestError, match="stop must be a text, or a list of up to 16"):
            await client.chat.completions.create(model="m", messages=messages, stop=["x"] * 17)


async def test_the_openai_client_raises_its_own_errors_for_rejected_requests() -> None:
    openai = pytest.importorskip("openai")
    async with serving() as (server, session, _):
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError, match="no session has this key"):
                await client.models.list()
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key=session.key, max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match="n = 8: a turn is sampled once"):
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], n=8)


async def test_the_verifiers_train_client_accepts_the_endpoint_replies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checks of ids, logprobs and fields and its renderer are unmodified."""
    pytest.importorskip("verifiers")
    import verifiers.v1 as vf
    from renderers import Qwen3RendererConfig
    from verifiers.v1.clients.train import TrainClient
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.dialects import ChatDialect

    folder = str(tmp_path / "qwen3")
    chat_tokenizer("qwen3").save_pretrained(folder)
    async with serving("any") as (server, session, turns):
        base_url = server.base_url.replace("/v1", f"/session/{session.key}/v1")
        config = TrainClientConfig(
            base_url=base_url, api_key_var="NO_SUCH_KEY", renderer=Qwen3RendererConfig(),
            renderer_model_name=folder,
        )  # fmt: skip
        client = TrainClient(config)
        body = {"model": "m", "messages": [{"role": "user", "content": "1 + 2"}]}
        sampling = vf.SamplingConfig(temperature=1.0, max_tokens=9)
        response = await client.get_response(ChatDialect(), body, sampling, session_id="theirs")
        assert response.tokens is not None
        assert response.tokens.completion_ids == list(turns[0].tokens)
        result = np.asarray(response.tokens.completion_logprobs, np.float32)
        assert result.tobytes() == np.asarray(turns[0].logprobs, np.float32).tobytes()
        await client.close()


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@asynccontextmanager
async def capture_server(
    server: EndpointServer, session: AgentSession, **options: Any
) -> AsyncIterator[tuple[Any, str]]:
    """The capture server of OpenEnv in front of a session; yields it and its base URL."""
    from openenv.core.harness.capture.runner import CaptureServer

    port = free_port()
    capture = CaptureServer(llm_url=server.base_url, model="policy", port=port, api_key=session.key, **options)

    @asynccontextmanager
    async def closing(app: object) -> AsyncIterator[None]:
        yield
        await capture.inference.aclose()  # the package itself leaves its connections to the endpoint open

    capture.app.router.lifespan_context = closing
    await asyncio.to_thread(capture.start)
    try:
        yield capture, f"http://127.0.0.1:{port}/v1"
    finally:
        await asyncio.to_thread(capture.stop)


async def test_openenv_captures_an_agent_without_a_fatal_finding() -> None:
    """The capture server runs between the agent and the endpoint and validates all requests and replies."""
    pytest.importorskip("openenv.core.harness.capture")
    openai = pytest.importorskip("openai")
    from openenv.core.harness.capture.export import export_session

    async with serving("first", "second", "third") as (server, session, turns):
        async with capture_server(server, session, capture_level="tokens") as (capture, base_url):
            recorded = capture.registry.create("rollout", purpose="train")
            messages: list[Any] = [{"role": "user", "content": "go"}]
            async with openai.AsyncOpenAI(base_url=base_url, api_key=recorded.session_id, max_retries=0) as client:
                for _ in range(3):
                    answer = await client.chat.completions.create(model="policy", messages=messages)
                    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                    messages.append({"role": "user", "content": "go on"})
        document = export_session(recorded)
        assert not [finding for finding in document["validation"] if "[FATAL" in str(finding)]
        nodes = recorded.graph.nodes()
        assert [tuple(node.sampled_ids) for node in nodes] == [turn.tokens for turn in turns]
        assert len(recorded.graph.roots()) == 1
