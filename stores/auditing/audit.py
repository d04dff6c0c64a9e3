"""Audit of a stored run: proves from its data alone that the staleness bound, single consumption and conservation hold.

Only the store is read; every finding names what it is about. After the lengths of its arrays it is read in two passes,
each in blocks, so that memory does not grow with the tokens: the records of commits with the numbers of their rows; the
tokens, in ranges of rows that may be checked apart. Time is linear in rows and commits.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from staleflow.stores.auditing import conservation, single_consumption
from staleflow.stores.auditing.findings import Finding
from staleflow.stores.auditing.row_checks import RowCheckResult, RowRange, check_rows_at, hash_batches
from staleflow.stores.auditing.weight_counts import RefusedInstance, WeightCheckCounter, WeightCounts
from staleflow.stores.errors import StoreError, StoreUnavailable
from staleflow.stores.trajectories.columns import Rows, empty_rows, select_columns
from staleflow.stores.trajectories.layout import id_range
from staleflow.stores.trajectories.reader import ROW_COUNT_ARRAY, TOKEN_POSITION_COLUMNS, StoreReader
from staleflow.stores.trajectories.records import EMPTY_LEDGER, BatchDigest, CommitRecord

CHECKS = ("arrays", "bound", "once", "conservation", "fingerprints")
COUNTS = ("num_steps", "num_trajectories", "num_tokens", "max_staleness")
"""Numbers of a report that a damaged store makes unknown."""
READ_COLUMNS = (*single_consumption.READ_COLUMNS, *conservation.READ_COLUMNS, "prompt_tokens", "response_tokens")
"""Columns whose numbers are checked without the tokens."""
ROWS_AT_ONCE = 32_768
"""Rows whose numbers are read together, 4 MiB."""
SHOWN_FINDINGS = 10
"""Findings of a check that are shown; the JSON report has all."""
MAX_BLOCK_TOKENS = 2**21
"""Tokens read together: more make it no faster."""
RANGE_TOKENS, RANGE_COMMITS = 2**23, 256
"""Most tokens and commits of a task, if it has several commits: seconds of work."""

Runner = Callable[[Callable[..., RowCheckResult], Iterable[tuple[Any, ...]]], Iterable[RowCheckResult]]
"""Yields function(*call) for all calls, in any order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """The result of an audit: what was checked, and all findings."""

    num_steps: int
    """Training steps."""
    num_trajectories: int
    """Stored trajectories, of any fate."""
    num_tokens: int
    """Prompt and response tokens."""
    max_staleness: int
    """Largest staleness of a trajectory that was trained on, in versions; -1 if there is none."""
    checks: tuple[str, ...]
    """Names of the checks that were made; docs/store.md says what each verifies."""
    findings: tuple[Finding, ...]
    """What is wrong; empty if nothing is."""
    unchecked: tuple[str, ...] = ()
    """Checks that a damaged store makes impossible. If there are any, the counts above are not those of the store."""
    weights: WeightCounts = field(default_factory=WeightCounts)
    """How often instances' weights were verified, not verified and contradicted."""

    @property
    def is_clean(self) -> bool:
        """Whether there are no findings. `unchecked` and `weights` say what could not be checked."""
        return not self.findings

    @property
    def is_verified(self) -> bool:
        """Whether there are no findings, and there were steps and verified weights to check."""
        return self.is_clean and self.num_steps > 0 and self.weights.verified > 0

    @property
    def verdict(self) -> str:
        """The result in a few words, for display."""
        if self.findings:
            return "BROKEN"
        if not self.num_steps:
            return "NOT VERIFIED: no steps are stored yet, so there is nothing to verify"
        return "holds" if self.is_verified else "NOT VERIFIED: the weights of no instance were verified"

    @property
    def lines(self) -> list[str]:
        """The result of each check as lines for display, with its first findings."""
        lines = []
        for check in self.checks:
            findings = [f for f in self.findings if f.check == check]
            lines.append(f"  {check:<13} {'holds' if not findings else f'BROKEN, {len(findings)} findings'}")
            lines += [f"      {line}" for line in (self.weights.lines if check == "fingerprints" else ())]
            lines += [f"      {finding.location}: {finding.message}" for finding in findings[:SHOWN_FINDINGS]]
        return lines + [f"  {check:<13} not checked: it needs what cannot be read" for check in self.unchecked]

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON; counts are None if checks were skipped."""
        unknown_counts = dict.fromkeys(COUNTS) if self.unchecked else {}
        return {**asdict(self), "clean": self.is_clean, **unknown_counts}


def run_sequentially(
    function: Callable[..., RowCheckResult], calls: Iterable[tuple[Any, ...]]
) -> Iterator[RowCheckResult]:
    """Call functions one after another in this process."""
    return (function(*call) for call in calls)


def audit(store: StoreReader, run: Runner = run_sequentially, max_tokens: int = MAX_BLOCK_TOKENS) -> AuditReport:
    """Run all checks over the current state of a whole store.

    Args:
        store: The store; the present state of its branch is checked.
        run: Runs the part of the checks that reads tokens, here or on workers.
        max_tokens: Tokens that are read together, at some 50 bytes of memory each.

    Raises:
        StoreUnavailable: The store's bucket fails, which is not damage.
    """
    store = StoreReader.at(store.path, store.snapshot)  # a live run goes on
    findings: list[Finding] = []
    consumption, weights = single_consumption.ConsumedRows(store.header), WeightCheckCounter()
    try:
        findings += _array_findings(store)
        commits, row_findings, conservation_findings = _read_commits(store, consumption, weights)
        bound_findings, digests, sampled_tokens = _read_tokens(
            store, commits, consumption, run, max_tokens, weights.refusals
        )
    except StoreUnavailable:
        raise
    except StoreError as error:
        findings = [*_damage_findings(store), *findings]
        if not findings:
            findings.append(Finding(check="arrays", location="store", message=str(error)))
        return AuditReport(
            num_steps=0,
            num_trajectories=0,
            num_tokens=0,
            max_staleness=-1,
            checks=CHECKS[:1],
            findings=tuple(findings),
            unchecked=CHECKS[1:],
        )
    trained_steps = [c.step for c in commits if c.kind == "step"]
    findings += [*row_findings, *bound_findings]
    findings += consumption.findings(trained_steps, _all_rows(store, ("trajectory",)))
    findings += conservation_findings
    findings += _fingerprint_findings(commits, digests)
    findings += weights.findings()
    return AuditReport(
        num_steps=len(trained_steps),
        num_trajectories=consumption.num_rows,
        num_tokens=sum(c.num_tokens for c in commits),
        max_staleness=consumption.max_staleness,
        checks=CHECKS,
        findings=tuple(findings),
        weights=weights.counts(sampled_tokens),
    )


def _read_commits(
    store: StoreReader, consumption: single_consumption.ConsumedRows, weights: WeightCheckCounter
) -> tuple[list[CommitRecord], list[Finding], list[Finding]]:
    """Add all records and rows to the checks. Returns the records without what is large, commits whose rows are not
    those of their record, and violations of conservation."""
    commits, row_findings, conservation_findings = [], list[Finding](), list[Finding]()
    check, num_counted = conservation.ConservationCheck(consumption.stored_ids), 0
    blocks = _all_rows(store, READ_COLUMNS)
    unread = next(blocks, empty_rows(0, select_columns(READ_COLUMNS)))
    for commit in store.stored_commits():
        record, parts = commit.record, [unread[:0]]
        num_missing = record.num_rows
        while num_missing and len(unread):
            parts.append(unread[:num_missing])
            num_missing -= len(parts[-1])
            unread = unread[len(parts[-1]) :]
            if not len(unread):
                unread = next(blocks, unread)
        rows = np.concatenate(parts)
        consumption.add(rows)
        check.add(rows)
        weights.add(record)
        num_counted += record.num_rows
        stored = int((rows["prompt_tokens"] + rows["response_tokens"]).sum()), *id_range(rows["trajectory"])
        if stored != (record.num_tokens, *commit.id_range):
            message = "its rows have {} tokens and the ids {} to {}".format(*stored)
            message += ", it was stored with {} and {} to {}".format(record.num_tokens, *commit.id_range)
            row_findings.append(Finding(check="arrays", location=f"{record.kind} {record.step}", message=message))
        conservation_findings += check.check_commit(record)
        commits.append(replace(record, ledger=EMPTY_LEDGER, metrics={}, weight_checks=()))
    for rows in itertools.chain([unread], blocks):  # of no commit
        consumption.add(rows)
    conservation_findings += check.check_store_end(consumption.num_rows, num_counted)
    return commits, row_findings, conservation_findings


def _all_rows(store: StoreReader, names: Sequence[str]) -> Iterator[Rows]:
    num_rows = store.array_lengths()[ROW_COUNT_ARRAY]
    for start in range(0, num_rows, ROWS_AT_ONCE):
        yield store.row_columns(start, min(start + ROWS_AT_ONCE, num_rows), names)


def _damage_findings(store: StoreReader) -> Iterator[Finding]:
    """Every corrupt chunk, with the number of trajectories lost with it. All others can still be read."""
    damage = list(store.damaged_chunks())
    num_damaged = [0] * len(damage)
    num_rows, countable = 0, True
    try:
        num_rows = store.array_lengths()[ROW_COUNT_ARRAY]
        for first in range(0, num_rows, ROWS_AT_ONCE):
            table = store.stored_columns(
                first, first + ROWS_AT_ONCE, (*TOKEN_POSITION_COLUMNS, "text_offset", "text_bytes")
            )
            for i, chunk in enumerate(damage):
                starts, sizes = table["offset"], table["prompt_tokens"] + table["response_tokens"]
                if chunk.array == "text":
                    starts, sizes = table["text_offset"], table["text_bytes"]
                chunk_start = chunk.chunk_index * chunk.chunk_elements
                num_damaged[i] += int(
                    ((starts < chunk_start + chunk.chunk_elements) & (starts + sizes > chunk_start)).sum()
                )
    except StoreUnavailable:
        raise
    except StoreError:
        countable = False
    for chunk, count in zip(damage, num_damaged, strict=True):
        message = chunk.error
        if countable and (chunk.array == "text" or chunk.array.startswith("tokens/")):
            message += f"; it holds parts of {count} of {num_rows} trajectories; the others can be read"
        yield Finding(check="arrays", location=chunk.array, message=message)


def _array_findings(store: StoreReader) -> Iterator[Finding]:
    """Check that array lengths agree with each other and with the step records."""
    lengths = store.array_lengths()
    try:
        num_rows = sum(commit.record.num_rows for commit in store.stored_commits())
    except StoreUnavailable:
        raise
    except StoreError as error:
        yield Finding(check="arrays", location="records", message=f"step records cannot be read: {error}")
        return
    for name in (n for n in lengths if n.startswith("rows/")):
        if lengths[name] != num_rows:
            yield Finding(check="arrays", location=name, message=f"{lengths[name]} rows, step records count {num_rows}")
    try:
        for name in store.deleted_arrays():
            yield Finding(check="arrays", location=name, message="was deleted")
    except StoreUnavailable:
        raise
    except StoreError as error:
        yield Finding(check="arrays", location="deleted columns", message=f"not known: {error}")
    token_lengths = {lengths[n] for n in lengths if n.startswith("tokens/")}
    if len(token_lengths) > 1:
        yield Finding(check="arrays", location="tokens", message=f"arrays of different lengths {sorted(token_lengths)}")


def _read_tokens(
    store: StoreReader,
    commits: Sequence[CommitRecord],
    consumption: single_consumption.ConsumedRows,
    run: Runner,
    max_tokens: int,
    refusals: tuple[RefusedInstance, ...],
) -> tuple[list[Finding], dict[int, str], Counter[tuple[str, int]]]:
    """Violations of the bound and tokens of instances that were out of service, the hash of each step's batch, and the
    number of sampled tokens by (instance, version). Raises StoreError at the first row that cannot be read."""
    ranges = list(_ranges(commits, consumption.num_rows))
    step_rows = consumption.step_ranges()
    starts = np.asarray([first for first, _ in ranges], np.int64)
    steps_by_range: dict[int, set[int]] = {}
    for step, (start, stop) in step_rows.items():
        number = int(np.searchsorted(starts, start, side="right")) - 1
        if stop <= ranges[number][1]:
            steps_by_range.setdefault(number, set()).add(step)
    calls = (
        (
            str(store.path), store.snapshot, store.header.eta,
            RowRange(start=a, stop=b, steps=frozenset(steps_by_range.get(i, ())), max_tokens=max_tokens,
                     refusals=refusals),
        )
        for i, (a, b) in enumerate(ranges)
    )  # fmt: skip
    results = sorted(run(check_rows_at, calls), key=lambda result: result.start)
    if error := next((result.error for result in results if result.error), ""):
        raise StoreError(error)
    digests = {step: digest for result in results for step, digest in result.digests.items()}
    if divided_steps := step_rows.keys() - digests.keys():  # rows of them are not where their step was committed
        starts_of_steps, stops = zip(*(step_rows[step] for step in divided_steps), strict=True)
        rows = RowRange(
            start=min(starts_of_steps), stop=max(stops), steps=frozenset(divided_steps), max_tokens=max_tokens
        )
        digests |= hash_batches(store, rows)
    sampled_tokens = sum((result.sampled_tokens for result in results), Counter[tuple[str, int]]())
    return [finding for result in results for finding in result.findings], digests, sampled_tokens


def _ranges(commits: Sequence[CommitRecord], num_rows: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows that cover the store, of whole commits."""
    start = stop = tokens = count = 0
    for commit in commits:
        stop = min(max(stop + commit.num_rows, start), num_rows)
        tokens += commit.num_tokens
        count += 1
        if tokens >= RANGE_TOKENS or count >= RANGE_COMMITS:
            if start < stop:
                yield start, stop
            start, tokens, count = stop, 0, 0
    if start < num_rows:
        yield start, num_rows


def _fingerprint_findings(commits: Sequence[CommitRecord], digests: dict[int, str]) -> Iterator[Finding]:
    """Check that batches read back as the trainer received them."""
    for commit in commits:
        location = f"{commit.kind} {commit.step}"
        if commit.kind == "step" and digests.get(commit.step, BatchDigest().hex) != commit.batch_fingerprint:
            message = "the stored batch is not the one the trainer received"
            yield Finding(check="fingerprints", location=location, message=message)
