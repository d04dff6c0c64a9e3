"""Inputs that determine a run's weights besides its batches. The first step of each start stores them.

By name: `weights`, the fingerprint of the start's first version; `settings`, `user_code` and `staleflow`, hashes of the
job file, of the user code in the run's folder and of this package's sources; `sources`, the hash of the fingerprints of
reward, data and template; `numerics`, a description of the trainer's hardware and libraries.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from staleflow.pipeline.recovery.source_fingerprints import Fingerprints


def weight_inputs(run_dir: Path, weights: str, fingerprints: Fingerprints | None) -> dict[str, str]:
    """Return all inputs of a start by name, except `numerics`, which the trainer reports.

    Args:
        run_dir: The run's folder.
        weights: Fingerprint of the start's first version.
        fingerprints: Fingerprints of reward, data and template; None if unknown.
    """
    return {
        "weights": weights,
        "settings": settings_hash(run_dir / "config.toml"),
        "user_code": user_code_hash(run_dir),
        "staleflow": package_hash(),
        "sources": "" if fingerprints is None else sources_hash(fingerprints),
    }


def settings_hash(job: Path) -> str:
    """Hash of a job file; empty if there is none."""
    return hashlib.sha256(job.read_bytes()).hexdigest() if job.is_file() else ""


def user_code_hash(run_dir: Path, *, includes_branches: bool = True) -> str:
    """Hash of the user code in a run's folder; empty if there is none. includes_branches: whether to include the
    rewards of branches, which may have been added later (pipeline/api/code_objects.py)."""
    folder = run_dir / "code"
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return _hash_files(folder, (path for path in files if includes_branches or not path.name.startswith("branch_")))


@functools.cache
def package_hash() -> str:
    """Hash of the sources of this package when a process first asks for it."""
    folder = Path(__file__).parents[2]
    # Search each folder separately: in a checkout they are links, which rglob does not follow.
    return _hash_files(folder, (path for part in folder.iterdir() if part.is_dir() for path in part.rglob("*.py")))


def sources_hash(fingerprints: Fingerprints) -> str:
    """Hash of the fingerprints of reward, data and template."""
    return hashlib.sha256(json.dumps(asdict(fingerprints), sort_keys=True).encode()).hexdigest()


def _hash_files(folder: Path, files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    names = sorted(str(path.relative_to(folder)) for path in files)
    for name in names:
        content = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        digest.update(os.fsencode(name) + f":{content};".encode())
    return digest.hexdigest() if names else ""
