"""Episodes of agents: coroutines, functions and programs that request turns over HTTP, and their failures."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from staleflow.stores.errors import ConfigError
from staleflow.tasks.environments.coroutine_environments import AgentTask
from staleflow.tasks.environments.environment_config import EnvironmentConfig
from staleflow.tasks.episodes.agents import load_agent
from staleflow.tasks.episodes.episode_host import EpisodeHost, EpisodeHostSettings
from staleflow.tasks.episodes.step_results import EpisodeKey, HostedStepResult
from staleflow.tasks.rendering.sampled_turn import SampledTurn
from staleflow.tasks.rendering.task_source import Message, Task
from staleflow.tasks.rendering.turn_params import params_of, split_params
from staleflow.tasks.settings.endpoint_settings import EndpointConfig, EndpointSettings
from staleflow.tasks.settings.task_config import TaskConfig
from staleflow.tasks.sources.task_sources import SourceSettings
from tests.support.games import host_episode

AGENTS = '''
import asyncio, json, os, sys, time, urllib.error, urllib.request
import httpx


def body(messages, **more):
    return {"model": "policy", "messages": messages, **more}


async def ask(base_url, key, messages, **more):
    async with httpx.AsyncClient(timeout=20, verify=False) as client:
        answer = await client.post(
            base_url + "/chat/completions", headers={"Authorization": "Bearer " + key}, json=body(messages, **more)
        )
    if answer.status_code != 200:
        raise RuntimeError(answer.json()["error"]["code"])
    return answer.json()["choices"][0]["message"]["content"]


def asked(base_url, key, messages, **more):
    request = urllib.request.Request(
        base_url + "/chat/completions",
        data=json.dumps(body(messages, **more)).encode(),
        headers={"Authorization": "Bearer " + key, "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(json.load(error)["error"]["code"]) from None


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


async def count(base_url, key, task):
    """Counts the turns until the model says stop."""
    messages, turns = [user(f"task {task.rng.randrange(100)}")], 0
    while True:
        answer = await ask(base_url, key, messages)
        if answer == "stop":
            return float(turns), {"turns": turns}
        turns += 1
        messages += [said(answer), user(f"more {turns}")]


def count_slowly(base_url, key, task):
    messages, turns = [user(f"task {task.rng.randrange(100)}")], 0
    while True:
        answer = asked(base_url, key, messages)
        if answer == "stop":
            return float(turns), {"turns": turns}
        turns += 1
        messages += [said(answer), user(f"more {turns}")]


async def moody(base_url, key, task):
    messages = [user("what now?")]
    while True:
        does = await ask(base_url, key, messages)
        messages += [said(does), user("what now?")]
        if does == "raise":
            raise ValueError("I do not like it")
        if does == "hang":
            await asyncio.sleep(1000)
        if does == "exit":
            sys.exit(3)
        if does == "text":
            return "good"
        if does == "rewrite":
            await ask(base_url, key, [user("something else")])


def ends(base_url, key, task):
    if asked(base_url, key, [user("what now?")]) == "stop":
        return next(iter(()))
    raise asyncio.CancelledError


def die(base_url, key, task):
    """Leaves a process behind, and dies or hangs."""
    import subprocess
    does = asked(base_url, key, [user("what now?")])
    with open(task.options["pids"], "a") as file:
        for _ in range(2):
            file.write(f"{subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)']).pid}\\n")
    if does == "die":
        os._exit(7)
    time.sleep(1000)


async def silent(base_url, key, task):
    return 1.0


async def unlike(base_url, key, task):
    await ask(base_url, key, [user(f"it is {time.time()}")])


async def limited(base_url, key, task):
    await ask(base_url, key, [user("first")], max_tokens=3)
    await ask(base_url, key, [user("first"), said("a"), user("second")], max_tokens=5)
    return 1.0


async def insists(base_url, key, task):
    messages = [user("go")]
    for turn in range(100):
        try:
            messages += [said(await ask(base_url, key, messages)), user("go on")]
        except RuntimeError as error:
            assert str(error) == "context_length_exceeded", error
            return float(turn)


def wrong(one):
    pass
'''

PROGRAM = """
import json, os, subprocess, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import agents
task = json.loads(os.environ["STALEFLOW_TASK"])
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
does = agents.asked(url, key, [agents.user(f"task {task['seed'] % 100}")])
print("working ...")
if does == "tree":
    sleeps = "import time; time.sleep(1000)"
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', '{sleeps}']); {sleeps}"
    subprocess.Popen([sys.executable, "-c", child])
    import time; time.sleep(1000)
