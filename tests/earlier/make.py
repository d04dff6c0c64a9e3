"""Make the runs that tests/stored_runs/test_conversion.py converts, with the command line's output about them.

    PYTHONPATH=. python -m tests.earlier.make        (some five minutes on two cores)

They must be made by the version whose runs `staleflow store convert` converts (README.md has its commit); this version
writes runs that need no conversion.

finished   a whole run of a tiny model: trajectories of up to three segments, members aborted as redundant, evaluations,
           a branch with other rewards, one with logprobs, the latest two resume points
killed     the same job, all of its processes killed in the middle, with its spool
resumed    that run resumed: two journals, a step undone that no resume point had reached
agent      a run of an agent of many turns that changes its past: context branches, auxiliary turns, seconds of tools
credits    an emulated engine; another system's admission, groups without signal dropped, an instance lost
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from tests.earlier.asking import HERE, MADE_IN, NAMES, answer, ask, clear, exported, trained_offline, unpack

ROOT = HERE.parent.parent
FOLDER = Path(MADE_IN)
RUNS = FOLDER / "runs"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
RESUME_POINTS = 2
"""Packed of each run."""
LEFT_OUT = ("tensorboard", "checkpoints", "summary.png", ".running", "simulate.json")

JOB = f"""
name = "finished"
runs_dir = "{RUNS}"
steps = 4
seed = 3

[model]
path = "{FOLDER}/model"

[task]
source = "reasoning_gym:chain_sum"
options = {{ min_terms = 2, max_terms = 3, min_digits = 1, max_digits = 1 }}
eval_prompts = 8

[reward]
function = "{FOLDER}/rewards.py:digits"

[batch]
groups_per_step = 3
group_size = 4
extra_members = 1

[staleness]
eta = 2

[rollout]
instances = 2
max_new_tokens = 48

[rollout.engine]
max_running = 4
kv_tokens = 1024

[training]
learning_rate = 1e-3
minibatches = 2

[cluster]
dashboard = false

[deadlines]
call_s = 30
stuck_s = 60
"""

EMULATED = f"""
name = "credits"
runs_dir = "{RUNS}"
steps = 4
seed = 2

[batch]
groups_per_step = 4
group_size = 3

[staleness]
eta = 2

[rollout]
instances = 2
max_new_tokens = 300

[rollout.engine]
name = "emulated"
max_running = 8
kv_tokens = 4000

[workload]
median = 60
prompt_tokens = 20

[simulation]
train_s = 0.5
pull_s = 0.05
report_s = 0.2

[cluster]
dashboard = false

[tracking]
tensorboard = false

[deadlines]
call_s = 30
stuck_s = 60
"""

REWARDS = '''
"""Rewards of the runs; any model, however bad, gets a signal by them."""


def digits(answer, record):
    return min(1.0, sum(c.isdigit() for c in answer) / 10), {"length": float(len(answer))}


def odd(answer, record):
    if not answer:
        raise ValueError("no answer")
    return float(len(answer) % 2)
'''

AGENT = '''
"""An agent that asks two turns, then begins anew without the first, and asks for a title on the side."""

import asyncio
import json
import urllib.request


def ask(base_url, key, messages, **more):
    body = json.dumps({"model": "policy", "messages": messages, **more}).encode()
    head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body, head)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]


async def play(base_url, key, task):
    first = {"role": "user", "content": f"{task.seed % 10}+1="}
    messages = [first]
    said = []
    for turn in range(3):
        if turn == 2:
            messages = [first, {"role": "user", "content": "2+2="}]
        answer = await asyncio.to_thread(ask, base_url, key, messages)
        said.append(answer["content"] or "")
        messages += [answer, {"role": "user", "content": "3+4="}]
        await asyncio.sleep(0.01)
    if task.seed % 2:
        await asyncio.to_thread(ask, base_url, key, [{"role": "user", "content": "5="}], auxiliary=True)
    digits = sum(c.isdigit() for c in "".join(said))
    return min(1.0, digits / 10), {"length": float(len("".join(said)))}
'''

LOSER = '''
"""A tracker by which a run loses a rollout instance at its second step."""

import asyncio
import os


class Loser:
    def __init__(self, run_dir, job):
        self.tasks = []

    def step(self, step, metrics):
        if step == 1:
            self.tasks.append(asyncio.ensure_future(self.lose()))

    async def lose(self):
        from distributed import default_client

        client = default_client()
        for key, workers in (await client.who_has()).items():
            if "rollout-0" in str(key):
                await client.run(os._exit, 1, workers=list(workers), nanny=False)

    def close(self):
        pass
'''


def make_model(folder: Path) -> None:
    """A random Llama of 4000 parameters with the demo's tokenizer."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    from staleflow.tasks.training.tiny_model import SYMBOLS, make_tokenizer

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(SYMBOLS),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
    )
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def staleflow(*words: str | Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "staleflow.cli.main", *map(str, words)], env=ENVIRONMENT, cwd=FOLDER, check=True
    )


