"""The multi-turn example environment, and the careless player that pretrains its base model."""

from __future__ import annotations

import itertools
import random

import pytest

from examples.agent_game import QUESTION, HigherOrLower
from examples.make_agent_model import SYMBOLS, careless_game, games
from staleflow.tasks.training.tiny_model import make_tokenizer


def play_halving(seed: int) -> tuple[float, int]:
    """Return the reward and the number of guesses of a player that halves the remaining range."""
    game = HigherOrLower()
    assert game.reset(seed) == (QUESTION, {})
    low, high = 0, 9
    for count in itertools.count(1):
        guess = (low + high) // 2
        hint, reward, terminated, truncated, info = game.step(str(guess))
        if terminated or truncated:
            assert info == {"parts": {"guesses": count}}
            return reward, count
        low, high = (guess + 1, high) if hint == "higher" else (low, guess - 1)
    raise AssertionError


def test_halving_the_remaining_range_always_wins() -> None:
    results = [play_halving(seed) for seed in range(200)]
    assert {reward for reward, _ in results} == {1.0}
    assert {count for _, count in results} == {1, 2, 3, 4}


def test_a_game_reset_with_the_same_seed_returns_the_same_observations() -> None:
    def said(seed: int) -> list[object]:
        game = HigherOrLower()
        return [game.reset(seed), *(game.step(str(guess)) for guess in (3, 8, 1, 6))]

    assert all(said(seed) == said(seed) for seed in range(50))


@pytest.mark.parametrize("action", ["", "12", "seven", "higher", "²"])
def test_a_guess_that_is_not_a_digit_loses_the_game(action: str) -> None:
    game = HigherOrLower()
    game.reset(1)
    assert game.step(action)[1:4] == (0.0, True, False)


def test_the_last_wrong_guess_ends_the_game() -> None:
    game = HigherOrLower(guesses=2)
    game.reset(next(seed for seed in range(100) if random.Random(seed).randrange(10) == 5))
    assert game.step("4") == ("higher", 0.0, False, False, {"parts": {"guesses": 1}})
    assert game.step("6") == ("lower", 0.0, False, True, {"parts": {"guesses": 2}})


def test_the_careless_player_wins_less_than_half_and_its_texts_tokenize_losslessly() -> None:
    rng = random.Random(0)
    rewards = [careless_game(seed, rng)[1] for seed in range(4000)]
    assert 0.4 < sum(rewards) / len(rewards) < 0.48
    tokenizer = make_tokenizer(SYMBOLS)
    for game in itertools.islice(games(0), 100):
        assert len(game) % 2 == 0
        for text in game:
            (token,) = tokenizer(text)["input_ids"]
            assert tokenizer.decode([token]) == text