if does == "fail":
    sys.exit("it does not work")
if does == "daemon":
    subprocess.Popen(["sleep", "100"], start_new_session=True)
if does == "log":
    print("0.25\\n" + "x" * 300_000, flush=True)
    print("x" * 150_000 + " 7")
elif does == "prose":
    print("it went well")
else:
    print(json.dumps({"reward": 0.5, "parts": {"words": len(does)}}) if does == "json" else 0.25)
"""


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    (folder / "agents.py").write_text(AGENTS)
    (folder / "program.py").write_text(PROGRAM)
    return folder / "agents.py"


def settings(
    source: str, options: dict[str, Any] | None = None, *, changed_past: str = "branch", **limits: Any
) -> EpisodeHostSettings:
    config = EnvironmentConfig(**limits)
    endpoint = EndpointSettings(config=EndpointConfig(changed_past=changed_past))
    return EpisodeHostSettings(
        source=SourceSettings(
            task=TaskConfig(source=source, options=options or {}), seed=3, environment_config=config, endpoint=endpoint
        )
    )


async def acted(episodes: EpisodeHost, task: Task, *turns: str, member: int = 0, **more: Any) -> HostedStepResult:
    """Answer an agent with the last of these turns."""
    turn = SampledTurn(prompt_tokens=(1,) * (2 * len(turns) - 1), tokens=(2,), logprobs=(-0.5,), text=turns[-1])
    key = EpisodeKey(group=int(task.record["index"]), member=member)
    return await episodes.step(key, task.record, turns, truncated=more.pop("cut", False), latest_turn=turn, **more)


async def played(episodes: EpisodeHost, task: Task, turns: Sequence[str], **more: Any) -> list[HostedStepResult]:
    return [await acted(episodes, task, *turns[: number + 1], **more) for number in range(len(turns))]


@pytest.mark.parametrize(("name", "isolation"), [("count", "auto"), ("count", "process"), ("count_slowly", "auto")])
async def test_an_episode_is_identical_under_every_isolation_setting(agents: Path, name: str, isolation: str) -> None:
    episode_settings = settings(f"agent:{agents}:{name}", isolation=isolation)
    source = episode_settings.source.build()
    tasks = [source.task(i) for i in (0, 1)]
    assert len({task.prompt for task in tasks}) == 2
    async with host_episode(episode_settings) as (episodes, _):
        await episodes.check()
        first, second = await asyncio.gather(
            played(episodes, tasks[0], ["a", "b", "stop"]), played(episodes, tasks[1], ["stop"], member=1)
        )
        assert [a.messages for a in first] == [(Message("user", "more 1"),), (Message("user", "more 2"),), ()]
        assert [(a.ended, a.reward, a.parts, a.error) for a in first[2:] + second] == [
            (True, 2.0, {"turns": 2.0}, ""), (True, 0.0, {"turns": 0.0}, ""),
        ]  # fmt: skip
        assert await acted(episodes, tasks[0], "a", "b", "stop") == first[2]


async def test_the_last_line_a_program_prints_is_its_reward(agents: Path) -> None:
    episode_settings = settings("agent:command", {"command": [sys.executable, str(agents.with_name("program.py"))]})
    async with host_episode(episode_settings) as (episodes, task):
        for member, (does, reward, parts, error) in enumerate((
            ("number", 0.25, {}, ""),
            ("json", 0.5, {"words": 4.0}, ""),
            ("log", 0.25, {}, ""),
            ("prose", 0.0, {}, "the last line that the agent printed must be its reward"),
            ("fail", 0.0, {}, "the agent's command ended with exit code 1: it does not work"),
        )):  # fmt: skip
            (answer,) = await played(episodes, task, [does], member=member)
            assert answer.ended
            assert answer.error.startswith(error) if error else not answer.error
            assert (answer.reward, answer.parts) == (reward, parts)


@pytest.mark.parametrize(("does", "error"), [("stop", "StopIteration"), ("cancel", "CancelledError")])
async def test_a_function_that_raises_what_ends_coroutines_fails_its_episode(
    agents: Path, does: str, error: str
) -> None:
    async with host_episode(settings(f"agent:{agents}:ends", step_timeout_s=20.0)) as (episodes, task):
        (answer,) = await played(episodes, task, [does])
        assert answer.ended
        assert f"the agent raised: RuntimeError: {error}" in answer.error


@pytest.mark.parametrize(("does", "error"), [
    ("raise", "the agent raised: ValueError: I do not like it"),
    ("exit", "the agent raised: SystemExit: 3"),
    ("hang", "step 1 took longer than environment.step_timeout_s = 3 s"),
    ("text", "what the agent returned is 'good'; it must be a number"),
    ("rewrite", "the agent raised: RuntimeError: changed_past"),
])  # fmt: skip
async def test_an_agent_failure_is_recorded_as_an_error_with_its_reason(agents: Path, does: str, error: str) -> None:
    async with host_episode(settings(f"agent:{agents}:moody", step_timeout_s=3.0, changed_past="refuse")) as (
        episodes,
        task,
    ):
        good = asyncio.ensure_future(played(episodes, task, ["a", "b", "c"], member=1))
        (answer,) = await played(episodes, task, [does])
        assert answer.ended
        assert error in answer.error
        assert "\n" not in answer.error
        assert not any(other.error for other in await good)


async def test_an_agent_that_rewrites_its_history_starts_a_branch(agents: Path) -> None:
    async with host_episode(settings(f"agent:{agents}:moody")) as (episodes, task):
        first, then = await played(episodes, task, ["rewrite", "a"])
        directions, shown = split_params(first.messages)
        assert (directions.after_turn, shown) == (0, (Message("user", "something else"),))
        # The agent continues from the turn before its branch.
        assert (split_params(then.messages)[0].after_turn, then.ended) == (1, False)


async def test_an_agent_without_requests_or_with_an_invalid_signature_is_rejected(agents: Path) -> None:
    with pytest.raises(ConfigError, match="the agent ended before its first request to the model"):
        settings(f"agent:{agents}:silent").source.build()
    with pytest.raises(ConfigError, match=r"an agent takes \(base_url, key, task\)"):
        settings(f"agent:{agents}:wrong").source.build()
    with pytest.raises(ConfigError, match="has no function nobody"):
        settings(f"agent:{agents}:nobody").source.build()
    with pytest.raises(ConfigError, match=r"task\.options\.command must be a list of texts"):
        settings("agent:command", {"command": "python agent.py"}).source.build()
    with pytest.raises(ConfigError, match="'no-such-program' cannot be started: No such file"):
        settings("agent:command", {"command": ["no-such-program"]}).source.build()
    async with host_episode(settings(f"agent:{agents}:unlike")) as (episodes, _):
        with pytest.raises(ConfigError, match="two resets with the same seed differ"):
            await episodes.check()


async def test_token_limits_of_a_request_are_passed_with_its_messages(agents: Path) -> None:
    async with host_episode(settings(f"agent:{agents}:limited")) as (episodes, task):
        assert params_of(task.record).max_tokens == 3
        answer = await acted(episodes, task, "a")
        directions, shown = split_params(answer.messages)
        assert (directions.max_tokens, shown) == (5, (Message("user", "second"),))
        assert (await acted(episodes, task, "a", "b")).reward == 1.0


async def test_an_error_after_the_last_turn_is_not_a_reward(agents: Path) -> None:
    """Only an agent whose request was refused, or whose turn was truncated, gets 0."""
    async with host_episode(settings(f"agent:{agents}:moody", max_turns=1)) as (episodes, task):
        raised = await acted(episodes, task, "raise")
        assert "ValueError: I do not like it" in raised.error
        refused = await acted(episodes, task, "go on", member=1)
        assert (refused.ended, refused.reward, refused.error) == (True, 0.0, "")
        cut = await acted(episodes, task, "raise", member=2, cut=True)
        assert (cut.ended, cut.reward, cut.error) == (True, 0.0, "")


async def test_a_daemon_that_keeps_a_programs_pipes_open_is_not_waited_for(agents: Path) -> None:
    options = {"command": [sys.executable, str(agents.with_name("program.py"))]}
    async with host_episode(settings("agent:command", options, step_timeout_s=60.0)) as (episodes, task):
        result = await acted(episodes, task, "daemon")
        assert (result.reward, result.error) == (0.25, "")


async def test_an_episode_at_a_limit_gets_the_reward_that_the_agent_returns(agents: Path) -> None:
    async with host_episode(settings(f"agent:{agents}:insists", max_turns=3)) as (episodes, task):
        *_, last = await played(episodes, task, ["a", "b", "c"])
        assert (last.ended, last.reward, last.error) == (True, 3.0, "")
        cut = await acted(episodes, task, "a", member=1, cut=True)
        assert (cut.ended, cut.reward, cut.error) == (True, 1.0, "")
        # Its next turn does not fit, so the request is rejected.
        await acted(episodes, task, "a", member=2)
        full = await episodes.end(EpisodeKey(group=0, member=2), task.record)
        assert (full.ended, full.reward, full.error) == (True, 1.0, "")


def running_processes(pids: Path) -> list[int]:
    """Return the processes listed in a file that are still running."""

    def runs(pid: int) -> bool:
        try:
            return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return False

    return [pid for pid in map(int, pids.read_text().split()) if runs(pid)]


@pytest.mark.parametrize(("does", "error"), [
    ("die", "its process ended with exit code 7"), ("hang", "step 1 took longer than environment.step_timeout_s = 3 s"),
])  # fmt: skip
async def test_child_processes_of_an_agent_end_with_it(agents: Path, tmp_path: Path, does: str, error: str) -> None:
    pids = tmp_path / "pids"
    async with host_episode(settings(f"agent:{agents}:die", {"pids": str(pids)}, step_timeout_s=3.0)) as (
        episodes,
        task,
    ):
        (answer,) = await played(episodes, task, [does])
        assert error in answer.error
        begin = time.monotonic()
        while running_processes(pids) and time.monotonic() < begin + 10:
            await asyncio.sleep(0.05)
        assert running_processes(pids) == []


def descendants(marker: str) -> Iterator[int]:
    """Return the processes whose environment contains this marker."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if marker.encode() in (folder / "environ").read_bytes():
                    yield int(folder.name)
            except OSError:
                continue


