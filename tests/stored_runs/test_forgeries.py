"""Random forgeries of a finished run: `staleflow verify` finds each with its place, or lists why it does not cover it.

`HYPOTHESIS_PROFILE=nightly pytest -s` prints how many of 200 of each kind were found.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import zarr
from safetensors.numpy import load_file, save_file

from staleflow.pipeline.recovery import certificate
from staleflow.pipeline.stored_runs.run_files import list_uncovered_files
from staleflow.pipeline.stored_runs.verification import Verification, verify_run
from staleflow.stores.auditing.chain import check_chain
from staleflow.stores.errors import ConfigError, StoreError
from staleflow.stores.trajectories.columns import COLUMNS
from staleflow.stores.trajectories.repository import repository_at
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import Fate, Segment
from tests.stored_runs.in_process import repeat_in_this_process  # noqa: F401  used by name
from tests.stored_runs.test_signatures import new_key
from tests.stored_runs.test_verification import ALL, flip_bit, read_all, store_again, with_first_segment
from tests.support.examples import num_examples

CHECKPOINT = "checkpoints/step-000003"
NUM_FORGERIES = 200 if num_examples() > 1000 else 12
Forgery = Callable[[Path, random.Random], tuple[str, ...]]
"""Changes a run's folder. Returns patterns, of which what verification says must contain one; none: of FILE_PLACES."""


def commit_of(run: Path, row: int) -> str:
    """The commit that stored a row, as findings name it."""
    records = VersionedStore.open(run / "store").commits()
    ends = np.cumsum([record.num_rows for record in records])
    record = records[int(np.searchsorted(ends, row, side="right"))]
    return f"{record.kind} {record.step}"


def change_store(run: Path, change: Callable[[Any], object]) -> None:
    """Change the arrays of a store in a commit that claims to be the one before it."""
    repository = repository_at(run / "store")
    head = next(iter(repository.ancestry(branch="main")))
    session = repository.writable_session("main")
    change(zarr.open_group(session.store, mode="r+"))
    session.commit(head.message, metadata=head.metadata)


def flip_value(values: Any, at: int, rng: random.Random) -> None:
    """Flip one bit of an array's element."""
    flipped = flip_bit(np.asarray(values[at]).tobytes(), rng)
    values[at] = np.frombuffer(flipped, values.dtype)[0]


def flip(array: str) -> Forgery:
    """A flipped bit in a token array or in a column."""

    def forge(run: Path, rng: random.Random) -> tuple[str, ...]:
        columns = VersionedStore.open(run / "store").displayed_columns()
        row = rng.randrange(len(columns["reward"]))

        def change(root: Any) -> None:
            at = row
            if array.startswith("tokens/"):
                lengths = (int(root[f"rows/{name}"][row]) for name in ("prompt_tokens", "response_tokens"))
                at = int(root["rows/offset"][row]) + rng.randrange(sum(lengths))
            flip_value(root[array], at, rng)

        change_store(run, change)
        return (f"^{commit_of(run, row)}: ",)

    return forge


def rearrange(kind: str) -> Forgery:
    """A row is added, dropped, or moved between steps."""

    def forge(run: Path, rng: random.Random) -> tuple[str, ...]:
        steps = VersionedStore.open(run / "store").displayed_columns()["step"]
        row, other = rng.sample(range(len(steps)), 2)
        first = row if kind == "dropped" else min(row, other)

        def new_order(count: int) -> npt.NDArray[np.int64]:
            order = np.arange(count)
            if kind == "added":
                return np.insert(order, other, row)
            order = np.delete(order, row)
            return order if kind == "dropped" else np.insert(order, other, row)

        def change(root: Any) -> None:
            for column in COLUMNS:
                values = np.asarray(root[column.array_name][:])
                changed = values[new_order(len(values))]
                if kind == "moved" and column.name == "step":
                    changed[other] = rng.choice([step for step in range(3) if step != steps[row]])
                root[column.array_name].resize(changed.shape)
                root[column.array_name][:] = changed

        place = commit_of(run, other if kind == "added" else first)
        change_store(run, change)
        return (f"^{place}: ",)

    return forge


def append_row(run: Path, rng: random.Random) -> tuple[str, ...]:
    """A row after those of the last commit, as if the last step had trained on it."""
    row = rng.randrange(len(VersionedStore.open(run / "store").displayed_columns()["reward"]))

    def change(root: Any) -> None:
        for column in COLUMNS:
            root[column.array_name].append(np.asarray(root[column.array_name][:])[row : row + 1])

    change_store(run, change)
    return ("end 3: ",)


