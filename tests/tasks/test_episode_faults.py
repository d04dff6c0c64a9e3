"""An environment that hangs, dies, raises, exhausts memory or returns invalid values affects only its own episode."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from staleflow.stores.errors import ConfigError
from staleflow.tasks.environments.episode import EpisodeStart
from staleflow.tasks.environments.fork_server import BEGIN, ForkServerSettings, read_value
from staleflow.tasks.environments.forked_episodes import ForkServer
from staleflow.tasks.environments.pickled_messages import encode_message
from staleflow.tasks.episodes.episode_host import EpisodeHost
from staleflow.tasks.episodes.step_results import EpisodeKey
from staleflow.tasks.rendering.task_source import Message, TaskSource, distinct_held_out, draw_tasks
from tests.support.games import GAMES, act, host_episode, is_gone, play_episode, settings, until_gone


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("games") / "games.py"
    path.write_text(GAMES)
    return path


FAULTS = {
    "raise": r"step 2 raised: KeyError: 'a key\nof two lines'",
    "exit": "step 2 raised: SystemExit: 3",
    "nan": "the reward of step 2 is nan; it must be a finite number",
    "text": "the reward of step 2 is '1'; it must be a number",
    "number": "the observation of step 2 must be a text or a list of messages, not 7",
    "assistant": "the observation of step 2 ends with a message of the assistant",
    "broken": "the observation of step 2 is not valid Unicode: surrogates not allowed at character 1",
    "long": "the observation of step 2 has 2000000 characters; at most 1000000 are allowed",
    "four": r"step 2 must return (observation, reward, terminated, truncated, info), not ('ok', 0.0, False, {})",
}


@pytest.mark.parametrize("name", ["Moody", "AsyncMoody"])
async def test_an_environment_fault_is_a_one_line_error_of_its_episode(games: Path, name: str) -> None:
    async with host_episode(settings(f"{games}:{name}")) as (episodes, task):
        await act(episodes, task, "other")
        for member, (action, message) in enumerate(FAULTS.items(), 1):
            await act(episodes, task, "a", member=member)
            answer = await act(episodes, task, "a", action, member=member)
            assert answer.ended and not answer.lost and message in answer.error and "\n" not in answer.error
            assert (" raised: " in answer.error) == bool(re.search(r" \(games\.py:\d+\)$", answer.error))
            assert await act(episodes, task, "a", action, member=member) == answer
        assert (await act(episodes, task, "other", "b")).messages == (Message("environment", "2"),)


@pytest.mark.parametrize(("name", "isolation"), [("Moody", "auto"), ("Quick", "auto")])
async def test_synchronous_methods_may_use_asyncio_and_return_str_subclasses(
    games: Path, name: str, isolation: str
) -> None:
    async with host_episode(settings(f"{games}:{name}", isolation=isolation)) as (episodes, task):
        answers = await play_episode(episodes, task, ["run", "own", "a"])
        assert [m.content for a in answers for m in a.messages] == ["later", "mine", "3"]
        assert type(answers[1].messages[0].content) is str


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("hang", "step 2 took longer than environment.step_timeout_s = 4 s"),
        ("die", "its process ended with exit code 4"),
        ("crash", "its process was killed by SIGABRT"),
        ("eat", "step 2 raised: MemoryError: (LINE) (environment.memory_mib = 64)"),
    ],
)
async def test_an_environment_that_hangs_dies_or_exhausts_memory_fails_alone(
    games: Path, action: str, message: str
) -> None:
    async with host_episode(settings(f"{games}:Moody", step_timeout_s=4.0, memory_mib=64)) as (episodes, task):
        (other,) = (await act(episodes, task, "pid")).messages
        (mine,) = (await act(episodes, task, "pid", member=1)).messages
        assert int(mine.content) != int(other.content)
        bad, good = await asyncio.gather(
            act(episodes, task, "pid", action, member=1), act(episodes, task, "pid", "pid")
        )
        assert re.sub(r"games\.py:\d+", "LINE", " ".join(bad.error.split())) == message
        assert good.messages == (other,)
        await until_gone(int(mine.content))
        assert (await act(episodes, task, "pid", "pid", "pid")).messages == (other,)
    await until_gone(int(other.content))


async def test_an_environment_that_never_returns_fails_alone(games: Path) -> None:
    async def hang_beside_others(name: str, isolation: str) -> None:
        named = settings(f"{games}:{name}", step_timeout_s=4.0, isolation=isolation)
        async with host_episode(named) as (episodes, task):
            await episodes.check()
            bad, *good = await asyncio.gather(
                act(episodes, task, "hang"), *(act(episodes, task, "a", member=m) for m in range(1, 4))
            )
            assert bad.error == "step 1 took longer than environment.step_timeout_s = 4 s"
            assert [answer.messages for answer in good] == [(Message("environment", "1"),)] * 3

    kinds = (("AsyncMoody", "auto"), ("Waiting", "auto"), ("AsyncMoody", "process"))
    await asyncio.gather(*(hang_beside_others(*kind) for kind in kinds))


async def test_a_killed_fork_server_ends_its_episodes_and_is_restarted(games: Path) -> None:
    async with host_episode(settings(f"{games}:Moody")) as (episodes, task):
        (server,) = (await act(episodes, task, "server")).messages
        (mine,) = (await act(episodes, task, "server", "pid")).messages
        os.kill(int(server.content), signal.SIGKILL)
        await until_gone(int(mine.content))
        answer = await act(episodes, task, "server", "pid", "a")
        assert (answer.error, answer.lost) == ("its process died", True)
        assert (await act(episodes, task, "a", member=1)).messages == (Message("environment", "1"),)


async def test_a_helper_process_of_an_environments_file_outlives_its_episodes(tmp_path: Path) -> None:
    (tmp_path / "helped.py").write_text(
        "import os\n\nHELPER = os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '1000')\n\n\nclass Helped:\n"
        "    def reset(self, seed):\n        return 'go', {}\n\n    def step(self, action):\n"
        "        return str(HELPER), 1.0, action == 'end', False, {}\n"
    )
    async with host_episode(settings(f"{tmp_path}/helped.py:Helped")) as (episodes, task):
        (helper,) = (await act(episodes, task, "a")).messages
        assert (await act(episodes, task, "end", member=1)).ended
        assert (await act(episodes, task, "end", member=2)).ended
        assert not is_gone(int(helper.content))
    await until_gone(int(helper.content))


async def test_episodes_draw_different_numbers_with_numpy(tmp_path: Path) -> None:
    (tmp_path / "numbers.py").write_text(
        "import numpy as np\n\nnp.random.rand()\n\n\nclass Numbers:\n    def reset(self, seed):\n"
        "        return 'go', {}\n\n    def step(self, action):\n"
        "        return str(np.random.randint(10**9)), 1.0, False, False, {}\n"
    )
    async with host_episode(settings(f"{tmp_path}/numbers.py:Numbers")) as (episodes, task):
        answers = [await act(episodes, task, "a", member=member) for member in range(3)]
    assert len({answer.messages for answer in answers}) == 3


async def test_a_reset_that_fails_once_and_a_killed_fork_server_do_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(
        "import os\nfrom pathlib import Path\n\n\nclass Busy:\n    def reset(self, seed):\n"
        "        failed = Path(__file__).with_name(f'{seed}')\n"
        "        if not failed.exists():\n            failed.touch()\n            raise OSError('busy')\n"
        "        return f'{seed} {os.getppid()}', {}\n\n"
        "    def step(self, action):\n        return '', 1.0, True, False, {}\n"
    )
    episode_settings = settings(f"{tmp_path}/busy.py:Busy")
    with pytest.raises(ConfigError, match="task 0: reset raised: OSError: busy"):
        episode_settings.source.build()
    source = episode_settings.source.build()
    seed, server = str(source.task(1).prompt).split()
    os.kill(int(server), signal.SIGKILL)
    assert str(source.task(1).prompt).split()[0] == seed


async def test_an_error_of_close_affects_no_later_task(tmp_path: Path) -> None:
    (tmp_path / "closing.py").write_text(
        "class Closing:\n    def reset(self, seed):\n        return f'seed {seed}', {}\n\n"
        "    def step(self, action):\n        return '', 1.0, True, False, {}\n\n"
        "    def close(self):\n        raise OSError('no log')\n"
    )
    source = settings(f"{tmp_path}/closing.py:Closing").source.build()
    assert len({source.task(index).prompt for index in range(3)}) == 3


async def test_daemon_children_of_an_environment_end_with_it(games: Path) -> None:
    async with host_episode(settings(f"{games}:Moody")) as (episodes, task):
        (child,) = (await act(episodes, task, "child")).messages
        assert not is_gone(int(child.content))
        episodes.cancel([EpisodeKey(group=0)])
        await until_gone(int(child.content))


@pytest.mark.parametrize("name", ["Moody", "AsyncMoody"])
async def test_a_surplus_episode_is_cancelled_at_once(games: Path, name: str) -> None:
    async with host_episode(settings(f"{games}:{name}")) as (episodes, task):
        await act(episodes, task, "a")
        waiting = asyncio.ensure_future(act(episodes, task, "a", "hang"))
        other = asyncio.ensure_future(act(episodes, task, "b", member=1))
        await asyncio.sleep(0.1)
        begin = time.monotonic()
        episodes.cancel([EpisodeKey(group=0), EpisodeKey(group=7)])
        assert (await waiting).error == "the episode was cancelled"
        assert (await other).messages == (Message("environment", "1"),)
        assert time.monotonic() - begin < 20


async def test_a_coroutine_that_ignores_cancellation_is_abandoned(games: Path) -> None:
    async with host_episode(settings(f"{games}:AsyncMoody", step_timeout_s=3.0)) as (episodes, task):
        assert "took longer than environment.step_timeout_s" in (await act(episodes, task, "stubborn")).error
        assert (await act(episodes, task, "a", member=1)).messages == (Message("environment", "1"),)


async def test_the_seconds_of_all_steps_are_limited_together(games: Path) -> None:
    async with host_episode(settings(f"{games}:AsyncMoody", step_timeout_s=60, episode_timeout_s=3)) as (
        episodes,
        task,
    ):
        await act(episodes, task, "a")
        answer = await act(episodes, task, "a", "hang")
        assert answer.error == "step 2 took longer than environment.episode_timeout_s = 3 s"
        assert 0 < answer.environment_s < 60


async def test_concurrent_steps_are_limited_by_concurrency(games: Path) -> None:
    task = settings(f"{games}:AsyncMoody").source.build().task(0)
    async with host_episode(settings(f"{games}:AsyncMoody", step_timeout_s=0.2, concurrency=2)) as (episodes, _):
        begin = time.monotonic()
        answers = await asyncio.gather(*(act(episodes, task, "hang", member=m) for m in range(6)))
        assert all("took longer" in a.error for a in answers)
        assert time.monotonic() - begin >= 0.6


async def test_slow_resets_run_in_parallel(tmp_path: Path) -> None:
    """The first reset is slow, and each other one waits until four have started; in sequence none would finish in
    time."""
    (tmp_path / "slow.py").write_text(
        "import os, time\nfrom pathlib import Path\n\n\nclass Slow:\n    def __init__(self, folder):\n"
        "        self.folder = Path(folder)\n\n    def reset(self, seed):\n"
        "        first = not list(self.folder.iterdir())\n"
        "        (self.folder / f'{seed}-{os.getpid()}').touch()\n        time.sleep(0.1)\n"
        "        while not first and len(list(self.folder.iterdir())) < 4:\n            time.sleep(0.01)\n"
        "        return f'seed {seed}', {}\n\n    def step(self, action):\n"
        "        return '', 1.0, True, False, {}\n"
    )
    folder = tmp_path / "begun"
    folder.mkdir()
    for number in range(4):
        (folder / str(number)).touch()  # for the first task of a source, which is reset when that is made
    episode_settings = settings(f"{tmp_path}/slow.py:Slow", {"folder": str(folder)}, step_timeout_s=20, concurrency=4)
    assert episode_settings.source.concurrency == 4
    source = episode_settings.source.build()
    for held_out in (False, True):
        empty(folder)
        tasks = draw_tasks(source, range(8), held_out=held_out, concurrency=4)
        assert len({task.prompt for task in tasks}) == 8
        assert tasks[7] == source.task(7, held_out=held_out)
    empty(folder)
    episodes = EpisodeHost(episode_settings)
    answers = await asyncio.gather(*(act(episodes, tasks[0], "go", member=m) for m in range(4)))
    assert [(a.error, a.reward) for a in answers] == [("", 1.0)] * 4
    await episodes.close()


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Unresettable", "task 0: reset raised: ValueError: no board"),
        ("Wordless", "task 0: the first observation must be a text or a list of messages, not 7"),
        ("Plain", r"task 0: reset must return \(observation, info\), not 'no info'"),
        ("silent", "task 0: play returned before its first call of session.ask"),
        ("Absent", "has no function Absent"),
    ],
)
def test_an_environment_that_cannot_start_gives_a_one_line_error(games: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        settings(f"{games}:{name}").source.build()
    assert str(caught.value).startswith("task.source = ") and "\n" not in str(caught.value)


def test_invalid_options_give_a_one_line_error(games: Path) -> None:
    with pytest.raises(ConfigError, match=r"Guess\(\) does not take task.options = \{'level': 3\}"):
        settings(f"{games}:Guess", {"level": 3}).source.build()
    assert settings(f"{games}:Guess", {"rules": "Go."}).source.build().task(0).prompt == "Go."


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("stubborn", "play called ask after EpisodeTruncated"),
        ("hasty", "play raised: RuntimeError: ask was called before the previous call returned"),
        ("boastful", "what play returned is 'well done'; it must be a number"),
        ("broken", "the argument of ask is not valid Unicode: surrogates not allowed at character 0"),
        ("endless", "the argument of ask has 2000000 characters; at most 1000000 are allowed"),
    ],
)
async def test_a_coroutine_fault_is_a_one_line_error(games: Path, name: str, message: str) -> None:
    async with host_episode(settings(f"{games}:{name}", max_turns=1 + (name == "hasty"))) as (episodes, task):
        assert message in (await act(episodes, task, "a")).error


async def test_a_coroutine_may_return_str_subclasses(games: Path) -> None:
    async with host_episode(settings(f"{games}:own")) as (episodes, task):
        assert type(task.prompt) is str
        (message,) = (await act(episodes, task, "a")).messages
        assert (message.content, type(message.content)) == ("mine", str)


async def test_an_environment_that_ignores_its_seed_is_rejected_before_the_run(games: Path) -> None:
    async with host_episode(settings(f"{games}:Unseeded")) as (episodes, task):
        with pytest.raises(ConfigError, match="two resets with the same seed differ"):
            await episodes.check()
        assert "two resets with the same seed differ" in (await act(episodes, task, "a")).error


def test_tasks_depend_on_their_index_and_held_out_tasks_use_other_seeds(games: Path) -> None:
    source: TaskSource = settings(f"{games}:Chatty").source.build()
    task = source.task(2, held_out=True)
    assert task.prompt == (Message("system", "rules"), Message("user", "{'index': 2, 'held_out': True}"))
    guess = settings(f"{games}:Guess").source.build()
    held_out = distinct_held_out(guess, 50)
    assert len(held_out) == 50
    assert not {t.seed for t in held_out} & {guess.task(i).seed for i in range(50)}


HOST = """
import asyncio
from tests.support.games import EpisodeHost, act, settings

