"""The run page over a large store: seconds and memory of each view, and what they read.

Makes a store of drawn responses, serves it in a process of its own as `staleflow view` does, and asks for each view
twice: first as a reader who has just opened the page, then again. Memory is the largest resident size of the serving
process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from staleflow.pipeline.config import actor_settings, knob_tree, loading
from staleflow.pipeline.config.schema import RunConfig
from staleflow.stores.trajectories.records import CommitRecord, LedgerState
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import (
    EndedTrajectory,
    Fate,
    FinishReason,
    GroupId,
    InstanceId,
    PolicyVersion,
    Segment,
    Timings,
    Trajectory,
    TrajectoryId,
)

LIMIT_S, LIMIT_MIB = 1.0, 300
"""What a step's page may take on one core, and its process hold."""
TOKENS = 500


def make_run(folder: Path, count: int, groups: int, size: int) -> RunConfig:
    """A run of `count` trajectories of 250 to 750 tokens, a batch of groups x size a step."""
    batch = {"groups_per_step": groups, "group_size": size}
    config = loading.from_tree(
        {"name": "large", "runs_dir": str(folder), "steps": count // (groups * size), "batch": batch,
         "rollout": {"engine": {"name": "emulated"}}}
    )  # fmt: skip
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "config.toml").write_text(knob_tree.to_toml(config))
    rng = np.random.default_rng(0)
    store = VersionedStore.create(config.run_dir / "store", actor_settings.run_header(config))
    for step in range(config.steps):
        rows = []
        for i in range(step * groups * size, (step + 1) * groups * size):
            length = int(rng.integers(TOKENS // 2, 3 * TOKENS // 2))
            segment = Segment(
                version=PolicyVersion(max(0, step - i % 2)),
                instance=InstanceId(f"rollout-{i % 4}"),
                tokens=rng.integers(3, 30_000, length).astype(np.int32),
                logprobs=rng.normal(-1, 0.5, length).astype(np.float32),
            )
            trajectory = Trajectory(
                id=TrajectoryId(i), group=GroupId(i // size), prompt_tokens=np.full(20, i // size, np.int32),
                v_traj=segment.version, spans=(segment,), finish=FinishReason.STOP,
                reward=float(rng.random() < 0.5), timings=Timings(rewarded_s=1.0),
            )  # fmt: skip
            rows.append(EndedTrajectory(trajectory=trajectory, fate=Fate.CONSUMED, step=step))
        ended = {"consumed:none": (step + 1) * groups * size}
        ledger = LedgerState(num_started=0, num_ended=ended, live=(), next_step=step + 1, version=step)
        metrics = {"reward": float(rng.random()), "elapsed_s": step + 1.0, "response_tokens": float(TOKENS)}
        store.commit(CommitRecord(kind="step", step=step, ledger=ledger, metrics=metrics), rows)
    return config


def largest_mib(process: int) -> float:
    """The largest resident size of a process so far."""
    status = Path(f"/proc/{process}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def views(config: RunConfig) -> dict[str, str]:
    """The questions that each view asks the server, by its name; those of a step's page first."""
    step = config.steps // 2
    hardest = urllib.parse.quote("reward == 0 and staleness == 1 and response_tokens > 300")
    return {
        "a step": f"groups?step={step}",
        "a step, filtered": f"groups?step={step}&where={hardest}&order=spread",
        "all steps": "steps",
        "trajectories": "trajectories",
        "trajectories, filtered and sorted": f"trajectories?where={hardest}&sort=-response_tokens&page=20",
        "distribution": f"distribution?where={hardest}&column=response_tokens",
        "excerpts of 50 scattered ones": "excerpts?ids=" + "+".join(str(i * config.steps) for i in range(50)),
        "one trajectory": f"trajectory?id={config.trajectories_per_step * step}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_096, help="trajectories")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--groups", type=int, default=16, help="groups per step")
    parser.add_argument("--quick", action="store_true", help="a small store")
    args = parser.parse_args()
    if args.quick:
        args.count = 2_048
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        config = make_run(Path(folder), args.count, args.groups, args.group_size)
        print(
            f"{args.count} trajectories in {config.steps} steps, made in {time.perf_counter() - begin:.0f} s",
            flush=True,
        )
        command = [
            sys.executable,
            "-m",
            "staleflow.cli.main",
            "view",
            str(config.run_dir),
            "--port",
            "0",
            "--no-browser",
        ]
        one_core = ["taskset", "-c", "0"] if sys.platform == "linux" else []
        begin = time.perf_counter()
        server = subprocess.Popen([*one_core, *command], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        try:
            address = next(word for word in server.stdout.readline().split() if word.startswith("http"))
            print(f"serving after {time.perf_counter() - begin:.2f} s")
            worst = 0.0
            for name, question in views(config).items():
                seconds = []
                for _ in range(2):
                    begin = time.perf_counter()
                    with urllib.request.urlopen(f"{address}api/{question}") as answer:
                        body = answer.read()
                    seconds.append(time.perf_counter() - begin)
                json.loads(body)
                if name.startswith("a step"):
                    worst = max(worst, *seconds)
                print(f"{name:<34} {seconds[0]:6.3f} s first, {seconds[1]:6.3f} s again, {len(body) / 1024:6.0f} KiB")
            memory = largest_mib(server.pid)
        finally:
            server.terminate()
            server.wait()
        print(f"a step's page: at most {worst:.2f} s (limit {LIMIT_S:.0f}), {memory:.0f} MiB (limit {LIMIT_MIB})")


if __name__ == "__main__":
    main()