def change_tensor(run: Path, rng: random.Random) -> tuple[str, ...]:
    """One value of a tensor, in the checkpoint or in a resume point from which a step is repeated."""
    if rng.random() < 0.5:
        file = run / CHECKPOINT / "model.safetensors"
        weights = load_file(file)
        tensor = weights[rng.choice(sorted(weights))]
        flip_value(tensor.reshape(-1), rng.randrange(tensor.size), rng)
        save_file(weights, file, {"format": "pt"})
        return (f"^version 3 in .*{CHECKPOINT}: ",)
    version = rng.choice((1, 2))
    point = run / "resume" / f"v{version:08d}.pt"
    state = torch.load(point, weights_only=True)
    values = rng.choice([state["model"][name] for name in sorted(state["model"])]).view(-1).numpy()
    flip_value(values, rng.randrange(values.size), rng)
    torch.save(state, point)
    return (f"^resume point of version {version}: ",)


def change_settings(run: Path, rng: random.Random) -> tuple[str, ...]:
    """Another digit in the job file."""
    text = (run / "config.toml").read_text()
    at = rng.choice([match.start() for match in re.finditer(r"\d", text)])
    digit = rng.choice([digit for digit in "123456789" if digit != text[at]])
    (run / "config.toml").write_text(text[:at] + digit + text[at + 1 :])
    return (r"config\.toml",)


def remove_step(run: Path, rng: random.Random) -> tuple[str, ...]:
    """A step with its rows, and a new chain. Without the last step only the checkpoint shows that it is missing."""
    store, step = VersionedStore.open(run / "store"), rng.randrange(3)
    records, rows = store.commits(), list(store.trajectories())
    before = sum(record.num_rows for record in records[:step])
    kept = [*rows[:before], *rows[before + records[step].num_rows :]]
    store_again(run, [*records[:step], *records[step + 1 :]], kept)
    return (f"^step {step}: is missing", r"^certificate\.json: ")


def rehash(run: Path, rng: random.Random) -> tuple[str, ...]:
    """Another reward, logprob or token, and a new chain; the certificate names it in half of the cases."""
    store = VersionedStore.open(run / "store")
    rows = list(store.trajectories())
    at = rng.choice([i for i, row in enumerate(rows) if row.fate is Fate.CONSUMED])

    def change(segment: Segment) -> Segment:
        tokens, logprobs = segment.tokens.copy(), segment.logprobs.copy()
        flip_value(rng.choice((tokens, logprobs)), 0, rng)
        return replace(segment, tokens=tokens, logprobs=logprobs)

    rows[at] = with_first_segment(rows[at], change)
    new = store_again(run, store.commits(), rows)
    assert not check_chain(new).findings
    if rng.random() < 0.5:
        folder = run / CHECKPOINT
        certificate.write(folder, replace(certificate.read(folder), entry=new.chain_entry(2)))
    return (r"^certificate\.json: ", r"certificate\.json\.sig: no key of")


def change_file(run: Path, rng: random.Random) -> tuple[str, ...]:
    """A bit, the end, the place or all of a file: of a random file or folder in the run's folder, one at random."""

    def choose() -> Path:
        parts = sorted(part for part in run.iterdir() if part.is_file() or any(part.iterdir()))
        path = rng.choice(parts)
        return path if path.is_file() else rng.choice(sorted(file for file in path.rglob("*") if file.is_file()))

    file = other = choose()
    while other == file:
        other = choose()
    data = file.read_bytes()
    changes: dict[str, Callable[[], object]] = {
        "bit": lambda: file.write_bytes(flip_bit(data, rng)),
        "cut": lambda: file.write_bytes(data[: rng.randrange(len(data))]),
        "delete": file.unlink,
        "swap": lambda: (file.write_bytes(other.read_bytes()), other.write_bytes(data)),
        "random bytes": lambda: file.write_bytes(rng.randbytes(len(data) or 9)),
    }
    changes[rng.choice([*changes] if data else ["delete", "swap", "random bytes"])]()
    return ()


FORGERIES: dict[str, Forgery] = {
    "a bit of a token": flip("tokens/ids"),
    "a bit of a logprob": flip("tokens/logprobs"),
    "a bit of a reward": flip("rows/reward"),
    "a row added": rearrange("added"),
    "a row added at the end": append_row,
    "a row dropped": rearrange("dropped"),
    "a row moved to another step": rearrange("moved"),
    "a bit of a tensor": change_tensor,
    "a digit of the job file": change_settings,
    "a step missing, chain hashed again": remove_step,
    "a token or logprob, chain hashed again": rehash,
    "bytes of any file": change_file,
}


@pytest.fixture
def signed(stored: Path, tmp_path: Path) -> Path:
    """A copy of a run whose checkpoint is signed; the key is beside it."""
    run, key = tmp_path / "signed", new_key(tmp_path, "mine")
    shutil.copytree(stored, run)
    words = ["ssh-keygen", "-q", "-Y", "sign", "-n", "file", "-f", str(key), str(run / CHECKPOINT / certificate.FILE)]
    subprocess.run(words, check=True, capture_output=True)
    return run


