"""A policy served for itself: every request is answered alone, by whoever has the key."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest
from click.testing import CliRunner

from staleflow.cli.serve import chat, serve
from staleflow.pipeline.stored_runs.serving import serving_plan
from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectory import FinishReason, InstanceId, PolicyVersion, Segment, TrajectoryId
from staleflow.tasks.endpoint.replies import called, called_again
from staleflow.tasks.endpoint.requests import CalledFunction, ChatMessage
from staleflow.tasks.endpoint.served_policy import ServedPolicy
from staleflow.tasks.endpoint.server import EndpointServer
from staleflow.tasks.engines.base import Failed, Request, Sampled
from staleflow.tasks.rendering.chat_tokenizer import TokenizerTexts
from staleflow.tasks.settings.endpoint_settings import EndpointSettings
from tests.tasks.chat_models import chat_tokenizer

TEXTS = TokenizerTexts(chat_tokenizer("smollm2"))


class Echo:
    """An engine that says again the last tokens of its prompt, as many as it may; it fails on prompts of 13 tokens."""

    def __init__(self) -> None:
        self._done: queue.Queue[Sampled | Failed] = queue.Queue()
        self.closed = threading.Event()

    def submit(self, requests: Sequence[Request]) -> None:
        for one in requests:
            if len(one.tokens) == 13:
                self._done.put(Failed(trajectory=one.trajectory, epoch=one.epoch, error="of ours"))
                continue
            tokens = np.asarray(one.tokens[-one.max_new_tokens :], np.int32)
            segment = Segment(
                version=PolicyVersion(0), instance=InstanceId("a"), tokens=tokens,
                logprobs=np.full(len(tokens), -0.5, np.float32),
            )  # fmt: skip
            self._done.put(
                Sampled(
                    trajectory=one.trajectory, epoch=one.epoch, first=0, segments=(segment,),
                    finish=FinishReason.LENGTH,
                )
            )  # fmt: skip

    def events(self, timeout_s: float) -> list[Sampled | Failed]:
        try:
            return [self._done.get(timeout=timeout_s)]
        except queue.Empty:
            return []

    def abort(self, trajectories: Sequence[TrajectoryId]) -> None:
        """Nothing runs."""

    def close(self) -> None:
        self.closed.set()


def test_every_request_is_answered_alone_by_whoever_has_the_key() -> None:
    engine = Echo()

    async def work() -> None:
        policy = ServedPolicy(
            engine, TEXTS, "secret", chat=False, template=" {observation}", room=20, max_new_tokens=6  # type: ignore[arg-type]
        )  # fmt: skip
        server = EndpointServer(EndpointSettings(model="mine"), policy)
        await server.start()
        async with httpx.AsyncClient(base_url=server.base_url, timeout=10) as client:

            async def ask(*texts: str, key: str = "secret", **more: object) -> httpx.Response:
                roles = ("user", "assistant")
                messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
                body = {"model": "m", "messages": messages, **more}
                return await client.post("/chat/completions", headers={"Authorization": f"Bearer {key}"}, json=body)

            found = await asyncio.gather(ask("abcdefgh"), ask("xyz", "uvw", "rst"), ask("abcdefgh", max_tokens=2))
            said = [one.json()["choices"][0]["message"]["content"] for one in found]
            assert said == ["cdefgh", "vw rst", "gh"]
            assert (await ask("a", key="other")).status_code == 401
            long = await ask("a" * 30)
            assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
            empty = await ask("")
            assert (empty.status_code, empty.json()["error"]["code"]) == (400, "invalid_value")
            failed = await ask("a" * 13)
            assert (failed.status_code, failed.headers["Retry-After"]) == (503, "1")
            assert "of ours" not in failed.text
            headers = {"Authorization": "Bearer secret"}
            body = {"model": "m", "token_ids": [7, 8, 9], "sampling_params": {"logprobs": 1, "max_tokens": 2}}
            ids = await client.post("/inference/v1/generate", headers=headers, json=body)
            assert ids.json()["choices"][0]["token_ids"] == [8, 9]
            assert (await client.get("/models", headers=headers)).json()["data"][0]["id"] == "mine"
        await server.stop()
        policy.close()

    async def limited() -> None:
        async with asyncio.timeout(30):
            await work()

    asyncio.run(limited())
    assert engine.closed.is_set()


def test_calls_of_tools_are_written_as_they_are_read() -> None:
    call = CalledFunction(name="add", arguments='{"a": 1}')
    message = ChatMessage(role="assistant", content="Now.", calls=(call,))
    assert called(called_again(message)) == ("Now.", (call,))


def test_what_cannot_be_served_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[model]\npath = "somewhere"\n')
    with pytest.raises(ConfigError, match="the run has no checkpoint; let it end"):
        serving_plan(str(tmp_path))
    (tmp_path / "config.toml").write_text('[rollout.engine]\nname = "emulated"\n')
    with pytest.raises(ConfigError, match="its engine is emulated, so it has no policy to serve"):
        serving_plan(str(tmp_path))
    for command in (serve, chat):
        result = CliRunner().invoke(command, ["no/such/folder"])
        assert isinstance(result.exception, ConfigError)
        assert "no such folder" in str(result.exception)


def test_a_model_alone_answers_as_long_as_half_of_its_context(tiny_model: Path) -> None:
    plan = serving_plan(str(tiny_model))
    assert plan.config.rollout.max_new_tokens == min(512, plan.facts.context // 2)
    assert serving_plan(str(tiny_model), ("rollout.max_new_tokens=3",)).config.rollout.max_new_tokens == 3
