"""Compares a checkpoint's files with those that the run's trainer saves for the same weights."""

from __future__ import annotations

import filecmp
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from staleflow.pipeline.recovery import certificate
from staleflow.stores.serialization import parse_json

PATH_KEYS = ("_name_or_path", "base_model_name_or_path")
"""Keys of JSON files that have the base model's path, which has no effect on results."""
VERSION = "transformers_version"
"""Key of config.json with the version of transformers that saved the checkpoint."""


@dataclass(slots=True)
class FileComparison:
    """Result of comparing the files of a checkpoint."""

    differences: list[str] = field(default_factory=list)
    """One line per file that differs, is missing or is not expected."""
    unverified: list[str] = field(default_factory=list)
    """One line per file that no run saves and no model is loaded from, or whose difference another version of
    transformers may explain."""
    weights_are_equal: bool = True


def compare_files(checkpoint: Path, saved: Path) -> FileComparison:
    """Compare the files of a checkpoint with a folder that the trainer has just saved. Raises OSError."""
    result = FileComparison()
    present, expected = _names(checkpoint), _names(saved)
    checkpoint_version, own_version = (_json(folder / "config.json").get(VERSION) for folder in (checkpoint, saved))
    for name in sorted(expected):
        if name not in present:
            result.differences.append(f"{name} is not there")
        elif not _equal(checkpoint / name, saved / name):
            is_weights = name.endswith(".safetensors")
            result.weights_are_equal &= not is_weights
            line = f"{name} is not the file that the run's trainer saves"
            if checkpoint_version == own_version:
                result.differences.append(line)
            else:
                result.unverified.append(
                    f"{line} with transformers {own_version}; it names {str(checkpoint_version)[:50]!r}"
                )
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
    """The values of a JSON file without paths; empty for other files."""
    try:
        values = parse_json(file.read_bytes()) if file.suffix == ".json" else None
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in values.items() if key not in PATH_KEYS} if isinstance(values, dict) else {}
