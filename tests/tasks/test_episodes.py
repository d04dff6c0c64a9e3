"""Episodes of user environments: observations, replay and errors found before a run."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.pipeline.config import actor_settings, loading, user_files
from staleflow.pipeline.config.preflight import check_job
from staleflow.stores.errors import ConfigError
from staleflow.tasks.environments.episode import EpisodeStart, record_of
from staleflow.tasks.episodes import episode_host
from staleflow.tasks.episodes.episode_host import EpisodeHost
from staleflow.tasks.episodes.step_results import EpisodeKey
from staleflow.tasks.rendering.task_source import Message
from staleflow.tasks.sources.task_sources import with_origin
from tests.support.games import GAMES, act, host_episode, play_episode, settings, step_summaries
from tests.tasks.chat_models import MODELS


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("games") / "games.py"
    path.write_text(GAMES)
    return path


def higher_summaries(*words: str) -> list[Any]:
    return [((Message("environment", word),), False, 0.0, {}, "") for word in words]


KINDS = ("Guess", "AsyncGuess", "guess")


@pytest.mark.parametrize("isolation", ["auto", "process"])
@pytest.mark.parametrize("name", KINDS)
async def test_an_episode_is_identical_under_every_isolation_setting_and_host(
    games: Path, name: str, isolation: str
) -> None:
    episode_settings = settings(f"{games}:{name}", isolation=isolation)
    task = episode_settings.source.build().task(4)
    assert task.prompt == "Guess a number from 1 to 8."
    async with host_episode(episode_settings) as (episodes, _):
        await episodes.check()
        right = await play_episode(episodes, task, "12345678", group=4)
        number = len(right)
        assert 1 < number <= 5
        assert step_summaries(right[:-1]) == higher_summaries(*["higher"] * (number - 1))
        assert step_summaries(right[-1:]) == [((), True, 1.25 - 0.25 * number, {"left": 5 - number}, "")]
        wrong = await play_episode(episodes, task, "88888", group=4, member=1)
        assert step_summaries(wrong[:-1]) == higher_summaries(*["lower"] * 4)
        assert step_summaries(wrong[-1:]) == [((), True, -1.25, {}, "")]


@pytest.mark.parametrize("name", KINDS)
async def test_repeated_steps_return_the_same_result_and_run_once(games: Path, name: str) -> None:
    async with host_episode(settings(f"{games}:{name}")) as (episodes, task):
        first = await asyncio.gather(*(act(episodes, task, "8") for _ in range(3)))
        assert first[0] == first[1] == first[2]
        assert await act(episodes, task, "8") == first[0]
        second = [await act(episodes, task, "8", "8") for _ in range(2)]
        assert second[0] == second[1]
        last = [await act(episodes, task, *"88888") for _ in range(2)]
        assert last[0] == last[1]
        assert (last[0].ended, last[0].reward) == (True, -1.25)
        assert last[0].replayed == ((Message("environment", "lower"),),) * 2
        after = await act(episodes, task, *"888888")
        assert after.error == "the episode has ended with turn 5; it cannot take another one"


async def test_results_of_the_latest_ended_episodes_are_kept(games: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_host, "MAX_ENDED_EPISODES", 2)
    async with host_episode(settings(f"{games}:AsyncGuess", max_turns=1)) as (episodes, task):
        for member in range(4):
            assert (await act(episodes, task, "8", member=member)).ended
        assert [key.member for key in episodes._ended_results] == [2, 3]


@pytest.mark.parametrize("name", ["Counted", "Moody"])
async def test_a_step_waits_for_the_step_before_it(games: Path, name: str) -> None:
    async with host_episode(settings(f"{games}:{name}")) as (episodes, task):
        both = await asyncio.gather(act(episodes, task, "a"), act(episodes, task, "a", "b"))
        seed = task.record["seed"]
        expected = [f"{seed}:a", f"{seed}:a,b"] if name == "Counted" else ["1", "2"]
        assert [(m.content, a.replayed) for a in both for m in a.messages] == [(text, ()) for text in expected]


@pytest.mark.parametrize("name", KINDS)
async def test_a_repeatable_environment_is_replayed_on_another_host(games: Path, name: str) -> None:
    episode_settings = settings(f"{games}:{name}")
    task = episode_settings.source.build().task(0)
    here, there = EpisodeHost(episode_settings), EpisodeHost(episode_settings)
    answers = [await act(here, task, *"8888"[:n]) for n in range(1, 5)]
    taken_up = await act(there, task, *"8888")
    assert taken_up.messages == answers[-1].messages
    assert taken_up.replayed == tuple(a.messages for a in answers[:-1])
    assert step_summaries([await act(there, task, *"88888")]) == step_summaries([await act(here, task, *"88888")])
    await here.close()
    await there.close()


async def test_an_unrepeatable_environment_missing_on_a_host_is_restarted(games: Path) -> None:
    async with host_episode(settings(f"{games}:Moody")) as (episodes, task):
        answer = await act(episodes, task, "a", "b")
        assert answer.lost and answer.ended and "is not repeatable; start it again" in answer.error
        await act(episodes, task, "a")
        assert (await act(episodes, task, "other", "b")).lost
        assert (await act(episodes, task, "a", attempt=1)).messages == (Message("environment", "1"),)


@pytest.mark.parametrize("name", KINDS)
async def test_a_truncated_episode_has_the_reward_so_far(games: Path, name: str) -> None:
    async with host_episode(settings(f"{games}:{name}", max_turns=3)) as (episodes, task):
        await act(episodes, task, "8")
        cut = await act(episodes, task, "8", "7 or", cut=True)
        assert step_summaries([cut]) == [((), True, -0.25, {}, "")]
        assert step_summaries([(await play_episode(episodes, task, "88888", member=1))[-1]]) == [
            ((), True, -0.75, {}, "")
        ]


REQUESTS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["next", "again", "cut", "end", "cancel", "move", "skip", "restart"])),
    max_size=25,
)


@given(requests=REQUESTS)
def test_random_step_sequences_match_a_simple_model(games: Path, requests: list[tuple[int, str]]) -> None:
    """The environment returns its seed and all turns so far."""
    episode_settings = settings(f"{games}:Counted", max_turns=50)
    record = record_of(EpisodeStart(index=0, held_out=False, seed=6), "6")

    def expected(turns: Sequence[str], *, cut: bool) -> tuple[str, float]:
        if cut or turns[-1] == "end":
            return "", float(sum(map(len, turns[:-1] if cut else turns)))
        return f"6:{','.join(turns)}", 0.0

    async def work() -> None:
        hosts = [EpisodeHost(episode_settings), EpisodeHost(episode_settings)]
        turns: dict[int, list[str]] = {0: [], 1: [], 2: []}
        where, attempt, ended, was_cut = [0, 0, 0], [0, 0, 0], [False] * 3, [False] * 3
        for member, what in requests:
            key = EpisodeKey(group=0, member=member, attempt=attempt[member])
            cut = False
            if what == "cancel":
                hosts[where[member]].cancel([key])
                continue
            if what == "move":
                where[member] = 1 - where[member]
                continue
            if what == "restart" or (ended[member] and what != "again"):
                attempt[member] += 1
                turns[member], ended[member], was_cut[member] = [], False, False
                continue
            if what == "again":
                cut = was_cut[member]
            else:
                cut = what == "cut"
                turns[member] += (
                    ["a", "bb"] if what == "skip" else ["end" if what == "end" else f"t{len(turns[member])}"]
                )
            if not turns[member]:
                continue
            host = hosts[where[member]]
            answers = await asyncio.gather(
                *(host.step(key, record, list(turns[member]), truncated=cut) for _ in range(1 + (what == "again")))
            )
            for answer in answers:
                assert not answer.error
                said_, reward = expected(turns[member], cut=cut)
                assert "".join(m.content for m in answer.messages) == said_
                assert answer.ended == (not said_) and answer.reward == reward
                at = len(turns[member]) - len(answer.replayed) - 1
                for i, messages in enumerate(answer.replayed, at + 1):
                    assert messages[0].content == expected(turns[member][:i], cut=False)[0]
            ended[member], was_cut[member] = answers[0].ended, cut
        for host in hosts:
            await host.close()

    asyncio.run(work())


def test_a_job_with_an_environment_has_episode_settings(games: Path, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(f'[model]\npath = "x"\n[task]\nsource = "{games}:Guess"\n[environment]\nmax_turns = 5\n')
    config = loading.load(job)
    episode_settings = actor_settings.episode_settings(config)
    assert episode_settings.source.environment_config.max_turns == 5
    assert episode_settings.source.build().task(0).prompt == "Guess a number from 1 to 8."
    assert user_files.with_absolute_paths(config).has_environment
    assert not user_files.with_absolute_paths(
        loading.load(job, ["task.source=reasoning_gym:chain_sum"])
    ).has_environment
    with pytest.raises(ConfigError, match=r"reward\.function = 'math_verify': task\.source = .* rewards its episodes"):
        actor_settings.episode_settings(loading.load(job, ["reward.function=math_verify"]))


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("Unseeded", [], "two resets with the same seed differ"),
        ("Unresettable", [], "reset raised: ValueError: no board"),
        ("Silent", [], "task 0: its prompt is empty; a prompt must have a text that the model answers"),
        ("Guess", ["task.chat=true"], "drops the <think> parts of earlier turns when a message of role user"),
        (
            "Guess",
            ["environment.template=no place"],
            r"environment\.template must contain \{observation\}, it is 'no pla",
        ),
        (
            "Guess",
            ["environment.step_timeout_s=300"],
            r"environment.step_timeout_s = 300 must be less than deadlines.stuck_s = 300, .* raise deadlines.stuck_s",
        ),
        (
            "Guess",
            [
                "rollout.engine={name='emulated', time_scale=20}",
                "task.multi_turn=yes",
                "environment.step_timeout_s=6000",
            ],
            r"step_timeout_s = 6000 \(at rollout.engine.time_scale = 20\) must be less than deadlines.stuck_s = 300",
        ),
        ("Guess", ["environment.isolation=cell"], "environment.isolation must be one of auto, process"),
    ],
)
def test_a_job_with_an_unusable_environment_gives_a_one_line_error(
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
        (note,) = check_job(loading.load(job))
        assert "18 of its 21 tokens are unknown to the model's tokenizer, which reads '<unk><unk>" in note


async def test_a_coroutine_may_return_a_reward_when_its_episode_is_truncated(games: Path) -> None:
    async with host_episode(settings(f"{games}:graceful", max_turns=2)) as (episodes, task):
        assert step_summaries(await play_episode(episodes, task, ["a", "b"]))[-1] == ((), True, 0.5, {"cut": 1.0}, "")
        assert step_summaries([await act(episodes, task, "a", cut=True, member=1)]) == [
            ((), True, 0.5, {"cut": 1.0}, "")
        ]
        await act(episodes, task, "a", member=2)
        key = EpisodeKey(group=0, member=2)
        assert [await episodes.end(key, task.record) for _ in range(2)][1].reward == 0.5


@pytest.mark.parametrize("isolation", ["auto", "process"])
async def test_an_episode_that_ends_early_gets_no_turn_twice(games: Path, isolation: str) -> None:
    """Its observation does not fit, so there is no further turn. A truncated turn is part of the episode."""
    async with host_episode(settings(f"{games}:counting", isolation=isolation)) as (episodes, task):
        await act(episodes, task, "a")
        assert (await episodes.end(EpisodeKey(group=0), task.record)).reward == 1.0
        assert (await act(episodes, task, "a", cut=True, member=1)).reward == 1.0


async def test_held_out_tasks_may_use_another_environment(games: Path) -> None:
    made = settings(f"{games}:Guess")
    source = replace(made.source, task=replace(made.source.task, eval_source=f"{games}:AsyncMoody"))
    made = replace(made, source=source)
    built = source.build()
    train, held_out = built.task(0), built.task(0, held_out=True)
    assert (train.prompt, held_out.prompt) == ("Guess a number from 1 to 8.", "what now?")
    assert held_out.identity == ("what now?", held_out.record["seed"])
    async with host_episode(made) as (episodes, _):
        await episodes.check()
        assert step_summaries([await act(episodes, train, "8")]) == higher_summaries("lower")
        assert step_summaries([await act(episodes, held_out, "8", held_out=True)]) == higher_summaries("1")


SOURCES = """
[model]
path = "x"
[[task]]
name = "guess"
source = "{games}:Guess"
[[task]]
name = "moody"
source = "{games}:AsyncMoody"
[[task]]
name = "sums"
source = "reasoning_gym:chain_sum"
answer_pattern = '(-?\\d+)'
"""


async def test_tasks_of_several_sources_use_the_environment_or_scorer_of_each(games: Path, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(SOURCES.format(games=games))
    config = loading.load(tmp_path / "job.toml")
    assert config.has_environment
    episode_settings = actor_settings.episode_settings(config)
    assert list(episode_settings.environment_sources) == ["guess", "moody"]
    tasks = {}
    for name, source in config.task.sources.items():
        task = actor_settings.source_settings(config, source).build().task(0)
        tasks[name] = replace(task, record=with_origin(name, task.record))
    async with host_episode(episode_settings) as (episodes, _):
        await episodes.check()
        assert step_summaries([await act(episodes, tasks["guess"], "8", group=0)]) == higher_summaries("lower")
        assert step_summaries([await act(episodes, tasks["moody"], "8", group=1)]) == higher_summaries("1")
        right = await act(episodes, tasks["sums"], f"it is {tasks['sums'].record['answer']}", group=2)
        assert (right.ended, right.reward, right.error) == (True, 1.0, "")


SLOW = """
import time

class Slow:
    def reset(self, seed):
        time.sleep(0.5)
        with open({told!r}, "a") as told:
            told.write("reset\\n")
        return f"{{seed}}", {{}}

    def step(self, action):
        return "", 0.0, True, False, {{}}
"""


def test_check_job_resets_a_slow_environment_only_a_few_times(tiny_model: Path, tmp_path: Path) -> None:
    told = tmp_path / "told"
    (tmp_path / "slow.py").write_text(SLOW.format(told=str(told)))
    job = tmp_path / "job.toml"
    job.write_text(
        f'runs_dir = "{tmp_path}"\n[model]\npath = "{tiny_model}"\n[task]\nsource = "{tmp_path}/slow.py:Slow"\n'
        "eval_prompts = 200\n[rollout]\nmax_new_tokens = 24\n"
        '[cluster]\nkind = "file"\nscheduler_file = "x"\n'
    )
    assert check_job(loading.load(job)) == []
    assert len(told.read_text().splitlines()) < 20
