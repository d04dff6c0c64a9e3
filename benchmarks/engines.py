"""The rollout engines against each other and against what they are built on. Needs vllm (`make test-vllm` installs it).

    python benchmarks/engines.py throughput MODEL   the rollout actor on a Dask cluster, vLLM's generate, HF generate
    python benchmarks/engines.py updates MODEL      weights in place: seconds, against a copy of the same bytes; memory
    python benchmarks/engines.py logprobs MODEL     vLLM's logprobs against the trainer's at equal weights, by dtype

Each system runs in a process of its own, one after another, twice around; the better time of each counts.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from staleflow.stores.trajectory import InstanceId, PolicyVersion, TrajectoryId
from staleflow.tasks.actors.actor_calls import remote_methods
from staleflow.tasks.actors.server_messages import RouteItem
from staleflow.tasks.engines.adapters import LoraConfig
from staleflow.tasks.engines.base import Engine, Request, SampledTokens
from staleflow.tasks.engines.engine_builder import build_engine
from staleflow.tasks.engines.engine_settings import EngineSettings

PROMPT, NEW = 32, 96
"""Tokens of each prompt, and of each response: no id ends one, so that all systems sample the same number."""
LORA, SERVED = LoraConfig(rank=16), 4
"""The adapters, and how many are served side by side."""
UPDATES = 10
"""Of the weights, while a batch is sampled."""
COMMON: dict[str, Any] = {"device": "cpu", "temperature": 1.0, "page_tokens": 32, "eos": (), "seed": 0}


def prompts(count: int) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(0)
    return [tuple(int(t) for t in rng.integers(3, 15, PROMPT)) for _ in range(count)]


def questions(model: str, count: int) -> list[tuple[int, ...]]:
    """What the model was made for, if it has a chat template: outside of that bfloat16 says little."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    if not tokenizer.chat_template:
        return prompts(count)
    asked = ("What is 3 + 4?", "Write one sentence about the sea.", "Why is the sky blue?", "List three colours.")
    encoded = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in asked
    ]
    return [tuple(encoded[i % len(asked)]) for i in range(count)]


def settings(engine: str, model: str, running: int, dtype: str = "float32", **changes: Any) -> EngineSettings:
    shape = {"max_running": running, "kv_tokens": running * (PROMPT + NEW + 32), "max_batch_tokens": 2048}
    values = {**COMMON, **shape, "model": model, "dtype": dtype, **changes}
    if engine == "vllm":
        from staleflow.tasks.engines.engine_settings import VllmSettings

        return VllmSettings(**values)
    from staleflow.tasks.engines.engine_settings import TransformersSettings

    return TransformersSettings(**values)


# -- throughput: each function samples `count` responses and returns the seconds ------------------------------------


def offline(model: str, count: int, running: int) -> float:
    """vLLM's own generate, with the engine's arguments."""
    from staleflow.tasks.engines.vllm import ENVIRONMENT
    from staleflow.tasks.engines.vllm_layouts import cache_bytes

    os.environ.update(ENVIRONMENT, TORCHDYNAMO_DISABLE="1")
    from vllm import LLM, SamplingParams

    chosen: Any = settings("vllm", model, running)
    llm = LLM(
        model=model, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=cache_bytes(chosen), block_size=32,
        max_model_len=PROMPT + NEW, max_num_seqs=running, max_num_batched_tokens=2048, skip_tokenizer_init=True, seed=0,
    )  # fmt: skip
    sampling = SamplingParams(temperature=1.0, max_tokens=NEW, ignore_eos=True, detokenize=False, logprobs=0)
    requests: Any = [{"prompt_token_ids": list(p)} for p in prompts(count)]
    llm.generate(requests[:8], sampling, use_tqdm=False)
    begin = time.perf_counter()
    llm.generate(requests, sampling, use_tqdm=False)
    return time.perf_counter() - begin


