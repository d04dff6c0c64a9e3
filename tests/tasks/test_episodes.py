"""Episodes of users' environments: what they say, how they are repeated, and whom a bad one hurts."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import actor_settings, loading, user_files
from pipeline.config.checks import check_job
from stores.errors import ConfigError
from tasks.environments import SourceSettings
from tasks.episodes.answers import Answer, EpisodeKey
from tasks.episodes.host import Episodes, EpisodeSettings
from tasks.episodes.limits import EnvironmentConfig
from tasks.task_source import Message, Task, TaskSource, distinct_held_out
from tests.tasks.chat_models import MODELS

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
        }
        result = does[action]() if action in does else None
        return result or (f"{self.num_steps}", 0.0, action == "end", False, {})

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


class Unseeded:
    def reset(self, seed):
        return f"{random.random()}", {}

    def step(self, action):
        return "", 0.0, True, False, {}


class Unresettable(Unseeded):
    def reset(self, seed):
        raise ValueError("no board")


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


async def boastful(session, task):
    await session.ask("go")
    return "well done"
'''


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("games") / "games.py"
    path.write_text(GAMES)
    return path


def settings(named: str, options: dict[str, Any] | None = None, **limits: Any) -> EpisodeSettings:
    config = EnvironmentConfig(**limits)
    return EpisodeSettings(
        source=SourceSettings(source=named, options=options or {}, seed=3, limits=config), limits=config
    )


def running(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


async def acted(episodes: Episodes, of: Task, *turns: str, cut: bool = False, **key: Any) -> Answer:
    return await episodes.act(EpisodeKey(**{"task": 0, **key}), of.record, turns, cut=cut)


async def played(episodes: Episodes, of: Task, turns: Sequence[str], **key: Any) -> list[Answer]:
    """The answers to these turns, until the episode ends."""
    answers: list[Answer] = []
    for number in range(1, len(turns) + 1):
        answers.append(await acted(episodes, of, *turns[:number], **key))
        if answers[-1].ended:
            break
    return answers


def said(answers: Sequence[Answer]) -> list[Any]:
    return [(a.messages, a.ended, a.reward, dict(a.parts), a.error) for a in answers]


def higher(*words: str) -> list[Any]:
    return [((Message("environment", word),), False, 0.0, {}, "") for word in words]


KINDS = ("Guess", "AsyncGuess", "guess")


@pytest.mark.parametrize("isolation", ["auto", "process", "thread"])
@pytest.mark.parametrize("name", KINDS)
def test_an_episode_is_the_same_wherever_it_runs(games: Path, name: str, isolation: str) -> None:
    made = settings(f"{games}:{name}", isolation=isolation)
    task = made.source.build().task(4)
    assert task.prompt == "Guess a number from 1 to 8."

    async def work() -> None:
        episodes = Episodes(made)
        await episodes.check()
        right = await played(episodes, task, "12345678", task=4)
        number = len(right)
        assert 1 < number <= 5
        assert said(right[:-1]) == higher(*["higher"] * (number - 1))
        assert said(right[-1:]) == [((), True, 1.25 - 0.25 * number, {"left": 5 - number}, "")]
        wrong = await played(episodes, task, "88888", task=4, member=1)
        assert said(wrong[:-1]) == higher(*["lower"] * 4)
        assert said(wrong[-1:]) == [((), True, -1.25, {}, "")]
        await episodes.close()

    running(work())


@pytest.mark.parametrize("name", KINDS)
def test_who_asks_again_gets_the_same_answer_and_nothing_is_stepped_twice(games: Path, name: str) -> None:
    made = settings(f"{games}:{name}")
    task = made.source.build().task(0)

    async def work() -> None:
        episodes = Episodes(made)
        first = await asyncio.gather(*(acted(episodes, task, "8") for _ in range(3)))
        assert first[0] == first[1] == first[2]
        assert await acted(episodes, task, "8") == first[0]
        second = [await acted(episodes, task, "8", "8") for _ in range(2)]
        assert second[0] == second[1]
        last = [await acted(episodes, task, *"88888") for _ in range(2)]
        assert last[0] == last[1]
        assert (last[0].ended, last[0].reward) == (True, -1.25)
        assert last[0].replayed == ((Message("environment", "lower"),),) * 2
        after = await acted(episodes, task, *"888888")
        assert after.error == "the episode ended with turn 5; it cannot take another one"
        await episodes.close()

    running(work())


@pytest.mark.parametrize("name", KINDS)
def test_a_repeatable_environment_is_set_back_on_another_host(games: Path, name: str) -> None:
    made = settings(f"{games}:{name}")
    task = made.source.build().task(0)

    async def work() -> None:
        here, there = Episodes(made), Episodes(made)
        answers = [await acted(here, task, *"8888"[:n]) for n in range(1, 5)]
        taken_up = await acted(there, task, *"8888")
        assert taken_up.messages == answers[-1].messages
        assert taken_up.replayed == tuple(a.messages for a in answers[:-1])
        assert said([await acted(there, task, *"88888")]) == said([await acted(here, task, *"88888")])
        await here.close()
        await there.close()

    running(work())


def test_other_environments_that_a_host_does_not_have_are_started_again(games: Path) -> None:
    made = settings(f"{games}:Moody")
    task = made.source.build().task(0)

    async def work() -> None:
        episodes = Episodes(made)
        answer = await acted(episodes, task, "a", "b")
        assert answer.lost and answer.ended and "cannot be set back; start it again" in answer.error
        await acted(episodes, task, "a")
        assert (await acted(episodes, task, "other", "b")).lost
        assert (await acted(episodes, task, "a", attempt=1)).messages == (Message("environment", "1"),)
        await episodes.close()

    running(work())


@pytest.mark.parametrize("name", KINDS)
def test_an_episode_that_is_cut_has_the_reward_so_far(games: Path, name: str) -> None:
    made = settings(f"{games}:{name}", max_turns=3)
    task = made.source.build().task(0)

    async def work() -> None:
        episodes = Episodes(made)
        await acted(episodes, task, "8")
        cut = await acted(episodes, task, "8", "7 or", cut=True)
        assert said([cut]) == [((), True, -0.25, {}, "")]
        assert said([(await played(episodes, task, "88888", member=1))[-1]]) == [((), True, -0.75, {}, "")]
        await episodes.close()

    running(work())


FAULTS = {
    "raise": r"step 2 raised: KeyError: 'a key\nof two lines'",
    "exit": "step 2 raised: SystemExit: 3",
    "nan": "the reward of step 2 is nan; it must be a finite number",
    "text": "the reward of step 2 is '1'; it must be a number",
    "number": "the observation of step 2 must be a text or a list of messages, not 7",
    "assistant": "the observation of step 2 ends with a message of the assistant",
    "four": r"step 2 must return (observation, reward, terminated, truncated, info), not ('ok', 0.0, False, {})",
}


@pytest.mark.parametrize("name", ["Moody", "AsyncMoody"])
def test_what_an_environment_does_wrong_is_one_line_and_its_own(games: Path, name: str) -> None:
    made = settings(f"{games}:{name}")
    task = made.source.build().task(0)

    async def work() -> None:
        episodes = Episodes(made)
        await acted(episodes, task, "other")
        for member, (action, message) in enumerate(FAULTS.items(), 1):
            await acted(episodes, task, "a", member=member)
            answer = await acted(episodes, task, "a", action, member=member)
            assert answer.ended and not answer.lost and message in answer.error and "\n" not in answer.error
            assert await acted(episodes, task, "a", action, member=member) == answer
        assert (await acted(episodes, task, "other", "b")).messages == (Message("environment", "2"),)
        await episodes.close()

    running(work())


def is_gone(pid: int) -> bool:
    """Whether a process has ended, or only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def until_gone(pid: int) -> None:
    async with asyncio.timeout(10):
        while not is_gone(pid):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("hang", "step 2 took longer than environment.step_s = 0.5 s"),
        ("die", "its process ended with exit code 4"),
        ("crash", "its process was killed by SIGABRT"),
        ("eat", "step 2 raised: MemoryError:  (environment.memory_mib = 64)"),
    ],
)
def test_an_environment_that_hangs_dies_or_eats_memory_hurts_only_itself(
    games: Path, action: str, message: str
) -> None:
    made = settings(f"{games}:Moody", step_s=0.5, memory_mib=64)
    task = made.source.build().task(0)

    async def work() -> None:
        episodes = Episodes(made)
        (other,) = (await acted(episodes, task, "pid")).messages
        (mine,) = (await acted(episodes, task, "pid", member=1)).messages
        assert int(mine.content) != int(other.content)
        bad, good = await asyncio.gather(
            acted(episodes, task, "pid", action, member=1), acted(episodes, task, "pid", "pid")
        )
        assert " ".join(bad.error.split()) == " ".join(message.split())
        assert good.messages == (other,)
        await until_gone(int(mine.content))
        assert (await acted(episodes, task, "pid", "pid", "pid")).messages == (other,)
        await episodes.close()
        await until_gone(int(other.content))

    running(work())


