"""A long run's store and journal: seconds and memory of what reads all of it.

Writes a store of many steps with real commits of 512 drawn responses, as a long run with a bound of 1 does (a few
aborted, some in flight), and a journal of the same length by simulation; then audits, lists and replays them in
processes of their own, whose CPU seconds and largest resident size are counted, children included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from staleflow.pipeline.config import actor_settings, knob_tree, loading
from staleflow.pipeline.config.schema import RunConfig
from staleflow.stores.trajectories.records import CommitRecord, LedgerState, batch_fingerprint, id_ranges
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import (
    AbortReason,
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
from staleflow.stores.weights.weight_report import WeightCheck, WeightReport

GROUPS, SIZE, TOKENS, PROMPT = 64, 8, 480, 33
"""512 responses a step, of 240 to 720 tokens, with their prompts: 263 million tokens in 1,000 steps."""
LIVE = 1_536
"""Trajectories in flight at a commit: three steps' worth."""
LOOK_S = 0.05
LIMITS = {"audit": "60 CPU-s, 1,024 MiB", "ls": "1 s", "replay": "512 MiB"}
"""What 1,000 steps may take."""


def make_config(folder: Path, steps: int) -> RunConfig:
    batch = {"groups_per_step": GROUPS, "group_size": SIZE}
    config = loading.from_tree(
        {"name": "long", "runs_dir": str(folder), "steps": steps, "batch": batch, "staleness": {"eta": 1},
         "rollout": {"engine": {"name": "emulated"}, "instances": 8}}
    )  # fmt: skip
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "config.toml").write_text(knob_tree.to_toml(config))
    return config


