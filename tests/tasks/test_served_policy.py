"""A served policy answers each request on its own, for any client with the key."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from click.testing import CliRunner

from staleflow.cli.serve import chat, serve
from staleflow.pipeline.stored_runs.serving import make_serving_plan
from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectory import FinishReason, TrajectoryId
from staleflow.tasks.endpoint.replies import parse_tool_calls, render_tool_calls
from staleflow.tasks.endpoint.requests import ChatMessage, ChatRequest, FunctionCall, RequestError
from staleflow.tasks.endpoint.served_policy import ServedPolicy
from staleflow.tasks.endpoint.server import EndpointServer
from staleflow.tasks.engines.base import FailedRequest, Request, SampledTokens, TokenScores
from staleflow.tasks.engines.transformers import forward_logprobs, load_model
from staleflow.tasks.rendering.chat_tokenizer import ChatTokenizer, load_chat_tokenizer
from staleflow.tasks.settings.endpoint_settings import EndpointConfig, EndpointSettings
from tests.support.segments import delivery, sampled_segment
from tests.tasks.chat_models import chat_tokenizer

TEXTS = ChatTokenizer(chat_tokenizer("smollm2"))


class Echo:
    """An engine that repeats the last tokens of its prompt and fails on prompts of 13 tokens."""

    def __init__(self) -> None:
        self._done: queue.Queue[SampledTokens | FailedRequest] = queue.Queue()
        self.closed = threading.Event()

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if len(request.tokens) == 13:
                self._done.put(
                    FailedRequest(trajectory=request.trajectory, route_number=request.route_number, error="of ours")
                )
                continue
            segment = sampled_segment(request.tokens[-request.max_new_tokens :], -0.5)
            number, finish = request.route_number, FinishReason.LENGTH
            self._done.put(delivery(request.trajectory, segment, route_number=number, finish=finish))

    def events(self, timeout_s: float) -> list[SampledTokens | FailedRequest]:
        try:
            return [self._done.get(timeout=timeout_s)]
        except queue.Empty:
            return []

    def abort(self, trajectories: Sequence[TrajectoryId]) -> None:
        """Do nothing, since no request is running."""

    def close(self) -> None:
        self.closed.set()


async def test_requests_with_the_right_key_are_answered_independently() -> None:
    engine = Echo()

    async def work() -> None:
        policy = ServedPolicy(
            engine, TEXTS, "secret", chat=False, observation_template=" {observation}", max_context=20, max_new_tokens=6  # type: ignore[arg-type]
        )  # fmt: skip
        server = EndpointServer(EndpointSettings(model="mine"), policy)
        await server.start()
        async with httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:

            async def ask(*texts: str, key: str = "secret", **more: object) -> httpx.Response:
                roles = ("user", "assistant")
                messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
                body = {"model": "m", "messages": messages, **more}
                return await client.post("/chat/completions", headers={"Authorization": f"Bearer {key}"}, json=body)

            result = await asyncio.gather(ask("abcdefgh"), ask("xyz", "uvw", "rst"), ask("abcdefgh", max_tokens=2))
            said = [item.json()["choices"][0]["message"]["content"] for item in result]
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

    async with asyncio.timeout(30):
        await work()
    assert engine.closed.is_set()


async def test_a_served_policy_samples_at_the_temperature_of_the_request(tiny_model: Path) -> None:
    """Two requests at temperature 0 get the greedy response regardless of other sampling parameters. Unsupported
    samples greedily; what the engine cannot do is refused, and never answered with other sampling."""
    plan = make_serving_plan(str(tiny_model), ("rollout.max_new_tokens=12",))

    async def work() -> None:
        policy = plan.build("secret")
        server = EndpointServer(EndpointSettings(model="mine", temperature=1.0), policy)
        await server.start()
        async with httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:

            async def generate(**sampling: object) -> httpx.Response:
                params = {"logprobs": 1, "max_tokens": 12, "stop_token_ids": [], **sampling}
                body = {"model": "m", "token_ids": [7, 8, 9], "sampling_params": params}
                headers = {"Authorization": "Bearer secret"}
                return await client.post("/inference/v1/generate", headers=headers, json=body)

            greedy = [
                (await generate(temperature=0)).json(),
                (await generate(temperature=0, top_p=0.5, top_k=3, min_p=0.1, seed=4)).json(),
            ]
            ids = [item["choices"][0]["token_ids"] for item in greedy]
            assert ids[0] == ids[1] == greedy_response(tiny_model, (7, 8, 9), len(ids[0]))
            assert "overridden" not in greedy[1]
            sharp, flat = [
                [
                    element["logprob"]
                    for element in (await generate(temperature=t)).json()["choices"][0]["logprobs"]["content"]
                ]
                for t in (0.1, 50.0)
            ]
            uniform = -np.log(tokenizer_size(tiny_model))
            assert np.abs(np.asarray(flat) - uniform).max() < 0.1 < np.abs(np.asarray(sharp) - uniform).max()
            for sampling in (
                {"top_p": 0.9},
                {"temperature": 0.5, "seed": 3},
                {"temperature": 0, "logit_bias": {"3": 9}},
            ):
                refused = await generate(**sampling)
                assert (refused.status_code, refused.json()["error"]["code"]) == (400, "sampling_refused")
                assert "samples by temperature alone" in refused.json()["error"]["message"]
            codes = [(await generate(temperature=1 + t / 10, max_tokens=1)).status_code for t in range(12)]
            assert codes == [200] * 12
        await server.stop()
        policy.close()

    async with asyncio.timeout(240):
        await work()


@asynccontextmanager
async def completions(model: Path) -> AsyncIterator[Callable[..., Awaitable[httpx.Response]]]:
    """A server of a model, as a function that sends a request to /v1/completions."""
    plan = make_serving_plan(str(model), ("rollout.max_new_tokens=4",))
    async with (
        plan.serve(EndpointConfig(), "secret") as server,
        httpx.AsyncClient(base_url=server.base_url, timeout=60) as client,
    ):

        async def send(**fields: object) -> httpx.Response:
            body = {"model": "m", **fields}
            return await client.post("/completions", headers={"Authorization": "Bearer secret"}, json=body)

        yield send


async def test_completions_continue_texts_and_token_ids(tiny_model: Path) -> None:
    texts = load_chat_tokenizer(str(tiny_model))
    async with asyncio.timeout(240), completions(tiny_model) as send:
        greedy = {"temperature": 0, "max_tokens": 12, "seed": 3}  # more than the default
        single = (await send(prompt=[7, 8, 9], **greedy, return_token_ids=True, logprobs=0)).json()["choices"][0]
        expected = greedy_response(tiny_model, (7, 8, 9), len(single["token_ids"]))
        assert single["token_ids"] == expected
        assert single["text"] == texts.text(expected)
        assert single["logprobs"]["tokens"] == [f"token_id:{id}" for id in expected]
        both = (await send(prompt=[[7, 8, 9], [9, 8]], **greedy)).json()
        assert [choice["index"] for choice in both["choices"]] == [0, 1]
        assert both["choices"][0]["text"] == single["text"] != both["choices"][1]["text"]
        assert both["usage"]["prompt_tokens"] == 5
        by_text = (await send(prompt=texts.text([7, 8, 9]), **greedy)).json()["choices"][0]
        assert (by_text["text"], by_text["logprobs"]) == (single["text"], None)
        stopped = (await send(prompt=[7, 8, 9], **greedy, stop=[single["text"][2:4]])).json()["choices"][0]
        assert stopped["text"] == single["text"][: single["text"].index(single["text"][2:4])]
        assert stopped["finish_reason"] == "stop"
        short = (await send(prompt=[7, 8, 9], return_token_ids=True, temperature=0)).json()["choices"][0]
        assert len(short["token_ids"]) <= 4


async def test_a_prompt_is_scored_with_echo(tiny_model: Path) -> None:
    """Many requests at the same time get the scores of their own prompts."""
    prompts = [[7, 8, 9, 3 + i % 10] + [5] * (i % 7) for i in range(20)]
    async with asyncio.timeout(240), completions(tiny_model) as send:
        fields = {"echo": True, "logprobs": 1, "temperature": 0, "max_tokens": 1, "seed": 1234}
        replies = await asyncio.gather(*(send(prompt=[prompt], **fields) for prompt in prompts))
        for prompt, reply in zip(prompts, replies, strict=True):
            (choice,) = reply.json()["choices"]
            logprobs, top = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
            assert logprobs[0] is top[0] is None
            assert len(logprobs) == len(top) == len(prompt) + 1
            assert logprobs[1:-1] == pytest.approx(forward_logprobs(load(tiny_model), prompt), abs=1e-4)
            (likeliest,) = greedy_response(tiny_model, tuple(prompt), 1)
            assert choice["logprobs"]["tokens"] == [f"token_id:{id}" for id in (*prompt, likeliest)]
            assert all(own <= max(others.values()) for own, others in zip(logprobs[1:], top[1:], strict=True))
            assert logprobs[-1] == max(top[-1].values())
        only = (await send(prompt=prompts[0], echo=True, logprobs=1, max_tokens=0)).json()["choices"][0]
        assert only["logprobs"]["token_logprobs"][0] is None
        assert only["logprobs"]["token_logprobs"][1:] == pytest.approx(
            replies[0].json()["choices"][0]["logprobs"]["token_logprobs"][1:-1], abs=1e-4
        )
        assert only["text"] == load_chat_tokenizer(str(tiny_model)).text(prompts[0], keep_special=True)


async def test_completions_that_are_not_understood_are_refused(tiny_model: Path) -> None:
    score = {"echo": True, "logprobs": 1, "temperature": 0}
    async with asyncio.timeout(240), completions(tiny_model) as send:
        for fields, reason in (
            ({"prompt": []}, "prompt has 0 texts; a request may have 1 to 128"),
            ({"prompt": [[]]}, "prompt must be a list of token ids"),
            ({"prompt": [7, "a"]}, "prompt must be a list of token ids"),
            ({"prompt": [10**6]}, "contains 1000000; the model's vocabulary has"),
            ({"prompt": "a", "logprobs": 1}, "logprobs must be 0, or 1 with echo"),
            ({"prompt": "a", "max_tokens": 0}, "max_tokens must be a whole number of at least 1"),
            ({"prompt": "a", "stream": True}, "use /v1/chat/completions to stream"),
            ({"prompt": "a", "best_of": 2}, "best_of: a served policy samples by temperature alone"),
            ({"prompt": "a", "suffix": "b"}, "suffix: unknown field"),
            ({"prompt": "a", **score, "max_tokens": 2}, "echo: a prompt is only scored"),
            ({"prompt": "a", **score, "max_tokens": 1, "temperature": 1}, "echo: a prompt is only scored"),
            ({"prompt": "a", "echo": True, "max_tokens": 0}, "echo: a prompt is only scored"),
        ):
            refused = await send(**fields)
            assert (refused.status_code, reason in refused.json()["error"]["message"]) == (400, True), refused.text


class Silent(Echo):
    """An engine that answers no request, and fails once it is broken. It cannot score."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[TokenScores]:
        raise RuntimeError("out of memory")

    def __init__(self) -> None:
        super().__init__()
        self.aborted: list[TrajectoryId] = []
        self.broken = threading.Event()

    def submit(self, requests: Sequence[Request]) -> None: ...

    def abort(self, trajectories: Sequence[TrajectoryId]) -> None:
        self.aborted += trajectories

    def events(self, timeout_s: float) -> list[SampledTokens | FailedRequest]:
        if self.broken.wait(timeout_s):
            raise RuntimeError("out of memory")
        return []


