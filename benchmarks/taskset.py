"""A taskset of the package `verifiers`, trained on unmodified: rewards, episodes and errors of each step.

    python -m benchmarks.taskset

The taskset is its own `textarena` with the game Hangman: the package's environment, harness, interception, rewards and
train client run as they are, and ask the endpoint for token ids; the transformers engine samples. A model is pretrained
on games of a careless player, who guesses letters of the words and others alike, and earns reward in some of them.

Needs `verifiers`, `textarena`, `nltk` and `uv`; docs/agents.md says how they are installed side by side. Nothing is
downloaded: the words that the game draws from are written here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from staleflow.pipeline.config import loading
from staleflow.pipeline.jobs.execution import execute
from staleflow.pipeline.runtime.run_listener import RunListener
from staleflow.stores.auditing.audit import audit
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import Fate
from staleflow.tasks.training.tiny_model import SPECIAL, Recipe, pretrain

JOB = "examples/agent_openai.toml"
GAME = "Hangman-v0"
WORDS = ("tea", "eat", "ate", "ten", "net", "ant", "tan", "rat", "art", "tar", "sat", "sea", "set", "ran", "ear", "era")
LETTERS = "ATENSRXQ"
"""What the player guesses: the words' letters and two others."""
TURNS = 6
"""Of an episode, which has no reward if the word is not found by then."""
AGAIN = 0.05
"""Share of guesses in which the player forgets what it has guessed."""
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% if message.role == 'assistant' %}{{ '<eos>' }}{% endif %}"
    "{% endfor %}"
)
RECIPE = Recipe(steps=150, hidden_size=64, num_layers=2, learning_rate=3e-3, warmup_steps=30, initializer_range=0.1)


def latest(observation: Any) -> str:
    """What the taskset shows of an observation after the first."""
    return str(observation).split("[GAME]")[-1].strip()


def careless_game(seed: int, rng: random.Random) -> tuple[list[str], float]:
    """A game of the careless player: what is said in turn by the taskset and by the player, and the reward."""
    import textarena
    from verifiers.v1.tasksets.textarena.taskset import SYSTEM_PROMPT

    random.seed(seed)
    game = textarena.make(env_id=GAME)
    game.reset(num_players=1)
    messages = [SYSTEM_PROMPT + str(game.get_observation()[1])]
    letters = rng.sample(LETTERS, len(LETTERS))
    for turn in range(TURNS):
        guess = rng.choice(letters[:turn]) if turn and rng.random() < AGAIN else letters[turn]
        messages.append(f"[{guess}]")
        done, _ = game.step(messages[-1])
        if done:
            return messages, float(game.state.rewards[0])
        messages.append(latest(game.get_observation()[1]))
    return messages[:-1], 0.0


def games(seed: int) -> Iterator[tuple[str, ...]]:
    """Endless games."""
    rng = random.Random(seed)
    while True:
        yield tuple(careless_game(rng.randrange(2**31), rng)[0])


def symbols() -> tuple[str, ...]:
    """The tokens: whole lines of what the taskset says, its cells and letters, and guesses."""
    import textarena
    from verifiers.v1.tasksets.textarena.taskset import SYSTEM_PROMPT

    game = textarena.make(env_id=GAME)
    game.reset(num_players=1)
    begin = f"{SYSTEM_PROMPT}\n{game.get_observation()[1]}"
    game.step("[X]")
    game.step("[X]")
    lines = [line.strip() for line in begin.splitlines() if len(line.split()) > 1 and "_  " not in line]
    cells = next(line for line in lines if line.startswith("C00"))
    lines.remove(cells)
    before, _, after = latest(game.get_observation()[1]).partition("'X'")
    guesses = [f"[{letter}]" for letter in LETTERS]
    results = {*lines, *cells.split(), f"{before}'", f"'{after}".strip(), *guesses, "_", *LETTERS}
    return (*SPECIAL, *sorted(results, key=lambda symbol: (-len(symbol), symbol)))


def make_words(folder: Path) -> None:
    """The corpus that the game draws words from, as nltk finds it."""
    (folder / "corpora" / "words").mkdir(parents=True, exist_ok=True)
    for name in ("en", "en-basic"):
        (folder / "corpora" / "words" / name).write_text("\n".join(WORDS) + "\n")


def make_model(folder: Path, recipe: Recipe) -> float:
    """A model that knows the form of the game; returns the mean reward of the games that it learns from."""
    pretrain(folder, games(0), recipe, lambda _: None, lambda *_: None, symbols())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    rng = random.Random(1)
    return float(np.mean([careless_game(rng.randrange(2**31), rng)[1] for _ in range(200)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder for model and run; kept")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--quick", action="store_true", help="one step of one group: whether it works")
    args = parser.parse_args()
    recipe, overrides = RECIPE, ["batch.groups_per_step=2", "batch.group_size=4"]
    if args.quick:
        args.steps, recipe = 1, Recipe(steps=60, hidden_size=64, num_layers=1, warmup_steps=10)
        overrides[0] = "batch.groups_per_step=1"
    folder = args.out or Path(tempfile.mkdtemp())
    try:
        measure(folder.resolve(), recipe, (f"steps={args.steps}", f"seed={args.seed}", *overrides, *args.set))
    finally:
        if args.out is None:
            shutil.rmtree(folder, ignore_errors=True)


def measure(folder: Path, recipe: Recipe, overrides: tuple[str, ...]) -> None:
    """Train, and print what came of each step."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH"))))
    os.environ["NLTK_DATA"] = str(folder / "nltk")
    make_words(folder / "nltk")
    model = folder / "model"
    if not (model / "config.json").exists():
        print(f"mean reward of the games that the model learns from: {make_model(model, recipe):.3f}", flush=True)
    env = f'{{ taskset = {{ game = "{GAME}" }}, player = {{ max_turns = {TURNS} }} }}'
    config = loading.load(JOB, (
        f"model.path={model}", f"runs_dir={folder}/runs", "name=taskset", "task.source=verifiers:textarena",
        f"task.options.env={env}", 'task.options.renderer={ name = "default" }', "task.chat=true",
        "task.eval_prompts=0", "cluster.dashboard=false", "environment.step_timeout_s=300", "environment.memory_mib=0",
        f"environment.max_turns={TURNS + 1}", "environment.concurrency=4", "rollout.instances=1",
        "rollout.max_new_tokens=120", "deadlines.stuck_s=900", *overrides,
    ))  # fmt: skip
    end = asyncio.run(execute(config, RunListener()))
    store = VersionedStore.open(end.run_dir / "store")
    print(
        "\n| step | episodes | mean reward | turns, mean | branches | not scored | ess |\n|---|---|---|---|---|---|---|"
    )
    for record in store.steps():
        if record.kind == "step":
            m = record.metrics
            episodes = len(list(store.ended(step=record.step)))
            print(
                f"| {record.step} | {episodes} | {m['reward']:.3f} | {m['turns_mean']:.2f} | {m['branches']:.0f} "
                f"| {m['reward_errors']:.0f} | {m['ess']:.3f} |"
            )
    rows = list(store.ended())
    consumed = [row.trajectory for row in rows if row.fate is Fate.CONSUMED]
    summary = json.loads((end.run_dir / "summary.json").read_text())
    rewarded = sum(t.reward > 0 for t in consumed)
    print(f"\nepisodes consumed: {len(consumed)}, {rewarded} of them with a reward above 0; ended: {summary['ended']}")
    print(f"errors: {sorted({row.trajectory.error for row in rows if row.trajectory.error})}")
    print(f"findings of the audit: {len(audit(store).findings)}")


if __name__ == "__main__":
    main()
