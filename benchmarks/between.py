"""What an engine's loop does on the processor between two decode steps.

    python -m benchmarks.between MODEL [--engine transformers | vllm] [--running 1 8 32 64]

So many requests are sampled side by side, none of which ends meanwhile (a copy of the model is told that it may attend
to POSITIONS tokens: what it says does not matter here). Printed are microseconds of processor time a
step, by what they went into: the model's forward pass, sampling and logprobs, the library's own scheduling and inputs,
and ours: what the loop's thread does with the sampled tokens, and what the thread that asks the engine for events and
for its load takes beside it (twice a second, as a rollout actor does). Waiting is not in it, so on a busy machine only
colder caches change the figures. vLLM needs the environment that `make test-vllm` makes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engines import prompts, settings
from staleflow.stores.trajectory import InstanceId, TrajectoryId
from staleflow.tasks.engines.base import Engine, Request
from staleflow.tasks.engines.engine_builder import build_engine

PARTS = ("forward", "sampling", "library", "ours, loop", "ours, beside")
POSITIONS = 4096
REPORT_S = 0.5
"""Seconds between two reports, as a rollout actor's."""


class Stopwatch:
    """Processor seconds of the calling threads, by part; what a part calls of another part is the other's."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside = threading.local()

    def part(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, measured as that part."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            outer, self._inside.others = getattr(self._inside, "others", 0.0), 0.0
            begin = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.thread_time() - begin
                self.seconds[name] += took - self._inside.others
                self._inside.others = outer + took

        return measured

    def watch(self, owner: Any, method: str, name: str) -> None:
        setattr(owner, method, self.part(name, getattr(owner, method)))


def watch_transformers(engine: Any, watch: Stopwatch) -> None:
    from staleflow.tasks.engines import transformers

    watch.watch(engine._model, "forward", "forward")
    watch.watch(transformers, "sample", "sampling")
    watch.watch(engine, "_step", "ours, loop")


def watch_vllm(engine: Any, watch: Stopwatch) -> None:
    core = engine._engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    watch.watch(runner.model, "forward", "forward")
    watch.watch(runner.model, "compute_logits", "forward")
    watch.watch(runner, "_sample", "sampling")
    watch.watch(core, "step_fn", "library")
    watch.watch(engine, "_take", "ours, loop")
    watch.watch(engine, "_carry_out_calls", "ours, loop")


def measure(engine: Engine, watched: Callable[[Any, Stopwatch], None], running: int, steps: int, new: int) -> str:
    """A line of the table: microseconds a step of each part, and the steps' own seconds."""
    requests = [
        Request(trajectory=TrajectoryId(i), route_number=time.monotonic_ns(), tokens=tokens, max_new_tokens=new)
        for i, tokens in enumerate(prompts(running))
    ]
    engine.submit(requests)
    watch = Stopwatch()
    sampled = running_tokens(engine, at_least=running * 4)
    watched(engine, watch)
    sampled = running_tokens(engine, at_least=sampled + running)
    watch.seconds.clear()
    begin, cpu = time.perf_counter(), time.thread_time()
    before, now = sampled, sampled
    while now < before + running * steps:
        assert not engine.events(REPORT_S), "a response has ended"
        now = engine.load_statistics().tokens_sampled
    count = (now - before) / running
    watch.seconds["ours, beside"] = time.thread_time() - cpu
    elapsed = time.perf_counter() - begin
    engine.interrupt([request.trajectory for request in requests])
    total = sum(watch.seconds.values())
    shown = " | ".join(f"{watch.seconds[part] / count * 1e6:,.0f}" for part in PARTS)
    between = 1 - (watch.seconds["forward"] + watch.seconds["sampling"]) / total
    return f"| {running} | {shown} | {between:.0%} | {elapsed / count * 1e6:,.0f} |"


def running_tokens(engine: Engine, at_least: int) -> int:
    """Wait until the engine has sampled so many tokens; how many it has."""
    while (sampled := engine.load_statistics().tokens_sampled) < at_least:
        engine.events(0.01)
    return sampled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--running", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--new", type=int, default=2000, help="tokens that a response may have")
    parser.add_argument("--quick", action="store_true", help="one count, few steps: whether it works")
    args = parser.parse_args()
    if args.quick:
        args.running, args.steps = [2], 5
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        model = lengthened(Path(args.model), Path(name, "model"))
        table(args.engine, model, args.running, args.steps, args.new)


def lengthened(model: Path, to: Path) -> str:
    """A copy of a model that may attend to POSITIONS tokens."""
    shutil.copytree(model, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | {"max_position_embeddings": POSITIONS}))
    return str(to)


def table(name: str, model: str, counts: Sequence[int], steps: int, new: int) -> None:
    print(f"| running | {' | '.join(PARTS)} | not forward or sampling | a step, elapsed |")
    print("|---" * (len(PARTS) + 3) + "|")
    for running in counts:
        engine = build_engine(settings(name, model, running, kv_tokens=running * (new + 64)), InstanceId("i"), 1)
        try:
            watched = watch_vllm if name == "vllm" else watch_transformers
            print(measure(engine, watched, running, steps, new), flush=True)
        finally:
            engine.close()


if __name__ == "__main__":
    main()
