"""An agent of the `openai` client, with a tool and with streaming, beside the same game as an environment in-process.

    python -m benchmarks.agent_seeds

A small model learns the game of examples/agent_game.py, in which its guesses are calls of a tool. Each seed is trained
twice: by a program that only knows the client, and by a class with `reset` and `step`. The program writes down what it
is told, which is compared with what the run has stored, bit for bit. Needs the package `openai`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.endpoint import AgentArgs, stored_turns
from examples.make_agent_model import SYMBOLS, games
from staleflow.pipeline.config import loading
from staleflow.pipeline.jobs.execution import execute
from staleflow.pipeline.runtime.run_listener import RunListener
from staleflow.stores.auditing.audit import audit
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import Fate
from staleflow.tasks.training.tiny_model import Recipe, pretrain

JOB = "examples/agent_openai.toml"
CALL = ('<tool_call>{"name": "guess", "arguments": {"digit": ', "}}</tool_call>")
"""Around the digit. One token each."""
SHOWN_TOOL = "The tool is guess(digit)."
"""What the template shows of the definitions of tools."""
TEMPLATE = (
    "{% if tools %}{{ '" + SHOWN_TOOL + "' }}{% endif %}{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ '<eos>' }}{% endif %}{% endfor %}"
)
RECIPE = Recipe(steps=600, hidden_size=64, num_layers=2, learning_rate=3e-3, warmup_steps=30, initializer_range=0.1)
SHOWN_STEPS = (0, 4, 9, 14, 19)

PLAYERS = '''
import json, os, random

from openai import AsyncOpenAI

from examples.agent_game import QUESTION, HigherOrLower

TOOL = {
    "type": "function",
    "function": {
        "name": "guess",
        "parameters": {"type": "object", "properties": {"digit": {"type": "integer"}}, "required": ["digit"]},
    },
}
# Prompts are drawn by processes that are forked from one that has this: making a client takes tens of milliseconds.
CLIENT = AsyncOpenAI(base_url="http://localhost", api_key="none")


async def play(base_url, key, task):
    asking = CLIENT.with_options(base_url=base_url, api_key=key)
    digit = random.Random(task.seed).randrange(10)
    messages = [{"role": "user", "content": QUESTION}]
    with open(f"{task.options['told']}/{os.getpid()}.jsonl", "a") as log:
        for _ in range(4):
            stream = await asking.chat.completions.create(
                model="policy", messages=messages, tools=[TOOL], stream=True, extra_body={"return_token_ids": True}
            )
            content, calls = "", {}
            async for chunk in stream:
                delta, last = chunk.choices[0].delta, chunk
                content += delta.content or ""
                for call in delta.tool_calls or ():
                    calls.setdefault(call.index, call)
            logprobs = [one.logprob for one in last.choices[0].logprobs.content]
            before, ids = last.prompt_token_ids, last.choices[0].token_ids
            log.write(json.dumps([task.held_out, before, ids, logprobs]) + "\\n")
            log.flush()
            if len(calls) != 1:
                return 0.0
            call = calls[0]
            guess = json.loads(call.function.arguments)["digit"]
            if guess == digit:
                return 1.0
            messages.append({"role": "assistant", "content": content or None, "tool_calls": [call.model_dump()]})
            found = "higher" if guess < digit else "lower"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return 0.0


class InProcess(HigherOrLower):
    """The same game: what `play` does, without a program and a client."""

    def reset(self, seed):
        question, info = super().reset(seed)
        return [{"role": "system", "content": SHOWN_TOOL}, {"role": "user", "content": question}], info

    def step(self, action):
        text = action.strip()
        inside = text.startswith(CALL[0]) and text.endswith(CALL[1])
        return super().step(text[len(CALL[0]) : -len(CALL[1])] if inside else "")
'''


def tool_games(seed: int) -> Iterator[tuple[str, ...]]:
    """Games of the careless player, whose guesses are calls of the tool."""
    for game in games(seed):
        requests = [SHOWN_TOOL + game[0], *game[1:]]
        yield tuple(text if n % 2 == 0 else CALL[0] + text + CALL[1] for n, text in enumerate(requests))


def make_model(folder: Path, recipe: Recipe) -> None:
    """A model that knows the form of the game and of the tool's calls."""
    pretrain(folder, tool_games(0), recipe, lambda _: None, lambda *_: None, (*SYMBOLS, *CALL, SHOWN_TOOL))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def compared(store: VersionedStore, told: Path) -> tuple[int, int, int]:
    """Turns in the store, those of them that were told with these very ids and logprobs, and all that were told of
    training tasks. Two turns alike count as two."""
    heard: Counter[AgentArgs] = Counter()
    for file in told.iterdir():
        for line in file.read_text().splitlines():
            held_out, before, ids, logprobs = json.loads(line)
            if not held_out:
                heard[tuple(before), tuple(ids), np.asarray(logprobs, np.float32).tobytes()] += 1
    held = Counter(turn for row in store.ended() for turn in stored_turns(row.trajectory))
    return held.total(), (held & heard).total(), heard.total()