@remote_methods
class Prompts:
    """The trajectory server, as far as a rollout instance knows it."""

    def __init__(self, count: int) -> None:
        self._prompts = prompts(count)

    async def record_routes(self, items: Sequence[RouteItem]) -> list[Request]:
        return [
            Request(
                trajectory=item.trajectory, route_number=item.route_number, version=item.version, max_new_tokens=NEW,
                tokens=self._prompts[item.trajectory % len(self._prompts)],
            )
            for item in items
        ]  # fmt: skip

    async def deliver(self, sampled: Sequence[SampledTokens]) -> dict[int, int]:
        return {s.trajectory: sum(len(segment.tokens) for segment in s.segments) for s in sampled}


def actor(engine: str, model: str, count: int, running: int) -> float:
    """The rollout instance on a Dask cluster: routed to and listened to as the driver does, reports included."""
    import dask
    from distributed import Client, LocalCluster

    from staleflow.pipeline.processes.local_cluster import worker_environment
    from staleflow.tasks.actors.rollout_instance import RolloutInstance

    async def sample(instance: Any, server: Any, first: int, wanted: int) -> float:
        items = tuple(
            RouteItem(trajectory=TrajectoryId(first + i), route_number=1, version=PolicyVersion(0))
            for i in range(wanted)
        )
        begin = time.perf_counter()
        await instance.route(server, items)
        ended = 0
        while ended < wanted:
            ended += len(await instance.next_events(server, 0.5))
        return time.perf_counter() - begin

    async def run() -> float:
        dask.config.set(
            {"distributed.nanny.pre-spawn-environ": worker_environment(1), "distributed.worker.profile.enabled": False}
        )
        async with (
            LocalCluster(
                n_workers=2, threads_per_worker=1, memory_limit=0, asynchronous=True, dashboard_address=None
            ) as cluster,
            Client(cluster, asynchronous=True, direct_to_workers=True) as client,
        ):
            first, second = list(cluster.scheduler_info["workers"])
            server = await client.submit(Prompts, count, actor=True, workers=[first])
            instance = await client.submit(
                RolloutInstance, settings(engine, model, running), InstanceId("i"), 1, 60.0, 10.0,
                actor=True, workers=[second],
            )  # fmt: skip
            await sample(instance, server, 10**6, 8)
            seconds = await sample(instance, server, 0, count)
            await instance.close()
            return seconds

    return asyncio.run(run())


def generate(model: str, count: int, running: int) -> float:
    """Hugging Face generate, in padded batches of as many as run at once elsewhere. No logprobs."""
    import torch

    from staleflow.tasks.engines.transformers import load_model

    torch.set_num_threads(1)
    policy = load_model(model, "float32", "cpu", "sdpa")
    ids = torch.tensor(prompts(count))
    mask = torch.ones_like(ids)
    words: Any = {"do_sample": True, "top_k": 0, "min_new_tokens": NEW, "max_new_tokens": NEW, "pad_token_id": 0}
    policy.generate(input_ids=ids[:8], attention_mask=mask[:8], **words)
    begin = time.perf_counter()
    for i in range(0, count, running):
        policy.generate(input_ids=ids[i : i + running], attention_mask=mask[i : i + running], **words)
    return time.perf_counter() - begin


SYSTEMS: dict[str, Callable[[str, int, int], float]] = {
    "vLLM, offline generate": offline,
    "rollout actor, vllm": lambda *a: actor("vllm", *a),
    "rollout actor, transformers": lambda *a: actor("transformers", *a),
    "Hugging Face generate": generate,
}


def throughput(model: str, count: int, running: int) -> None:
    best: dict[str, float] = {}
    for _ in range(2):
        for name in SYSTEMS:
            command = [sys.executable, __file__, "one", model, "--system", name, "--count", str(count)]
            command += ["--running", str(running)]
            out = subprocess.run(command, capture_output=True, text=True, check=False)
            if out.returncode:
                raise SystemExit(out.stderr[-2000:])
            seconds = json.loads(out.stdout.splitlines()[-1])
            best[name] = min(seconds, best.get(name, seconds))
            print(f"  {name}: {seconds:.2f} s", flush=True)
    base = best["vLLM, offline generate"]
    print(f"\n{model}: {count} responses of {NEW} tokens to prompts of {PROMPT}, {running} at once\n")
    print("| | tokens/s | of offline vLLM |\n|---|---|---|")
    for name, seconds in best.items():
        print(f"| {name} | {count * NEW / seconds:,.0f} | {base / seconds:.2f} |")