async def work(named):
    made = settings(named)
    task = made.source.build().task(0)
    episodes = EpisodeHost(made)
    for member in range(3):
        answer = await act(episodes, task, "pid", member=member)
        print(answer.messages[0].content, flush=True)
    await asyncio.sleep(1000)

asyncio.run(work({named!r}))
"""


async def test_environments_end_when_the_host_is_killed(games: Path) -> None:
    script = HOST.format(named=f"{games}:Moody")
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdout=pipe, stderr=pipe, text=True) as host:
        assert host.stdout is not None and host.stderr is not None
        pids = [int(host.stdout.readline()) for _ in range(3)]
        assert not any(map(is_gone, pids))
        host.kill()
        assert not host.stderr.read(), "they end without output"
    await asyncio.gather(*map(until_gone, pids))


SLOW = """
import time
from pathlib import Path

folder = Path(__file__).parent
(folder / "loading").touch()
while not (folder / "go").exists():
    time.sleep(0.01)


class Slow:
    def reset(self, seed):
        return "", {}

    def step(self, action):
        return "", 0.0, True, False, {}
"""


async def test_no_fork_or_kill_waits_for_the_fork_server_to_restart(tmp_path: Path) -> None:
    """The host's event loop forks and kills; it waited until the environment was loaded again."""
    (tmp_path / "slow.py").write_text(SLOW)
    go, loading = tmp_path / "go", tmp_path / "loading"
    go.touch()
    server = ForkServer(
        ForkServerSettings(source=f"{tmp_path}/slow.py:Slow", options={}, key="task.source", memory_mib=0)
    )
    server.start()
    number, connection = server.fork()
    assert server._process is not None
    server._process.kill()
    connection.settimeout(60)
    assert not connection.recv(1), "its process has ended"
    connection.close()
    server._process.wait()
    go.unlink()
    loading.unlink()
    restart = asyncio.ensure_future(asyncio.to_thread(server.start))
    try:
        async with asyncio.timeout(60):
            while not loading.exists():
                await asyncio.sleep(0.01)
            await asyncio.to_thread(server.kill, number)
            with pytest.raises(ConnectionError, match="its fork server has ended"):
                await asyncio.to_thread(server.fork)
    finally:
        go.touch()
        await restart
    server.fork()[1].close()
    server.close()


