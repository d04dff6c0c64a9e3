"""Child processes of agents and environments end with their episode."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from staleflow.tasks.environments.child_programs import ChildPrograms
from staleflow.tasks.episodes.episode_host import EpisodeHost
from staleflow.tasks.episodes.step_results import EpisodeKey
from staleflow.tasks.rendering.task_source import Task
from tests.support.games import host_episode, is_gone
from tests.tasks.test_agents import acted, settings

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
"""An agent that does not wait for its child programs."""
SLEEP = [sys.executable, "-c", "import time; time.sleep(10000)"]
AGENT = f'''
import asyncio, contextvars, subprocess, threading
import httpx

SLEEP = {SLEEP!r}


async def start_programs():
    """Two of each kind that ends by itself never, and what the first shell leaves behind."""
    found = [subprocess.Popen(SLEEP), subprocess.Popen(SLEEP, start_new_session=True)]
    found += [await asyncio.create_subprocess_exec(*SLEEP), await asyncio.to_thread(subprocess.Popen, SLEEP)]
    shell = subprocess.run(["sh", "-c", "sleep 10000 >&2 & echo $!"], stdout=subprocess.PIPE, check=True)
    return [one.pid for one in found] + [int(shell.stdout)]


async def run(base_url, key, task):
    messages = [{{"role": "user", "content": "what now?"}}]
    async with httpx.AsyncClient(timeout=60) as client:
        while True:
            headers = {{"Authorization": "Bearer " + key}}
            answer = await client.post(
                base_url + "/chat/completions", headers=headers, json={{"model": "policy", "messages": messages}}
            )
            does = answer.json()["choices"][0]["message"]["content"]
            said = "nothing"
            if does == "start":
                said = " ".join(map(str, await start_programs()))
            if does == "raise":
                raise ValueError("I do not like it")
            if does == "end":
                return 1.0
            messages += [{{"role": "assistant", "content": does}}, {{"role": "user", "content": said}}]


async def play(session, task):
    await session.ask("what now?")
    await session.ask(" ".join(map(str, await start_programs())))
    return 1.0
'''


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    (tmp_path / "agent.py").write_text(AGENT)
    return tmp_path / "agent.py"


async def until_gone(pids: list[int]) -> None:
    while not all(map(is_gone, pids)):
        await asyncio.sleep(0.01)


async def start_programs(episodes: EpisodeHost, task: Task, member: int) -> list[int]:
    """Let an episode start its programs; returns their processes."""
    answer = await acted(episodes, task, "start", member=member)
    assert not answer.error
    pids = [int(pid) for pid in answer.messages[-1].content.split()]
    assert len(pids) == 5
    assert not any(map(is_gone, pids))
    return pids


async def test_programs_of_an_agent_end_with_its_episode(agent: Path) -> None:
    async with host_episode(settings(f"agent:{agent}:run", step_timeout_s=60.0)) as (episodes, task):
        staying = await start_programs(episodes, task, 9)
        for member, last in enumerate(("end", "raise", "")):
            pids = await start_programs(episodes, task, member)
            if last:
                assert (await acted(episodes, task, "start", last, member=member)).ended
            else:
                episodes.cancel([EpisodeKey(group=0, member=member)])
            await until_gone(pids)
            assert not any(map(is_gone, staying)), "they belong to another episode"
    await until_gone(staying)


async def test_programs_of_a_coroutine_environment_end_with_its_episode(agent: Path) -> None:
    async with host_episode(settings(f"{agent}:play", step_timeout_s=60.0)) as (episodes, task):
        pids = await start_programs(episodes, task, 0)
        assert (await acted(episodes, task, "start", "end")).reward == 1.0
        await until_gone(pids)


def test_programs_of_agents_end_when_the_host_is_killed(agent: Path) -> None:
    script = f"""
import asyncio
from tests.tasks.test_agents import settings
from tests.tasks.test_child_programs import start_programs
from staleflow.tasks.episodes.episode_host import EpisodeHost

async def work():
    made = settings("agent:{agent}:run", step_timeout_s=60.0)
    task = made.source.build().task(0)
    episodes = EpisodeHost(made)
    for member in range(2):
        print(*await start_programs(episodes, task, member), flush=True)
    await asyncio.sleep(10000)

asyncio.run(work())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        pids = [int(pid) for _ in range(2) for pid in host.stdout.readline().split()]
        assert len(pids) == 10
        host.kill()

    asyncio.run(until_gone(pids))


def test_a_program_started_after_the_episode_end_is_rejected() -> None:
    programs = ChildPrograms()
    with programs.as_owner():
        first = subprocess.Popen(SLEEP)
        assert os.getpgid(first.pid) != os.getpgid(0)
        # It may kill its process group and continue.
        os.killpg(os.getpgid(first.pid), 9)
        first.wait()
        second = subprocess.Popen(SLEEP)
    with subprocess.Popen(SLEEP) as other:
        assert os.getpgid(other.pid) == os.getpgid(0)
        programs.close()
        assert second.wait() == -9
        with programs.as_owner(), pytest.raises(RuntimeError, match="the episode has ended"):
            subprocess.Popen(SLEEP)
        assert other.poll() is None
        other.kill()


def test_python_tool_code_ends_when_the_host_is_killed() -> None:
    script = """
import asyncio
from staleflow.tasks.episodes.sandbox import run_python

asyncio.run(run_python("import time; time.sleep(10000)", timeout_s=10000, memory_mib=0))
"""
    with subprocess.Popen([sys.executable, "-c", script]) as host:
        inside: list[psutil.Process] = []
        while not any(item.rlimit(psutil.RLIMIT_CORE) == (0, 0) for item in inside):  # which it sets last
            inside = psutil.Process(host.pid).children(recursive=True)
        host.kill()
    asyncio.run(until_gone([item.pid for item in inside]))
