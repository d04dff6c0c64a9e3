"""Agents or endpoint hosts that end while a turn is awaited."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import httpx
import pytest

from staleflow.tasks.episodes.episode_host import EpisodeHost, EpisodeHostSettings
from staleflow.tasks.episodes.step_results import EpisodeKey
from tests.support.games import host_episode
from tests.tasks.test_agents import acted, settings

PROGRAM = """
import json, os, sys, urllib.request

messages = [{"role": "user", "content": "go"}]
for turn in range(3):
    # Written at once: whoever reads it while it waits finds all of it.
    with open(sys.argv[1] + ".new", "w") as file:
        json.dump([os.getpid(), turn, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], messages], file)
    os.replace(sys.argv[1] + ".new", sys.argv[1])
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    where = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(where, body, head), timeout=120) as answer:
        messages.append(json.load(answer)["choices"][0]["message"])
    messages.append({"role": "user", "content": "go on"})
print(0.5)
"""

WAITS = """
import asyncio, os, httpx


async def waits(base_url, key, task):
    '''Its requests go on when it is cancelled, as those of programs elsewhere do.'''
    messages = [{"role": "user", "content": "go"}]

    async def ask():
        async with httpx.AsyncClient(timeout=120) as client:
            head, body = {"Authorization": "Bearer " + key}, {"model": "policy", "messages": messages}
            answer = await client.post(base_url + "/chat/completions", headers=head, json=body)
        with open(f"{task.options['answers']}-{os.getpid()}", "a") as file:
            print(answer.status_code, answer.headers.get("Retry-After"), file=file)
        return {"role": "assistant", "content": "a"}

    for _ in range(2):
        messages += [await asyncio.shield(asyncio.ensure_future(ask())), {"role": "user", "content": "go on"}]
"""


@pytest.fixture
def request_file(tmp_path: Path) -> Path:
    """File to which the program writes its pending request."""
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "asking.json"


def episode_settings(asking: Path) -> EpisodeHostSettings:
    command = [sys.executable, "-S", str(asking.with_name("program.py")), str(asking)]
    return settings("agent:command", {"command": command}, step_timeout_s=60.0)


async def pending_request(asking: Path, turn: int) -> tuple[int, httpx.Request]:
    """Wait for the request of a turn; returns the process and the request."""
    while True:
        pid, found, base_url, key, messages = json.loads(asking.read_text())
        if found == turn:
            head, body = {"Authorization": f"Bearer {key}"}, {"model": "policy", "messages": messages}
            return pid, httpx.Request("POST", f"{base_url}/chat/completions", headers=head, json=body)
        await asyncio.sleep(0.02)


async def test_a_program_killed_while_waiting_ends_its_episode_with_the_reason(request_file: Path) -> None:
    config = episode_settings(request_file)
    async with host_episode(config) as (episodes, task):
        assert not (await acted(episodes, task, "a")).ended
        pid, request = await pending_request(request_file, 1)
        os.kill(pid, signal.SIGKILL)
        answer = await acted(episodes, task, "a", "b")
        assert answer.ended
        assert answer.error == "the agent's command ended with exit code -9"
        async with httpx.AsyncClient() as client:  # its key is no longer valid
            assert (await client.send(request)).status_code == 410
        # The episode restarts with a new agent and a new key.
        assert not (await acted(episodes, task, "a", member=1)).ended
        assert (await pending_request(request_file, 1))[1].headers["Authorization"] != request.headers["Authorization"]


async def test_clients_waiting_at_a_stopping_endpoint_get_503_with_retry_after(tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text(WAITS)
    episode_settings = settings(f"agent:{tmp_path}/agents.py:waits", {"answers": str(tmp_path / "answers")})
    async with host_episode(episode_settings) as (episodes, task):
        assert not (await acted(episodes, task, "a")).ended  # the agent has requested its second turn
    written = tmp_path / f"answers-{os.getpid()}"
    while len(answers := written.read_text().splitlines()) < 2:
        await asyncio.sleep(0.02)
    assert answers == ["200 None", "503 1"]


async def test_an_episode_of_a_lost_host_restarts_at_another(request_file: Path) -> None:
    config = episode_settings(request_file)
    task = config.source.build().task(0)
    lost, other = EpisodeHost(config), EpisodeHost(config)
    await acted(lost, task, "a")
    _, request = await pending_request(request_file, 1)
    await lost.close()
    answer = await acted(other, task, "a", "b")
    assert answer.lost
    assert answer.error.endswith("its environment is not repeatable; start it again")
    assert not (await acted(other, task, "a")).ended
    _, again = await pending_request(request_file, 1)
    async with httpx.AsyncClient() as client:
        key = {"Authorization": request.headers["Authorization"]}
        refused = await client.post(again.url, headers=key, content=again.content)
    assert refused.status_code == 401
    other.cancel([EpisodeKey(group=0)])
    await other.close()