def serve_silently(engine: Silent) -> ServedPolicy:
    return ServedPolicy(
        engine, TEXTS, "secret", chat=False, observation_template=" {observation}", max_context=20, max_new_tokens=6  # type: ignore[arg-type]
    )  # fmt: skip


TOKENS = ChatRequest(model="m", token_ids=(7, 8, 9))


async def test_the_request_of_a_client_that_left_is_aborted_and_forgotten() -> None:
    policy = serve_silently(engine := Silent())
    turn = asyncio.ensure_future(policy.request_turn(TOKENS))
    await asyncio.sleep(0)
    assert len(policy) == 1
    turn.cancel()
    await asyncio.wait({turn})
    assert engine.aborted == [0]
    assert len(policy) == 0
    policy.close()


async def test_requests_to_an_engine_that_has_failed_are_refused() -> None:
    policy = serve_silently(engine := Silent())
    turn = asyncio.ensure_future(policy.request_turn(TOKENS))
    await asyncio.sleep(0)
    engine.broken.set()
    async with asyncio.timeout(60):
        with pytest.raises(RequestError, match="the engine failed on this request"):
            await turn
        with pytest.raises(RequestError, match="the engine has ended; start the server again"):
            await policy.request_turn(TOKENS)
    policy.close()


async def test_a_prompt_that_cannot_be_scored_is_refused_and_later_ones_are_tried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = serve_silently(Silent())
    request = ChatRequest(model="m", token_ids=(7, 8, 9), echo=True)
    async with asyncio.timeout(60):
        for _ in range(2):
            with pytest.raises(RequestError, match="the engine failed on this request"):
                await policy.request_turn(request)
    assert "could not score 1 prompts" in caplog.text
    policy.close()


