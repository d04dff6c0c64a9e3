"""`bisect` on planted causes: whether it names what was done to a run, and says so if nothing was.

    python -m benchmarks.causes --out docs      all, in one to two hours on two idle cores

A run of the demo's model is resumed for eight steps in which the policy is harmed, once for each cause. Then the drop
of its held-out reward is bisected. The run's settings are changed by this program, since `resume` refuses most of them.
Two causes have a run of their own: a third part of the reward, of which the sign is then wrong, and a loss that takes
stale rows for fresh ones, for a run whose instance then pulls no more weights.
If the policy became worse, an answer counts as missed unless it names the same kind of cause; the table has the
answer's rows. Writes causes.md and causes.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.planted_causes import POISONED
from staleflow.pipeline.config import loading
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.jobs.execution import execute
from staleflow.pipeline.recovery.run_folder import load_job
from staleflow.pipeline.runtime.run_report import RunListener
from staleflow.pipeline.stored_runs import bisection, bisection_page, cause_search
from staleflow.pipeline.strategies.synchronization import Staggered

SINCE, AT = 14, 22
"""The versions that are compared."""
CODE = Path(__file__).parent / "planted_causes.py"
JOB = """
name = "{name}"
runs_dir = "{folder}"
steps = {since}
seed = {seed}

[model]
path = "{model}"

[[task]]
name = "sums"
ratio = 8
source = "{code}:Sums"
options = {{ first = 0 }}
answer_pattern = 'so(-?\\d+)\\.'
eval_prompts = 400

[[task]]
name = "small"
ratio = 1
source = "{code}:Sums"
options = {{ first = 500000000 }}
answer_pattern = 'so(-?\\d+)\\.'
reward = "{code}:small"
eval_prompts = 0

[reward.parts]
right = {{ function = "{code}:right" }}
ended = {{ function = "{code}:ended" }}

[batch]
groups_per_step = 32
group_size = 8

[staleness]
eta = 1

[rollout]
instances = 1
max_new_tokens = 42

[rollout.engine]
max_running = 256
kv_tokens = 32768

[training]
learning_rate = 3e-4
minibatches = 4
microbatch_tokens = 2048
advantage = "dr_grpo"
keep_every = 1

[training.loss]
name = "decoupled_ppo"
"""
LAST_PULL = 16
"""With stale rows: no weights of a version after this one are pulled, unless the staleness bound leaves nothing to
sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A cause to plant. expected: text that the answer should contain; empty: that there is no cause."""

    name: str
    expected: str
    overrides: tuple[str, ...] = ()
    base_overrides: tuple[str, ...] = ()
    """Settings of all its steps that are not those of the other runs."""
    is_fixed: bool = False
    """Whether the reward function is right again when the run is bisected."""


CAUSES = (
    Cause(name="nothing", expected=""),
    Cause(name="learning rate", expected="training.learning_rate", overrides=("training.learning_rate=1e-2",)),
    Cause(name="template", expected="task.sources", overrides=("task.sources.sums.template=Answer 7. {prompt}",)),
    Cause(name="poisoned group", expected="group"),
    Cause(name="wrong rewards", expected="now gives another reward", is_fixed=True),
    Cause(
        name="wrong sign",
        expected="the reward part close",
        base_overrides=(f"reward.parts.close={{ function = '{CODE}:close', weight = 3.0 }}",),
    ),
    Cause(name="wrong sign of right", expected="the reward part right"),
    Cause(name="flooding source", expected="source small", overrides=("task.sources.small.ratio=8",)),
    Cause(name="truncated responses", expected="truncated"),
    Cause(name="stale rows", expected="stale", base_overrides=("staleness.eta=7", f"training.loss={CODE}:Uncorrected")),
    Cause(name="duplicated prompt", expected="drawn again and again"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("runs/base/running-sums"))
    parser.add_argument("--folder", type=Path, default=Path("runs/causes"), help="runs; those that are there are kept")
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--names", nargs="+", default=[cause.name for cause in CAUSES])
    parser.add_argument("--prompts", type=int, default=400, help="held-out prompts that each training answers")
    parser.add_argument("--seed", type=int, default=7, help="seed of the runs")
    parser.add_argument("--quick", action="store_true", help="two of them, few prompts: whether it works")
    parser.add_argument("--plant", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.names, args.prompts = ["nothing", "learning rate"], 50
    folder = args.folder.resolve()
    if args.plant:
        plant(folder, next(cause for cause in CAUSES if cause.name == args.plant), args.prompts)
        return
    folder.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "causes.json"
    results = {row["name"]: row for row in json.loads(file.read_text())} if file.exists() else {}
    for cause in CAUSES:
        if cause.name in args.names:
            train_base(folder, cause, args.model.resolve(), args.seed)
            results[cause.name] = find(folder, cause, args.prompts)
            file.write_text(json.dumps(list(results.values()), indent=1) + "\n")
            (args.out / "causes.md").write_text("\n".join(table(list(results.values()))) + "\n")
    print("\n".join(table(list(results.values()))))


def train_base(folder: Path, cause: Cause, model: Path, seed: int) -> None:
    """Train the run that a cause is planted in, if it is not there."""
    name = base_name(cause)
    job = folder / f"{name}.toml"
    job.write_text(JOB.format(folder=folder, name=name, since=SINCE, model=model, code=CODE, seed=seed))
    if not (folder / name / "summary.json").exists():
        asyncio.run(execute(loading.load(job, cause.base_overrides), RunListener()))


def base_name(cause: Cause) -> str:
    return f"base-{slug(cause)}" if cause.base_overrides else "base"


class LatePulls(RunListener):
    """Has instances pull no more weights after version LAST_PULL."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack

    def on_step_stored(self, step: Mapping[str, float], bottleneck: str) -> None:
        if step["step"] + 1 >= LAST_PULL:
            self._stack.enter_context(mock.patch.object(Staggered, "num_pulling", return_value=0))