async def test_a_timed_out_program_is_killed_with_all_its_descendants(
    agents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARKED_BY", marker := f"test-{os.getpid()}-{time.monotonic_ns()}")
    command = ["/bin/sh", "-c", f"{sys.executable} {agents.with_name('program.py')}; echo 1"]
    async with host_episode(settings("agent:command", {"command": command}, step_timeout_s=3.0)) as (episodes, task):
        (answer,) = await played(episodes, task, ["tree"])
        assert "took longer than environment.step_timeout_s" in answer.error
    begin = time.monotonic()

    def left() -> list[str]:
        results = []
        for pid in descendants(marker):
            try:
                results.append(Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " "))
            except OSError:
                continue
        return [line for line in results if "time.sleep" in line]

    while left() and time.monotonic() < begin + 10:
        time.sleep(0.05)
    assert left() == []


async def test_background_processes_of_a_program_end_with_it(tmp_path: Path) -> None:
    pids = tmp_path / "pid"
    started = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])"
    left = f"import subprocess, sys; open({str(pids)!r}, 'w').write(str({started}.pid)); print(0.5)"
    agent = load_agent("command", {"command": [sys.executable, "-c", left]}, "task.source")
    task = AgentTask(index=0, held_out=False, seed=1, options={}, rng=random.Random(1))
    assert await agent.run(("http://x/v1", "key", task)) == 0.5
    folder = Path("/proc") / pids.read_text()
    while folder.exists() and (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
        await asyncio.sleep(0.01)


async def test_pipes_that_a_daemon_of_a_program_keeps_open_are_closed_here(tmp_path: Path) -> None:
    """Each episode left two of them."""

    def open_pipes() -> set[str]:
        paths = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
        return {target for p in paths if p.exists() and (target := os.readlink(p)).startswith("pipe:")}

    pids = tmp_path / "pid"
    started = "subprocess.Popen(['sleep', '1000'], start_new_session=True)"
    left = f"import subprocess; open({str(pids)!r}, 'w').write(str({started}.pid)); print(0.5)"
    agent = load_agent("command", {"command": [sys.executable, "-c", left]}, "task.source")
    task, before = AgentTask(index=0, held_out=False, seed=1, options={}, rng=random.Random(1)), open_pipes()
    assert await agent.run(("http://x/v1", "key", task)) == 0.5
    await asyncio.sleep(0)
    left_open = open_pipes() - before
    os.kill(int(pids.read_text()), signal.SIGKILL)
    assert not left_open


async def test_cancelling_an_episode_stops_its_agent_and_closes_its_session(agents: Path) -> None:
    async with host_episode(settings(f"agent:{agents}:moody")) as (episodes, task):
        await acted(episodes, task, "a")
        acting = asyncio.ensure_future(acted(episodes, task, "a", "hang"))
        await asyncio.sleep(0.3)
        episodes.cancel([EpisodeKey(group=0)])
        assert (await acting).error == "the episode was cancelled"
        assert len(episodes._endpoint.sessions) == 0


def test_params_of_reads_turn_parameters_from_records() -> None:
    assert params_of({"prompt": "a text"}) == split_params("a text")[0]
    assert params_of({"prompt": [{"role": "user", "content": "x"}]}) == split_params("a text")[0]
