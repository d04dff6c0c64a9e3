"""The probe before benchmark tasks finds servers whose figures would be wrong."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from staleflow.pipeline.stored_runs import suites
from staleflow.pipeline.stored_runs.serving import ServingPlan, make_serving_plan
from staleflow.pipeline.stored_runs.suites import SuiteMetric, SuiteSettings, evaluate_plan
from staleflow.stores.errors import ConfigError, SuiteFailed
from staleflow.tasks.endpoint import replies, server
from staleflow.tasks.endpoint.requests import RequestError
from staleflow.tasks.endpoint.served_policy import ServedPolicy
from staleflow.tasks.engines.base import Request, TokenScores
from staleflow.tasks.engines.transformers import TransformersEngine
from staleflow.tasks.settings.endpoint_settings import EndpointConfig

SETTINGS = SuiteSettings(tasks=("gsm8k",))
METRIC = SuiteMetric(task="gsm8k", metric="acc", filter="none", value=0.5, stderr=0.1, num_documents=20, num_shots=0)
Change = Callable[[pytest.MonkeyPatch], None]


def without_prompt_logprobs(patch: pytest.MonkeyPatch) -> None:
    """As servers do that return logprobs of sampled tokens only."""
    build = replies.completions_body

    def sampled_only(*args: Any) -> dict[str, Any]:
        body = build(*args)
        for choice in body["choices"]:
            count = body["usage"]["completion_tokens"]
            choice["logprobs"] = {
                name: values and values[len(values) - count :] for name, values in choice["logprobs"].items()
            }
        return body

    patch.setattr(server, "completions_body", sampled_only)


def without_logprobs(patch: pytest.MonkeyPatch) -> None:
    build = replies.completions_body

    def no_logprobs(*args: Any) -> dict[str, Any]:
        body = build(*args)
        for choice in body["choices"]:
            choice["logprobs"] = None
        return body

    patch.setattr(server, "completions_body", no_logprobs)


def at_temperature_one(patch: pytest.MonkeyPatch) -> None:
    """As if the server ignored temperature 0."""
    submit = TransformersEngine.submit

    def sample(engine: TransformersEngine, requests: Sequence[Request]) -> None:
        submit(engine, [dataclasses.replace(request, greedy=False) for request in requests])

    patch.setattr(TransformersEngine, "submit", sample)


def change_scores(patch: pytest.MonkeyPatch, change: Callable[[TokenScores], TokenScores]) -> None:
    score = TransformersEngine.score

    def changed(engine: TransformersEngine, sequences: Sequence[Sequence[int]]) -> list[TokenScores]:
        return [change(scores) for scores in score(engine, sequences)]

    patch.setattr(TransformersEngine, "score", changed)


def shifted(scores: TokenScores) -> TokenScores:
    return dataclasses.replace(scores, logprobs=(*scores.logprobs[1:], -20.0))


def of_less_likely_tokens(scores: TokenScores) -> TokenScores:
    return dataclasses.replace(scores, top_logprobs=tuple(x + 0.2 for x in scores.top_logprobs))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without_prompt_logprobs, r"with echo = true it returns \d+ logprobs: choices would be scored by others"),
        (without_logprobs, "its reply cannot be read: TypeError"),
        (at_temperature_one, "it does not obey temperature = 0: it sampled a token although another is"),
        (lambda patch: change_scores(patch, shifted), r"differ by [\d.]+ nats on average .*; 0.1 are allowed"),
        (lambda patch: change_scores(patch, of_less_likely_tokens), "another is 0.2 nats likelier"),
    ],
)
async def test_a_server_whose_figures_would_be_wrong_runs_no_task(
    change: Change, reason: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suites, "run_suite", None)
    change(monkeypatch)
    async with asyncio.timeout(240):
        with pytest.raises(SuiteFailed, match=f"http://.*: .*{reason}.*; no task was run"):
            await evaluate_plan(make_serving_plan(str(tiny_model)), SETTINGS, "")


async def test_a_right_server_runs_the_tasks(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started here, and started before."""
    servers = []

    async def run_suite(settings: SuiteSettings, server: Any, python: str) -> list[SuiteMetric]:
        servers.append(server)
        return [METRIC]

    monkeypatch.setattr(suites, "run_suite", run_suite)
    plan = make_serving_plan(str(tiny_model))
    async with asyncio.timeout(240):
        assert await evaluate_plan(plan, SETTINGS, "") == [METRIC]
        async with plan.serve(EndpointConfig(), "secret") as running:
            monkeypatch.setattr(ServingPlan, "serve", None)
            assert await evaluate_plan(plan, SETTINGS, "", url=running.base_url, key="secret") == [METRIC]
            with pytest.raises(ConfigError, match="it lists no model: HTTP Error 401"):
                await evaluate_plan(plan, SETTINGS, "", url=running.base_url, key="other")
    assert servers[1].url == running.base_url
    assert {(item.model, item.context, item.concurrency) for item in servers} == {(str(tiny_model), plan.context, 64)}


async def test_a_wrong_server_of_a_url_is_an_error_of_the_input(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_serving_plan(str(tiny_model))
    at_temperature_one(monkeypatch)
    async with asyncio.timeout(240), plan.serve(EndpointConfig(), "secret") as running:
        with pytest.raises(ConfigError, match="does not obey temperature = 0"):
            await evaluate_plan(plan, SETTINGS, "", url=running.base_url, key="secret")
    with pytest.raises(ConfigError, match=r"it lists no model: .*refused"):
        await evaluate_plan(plan, SETTINGS, "", url="http://127.0.0.1:9/v1")


async def test_a_completion_that_is_refused_gives_its_reason(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServedPolicy, "request_turn", refuse)
    with pytest.raises(SuiteFailed, match="it refuses what lm-eval sends: 400 no scores here; no task was run"):
        await evaluate_plan(make_serving_plan(str(tiny_model)), SETTINGS, "")


async def refuse(policy: ServedPolicy, request: Any) -> None:
    raise RequestError(400, "no scores here")
