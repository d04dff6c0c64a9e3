"""What a step of training changes in the weights that engines load, and what a delta to the version before has of their
bytes. At each learning rate the policy begins anew from MODEL and trains STEPS steps on its own responses with random
advantages; each version is published, rebuilt of the one before by its delta, and compared bit by bit.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import mean

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from staleflow.stores.trajectory import PolicyVersion
from staleflow.stores.weights.weight_folder import WeightFolder, read
from staleflow.tasks.training.microbatches import Row
from staleflow.tasks.training.policy import TrainerSettings
from staleflow.tasks.training.policy_trainer import PolicyTrainer
from staleflow.tasks.training.trainer_settings import TrainingConfig

PROMPT_TOKENS = 8
RESPONSE_TOKENS = 24


def batches(path: str, steps: int, rows: int) -> list[list[Row]]:
    """Rows of each step: responses of the model to drawn tokens, half of them better than the others."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens = len(AutoTokenizer.from_pretrained(path))
    results = []
    for _ in range(steps):
        prompts = torch.randint(0, tokens, (rows, PROMPT_TOKENS))
        whole = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, max_new_tokens=RESPONSE_TOKENS,
            min_new_tokens=RESPONSE_TOKENS, pad_token_id=0,
        )  # fmt: skip
        with torch.no_grad():
            logprobs = model(whole).logits[:, :-1].log_softmax(-1).gather(2, whole[:, 1:, None]).squeeze(2)
        results.append(
            [
                Row(
                    prompt=prompts[i].numpy().astype(np.int32),
                    response=whole[i, PROMPT_TOKENS:].numpy().astype(np.int32),
                    behaviour=logprobs[i, PROMPT_TOKENS - 1 :].numpy(),
                    sampled=np.ones(RESPONSE_TOKENS, np.bool_),
                    advantage=1.0 if i % 2 else -1.0,
                    staleness=0,
                )
                for i in range(rows)
            ]
        )
    return results


def trained(path: str, dtype: str, rate: float, steps: list[list[Row]], minibatches: int, folder: Path) -> str:
    """A row of the table."""
    settings = TrainerSettings(
        model=path, dtype=dtype, device="auto", num_steps=len(steps), temperature=1.0, max_length=64, seed=0,
        training=TrainingConfig(learning_rate=rate, minibatches=minibatches, microbatch_tokens=1024),
    )  # fmt: skip
    policy = PolicyTrainer(settings)
    published, target = WeightFolder(folder / "published"), WeightFolder(folder / "target")
    policy.published(lambda weights: published.publish(PolicyVersion(0), weights))
    target.path(PolicyVersion(0)).write_bytes(published.path(PolicyVersion(0)).read_bytes())
    shares, changed, costs, rebuilt = [], [], [], []
    for step, rows in enumerate(steps):
        policy.step(step, rows)
        version, before = PolicyVersion(step + 1), PolicyVersion(step)
        used = [time.process_time()]
        policy.published(partial(published.publish, version))
        used.append(time.process_time())
        held = policy.published(partial(published.publish, version, delta=True))
        used.append(time.process_time())
        costs.append((used[2] - used[1]) / (used[1] - used[0]))
        whole = published.path(version).stat().st_size
        delta = published.delta_path(version)
        shares.append(published.size(delta) / whole if delta.exists() else 1.0)
        if delta.exists():
            target.delta_path(version).write_bytes(delta.read_bytes())
            used.append(time.process_time())
            target.rebuild(version, before, held)
            rebuilt.append(time.process_time() - used[-1])
        else:
            target.path(version).write_bytes(published.path(version).read_bytes())
        assert target.path(version).read_bytes() == published.path(version).read_bytes(), "other bits"
        old, new = (read(published.path(v)) for v in (before, version))
        changed.append(sum(int((old[n] != new[n]).sum()) for n in new) / sum(t.numel() for t in new.values()))
        published.prune(()), target.prune(())
    for item in (published, target):
        item.remove()
    return (
        f"| {dtype} | {rate:g} | {minibatches} | {mean(changed):.2%} | {mean(shares):.2%} | {shares[-1]:.2%} | "
        f"{whole * mean(shares) / 2**20:.2f} of {whole / 2**20:.1f} | {mean(costs):.2f} | "
        f"{mean(rebuilt) if rebuilt else 0:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 2e-6, 1e-5, 1e-4])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--minibatches", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="one learning rate, two steps")
    args = parser.parse_args()
    steps, rates = (2, args.rates[:1]) if args.quick else (args.steps, args.rates)
    given = batches(args.model, steps, args.rows)
    print(
        "| type | learning rate | updates a step | elements changed | bytes of the delta | in the last step | MiB | "
        "CPU of publishing, times without | CPU-s to rebuild |\n|---|---|---|---|---|---|---|---|---|"
    )
    for dtype in args.dtypes:
        for rate in rates:
            for count in args.minibatches:
                with tempfile.TemporaryDirectory(prefix="deltas-", dir="/dev/shm") as folder:
                    print(trained(args.model, dtype, rate, given, count, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