# -- weights and numbers -------------------------------------------------------------------------------------------


def updates(model: str, count: int, running: int) -> None:
    """`count` updates, idle and under load, against a copy of the same bytes; a process for each `rollout.on_pull`."""
    for on_pull in ("interrupt", "keep", "adapter"):
        command = [sys.executable, __file__, "updates-one", model, "--count", str(count), "--running", str(running)]
        out = subprocess.run([*command, "--on-pull", on_pull], capture_output=True, text=True, check=False)
        if out.returncode:
            raise SystemExit(out.stderr[-2000:])
        print("\n".join(line for line in out.stdout.splitlines() if line.startswith(">")), flush=True)


def adapter(model: Any) -> dict[str, Any]:
    """A random adapter of a model's linear layers but the last, as LORA describes it."""
    import torch

    from staleflow.tasks.engines.adapters import AdapterLayer

    results = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings():
            layer = AdapterLayer(name, LORA.rank, module.in_features, module.out_features)
            results[layer.down_name] = torch.randn(layer.rank, layer.inputs) / layer.inputs
            results[layer.up_name] = torch.randn(layer.outputs, layer.rank) / layer.rank
    return results


def updates_one(model: str, count: int, running: int, on_pull: str) -> None:
    import torch

    from staleflow.stores.weights.weight_folder import WeightFolder
    from staleflow.tasks.engines.transformers import load_model

    torch.set_num_threads(1)
    loaded = load_model(model, "float32", "cpu", "sdpa")
    named = {n: p.detach() for n, p in loaded.named_parameters()} if on_pull != "adapter" else adapter(loaded)
    beside: dict[str, Any] = {"lora": LORA, "num_served_versions": SERVED} if on_pull == "adapter" else {}
    size = sum(t.numel() * t.element_size() for t in named.values())
    target = {n: torch.zeros_like(t) for n, t in named.items()}
    copies = [timed(lambda: [target[n].copy_(t) for n, t in named.items()]) for _ in range(20)]
    busy: list[float] = []
    stalls: list[float] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        published = WeightFolder(Path(folder))
        published.publish(PolicyVersion(1), named)
        path = published.path(PolicyVersion(1))
        engine = build_engine(
            settings("vllm", model, running, keep_cache=on_pull == "keep", **beside), InstanceId("i"), 1
        )

        versions = itertools.count(1)
        calls = record_stalls(engine)

        def load() -> float:
            calls.clear()
            seconds = timed(lambda: engine.load(PolicyVersion(next(versions)), path))
            stalls.append(sum(calls))
            return seconds

        sample_while(engine, running, lambda _: None)
        begun_s = time.process_time()
        idle = [load() for _ in range(10)]
        processor_s = (time.process_time() - begun_s) / len(idle)
        plain_s = min(sample_while(engine, running, lambda _: None) for _ in range(3))
        loaded_s = min(sample_while(engine, running, lambda _: busy.append(load())) for _ in range(3))
        stall_s, longest_s = float(np.median(stalls)), max(stalls)
        before = resident_mib()
        for _ in range(count):
            load()
        grown = resident_mib() - before
        engine.close()
    print(
        f"> {on_pull}: {size / 2**20:.1f} MiB, a copy {np.median(copies) * 1e3:.1f} ms; "
        f"an update {np.median(idle) * 1e3:.1f} ms idle, {processor_s * 1e3:.1f} ms of a processor's time, "
        f"{np.median(busy) * 1e3:.1f} ms under load; "
        f"decoding stands still for {stall_s * 1e3:.2f} ms of it, {longest_s * 1e3:.2f} at most; "
        f"{UPDATES} updates cost {(loaded_s - plain_s) / UPDATES * 1e3:.1f} ms of generation each, a decode step of "
        f"{running} takes {plain_s / NEW * 1e3:.1f} ms; memory after {count} more: {grown:+.0f} MiB"
    )


