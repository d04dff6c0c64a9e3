"""Verifies a run: its hash chain, its job files and code, and a repetition of random steps by its trainer.

To repeat a step, all steps since the nearest resume point before it, or since the base model, are repeated. Each must
give the weights that it published, bit for bit. This proves that the weights follow from the stored rows and settings.
The chain proves that these are the rows and settings of the run.

Invariants:
- Everything that was not checked is listed with the reason, and does not count as verified.
- Weights that differ on another kind of machine than the run's are not verified; they do not contradict the run.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from staleflow.pipeline.config import user_files
from staleflow.pipeline.config.model_files import find_model_folder
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.recovery import certificate, start_inputs
from staleflow.pipeline.recovery.certificate import Certificate
from staleflow.pipeline.recovery.run_folder import load_job
from staleflow.pipeline.stored_runs.pool import EventCallback, run_training
from staleflow.pipeline.stored_runs.repeated_steps import (
    JobPart,
    RepeatedRange,
    RepetitionPlan,
    RepetitionResult,
    repeat_steps,
)
from staleflow.pipeline.stored_runs.run_files import (
    TrainedStart,
    compare_run_files,
    format_steps,
    hash_job_files,
    list_uncovered_files,
)
from staleflow.stores.auditing.chain import check_chain
from staleflow.stores.auditing.findings import Finding
from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectories.records import CommitRecord
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import PolicyVersion
from staleflow.stores.weights.resume_points import ResumePoints

NUM_SAMPLE_STEPS = 3
"""Default number of random steps to repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Result of verifying a run: what was verified, what contradicts the run, and what was not verified and why."""

    run: str
    num_steps: int
    """Stored training steps."""
    num_commits: int
    entry: str
    """The newest entry of the chain; empty without commits."""
    sample_steps: tuple[int, ...]
    """Random steps chosen for repetition."""
    repeated_steps: tuple[int, ...]
    """Steps that were repeated bit for bit: sample steps, and the steps before them since a resume point."""
    findings: tuple[Finding, ...]
    """Contradictions."""
    unverified: tuple[str, ...]
    """One line for each thing that was not verified, with the reason."""
    checkpoint: str = ""
    """The checkpoint that was verified with the run."""
    checkpoint_is_equal: bool = False
    """Whether its weights are those that its step published, bit for bit."""
    not_covered: tuple[str, ...] = ()
    """One line for each kind of files that verification does not cover, with the reason."""

    @property
    def is_verified(self) -> bool:
        """Whether nothing contradicts the run, a step was repeated, and a checkpoint has the weights that its step
        published."""
        is_complete = self.repeated_steps and (self.checkpoint_is_equal or not self.checkpoint)
        return not self.findings and bool(is_complete)

    @property
    def lines(self) -> tuple[str, ...]:
        """The result as lines of text."""
        state = "verified" if self.is_verified else "CONTRADICTED" if self.findings else "NOT VERIFIED"
        lines = [f"{self.checkpoint or self.run}: {state}"]
        if self.num_commits:
            lines.append(f"  chain: {self.num_commits} commits, newest entry {self.entry}")
        if self.repeated_steps:
            count = f"{len(self.repeated_steps)} of {self.num_steps} steps repeated bit for bit"
            lines.append(f"  weights: {count}: {format_steps(self.repeated_steps)}")
        if self.checkpoint_is_equal:
            lines.append("  checkpoint: it has the weights that its step published, bit for bit")
        lines += [f"  contradicted: {finding.location}: {finding.message}" for finding in self.findings]
        lines += [f"  not verified: {line}" for line in self.unverified]
        return (*lines, *(f"  not covered: {line}" for line in self.not_covered))


def verify_run(
    run_dir: Path,
    checkpoint: Path | None = None,
    *,
    steps: int = NUM_SAMPLE_STEPS,
    seed: int | None = None,
    client: Any = None,
    report: EventCallback = lambda _: None,
) -> Verification:
    """Verify a run.

    Args:
        run_dir: Folder of the run.
        checkpoint: Folder of one of its checkpoints, to be verified as well. Only steps before it are repeated.
        steps: Number of random steps to repeat.
        seed: Seed for choosing them; random by default.
        client: A `distributed.Client` whose workers repeat them; by default local processes are started.
        report: Called with events, as in `train_offline`.

    Raises:
        ConfigError: There is no store, the checkpoint has no certificate, or too few workers are free.
        StoreUnavailable: The store's bucket fails.
    """
    checkpoint = checkpoint and checkpoint.resolve()
    checkpoint_certificate = None if checkpoint is None else certificate.read(checkpoint)
    store = VersionedStore.open_pinned(run_dir / "store")
    report({"say": "checking the chain"})
    chain = check_chain(store)
    findings, unverified = list(chain.findings), list[str]()
    if checkpoint_certificate is not None:
        findings += _check_entry(checkpoint_certificate, chain.step_entries)
    step_records = [record for record in store.commits() if record.kind == "step"] if not chain.findings else []
    gap = next((number for number, record in enumerate(step_records) if record.step != number), None)
    if gap is not None:
        findings.append(Finding(check="chain", location=f"step {gap}", message="is missing"))
        step_records = []
    starts = read_starts(run_dir, chain.weight_inputs, len(step_records)) if step_records else []
    contradictions, missing_files = compare_run_files(run_dir, starts)
    findings += contradictions
    unverified += missing_files
    unverified += [f"{format_steps(start.steps)}: {start.problem}" for start in starts if start.problem]
    if starts and starts[-1].input("staleflow") != start_inputs.package_hash():
        unverified.append("this package: the run used other sources of it")
    resume_versions = find_repeat_versions(run_dir, starts)
    if checkpoint_certificate is not None:
        resume_versions = {s: v for s, v in resume_versions.items() if s < checkpoint_certificate.version}
    sample = sorted(random.Random(seed).sample(sorted(resume_versions), min(steps, len(resume_versions))))
    result = RepetitionResult()
    if sample:
        plan = _plan_repetition(run_dir, store, step_records, starts, {step: resume_versions[step] for step in sample})
        report({"say": _describe_plan(plan, sample, step_records)})
        if checkpoint is not None and checkpoint_certificate is not None:
            version = checkpoint_certificate.version
            for start in starts:
                if start.job and version - 1 in start.steps:  # its job trained the last step
                    part = make_job_part(start.job, version, version)
                    plan = dataclasses.replace(plan, checkpoint=(str(checkpoint), part))
        result = run_training(repeat_steps, plan, plan.ranks, client, report)
    else:
        unverified.append(
            f"weights: {'no step can be repeated' if step_records or not findings else 'the chain is broken'}"
        )
    differences, unverified_differences = split_differences(
        result, {step: start.input("numerics") for start in starts for step in start.steps}
    )
    if unfinished_steps := sorted({*sample} - {*result.equal_steps}):
        unverified.append(f"{format_steps(unfinished_steps)}: of the sample, and not repeated to the end")
    return Verification(
        run=str(run_dir),
        num_steps=len(step_records),
        num_commits=chain.num_commits,
        entry=store.newest_chain_entry,
        sample_steps=tuple(sample),
        repeated_steps=tuple(sorted(result.equal_steps)),
        findings=(*findings, *differences),
        unverified=(*unverified, *unverified_differences, *result.unverified),
        checkpoint="" if checkpoint is None else str(checkpoint),
        checkpoint_is_equal=result.checkpoint_is_equal,
        not_covered=tuple(list_uncovered_files(run_dir, checkpoint, {resume_versions[step] for step in sample})),
    )


def read_starts(run_dir: Path, inputs: Sequence[tuple[int, dict[str, str]]], num_steps: int) -> list[TrainedStart]:
    """The starts of a run. inputs: what weights are computed from, by the first step that it holds for."""
    files = {settings: name for name, settings in hash_job_files(run_dir).items()}
    starts = []
    for (first, start_input), (stop, _) in pairwise([*inputs, (num_steps, {})]):
        job, problem = None, "their job file is not in the run's folder"
        if file := files.get(start_input.get("settings", "")):
            try:
                job, problem = resolve_models(load_job(run_dir, file=file)), ""
            except ConfigError as error:
                problem = str(error)
        starts.append(TrainedStart(steps=range(first, stop), inputs=start_input, job=job, problem=problem))
    return starts


def resolve_models(config: RunConfig) -> RunConfig:
    """The job with its models found on this machine. Raises ConfigError if its trainer cannot be built here."""
    if config.emulated:
        raise ConfigError("an emulated run has no weights")
    find_model_folder(config.model.path)
    return user_files.with_absolute_models(config)


def find_repeat_versions(run_dir: Path, starts: Sequence[TrainedStart]) -> dict[int, int]:
    """For each step that can be repeated, the version from which to repeat: 0, or that of the nearest resume point."""
    points = ResumePoints(run_dir / "resume").complete_versions()
    resume_versions: dict[int, int] = {}
    resume_version: int | None = None
    for start in starts:
        for step in start.steps:
            resume_version = step if step in points or not step else resume_version
            resume_version = None if start.job is None else resume_version
            if resume_version is not None:
                resume_versions[step] = resume_version
    return resume_versions


def _plan_repetition(
    run_dir: Path,
    store: VersionedStore,
    step_records: Sequence[CommitRecord],
    starts: Sequence[TrainedStart],
    sample: Mapping[int, int],
) -> RepetitionPlan:
    """Plan the repetition of sample steps. sample: for each step, the version from which to repeat."""
    resume_points, ranges = ResumePoints(run_dir / "resume"), []
    for resume_version in sorted({*sample.values()}):
        end = max(step for step, first in sample.items() if first == resume_version) + 1
        parts = make_job_parts(starts, resume_version, end)
        resume_point = str(resume_points.path(PolicyVersion(resume_version))) if resume_version else ""
        ranges.append(RepeatedRange(resume_point=resume_point, parts=parts))
    weight_fingerprints = {record.step + 1: record.weight_fingerprint for record in step_records}
    if not starts[0].steps.start and (first := starts[0].input("weights")):
        weight_fingerprints[0] = first
    return RepetitionPlan(
        store_path=str(store.path),
        snapshot=store.snapshot,
        ranges=tuple(ranges),
        weight_fingerprints=weight_fingerprints,
        batch_fingerprints={record.step: record.batch_fingerprint for record in step_records},
    )


def make_job_parts(starts: Sequence[TrainedStart], first: int, stop: int) -> tuple[JobPart, ...]:
    """The steps first <= step < stop by the jobs that trained them."""
    return tuple(
        make_job_part(start.job, max(first, start.steps.start), min(stop, start.steps.stop))
        for start in starts
        if start.job is not None and start.steps.start < stop and start.steps.stop > first
    )


def make_job_part(config: RunConfig, start: int, stop: int) -> JobPart:
    """The steps of a run that one of its jobs trained."""
    return JobPart(config=config, run_job=config, num_steps=config.steps, start=start, stop=stop)


def _check_entry(checkpoint_certificate: Certificate, entries: Mapping[int, str]) -> Iterator[Finding]:
    if (entry := entries.get(checkpoint_certificate.version - 1)) != checkpoint_certificate.entry:
        stored_entry = "not stored" if entry is None else entry
        step, certified_entry = checkpoint_certificate.version - 1, checkpoint_certificate.entry
        message = f"it names the entry {certified_entry}, that of step {step} is {stored_entry}"
        yield Finding(check="chain", location=certificate.FILE, message=message)


def split_differences(result: RepetitionResult, numerics: Mapping[int, str]) -> tuple[list[Finding], list[str]]:
    """Split differences into contradictions of the run and those that may come from another kind of machine.
    numerics: the numerics with which each step was trained."""
    findings, unverified = list[Finding](), list[str]()
    for difference in result.differences:
        run_numerics = numerics.get(max(0, difference.step), "")
        if difference.was_computed and run_numerics != result.numerics:
            line = f"it has other weights than with {run_numerics}; here it is {result.numerics}"
            unverified.append(f"{difference.location}: {line}")
        else:
            findings.append(Finding(check="weights", location=difference.location, message=difference.message))
    return findings, unverified


def _describe_plan(plan: RepetitionPlan, sample: Sequence[int], step_records: Sequence[CommitRecord]) -> str:
    steps = [s for steps_range in plan.ranges for part in steps_range.parts for s in range(part.start, part.stop)]
    seconds = sum(step_records[step].metrics.get("train_s", 0.0) for step in steps)
    description = f"repeating {format_steps(steps)} for {format_steps(sample)}"
    return f"{description}: the run's trainer took {seconds:.0f} s for them"
