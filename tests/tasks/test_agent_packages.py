"""Agents of other packages: an OpenEnv environment and a verifiers taskset."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from staleflow.stores.errors import ConfigError
from staleflow.tasks.environments.coroutine_environments import AgentTask
from staleflow.tasks.environments.environment_config import EnvironmentConfig
from staleflow.tasks.episodes.episode_host import EpisodeHost, EpisodeHostSettings
from staleflow.tasks.episodes.openenv_agents import BadAction, parse_action
from staleflow.tasks.episodes.step_results import EpisodeKey, HostedStepResult
from staleflow.tasks.rendering.sampled_turn import SampledTurn
from staleflow.tasks.rendering.task_source import Task
from staleflow.tasks.rendering.turn_params import split_params
from staleflow.tasks.settings.source_kinds import SourceType, open_source
from staleflow.tasks.settings.task_config import TaskConfig
from staleflow.tasks.sources.task_sources import SourceSettings
from tests.support.games import host_episode
from tests.tasks.chat_models import chat_tokenizer
from tests.tasks.test_agent_clients import capture_server, free_port, serving


def settings(source: str, options: dict[str, Any], **limits: Any) -> EpisodeHostSettings:
    config = EnvironmentConfig(**{"step_timeout_s": 60.0, "max_turns": 3, **limits})
    return EpisodeHostSettings(
        source=SourceSettings(task=TaskConfig(source=source, options=options), seed=3, environment_config=config)
    )


async def played(episodes: EpisodeHost, task: Task, turns: Sequence[SampledTurn]) -> list[HostedStepResult]:
    texts = [turn.text for turn in turns]
    key = EpisodeKey(group=0, member=0)
    return [
        await episodes.step(key, task.record, texts[: n + 1], truncated=False, latest_turn=turn)
        for n, turn in enumerate(turns)
    ]


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment that the OpenEnv command creates: it echoes the action and rewards its length."""
    pytest.importorskip("openenv.core")
    folder = tmp_path_factory.mktemp("rooms")
    script = "from openenv.cli.__main__ import main; main()"
    subprocess.run([sys.executable, "-c", script, "init", "echo_room"], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize(("source", "package"), [("verifiers:wordle", "verifiers"), ("openenv:room", "openenv")])
def test_an_uninstalled_package_is_named_in_the_error(
    source: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"needs the package {package}"):
        open_source(SourceType.AGENT, source, {}, f"task.source = {source!r}")


@pytest.mark.parametrize(("source", "options", "message"), [
    ("openenv:http://127.0.0.1:1", {"resets": {}}, r"task.options.resets: unknown; there are reset, system, field"),
    ("openenv:http://127.0.0.1:1", {"reset": "x"}, r"task.options.reset = 'x' must be a table"),
    ("verifiers:wordle", {"held_out_tasks": "3"}, r"task.options.held_out_tasks = '3' must be a whole number"),
    ("verifiers:wordle", {"held_out_tasks": -1}, r"task.options.held_out_tasks = -1 must be at least 0"),
    ("verifiers:wordle", {"renderer": 1}, r"task.options.renderer = 1 must be a text or a table"),
])  # fmt: skip
def test_an_option_of_a_wrong_type_is_rejected_before_the_package_is_imported(
    source: str, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=message):
        open_source(SourceType.AGENT, source, options, f"task.source = {source!r}")


def test_action_of_parses_model_text_into_an_action() -> None:
    one = {"required": ["message"], "properties": {"message": {"type": "string"}}}
    assert parse_action('{"message": "hi"}', one) == {"message": "hi"}
    assert parse_action(" hi ", one) == {"message": "hi"}
    assert parse_action("12", one) == {"message": "12"}
    assert parse_action("12", {"required": ["n"], "properties": {"n": {"type": "integer"}}}) == {"n": 12}
    with pytest.raises(BadAction, match="the fields a, b"):
        parse_action("hi", {"required": ["a", "b"]})


@pytest.mark.slow
async def test_an_openenv_environment_runs_through_its_server(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(room), *sys.path]))
    async with host_episode(settings("openenv:echo_room", {"field": "echoed_message"})) as (episodes, task):
        messages: Any = split_params(task.prompt)[1]
        assert [m.content for m in messages] == ["Echo Room environment ready!"]
        turns = [
            SampledTurn(prompt_tokens=(1,) * (1 + 2 * n), tokens=(2,), logprobs=(-0.5,), text=text)
            for n, text in enumerate(["four", '{"message": "123456"}', "x" * 50])
        ]
        answers = await played(episodes, task, turns)
        assert [[m.content for m in a.messages] for a in answers] == [["four"], ["123456"], []]
        assert [(a.ended, a.error) for a in answers] == [(False, ""), (False, ""), (True, "")]
        assert answers[-1].reward == pytest.approx(0.4 + 0.6 + 1.0)


