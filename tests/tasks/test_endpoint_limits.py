"""The endpoint under many, slow or disconnecting clients."""

from __future__ import annotations

import asyncio
import socket
import sys

import httpx
import pytest

from staleflow.tasks.endpoint import sessions
from staleflow.tasks.endpoint.replies import TurnReply
from staleflow.tasks.endpoint.requests import ChatRequest, RequestError
from staleflow.tasks.endpoint.server import EndpointServer, listening_socket
from staleflow.tasks.endpoint.sessions import Sessions
from staleflow.tasks.settings.endpoint_settings import EndpointSettings
from tests.tasks.endpoint_serving import CHAT, GENERATE, HELLO, auth_headers, chat, send_bytes, serving, turn


class SilentPolicy:
    """A served policy that never answers."""

    pending_bytes = 0

    def __init__(self) -> None:
        self.next_messages, self.cancelled = asyncio.Event(), asyncio.Event()

    def __len__(self) -> int:
        return 1

    def find(self, key: str) -> SilentPolicy:
        return self

    async def request_turn(self, request: ChatRequest) -> TurnReply:
        self.next_messages.set()
        try:
            reply: TurnReply = await asyncio.get_running_loop().create_future()
            return reply
        finally:
            self.cancelled.set()


def address(server: EndpointServer) -> tuple[str, int]:
    host, port = server.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    return host, int(port)


def request(key: str) -> bytes:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}]}'
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def test_accepted_connections_set_tcp_nodelay() -> None:
    """Without TCP_NODELAY the kernel delays a body until the head is acknowledged, which takes clients 40 ms."""
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        one: socket.socket = writer.get_extra_info("socket")
        accepted.set_result(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listening = listening_socket("127.0.0.1", 0, "")
    async with await asyncio.start_server(connected, sock=listening):
        _, writer = await asyncio.open_connection(*listening.getsockname())
        assert await accepted != 0
        writer.close()


async def test_a_disconnected_client_cancels_its_request() -> None:
    policy = SilentPolicy()
    server = EndpointServer(EndpointSettings(), policy)
    await server.start()
    _, writer = await asyncio.open_connection(*address(server))
    writer.write(request("any"))
    await policy.next_messages.wait()
    writer.close()
    await policy.cancelled.wait()
    await server.stop()


async def test_a_session_gets_its_turn_by_retry_after_a_disconnect() -> None:
    async with serving(max_requests=1) as (server, client):
        session = server.sessions.open()
        _, writer = await asyncio.open_connection(*address(server))
        writer.write(request(session.key))
        await session.next_messages
        writer.close()
        while (await client.get("/v1/models", headers=auth_headers(session))).status_code == 429:
            await asyncio.sleep(0.01)  # until the endpoint has noticed
        session.send_turn(turn("hi"))
        result = await chat(client, session, HELLO)
        assert result.json()["choices"][0]["message"]["content"] == "hi"
        assert not session.next_messages.done()


async def test_sessions_beyond_max_requests_wait_for_their_turns() -> None:
    async with serving(max_requests=2) as (server, client):
        sessions = [server.sessions.open() for _ in range(9)]
        waiting = [asyncio.ensure_future(chat(client, session, HELLO)) for session in sessions]
        await asyncio.gather(*(session.next_messages for session in sessions))
        assert (await client.get("/v1/models", headers=auth_headers(sessions[0]))).status_code == 429
        assert (await client.get("/health")).status_code == 200
        assert "staleflow_endpoint_in_flight 9.0" in (await client.get("/metrics")).text
        for session in sessions:
            session.send_turn(turn("hi"))
        assert [(await item).status_code for item in waiting] == [200] * 9


async def test_queued_requests_of_a_session_use_bounded_memory() -> None:
    long = [[{"role": "user", "content": f"{number}{'x' * 7000}"}] for number in range(120)]
    async with serving(max_session_kib=32, max_body_kib=64) as (server, client):
        greedy, modest = server.sessions.open(), server.sessions.open()

        async def fill() -> list[asyncio.Task[httpx.Response]]:
            """Requests that wait, once there is no room for another."""
            waiting: list[asyncio.Task[httpx.Response]] = []
            for messages in long:
                asking = asyncio.ensure_future(chat(client, greedy, messages))
                while not asking.done() and greedy.num_queued + greedy.next_messages.done() == len(waiting):
                    await asyncio.sleep(0)
                if asking.done():
                    result = asking.result()
                    assert (result.status_code, result.headers["Retry-After"]) == (429, "1")
                    assert "endpoint.max_session_kib = 32" in result.json()["error"]["message"]
                    return waiting
                waiting.append(asking)
            raise AssertionError("all of them wait")

        waiting = await fill()
        assert len(waiting) == 4
        chunk = b"%x\r\n%s\r\n" % (9000, b"x" * 9000)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {greedy.key}\r\n"
        assert b" 429 " in await send_bytes(server, f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunk)
        other = asyncio.ensure_future(chat(client, modest, [{"role": "user", "content": "x" * 50_000}]))
        await modest.next_messages
        modest.send_turn(turn("hi"))
        assert (await other).status_code == 200, "one alone may be larger"
        # Requests whose clients have gone wait on, and count on.
        for item in waiting:
            item.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        while "in_flight 0.0" not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.01)
        assert (await chat(client, greedy, long[5])).status_code == 429
        for number in range(4):
            await greedy.next_messages
            greedy.send_turn(turn(str(number)))
        while greedy.pending_bytes > 0:
            await asyncio.sleep(0)
        assert greedy.num_queued == 0
        assert len(await fill()) == 4
        server.sessions.close(greedy)
        while "in_flight 0.0" not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.01)
        while greedy.pending_bytes:
            await asyncio.sleep(0)


