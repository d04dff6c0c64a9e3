"""An agent for a small model to train: the game of agent_game.py, by a program that only knows the `openai` client."""

from __future__ import annotations

import random
from typing import Any

from openai import AsyncOpenAI

CLIENT = AsyncOpenAI(base_url="http://localhost", api_key="none")
"""Its connections serve all episodes; each asks with a key of its own. Making one takes tens of milliseconds."""


async def play(base_url: str, key: str, task: Any) -> float:
    """Finds a hidden digit in four guesses; the reward is 1 if it is found."""
    client = CLIENT.with_options(base_url=base_url, api_key=key)
    digit = random.Random(task.seed).randrange(10)
    messages: list[Any] = [{"role": "user", "content": "Guess my digit."}]
    for _ in range(4):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        said = answer.choices[0].message.content or ""
        guess = said.strip()
        if guess not in tuple("0123456789"):
            return 0.0
        if int(guess) == digit:
            return 1.0
        messages.append({"role": "assistant", "content": said})
        messages.append({"role": "user", "content": "higher" if int(guess) < digit else "lower"})
    return 0.0