ORPHAN = """
import os, socket, time
from staleflow.tasks.environments.fork_server import ForkServerSettings, _run_episode

local, remote = socket.socketpair()
if os.fork() == 0:
    server = os.getpid()
    if os.fork() == 0:
        local.close()
        while os.getppid() == server:
            time.sleep(0.01)
        _run_episode(remote, None, ForkServerSettings(source="", options={}, key="", memory_mib=0), server)
    os._exit(0)
remote.close()
local.settimeout(60)
assert local.recv(1) == b""
"""


def test_a_process_whose_fork_server_died_before_it_began_ends() -> None:
    """Until it has asked for a signal at the server's death, nothing else ends it."""
    subprocess.run([sys.executable, "-c", ORPHAN], check=True)


def test_exit_reports_of_many_processes_do_not_block_the_fork_server(games: Path) -> None:
    """A process reports its exit through a socket that holds a few hundred reports; here more processes exit before a
    report is read."""
    server = ForkServer(ForkServerSettings(source=f"{games}:Moody", options={}, key="task.source", memory_mib=0))
    begin = encode_message((BEGIN, EpisodeStart(index=0, held_out=False, seed=1)))
    server.start()
    try:
        for connections in ([server.fork()[1] for _ in range(40)] for _ in range(10)):
            for connection in connections:
                connection.sendall(begin)
            for connection in connections:
                connection.settimeout(20)
                read_value(connection)
                connection.close()
        number, last = server.fork()
        last.settimeout(20)
        last.sendall(begin)
        assert read_value(last)[1] == ""
        last.close()
        deadline = time.monotonic() + 60
        while server.exit_code(number) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        server.close()