def test_what_an_environment_started_ends_with_it_also_in_a_session_of_its_own(games: Path) -> None:
    made = settings(f"{games}:Moody")
    task = made.source.build().task(0)

    async def work() -> None:
        episodes = Episodes(made)
        (child,) = (await acted(episodes, task, "child")).messages
        assert not is_gone(int(child.content))
        episodes.cancel([EpisodeKey(task=0)])
        await until_gone(int(child.content))
        await episodes.close()

    running(work())


@pytest.mark.parametrize("name", ["Moody", "AsyncMoody"])
def test_a_surplus_episode_is_cancelled_at_once(games: Path, name: str) -> None:
    made = settings(f"{games}:{name}")
    task = made.source.build().task(0)

    async def work() -> None:
        episodes = Episodes(made)
        await acted(episodes, task, "a")
        waiting = asyncio.ensure_future(acted(episodes, task, "a", "hang"))
        other = asyncio.ensure_future(acted(episodes, task, "b", member=1))
        await asyncio.sleep(0.1)
        begin = time.monotonic()
        episodes.cancel([EpisodeKey(task=0), EpisodeKey(task=7)])
        assert (await waiting).error == "the episode was cancelled"
        assert (await other).messages == (Message("environment", "1"),)
        assert time.monotonic() - begin < 1
        await episodes.close()

    running(work())