def settings(*overrides: str) -> Iterator[str]:
    for override in overrides:
        yield from ("--set", override)


def kill_in_the_middle(job: Path, step: int) -> None:
    """Run a job in a process group of its own, and kill the group soon after a step."""
    words = ["run", str(job), *settings("name=killed", "steps=400", "rollout.spool_s=0.05")]
    with subprocess.Popen(
        [sys.executable, "-m", "staleflow.cli.main", *words],
        env=ENVIRONMENT, cwd=FOLDER, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith(f"step {step}/"):
                break
        os.killpg(process.pid, signal.SIGKILL)


def pack(run: Path, name: str) -> None:
    """NAME.tar.gz: the run without what nobody reads again, with its model and its rewards if it has any."""
    left_out = {run / each for each in LEFT_OUT}
    left_out |= set(sorted((run / "resume").glob("v*.pt"))[:-RESUME_POINTS])

    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if FOLDER / member.name in left_out:
            return None
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    parts = [
        run,
        *([FOLDER / "model", FOLDER / "rewards.py", FOLDER / "agent.py"] if (run / "resume").is_dir() else []),
    ]
    with (
        gzip.GzipFile(HERE / f"{name}.tar.gz", "wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for part in parts:
            archive.add(part, str(part.relative_to(FOLDER)), filter=kept)


def write_answers(name: str) -> None:
    """NAME.json: what the command line says of a fixture now."""
    folder = FOLDER / "unpacked" / name
    run = unpack(name, folder)
    answers = ask(run)
    if name == "finished":
        answers["store diff"] = json.loads(answer("store", "diff", run, "main", "odd", "--json"))
        answers["store export"] = exported(run, "odd")
    if name != "credits":  # an emulated engine has nothing to train
        answers["train-offline"] = trained_offline(run)
    (HERE / f"{name}.json").write_text(json.dumps(answers, indent=1) + "\n")


def make_runs() -> None:
    """All runs, packed, and a line that says what made them."""
    FOLDER.mkdir()
    make_model(FOLDER / "model")
    job, emulated = FOLDER / "job.toml", FOLDER / "emulated.toml"
    job.write_text(JOB)
    emulated.write_text(EMULATED)
    (FOLDER / "rewards.py").write_text(REWARDS)
    (FOLDER / "agent.py").write_text(AGENT)
    (FOLDER / "loser.py").write_text(LOSER)

    staleflow("run", job)
    subprocess.run(  # some rows fail to be scored, and the command says so by its exit code
        [sys.executable, "-m", "staleflow.cli.main", "store", "reprocess", str(RUNS / "finished"),
         "--reward", f"{FOLDER}/rewards.py:odd", "--branch", "odd"],
        env=ENVIRONMENT, cwd=FOLDER,
    )  # fmt: skip
    staleflow(
        "store", "rescore-logprobs", RUNS / "finished", "--model", max((RUNS / "finished/checkpoints").iterdir()),
        "--branch", "last", "--workers", 1,
    )  # fmt: skip
    pack(RUNS / "finished", "finished")

    kill_in_the_middle(job, 3)
    pack(RUNS / "killed", "killed")
    newest = max((RUNS / "killed" / "resume").glob("v*.pt"))
    newest.unlink()
    staleflow("resume", RUNS / "killed", *settings("steps=5"))
    pack(RUNS / "killed", "resumed")

    staleflow(
        "run", job,
        *settings("name=agent", f"task.source=agent:{FOLDER}/agent.py:play", "task.options={}", "reward.function=task",
                  "rollout.turn_tokens=8", "rollout.max_new_tokens=80", "task.eval_prompts=0", "steps=3",
                  "staleness.eta=1", "batch.extra_members=0"),
    )  # fmt: skip
    pack(RUNS / "agent", "agent")

    loser = f"tracking.tracker={FOLDER}/loser.py:Loser"
    staleflow(
        "run", emulated,
        *settings("staleness.admission=credits", "batch.filtering=no_signal", "workload.signal_share=0.7",
                  "batch.extra_members=1", loser),
    )  # fmt: skip
    lost = RUNS / "credits" / "config.toml"
    lost.write_text(lost.read_text().replace(f"{FOLDER}/loser.py:Loser", ""))
    pack(RUNS / "credits", "credits")
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)
    (HERE / "README.md").write_text(
        "Runs made by the version before store columns were arrays of their own, and what that version said of them.\n"
        f"`make.py` says how they were made. Made by commit {git.stdout.strip()}.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", action="store_true", help="keep the runs; only ask anew what is said of them")
    clear(FOLDER)
    if not parser.parse_args().answers:
        make_runs()
    for name in NAMES:
        write_answers(name)
    clear(FOLDER)


if __name__ == "__main__":
    main()
