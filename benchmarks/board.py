"""What watching costs a Dask scheduler's event loop: taking a report of a run in, and refreshing a page that someone
looks at. Both come twice a second, so a millisecond of either is 0.2 % of the loop. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

from distributed.protocol.core import dumps, loads

from staleflow.pipeline.cluster.dashboard import View
from staleflow.pipeline.cluster.job_registry import JobRegistry

STEPS = 1000
"""Training steps that a watched job has done."""


def status(instances: int, version: int) -> dict[str, Any]:
    """What the driver of a job with so many instances reports."""
    lanes = [
        {
            "instance": f"rollout-{i}", "version": version, "pulling": False, "num_running": 60 + i % 4,
            "max_running": 64, "kv_tokens": 9_000 + i, "kv_capacity": 16_384,
        }
        for i in range(instances)
    ]  # fmt: skip
    buffers = [
        {"step": version + k, "occupied": {str(version): 20}, "reserved": {str(version): 100}, "capacity": 128}
        for k in range(2)
    ]
    return {
        "version": version, "num_queued": 900, "num_running": 64 * instances, "num_scoring": 12, "doing": "training",
        "losses": [], "staleness_in_flight": 0.5, "staleness_in_queue": 0.5, "ended": {"consumed": 9_000},
        "buffers": buffers, "instances": lanes, "tokens_sampled": {lane["instance"]: version for lane in lanes},
        "decisions": [[12.5, i, "routed to rollout-0 at version 3", "TrajectoryScored#12345"] for i in range(30)],
    }  # fmt: skip


def step(number: int) -> dict[str, float]:
    names = (
        "reward", "staleness_mean", "staleness_max", "tokens_per_s", "wait_s", "train_s", "publish_s",
        "response_mean", "response_max", "staleness_in_flight", "staleness_in_queue",
    )  # fmt: skip
    return {"step": float(number), **dict.fromkeys(names, 1.0)}


def timed_ms(work: Any, times: int) -> float:
    """Median milliseconds of a call with 0, 1, 2, ..."""
    taken = []
    for i in range(times):
        begin = time.perf_counter()
        work(i)
        taken.append((time.perf_counter() - begin) * 1e3)
    return median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two sizes")
    sizes = (2, 16) if parser.parse_args().quick else (2, 16, 128, 1024)
    print("| instances | bytes a report | taking it in, ms | refreshing a page, ms | the same, once a step, ms |")
    print("|---|---|---|---|---|")
    for instances in sizes:
        registry = JobRegistry()
        registry._scheduler = type("Scheduler", (), {"tasks": {}, "workers": {}})
        registry.submit("job", "job", "/runs/job", 2 * STEPS)
        message: dict[str, Any] = {
            "id": "job", "state": "running", "why": "", "status": status(instances, 7), "steps": [], "lines": [],
        }  # fmt: skip
        registry.report(**{**message, "steps": [step(i) for i in range(STEPS)]})
        frames = [bytes(f) for f in dumps(message)]
        taken_in = timed_ms(lambda _, frames=frames, registry=registry: registry.report(**loads(frames)), 200)
        view = View(registry, "job")
        view.update()
        refresh = timed_ms(lambda _, view=view: view.update(), 50)

        def next_step(i: int, registry: JobRegistry = registry, view: View = view) -> None:
            registry.jobs["job"].history[STEPS + i] = step(STEPS + i)
            view.update()

        size = sum(map(len, frames))
        print(f"| {instances:,} | {size:,} | {taken_in:.2f} | {refresh:.2f} | {timed_ms(next_step, 50):.2f} |")


if __name__ == "__main__":
    main()