def find(folder: Path, cause: Cause, prompts: int) -> dict[str, Any]:
    """Plant a cause and bisect the run, in processes of their own: user code reads the cause when it is imported."""
    row = folder / f"{slug(cause)}.json"
    if not row.exists():
        command = [sys.executable, "-m", "benchmarks.causes", "--folder", str(folder), "--plant", cause.name]
        command += ["--prompts", str(prompts)]
        names = [cause.name] * (not (folder / slug(cause) / "planted").exists())
        for name in (*names, "" if cause.is_fixed else cause.name):  # the second process finds the planted run
            subprocess.run(command, check=True, env={**os.environ, "CAUSE": name})
    result: dict[str, Any] = json.loads(row.read_text())
    return result


def plant(folder: Path, cause: Cause, prompts: int) -> None:
    """Resume a copy of the base run with a cause; if that was done, bisect it and write the result. prompts: held-out
    prompts to answer."""
    run = folder / slug(cause)
    if not (run / "planted").exists():
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(folder / base_name(cause), run)
        config = load_job(run, (f"steps={AT}", f"name={slug(cause)}", *cause.overrides))
        with contextlib.ExitStack() as stack:
            listener = LatePulls(stack) if cause.name == "stale rows" else RunListener()
            asyncio.run(execute(config, listener, resume=True))
        (run / "planted").touch()
        return
    plan = with_prompts(bisection.make_plan(run, SINCE, AT, "right"), prompts)
    result = bisection_page.write(run, bisection.bisect(plan, lambda event: print(event["say"], flush=True)))
    print("\n".join(bisection_page.result_lines(result)))
    answer = result.reason if result.cause is None else result.cause.change.label
    (folder / f"{slug(cause)}.json").write_text(
        json.dumps(
            {
                "name": cause.name,
                "since": result.reward_since.mean,
                "at": result.reward_at.mean,
                "p": None if result.reward_change is None else result.reward_change.p,
                "answer": answer,
                "rows": 0 if result.cause is None else result.cause.rows,
                "poisoned": list(POISONED),
                "where": "" if result.cause is None else result.cause.change.where,
                "confirmed": None if result.confirmed is None else asdict(result.confirmed),
                "is_named": (result.cause is None) is (not cause.expected) and cause.expected in answer,
                "trainings": len(result.trials) + len(result.controls) + len(result.repeats),
                "seconds": result.elapsed_s,
                "prompts": prompts,
                "load": os.getloadavg()[1],
            }
        )
    )


def with_prompts(plan: bisection.BisectionPlan, count: int) -> bisection.BisectionPlan:
    """A plan that answers fewer held-out prompts than the run does."""

    def fewer(config: RunConfig) -> RunConfig:
        sums = replace(config.task.sources["sums"], eval_prompts=count)
        return replace(config, task=replace(config.task, sources={**config.task.sources, "sums": sums}))

    parts = tuple(replace(part, config=fewer(part.config), run_job=fewer(part.run_job)) for part in plan.parts)
    offline = replace(plan.offline, config=fewer(plan.offline.config))
    return replace(plan, offline=offline, former=fewer(plan.former), parts=parts)


def slug(cause: Cause) -> str:
    return cause.name.replace(" ", "-")


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The results as a Markdown table."""
    lines = ["| planted | before, after | answer | rows | trainings | seconds |", "|---|---|---|---|---|---|"]
    for row in rows:
        versions = f"{row['since']:.3f}, {row['at']:.3f} (p {row['p']:.3f})"
        has_drop = row["p"] < cause_search.P_LIMIT and row["at"] < row["since"]
        mark = "**missed**: " if has_drop and not row["is_named"] else ""
        lines.append(
            f"| {row['name']} | {versions} | {mark}{row['answer'][:120]} | "
            f"{row['rows']} | {row['trainings']} | {row['seconds']:.0f} |"
        )
    return lines


if __name__ == "__main__":
    main()
