"""Make the fixtures of tests/test_earlier_versions.py: small runs, packed, with the command line's output about them.

    PYTHONPATH=. python -m tests.earlier.make        (some five minutes on two cores)

They must be made by the version whose stores, journals and job files later versions must still read; running this with
a later version makes other fixtures and proves less. README.md says which version made the present ones.

finished   a whole run of a tiny model: trajectories of up to three segments, members aborted as redundant, evaluations,
           a branch with other rewards, the latest two resume points
killed     the same job, all of its processes killed in the middle
resumed    that run resumed: two journals, a step undone that no resume point had reached
credits    an emulated engine; another system's admission, groups without signal dropped, an instance lost
deadline   an emulated engine; migration between instances, stragglers cut off
backlog    an emulated engine; an admission that keeps no bound
"""

from __future__ import annotations

import argparse
import gzip
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from tests.earlier.asking import HERE, MADE_IN, NAMES, answer, ask, clear, exported, unpack

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
    words = ["run", str(job), *settings("name=killed", "steps=400")]
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

    parts = [run, *([FOLDER / "model", FOLDER / "rewards.py"] if (run / "resume").is_dir() else [])]
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
    answers["simulate --from"] = json.loads(answer("simulate", "--from", run, "--json"))
    if name == "finished":
        answers["store diff"] = json.loads(answer("store", "diff", run, "main", "odd", "--json"))
        answers["store export"] = exported(run, "odd")
    (HERE / f"{name}.json").write_text(json.dumps(answers, indent=1) + "\n")


def make_runs() -> None:
    """All runs, packed, and a line that says what made them."""
    FOLDER.mkdir()
    make_model(FOLDER / "model")
    job, emulated = FOLDER / "job.toml", FOLDER / "emulated.toml"
    job.write_text(JOB)
    emulated.write_text(EMULATED)
    (FOLDER / "rewards.py").write_text(REWARDS)
    (FOLDER / "loser.py").write_text(LOSER)

    staleflow("run", job)
    subprocess.run(  # some rows fail to be scored, and the command says so by its exit code
        [sys.executable, "-m", "staleflow.cli.main", "store", "reprocess", str(RUNS / "finished"),
         "--reward", f"{FOLDER}/rewards.py:odd", "--branch", "odd"],
        env=ENVIRONMENT, cwd=FOLDER,
    )  # fmt: skip
    pack(RUNS / "finished", "finished")

    kill_in_the_middle(job, 3)
    pack(RUNS / "killed", "killed")
    newest = max((RUNS / "killed" / "resume").glob("v*.pt"))
    newest.unlink()
    staleflow("resume", RUNS / "killed", *settings("steps=5"))
    pack(RUNS / "killed", "resumed")

    loser = f"tracking.tracker={FOLDER}/loser.py:Loser"
    staleflow(
        "run", emulated,
        *settings("staleness.admission=credits", "batch.filtering=no_signal", "workload.signal_share=0.7",
                  "batch.extra_members=1", loser),
    )  # fmt: skip
    lost = RUNS / "credits" / "config.toml"
    lost.write_text(lost.read_text().replace(f"{FOLDER}/loser.py:Loser", ""))
    pack(RUNS / "credits", "credits")
    staleflow(
        "run", emulated,
        *settings("name=deadline", "rollout.routing=deadline", "rollout.on_pull=keep",
                  "rollout.migration=largest_gain", "rollout.migration_gain=0.01", "rollout.engine.max_running=16",
                  "batch.stragglers=truncate", "batch.straggler_share=0.5", "batch.straggler_patience=0.1",
                  "workload.sigma=1.5", "rollout.cost.k3=1e-3", "workload.median=100"),
    )  # fmt: skip
    pack(RUNS / "deadline", "deadline")
    staleflow("run", emulated, *settings("name=backlog", "staleness.admission=backlog", "steps=3"))
    pack(RUNS / "backlog", "backlog")
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)
    version = importlib.metadata.version("staleflow")
    (HERE / "README.md").write_text(
        "Runs made by earlier versions, and what those versions said of them. `make.py` says how they were made.\n\n"
        f"Made by: staleflow {version}, commit {git.stdout.strip()}.\n"
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
