"""Comparison of runs: settings that differ, curves, differences on the same prompts, and where time went; and its
tables of text, for the terminal and the run page. Pure.

Runs whose settings differ only in those of SEED_SETTINGS are seeds of one job; the settings include fingerprints of
their code, reward and data. A job is one line: the mean over its
runs, with the standard error over them.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from staleflow.pipeline.runtime.evaluation_figures import SetRewards
from staleflow.stores.errors import ConfigError
from staleflow.stores.reward_statistics import MIN_PROMPTS, PairedDifference, paired_difference

SEED_SETTINGS = ("name", "seed", "runs_dir", "store")
"""Settings in which the runs of one job may differ."""
MAX_BINS = 10
"""Maximum number of points of a curve, since single steps are too noisy to compare."""
AXES = ("steps", "tokens", "seconds")
"""Axes that rewards are plotted over; tokens are those that contributed to a gradient."""
TIME_METRICS = ("wait_s", "train_s", "publish_s", "overhead_s")
"""Metrics of a step that make up the time of the trainer."""
TRAINING_PROMPTS = "training prompts"
"""Name that stands for an evaluation set in comparisons of training rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFacts:
    """The values of an evaluation that are compared."""

    set: str
    """Name of its set of held-out prompts."""
    version: int
    reward: float
    """Mean at temperature, or greedy if nothing was sampled."""
    stderr: float | None
    """Over prompts."""
    reward_fingerprint: str
    """Empty if unknown."""
    rewards_by_prompt: SetRewards


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The values of a run that are compared."""

    name: str
    """Unique name of the run."""
    settings: Mapping[str, str]
    """All settings, as TOML, by key."""
    steps: Sequence[Mapping[str, float]]
    """Metrics of the training steps."""
    evaluations: Sequence[EvaluationFacts] = ()
    training_rewards: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Rewards of all scored responses, by source and row of the data set; empty if rows are not known."""
    reward_fingerprint: str = ""
    """Of the reward function; empty if unknown."""
    data_fingerprint: str = ""
    """Of the prompts' source; empty if unknown."""
    diagnosis: str = ""
    """What limited its speed, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingDifference:
    """A setting that is not the same in all jobs."""

    key: str
    values: dict[str, str]
    """TOML by job; empty where a job has no such setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """The mean reward of the batches of a job over a section of an axis."""

    job: str
    axis: str
    """One of AXES."""
    end: float
    """End of the section; it begins after the end of the previous one."""
    reward: float
    stderr: float | None
    """Standard error over runs; None with one run."""
    num_runs: int
    """Number of runs that have a step in the section."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPoint:
    """The mean reward of a job at a version, on one set of held-out prompts."""

    job: str
    set: str
    version: int
    tokens: float
    """Trained tokens up to this version, mean over runs."""
    seconds: float
    reward: float
    """At temperature, or greedy if nothing was sampled."""
    stderr: float | None
    """Standard error over runs; with one run, over its prompts."""
    num_runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDifference:
    """Difference of the rewards of `job` and `base` on the same prompts. Rewards of several runs of a job are averaged
    by prompt."""

    base: str
    job: str
    set: str
    """Name of the evaluation set, or TRAINING_PROMPTS."""
    responses: str
    """Which of a prompt's responses: "sampled", "greedy", or "trained": all that were scored in training."""
    version: int
    """Version of both policies; -1 in training."""
    difference: PairedDifference | None
    reason: str = ""
    """Why there is no difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeUse:
    """How the trainer of a job spent its time, mean over its runs."""

    job: str
    elapsed_s: float
    seconds: dict[str, float]
    """Seconds by the metrics of TIME_METRICS, and `rest_s`."""
    tokens: float
    tokens_per_s: float
    """Response tokens of all batches over elapsed_s."""
    diagnosis: dict[str, str]
    """What limited the speed, by run, as far as it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A comparison of runs. The other jobs are compared with the first one on the same prompts."""

    jobs: dict[str, tuple[str, ...]]
    """Names of the runs by job."""
    settings: tuple[SettingDifference, ...]
    rewards: tuple[CurvePoint, ...]
    evaluations: tuple[EvaluationPoint, ...]
    differences: tuple[PromptDifference, ...]
    times: tuple[TimeUse, ...]

    def __repr__(self) -> str:
        runs = sum(map(len, self.jobs.values()))
        return f"<Comparison of {runs} runs: {', '.join(self.jobs)}>"


@dataclass(frozen=True, slots=True)
class _JobRuns:
    """A job and its runs, which differ in SEED_SETTINGS only."""

    name: str
    runs: tuple[RunFacts, ...]


def compare(runs: Sequence[RunFacts]) -> Comparison:
    """Compare runs. Raises ConfigError if there are fewer than two, or one comes twice."""
    if len({run.name for run in runs}) < max(2, len(runs)):
        raise ConfigError(f"compare: {', '.join(run.name for run in runs)}: name at least two runs, each once")
    jobs = _group_by_job(runs)
    return Comparison(
        jobs={job.name: tuple(run.name for run in job.runs) for job in jobs},
        settings=tuple(_find_setting_differences(jobs)),
        rewards=tuple(point for axis in AXES for point in _make_curves(jobs, axis)),
        evaluations=tuple(point for job in jobs for point in _make_evaluation_points(job)),
        differences=tuple(d for other in jobs[1:] for d in _compare_on_same_prompts(jobs[0], other)),
        times=tuple(map(_measure_time_use, jobs)),
    )


def _group_by_job(runs: Iterable[RunFacts]) -> list[_JobRuns]:
    groups: dict[frozenset[tuple[str, str]], list[RunFacts]] = {}
    for run in runs:
        groups.setdefault(frozenset(_without_seed(run).items()), []).append(run)
    names = (group[0].name if len(group) == 1 else f"{group[0].name} ({len(group)} runs)" for group in groups.values())
    return [_JobRuns(name, tuple(group)) for name, group in zip(names, groups.values(), strict=True)]


def _without_seed(run: RunFacts) -> dict[str, str]:
    return {key: value for key, value in run.settings.items() if key not in SEED_SETTINGS}


def _find_setting_differences(jobs: Sequence[_JobRuns]) -> Iterator[SettingDifference]:
    settings = {job.name: _without_seed(job.runs[0]) for job in jobs}
    for key in dict.fromkeys(itertools.chain.from_iterable(settings.values())):
        values = {name: values.get(key, "") for name, values in settings.items()}
        if len({*values.values()}) > 1:
            yield SettingDifference(key=key, values=values)


# -- curves ------------------------------------------------------------------------------------------------------------


def _tokens(step: Mapping[str, float]) -> float:
    return step.get("tokens_trained", step.get("response_tokens", 0.0))


def _step_ends(run: RunFacts, axis: str) -> list[float]:
    """The positions on an axis at which the steps of a run end."""
    if axis == "steps":
        return [number + 1.0 for number in range(len(run.steps))]
    if axis == "tokens":
        return [*itertools.accumulate(map(_tokens, run.steps))]
    return [step.get("elapsed_s", 0.0) for step in run.steps]


def _make_curves(jobs: Sequence[_JobRuns], axis: str) -> Iterator[CurvePoint]:
    """A job's points on one axis, in sections of equal width that are the same for all jobs."""
    runs = [run for job in jobs for run in job.runs]
    longest = max((end for run in runs for end in _step_ends(run, axis)), default=0.0)
    count = min(MAX_BINS, max(len(run.steps) for run in runs))
    for job in jobs:
        means: dict[int, list[float]] = {}
        for run in job.runs:
            rewards: dict[int, list[float]] = {}
            for step, end in zip(run.steps, _step_ends(run, axis), strict=True):
                if math.isfinite(reward := step.get("reward", math.nan)):
                    rewards.setdefault(max(0, math.ceil(end * count / (longest or 1.0)) - 1), []).append(reward)
            for number, values in rewards.items():
                means.setdefault(number, []).append(statistics.fmean(values))
        for number, values in sorted(means.items()):
            mean, stderr = _mean(values)
            yield CurvePoint(
                job=job.name, axis=axis, end=longest * (number + 1) / count, reward=mean, stderr=stderr,
                num_runs=len(values),
            )  # fmt: skip


