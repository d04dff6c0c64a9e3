"""Verification of an offline training: its chain, which goes on from that of the run, and random steps done again."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from staleflow.pipeline.config import loading
from staleflow.pipeline.recovery.run_folder import load_job
from staleflow.pipeline.stored_runs.pool import Report
from staleflow.pipeline.stored_runs.repeated_steps import JobPart, Repetition, RepetitionResult, Stretch
from staleflow.pipeline.stored_runs.training import origin_of
from staleflow.pipeline.stored_runs.verification import (
    STEPS,
    Verification,
    run_repetition,
    sort_differences,
    steps_in_words,
    trainable,
    with_checkpoint,
)
from staleflow.stores.auditing.chain import CHECK, check_chain
from staleflow.stores.auditing.findings import Finding
from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectories.reader import StoreReader
from staleflow.stores.trajectories.records import entry_of
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import PolicyVersion

RECORD, HISTORY, JOB = "offline.json", "history.jsonl", "job.toml"
"""Files in the folder of an offline training: what it was made from, its chain, and its job."""


def verify_offline(
    folder: Path, *, steps: int = STEPS, seed: int | None = None, client: Any = None, report: Report = lambda _: None
) -> Verification:
    """Verify an offline training with the chain of the run whose batches it used, and its last weights.

    Args:
        folder: The folder that it made; its run's store is where it was.
        steps: Random steps to repeat, all from the base model.
        seed: Chooses them; by default others each time.
        client: A `distributed.Client` whose workers repeat them; by default local processes do.
        report: Called with events, as in `train_offline`.

    Raises:
        ConfigError: The run's store is gone, or it is not an offline training of this version.
        StoreUnavailable: The store's bucket fails.
    """
    try:
        record = json.loads((folder / RECORD).read_text("utf-8"))
        lines = (folder / HISTORY).read_bytes().splitlines()
        entries = [dict(json.loads(line)) for line in lines]
        path, snapshot, where, epochs = (record[name] for name in ("store", "snapshot", "where", "epochs"))
        branch, num_steps = record["branch"], record["steps"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder}: not an offline training: {error}") from error
    if not Path(path).exists():
        raise ConfigError(f"{folder}: it trained on {path}, which is not there")
    store = VersionedStore.at(Path(path), snapshot)
    report({"say": "checking the chain"})
    chain = check_chain(StoreReader.at(Path(path), store.lineage.get("parent", snapshot)))
    findings = list(chain.findings)
    unverified: list[str] = []
    if not chain.num_entries or not all("previous" in entry for entry in entries):
        unverified.append("everything: an earlier version stored it, or its run, without a chain")
    else:
        origin = entry_of(origin_of(store, branch, where, epochs, folder / JOB))
        findings += _wrong_lines(origin, lines, entries)
        if len(lines) != num_steps:
            message = f"it has {len(lines)} lines; {num_steps} steps were trained"
            findings.append(Finding(check=CHECK, where=HISTORY, message=message))
    result, sample = RepetitionResult(), list[int]()
    checkpoint = next((folder / "checkpoints").glob("step-*"), None)
    if not findings and not unverified:
        try:
            config = trainable(loading.load(folder / JOB))
        except ConfigError as error:
            unverified.append(f"weights: {error}")
        else:
            sample = sorted(random.Random(seed).sample(range(len(entries)), min(steps, len(entries))))
            run_job = dataclasses.replace(config, seed=load_job(Path(path).parent).seed)
            part = JobPart(
                config=config, run_job=run_job, num_steps=config.steps * epochs, start=0, stop=max(sample) + 1
            )
            plan = Repetition(
                path=path,
                snapshot=snapshot,
                where=where,
                epochs=epochs,
                stretches=(Stretch(point="", parts=(part,)),),
                weights={number + 1: entry["weights"] for number, entry in enumerate(entries)},
                batches={number: entry["batch"] for number, entry in enumerate(entries)},
            )
            if checkpoint is not None:
                plan, reasons = with_checkpoint(plan, checkpoint.resolve(), PolicyVersion(len(entries)))
                unverified += reasons
            report({"say": f"repeating {steps_in_words(range(max(sample) + 1))} for {steps_in_words(sample)}"})
            result = run_repetition(plan, client, report)
    contradictions, explained = sort_differences(
        result, {number: entry.get("numerics", "") for number, entry in enumerate(entries)}
    )
    return Verification(
        run=str(folder),
        num_steps=len(entries),
        num_commits=chain.num_commits,
        num_entries=chain.num_entries,
        entry=entry_of(lines[-1]) if sample else "",
        sample_steps=tuple(sample),
        repeated_steps=tuple(sorted(result.steps)),
        findings=(*findings, *contradictions),
        unverified=(*unverified, *explained),
        checkpoint="" if checkpoint is None else str(checkpoint.resolve()),
        checkpoint_is_equal=checkpoint is not None and str(checkpoint.resolve()) in result.models,
    )


def _wrong_lines(origin: str, lines: Sequence[bytes], entries: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    before = origin
    for number, (line, entry) in enumerate(zip(lines, entries, strict=True)):
        if entry["previous"] != before:
            predecessor = "the line before it" if number else f"the run, {JOB} and {RECORD}"
            yield Finding(check=CHECK, where=f"step {number} of {HISTORY}", message=f"does not follow {predecessor}")
        before = entry_of(line)
