"""Scoring a large store again: two Dask workers against a plain loop over the same data on one core; memory.

Makes a store of drawn responses in the layout of the demo's run (its tokenizer, its task), then scores all of them
twice. The plain loop reads the store row after row and calls the same reward function in its own process.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", "critical")

import numpy as np

from staleflow.pipeline.config import actor_settings, knob_tree, loading, user_files
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.stored_runs import reward_rescoring
from staleflow.pipeline.stored_runs.pool import open_pool
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
    Trajectory,
    TrajectoryId,
)
from staleflow.tasks.sources.task_sources import extract_answer, make_reward

TOKENS = 500


def make_store(config: RunConfig, count: int) -> None:
    """`count` consumed trajectories of 250 to 750 tokens, a batch a commit."""
    rng = np.random.default_rng(0)
    prompts = actor_settings.prompt_settings(
        config, num_held_out=config.num_held_out_prompts, max_prompt_tokens=None
    ).build()
    store = VersionedStore.create(config.run_dir / "store", actor_settings.run_header(config))
    size, batch = config.batch.group_size, config.trajectories_per_step
    for step in range(count // batch):
        rows = []
        for i in range(step * batch, (step + 1) * batch):
            length = int(rng.integers(TOKENS // 2, 3 * TOKENS // 2))
            segment = Segment(
                version=PolicyVersion(step),
                instance=InstanceId("rollout-0"),
                tokens=rng.integers(3, 15, length).astype(np.int32),
                logprobs=rng.normal(-1, 0.5, length).astype(np.float32),
            )
            prompt = np.asarray(prompts.encode(prompts.task(i // size)), np.int32)
            trajectory = Trajectory(
                id=TrajectoryId(i), group=GroupId(i // size), prompt_tokens=prompt,
                v_traj=PolicyVersion(step), spans=(segment,), finish=FinishReason.LENGTH,
            )  # fmt: skip
            rows.append(EndedTrajectory(trajectory=trajectory, fate=Fate.CONSUMED, step=step))
        ledger = LedgerState(num_started=0, num_ended={}, live=(), next_step=step + 1, version=step)
        store.commit(CommitRecord(kind="step", step=step, ledger=ledger), rows)


def plain_loop(config: RunConfig, function: str) -> tuple[float, float]:
    """Seconds to read, decode and score everything on one core: all in all, and without importing what that needs."""
    imported = time.perf_counter()
    reward = make_reward(function, actor_settings.source_settings(config).build())
    prompts = actor_settings.prompt_settings(
        config, num_held_out=config.num_held_out_prompts, max_prompt_tokens=None
    ).build()
    begin = time.perf_counter()
    for row in VersionedStore.open(config.run_dir / "store").trajectories():
        text = prompts.text(row.trajectory.response_tokens.tolist())
        reward(extract_answer(config.task.answer_pattern, text), prompts.task(int(row.trajectory.group)).record)
    end = time.perf_counter()
    return end - imported, end - begin


def largest_worker_mib(stop: threading.Event, pids: list[int], result: list[float]) -> None:
    """Watches the resident memory of some processes until told to stop."""
    while not stop.wait(0.1):
        for pid in pids:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            result[0] = max(result[0], pages * os.sysconf("SC_PAGE_SIZE") / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", default="examples/demo.toml")
    parser.add_argument("--count", type=int, default=100_096, help="trajectories, whole steps of the job")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--reward", default="task", help="task, math_verify, path/to/file.py:name, or module:name")
    parser.add_argument("--quick", action="store_true", help="a small store")
    args = parser.parse_args()
    if args.quick:
        args.count = 2_048
    with tempfile.TemporaryDirectory() as folder:
        config = user_files.with_absolute_paths(loading.load(args.job, (f"runs_dir={folder}", "name=large")))
        config.run_dir.mkdir()
        (config.run_dir / "config.toml").write_text(knob_tree.to_toml(config))
        begin = time.perf_counter()
        make_store(config, args.count)
        size_mib = sum(p.stat().st_size for p in config.run_dir.rglob("*") if p.is_file()) / 2**20
        print(f"made in {time.perf_counter() - begin:.0f} s, {size_mib:.0f} MiB", flush=True)
        alone_s, loop_s = plain_loop(config, args.reward)
        print(f"plain loop: {alone_s:.1f} s, {args.count / alone_s:,.0f} trajectories/s", flush=True)
        print(f"  once started: {args.count / loop_s:,.0f} trajectories/s", flush=True)
        with open_pool(None, args.workers) as pool:
            pids = list(pool.client.run(os.getpid).values())
            stop, largest = threading.Event(), [0.0]
            watch = threading.Thread(target=largest_worker_mib, args=(stop, pids, largest))
            watch.start()
            marks: list[tuple[float, int]] = []
            begin = time.perf_counter()
            result = reward_rescoring.rescore(
                config.run_dir,
                args.reward,
                "again",
                client=pool.client,
                progress=lambda done, _: marks.append((time.perf_counter(), done)),
            )
            seconds = time.perf_counter() - begin
            stop.set()
            watch.join()
        print(
            f"{args.workers} workers: {seconds:.1f} s, {result.rows / seconds:,.0f} trajectories/s, "
            f"{alone_s / seconds:.2f} times the plain loop; at most {largest[0]:.0f} MiB a worker"
        )
        # What a longer job sees: without the seconds in which the tokenizer's and the task's libraries are imported.
        (first_s, first), (last_s, last) = marks[args.workers + 1], marks[-1]
        rate = (last - first) / (last_s - first_s)
        print(f"  once started: {rate:,.0f} trajectories/s, {rate * loop_s / args.count:.2f} times the plain loop")
        shutil.rmtree(config.run_dir)


if __name__ == "__main__":
    main()
