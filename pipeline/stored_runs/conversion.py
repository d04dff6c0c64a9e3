"""Conversion of a stored run that an earlier version wrote: a converted copy, complete or absent."""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from staleflow.pipeline.config import knob_tree, loading
from staleflow.pipeline.config.job_conversion import admission_of, convert_job, is_earlier_job
from staleflow.pipeline.coordination.journal import files, open_part
from staleflow.pipeline.coordination.journal_conversion import convert_entry
from staleflow.pipeline.recovery.resumption import parts
from staleflow.pipeline.recovery.run_folder import LOCK, lock_folder, require_run
from staleflow.pipeline.strategies.admission import SIMULATED
from staleflow.stores.errors import ConfigError, StaleflowError, StoreError
from staleflow.stores.files import claim_folder, publish, remove

NOT_COPIED = (LOCK, ".store.lock")
"""What is in a run's folder and belongs to its place."""
LEVEL = 6
"""Of the compression of a closed part of a journal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedRun:
    """A converted copy of a run."""

    out: str
    jobs: int
    """The number of job files, one for each start."""
    entries: int
    """Entries of its journals."""


def convert_run(run_dir: Path, out: Path) -> ConvertedRun:
    """Write a converted copy of a run to the folder `out`. The run itself is not changed.

    Converted are its job files and journals; store, spool, resume points and checkpoints are the same. If its store is
    in a bucket, the copy names the same place.

    Raises:
        ConfigError: There is nothing to convert, no job can name its admission rule any more, `out` exists or the run
            is live.
        StoreError: The store cannot be read.
    """
    require_run(run_dir)
    if not (run_dir / "store").exists():
        raise ConfigError(f"{run_dir}: the run has no store; start it again with `staleflow run`")
    trees = [loading.read_tree(job) for job in run_dir.glob("config*.toml")]
    for rule in map(admission_of, trees):
        if rule in SIMULATED:
            raise ConfigError(
                f"{run_dir}: staleness.admission = {rule!r}, which only simulations have now: the run cannot be "
                "converted; read it with the version that wrote it"
            )
    if not (any(map(is_earlier_job, trees)) or _has_earlier_journal(run_dir)):
        raise ConfigError(f"{run_dir}: already of this version; nothing to convert")
    if out.exists():
        raise ConfigError(f"{out} already exists; choose another place, or remove it")
    claim_folder(out.parent, "--out")
    part = out.with_name(f".{out.name}.converting.part")
    try:
        with lock_folder(run_dir), contextlib.ExitStack() as unfinished:
            remove(part)  # of a conversion that was killed
            unfinished.callback(remove, part)
            shutil.copytree(run_dir, part, symlinks=True, ignore=lambda folder, names: _left_out(run_dir, folder))
            jobs = sorted(part.glob("config*.toml"))
            for job in jobs:
                _convert_job_file(job)
            entries = sum(_convert_journal_file(file) for file in list(_journal_files(part)))
            publish(part, out)
    except OSError as error:
        if isinstance(error, StaleflowError):
            raise
        raise StoreError(f"{out}: cannot be written: {error}; choose another place with --out") from error
    return ConvertedRun(out=str(out), jobs=len(jobs), entries=entries)


def _journal_files(run_dir: Path) -> Iterator[Path]:
    for _, journal in parts(run_dir):
        yield from files(journal)


def _has_earlier_journal(run_dir: Path) -> bool:
    """Whether commit 9e20fc41 wrote a run's journals. Reads up to the first routing of a trajectory, whose fields have
    other names now."""
    for file in _journal_files(run_dir):
        with open_part(file) as lines:
            for line in lines:
                if b'"type":"Route"' in line:
                    return b'"epoch":' in line
    return False


def _convert_journal_file(path: Path) -> int:
    """Replace a file of a journal by one with the names of this version; returns its entries. A line that is not JSON
    stays as it is: the last one, if its writer was killed."""
    count = 0
    converted = path.with_name(f"{path.name}.converting")
    with open_part(path) as lines, contextlib.ExitStack() as stack:
        target: BinaryIO = stack.enter_context(converted.open("wb"))
        if path.suffix == ".gz":
            target = cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=target, mode="wb", compresslevel=LEVEL)))
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:
                target.write(line)
                continue
            target.write(json.dumps(convert_entry(entry), separators=(",", ":")).encode() + b"\n")
            count += "event" in entry
    converted.replace(path)
    return count


def _convert_job_file(path: Path) -> None:
    tree = loading.read_tree(path)
    converted = convert_job(tree)
    if converted != tree:
        path.write_text(knob_tree.to_toml(loading.from_tree(converted, str(path))))


def _left_out(run_dir: Path, folder: str) -> tuple[str, ...]:
    return NOT_COPIED if Path(folder) == run_dir else ()