def test_a_coroutine_that_ignores_being_cancelled_is_not_waited_for(games: Path) -> None:
    made = settings(f"{games}:AsyncMoody", step_s=0.2)
    task = made.source.build().task(0)

    async def work() -> None:
        episodes = Episodes(made)
        assert "took longer than environment.step_s" in (await acted(episodes, task, "stubborn")).error
        assert (await acted(episodes, task, "a", member=1)).messages == (Message("environment", "1"),)
        await episodes.close()

    running(work())


def test_the_seconds_of_all_steps_are_limited_together(games: Path) -> None:
    made = settings(f"{games}:AsyncMoody", step_s=5, episode_s=0.3)
    task = made.source.build().task(0)

    async def work() -> None:
        episodes = Episodes(made)
        await acted(episodes, task, "a")
        answer = await acted(episodes, task, "a", "hang")
        assert answer.error == "step 2 took longer than environment.episode_s = 0.3 s"
        assert 0.2 < answer.seconds < 2
        await episodes.close()

    running(work())


def test_as_many_steps_as_allowed_are_taken_at_once(games: Path) -> None:
    made = settings(f"{games}:AsyncMoody", step_s=0.2, concurrency=2)
    task = made.source.build().task(0)

    async def work() -> None:
        episodes = Episodes(made)
        begin = time.monotonic()
        answers = await asyncio.gather(*(acted(episodes, task, "hang", member=m) for m in range(6)))
        assert all("took longer" in a.error for a in answers)
        assert time.monotonic() - begin >= 0.6
        await episodes.close()

    running(work())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Unresettable", "task 0: reset raised: ValueError: no board"),
        ("Wordless", "task 0: the first observation must be a text or a list of messages, not 7"),
        ("Plain", r"task 0: reset must return \(observation, info\), not 'no info'"),
        ("silent", "task 0: play returned before it asked the model for anything"),
        ("Absent", "has no function Absent"),
    ],
)
def test_an_environment_that_cannot_begin_is_one_line(games: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        settings(f"{games}:{name}").source.build()
    assert str(caught.value).startswith("task.source = ") and "\n" not in str(caught.value)


def test_wrong_options_are_one_line(games: Path) -> None:
    with pytest.raises(ConfigError, match=r"Guess\(\) does not take task.options = \{'level': 3\}"):
        settings(f"{games}:Guess", {"level": 3}).source.build()
    assert settings(f"{games}:Guess", {"rules": "Go."}).source.build().task(0).prompt == "Go."


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("stubborn", "play asked again after EpisodeCut"),
        ("boastful", "what play returned is 'well done'; it must be a number"),
    ],
)
def test_what_a_coroutine_does_wrong_is_one_line(games: Path, name: str, message: str) -> None:
    made = settings(f"{games}:{name}", max_turns=1)
    task = made.source.build().task(0)

    async def work() -> None:
        episodes = Episodes(made)
        assert message in (await acted(episodes, task, "a")).error
        await episodes.close()

    running(work())


