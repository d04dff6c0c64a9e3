"""Make the base model of examples/agent.toml: a small Llama pretrained on games of a careless player.

In most games the player guesses blindly, often its favourite digit; in the others it heeds what it was told, and halves
what is left. The model learns to keep to the form of the game, and both ways to play it, and finds the digit in less
than half of its games. Reinforcement learning has to find out which way pays.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from examples.agent_game import QUESTION, HigherOrLower
from examples.pretraining import make_model
from staleflow import tiny_model

SYMBOLS = (*tiny_model.SPECIAL_SYMBOLS, QUESTION, *"0123456789", "higher", "lower")
HEEDING = 0.15
"""Share of games in which the player heeds what it was told."""
FAVOURITE, INSISTS = 7, 0.3
"""What a blind player guesses in that share of its guesses: so the model's likeliest play is poor."""
LEARNING_STEPS = 200
"""Optimizer steps at first on such games alone: among many blind ones the rule would hardly be learned."""


def careless_game(seed: int, rng: random.Random, heeding: float = HEEDING) -> tuple[list[str], float]:
    """A game of the careless player: what is said in turn by the game and by the player, and the reward."""
    game = HigherOrLower()
    observation, _ = game.reset(seed)
    messages: list[str] = []
    heeds = rng.random() < heeding
    low, high = 0, 9
    while True:
        if heeds:
            guess = (low + high + rng.randrange(2)) // 2
        else:
            guess = FAVOURITE if rng.random() < INSISTS else rng.randrange(10)
        messages += [observation, str(guess)]
        observation, reward, terminated, truncated, _ = game.step(str(guess))
        if terminated or truncated:
            return messages, reward
        if observation == "higher":
            low = max(low, guess + 1)
        else:
            high = min(high, guess - 1)


def games(seed: int) -> Iterator[tuple[str, ...]]:
    """Endless games."""
    rng = random.Random(seed)
    for number in itertools.count():
        heeding = 1.0 if number < tiny_model.EXAMPLES_PER_STEP * LEARNING_STEPS else HEEDING
        yield tuple(careless_game(rng.randrange(2**31), rng, heeding)[0])


if __name__ == "__main__":
    settings = tiny_model.PretrainingSettings(
        steps=600, hidden_size=64, num_layers=2, learning_rate=3e-3, warmup_steps=30, initializer_range=0.1
    )
    make_model(__doc__, settings, games, SYMBOLS)