def _make_evaluation_points(job: _JobRuns) -> Iterator[EvaluationPoint]:
    """A job's evaluations, by set and version."""
    by_point: dict[tuple[str, int], list[tuple[RunFacts, EvaluationFacts]]] = {}
    for run in job.runs:
        for evaluation in run.evaluations:
            by_point.setdefault((evaluation.set, evaluation.version), []).append((run, evaluation))
    for (name, version), evaluations in sorted(by_point.items()):
        mean, stderr = _mean([evaluation.reward for _, evaluation in evaluations])
        steps = [run.steps[:version] for run, _ in evaluations]
        yield EvaluationPoint(
            job=job.name,
            set=name,
            version=version,
            tokens=statistics.fmean(sum(map(_tokens, earlier_steps)) for earlier_steps in steps),
            seconds=statistics.fmean(
                earlier_steps[-1].get("elapsed_s", 0.0) if earlier_steps else 0.0 for earlier_steps in steps
            ),
            reward=mean,
            stderr=stderr if len(evaluations) > 1 else evaluations[0][1].stderr,
            num_runs=len(evaluations),
        )


def _mean(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and its standard error, None of one value."""
    stderr = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return statistics.fmean(values), stderr


# -- the same prompts --------------------------------------------------------------------------------------------------


def _compare_on_same_prompts(base_job: _JobRuns, job: _JobRuns) -> Iterator[PromptDifference]:
    all_runs = (*base_job.runs, *job.runs)
    by_point = [{(e.set, e.version): e for e in run.evaluations} for run in all_runs]
    for name, version in sorted(set.intersection(*({*run_evaluations} for run_evaluations in by_point))):
        evaluations = [run_evaluations[name, version] for run_evaluations in by_point]
        reason = _explain_other_rewards(evaluation.reward_fingerprint for evaluation in evaluations)
        for responses in ("sampled", "greedy"):
            rewards_by_run = [{p: getattr(r, responses) for p, r in e.rewards_by_prompt.items()} for e in evaluations]
            count = len(base_job.runs)
            if all(any(run_evaluations.values()) for run_evaluations in rewards_by_run):
                rewards = _merge_rewards(rewards_by_run[:count]), _merge_rewards(rewards_by_run[count:])
                yield _make_difference(base_job, job, name, responses, version, rewards, reason)
    reason = _explain_other_rewards(run.reward_fingerprint for run in all_runs)
    if len({run.data_fingerprint for run in all_runs}) > 1 or not all_runs[0].data_fingerprint:
        reason = "other data, or unknown"
    elif not all(run.training_rewards for run in all_runs):
        reason = "the rows of the prompts are not stored"
    yield _make_difference(
        base_job, job, TRAINING_PROMPTS, "trained", -1,
        (
            _merge_rewards(run.training_rewards for run in base_job.runs),
            _merge_rewards(run.training_rewards for run in job.runs),
        ),
        reason,
    )  # fmt: skip


def _explain_other_rewards(rewards: Iterable[str]) -> str:
    return "other reward functions" if len({*rewards} - {""}) > 1 else ""


def _merge_rewards(runs: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Rewards of several runs, by prompt."""
    rewards: dict[str, list[float]] = {}
    for run in runs:
        for prompt, values in run.items():
            rewards.setdefault(prompt, []).extend(values)
    return rewards


def _make_difference(
    base_job: _JobRuns,
    job: _JobRuns,
    name: str,
    responses: str,
    version: int,
    rewards: tuple[Mapping[str, Sequence[float]], Mapping[str, Sequence[float]]],
    reason: str,
) -> PromptDifference:
    difference = None if reason else paired_difference(*rewards)
    if difference is None and not reason:
        num_shared = sum(bool(values and rewards[1].get(prompt)) for prompt, values in rewards[0].items())
        reason = f"{num_shared} prompts in common; an interval needs {MIN_PROMPTS}"
    return PromptDifference(
        base=base_job.name, job=job.name, set=name, responses=responses, version=version, difference=difference,
        reason=reason,
    )  # fmt: skip


# -- time --------------------------------------------------------------------------------------------------------------


def _measure_time_use(job: _JobRuns) -> TimeUse:
    elapsed_s = statistics.fmean(run.steps[-1].get("elapsed_s", 0.0) if run.steps else 0.0 for run in job.runs)
    seconds = {name: statistics.fmean(_sum(run, name) for run in job.runs) for name in TIME_METRICS}
    sampled = statistics.fmean(_sum(run, "response_tokens") for run in job.runs)
    return TimeUse(
        job=job.name,
        elapsed_s=elapsed_s,
        seconds={**seconds, "rest_s": max(0.0, elapsed_s - sum(seconds.values()))},
        tokens=statistics.fmean(sum(map(_tokens, run.steps)) for run in job.runs),
        tokens_per_s=sampled / elapsed_s if elapsed_s else 0.0,
        diagnosis={run.name: run.diagnosis for run in job.runs if run.diagnosis},
    )


def _sum(run: RunFacts, name: str) -> float:
    return sum(step.get(name, 0.0) for step in run.steps)


AXIS_COLUMNS = {"steps": "to step", "tokens": "to trained token", "seconds": "to second"}
TIME_TITLES = {
    "wait_s": "waits for batches", "train_s": "trains", "publish_s": "publishes", "overhead_s": "overhead",
    "rest_s": "rest",
}  # fmt: skip
"""What the trainer does, by metric; docs/metrics.md says more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """A table; the first column has the names of the rows."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def make_curve_tables(comparison: Comparison) -> Iterator[TextTable]:
    """Settings that differ, and rewards of batches over each axis."""
    jobs = list(comparison.jobs)
    settings = [[setting.key, *setting.values.values()] for setting in comparison.settings]
    yield TextTable(title="Settings that differ", columns=["", *jobs], rows=settings)
    for axis, column in AXIS_COLUMNS.items():
        points = {(p.end, p.job): p for p in comparison.rewards if p.axis == axis}
        digits = 1 if axis == "seconds" else 0
        rows = [
            [f"{end:,.{digits}f}", *(_format_point(points.get((end, job))) for job in jobs)]
            for end in sorted({end for end, _ in points})
        ]
        yield TextTable(title=f"Reward of batches over {axis}", columns=[column, *jobs], rows=rows)


def make_result_tables(comparison: Comparison) -> Iterator[TextTable]:
    """Rewards on held-out prompts, differences on the same prompts, and how the trainer spent its time."""
    jobs = list(comparison.jobs)
    yield TextTable(
        title="Reward on held-out prompts", columns=["set", "version", *jobs], rows=list(_evaluation_rows(comparison))
    )
    last_differences = {(d.job, d.set, d.responses): d for d in comparison.differences}
    for job in jobs[1:]:
        rows = [_difference_row(d) for d in last_differences.values() if d.job == job]
        columns = ["", "prompts", "version", "difference", "95 %", "p"]
        yield TextTable(title=f"{job} minus {jobs[0]}, on the same prompts", columns=columns, rows=rows)
    yield TextTable(title="Where the trainer's time went", columns=["", *jobs], rows=list(_time_rows(comparison)))


def _evaluation_rows(comparison: Comparison) -> Iterator[list[str]]:
    points = {(p.set, p.version, p.job): p for p in comparison.evaluations}
    for name, version in sorted({key[:2] for key in points}):
        points_of_jobs = [points.get((name, version, job)) for job in comparison.jobs]
        cells = (
            _format_point(p) + (f" ({p.tokens:,.0f} tokens, {p.seconds:,.1f} s)" if p else "") for p in points_of_jobs
        )
        yield [name, f"{version}", *cells]


def _format_point(point: CurvePoint | EvaluationPoint | None) -> str:
    """A mean with its standard error; empty where there is none."""
    if point is None:
        return ""
    return f"{point.reward:.3f}" + ("" if point.stderr is None else f" ± {point.stderr:.3f}")


def _difference_row(prompt_difference: PromptDifference) -> list[str]:
    subject, version = (
        f"{prompt_difference.set}, {prompt_difference.responses}",
        "" if prompt_difference.version < 0 else f"{prompt_difference.version}",
    )
    if prompt_difference.difference is None:
        return [subject, "", version, f"none: {prompt_difference.reason}", "", ""]
    difference = prompt_difference.difference
    p = f"{difference.p:.3f}" if difference.p >= 0.001 else "< 0.001"
    return [subject, f"{difference.num_prompts}", version, f"{difference.mean:+.3f}", str(difference.interval), p]


def _time_rows(comparison: Comparison) -> Iterator[list[str]]:
    uses = comparison.times
    yield ["seconds", *(f"{use.elapsed_s:,.1f}" for use in uses)]
    for name, title in TIME_TITLES.items():
        shares = (use.seconds[name] / use.elapsed_s if use.elapsed_s else 0.0 for use in uses)
        yield [title, *(f"{use.seconds[name]:,.1f} ({share:.0%})" for use, share in zip(uses, shares, strict=True))]
    yield ["trained tokens", *(f"{use.tokens:,.0f}" for use in uses)]
    yield ["tokens/s", *(f"{use.tokens_per_s:,.0f}" for use in uses)]
