"""Tokens per processor second of vLLM with and without speculation, by requests that run at once and source of drafts.

    python -m benchmarks.speculation FOLDER [--run RUN]

Each kind of engine samples the same groups in turn, in one process per kind that takes its turns with the others: each
round, each kind samples `--running` requests of one prompt to their end. Prompts are those that a stored run was
trained on last, or three others. Rounds after the first see prompts again, as epochs do: what `responses` knows then is
what ran here before. A processor second is that of the whole process, which other work on the machine changes little.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import InstanceId, TrajectoryId
from staleflow.tasks.engines.base import Request, SampledTokens
from staleflow.tasks.engines.engine_builder import build_engine
from staleflow.tasks.engines.engine_settings import Speculation, VllmSettings

PROMPTS = (
    "What is 17 + 25 + 8? Show the sum step by step.",
    "List the days of the week, then the months of the year.",
    "Write a short story about a fox and a crow.",
)
KINDS = {
    "off": (0, "responses", 1000),
    "responses": (4, "responses", 1000),
    "suffix": (4, "suffix", 1000),
}
"""By name: tokens drafted, what from, and up to how many requests."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a causal LM with its tokenizer")
    parser.add_argument("--run", type=Path, help="folder of a stored run, of a model with the same tokens")
    parser.add_argument("--kinds", nargs="+", default=["off", "responses"], choices=KINDS)
    parser.add_argument("--running", nargs="+", type=int, default=[1, 4, 16], help="requests of a group")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a response")
    parser.add_argument("--rounds", type=int, default=2, help="times that each prompt is sampled")
    parser.add_argument("--prompts", type=int, default=3, help="prompts of a round")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--quick", action="store_true", help="smallest sizes: that it works")
    args = parser.parse_args()
    if args.quick:
        args.running, args.tokens, args.rounds, args.prompts = [1, 2], 16, 1, 1
    context = multiprocessing.get_context("spawn")
    engines: dict[str, Connection] = {}
    for kind in args.kinds:
        ours, theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, kind, args), daemon=True).start()
        engines[kind] = ours
        ours.recv()
    print(f"{'running':>8} {'round':>6} {'kind':>10} {'tokens/s':>9} {'ratio':>6} {'drafted':>8} {'accepted':>9}")
    for running in args.running:
        for turn in range(args.rounds):
            speeds: dict[str, float] = {}
            for kind, engine in engines.items():
                engine.send((running, turn))
                tokens, seconds, drafted, accepted = engine.recv()
                speeds[kind] = tokens / seconds
                share = f"{accepted / drafted:.0%}" if drafted else "-"
                print(
                    f"{running:>8} {turn:>6} {kind:>10} {speeds[kind]:>9.1f} "
                    f"{speeds[kind] / speeds[args.kinds[0]]:>6.2f} {drafted / tokens:>8.2f} {share:>9}",
                    flush=True,
                )
    for engine in engines.values():
        engine.send(None)


def serve(asked: Connection, kind: str, args: Any) -> None:
    """Build an engine and answer (requests at once, round) with (tokens, processor seconds, drafted, accepted)."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = stored_prompts(args.run, args.prompts) if args.run else made_prompts(tokenizer)[: args.prompts]
    length, source, most_running = KINDS[kind]
    settings = VllmSettings(
        model=args.model, dtype="float32", device="cpu", temperature=args.temperature, max_running=64, kv_tokens=16384,
        page_tokens=32, max_batch_tokens=1024, eos=(tokenizer.eos_token_id,), seed=0,
        speculation=Speculation(num_speculative_tokens=length, source=source, disable_above=most_running),
    )  # fmt: skip
    engine = build_engine(settings, InstanceId(kind), 1)
    number = 1
    engine.submit(
        [Request(trajectory=TrajectoryId(0), route_number=1, tokens=prompts[0][:1], max_new_tokens=args.tokens)]
    )
    while not any(isinstance(event, SampledTokens) for event in engine.events(1.0)):
        pass  # what is compiled and loaded at the first use is not measured
    asked.send("built")
    while (group := asked.recv()) is not None:
        running, _ = group
        before, begin = engine.load_statistics(), _processor_s()
        for prompt in prompts:
            ids = range(number, number := number + running)
            engine.submit(
                [
                    Request(trajectory=TrajectoryId(i), route_number=1, tokens=prompt, max_new_tokens=args.tokens)
                    for i in ids
                ]
            )
            left = running
            while left:
                left -= sum(isinstance(event, SampledTokens) for event in engine.events(1.0))
        after = engine.load_statistics()
        asked.send(
            (
                after.tokens_sampled - before.tokens_sampled,
                _processor_s() - begin,
                after.drafted_tokens - before.drafted_tokens,
                after.accepted_tokens - before.accepted_tokens,
            )
        )
    engine.close()


def stored_prompts(run: Path, count: int) -> list[tuple[int, ...]]:
    """Different prompts of what a run was trained on last."""
    store = VersionedStore.open(run / "store")
    results: dict[tuple[int, ...], None] = {}
    for step in reversed(range(store.summary().num_steps)):
        results |= dict.fromkeys(tuple(row.trajectory.prompt_tokens.tolist()) for row in store.trajectories(step))
        if len(results) >= count:
            break
    return list(results)[:count]


def made_prompts(tokenizer: Any) -> list[tuple[int, ...]]:
    """PROMPTS under the model's template; of a model that has none, a sum."""
    if not tokenizer.chat_template:
        return [tuple(tokenizer("1+2")["input_ids"])] * len(PROMPTS)
    asked = ([{"role": "user", "content": text}] for text in PROMPTS)
    return [tuple(tokenizer.apply_chat_template(item, add_generation_prompt=True)["input_ids"]) for item in asked]


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
