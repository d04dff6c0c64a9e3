"""Environments of other packages: each runs a real game; unsuitable ones give a one-line error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from staleflow.stores.errors import ConfigError
from staleflow.tasks.environments.environment_config import EnvironmentConfig
from staleflow.tasks.episodes.episode_host import EpisodeHost, EpisodeHostSettings
from staleflow.tasks.episodes.step_results import EpisodeKey, HostedStepResult
from staleflow.tasks.rendering.task_source import Task, distinct_held_out
from staleflow.tasks.settings.task_config import TaskConfig
from staleflow.tasks.sources.task_sources import SourceSettings

LIMITS = EnvironmentConfig(step_timeout_s=60)


def settings(source: str, **options: Any) -> EpisodeHostSettings:
    return EpisodeHostSettings(
        source=SourceSettings(task=TaskConfig(source=source, options=options), seed=3, environment_config=LIMITS)
    )


def play_on_two_hosts(
    made: EpisodeHostSettings, turns: Sequence[str], *, repeatable: bool = True
) -> tuple[Task, list[HostedStepResult]]:
    """Return a task and the results of these turns; repeatable environments are also replayed on another host."""
    task = made.source.build().task(0)

    async def work() -> list[HostedStepResult]:
        episodes, other = EpisodeHost(made), EpisodeHost(made)
        await episodes.check()
        key = EpisodeKey(group=0)
        results: list[HostedStepResult] = []
        for number in range(1, len(turns) + 1):
            results.append(await episodes.step(key, task.record, turns[:number], truncated=False))
            if results[-1].ended:
                break
        again = await other.step(key, task.record, turns[: len(results)], truncated=False)
        if repeatable:
            assert (again.messages, again.ended, again.reward) == (
                results[-1].messages,
                results[-1].ended,
                results[-1].reward,
            )
            assert again.replayed == tuple(answer.messages for answer in results[:-1])
        else:
            assert again.lost
        await episodes.close()
        await other.close()
        return results

    answers = asyncio.run(work())
    assert not any(answer.error for answer in answers)
    return task, answers


def refusal(source: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        settings(source, **options).source.build()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["textarena", "gymnasium", "skyrl_gym"])
def test_a_missing_package_gives_a_one_line_error(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    episode_settings = settings(f"{kind}:Anything")
    with pytest.raises(
        ConfigError, match=f"needs the package {kind}; pip install 'staleflow.{kind.replace('_', '-')}.'"
    ):
        asyncio.run(EpisodeHost(episode_settings).check())


def test_a_game_of_textarena() -> None:
    pytest.importorskip("textarena")
    task, answers = play_on_two_hosts(settings("textarena:GuessTheNumber-v0"), ["[1]", "[2]", "[3]"])
    assert isinstance(task.prompt, str) and "guess the number between 1 and 20" in task.prompt
    for answer in answers[:-1]:
        assert [m.content for m in answer.messages] == ["The target number is higher."]
    source = settings("textarena:GuessTheNumber-v0", max_number=2).source
    won = [play_on_two_hosts(settings("textarena:GuessTheNumber-v0", max_number=2), ["[1]", "[2]"])[1]]
    assert [w[-1].reward for w in won] == [1.0]
    assert source.build().task(0).prompt == source.build().task(1).prompt


@pytest.mark.parametrize(
    ("game", "turns"), [("Countdown", ["[zq]", "[0 1 +]"]), ("Slitherlink", ["[zq]"]), ("2048", ["[zq]", "[up]"])]
)
def test_textarena_observations_do_not_repeat_the_action(game: str, turns: list[str]) -> None:
    """The first two games have the fields of the repeated action in another order."""
    pytest.importorskip("textarena")
    _, answers = play_on_two_hosts(settings(f"textarena:{game}-v0"), turns)
    messages = [message.content for answer in answers for message in answer.messages]
    assert messages and all(messages) and not any("[zq]" in text and len(text) < 10 for text in messages)


def test_unsuitable_textarena_games_give_a_one_line_error() -> None:
    pytest.importorskip("textarena")
    assert "textarena has no game 'GuesTheNumber-v0'; did you mean GuessTheNumber-v0?" in refusal(
        "textarena:GuesTheNumber-v0"
    )
    assert "cannot be played by one player: " in refusal("textarena:TicTacToe-v0")
    # These also accept one player, who would play both sides or alone.
    for game in ("QuantumTicTacToe-v0", "SpiteAndMalice-v0", "PublicGoodsGame-v0"):
        assert refusal(f"textarena:{game}") == (
            f"task.source = 'textarena:{game}': is a game of several players; choose a game of one player, or write an "
            "environment that plays the others"
        )
    assert "cannot be made with task.options = {'level': 3}: TypeError" in refusal(
        "textarena:GuessTheNumber-v0", level=3
    )


def test_games_of_gymnasium() -> None:
    pytest.importorskip("gymnasium")
    task, answers = play_on_two_hosts(
        settings("gymnasium:FrozenLake-v1", is_slippery=False), ["left: 0", "I go 1.", "fly", "9"]
    )
    assert task.prompt == (
        "FrozenLake-v1. Answer with an action, a whole number from 0 to 3.\n[S]FFF\nFHFH\nFFFH\nHFFG\n0"
    )
    first, second, third, _ = [[m.content for m in answer.messages] for answer in answers]
    assert first == ["  (Left)\n[S]FFF\nFHFH\nFFFH\nHFFG\n0"]
    assert second == ["  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG\n4"]
    assert third == ["This is not a valid action. Answer with an action, a whole number from 0 to 3."]
    _, answers = play_on_two_hosts(settings("gymnasium:FrozenLake-v1", is_slippery=False), list("112212"))
    assert (answers[-1].ended, answers[-1].reward) == (True, 1.0)
    task, answers = play_on_two_hosts(settings("gymnasium:CartPole-v1", rules="Balance!"), ["0", "1", "0"])
    assert isinstance(task.prompt, str) and task.prompt.startswith("Balance!\n")
    assert len(task.prompt.splitlines()[1].split()) == 4
    task, answers = play_on_two_hosts(settings("gymnasium:Blackjack-v1"), ["0"])
    assert answers[-1].ended and answers[-1].reward in (-1.0, 0.0, 1.0, 1.5)
    task, answers = play_on_two_hosts(settings("gymnasium:Pendulum-v1"), ["torque 1.5", "-2.0", "7"])
    assert "1 numbers from -2 to 2" in str(task.prompt)
    assert [answer.ended for answer in answers] == [False] * 3
    assert answers[2].messages[0].content.startswith("This is not a valid action.")


def test_unsuitable_gymnasium_environments_give_a_one_line_error() -> None:
    pytest.importorskip("gymnasium")
    assert "cannot be made with task.options = {}: NameNotFound" in refusal("gymnasium:FrozenLak-v1")
    assert "TypeError" in refusal("gymnasium:CartPole-v1", level=3)


def test_spaces_are_rendered_as_text_or_rejected() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    import numpy as np

    from staleflow.tasks.episodes.gymnasium_games import _text_error, format_observation, parse_action

    spaces = gymnasium.spaces
    several = spaces.Dict({"at": spaces.MultiDiscrete([3, 4]), "on": spaces.MultiBinary(2), "say": spaces.Text(5)})
    value = {"at": np.array([1, 3]), "on": np.array([0, 1], np.int8), "say": "hi"}
    assert format_observation(several, value) == "at: 1 3\non: 0 1\nsay: hi"
    assert _text_error(several, actions=False) == ""
    assert _text_error(several, actions=True) == "a space of kind Dict"
    picture = spaces.Box(0, 255, (84, 84, 3), np.uint8)
    assert "Box of 21168 numbers" in _text_error(spaces.Tuple([picture]), actions=False)
    assert "Sequence" in _text_error(spaces.Sequence(spaces.Discrete(2)), actions=False)
    assert parse_action(spaces.MultiDiscrete([3, 4]), "I take 9, 2 and 3").tolist() == [2, 3]
    assert parse_action(spaces.Discrete(3, start=5), "6 or 7") == 7
    assert parse_action(spaces.Text(5), " go ") == "go"
    for space, text in (
        (spaces.Discrete(3), "none"), (spaces.Discrete(3), "3"), (spaces.Discrete(3), "1.5"),
        (spaces.Box(0, 1, (2,)), "0.5"), (spaces.Text(2), "too long"),
        (spaces.Discrete(3), "9" * 30), (spaces.MultiDiscrete([3, 4]), "1 and 1e30"), (spaces.Discrete(6), ".5"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"numbers|space"):
            parse_action(space, text)


def test_environments_of_skyrl_gym(tmp_path: Path) -> None:
    pytest.importorskip("skyrl_gym")
    rows = tmp_path / "rows.jsonl"
    one = {
        "prompt": [{"role": "user", "content": "What is 12 * 12?"}],
        "reward_spec": {"method": "rule", "ground_truth": "144"},
        "extra_info": {"max_turns": 3},
    }
    rows.write_text("".join(json.dumps(one) + "\n" for _ in range(20)))
    episode_settings = settings("skyrl_gym:gsm8k_multi_turn", rows=f"jsonl:{rows}")
    task, answers = play_on_two_hosts(episode_settings, ["I think", "#### 143", "#### 144"], repeatable=False)
    assert task.prompt[0][1] == "What is 12 * 12?"
    assert answers[0].messages[0].role == "user" and "tentative numeric answer" in answers[0].messages[0].content
    assert [answer.ended for answer in answers] == [False, False, True]
    assert answers[2].reward == pytest.approx(1.0 + 0.2 / 3)
    config = {"search_url": "http://127.0.0.1:9/retrieve", "topk": 3, "timeout": 1, "log_requests": False}
    asyncio.run(EpisodeHost(settings("skyrl_gym:search", rows=f"jsonl:{rows}", env_config=config)).check())
    names = {}
    for name, count in (("train", 6), ("test", 9)):
        lines = ({**one, "prompt": [{"role": "user", "content": f"{name} {i}"}]} for i in range(count))
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        names[name] = f"jsonl:{tmp_path}/{name}"
    task_config = TaskConfig(
        source="skyrl_gym:gsm8k", options={"rows": names["train"]}, eval_source="skyrl_gym:gsm8k",
        eval_options={"rows": names["test"]},
    )  # fmt: skip
    source = SourceSettings(task=task_config, seed=3, environment_config=LIMITS).build()
    assert {source.task(index).prompt[0][1] for index in range(6)} == {f"train {i}" for i in range(6)}
    held_out = distinct_held_out(source, 20)
    assert [task.prompt[0][1] for task in held_out] == [f"test {i}" for i in range(9)]
    assert "skyrl_gym has no environment 'gsm9k'; there are aime" in refusal("skyrl_gym:gsm9k", rows=f"jsonl:{rows}")
    assert "task.options must have rows" in refusal("skyrl_gym:gsm8k")
    rows.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert "cannot be made with its first row" in refusal("skyrl_gym:gsm8k", rows=f"jsonl:{rows}")
