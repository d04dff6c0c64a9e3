"""Trainer, embedded engine and weights on one GPU, with random models of Qwen3's shapes.

    python -m benchmarks.gpu --out docs      writes gpu.json and prints the tables of docs/gpu.md
    python -m benchmarks.gpu --tables        prints the tables of the stored results

Training: a step of TOKENS tokens in bfloat16, the second one; its tokens per second, model FLOPs utilization (6 FLOPs
for each parameter and token, and those of causal attention, over the dense bfloat16 peak), and peak memory beside the
sum that `staleflow config explain --gpus` plans. Decoding: tokens per second of the embedded engine with all requests
running, beside `generate` of transformers with a static batch. Weights: seconds to publish a version, to load it in an
engine and verify it, and to copy and write a resume point.

Each case runs once, in a process of its own, one after another.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    "Qwen3-1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
    "Qwen3-4B": {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
    },
}  # fmt: skip
COMMON: dict[str, Any] = {
    "vocab_size": 151936, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "tie_word_embeddings": True, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
QUICK = {"tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}}
TOKENS, PROMPT = 65_536, 128
"""Tokens of a training step, prompts included; tokens of each prompt."""
MICROBATCH = 16_384
TRAINING = [
    ("Qwen3-0.6B", 128, False, False), ("Qwen3-0.6B", 128, False, True), ("Qwen3-0.6B", 512, False, False),
    ("Qwen3-0.6B", 512, False, True), ("Qwen3-0.6B", 8192, False, False), ("Qwen3-0.6B", 8192, False, True),
    ("Qwen3-0.6B", 8192, True, True), ("Qwen3-1.7B", 2048, False, False), ("Qwen3-1.7B", 2048, False, True),
    ("Qwen3-4B", 2048, True, True),
]  # fmt: skip
"""Model, tokens of each row, whether activations are recomputed, and whether layers are compiled."""
RUNNING, NEW = (1, 8, 32, 128), 128
"""Requests at once, and sampled tokens of each."""
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bfloat16 peak by a part of the GPU's name, FLOP/s, from NVIDIA's data sheets."""


def make_model(name: str, folder: Path, shape: dict[str, Any]) -> Path:
    """Save a random model of a shape in bfloat16, unless it exists."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from staleflow.tasks.training.tiny_model import make_tokenizer

    path = folder / name
    if not path.exists():
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            config = CONFIG_MAPPING["qwen3"](**(COMMON | shape))
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
        make_tokenizer().save_pretrained(path)
    return path


def make_trainer(model: Path, *, recompute: bool = False, compiled: bool = False, microbatch: int) -> Any:
    from staleflow.tasks.training.policy import TrainerSettings
    from staleflow.tasks.training.policy_trainer import PolicyTrainer
    from staleflow.tasks.training.trainer_settings import TrainingConfig

    return PolicyTrainer(
        TrainerSettings(
            model=str(model), dtype="bfloat16", device="auto", num_steps=9, temperature=1.0,
            max_response_tokens=1 << 15, seed=0,
            training=TrainingConfig(
                learning_rate=1e-5, recompute_activations=recompute, compile=compiled, microbatch_tokens=microbatch,
                measured_rows=0,
            ),
        )
    )  # fmt: skip


def make_rows(tokens: int, length: int, prompt: int, vocabulary: int) -> list[Any]:
    from staleflow.tasks.training.microbatches import Row

    rng = np.random.default_rng(0)
    response = length - prompt
    return [
        Row(
            prompt=rng.integers(3, vocabulary, prompt).astype(np.int32),
            response=rng.integers(3, vocabulary, response).astype(np.int32),
            behaviour=np.full(response, -10, np.float32),
            sampled=np.ones(response, bool),
            advantage=float((-1) ** number),
            staleness=1,
        )
        for number in range(max(1, tokens // length))
    ]


def time_training(
    model: str, length: int, recompute: bool, compiled: bool, tokens: int = TOKENS, microbatch: int = MICROBATCH
) -> Any:
    """Time the second step of a new trainer. model: its folder."""
    import torch

    from staleflow.pipeline.sizing.memory import ModelShape, trainer_bytes_by_use
    from staleflow.tasks.training.trainer_settings import TrainingConfig

    config = json.loads((Path(model) / "config.json").read_text())
    rows = make_rows(tokens, length, min(PROMPT, length // 4), config["vocab_size"])
    trainer = make_trainer(Path(model), recompute=recompute, compiled=compiled, microbatch=microbatch)
    first_s = _seconds(lambda: trainer.step(0, rows))
    seconds = _seconds(lambda: trainer.step(1, rows))
    shape = ModelShape.of(config, model)
    training = TrainingConfig(microbatch_tokens=microbatch, recompute_activations=recompute)
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    total = len(rows) * length
    flops = 6 * parameters * total + 6 * shape.num_layers * shape.q_size * len(rows) * length**2
    on_gpu = torch.cuda.is_available()
    return {
        "model": Path(model).name, "length": length, "recompute": recompute, "compiled": compiled, "tokens": total,
        "microbatch": microbatch, "packed": trainer.logprob_model.packs_rows, "first_s": first_s, "seconds": seconds,
        "tokens_per_s": total / seconds, "mfu": flops / seconds / _peak_flops(),
        "planned_bytes": sum(trainer_bytes_by_use(shape, training, "bfloat16").values()),
        "peak_bytes": _used_bytes() if on_gpu else 0,
        "allocated_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
    }  # fmt: skip


def time_decoding(model: str, running: list[int], new: int = NEW, prompt: int = PROMPT) -> list[Any]:
    """Time the embedded engine on so many requests at once, and transformers' own `generate` on the same prompts."""
    import torch
    from transformers import AutoModelForCausalLM

    from staleflow.stores.trajectory import InstanceId, TrajectoryId
    from staleflow.tasks.engines.base import Request
    from staleflow.tasks.engines.engine_settings import TransformersSettings
    from staleflow.tasks.engines.transformers import TransformersEngine, resolve_device

    vocabulary = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    rng, most = np.random.default_rng(0), max(running)
    prompts = [tuple(int(token) for token in rng.integers(3, vocabulary, prompt)) for _ in range(most)]
    settings = TransformersSettings(
        model=model, dtype="bfloat16", device="auto", temperature=1.0, max_running=most, page_tokens=32, eos=(),
        kv_tokens=(prompt + new + 64) * most + 64, max_batch_tokens=max(512, prompt * most), seed=0,
    )  # fmt: skip
    engine = TransformersEngine(settings, InstanceId("rollout-0"))

    def sample(first: int, count: int) -> None:
        engine.submit(
            [
                Request(trajectory=TrajectoryId(first + i), route_number=1, tokens=prompts[i], max_new_tokens=new)
                for i in range(count)
            ]
        )
        ended = 0
        while ended < count:
            ended += len(engine.events(1.0))

    ours = []
    for number, count in enumerate(running):
        sample(2 * number * most, count)
        ours.append(_seconds(functools.partial(sample, (2 * number + 1) * most, count)))
    engine.close()
    device = resolve_device("auto")
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(device).eval()

    def generate(count: int) -> None:
        ids = torch.tensor(prompts[:count], device=device)
        with torch.inference_mode():
            reference.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=new,
                min_new_tokens=new, pad_token_id=0,
            )  # fmt: skip

    results = []
    for count, ours_s in zip(running, ours, strict=True):
        generate(count)
        theirs_s = _seconds(functools.partial(generate, count))
        results.append(
            {
                "model": Path(model).name, "running": count, "prompt": prompt, "new": new,
                "tokens_per_s": count * new / ours_s, "step_ms": 1000 * ours_s / new,
                "generate_tokens_per_s": count * new / theirs_s,
            }
        )  # fmt: skip
    return results