def sample_while(engine: Engine, running: int, meanwhile: Callable[[int], None]) -> float:
    """Seconds that `running` responses take while `meanwhile` is called UPDATES times."""
    requests = [
        Request(trajectory=TrajectoryId(i), route_number=time.monotonic_ns(), tokens=p, max_new_tokens=NEW)
        for i, p in enumerate(prompts(running))
    ]
    begin = time.perf_counter()
    engine.submit(requests)
    done = calls = 0
    while done < running:
        progress = [n for _, n in engine.load_statistics().progress]
        if calls < UPDATES and progress and min(progress) >= 5 + calls * (NEW - 10) // UPDATES:
            meanwhile(calls)
            calls += 1
        done += len(engine.events(0.001))
    return time.perf_counter() - begin


def logprobs(model: str, count: int, running: int) -> None:
    """Stored logprobs of `count` sampled tokens against the trainer's own, weights equal, float32 master weights."""
    import torch

    from staleflow.tasks.engines.transformers import forward_logprobs, load_model

    print("| dtype | tokens | mean difference, nats | largest |\n|---|---|---|---|")
    torch.set_num_threads(1)
    policy = load_model(model, "float32", "cpu", "sdpa")
    for dtype in ("float32", "bfloat16"):
        engine = build_engine(settings("vllm", model, running, dtype), InstanceId("i"), 1)
        asked = questions(model, -(-count // NEW))
        engine.submit(
            [
                Request(trajectory=TrajectoryId(i), route_number=1, tokens=p, max_new_tokens=NEW)
                for i, p in enumerate(asked)
            ]
        )
        differences: list[np.ndarray[Any, Any]] = []
        while len(differences) < len(asked):
            for event in engine.events(0.5):
                assert isinstance(event, SampledTokens), event
                tokens = [int(t) for s in event.segments for t in s.tokens]
                stored = np.concatenate([s.logprobs for s in event.segments])
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
                    prompt = asked[event.trajectory]
                    own = forward_logprobs(policy, [*prompt, *tokens])[len(prompt) - 1 :]
                differences.append(np.abs(stored - np.asarray(own)))
        engine.close()
        every = np.concatenate(differences)
        print(f"| {dtype} | {len(every):,} | {every.mean():.2e} | {every.max():.2e} |", flush=True)


def timed(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def record_stalls(engine: Any) -> list[float]:
    """Record from now on the seconds of each call in the engine's thread, which does not decode meanwhile."""
    stalls: list[float] = []
    call = engine._call

    def recorded(function: Callable[[], Any]) -> Any:
        def measured() -> Any:
            begin = time.perf_counter()
            try:
                return function()
            finally:
                stalls.append(time.perf_counter() - begin)

        return call(measured)

    engine._call = recorded
    return stalls


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("throughput", "updates", "logprobs", "one", "updates-one"))
    parser.add_argument("model")
    parser.add_argument("--count", type=int, default=256, help="responses, updates, tokens")
    parser.add_argument("--running", type=int, default=64, help="at once")
    parser.add_argument("--quick", action="store_true", help="few responses, updates, tokens")
    parser.add_argument("--system", help=argparse.SUPPRESS)
    parser.add_argument("--on-pull", default="interrupt", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.count = min(args.count, 8)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if args.what == "one":
        print(json.dumps(SYSTEMS[args.system](args.model, args.count, args.running)))
        return
    if args.what == "updates-one":
        updates_one(args.model, args.count, args.running, args.on_pull)
        return
    {"throughput": throughput, "updates": updates, "logprobs": logprobs}[args.what](
        args.model, args.count, args.running
    )


if __name__ == "__main__":
    main()
