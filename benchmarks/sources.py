"""Ratios of three task sources of which all processes are killed again and again: what was trained, and what was drawn.

    python -m benchmarks.sources --times 100      kill -9 of everything in the middle of a step, 100 times

The engine is emulated, the run is on a cluster of local processes. Half of the groups of one source are filtered, all
groups of another. It fails (exit 1) if an audit has findings, a finished response was lost or sampled twice, a source's
share of the trained groups is not its ratio to within the groups in flight, or the source that only fails was not
named.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.soaking.job import SCORED, STEPS, Job
from benchmarks.soaking.killing import kill_all
from staleflow.pipeline.config.loading import load
from staleflow.stores.trajectories.versioned import VersionedStore

SOURCES = """
[reward]
timeout_s = 10
max_error_share = 1.0

[[task]]
name = "even"
ratio = 2
source = "{folder}/code/numbered.py:Numbers"
reward = "{folder}/code/rewards.py:half"
eval_prompts = 0

[[task]]
name = "odd"
ratio = 1
source = "{folder}/code/numbered.py:Numbers"
reward = "{folder}/code/rewards.py:all"
eval_prompts = 0
sampler = {{ name = "difficulty_window", tasks = 500 }}

[[task]]
name = "failing"
ratio = 1
source = "{folder}/code/numbered.py:Numbers"
reward = "{folder}/code/rewards.py:none"
eval_prompts = 0
"""
REWARDS = """
def all(answer, record):
    return float(sum(map(ord, answer)) % 2)


def half(answer, record):
    return all(answer, record) * (int(record["prompt"]) % 2)


def none(answer, record):
    return 0.0
"""
RATIOS = {"even": 2 / 3, "odd": 1 / 3}
"""Of what is trained, once the third source counts as failing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=math.inf, help="fewer kills, if they take longer than this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="two kills: whether it works")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="staleflow-sources-") as name:
        findings = run(Path(name), 2 if args.quick else args.times, args.seed, 60 * args.minutes)
    print("findings:" if findings else "no findings", *findings, sep="\n  ")
    sys.exit(bool(findings))


def run(folder: Path, times: int, seed: int, limit_s: float) -> list[str]:
    """Run the job through `times` kills, fewer if they take longer than `limit_s`; returns the findings."""
    job = Job(folder=folder, seed=seed, instances=1)
    job.write()
    (folder / "code" / "rewards.py").write_text(REWARDS)
    text = job.file.read_text()
    text = text.replace(SCORED.format(folder=folder), SOURCES.format(folder=folder))
    text = text.replace("group_size = 4", 'group_size = 4\nfiltering = "no_signal"')
    text = text.replace('kind = "file"', 'kind = "local"').replace(f'"{folder}/scheduler.json"', '""')
    job.file.write_text(text)
    overrides = (f"steps={STEPS}", "rollout.engine.time_scale=10")
    findings = asyncio.run(kill_all(job.file, overrides, job.run_dir, times, random.Random(seed), limit_s=limit_s))
    return findings or shares(job.run_dir)


def shares(run_dir: Path) -> list[str]:
    """Print each source's share of what was drawn and trained; returns the findings."""
    findings: list[str] = []
    config = load(run_dir / "config.toml")
    store = VersionedStore.open(run_dir / "store")
    table = store.displayed_columns()
    fates = {int(g): (s, f) for g, s, f in zip(table["group"], table["source"], table["fate"], strict=True)}
    trained = Counter(s for s, fate in {g: v for g, v in fates.items() if v[1] == "consumed"}.values())
    drawn = Counter(source for source, _ in fates.values())
    in_flight = (config.staleness.eta + 1) * config.batch.groups_per_step
    for number, name in enumerate(store.header.sources):
        expected = RATIOS.get(name, 0.0) * trained.total()
        print(
            f"{name}: {trained[number]} of {trained.total()} trained groups, {trained[number] / trained.total():.2%}; "
            f"{drawn[number]} of {drawn.total()} drawn, {drawn[number] / drawn.total():.2%}"
        )
        if abs(trained[number] - expected) > in_flight:
            findings.append(f"{name}: {trained[number]} trained groups, {expected:.0f} ± {in_flight} by its ratio")
    notes = json.loads((run_dir / "summary.json").read_text())["notes"]
    named = [note for note in notes if note.startswith("task 'failing'")]
    print(*named, sep="\n")
    if not named:
        findings.append("failing: no note of the run names it")
    states = store.commits()[-1].ledger.sources
    if states[2].num_trained or drawn[2] > 64 + in_flight + drawn.total() / 8:
        findings.append(f"failing: {drawn[2]} of {drawn.total()} groups were drawn from it")
    return findings


if __name__ == "__main__":
    main()
