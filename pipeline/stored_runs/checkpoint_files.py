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
VERSION_KEY = "transformers_version"
"""Key of config.json with the version of transformers that saved the checkpoint."""


@dataclass(slots=True)
class FileComparison:
    """Result of comparing the files of a checkpoint."""

    differences: list[str] = field(default_factory=list)
    """One line per file that differs, is missing or is not expected."""
    unverified: list[str] = field(default_factory=list)
    """One line per file that has no effect on the model, or whose difference may come from another version of
    transformers."""
    weights_are_equal: bool = True


def compare_files(checkpoint: Path, saved: Path) -> FileComparison:
    """Compare the files of a checkpoint with a folder that the trainer has just saved. Raises OSError."""
    comparison = FileComparison()
    actual_names, expected_names = _list_files(checkpoint), _list_files(saved)
    checkpoint_version, own_version = (
        _read_json_values(folder / "config.json").get(VERSION_KEY) for folder in (checkpoint, saved)
    )
    for name in sorted(expected_names):
        if name not in actual_names:
            comparison.differences.append(f"{name} is missing")
        elif not _is_equal(checkpoint / name, saved / name):
            is_weights = name.endswith(".safetensors")
            comparison.weights_are_equal &= not is_weights
            line = f"{name} is not the file that the run's trainer saves"
            if checkpoint_version == own_version:
                comparison.differences.append(line)
            else:
                comparison.unverified.append(
                    f"{line} with transformers {own_version}; it names {str(checkpoint_version)[:50]!r}"
                )
    for name in sorted(actual_names - expected_names):
        if name.startswith(".") or name.endswith(".md"):
            comparison.unverified.append(f"{name}: the run saves no such file")
        elif not name.startswith(certificate.FILE):  # the certificate and its signature
            comparison.differences.append(f"{name}: the run saves no such file")
    return comparison


def _list_files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def _is_equal(file: Path, other: Path) -> bool:
    if filecmp.cmp(file, other, shallow=False):
        return True
    values = _read_json_values(file)
    return bool(values) and values == _read_json_values(other)


def _read_json_values(file: Path) -> dict[str, Any]:
    """The values of a JSON file without paths; empty for other files."""
    try:
        values = parse_json(file.read_bytes()) if file.suffix == ".json" else None
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in values.items() if key not in PATH_KEYS} if isinstance(values, dict) else {}
