"""Checks the hash chain over the records of a run's commits.

The *entry* of a commit is the hash of its record as it is stored. The record has the entry of the commit before, the
hashes of the commit's rows and of the batch as it was trained, the fingerprint of the resulting weights, the ledger's
balance, and what the weights of each start are computed from. The first commit follows the hash of the store's header.
The newest entry is kept with its snapshot, and that of a checkpoint's step in the checkpoint. A resumed run and what
undoes steps continue the chain from the commit that they go back to; nothing begins another one.

Invariants:
- Equal newest entries mean equal records and rows from the chain's first commit on: every stored number, token and
  text. A finding names the commit whose record or rows differ, or the last one if rows follow that it does not have.

What a chain alone does not prove: whoever can write the store can also write another chain. A signed entry excludes
that, and repeated steps show whether the weights follow from the rows (pipeline/stored_runs/verification.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from staleflow.stores.auditing.findings import Finding
from staleflow.stores.errors import StoreError, StoreUnavailable
from staleflow.stores.trajectories.layout import id_range
from staleflow.stores.trajectories.reader import ROW_COUNT_ARRAY, StoredCommit, StoreReader
from staleflow.stores.trajectories.records import chain_hash

CHECK = "chain"
"""The name of this check in findings."""


@dataclass(slots=True, kw_only=True)
class ChainReport:
    """The result of checking a store's hash chain."""

    num_commits: int = 0
    findings: list[Finding] = field(default_factory=list)
    step_entries: dict[int, str] = field(default_factory=dict)
    """Entry of each training step."""
    weight_inputs: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    """What weights are computed from, by the first training step that it holds for."""


def check_chain(store: StoreReader) -> ChainReport:
    """Check every entry of the chain at a store's current snapshot, reading all rows. Memory: the rows of one commit.
    Raises StoreUnavailable."""
    store = StoreReader.at(store.path, store.snapshot)
    report = ChainReport()
    before, entry, num_rows = "the store's header", store.first_chain_entry, 0
    try:
        for commit in store.stored_commits():
            record = commit.record
            location = f"{record.kind} {record.step}"
            report.num_commits += 1
            if record.previous != entry:
                report.findings.append(_finding(location, f"does not follow what is stored before it, {before}"))
            report.findings += _check_rows(store, location, commit, num_rows)
            report.weight_inputs += [(record.step, record.inputs)] if record.inputs else []
            before, entry, num_rows = location, chain_hash(commit.text), num_rows + record.num_rows
            if record.kind == "step":
                report.step_entries[record.step] = entry
        if store.newest_chain_entry != (entry if report.num_commits else ""):
            report.findings.append(_finding(before, "is not what was committed: its snapshot names another entry"))
        if (num_stored := store.array_lengths()[ROW_COUNT_ARRAY]) > num_rows:
            report.findings.append(_finding(before, f"no commit has the rows after it, {num_rows} to {num_stored - 1}"))
    except StoreUnavailable:
        raise
    except StoreError as error:
        report.findings.append(_finding(before, f"what follows cannot be read: {error}"))
    return report


def _check_rows(store: StoreReader, location: str, commit: StoredCommit, first: int) -> Iterator[Finding]:
    """Check the rows of a commit, which begin at row `first`."""
    stop = first + commit.record.num_rows
    try:
        if store.fingerprint_rows(first, stop) != commit.record.rows_fingerprint:
            yield _finding(location, f"its rows, {first} to {stop - 1}, are not those committed")
        ids = id_range(store.row_columns(first, stop, ("trajectory",))["trajectory"])
        if ids != commit.id_range:
            yield _finding(location, f"its rows have the ids {ids}, the table of commits has {commit.id_range}")
    except StoreUnavailable:
        raise
    except StoreError as error:
        yield _finding(location, f"its rows cannot be read: {error}")


def _finding(location: str, message: str) -> Finding:
    return Finding(check=CHECK, location=location, message=message)
