"""A plain implementation of the audit, all in memory and row by row, as the model for stores/auditing/audit.py."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from staleflow.stores.auditing.audit import CHECKS, AuditReport
from staleflow.stores.auditing.findings import Finding
from staleflow.stores.auditing.weight_counts import WeightCheckCounter
from staleflow.stores.errors import StoreError
from staleflow.stores.trajectories.reader import TOKEN_POSITION_COLUMNS, StoredCommit, StoreReader
from staleflow.stores.trajectories.records import CommitRecord, RunHeader, batch_fingerprint
from staleflow.stores.trajectory import EndedTrajectory, Fate, Trajectory, outcome_key


def plain_audit(store: StoreReader) -> AuditReport:
    """Run all checks over the whole store."""
    findings: list[Finding] = []
    try:
        records = store.commits()
        rows = list(store.trajectories())
        table = store.stored_columns()
        turns = list(zip(*(table[name].tolist() for name in ("turns", "given_tokens", "tool_s")), strict=True))
        lines = list(store.stored_commits())
        if broken := next((chunk for chunk in store.damaged_chunks() if chunk.array == "tokens/mask"), None):
            raise StoreError(broken.error)
    except StoreError as error:
        findings += [*_damage(store), *_array_findings(store)]
        if not findings:
            findings.append(Finding(check="arrays", location="store", message=str(error)))
        return AuditReport(
            num_steps=0,
            num_trajectories=0,
            num_tokens=0,
            max_staleness=-1,
            checks=("arrays",),
            findings=tuple(findings),
            unchecked=("bound", "once", "conservation", "fingerprints"),
        )
    findings += _array_findings(store)
    findings += _commits(lines, table)
    findings += _rows(store, rows, turns)
    findings += once_findings(store.header, records, rows)
    findings += _conservation(records, rows)
    findings += _fingerprints(records, rows)
    return AuditReport(
        num_steps=sum(r.kind == "step" for r in records),
        num_trajectories=len(rows),
        num_tokens=sum(r.num_tokens for r in records),
        max_staleness=max((r.staleness for r in rows), default=-1),
        checks=CHECKS,
        findings=tuple(findings),
        weights=WeightCheckCounter(records).counts(_sampled_tokens(rows)),
    )


def _commits(commits: list[StoredCommit], table: Mapping[str, Any]) -> Iterable[Finding]:
    """Check the numbers of each commit against its rows."""
    at = 0
    for commit in commits:
        part = slice(at, at + commit.record.num_rows)
        tokens = sum((table["prompt_tokens"] + table["response_tokens"])[part].tolist())
        ids = table["trajectory"][part].tolist()
        found, stored = (tokens, min(ids, default=-1), max(ids, default=-1)), commit.id_range
        if found != (commit.record.num_tokens, *stored):
            message = (
                f"its rows have {found[0]} tokens and the ids {found[1]} to {found[2]}, "
                f"it was stored with {commit.record.num_tokens} and {stored[0]} to {stored[1]}"
            )
            where = f"{commit.record.kind} {commit.record.step}"
            yield Finding(check="arrays", location=where, message=message)
        at += commit.record.num_rows


def _sampled_tokens(rows: Iterable[EndedTrajectory]) -> Counter[tuple[str, int]]:
    """Number of sampled tokens by (instance, version)."""
    counts = Counter[tuple[str, int]]()
    for row in rows:
        for segment in row.trajectory.segments:
            counts[str(segment.instance), int(segment.version)] += len(segment.tokens)
    return counts


def _damage(store: StoreReader) -> Iterable[Finding]:
    """Yield every corrupt chunk with the number of trajectories lost with it."""
    damage = list(store.damaged_chunks())
    try:
        table = store.stored_columns(names=(*TOKEN_POSITION_COLUMNS, "text_offset", "text_bytes"))
    except StoreError:
        table = {}
    for chunk in damage:
        message = chunk.error
        if table and (chunk.array == "text" or chunk.array.startswith("tokens/")):
            begins, sizes = table["offset"], table["prompt_tokens"] + table["response_tokens"]
            if chunk.array == "text":
                begins, sizes = table["text_offset"], table["text_bytes"]
            first = chunk.chunk_index * chunk.chunk_elements
            held = int(((begins < first + chunk.chunk_elements) & (begins + sizes > first)).sum())
            message += f"; it holds parts of {held} of {len(begins)} trajectories; the others can be read"
        yield Finding(check="arrays", location=chunk.array, message=message)


def _array_findings(store: StoreReader) -> Iterable[Finding]:
    """Check that array lengths agree with each other and with the step records."""
    lengths = store.array_lengths()
    try:
        records = store.commits()
    except (StoreError, ValueError) as error:
        yield Finding(check="arrays", location="records", message=f"step records cannot be read: {error}")
        return
    num_rows = sum(r.num_rows for r in records)
    for name in (n for n in lengths if n.startswith("rows/")):
        if lengths[name] != num_rows:
            yield Finding(check="arrays", location=name, message=f"{lengths[name]} rows, step records count {num_rows}")
    for name in store.deleted_arrays():
        yield Finding(check="arrays", location=name, message="was deleted")
    token_lengths = {lengths[n] for n in lengths if n.startswith("tokens/")}
    if len(token_lengths) > 1:
        yield Finding(check="arrays", location="tokens", message=f"arrays of different lengths {sorted(token_lengths)}")


def _rows(store: StoreReader, rows: list[EndedTrajectory], turns: list[tuple[float, ...]]) -> Iterable[Finding]:
    names = ("offset", "prompt_tokens", "response_tokens", "loss_mask")
    table = store.stored_columns()
    numbers = zip(*(table[name].tolist() for name in names), strict=True)
    root = store._read_root()
    tokens = [root[f"tokens/{name}"][:] for name in ("versions", "logprobs", "mask")]
    teacher = root["tokens/teacher"][:] if "tokens/teacher" in root else np.full(len(tokens[0]), np.nan)
    for i, (row, (offset, prompt, response, trained)) in enumerate(zip(rows, numbers, strict=True)):
        yield from _bound(store.header, row)
        where = f"trajectory {row.trajectory.id}"
        faults: list[str] = []
        if min(offset, prompt, response) >= 0:
            of_row = slice(offset, offset + prompt + response)
            versions, logprobs, mask = (values[of_row].tolist() for values in tokens)
            faults += _token_faults(prompt, trained != 0, zip(versions, logprobs, mask, strict=True))
            faults += _teacher_faults(versions, teacher[of_row].tolist())
        versions_of_row = [int(table[name][i]) for name in ("v_min", "v_max", "staleness")]
        for message in (*faults, *_turn_faults(row.trajectory, turns[i]), *_version_faults(row, versions_of_row)):
            yield Finding(check="arrays", location=where, message=message)


def _token_faults(prompt: int, trained: bool, tokens: Iterable[tuple[int, float, int]]) -> Iterable[str]:
    """Check token by token that unsampled tokens have no version, logprob or gradient and that sampled ones have a
    finite logprob. tokens: (version, logprob, mask) of each."""
    counts: Counter[str] = Counter()
    for i, (version, logprob, mask) in enumerate(tokens):
        counts["tokens of the prompt have a version"] += i < prompt and version != -1
        counts["tokens that were not sampled have a logprob"] += version == -1 and logprob != 0
        counts["sampled tokens have a logprob that is not finite"] += version != -1 and not math.isfinite(logprob)
        learnt = int(i >= prompt and version != -1 and trained)
        counts["tokens have a loss mask, and carry no gradient"] += mask > learnt
        counts["tokens that carry gradient have no loss mask"] += mask < learnt
    yield from (f"{count} {message}" for message, count in counts.items() if count)


def _teacher_faults(versions: list[int], teacher: list[float]) -> Iterable[str]:
    """Check that a teacher has computed a finite logprob for each sampled token of a row, or for none."""
    num_given = sum(version == -1 and not math.isnan(value) for version, value in zip(versions, teacher, strict=True))
    if num_given:
        yield f"{num_given} tokens that were not sampled have a teacher's logprob"
    num_missing = sum(v != -1 and not math.isfinite(value) for v, value in zip(versions, teacher, strict=True))
    if num_missing and not all(map(math.isnan, teacher)):
        others = "which has computed others of the row"
        yield f"{num_missing} sampled tokens have no finite logprob of the teacher, {others}"


def _turn_faults(t: Trajectory, stored: tuple[float, ...]) -> Iterable[str]:
    turns, given, tool_s = stored
    if (turns, given) != (len(t.turns), t.num_given) or not abs(tool_s - t.environment_s) <= 1e-6:
        yield (
            f"its spans have {len(t.turns):g} turns, {t.num_given:g} given tokens, {t.environment_s:.6g} s; "
            f"stored are {turns:g} turns, {given:g} given tokens, {tool_s:.6g} s"
        )


def _version_faults(row: EndedTrajectory, stored: list[int]) -> Iterable[str]:
    versions = row.trajectory.versions[row.trajectory.sampled].tolist()
    expected = [min(versions, default=-1), max(versions, default=-1), row.staleness]
    if expected != stored:
        texts = ["versions {} to {} and staleness {}".format(*numbers) for numbers in (expected, stored)]
        yield f"its tokens have {texts[0]}; stored are {texts[1]}"


def _bound(header: RunHeader, row: EndedTrajectory) -> Iterable[Finding]:
    """Check v_traj <= step <= v_traj + eta if consumed, and that no token is older than v_traj or newer than step."""
    t = row.trajectory
    where = f"trajectory {t.id}"
    versions = t.versions[t.sampled]
    if len(versions) and int(versions.min()) < t.v_traj:
        message = f"a token of version {versions.min()}, v_traj is {t.v_traj}"
        yield Finding(check="bound", location=where, message=message)
    if row.fate is not Fate.CONSUMED:
        return
    if t.v_traj > row.step or row.step > t.v_traj + header.eta:
        message = f"consumed by step {row.step}, v_traj is {t.v_traj} and eta {header.eta}"
        yield Finding(check="bound", location=where, message=message)
    if len(versions) and int(versions.max()) > row.step:
        message = f"a token of version {versions.max()}, consumed by step {row.step}"
        yield Finding(check="bound", location=where, message=message)


def once_findings(header: RunHeader, records: list[CommitRecord], rows: list[EndedTrajectory]) -> Iterable[Finding]:
    """Check that every trajectory is stored once and every step consumed exactly its number of complete groups."""
    for trajectory, count in Counter(r.trajectory.id for r in rows).items():
        if count > 1:
            yield Finding(check="once", location=f"trajectory {trajectory}", message=f"stored {count} times")
    for row in rows:
        t, own = row.trajectory, row.trajectory.id // header.members_started_per_group
        if t.group != own:
            message = f"stored with group {t.group}, its id is of group {own}"
            yield Finding(check="once", location=f"trajectory {t.id}", message=message)
    consumed: dict[int, Counter[int]] = {}
    for row in rows:
        if row.fate is Fate.CONSUMED:
            consumed.setdefault(row.step, Counter())[row.trajectory.group] += 1
    trained = [r.step for r in records if r.kind == "step"]
    if trained != list(range(len(trained))):
        yield Finding(check="once", location="steps", message=f"steps are not 0, 1, 2, ...: {trained[:20]}")
    for step in sorted(set(consumed) - set(trained)):
        yield Finding(check="once", location=f"step {step}", message="consumed rows, and no commit trained it")
    for step in sorted({*trained, *consumed}):
        groups = consumed.get(step, Counter())
        if len(groups) != header.groups_per_step or set(groups.values()) != {header.group_size}:
            message = (
                f"consumed {len(groups)} groups of sizes {sorted(set(groups.values()))}, "
                f"a batch is {header.groups_per_step} of {header.group_size}"
            )
            yield Finding(check="once", location=f"step {step}", message=message)
    for group, steps in _steps_by_group(rows).items():
        if len(steps) > 1:
            yield Finding(check="once", location=f"group {group}", message=f"consumed by steps {sorted(steps)}")


def _steps_by_group(rows: list[EndedTrajectory]) -> dict[int, set[int]]:
    steps: dict[int, set[int]] = {}
    for row in rows:
        if row.fate is Fate.CONSUMED:
            steps.setdefault(row.trajectory.group, set()).add(row.step)
    return steps


def conservation_of(record: CommitRecord, ended: set[int], counts: Counter[str]) -> Iterable[Finding]:
    """Yield what is wrong at one commit. ended, counts: of all rows so far."""
    where = f"{record.kind} {record.step}"
    live = {i for a, b in record.ledger.live for i in range(a, b)}
    started = set(range(record.ledger.num_started))
    lost = started - ended - live
    if lost:
        message = f"{len(lost)} trajectories are neither stored nor in flight, first {min(lost)}"
        yield Finding(check="conservation", location=where, message=message)
    both = (ended & live) | ((ended | live) - started)
    if both:
        message = f"{len(both)} trajectories are stored and in flight, or were never started, first {min(both)}"
        yield Finding(check="conservation", location=where, message=message)
    if dict(counts) != {k: v for k, v in record.ledger.num_ended.items() if v}:
        message = f"the ledger counted {record.ledger.num_ended}, the rows are {dict(counts)}"
        yield Finding(check="conservation", location=where, message=message)


def _conservation(records: list[CommitRecord], rows: list[EndedTrajectory]) -> Iterable[Finding]:
    """Check at every commit that started = stored + in flight, and that the ledger's counts match the rows."""
    ended: set[int] = set()
    counts: Counter[str] = Counter()
    at = 0
    for record in records:
        for row in rows[at : at + record.num_rows]:
            ended.add(row.trajectory.id)
            counts[outcome_key(row.fate, row.reason)] += 1
        at += record.num_rows
        yield from conservation_of(record, ended, counts)
    if records and at != len(rows):
        yield Finding(
            check="conservation", location="rows", message=f"{len(rows)} rows, the step records account for {at}"
        )
    if records and records[-1].kind == "end" and records[-1].ledger.num_live:
        message = f"{records[-1].ledger.num_live} trajectories still in flight after the end"
        yield Finding(check="conservation", location="end", message=message)