def make_store(config: RunConfig) -> tuple[float, float]:
    """Write the store; returns the median CPU seconds of the first and of the last ten commits."""
    rng = np.random.default_rng(0)
    store = VersionedStore.create(config.run_dir / "store", actor_settings.run_header(config))
    ids = (rng.zipf(1.2, 2**20) % 50_000).astype(np.int32)
    logprobs = -rng.exponential(0.7, 2**20).astype(np.float32)
    consumed = aborted = 0
    seconds = []

    def row(id: int, step: int, fate: Fate) -> EndedTrajectory:
        length = int(rng.integers(TOKENS // 2, 3 * TOKENS // 2))
        versions = sorted({max(0, step - id % 2), step})
        cuts = np.array_split(np.arange(length), len(versions))
        at = int(rng.integers(0, len(ids) - length))
        trajectory = Trajectory(
            id=TrajectoryId(id), group=GroupId(id // SIZE), prompt_tokens=ids[at : at + PROMPT],
            v_traj=PolicyVersion(versions[0]), finish=FinishReason.STOP, reward=float(id % 3 == 0),
            spans=tuple(
                Segment(version=PolicyVersion(version), instance=InstanceId(f"rollout-{id % 8}"),
                        tokens=ids[at + cut[0] : at + cut[-1] + 1], logprobs=logprobs[at + cut[0] : at + cut[-1] + 1])
                for version, cut in zip(versions, cuts, strict=True)
            ),
            timings=Timings(arrived_s=1.0, routed_s=2.0, sampled_s=3.0, rewarded_s=4.0),
        )  # fmt: skip
        reason = AbortReason.NONE if fate is Fate.CONSUMED else AbortReason.SURPLUS_GROUP
        return EndedTrajectory(trajectory=trajectory, fate=fate, reason=reason, step=step, advantage=0.5)

    started = 0
    for step in range(config.steps):
        dropped = SIZE if step % 8 == 7 else 0
        batch = [row(started + i, step, Fate.CONSUMED) for i in range(GROUPS * SIZE)]
        rows = batch + [row(started + len(batch) + i, step, Fate.ABORTED) for i in range(dropped)]
        started += len(rows)
        consumed, aborted = consumed + len(batch), aborted + dropped
        counts = {"consumed:none": consumed, "aborted:surplus_group": aborted}
        record = CommitRecord(
            kind="step", step=step,
            ledger=LedgerState(
                num_started=started + LIVE, num_ended=counts, live=id_ranges(range(started, started + LIVE)),
                next_step=step + 1, version=step,
            ),
            metrics={f"metric_{i}": float(i) for i in range(60)} | {"reward": 0.5},
            weight_fingerprint=f"w{step + 1}",
            weight_checks=tuple(_check(i, step) for i in range(8 if step else 0)),
            batch_fingerprint=batch_fingerprint((e.trajectory, e.advantage) for e in batch),
        )  # fmt: skip
        begin = time.process_time()
        store.commit(record, rows)
        seconds.append(time.process_time() - begin)
    return float(np.median(seconds[:10])), float(np.median(seconds[-10:]))


def _check(instance: int, version: int) -> WeightCheck:
    """A pull of an instance whose weights are those published."""
    return WeightCheck(
        instance=InstanceId(f"rollout-{instance}"), version=PolicyVersion(version), fingerprint=f"w{version}",
        weights=WeightReport(verified=1), drift=0.0, limit=1.0,
    )  # fmt: skip


def make_journal(config: RunConfig) -> None:
    """Simulate the run, with short responses, and record it."""
    from staleflow.pipeline.recovery.run_journal import RunJournal
    from staleflow.pipeline.simulator.simulated_run import SimulatedRun

    book = RunJournal(config.run_dir / "events.jsonl")
    SimulatedRun(config, actor_settings.make_workload(config), observe=book.append).run()
    book.close(wait=True)


class Measured:
    """A command in a process of its own: its seconds, CPU seconds and largest resident MiB, with those of its children.
    These are looked at every LOOK_S seconds."""

    def __init__(self, *words: object) -> None:
        begin = time.perf_counter()
        cpu_s: dict[int, float] = {}
        self.most_mib = 0.0
        command = [sys.executable, "-m", "staleflow.cli.main", *map(str, words)]
        with tempfile.TemporaryFile() as out, subprocess.Popen(command, stdout=out, start_new_session=True) as process:
            while process.poll() is None:
                result = of_session(process.pid)
                self.most_mib = max(self.most_mib, sum(mib for _, mib in result.values()))
                cpu_s |= {id: seconds for id, (seconds, _) in result.items()}
                time.sleep(LOOK_S)
            out.seek(0)
            self.out = out.read().decode()
        self.code = process.returncode
        self.wall_s = time.perf_counter() - begin
        self.cpu_s = sum(cpu_s.values())


def of_session(session: int) -> dict[int, tuple[float, float]]:
    """CPU seconds and resident MiB of each process of a session; pages that several share count in each."""
    results = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(stat[3]) != session:
                continue
            pages = int((folder / "statm").read_text().split()[1])
        except OSError:
            continue  # it has ended
        ticks = int(stat[11]) + int(stat[12])
        results[int(folder.name)] = (ticks / os.sysconf("SC_CLK_TCK"), pages * resource.getpagesize() / 2**20)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument("--journal-steps", type=int, help="steps of the journal; as many by default")
    parser.add_argument(
        "--folder", help="where to write the run, for which there must be room; a temporary folder by default"
    )
    parser.add_argument("--quick", action="store_true", help="a few steps")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.journal_steps = 6, 2
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        measure(Path(folder), args.steps, args.journal_steps or args.steps)


def measure(folder: Path, steps: int, journal_steps: int) -> None:
    config = make_config(folder, steps)
    begin = time.process_time()
    first, last = make_store(config)
    store = VersionedStore.open(config.run_dir / "store")
    result = store.summary()
    files = [p for p in store.path.rglob("*") if p.is_file()]
    tokens = result.num_tokens / 1e6
    print(
        f"{result.num_steps} steps, {result.num_rows:,} responses, {tokens:.1f} M tokens, written in "
        f"{time.process_time() - begin:.0f} CPU-s; a commit {first:.3f} CPU-s at first, {last:.3f} at last; "
        f"{len(files) / tokens:.1f} files a million tokens, {sum(p.stat().st_size for p in files) / tokens / 1e6:.2f} "
        "bytes a token",
        flush=True,
    )
    audit = Measured("store", "audit", config.run_dir, "--json")
    assert audit.code == 0, f"exit code {audit.code}: {audit.out[-2000:]}"
    assert json.loads(audit.out)["num_tokens"] == result.num_tokens
    told("audit", audit)
    told("ls", Measured("store", "ls", folder))
    shutil.rmtree(config.run_dir)

    config = make_config(folder, journal_steps)
    begin = time.process_time()
    make_journal(config)
    journal = [p for p in config.run_dir.iterdir() if p.name.startswith("events")]
    size = sum(p.stat().st_size for p in journal)
    print(
        f"journal of {journal_steps} steps, simulated in {time.process_time() - begin:.0f} CPU-s: {len(journal)} "
        f"files, {size / 2**20:.1f} MiB, {size / (journal_steps * GROUPS * SIZE):.0f} bytes a response",
        flush=True,
    )
    replay = Measured("replay", config.run_dir)
    assert replay.code == 0, f"exit code {replay.code}: {replay.out[-2000:]}"
    told("replay", replay)


def told(what: str, found: Measured) -> None:
    print(
        f"{what:<8} {found.wall_s:6.2f} s, {found.cpu_s:6.2f} CPU-s, {found.most_mib:5.0f} MiB "
        f"(1,000 steps may take {LIMITS[what]})",
        flush=True,
    )


if __name__ == "__main__":
    main()