def time_weights(model: str) -> Any:
    """Time the way of a version from a trainer to an engine, and a resume point, on the same GPU."""
    from benchmarks.engines import record_stalls
    from staleflow.stores.trajectory import InstanceId, PolicyVersion
    from staleflow.stores.weights.weight_folder import WeightFolder
    from staleflow.tasks.engines.engine_settings import TransformersSettings
    from staleflow.tasks.engines.transformers import TransformersEngine

    trainer = make_trainer(Path(model), microbatch=MICROBATCH)
    settings = TransformersSettings(
        model=model, dtype="bfloat16", device="auto", temperature=1.0, max_running=1, page_tokens=32, eos=(),
        kv_tokens=1024, max_batch_tokens=512, seed=0,
    )  # fmt: skip
    engine = TransformersEngine(settings, InstanceId("rollout-0"))
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder, tempfile.TemporaryDirectory() as disk:
        weights = WeightFolder(Path(folder) / "weights")
        publish_s = _seconds(lambda: trainer.apply_to_weights(lambda w: weights.publish(PolicyVersion(1), w)))
        path = weights.path(PolicyVersion(1))
        engine.load(PolicyVersion(1), path)
        stalls = record_stalls(engine)
        begin_s = time.perf_counter()
        report = engine.load(PolicyVersion(1), path).weights
        load_s = time.perf_counter() - begin_s
        copy_s = _seconds(lambda: trainer.begin_save(Path(disk) / "point.pt"))
        write_s = _seconds(trainer.end_save)
        num_bytes = path.stat().st_size
    engine.close()
    return {
        "model": Path(model).name, "bytes": num_bytes, "publish_s": publish_s, "load_s": load_s,
        "stalled_s": sum(stalls), "verified": report.verified, "contradicted": report.contradicted,
        "resume_copy_s": copy_s, "resume_write_s": write_s,
    }  # fmt: skip


def _seconds(call: Callable[[], object]) -> float:
    import torch

    begin = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def _used_bytes() -> int:
    """Bytes that are used of the GPU at most, with what torch keeps for later, and the CUDA context."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return int(total - free - torch.cuda.memory_reserved() + torch.cuda.max_memory_reserved())


def _device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def _peak_flops() -> float:
    return next((peak for part, peak in PEAK_FLOPS.items() if part in _device_name()), float("inf"))


def _in_process(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a process of its own. What fails is a result too."""
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(function, *args).result()
    except Exception as error:  # noqa: BLE001
        return {"failed": f"{type(error).__name__}: {error}"[:300], "case": [str(arg) for arg in args]}


