"""The endpoint over HTTP: rejected requests, addresses and shutdown."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from staleflow.pipeline.config import actor_settings, loading
from staleflow.stores.errors import ConfigError
from staleflow.tasks.endpoint.requests import RequestError
from staleflow.tasks.endpoint.server import EndpointServer
from staleflow.tasks.endpoint.sessions import AgentSession, Sessions
from staleflow.tasks.episodes.episode_host import EpisodeHostSettings
from staleflow.tasks.settings.endpoint_settings import EndpointConfig, EndpointSettings
from tests.tasks.endpoint_serving import CHAT, GENERATE, HELLO, auth_headers, chat, send_bytes, serving, turn

LIMITED = {"model": "m", "messages": HELLO}
PARAMS = {"logprobs": 1}
SAID = b'{"role": "user", "content": "x"}'
SURROGATE = b'{"model": "m", "messages": [{"role": "user", "content": "x"}], %s}'
MALFORMED: list[tuple[str, Any]] = [
    (CHAT, b""), (CHAT, b"{"), (CHAT, b"[]"), (CHAT, b"null"), (CHAT, b"\xff\xfe"), (CHAT, b"[" * 100_000),
    (CHAT, b'{"model": "m", "messages": NaN}'), (CHAT, {}), (CHAT, {"model": "m"}), (CHAT, {"messages": HELLO}),
    (CHAT, {**LIMITED, "model": 3}), (CHAT, {**LIMITED, "messages": []}), (CHAT, {**LIMITED, "messages": "hello"}),
    (CHAT, {**LIMITED, "messages": ["hello"]}), (CHAT, {**LIMITED, "messages": [{}]}),
    (CHAT, {**LIMITED, "messages": [{"role": "user"}]}),
    (CHAT, {**LIMITED, "messages": [{"role": "user", "content": 3}]}),
    (CHAT, {**LIMITED, "messages": [{"role": "robot", "content": ""}]}),
    (CHAT, {**LIMITED, "messages": [{"role": ["user"], "content": ""}]}),
    (CHAT, {**LIMITED, "messages": [*HELLO, {"role": "assistant", "content": "hi"}]}),
    (CHAT, {**LIMITED, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
    (CHAT, {**LIMITED, "messages": [{"role": "user", "content": [{"type": "text"}]}]}),
    (CHAT, {**LIMITED, "messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}),
    (CHAT, {**LIMITED, "messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}, *HELLO]}),
    (CHAT, b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}'),
    (CHAT, SURROGATE % b'"tools": [{"type": "function", "function": {"name": "f", "description": "\\ud800"}}]'),
    *(
        (CHAT, SURROGATE % (b'"messages": [%s, {"role": "assistant", "tool_calls": [{"function": %s}]}, %s]' % each))
        for each in (
            (SAID, b'{"name": "f", "arguments": "\\ud800"}', SAID),
            (SAID, b'{"name": "\\ud800", "arguments": "{}"}', SAID),
        )
    ),
    (CHAT, {**LIMITED, "n": 8}), (CHAT, {**LIMITED, "n": 0}), (CHAT, {**LIMITED, "n": True}),
    (CHAT, {**LIMITED, "max_tokens": -1}), (CHAT, {**LIMITED, "max_tokens": 0}), (CHAT, {**LIMITED, "max_tokens": 1.5}),
    (CHAT, {**LIMITED, "max_completion_tokens": "many"}), (CHAT, {**LIMITED, "temperature": -1}),
    (CHAT, {**LIMITED, "temperature": "hot"}), (CHAT, b'{"model": "m", "messages": [], "temperature": Infinity}'),
    (CHAT, {**LIMITED, "top_p": "most"}), (CHAT, {**LIMITED, "stop": 3}), (CHAT, {**LIMITED, "stop": [""]}),
    (CHAT, {**LIMITED, "stop": ["x"] * 17}), (CHAT, {**LIMITED, "stop": "x" * 201}),
    (CHAT, {**LIMITED, "stop": ["x", 3]}), (CHAT, {**LIMITED, "stop": {"x": 1}}),
    (CHAT, {**LIMITED, "stop": "\ufffd"}),
    (CHAT, b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "stop": "\\ud800"}'),
    (CHAT, {**LIMITED, "stop_token_ids": [-1]}), (CHAT, {**LIMITED, "stop_token_ids": 3}),
    (CHAT, {**LIMITED, "include_stop_str_in_output": "yes"}),
    (CHAT, {**LIMITED, "stream": "yes"}), (CHAT, {**LIMITED, "logprobs": 5}), (CHAT, {**LIMITED, "top_logprobs": 5}),
    (CHAT, {**LIMITED, "tools": "all"}), (CHAT, {**LIMITED, "tools": [{"type": "web_search"}]}),
    (CHAT, {**LIMITED, "tool_choice": "required"}), (CHAT, {**LIMITED, "response_format": {"type": "json_object"}}),
    (CHAT, {**LIMITED, "stream_options": 3}), (CHAT, {**LIMITED, "functions": []}), (CHAT, {**LIMITED, "__class__": 1}),
    (GENERATE, {"model": "m", "sampling_params": PARAMS}),
    (GENERATE, {"model": "m", "token_ids": [1, -2], "sampling_params": PARAMS}),
    (GENERATE, {"model": "m", "token_ids": [True], "sampling_params": PARAMS}),
    (GENERATE, {"model": "m", "token_ids": [1]}), (GENERATE, {"model": "m", "token_ids": [1], "sampling_params": {}}),
    (GENERATE, {"model": "m", "token_ids": [1], "sampling_params": {"logprobs": None}}),
    (GENERATE, {"model": "m", "token_ids": [1], "sampling_params": PARAMS, "stream": True}),
    (GENERATE, {"model": "m", "token_ids": [1], "sampling_params": {**PARAMS, "allowed_token_ids": [1]}}),
    (GENERATE, {"model": "m", "token_ids": [1], "sampling_params": {**PARAMS, "stop_token_ids": 3}}),
    (GENERATE, {"model": "m", "token_ids": [1], "sampling_params": {**PARAMS, "guided_json": {}}}),
]  # fmt: skip


async def test_malformed_requests_get_one_line_errors() -> None:
    assert len(MALFORMED) >= 50
    async with serving() as (server, client):
        session, other = server.sessions.open(), server.sessions.open()
        waiting = asyncio.ensure_future(chat(client, other, HELLO))
        await other.next_messages
        for path, body in MALFORMED:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            result = await client.post(path, headers=auth_headers(session), content=content)
            assert 400 <= result.status_code < 500, (body, result.text)
            message = result.json()["error"]["message"]
            assert message
            assert "\n" not in message
            assert len(message) < 300
            assert "Traceback" not in result.text
        assert not session.next_messages.done()
        for method, path in (("GET", CHAT), ("DELETE", "/v1/models"), ("POST", "/v1/embeddings"), ("GET", "/")):
            assert (await client.request(method, path)).status_code in (404, 405)
        other.send_turn(turn("hi"))
        assert (await waiting).status_code == 200


async def test_oversized_slow_and_excess_requests_are_rejected() -> None:
    async with serving(max_body_kib=4, body_s=0.3, max_requests=2) as (server, client):
        session, other = server.sessions.open(), server.sessions.open()
        long = [{"role": "user", "content": "x" * 5000}]
        result = await chat(client, session, long)
        assert (result.status_code, result.json()["error"]["message"]) == (
            413, "the body is longer than endpoint.max_body_kib = 4",
        )  # fmt: skip
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.key}\r\n"
        chunk = b"%x\r\n%s\r\n" % (3000, b"x" * 3000)
        assert b" 413 " in await send_bytes(server, f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunk * 2)
        assert b" 408 " in await send_bytes(server, f"{head}Content-Length: 100\r\n\r\n{{".encode())
        assert b" 400 " in await send_bytes(server, b"nonsense\r\n\r\n")
        waiting = [asyncio.ensure_future(chat(client, item, HELLO)) for item in (session, other)]
        await asyncio.gather(session.next_messages, other.next_messages)
        busy = await client.get("/v1/models", headers=auth_headers(session))
        assert (busy.status_code, busy.headers["Retry-After"]) == (429, "1")
        for item in (session, other):
            item.send_turn(turn("hi"))
        assert [(await item).status_code for item in waiting] == [200, 200]
        metrics = (await client.get("/metrics")).text
        assert 'staleflow_endpoint_requests_total{status="429"} 1.0' in metrics
        assert "staleflow_endpoint_sessions 2.0" in metrics
        assert (await client.get("/health")).json() == {"status": "ok"}


@pytest.mark.parametrize("data", [
    b"nonsense\r\n\r\n", b"GET\r\n\r\n", b"GET /health\r\n\r\n", b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /health HTTP/1.1\r\nHost x\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n",
    b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 100_000,
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %KEY\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nnonsense\r\n\r\n",
])  # fmt: skip
async def test_invalid_http_gets_a_json_error(data: bytes) -> None:
    async with serving() as (server, client):
        session = server.sessions.open()
        result = await send_bytes(server, data.replace(b"%KEY", session.key.encode()), wait_s=20.0)
        *_, head, body = result.split(b"\r\n\r\n")
        assert b"HTTP/1.1 400 " in head
        assert b"Content-Type: application/json" in head
        error = json.loads(body)["error"]
        assert (error["code"], "\n" in error["message"]) == ("invalid_http", False)
        assert (await client.get("/health")).status_code == 200
        assert "in_flight 0.0" in (await client.get("/metrics")).text


async def test_a_request_to_a_finished_episode_gets_410() -> None:
    async with serving() as (server, client):
        session = server.sessions.open()
        waiting = asyncio.ensure_future(chat(client, session, HELLO))
        await session.next_messages
        session.send_turn(turn("hi"))
        assert (await waiting).status_code == 200
        server.sessions.close(session)
        late = [
            await chat(client, session, HELLO),
            await client.get("/v1/models", headers=auth_headers(session)),
            await client.get(f"/session/{session.key}/v1/models"),
            await client.post(GENERATE, headers={"X-Session-ID": session.key}, content=b"nonsense"),
        ]
        assert [(item.status_code, item.json()["error"]["code"]) for item in late] == [(410, "session_ended")] * 4


async def test_internal_errors_are_hidden_from_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(self: AgentSession, request: object) -> None:
        raise RuntimeError("a secret of ours")

    monkeypatch.setattr(AgentSession, "request_turn", fails)
    async with serving() as (server, client):
        result = await chat(client, server.sessions.open(), HELLO)
        assert result.status_code == 500
        assert "secret" not in result.text


async def test_a_stopping_endpoint_replies_503_with_retry_after() -> None:
    async with serving() as (server, client):
        stopping = asyncio.ensure_future(server.stop())
        await asyncio.sleep(0)
        try:
            result = await client.get("/v1/models", headers=auth_headers(server.sessions.open()))
            assert (result.status_code, result.headers["Retry-After"]) == (503, "1")
        except httpx.ConnectError:  # it no longer listens, which clients take alike
            pass
        await stopping


async def test_an_unusable_address_is_named_in_the_error() -> None:
    async with serving() as (server, _):
        port = int(server.base_url.removesuffix("/v1").rpartition(":")[2])
        taken = EndpointServer(EndpointSettings(config=EndpointConfig(port=port)))
        with pytest.raises(ConfigError, match=f"endpoint.port = {port}: cannot be listened on"):
            await taken.start()


async def test_an_endpoint_with_a_certificate_serves_https(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    server = EndpointServer(EndpointSettings(config=EndpointConfig(tls_cert=str(cert), tls_key=str(key))))
    await server.start()
    try:
        assert server.base_url.startswith("https://")
        async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=str(cert))) as client:
            health = server.base_url.removesuffix("/v1") + "/health"
            assert (await client.get(health)).json() == {"status": "ok"}
    finally:
        await server.stop()
    bad = EndpointServer(EndpointSettings(config=EndpointConfig(tls_cert=str(tmp_path / "none"))))
    with pytest.raises(ConfigError, match=r"endpoint\.tls_cert"):
        await bad.start()


async def test_unknown_keys_get_503_while_a_replacement_restarts_its_episodes() -> None:
    seconds = 100.0

    def status(sessions: Sessions, key: str) -> int:
        with pytest.raises(RequestError) as error:
            sessions.find(key)
        assert (error.value.retry_s is not None) == (error.value.status == 503)
        return error.value.status

    lost, sessions = Sessions().open(), Sessions(now=lambda: seconds)
    assert status(sessions, lost.key) == 401, "it replaces no other endpoint"
    sessions.expect_predecessor_keys(30.0)
    mine, ended = sessions.open(), sessions.open()
    assert status(sessions, lost.key) == 503
    assert sessions.find(mine.key) is mine
    for wrong in ("", "none", "a.b", f"{lost.key}x", lost.id):
        assert status(sessions, wrong) == 401, "it is not a key of any endpoint"
    sessions.close(ended)
    assert status(sessions, ended.key) == 410, "it is known"
    for wrong in (ended.id, f"{ended.id}.", f"{ended.id}.{mine.key.partition('.')[2]}"):
        assert status(sessions, wrong) in (401, 503), "only its secret is checked"
    seconds = 130.0
    assert status(sessions, lost.key) == 401
    assert sessions.find(mine.key) is mine


async def test_a_replacement_endpoint_replies_503_to_unknown_keys() -> None:
    lost = Sessions().open()
    for unknown_key_grace_s, status, retry in ((0.0, 401, None), (60.0, 503, "1")):
        server = EndpointServer(EndpointSettings(unknown_key_grace_s=unknown_key_grace_s))
        await server.start()
        async with httpx.AsyncClient(base_url=server.base_url.removesuffix("/v1")) as client:
            result = await chat(client, lost, HELLO)
            assert (result.status_code, result.headers.get("Retry-After")) == (status, retry)
        await server.stop()


def test_environment_settings_of_a_replacement_set_replaces_s(job: Path, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("async def run(base_url, key, task):\n    return 1.0\n")
    config = loading.load(job, (f"task.source=agent:{tmp_path}/agent.py:run", "task.options={}", "deadlines.call_s=7"))
    for replaces, expected in ((False, 0.0), (True, 7.0)):
        result = actor_settings.environment_settings(config, is_replacement=replaces)
        assert isinstance(result, EpisodeHostSettings)
        assert result.source.endpoint.unknown_key_grace_s == expected
