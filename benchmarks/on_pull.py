"""What a pull does to running responses, by evidence: `rollout.on_pull` interrupt against keep.

    python -m benchmarks.on_pull --out docs

`interrupt` computes a running response's KV cache again under the new weights; `keep` continues with the old one, so
that tokens after a pull attend to keys and values of older versions. Runs examples/demo.toml, agent.toml and tools.toml
at bounds 1 and 3 with three seeds, one run after the other. Each run is audited. Runs stay in runs/, and one that is
there is not run again. Writes on_pull.json and on_pull.png and prints a table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.learning import summary_of_run
from staleflow.pipeline.config import loading
from staleflow.pipeline.config.schema import RunConfig
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import Fate
from staleflow.stores.weights.resume_points import ResumePoints
from staleflow.tasks.engines.transformers import forward_logprobs, load_model

JOBS = {name: Path(f"examples/{name}.toml") for name in ("demo", "agent", "tools")}
RULES = ("interrupt", "keep")
BOUNDS = (1, 3)
SEEDS = (21, 22, 23)
COLUMNS = {
    "mixed": "share of the responses trained on that were sampled under more than one version",
    "ess": "effective sample size over the number of tokens",
    "kl_behaviour": "KL divergence of the sampling policy from the trained one, nats",
    "distance": "mean difference in nats between the logprobs of tokens sampled after a pull and those of one "
    "forward pass of the version that sampled them, over the versions with a resume point",
    "tokens_per_s": "response tokens trained on per second",
    "reward": "mean reward on held-out prompts at the end, sampled",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--jobs", choices=JOBS, nargs="+", default=list(JOBS))
    parser.add_argument("--bounds", type=int, nargs="+", default=BOUNDS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--quick", action="store_true", help="one job, bound and seed, two steps: whether it works")
    parser.add_argument("--tables", action="store_true", help="print the table of the stored results, and run nothing")
    args = parser.parse_args()
    results, prefix = args.out / "on_pull.json", "on-pull"
    if args.quick:
        args.jobs, args.bounds, args.seeds, prefix = args.jobs[:1], args.bounds[:1], args.seeds[:1], "on-pull-quick"
        args.set += ["steps=2", "task.eval_prompts=8", "batch.groups_per_step=4"]
    if not args.tables:
        args.out.mkdir(parents=True, exist_ok=True)
        rows = []
        cases = itertools.product(args.seeds, args.jobs, args.bounds, RULES)  # seed by seed: a part compares both rules
        for seed, job, bound, rule in cases:
            name = f"{prefix}-{job}-{bound}-{rule}-{seed}"
            settings = (f"seed={seed}", f"staleness.eta={bound}", f"rollout.on_pull={rule}", *args.set)
            summary = summary_of_run(JOBS[job], name, settings)
            config = loading.load(JOBS[job], (f"name={name}", *settings))
            rows.append({"job": job, "bound": bound, "rule": rule, "seed": seed, **figures(summary, config)})
            results.write_text(json.dumps(rows, indent=1) + "\n")
    rows = json.loads(results.read_text())
    draw(rows, args.out / "on_pull.png")
    print("\n".join(table(rows)))


def figures(summary: dict[str, Any], config: RunConfig) -> dict[str, Any]:
    """The columns of one run, means over its steps, and its rewards by step."""
    store = VersionedStore.open(config.run_dir / "store")
    steps = [record.metrics for record in store.commits() if record.kind == "step"]
    columns = store.displayed_columns()
    trained = columns["fate"] == Fate.CONSUMED.value
    return {
        "mixed": float((columns["v_min"] != columns["v_max"])[trained].mean()),
        "ess": statistics.mean(step["ess"] for step in steps),
        "kl_behaviour": statistics.mean(step["kl_behaviour"] for step in steps),
        **logprob_distance(store, config),
        "tokens_per_s": sum(step["response_tokens"] for step in steps) / steps[-1]["elapsed_s"],
        "reward": summary["evaluations"][-1]["sampled"],
        "rewards": [step["reward"] for step in steps],
    }


def logprob_distance(store: VersionedStore, config: RunConfig) -> dict[str, Any]:
    """Mean and largest `distance`, and the number of tokens that it is over."""
    import torch

    model = load_model(config.model.path, "float32", "cpu", "sdpa")
    trained = [row.trajectory for row in store.trajectories() if row.fate is Fate.CONSUMED]
    distances: list[float] = []
    points = ResumePoints(config.run_dir / "resume")
    for version in points.complete_versions():
        rows = [row for row in trained if version in row.versions and row.versions[row.sampled][0] != version]
        if not rows:
            continue
        model.load_state_dict(torch.load(points.path(version), weights_only=False)["model"], strict=False)
        for row in rows:
            recomputed = forward_logprobs(model, [*row.prompt_tokens, *row.response_tokens])[-row.num_tokens :]
            distances += np.abs(np.array(recomputed) - row.logprobs)[row.versions == version].tolist()
    return {"distance": statistics.mean(distances), "largest_distance": max(distances), "compared": len(distances)}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each job, bound and rule: means over seeds, and the range of the reward."""
    lines = [f"| job | bound | on_pull | runs | {' | '.join(COLUMNS)} |", "|---" * (4 + len(COLUMNS)) + "|"]
    for (job, bound, rule), runs in _by_case(rows).items():
        means = {column: statistics.mean(run[column] for run in runs) for column in COLUMNS}
        rewards = [run["reward"] for run in runs]
        cells = [f"{means[column]:.3g}" for column in list(COLUMNS)[:-1]]
        cells.append(f"{means['reward']:.3f} ({min(rewards):.3f}-{max(rewards):.3f})")
        lines.append(f"| {job} | {bound} | `{rule}` | {len(runs)} | {' | '.join(cells)} |")
    return lines


def _by_case(rows: list[dict[str, Any]]) -> dict[tuple[str, int, str], list[dict[str, Any]]]:
    cases: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: (list(JOBS).index(row["job"]), row["bound"], RULES.index(row["rule"]))):
        cases.setdefault((row["job"], row["bound"], row["rule"]), []).append(row)
    return cases


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Reward over steps, one panel for each job and bound, a line for each run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((job, bound) for job, bound, _ in _by_case(rows)))
    figure = Figure(figsize=(3.2 * len(panels), 3), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (job, bound) in zip(axes, panels, strict=True):
        for rule, color in zip(RULES, ("tab:blue", "tab:orange"), strict=True):
            for number, run in enumerate(_by_case(rows).get((job, bound, rule), [])):
                rewards = [statistics.mean(run["rewards"][max(0, i - 4) : i + 1]) for i in range(len(run["rewards"]))]
                axis.plot(range(1, len(rewards) + 1), rewards, color=color, label=None if number else rule, linewidth=1)
        axis.set_title(f"{job}, bound {bound}", fontsize=9)
        axis.set_xlabel("step")
    axes[0].set_ylabel("reward, mean of 5 batches")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