async def test_health_and_metrics_requests_are_not_counted() -> None:
    async with serving() as (_, client):
        for path in ("/health", "/metrics", "/v1/models"):
            await client.get(path)
        counts = [line for line in (await client.get("/metrics")).text.splitlines() if "requests_total{" in line]
        assert counts == ['staleflow_endpoint_requests_total{status="401"} 1.0']


@pytest.mark.parametrize("data", [b"", b"GET /v1/mod", b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Slow: "])
async def test_an_incomplete_request_head_times_out(data: bytes) -> None:
    async with serving(body_s=0.2) as (server, _):
        result = await send_bytes(server, data)
        assert b" 408 " in result
        assert b"took longer than endpoint.body_s = 0.2 s" in result


async def test_an_incomplete_second_head_times_out_and_an_idle_connection_does_not() -> None:
    async with serving(body_s=0.2) as (server, _):
        reader, writer = await asyncio.open_connection(*address(server))
        for _ in range(2):
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in await reader.readuntil(b'{"status":"ok"}')
            await asyncio.sleep(0.4)
        writer.write(b"GET /hea")
        assert b" 408 " in await reader.read()
        writer.close()


async def test_connections_beyond_the_limit_get_503_with_retry_after() -> None:
    async with serving(max_connections=2) as (server, client):
        values = [await asyncio.open_connection(*address(server)) for _ in range(2)]
        result = await send_bytes(server, b"")
        assert result.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nRetry-After: 1\r\n" in result
        for _, writer in values:
            writer.close()
            await writer.wait_closed()
        await asyncio.sleep(0.05)
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("size", [100, 300_000])
async def test_a_client_still_sending_its_body_reads_the_503(size: int) -> None:
    """The client runs in a separate process. If the server closed at once, most of these connections were reset."""
    asks = (
        "import asyncio, httpx, sys\n"
        "async def ask():\n"
        "    async with httpx.AsyncClient(base_url=sys.argv[1], timeout=30) as client:\n"
        f"        answer = await client.post('/chat/completions', json={{'x': 'a' * {size}}})\n"
        "        return answer.status_code, answer.headers['retry-after']\n"
        "async def main():\n"
        "    assert {await ask() for _ in range(20)} == {(503, '1')}\n"
        "asyncio.run(main())\n"
    )
    # The idle one may be the only one for as long as the other process takes to start.
    async with serving(max_connections=1, body_s=300.0) as (server, _):
        _, writer = await asyncio.open_connection(*address(server))
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", asks, server.base_url)
        assert await process.wait() == 0
        writer.close()


async def test_keys_of_the_latest_closed_sessions_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_CLOSED_KEYS", 2)
    endpoint_sessions = Sessions()
    keys = []
    for _ in range(4):
        session = endpoint_sessions.open()
        keys.append(session.key)
        endpoint_sessions.close(session)
    codes = []
    for key in keys:
        with pytest.raises(RequestError) as refused:
            endpoint_sessions.find(key)
        codes.append(refused.value.code)
    assert codes == ["invalid_api_key"] * 2 + ["session_ended"] * 2


async def test_token_ids_beyond_the_vocabulary_are_rejected() -> None:
    server = EndpointServer(EndpointSettings(vocabulary=300))
    await server.start()
    session = server.sessions.open()
    async with httpx.AsyncClient(base_url=server.base_url.removesuffix("/v1")) as client:
        body = {"model": "m", "token_ids": [1, 300], "sampling_params": {"logprobs": 1}}
        result = await client.post(GENERATE, headers=auth_headers(session), json=body)
        assert result.status_code == 400
        why = "token_ids contains 300; the model's vocabulary has 300 tokens"
        assert result.json()["error"]["message"] == why
        assert not session.next_messages.done()
    await server.stop()
