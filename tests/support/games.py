"""Games for tests of environments, as a user file, and functions that run their episodes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from staleflow.tasks.environments.environment_config import EnvironmentConfig
from staleflow.tasks.episodes.episode_host import EpisodeHost, EpisodeHostSettings
from staleflow.tasks.episodes.step_results import EpisodeKey, HostedStepResult
from staleflow.tasks.rendering.task_source import Task
from staleflow.tasks.settings.task_config import TaskConfig
from staleflow.tasks.sources.task_sources import SourceSettings

GAMES = '''
import asyncio, os, random, sys, time


class Guess:
    """Guess a number from 1 to 8 in five turns."""

    repeatable = True

    def __init__(self, rules="Guess a number from 1 to 8."):
        self.rules = rules

    def reset(self, seed):
        self.number, self.left = random.Random(seed).randrange(1, 9), 5
        return self.rules, {}

    def step(self, action):
        self.left -= 1
        guess = int(action)
        if guess == self.number:
            return "right", 1.0, True, False, {"parts": {"left": self.left}}
        return ("higher" if guess < self.number else "lower"), -0.25, False, self.left == 0, {}


class AsyncGuess(Guess):
    async def reset(self, seed):
        await asyncio.sleep(0)
        return Guess.reset(self, seed)

    async def step(self, action):
        await asyncio.sleep(0)
        return Guess.step(self, action)


async def guess(session, task):
    number = task.rng.randrange(1, 9)
    said = await session.ask("Guess a number from 1 to 8.")
    reward = 0.0
    for left in range(4, -1, -1):
        if int(said) == number:
            return reward + 1.0, {"left": left}
        reward -= 0.25
        session.reward = reward
        if left:
            said = await session.ask("higher" if int(said) < number else "lower")
    return reward


guess.repeatable = True


class Own(str):
    pass


class Moody:
    """Does what the action says."""

    def reset(self, seed):
        self.num_steps = 0
        return "what now?", {}

    def step(self, action):
        self.num_steps += 1
        does = {
            "hang": lambda: time.sleep(1000),
            "raise": lambda: {}["a key\\nof two lines"],
            "exit": lambda: sys.exit(3),
            "die": lambda: os._exit(4),
            "crash": lambda: os.abort(),
            "eat": lambda: bytearray(10**12),
            "child": self.child,
            "nan": lambda: ("ok", float("nan"), False, False, {}),
            "text": lambda: ("ok", "1", False, False, {}),
            "number": lambda: (7, 0.0, False, False, {}),
            "assistant": lambda: ([{"role": "assistant", "content": "hi"}], 0.0, False, False, {}),
            "four": lambda: ("ok", 0.0, False, {}),
            "pid": lambda: (f"{os.getpid()}", 0.0, False, False, {}),
            "server": lambda: (f"{os.getppid()}", 0.0, False, False, {}),
            "run": lambda: asyncio.run(self.later()),
            "own": lambda: (Own("mine"), 0.0, False, False, {}),
            "broken": lambda: ("a" + chr(0xD800), 0.0, False, False, {}),
            "long": lambda: ("a" * 2000000, 0.0, False, False, {}),
        }
        result = does[action]() if action in does else None
        return result or (f"{self.num_steps}", 0.0, action == "end", False, {})

    async def later(self):
        await asyncio.sleep(0)
        return "later", 0.0, False, False, {}

    def child(self):
        import subprocess
        one = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        return f"{one.pid}", 0.0, False, False, {}


class AsyncMoody(Moody):
    async def reset(self, seed):
        return Moody.reset(self, seed)

    async def step(self, action):
        if action == "hang":
            await asyncio.sleep(1000)
        if action == "stubborn":
            for _ in range(1):
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    pass
        return Moody.step(self, action)


class Waiting(AsyncMoody):
    """Waits without `await`, and says so."""

    blocking = True

    async def step(self, action):
        time.sleep(1000 if action == "hang" else 0)
        return Moody.step(self, action)


class Quick(Moody):
    """Takes no time, and says so."""

    blocking = False


class Counted:
    repeatable = True

    async def reset(self, seed):
        self.mine, self.seed = [], seed
        await asyncio.sleep(0)
        return f"{seed}", {}

    async def step(self, action):
        self.mine.append(action)
        await asyncio.sleep(0)
        return f"{self.seed}:{','.join(self.mine)}", float(len(action)), action == "end", False, {}


class Unseeded:
    def reset(self, seed):
        return f"{random.random()}", {}

    def step(self, action):
        return "", 0.0, True, False, {}


class Unresettable(Unseeded):
    def reset(self, seed):
        raise ValueError("no board")


class Silent(Unseeded):
    def reset(self, seed):
        return " ", {}


class Wordless(Unseeded):
    def reset(self, seed):
        return 7, {}


class Plain(Unseeded):
    def reset(self, seed):
        return "no info"


class Chatty(Unseeded):
    def reset(self, seed, options=None):
        return [{"role": "system", "content": "rules"}, {"role": "user", "content": f"{options}"}], {}


async def silent(session, task):
    return 1.0


async def stubborn(session, task):
    while True:
        try:
            await session.ask("more")
        except Exception:
            pass


async def graceful(session, task):
    from staleflow.tasks.environments.coroutine_environments import EpisodeTruncated

    try:
        while True:
            await session.ask("more")
    except EpisodeTruncated:
        return 0.5, {"cut": 1}


async def counting(session, task):
    from staleflow.tasks.environments.coroutine_environments import EpisodeTruncated

    turns = []
    try:
        while True:
            turns.append(await session.ask("more"))
    except EpisodeTruncated as truncated:
        turns.append(str(truncated))
    return turns.count("a")


async def hasty(session, task):
    await session.ask("go")
    first = asyncio.ensure_future(session.ask("one"))
    await asyncio.sleep(0)
    await session.ask("two")


async def boastful(session, task):
    await session.ask("go")
    return "well done"


async def broken(session, task):
    await session.ask("go")
    await session.ask("\\ud800")


async def endless(session, task):
    await session.ask("go")
    await session.ask("long" * 500_000)


async def own(session, task):
    await session.ask(Own("go"))
    await session.ask(Own("mine"))
'''


def settings(named: str, options: dict[str, Any] | None = None, **limits: Any) -> EpisodeHostSettings:
    config = EnvironmentConfig(**limits)
    return EpisodeHostSettings(
        source=SourceSettings(task=TaskConfig(source=named, options=options or {}), seed=3, environment_config=config)
    )


@contextlib.asynccontextmanager
async def host_episode(made: EpisodeHostSettings) -> AsyncIterator[tuple[EpisodeHost, Task]]:
    """An episode host and its first task."""
    episodes = EpisodeHost(made)
    try:
        yield episodes, made.source.build().task(0)
    finally:
        await episodes.close()


async def act(episodes: EpisodeHost, of: Task, *turns: str, cut: bool = False, **key: Any) -> HostedStepResult:
    return await episodes.step(EpisodeKey(**{"group": 0, **key}), of.record, turns, truncated=cut)


async def play_episode(episodes: EpisodeHost, of: Task, turns: Sequence[str], **key: Any) -> list[HostedStepResult]:
    """Return the step results of these turns until the episode ends."""
    answers: list[HostedStepResult] = []
    for number in range(1, len(turns) + 1):
        answers.append(await act(episodes, of, *turns[:number], **key))
        if answers[-1].ended:
            break
    return answers


def step_summaries(answers: Sequence[HostedStepResult]) -> list[Any]:
    return [(a.messages, a.ended, a.reward, dict(a.parts), a.error) for a in answers]


def is_gone(pid: int) -> bool:
    """Return whether a process has ended or is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def until_gone(pid: int) -> None:
    async with asyncio.timeout(10):
        while not is_gone(pid):
            await asyncio.sleep(0.01)