def _sampled_by(trajectory: Trajectory) -> Counter[tuple[str, int]]:
    """Return numbers of tokens by instance and version."""
    counts: Counter[tuple[str, int]] = Counter()
    for segment in trajectory.segments:
        counts[segment.instance, segment.version] += len(segment.tokens)
    return counts


def _fingerprints(records: list[CommitRecord], rows: list[EndedTrajectory]) -> Iterable[Finding]:
    """Check that batches read back as the trainer received them, and that instances had the published weights."""
    by_step: dict[int, list[EndedTrajectory]] = {}
    for row in rows:
        if row.fate is Fate.CONSUMED:
            by_step.setdefault(row.step, []).append(row)
    published = {r.step + 1: r.weight_fingerprint for r in records if r.kind == "step"}
    published.update((0, r.inputs["weights"]) for r in records if r.step == 0 and "weights" in r.inputs)
    checks = [
        (sum(earlier.num_rows for earlier in records[:i]), check)
        for i, record in enumerate(records)
        for check in record.weight_checks
    ]
    for record in records:
        where = f"{record.kind} {record.step}"
        if record.kind == "step":
            batch = [(r.trajectory, r.advantage) for r in by_step.get(record.step, [])]
            if batch_fingerprint(batch) != record.batch_fingerprint:
                message = "the stored batch is not the one the trainer received"
                yield Finding(check="fingerprints", location=where, message=message)
    for i, row in enumerate(rows):
        for (instance, version), count in _sampled_by(row.trajectory).items():
            pulls = [(at, check) for at, check in checks if (check.instance, check.version) == (instance, version)]
            held_before = any(at <= i for at, check in pulls if not check.refused)
            if any(check.refused for _, check in pulls) and not held_before:
                message = f"{count} tokens of {instance} at version {version}, at which it was taken out of service"
                yield Finding(check="fingerprints", location=f"trajectory {row.trajectory.id}", message=message)
    for record in records:
        where = f"{record.kind} {record.step}"
        for check in record.weight_checks:
            expected = published.get(check.version, check.fingerprint)
            wrong = check.weights.contradicted > 0 or check.fingerprint != expected
            if check.refused or wrong:
                why = check.refused or f"it had {check.fingerprint}, {expected} was published; {check.weights.line}"
                out = "was taken out of service" if check.refused else "had wrong weights and kept sampling"
                message = f"{check.instance} {out} at version {check.version}: {why}"
                yield Finding(check="fingerprints", location=where, message=message)
