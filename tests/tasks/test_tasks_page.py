"""The examples of docs/environments.md run as printed; the answer patterns of docs/tasks.md work."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from staleflow.pipeline.config import actor_settings, loading
from staleflow.tasks.environments.environment_config import EnvironmentConfig
from staleflow.tasks.episodes.episode_host import EpisodeHostSettings
from staleflow.tasks.episodes.step_results import EpisodeKey
from staleflow.tasks.episodes.tools import ToolEpisode, load_tools
from staleflow.tasks.settings.task_config import TaskConfig
from staleflow.tasks.sources.task_sources import SourceSettings, extract_answer
from tests.support.games import host_episode

PAGE = Path("docs/environments.md").read_text()
TASKS_PAGE = Path("docs/tasks.md").read_text()


def blocks(heading: str, language: str) -> list[str]:
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


@pytest.mark.parametrize(("name", "heading"), [("Guess", "A class with reset and step"), ("guess", "A coroutine")])
async def test_the_environments_of_the_page_are_played(name: str, heading: str, tmp_path: Path) -> None:
    (tmp_path / "games.py").write_text("\n\n".join(blocks(heading, "python")))
    source = SourceSettings(task=TaskConfig(source=f"{tmp_path}/games.py:{name}"), seed=0)
    task = source.build().task(0)
    assert task.prompt == "Guess my number, from 1 to 20."
    async with host_episode(EpisodeHostSettings(source=source)) as (episodes, _):
        await episodes.check()
        low, high = 1, 20
        turns: list[str] = []
        found: list[Any] = []
        while not found or not found[-1].ended:
            turns.append(str((low + high) // 2))
            found.append(await episodes.step(EpisodeKey(group=0), task.record, turns, truncated=False))
            text = "".join(message.content for message in found[-1].messages)
            low, high = (int(turns[-1]) + 1, high) if text == "higher" else (low, int(turns[-1]) - 1)
    assert found[-1].reward == 1.0 and not found[-1].error
    assert {m.content for a in found for m in a.messages} <= {"higher", "lower"}


def test_the_job_with_tools_is_valid() -> None:
    (job,) = blocks("Tools", "toml")
    config = loading.from_tree({"model": {"path": "x"}, **tomllib.loads(job)}, "docs/environments.md")
    episode_settings = actor_settings.episode_settings(config)
    assert episode_settings is not None and episode_settings.roles == ("tool",)
    assert '"arguments": {"expression": "12 * 7"}' in config.task.system


async def test_the_tool_of_the_page_is_called(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text("".join(blocks("Tools", "python")))
    config = EnvironmentConfig(tools=["calculator", f"{tmp_path}/tools.py:capital"])
    tools = load_tools(config)

    async def answer(turn: str) -> list[str]:
        text = await ToolEpisode({}, tools, config).step(turn, truncated=False, last=False)
        return [message.content for message in text.messages]

    assert await answer(
        "<capital>Peru</capital><capital>Atlantis</capital>"
        '<tool_call>{"name": "capital", "arguments": {"country": "France", "letters": 3}}</tool_call>'
    ) == ["<result>Lima</result>", "<result>error: KeyError: 'Atlantis'</result>", "Par"]
    assert tools["capital"].description == "The capital of a country, or its first letters."
    for tool in tools.values():
        if tool.fork_server is not None:
            tool.fork_server.close()


def test_answer_patterns_of_the_docs_match_their_system_messages() -> None:
    blocks_of_both = re.findall(r"```toml\n(.*?)```", TASKS_PAGE + PAGE, re.DOTALL)
    tasks = [tomllib.loads(job)["task"] for job in blocks_of_both if "[task]" in job]
    patterns = [task for task in tasks if "answer_pattern" in task]
    assert len(patterns) == 2
    for task in patterns:
        assert "\\boxed{}" in task["system"]
        assert extract_answer(task["answer_pattern"], "so \\boxed{84}.") == "84"