def _environment() -> dict[str, str]:
    import torch
    import transformers

    return {
        "device": _device_name(), "torch": torch.__version__, "transformers": transformers.__version__,
        "python": sys.version.split()[0],
    }  # fmt: skip


def measure(out: Path, *, quick: bool, parts: list[str], folder: Path) -> None:
    """Run the cases of each part, and write the results after each."""
    begin = time.monotonic()
    shapes = QUICK if quick else SHAPES
    results: dict[str, Any] = {"environment": _in_process(_environment)}
    paths = {name: str(_in_process(make_model, name, folder, shape)) for name, shape in shapes.items()}
    first = next(iter(paths.values()))
    print(f"{time.monotonic() - begin:.0f} s: models made", file=sys.stderr, flush=True)
    cases: dict[str, list[tuple[Callable[..., Any], tuple[Any, ...]]]] = {
        "training": [(time_training, (paths[m], *rest)) for m, *rest in TRAINING],
        "decoding": [(time_decoding, (first, [*RUNNING]))],
        "weights": [(time_weights, (path,)) for path in list(paths.values())[:2]],
    } if not quick else {
        "training": [(time_training, (first, 64, True, False, 256, 128))],
        "decoding": [(time_decoding, (first, [1, 2], 4, 8))],
        "weights": [(time_weights, (first,))],
    }  # fmt: skip
    for part in parts:
        results[part] = []
        for function, args in cases[part]:
            result = _in_process(function, *args)
            results[part] += result if isinstance(result, list) else [result]
            print(f"{time.monotonic() - begin:.0f} s: {json.dumps(result)}", file=sys.stderr, flush=True)
            (out / "gpu.json").write_text(json.dumps(results, indent=1) + "\n")


def tables(results: dict[str, Any]) -> str:
    """The tables of docs/gpu.md."""
    lines = [", ".join(f"{name} {value}" for name, value in results["environment"].items()) + ".", ""]
    columns: dict[str, dict[str, Callable[[Any], str]]] = {
        "training": {
            "model": lambda r: r["model"],
            "tokens of a row": lambda r: f"{r['length']:,}",
            "recompute": lambda r: "yes" if r["recompute"] else "no",
            "compile": lambda r: "yes" if r["compiled"] else "no",
            "first step s": lambda r: f"{r['first_s']:.0f}",
            "tokens/s": lambda r: f"{r['tokens_per_s']:,.0f}",
            "MFU": lambda r: f"{r['mfu']:.0%}",
            "peak GB": lambda r: f"{r['peak_bytes'] / 1e9:.1f}",
            "planned GB": lambda r: f"{r['planned_bytes'] / 1e9:.1f}",
        },
        "decoding": {
            "model": lambda r: r["model"],
            "running requests": lambda r: str(r["running"]),
            "tokens/s": lambda r: f"{r['tokens_per_s']:,.0f}",
            "ms a token": lambda r: f"{r['step_ms']:.1f}",
            "`generate`, tokens/s": lambda r: f"{r['generate_tokens_per_s']:,.0f}",
        },
        "weights": {
            "model": lambda r: r["model"],
            "GB": lambda r: f"{r['bytes'] / 1e9:.1f}",
            "publish s": lambda r: f"{r['publish_s']:.2f}",
            "load and verify s": lambda r: f"{r['load_s']:.2f}",
            "of it decoding stalled s": lambda r: f"{r['stalled_s']:.2f}",
            "resume point, copy s": lambda r: f"{r['resume_copy_s']:.2f}",
            "then write s": lambda r: f"{r['resume_write_s']:.2f}",
        },
    }
    for part, shown in columns.items():
        rows = [row for row in results.get(part, []) if "failed" not in row]
        if rows:
            lines += [f"| {' | '.join(shown)} |", "|---" * len(shown) + "|"]
            lines += [f"| {' | '.join(cell(row) for cell in shown.values())} |" for row in rows] + [""]
        lines += [f"Failed: {row['case']}: {row['failed']}" for row in results.get(part, []) if "failed" in row]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of gpu.json")
    parser.add_argument("--parts", nargs="+", choices=["training", "decoding", "weights"])
    parser.add_argument("--models", type=Path, help="folder of the random models; by default removed afterwards")
    parser.add_argument("--quick", action="store_true", help="a tiny model on any device: whether it works")
    parser.add_argument("--tables", action="store_true", help="print the tables of the stored results")
    args = parser.parse_args()
    if not args.tables:
        args.out.mkdir(parents=True, exist_ok=True)
        folder = args.models or Path(tempfile.mkdtemp())
        try:
            measure(args.out, quick=args.quick, parts=args.parts or ["training", "decoding", "weights"], folder=folder)
        finally:
            if args.models is None:
                shutil.rmtree(folder, ignore_errors=True)
    results = json.loads((args.out / "gpu.json").read_text())
    print(tables(results))
    if any("failed" in row for rows in results.values() if isinstance(rows, list) for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
