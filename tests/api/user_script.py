"""A user script that uses every method of a stored run with types. mypy checks it; it is never executed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from distributed import Client

import staleflow


def length(response: str, record: Mapping[str, Any]) -> float:
    """A reward function."""
    return float(len(response))


def identify(run: staleflow.Run) -> list[str]:
    """Use what identifies a run."""
    described: tuple[bool, bool, int, str] = (run.live, run.finished, run.eta, run.bound)
    summary: staleflow.StoreSummary | None = run.summary()
    count = 0 if summary is None else summary.num_steps
    learning_rate: float = run.job.training.learning_rate
    lineage: Mapping[str, Any] = run.lineage
    names = [run.name, run.source, run.url, run.snapshot, *run.branches, str(run.path)]
    return [*names, str(described), str(count), str(learning_rate), *lineage]


def read(run: staleflow.Run) -> float:
    """Use what a run stored."""
    commits: list[staleflow.CommitRecord] = run.commits()
    last = run.steps()[-1]
    ledger: staleflow.LedgerState = last.ledger
    batch: staleflow.ConsumedBatch = run.batch(last.step)
    evaluations: list[staleflow.Evaluation] = run.evaluations()
    total = float(len(commits) + ledger.num_live + batch.is_intact) + sum(e.sampled or 0.0 for e in evaluations)
    for trajectory in run.trajectories("reward > 0", step=last.step, texts=False):
        total += trajectory.reward + float(trajectory.logprobs.sum())
    one: staleflow.StoredTrajectory = run.trajectory(3)
    ids: list[int] = run.sorted_ids("worst", 3, "staleness == 1")
    views: list[staleflow.TrajectoryView] = run.view(ids, model="runs/model")
    return total + len(one.response) + len(views[0].tokens)


def tables(run: staleflow.Run) -> list[Any]:
    """Use objects of other libraries."""
    return [run.metrics(), run.to_pandas("step > 3", texts=False), run.to_dask(), run.to_xarray(), run.to_dataset()]


def prove(run: staleflow.Run, client: Client) -> bool:
    """Use the proofs over stored data."""
    report: staleflow.AuditReport = run.audit(full=True, memory_mib=512, workers=4, client=client)
    bias: staleflow.DropBias = run.drop_bias()
    comparison: staleflow.ForecastComparison | None = run.compare_with_forecast()
    assert comparison is None or comparison.forecast.ranges["step_s"].high > 0
    replay: staleflow.ReplayResult = run.replay(3)
    repeated: staleflow.Verification = run.verify(steps=2, seed=1, client=client)
    return repeated.is_verified and report.is_clean and not bias.lines and not replay.difference


def go_on(run: staleflow.Run, client: Client, progress: Callable[[int, int], None]) -> float:
    """Use methods that create new results."""
    scored: staleflow.RescoreResult = run.rescore(
        branch="length", reward=length, changes={"reward.timeout_s": 3.0}, client=client, progress=progress
    )
    difference: staleflow.BranchDifference = run.diff("main", "length")
    rescored: staleflow.RecomputeResult = run.recompute_logprobs("runs/model", where="step > 3", progress=progress)
    comparison: staleflow.LogprobComparison = rescored.by_staleness[0]
    exported: staleflow.ExportResult = run.at_step(3).export("hf", "out", workers=4, progress=progress)
    trained: staleflow.OfflineTrainingResult = run.branch("length").train_offline(
        "policy", overrides=["training.learning_rate=1e-5"], epochs=2, client=client, report=print
    )
    unlearned: staleflow.UnlearningResult = run.unlearn("dataset_row == 17", branch="without-17", client=client)
    bisection: staleflow.Bisection = run.bisect(60, since=50, client=client)
    cause = bisection.cause.change.where if bisection.cause else bisection.reason
    steps = trained.steps + unlearned.training.steps - unlearned.start
    commit: str = run.push("me/policy", step=50, private=True)
    return scored.mean_after + difference.changed + comparison.kl + exported.rows + steps + len(commit + cause)


def set_side_by_side(runs: list[staleflow.Run]) -> list[str]:
    """Use runs, folders and branches together."""
    comparison: staleflow.Comparison = staleflow.compare([*runs, "runs/demo", "runs/demo@better"])
    low = [row.difference.interval.low for row in comparison.differences if row.difference]
    return [*comparison.jobs, comparison.rewards[0].job, str(low)]


def main() -> None:
    """Open runs."""
    version: str = staleflow.__version__
    errors: list[type[staleflow.StaleflowError]] = [staleflow.ConfigError, staleflow.StoreError]
    runs: list[staleflow.Run] = [*staleflow.list_runs(), staleflow.open_run("s3://bucket/runs/demo", at_step=3)]
    print(version, errors, runs)


def start(client: Client) -> staleflow.RunResult:
    """Start runs in all ways."""
    job: staleflow.Job = staleflow.load_job("job.toml", {"steps": 20})
    handle: staleflow.RunHandle = staleflow.start(job, rows=[{"prompt": "1+1=", "answer": "2"}], reward=length)
    status: staleflow.RunStatus = handle.status()
    left: float | None = status.remaining_s
    handle.stop("enough")
    handle = staleflow.start_resumed(handle.run_dir, {"steps": 30}, progress=True)
    if handle.wait(timeout_s=left) and not handle.done:
        return handle.result(timeout_s=60.0)
    submitted: staleflow.SubmittedJob = staleflow.submit({"steps": 3}, client=client, loss="gspo")
    lines: list[str] = list(submitted.logs(follow=True))
    forecast: staleflow.Forecast = staleflow.plan({"name": "next", "steps": 3}, measured_in=handle.run)
    print(*forecast.lines, sep="\n")
    simulations: list[staleflow.SimulationResult] = staleflow.simulate(handle.run, sweep={"staleness.eta": [0, 1]})
    tried: staleflow.DryRunResult = staleflow.dry_run(job, reward={"length": length})
    result = staleflow.run(job, client=client, progress=lambda status: print(status.reward))
    named: staleflow.RunStatus = submitted.wait()
    return result if lines or simulations or tried.findings or named else staleflow.resume(result.run_dir, ["steps=9"])


async def start_in_a_coroutine() -> staleflow.Run:
    """Start a run inside an event loop."""
    result = await staleflow.run_async("job.toml", progress=False)
    return result.run