def load(model: Path) -> Any:
    return load_model(str(model), "float32", "cpu", "sdpa")


def greedy_response(model: Path, prompt: tuple[int, ...], length: int) -> list[int]:
    """Return the likeliest tokens after a prompt, with one forward pass per token."""
    import torch
    from transformers import AutoModelForCausalLM

    policy, ids = AutoModelForCausalLM.from_pretrained(model), list(prompt)
    with torch.no_grad():
        for _ in range(length):
            ids.append(int(policy(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def tokenizer_size(model: Path) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(model).vocab_size)


def test_rendered_tool_calls_parse_to_the_same_calls() -> None:
    call = FunctionCall(name="add", arguments='{"a": 1}')
    message = ChatMessage(role="assistant", content="Now.", calls=(call,))
    assert parse_tool_calls(render_tool_calls(message)) == ("Now.", (call,))


def test_runs_that_cannot_be_served_give_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[model]\npath = "somewhere"\n')
    with pytest.raises(ConfigError, match="the run has no checkpoint; let it end"):
        make_serving_plan(str(tmp_path))
    (tmp_path / "config.toml").write_text('[rollout.engine]\nname = "emulated"\n')
    with pytest.raises(ConfigError, match="its engine is emulated, so it has no policy to serve"):
        make_serving_plan(str(tmp_path))
    for command in (serve, chat):
        result = CliRunner().invoke(command, ["no/such/folder"])
        assert isinstance(result.exception, ConfigError)
        assert "no such folder" in str(result.exception)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("rollout.engine.name=emulated", "its engine is emulated, so it has no policy to serve"),
        ("model.path=other", "--set model.path=other: the model is that of .*; serve another one by its own name"),
        ("model={path='other'}", "the model is that of .*; serve another one by its own name"),
    ],
)
def test_overrides_cannot_replace_the_served_model(tiny_model: Path, override: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_serving_plan(str(tiny_model), (override,))


def test_default_max_new_tokens_of_a_served_model_is_half_its_context(tiny_model: Path) -> None:
    plan = make_serving_plan(str(tiny_model))
    assert plan.config.rollout.max_new_tokens == min(512, plan.facts.context_length // 2)
    assert make_serving_plan(str(tiny_model), ("rollout.max_new_tokens=3",)).config.rollout.max_new_tokens == 3


def test_a_set_task_chat_is_kept_for_a_served_model(tiny_model: Path) -> None:
    assert [make_serving_plan(str(tiny_model), (f"task.chat={c}",)).config.task.chat for c in ("false", "true")] == [
        False, True,
    ]  # fmt: skip