def test_an_environment_that_does_not_keep_to_its_seed_is_found_before_the_run(games: Path) -> None:
    made = settings(f"{games}:Unseeded")
    task = made.source.build().task(0)

    async def work() -> None:
        episodes = Episodes(made)
        with pytest.raises(ConfigError, match="reset with the same seed gives another first observation"):
            await episodes.check()
        assert "another first observation" in (await acted(episodes, task, "a")).error
        await episodes.close()

    running(work())


def test_tasks_are_functions_of_their_index_and_held_out_ones_have_other_seeds(games: Path) -> None:
    source: TaskSource = settings(f"{games}:Chatty").source.build()
    task = source.task(2, held_out=True)
    assert task.prompt == (Message("system", "rules"), Message("user", "{'index': 2, 'held_out': True}"))
    guess = settings(f"{games}:Guess").source.build()
    held_out = distinct_held_out(guess, 50)
    assert len(held_out) == 50
    assert not {t.seed for t in held_out} & {guess.task(i).seed for i in range(50)}


HOST = """
import asyncio
from tests.tasks.test_episodes import Episodes, acted, settings

async def work(named):
    made = settings(named)
    task = made.source.build().task(0)
    episodes = Episodes(made)
    for member in range(3):
        answer = await acted(episodes, task, "pid", member=member)
        print(answer.messages[0].content, flush=True)
    await asyncio.sleep(1000)

asyncio.run(work({named!r}))
"""


def test_environments_end_with_a_host_that_is_killed(games: Path) -> None:
    script = HOST.format(named=f"{games}:Moody")
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        pids = [int(host.stdout.readline()) for _ in range(3)]
        assert not any(map(is_gone, pids))
        host.kill()

    async def all_gone() -> None:
        await asyncio.gather(*map(until_gone, pids))

    running(all_gone())


def test_a_job_with_an_environment_has_settings_for_its_hosts(games: Path, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(f'[model]\npath = "x"\n[task]\nsource = "{games}:Guess"\n[environment]\nmax_turns = 5\n')
    config = loading.load(job)
    made = actor_settings.environment_settings(config)
    assert made.limits.max_turns == 5
    assert made.source.build().task(0).prompt == "Guess a number from 1 to 8."
    assert user_files.located(config).acts
    assert not user_files.located(loading.load(job, ["task.source=reasoning_gym:chain_sum"])).acts
    with pytest.raises(ConfigError, match=r"reward\.function = 'math_verify': task\.source = .* rewards its episodes"):
        actor_settings.environment_settings(loading.load(job, ["reward.function=math_verify"]))


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("Unseeded", [], "reset with the same seed gives another first observation"),
        ("Unresettable", [], "reset raised: ValueError: no board"),
        ("Guess", ["task.chat=true"], "drops the <think> parts of earlier turns when a message of role user"),
        (
            "Guess",
            ["environment.template=no place"],
            r"environment\.template must contain \{observation\}, it is 'no pla",
        ),
        ("Guess", ["environment.isolation=cell"], "environment.isolation must be one of auto, process, thread"),
    ],
)
def test_a_job_whose_environment_cannot_be_used_is_one_line(
    games: Path, tiny_model: Path, tmp_path: Path, name: str, overrides: list[str], message: str
) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (model / "chat_template.jinja").write_text(MODELS["qwen3"][0])
    job = tmp_path / "job.toml"
    job.write_text(
        f'runs_dir = "{tmp_path}"\n[model]\npath = "{model}"\n[task]\nsource = "{games}:{name}"\neval_prompts = 4\n'
        '[cluster]\nkind = "file"\nscheduler_file = "x"\n[rollout]\nmax_new_tokens = 24\n'
    )
    with pytest.raises(ConfigError, match=message) as caught:
        check_job(loading.load(job, overrides))
    assert "\n" not in str(caught.value)
    if name == "Guess":
        assert check_job(loading.load(job)) == []