def contradictions(run: Path, allowed: Path) -> tuple[list[str], Verification | None]:
    """What verification says against a run; and its result, if it came to one."""
    checkpoint = run / CHECKPOINT
    try:
        certificate.verify_signature(checkpoint, allowed)
        result = verify_run(run, checkpoint, steps=ALL)
    except (ConfigError, StoreError) as error:
        return [str(error)], None
    return [*(f"{found.location}: {found.message}" for found in result.findings), *result.unverified], result


def changed_files(run: Path, forged: Path) -> list[str]:
    """Names of the files of a run that are gone or have other bytes, and of new files."""
    before, after = (
        {str(path.relative_to(f)): path.read_bytes() for path in f.rglob("*") if path.is_file()} for f in (run, forged)
    )
    return sorted(name for name in before | after if before.get(name) != after.get(name))


FILE_PLACES = {
    "store": (r"store", r"^(step|end|start|refusal) \d+: ", r"^weights: ", r"^certificate\.json"),
    "config.toml": (r"config\.toml", "their job file is not in the run's folder"),
    "fingerprints.json": (r"fingerprints\.json",),
    "resume": (r"resume point of version",),
    "checkpoints": (rf"{CHECKPOINT}", r"certificate\.json"),
}
"""Patterns for the place of a changed file, by the first part of its name."""


def reason_not_covered(run: Path, forged: Path, name: str, listed: tuple[str, ...]) -> str:
    """Why a change of a file is not found; empty if it should be."""
    folder = name.partition("/")[0]
    if folder == "store":
        same = read_all(run / "store") == read_all(forged / "store")
        return "file of the store that only earlier snapshots read" if same else ""
    if folder == "resume":
        version = Path(name).stem
        if any(line.startswith("resume/") and version in line for line in listed):
            return "resume point that no repeated step begins from"
        if not zipfile.is_zipfile(forged / name):
            return "incomplete resume point, ignored: its steps are repeated from an earlier one"
        return "padding of a resume point" if read_archive(run / name) == read_archive(forged / name) else ""
    if folder in FILE_PLACES:
        return ""
    return next((reason for line in listed for names, _, reason in [line.partition(": ")] if folder in names), "")


def read_archive(path: Path) -> dict[str, bytes]:
    """The contents of a resume point, without the padding between them."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def kinds() -> Iterator[str]:
    """Each kind of forgery once; then half of them of any file."""
    *kinds, any_file = FORGERIES
    return chain(FORGERIES, cycle(name for kind in kinds for name in (kind, any_file)))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What verification says of a forged run."""

    lines: tuple[str, ...]
    """Contradictions and what was not verified; empty if it found nothing."""
    reasons: tuple[str, ...]
    """Why each changed file is not covered; an empty one of a file that it should have found."""


def verify_forged(run: Path, forged: Path, allowed: Path, forgery: Forgery, seed: int) -> Outcome:
    """Forge a copy of a run, and verify it. Raises AssertionError if something is found, but not at its place."""
    shutil.copytree(run, forged)
    places = forgery(forged, random.Random(seed))
    names = changed_files(run, forged)
    lines, result = contradictions(forged, allowed)
    listed = () if result is None else (*result.not_covered, *list_uncovered_files(run, run / CHECKPOINT, range(3)))
    reasons = [reason_not_covered(run, forged, name, listed) for name in names] if not lines and not places else [""]
    shutil.rmtree(forged)
    expected = places or {pattern for name in names for pattern in FILE_PLACES.get(name.partition("/")[0], ())}
    assert not lines or any(re.search(pattern, line) for pattern in expected for line in lines), (lines, names)
    return Outcome(tuple(lines), tuple(reasons))


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_random_forgeries_are_found_with_their_place_or_listed_as_not_covered(signed: Path, tmp_path: Path) -> None:
    allowed = tmp_path / "mine.allowed"
    lines, honest = contradictions(signed, allowed)
    assert not lines and honest is not None and honest.is_verified
    counts, missed = Counter[str](), list[tuple[int, str]]()
    for seed, kind in enumerate(islice(kinds(), NUM_FORGERIES)):
        outcome = verify_forged(signed, tmp_path / "forged", allowed, FORGERIES[kind], seed)
        found = "found" if outcome.lines else f"not covered: {', '.join(sorted({*outcome.reasons}))}"
        counts[f"{kind}: {found}"] += 1
        missed += [] if outcome.lines or all(outcome.reasons) else [(seed, kind)]
    print(*(f"{count:4} {line}" for line, count in sorted(counts.items())), sep="\n")
    assert not missed
