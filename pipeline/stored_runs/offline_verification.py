"""Verifies an offline training: its hash chain, which continues that of the run, and a repetition of random steps."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from staleflow.pipeline.config import loading
from staleflow.pipeline.recovery import certificate
from staleflow.pipeline.recovery.run_folder import load_job
from staleflow.pipeline.stored_runs import repeated_steps
from staleflow.pipeline.stored_runs.pool import EventCallback, run_training
from staleflow.pipeline.stored_runs.run_files import format_steps
from staleflow.pipeline.stored_runs.training import make_chain_origin
from staleflow.pipeline.stored_runs.verification import (
    NUM_SAMPLE_STEPS,
    Verification,
    resolve_models,
    split_differences,
)
from staleflow.stores.auditing.chain import CHECK, check_chain
from staleflow.stores.auditing.findings import Finding
from staleflow.stores.errors import ConfigError, strerror
from staleflow.stores.serialization import Codec, parse_json
from staleflow.stores.trajectories.reader import StoreReader
from staleflow.stores.trajectories.records import CommitRecord, batch_fingerprint, chain_hash
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import EndedTrajectory, PolicyVersion
from staleflow.stores.weights.resume_points import ResumePoints

RECORD_FILE, HISTORY_FILE, JOB_FILE = certificate.OFFLINE_RECORD_FILE, "history.jsonl", "job.toml"
"""Files in the folder of an offline training: what it was made from, its chain, and its job."""


def verify_offline(
    folder: Path,
    *,
    checkpoint: Path | None = None,
    steps: int = NUM_SAMPLE_STEPS,
    seed: int | None = None,
    client: Any = None,
    report: EventCallback = lambda _: None,
) -> Verification:
    """Verify an offline training: its chain, that of the run whose batches it used, and its final weights.

    Args:
        folder: Its folder. The store of its run must be at the same path as during the training.
        checkpoint: Folder of its checkpoint, if that was named.
        steps: Number of random steps to repeat, from the base model or the resume point at which the training began.
        seed: Seed of the choice of steps; random by default.
        client: A `distributed.Client` whose workers repeat the steps; by default local processes do.
        report: Called with events, as in `train_offline`.

    Raises:
        ConfigError: The run's store is gone, it is not an offline training of this version, or `checkpoint` is not its
            checkpoint.
        StoreUnavailable: The store's bucket fails.
    """
    record, lines, entries = _read_training(folder)
    path, checkpoint = record.store, _final_checkpoint(folder, record.steps, checkpoint)
    if not Path(path).exists():
        raise ConfigError(f"{folder}: it trained on {path}, which is not there; put that run back")
    store = VersionedStore.at(Path(path), record.snapshot)
    report({"say": "checking the chain"})
    chain = check_chain(StoreReader.at(Path(path), store.lineage.get("parent", record.snapshot)))
    findings = list(chain.findings)
    unverified: list[str] = []
    origin = chain_hash(
        make_chain_origin(store, record.branch, record.where, record.epochs, record.start, folder / JOB_FILE)
    )
    findings += _find_broken_links(origin, lines, entries, record.start)
    if len(lines) != record.steps - record.start:
        message = f"it has {len(lines)} lines; {record.steps - record.start} steps were trained"
        findings.append(Finding(check=CHECK, location=HISTORY_FILE, message=message))
    run_steps = [r for r in store.commits() if r.kind == "step" and r.step < record.start]
    findings += _find_changed_batches(store, record.where, run_steps)
    result, sample = repeated_steps.RepetitionResult(), list[int]()
    if (checkpoint / certificate.FILE).exists():
        checkpoint_certificate = certificate.read(checkpoint)
        if lines and (checkpoint_certificate.version, checkpoint_certificate.entry) != (
            record.steps,
            chain_hash(lines[-1]),
        ):
            message = (
                f"its last line, {len(lines) - 1}, is not the one that {certificate.FILE} of {checkpoint.name} names"
            )
            findings.append(Finding(check=CHECK, location=HISTORY_FILE, message=message))
    else:
        unverified.append(f"the last line of {HISTORY_FILE}: no {certificate.FILE} of {checkpoint.name} names it")
    if not findings:
        try:
            config = resolve_models(loading.load(folder / JOB_FILE))
        except ConfigError as error:
            unverified.append(f"weights: {error}")
        else:
            step_numbers = range(record.start, record.start + len(entries))
            sample = sorted(random.Random(seed).sample(step_numbers, min(steps, len(entries))))
            run_job = dataclasses.replace(config, seed=load_job(Path(path).parent).seed)
            resume_points = ResumePoints(Path(path).parent / "resume")
            start = record.start if record.start in resume_points.complete_versions() else 0
            part = repeated_steps.JobPart(
                config=config, run_job=run_job, num_steps=config.steps * record.epochs, start=start,
                stop=max(sample) + 1,
            )  # fmt: skip
            plan = repeated_steps.RepetitionPlan(
                store_path=path,
                snapshot=record.snapshot,
                where=record.where,
                epochs=record.epochs,
                ranges=(
                    repeated_steps.RepeatedRange(
                        resume_point=str(resume_points.path(PolicyVersion(start))) if start else "", parts=(part,)
                    ),
                ),
                weight_fingerprints={r.step + 1: r.weight_fingerprint for r in run_steps}
                | {number + 1: entry.weights for number, entry in zip(step_numbers, entries, strict=True)},
                batch_fingerprints={r.step: r.batch_fingerprint for r in run_steps}
                | {number: entry.batch for number, entry in zip(step_numbers, entries, strict=True)},
            )
            if checkpoint.is_dir():
                end_part = dataclasses.replace(part, start=step_numbers.stop, stop=step_numbers.stop)
                plan = dataclasses.replace(plan, checkpoint=(str(checkpoint), end_part))
            else:
                unverified.append(f"the weights of {checkpoint.name}: it is not in checkpoints/")
            report({"say": f"repeating {format_steps(range(start, max(sample) + 1))} for {format_steps(sample)}"})
            result = run_training(repeated_steps.repeat_steps, plan, plan.ranks, client, report)
    contradictions, unverified_differences = split_differences(
        result, {record.start + number: entry.numerics for number, entry in enumerate(entries)}
    )
    return Verification(
        run=str(folder),
        num_steps=record.start + len(entries),
        num_commits=chain.num_commits,
        entry=chain_hash(lines[-1]) if sample else "",
        sample_steps=tuple(sample),
        repeated_steps=tuple(sorted(result.equal_steps)),
        findings=(*findings, *contradictions),
        unverified=(*unverified, *unverified_differences, *result.unverified),
        checkpoint=str(checkpoint) if checkpoint.is_dir() else "",
        checkpoint_is_equal=result.checkpoint_is_equal,
        not_covered=(
            f"{RECORD_FILE}: the evaluations and metrics in it; those in {HISTORY_FILE} are",
            "plan: nothing is read from it",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfflineRecord:
    """The part of an offline training's record that describes its inputs."""

    store: str
    snapshot: str
    branch: str
    where: str
    epochs: int
    steps: int
    start: int = 0
    """Version that it began with: earlier steps are the run's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _HistoryLine:
    """The part of a line of the history that is verified."""

    batch: str = ""
    weights: str = ""
    numerics: str = ""
    previous: str = ""


def _final_checkpoint(folder: Path, num_steps: int, named_checkpoint: Path | None) -> Path:
    """Folder of a training's checkpoint. Raises ConfigError if another one was named."""
    checkpoint = (folder / "checkpoints" / f"step-{num_steps:06d}").resolve()
    if named_checkpoint is not None and named_checkpoint.resolve() != checkpoint:
        raise ConfigError(f"{named_checkpoint}: not the checkpoint of {folder}, which is {checkpoint.name}; name that")
    return checkpoint


