"""An agent for a small model to train: the game of agent_game.py, by a program that only knows the `openai` client."""

from __future__ import annotations

import random

from openai import AsyncOpenAI


async def play(base_url: str, key: str, task) -> float:
    """Finds a hidden digit in four guesses; the reward is 1 if it is found."""
    digit = random.Random(task.seed).randrange(10)
    messages = [{"role": "user", "content": "Guess my digit."}]
    async with AsyncOpenAI(base_url=base_url, api_key=key) as client:
        for _ in range(4):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            guess = (answer.choices[0].message.content or "").strip()
            if guess not in tuple("0123456789"):
                return 0.0
            if int(guess) == digit:
                return 1.0
            messages.append({"role": "assistant", "content": guess})
            messages.append({"role": "user", "content": "higher" if int(guess) < digit else "lower"})
    return 0.0