def one(folder: Path, name: str, source: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """One run: its summary, the mean rewards of its steps, and what of its turns was told."""
    told = folder / f"told-{name}"
    told.mkdir()
    options = f"task.options.told={told}" if source.startswith("agent:") else "task.options.guesses=4"
    fixed = (
        f"model.path={folder}/model", f"runs_dir={folder}/runs", f"name={name}", f"task.source={source}", options,
        "task.chat=true", "cluster.dashboard=false", "environment.step_timeout_s=300", *overrides,
    )  # fmt: skip
    end = asyncio.run(execute(loading.load(JOB, fixed), RunListener()))
    store = VersionedStore.open(end.run_dir / "store")
    findings = audit(store).findings
    if findings:
        raise SystemExit(f"{name}: the audit has findings: {findings[0]}")
    rewards = [r.metrics["reward"] for r in store.steps() if r.kind == "step"]
    summary: dict[str, Any] = json.loads((end.run_dir / "summary.json").read_text())
    consumed = sum(row.fate is Fate.CONSUMED for row in store.ended())
    return summary | {"rewards": rewards, "told": compared(store, told), "consumed": consumed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, help="folder for model and runs; kept")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--quick", action="store_true", help="one seed, two steps: whether it works")
    args = parser.parse_args()
    recipe, overrides = RECIPE, ["steps=20", "task.eval_prompts=200"]
    if args.quick:
        args.seeds, recipe = args.seeds[:1], Recipe(steps=60, hidden_size=64, num_layers=1, warmup_steps=10)
        overrides = ["steps=2", "task.eval_prompts=8", "batch.groups_per_step=4"]
    folder = args.out or Path(tempfile.mkdtemp())
    try:
        _measure(folder.resolve(), recipe, args.seeds, (*overrides, *args.set))
    finally:
        if args.out is None:
            shutil.rmtree(folder, ignore_errors=True)


def _measure(folder: Path, recipe: Recipe, seeds: list[int], overrides: tuple[str, ...]) -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH"))))
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model" / "config.json").exists():
        make_model(folder / "model", recipe)
    constants = f"SHOWN_TOOL = {SHOWN_TOOL!r}\nCALL = {CALL!r}\n"
    (folder / "players.py").write_text(PLAYERS + constants)
    steps = " | ".join(f"step {n}" for n in SHOWN_STEPS)
    print(f"| seed | | before, sampled | {steps} | after, sampled | before, greedy | after | whole run |")
    print("|---|---|---|" + "---|" * len(SHOWN_STEPS) + "---|---|---|---|", flush=True)
    lines: list[str] = []
    for seed in seeds:
        for label, source in (("client", "agent:{}:play"), ("in-process", "{}:InProcess")):
            result = one(folder, f"{label}-{seed}", source.format(folder / "players.py"), (f"seed={seed}", *overrides))
            first, last = result["evaluations"][0], result["evaluations"][-1]
            rewards = result["rewards"]
            shown = " | ".join(f"{rewards[n]:.3f}" if n < len(rewards) else "" for n in SHOWN_STEPS)
            print(
                f"| {seed} | {label} | {first['sampled']:.3f} | {shown} | {last['sampled']:.3f} "
                f"| {first['greedy']:.3f} | {last['greedy']:.3f} | {result['seconds']['wall_s']:.0f} s |",
                flush=True,
            )
            if source.startswith("agent:"):
                stored, as_told, told = result["told"]
                lines.append(
                    f"seed {seed}: {result['consumed']} episodes; {stored} turns stored, {as_told} of them told with "
                    f"these very ids and logprobs; {told} told"
                )
    print("\n".join(["", *lines]))


if __name__ == "__main__":
    main()