def _read_training(folder: Path) -> tuple[_OfflineRecord, list[bytes], list[_HistoryLine]]:
    """The record of an offline training and the lines of its history, as bytes and decoded. Raises ConfigError."""
    codec, name = Codec(), RECORD_FILE
    try:
        record = codec.decode(parse_json((folder / RECORD_FILE).read_bytes()), _OfflineRecord)
        if record.epochs < 1 or record.steps < 1 or not record.snapshot or not record.store or "\0" in record.store:
            raise ValueError("epochs and steps must be >= 1, and store and snapshot name what it trained on")
        if not 0 <= record.start < record.steps:
            raise ValueError(f"start = {record.start} must be one of its steps")
        name = HISTORY_FILE
        *lines, remainder = (folder / HISTORY_FILE).read_bytes().split(b"\n")
        if remainder or not lines:
            raise ValueError(f"its line {len(lines)} has no end")
        return record, lines, [codec.decode(parse_json(line), _HistoryLine) for line in lines]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / name}: not of an offline training: {strerror(error)}; copy it again") from error


def _find_changed_batches(store: VersionedStore, where: str, run_steps: Sequence[CommitRecord]) -> Iterator[Finding]:
    """Check that the batches of the steps before the training's first are those that the run consumed."""
    rows_by_step = repeated_steps.select_consumed_rows(store, where) if run_steps else {}
    for record in run_steps:
        batch = repeated_steps.read_batch_rows(store, rows_by_step[record.step]) if record.step in rows_by_step else []
        rows = [row for row in batch if isinstance(row, EndedTrajectory)]
        if batch_fingerprint((row.trajectory, row.advantage) for row in rows) != record.batch_fingerprint:
            message = "its batch is not the run's, and it was not trained again"
            yield Finding(check=CHECK, location=f"step {record.step}", message=message)


def _find_broken_links(
    origin: str, lines: Sequence[bytes], entries: Sequence[_HistoryLine], start: int
) -> Iterator[Finding]:
    previous_entry = origin
    for number, (line, entry) in enumerate(zip(lines, entries, strict=True), start):
        if entry.previous != previous_entry:
            predecessor = "the line before it" if number > start else f"the run, {JOB_FILE} and {RECORD_FILE}"
            yield Finding(
                check=CHECK, location=f"step {number} of {HISTORY_FILE}", message=f"does not follow {predecessor}"
            )
        previous_entry = chain_hash(line)
