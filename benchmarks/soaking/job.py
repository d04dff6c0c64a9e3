"""The soak's jobs: emulated engine and trainer, prompts that carry their number. What rewards a response and what
trains on it differs by kind; a job may be of several kinds at once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Kind = Literal["plain", "turns", "agents", "ranks"]
"""plain: a reward function, which hangs on request. turns: episodes of some turns in a user's environment, on two
hosts. agents: the same by a program that asks for its turns over HTTP. ranks: a trainer of two processes."""
KINDS: tuple[Kind, ...] = get_args(Kind)
EPISODES: tuple[Kind, ...] = ("turns", "agents")
"""Kinds whose responses are scored by environments and not by reward workers. A job is of one of them at most."""
NAME = "soak"
STEPS = 1_000_000
"""More than any soak trains: it ends when its faults are spent."""
DIGITS = 8

JOB = """
name = "{name}"
runs_dir = "{folder}/runs"
store = "{store}"
steps = {steps}
seed = {seed}

[model]
path = "{folder}/model"

{task}
[training]
ranks = {ranks}

[batch]
groups_per_step = 4
group_size = 4

[staleness]
eta = {eta}

[rollout]
instances = {instances}
max_new_tokens = 200
max_attempts = 1000
cost_tolerance = 1e9

[rollout.engine]
name = "emulated"
max_running = 16
kv_tokens = 4000

[workload]
median = 50
prompts = "task"

[simulation]
train_s = 0.3
pull_s = 0.02

[tracking]
tensorboard = false

[cluster]
kind = "file"
scheduler_file = "{folder}/scheduler.json"
dashboard = false

[deadlines]
start_s = 120
call_s = 20
sample_s = 20
train_s = 60
stuck_s = 60
"""
SCORED = """[task]
source = "{folder}/code/numbered.py:Numbers"
eval_prompts = 0

[reward]
function = "{folder}/code/numbered.py:score"
timeout_s = 3
max_error_share = 1.0
"""
ACTING = """[task]
source = "{source}"
multi_turn = "yes"
eval_prompts = 0

[environment]
hosts = 2
step_timeout_s = 5
max_failed_share = 1.0

[reward]
max_error_share = 1.0
"""
SOURCES: dict[Kind, str] = {
    "turns": "{folder}/code/numbered.py:Episode",
    "agents": "agent:{folder}/code/numbered.py:play",
}
CODE = '''
import asyncio
import json
import time
from pathlib import Path

from tornado.httpclient import AsyncHTTPClient

HANG = Path("{folder}/hang")


class Numbers:
    """Prompt number i is the number i."""

    def __init__(self, options, seed):
        pass

    def record(self, index, held_out):
        return {{"prompt": f"{{index:0{digits}d}}"}}

    def score(self, answer, record):
        return 0.0


class Episode:
    """An episode of three turns, each answered after a moment. Task number i begins with the number i."""

    repeatable = True

    def reset(self, seed, options):
        self.turns = 0
        return f"{{options['index']:0{digits}d}}", {{}}

    def step(self, action):
        time.sleep(0.1)
        self.turns += 1
        return str(len(action) % 10), float(len(action) % 2), self.turns == 3, False, {{}}


async def play(base_url, key, task):
    """The same three turns, asked for over HTTP. Task number i begins with the number i."""
    client = AsyncHTTPClient(max_clients=256)
    messages, reward = [{{"role": "user", "content": f"{{task.index:0{digits}d}}"}}], 0.0
    for _ in range(3):
        answer = await client.fetch(
            f"{{base_url}}/chat/completions",
            method="POST",
            headers={{"Authorization": f"Bearer {{key}}", "Content-Type": "application/json"}},
            body=json.dumps({{"model": "policy", "messages": messages}}),
            request_timeout=3600,
            connect_timeout=60,
        )
        text = json.loads(answer.body)["choices"][0]["message"]["content"] or ""
        reward += len(text) % 2
        await asyncio.sleep(0.1)
        messages += [{{"role": "assistant", "content": text}}, {{"role": "user", "content": str(len(text) % 10)}}]
    return reward


def score(answer, record):
    try:
        HANG.unlink()  # one call takes it
    except FileNotFoundError:
        return float(len(answer) % 2)
    time.sleep(3600)
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The soak's job in a folder. limit_s: seconds after a fault within which it must train again: the longest chain of
    its deadlines (a trainer that hangs, a driver that starts again on workers that must restart, a start)."""

    folder: Path
    seed: int
    eta: int = 2
    instances: int = 2
    kinds: tuple[Kind, ...] = ("plain",)
    store: str = ""
    """Where in a bucket the run's trajectories are stored; empty: in its folder."""

    @property
    def file(self) -> Path:
        return self.folder / "job.toml"

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / NAME

    @property
    def hang(self) -> Path:
        """The next call of the reward hangs once this file exists."""
        return self.folder / "hang"

    @property
    def limit_s(self) -> float:
        return 60.0 + 60.0 + 120.0 + 60.0

    def write(self) -> None:
        """Write the job, its code and a tokenizer of digits."""
        import numpy as np
        import tokenizers
        from safetensors.numpy import save_file

        (self.folder / "code").mkdir()
        (self.folder / "code" / "numbered.py").write_text(CODE.format(folder=self.folder, digits=DIGITS))
        text = JOB.format(
            folder=self.folder,
            name=NAME,
            steps=STEPS,
            seed=self.seed,
            eta=self.eta,
            instances=self.instances,
            store=self.store,
            ranks=2 if "ranks" in self.kinds else 1,
            task=self._task(),
        )
        self.file.write_text(text)
        model = self.folder / "model"
        model.mkdir()
        words = {word: i for i, word in enumerate(["<unk>", "<eos>", *"0123456789"])}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
        tokenizer.save(str(model / "tokenizer.json"))
        save_file({"none": np.zeros(1, np.float32)}, model / "model.safetensors")  # looked for, and never loaded
        (model / "tokenizer_config.json").write_text("{}")
        (model / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 4096}))

    def _task(self) -> str:
        """The tables of what is sampled and how it is scored."""
        for kind in EPISODES:
            if kind in self.kinds:
                return ACTING.format(source=SOURCES[kind].format(folder=self.folder))
        return SCORED.format(folder=self.folder)


def number_of(prompt: tuple[int, ...]) -> int:
    """The number that a prompt's tokens spell."""
    return int("".join(str(token - 2) for token in prompt))
