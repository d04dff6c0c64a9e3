"""Contexts of later turns that a real engine finds cached: a ten-turn job on two instances of a small cluster.

    python -m benchmarks.prefix --engine vllm --out docs

runs it with and without affinity, with enough memory and with little, and merges the engines' own counts into
agentic.json and agentic.md. An untrained tiny model ends its turns at random; the environment answers at length.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import agentic
from benchmarks.routing_rules import ROUTING_RULES
from staleflow.pipeline.config.model_facts import inspect_model
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.processes.dask_workers import connect
from staleflow.pipeline.recovery.run_folder import prepare_run_dir
from staleflow.pipeline.runtime.actors import Actors
from staleflow.pipeline.runtime.driver import Driver
from staleflow.pipeline.runtime.run_report import RunListener
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import EnvSpan
from staleflow.tasks.engines.base import EngineLoad

PART = "prefix_real"
TURNS = 10
ANSWER = 60
"""Tokens of an answer. The model samples 16 a turn on average, one of its 16 symbols ends it."""
SYMBOLS = ("<pad>", "<eos>", "<unk>", *"0123456789+-=")
JOB: dict[str, Any] = {
    "seed": 1,
    "task": {"source": f"{__file__}:Talk", "multi_turn": "yes", "eval_prompts": 0},
    "environment": {"max_turns": TURNS},
    "batch": {"groups_per_step": 8, "group_size": 4},
    "staleness": {"eta": 1},
    "rollout": {
        "instances": 2, "max_new_tokens": 1900, "turn_tokens": 120,
        "routing": ROUTING_RULES["least_requests"],
        "engine": {"max_running": 32, "max_batch_tokens": 512},
    },
    "training": {"learning_rate": 1e-6, "microbatch_tokens": 2048, "checkpoint_every": 0},
    "cluster": {"dashboard": False},
    "deadlines": {"call_s": 120.0},
}  # fmt: skip


class Talk:
    """Says digits for nine turns, each time after .05 to .25 s; a fair coin decides on the reward."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self._rng = random.Random(seed)
        self._coin = random.Random()
        self._turns = 0
        return self._digits(8), {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._turns += 1
        await asyncio.sleep(self._rng.uniform(0.05, 0.25))
        ended = self._turns == TURNS
        return self._digits(ANSWER), float(self._coin.randrange(2)) * ended, ended, False, {}

    def _digits(self, count: int) -> str:
        return "".join(self._rng.choices("0123456789", k=count))


def make_model(folder: Path) -> None:
    """Write an untrained two-layer Llama."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    from staleflow.tasks.training.tiny_model import make_tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(SYMBOLS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    model.save_pretrained(folder)
    make_tokenizer(SYMBOLS).save_pretrained(folder)


async def loads(config: RunConfig) -> list[EngineLoad]:
    """Run a job; the load of each of its engines afterwards."""
    cluster = await connect(config)
    actors = Actors(config, cluster, prepare_run_dir(config), inspect_model(config))
    driver = Driver(config, actors, config.run_dir, RunListener())
    try:
        outcomes = await driver.run()
        if outcomes.lost_actors:
            raise SystemExit(f"an instance was lost, and what it had counted: {outcomes.lost_actors}")
        return [await actors.ask(str(name), "report") for name in actors.instances]
    finally:
        await driver.close()
        await cluster.close()


def counted(engine: str, kv_tokens: int, steps: int, folder: Path, *, affinity: bool, small: bool) -> dict[str, Any]:
    """What the engines of a run count. folder: with the model; the run goes there."""
    own = {
        "name": f"{engine}-{kv_tokens}-{affinity}", "runs_dir": str(folder), "steps": steps,
        "model": {"path": str(folder / "model")},
        "rollout": {"cache_affinity": affinity, "engine": {"name": engine, "kv_tokens": kv_tokens}},
    }  # fmt: skip
    config = agentic.job(own, agentic.SMALL if small else {}, base=JOB)
    engines = asyncio.run(loads(config))
    prefilled, cached = (sum(getattr(e, key) for e in engines) for key in ("prefilled_tokens", "cached_tokens"))
    rows = [row.trajectory for row in VersionedStore.open(config.run_dir / "store").trajectories()]
    new = sum(len(t.prompt_tokens) for t in rows)
    new += sum(len(span.tokens) for t in rows for span in t.spans if isinstance(span, EnvSpan))
    return {
        "part": PART, "engine": engine, "kv_tokens": kv_tokens, "affinity": affinity, "trajectories": len(rows),
        "turns": sum(len(t.turns) for t in rows) / len(rows), "context": prefilled + cached,
        "prefilled": prefilled / (prefilled + cached), "cached": cached / max(1, prefilled + cached - new),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="transformers", choices=("transformers", "vllm"))
    parser.add_argument("--out", type=Path, help="folder of agentic.json, to merge the results into; none by default")
    parser.add_argument("--quick", action="store_true", help="one short run: whether it works")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name) / "model")
        for kv_tokens in (40_000,) if args.quick else (6_000, 40_000):
            for affinity in (True,) if args.quick else (True, False):
                steps = 2 if args.quick else 8
                results.append(counted(args.engine, kv_tokens, steps, Path(name), affinity=affinity, small=args.quick))
                print(results[-1], flush=True)
    if args.out is not None:
        path = args.out / "agentic.json"
        others = [r for r in json.loads(path.read_text()) if (r["part"], r.get("engine")) != (PART, args.engine)]
        path.write_text(json.dumps(others + results, indent=1) + "\n")
        (args.out / "agentic.md").write_text(agentic.page(others + results))


if __name__ == "__main__":
    main()
