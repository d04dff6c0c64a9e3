"""An HTTP endpoint for tests, which also answer its sessions in place of an episode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np

from staleflow.tasks.endpoint.server import EndpointServer
from staleflow.tasks.endpoint.sessions import AgentSession
from staleflow.tasks.rendering.sampled_turn import SampledTurn
from staleflow.tasks.rendering.task_source import Message
from staleflow.tasks.settings.endpoint_settings import EndpointConfig, EndpointSettings

CHAT, GENERATE = "/v1/chat/completions", "/inference/v1/generate"
HELLO = [{"role": "user", "content": "hello"}]
LOGPROBS = tuple(np.asarray([-0.1, -1.7e-3], np.float32).tolist())


def turn(text: str, before: tuple[int, ...] = (1, 2, 3), **more: Any) -> SampledTurn:
    return SampledTurn(prompt_tokens=before, tokens=(7, 8), logprobs=LOGPROBS, text=text, **more)


@asynccontextmanager
async def serving(**knobs: Any) -> AsyncIterator[tuple[EndpointServer, httpx.AsyncClient]]:
    server = EndpointServer(EndpointSettings(config=EndpointConfig(**knobs), model="mine", temperature=0.7))
    await server.start()
    async with httpx.AsyncClient(base_url=server.base_url.removesuffix("/v1"), timeout=60) as client:
        try:
            yield server, client
        finally:
            await server.stop()


def auth_headers(session: AgentSession) -> dict[str, str]:
    return {"Authorization": f"Bearer {session.key}"}


async def answer_turns(session: AgentSession, *turns: SampledTurn) -> list[tuple[Message, ...]]:
    """Answer the requests of a session with these turns in order; returns the messages of the requests."""
    messages = []
    for item in turns:
        messages.append(await session.next_messages)
        session.send_turn(item)
    return messages


async def chat(client: httpx.AsyncClient, session: AgentSession, messages: list[Any], **more: Any) -> httpx.Response:
    return await client.post(CHAT, headers=auth_headers(session), json={"model": "m", "messages": messages, **more})


async def send_bytes(server: EndpointServer, data: bytes, wait_s: float = 3.0) -> bytes:
    """Send these bytes to the endpoint and return the reply."""
    host, port = server.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    await writer.drain()
    async with asyncio.timeout(wait_s):
        result = await reader.read(65_536)
    writer.close()
    return result
