"""Comparison of a checkpoint's files with those that the run's trainer saves of the same weights."""

from __future__ import annotations

import filecmp
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from staleflow.pipeline.recovery import certificate
from staleflow.stores.serialization import parse_json

PLACES = ("_name_or_path", "base_model_name_or_path")
"""Keys of JSON files that have the base model's path, which nothing is computed from."""
VERSION = "transformers_version"
"""Key of config.json."""


@dataclass(slots=True)
class FileComparison:
    """What is not equal. Lines that name a file each."""

    differences: list[str] = field(default_factory=list)
    unverified: list[str] = field(default_factory=list)
    """Files that no run saves and no model is loaded from, and what another version of transformers may explain."""
    weights_are_equal: bool = True


def compare_files(checkpoint: Path, saved: Path) -> FileComparison:
    """Compare a checkpoint with a folder that was saved here. Raises OSError."""
    result = FileComparison()
    present, expected = _names(checkpoint), _names(saved)
    then, here = (_json(folder / "config.json").get(VERSION) for folder in (checkpoint, saved))
    for name in sorted(expected):
        if name not in present:
            result.differences.append(f"{name} is not there")
        elif not _equal(checkpoint / name, saved / name):
            is_weights = name.endswith(".safetensors")
            result.weights_are_equal &= not is_weights
            line = f"{name} is not the file that the run's trainer saves"
            if then == here:
                result.differences.append(line)
            else:
                result.unverified.append(f"{line} with transformers {here}; it names {str(then)[:50]!r}")
    for name in sorted(present - expected):
        if name.startswith(".") or name.endswith(".md"):
            result.unverified.append(f"{name}: the run saves no such file")
        elif not name.startswith(certificate.FILE):  # it and its signature
            result.differences.append(f"{name}: the run saves no such file")
    return result


def _names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def _equal(file: Path, other: Path) -> bool:
    if filecmp.cmp(file, other, shallow=False):
        return True
    values = _json(file)
    return bool(values) and values == _json(other)


def _json(file: Path) -> dict[str, Any]:
    """The values of a JSON file without paths; empty if it is none."""
    try:
        values = parse_json(file.read_bytes()) if file.suffix == ".json" else None
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in values.items() if key not in PLACES} if isinstance(values, dict) else {}
