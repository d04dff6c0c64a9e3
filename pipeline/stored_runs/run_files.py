"""Files of a run's folder besides its store: which of them a verification covers, and their differences.

Invariant: each file is compared with a hash of the chain, is used for repeating a step, or is listed as not covered,
with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path

from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.recovery import source_fingerprints, start_inputs
from staleflow.stores.auditing.findings import Finding
from staleflow.stores.errors import StoreError
from staleflow.stores.trajectories.records import id_ranges
from staleflow.stores.weights.resume_points import ResumePoints

EARLIER_JOB = re.compile(r"config\.([1-9][0-9]{0,8})\.toml")
"""The job file of an earlier start, with its number."""
NOT_COVERED = {
    "`staleflow replay` checks them": ("events*",),
    "it has only uncommitted work": ("spool",),
    "no weights are computed from them": (
        "bisect-*.html", "evaluations*", "job.json", "job.log", "job.stacks.txt", "job.txt", "rows.jsonl",
        "starts.json", "summary.*", "tensorboard", ".*",
    ),
}  # fmt: skip
"""Names of files that are not covered, by the reason."""
COVERED = ("config*.toml", "fingerprints.json", "code", "store", "checkpoints", "resume")
"""Patterns of all other files, which are covered at least in part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStart:
    """The steps that one start of the run trained, and the inputs of their weights."""

    steps: range
    inputs: dict[str, str]
    job: RunConfig | None
    """The start's job; None if its steps cannot be repeated, for the reason `problem`."""
    problem: str

    def input(self, name: str) -> str:
        """The value of an input; empty if it is not stored."""
        return self.inputs.get(name, "")


def hash_job_files(run_dir: Path) -> dict[str, str]:
    """Compute the hashes of the job files of the run's starts, by name, oldest first."""
    earlier_files = {int(match[1]): path for path in run_dir.iterdir() if (match := EARLIER_JOB.fullmatch(path.name))}
    paths = [*(earlier_files[number] for number in sorted(earlier_files)), run_dir / "config.toml"]
    return {path.name: start_inputs.settings_hash(path) for path in paths if path.is_file()}


def compare_run_files(run_dir: Path, starts: Sequence[TrainedStart]) -> tuple[list[Finding], list[str]]:
    """Compare the files with the hashes in the hash chain.

    Returns:
        Contradictions of the chain; and missing files, each with the reason why it is not verified. Missing files
        contradict nothing, since only the store may have been copied.
    """
    differences = [
        difference
        for compare in ((_compare_jobs, _compare_code, _compare_fingerprints) if starts else ())
        for difference in compare(run_dir, starts)
    ]
    contradictions = [difference for difference in differences if isinstance(difference, Finding)]
    return contradictions, [difference for difference in differences if isinstance(difference, str)]


def _contradiction(name: str, message: str) -> Finding:
    return Finding(check="settings", location=name, message=message)


def _compare_jobs(run_dir: Path, starts: Sequence[TrainedStart]) -> Iterator[Finding | str]:
    jobs = hash_job_files(run_dir)
    names, position = list(jobs), 0
    for settings in (start.input("settings") for start in starts):
        positions = [index for index, name in enumerate(names) if jobs[name] == settings]
        if positions and positions[-1] < position:
            message = "it is in the wrong position: job files are numbered as the starts of the run"
            yield _contradiction(names[positions[-1]], message)
            break
        position = next((index for index in positions if index >= position), position)
    recorded_settings = {start.input("settings") for start in starts}
    for name in (name for name, settings in jobs.items() if settings not in recorded_settings):
        if recorded_settings - {*jobs.values()}:
            yield _contradiction(name, "the steps of no start were trained by this job file")
        else:
            yield f"{name}: no stored step was trained by this job file"


def _compare_code(run_dir: Path, starts: Sequence[TrainedStart]) -> Iterator[Finding | str]:
    code_hash, recorded_hash = start_inputs.user_code_hash(run_dir), starts[-1].input("user_code")
    if recorded_hash and not code_hash:
        yield "code: the user code of the run is not in its folder"
    elif recorded_hash not in (code_hash, start_inputs.user_code_hash(run_dir, includes_branches=False)):
        yield _contradiction("code", "it is not the user code that the run used")
    if other_steps := [step for start in starts if start.input("user_code") != recorded_hash for step in start.steps]:
        yield f"the user code of {format_steps(other_steps)}: only that of the last start is kept"


def _compare_fingerprints(run_dir: Path, starts: Sequence[TrainedStart]) -> Iterator[Finding | str]:
    first, name = starts[0], source_fingerprints.FILE
    if first.steps.start or not first.input("sources"):  # its fingerprints were not known
        return
    try:
        stored_fingerprints = source_fingerprints.read(run_dir)
    except StoreError as error:
        yield _contradiction(name, str(error).partition("; ")[0])
        return
    if stored_fingerprints is None:
        yield f"{name}: it is not in the run's folder"
    elif start_inputs.sources_hash(stored_fingerprints) != first.input("sources"):
        yield _contradiction(name, "it does not have the fingerprints that the run began with")


def list_uncovered_files(run_dir: Path, checkpoint: Path | None, repeated_points: Container[int]) -> Iterator[str]:
    """Yield the files of the run's folder that are not verified, one line per reason.

    Args:
        run_dir: The run's folder.
        checkpoint: The checkpoint that is compared; None if there is none.
        repeated_points: Versions of the resume points from which steps are repeated.
    """
    names = sorted(path.name for path in run_dir.iterdir())
    known_patterns = (*COVERED, *chain.from_iterable(NOT_COVERED.values()))
    unknown_names = tuple(name for name in names if not any(fnmatchcase(name, pattern) for pattern in known_patterns))
    for reason, patterns in (*NOT_COVERED.items(), ("no run writes them", unknown_names)):
        if matching_names := [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]:
            yield f"{', '.join(matching_names)}: {reason}"
    if unused_points := [
        f"v{version:08d}" for version in ResumePoints(run_dir / "resume").versions() if version not in repeated_points
    ]:
        yield f"resume/ {', '.join(unused_points)}: no repeated step begins from them"
    folders = sorted(path.name for path in (run_dir / "checkpoints").glob("*") if path.resolve() != checkpoint)
    if folders:
        yield f"checkpoints/ {', '.join(folders)}: not named"
    yield "store/: earlier snapshots and other branches; `staleflow store audit --full` reads them"


def format_steps(steps: Iterable[int]) -> str:
    """Format step numbers as text.

    >>> format_steps([1, 2, 3, 7]), format_steps([4])
    ('steps 1-3, 7', 'step 4')
    """
    ranges = [f"{a}" if b == a + 1 else f"{a}-{b - 1}" for a, b in id_ranges(steps)]
    return f"{'step' if len(ranges) == 1 and '-' not in ranges[0] else 'steps'} {', '.join(ranges)}"