@pytest.fixture
def room_url(room: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of the environment server, run in a separate process as in a deployment."""
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "echo_room.server.app:app", "--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(room), *sys.path])}
    with subprocess.Popen(command, cwd=room, env=environment, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            assert any("Uvicorn running" in line for line in server.stderr), "it ended before it listened"
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


@pytest.mark.slow
async def test_a_running_openenv_server_is_reached_by_its_url(room_url: str) -> None:
    pytest.importorskip("openai")
    episode_settings = settings(f"openenv:{room_url}", {"field": "echoed_message", "system": "Say much."}, max_turns=2)
    async with host_episode(episode_settings) as (episodes, task):
        messages: Any = split_params(task.prompt)[1]
        assert [m.content for m in messages] == ["Say much.", "Echo Room environment ready!"]
        turns = [
            SampledTurn(prompt_tokens=(1,) * (1 + 2 * n), tokens=(2,), logprobs=(-0.5,), text=text)
            for n, text in enumerate(["four", "sixsix"])
        ]
        answers = await played(episodes, task, turns)
        assert [[m.content for m in a.messages] for a in answers] == [["four"], []]
        assert [(a.ended, a.error) for a in answers] == [(False, ""), (True, "")]
        assert answers[-1].reward == pytest.approx(0.4 + 0.6)


@pytest.mark.slow
async def test_openenv_capture_reports_no_fatal_error_for_its_own_environment(room_url: str) -> None:
    """The capture server runs between the agent and the endpoint and validates what it records."""
    pytest.importorskip("openai")
    from openenv.core.harness.capture.export import export_session

    agent = open_source(SourceType.AGENT, f"openenv:{room_url}", {"field": "echoed_message"}, "task.source")
    task = AgentTask(index=0, held_out=False, seed=4, options={}, rng=random.Random(4))
    async with serving("four", "sixsix", '{"this": "is no action"}') as (server, session, told):
        async with capture_server(server, session) as (capture, base_url):
            recorded = capture.registry.create("rollout", purpose="train")
            reward = await agent.run((base_url, recorded.session_id, task))
        assert reward == pytest.approx(0.4 + 0.6)
        document = export_session(recorded)
        (row,) = document["sequences"]
        findings = [*document["validation"], *row["validation"]]
        assert not [finding for finding in findings if "[FATAL" in finding], findings
        assert document["trainable"] and row["role"] == "agent"
        assert row["input_ids"] == [*told[-1].prompt_tokens, *told[-1].tokens]
        assert row["n_trainable"] == sum(len(turn.tokens) for turn in told)
        assert [turn["sampled_logprobs"] for turn in document["turns"]] == [list(turn.logprobs) for turn in told]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small word corpus for the games of the taskset, in place of an nltk download."""
    folder = tmp_path_factory.mktemp("nltk")
    (folder / "corpora" / "words").mkdir(parents=True)
    for name in ("en", "en-basic"):
        text = "cat dog sun moon tree book fish bird star rain snow wind rock leaf frog".replace(" ", "\n")
        (folder / "corpora" / "words" / name).write_text(text + "\n")
    return folder


@pytest.mark.slow
async def test_a_verifiers_taskset_runs_under_its_own_harness(
    words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A game of two turns. Environment, harness, rewards and train client are those of the package."""
    pytest.importorskip("verifiers")
    pytest.importorskip("textarena")
    pytest.importorskip("mcp.server.mcpserver", reason="of mcp 2, which verifiers needs and openenv does not allow")
    monkeypatch.setenv("NLTK_DATA", str(words))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    tokenizer = chat_tokenizer("qwen3")
    tokenizer.save_pretrained(tmp_path)
    async with host_episode(
        settings(
            "verifiers:textarena",
            {
                "env": {"taskset": {"game": "WordSearch-v0"}, "player": {"max_turns": 2}},
                "tokenizer": str(tmp_path),
                "renderer": {"name": "qwen3"},
            },
            memory_mib=0,
        )
    ) as (episodes, task):
        directions, shown = split_params(task.prompt)
        assert not shown
        prompt = directions.token_ids
        assert prompt is not None
        assert "Word Search" in tokenizer.decode(prompt)
        before, turns, answers = tuple(prompt), list[SampledTurn](), list[HostedStepResult]()
        for text in ("[1 1 1 1]", "[2 2 2 2]"):
            ids = (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)
            turns.append(SampledTurn(prompt_tokens=before, tokens=ids, logprobs=(-0.5,) * len(ids), text=text))
            answers = await played(episodes, task, turns)
            assert answers[-1].error == ""
            if not answers[-1].ended:
                token_ids = split_params(answers[-1].messages)[0].token_ids
                assert token_ids
                before = (*before, *ids, *token_ids)
        assert [a.ended for a in answers] == [False, True]
        assert list(answers[-1].parts) == ["game_reward"]
