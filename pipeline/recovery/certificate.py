"""The certificate of a checkpoint: its run, its version, and the entry of the step that published it in the run's chain
(stores/auditing/chain.py)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from staleflow.stores.errors import ConfigError
from staleflow.stores.files import replace_text
from staleflow.stores.trajectory import PolicyVersion

FILE = "certificate.json"
"""In the checkpoint's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What a checkpoint is of. store: URL of the run's store; empty if it is in the run's folder."""

    run: str
    store: str
    version: PolicyVersion
    entry: str


def write(checkpoint: Path, certificate: Certificate) -> None:
    """Write a checkpoint's certificate atomically. Raises StoreError."""
    text = json.dumps(asdict(certificate), indent=2) + "\n"
    replace_text(checkpoint / FILE, text, "free space or move runs_dir")


def run_of(checkpoint: Path) -> str:
    """The folder of a checkpoint's run, two folders above it, or else the URL of its store. Raises ConfigError."""
    certificate, folder = read(checkpoint), checkpoint.resolve().parents[1]
    if (folder / "config.toml").is_file():
        return str(folder)
    if not certificate.store:
        raise ConfigError(f"{checkpoint}: it is not in its run's folder; put it into checkpoints/ of {certificate.run}")
    return certificate.store


def read(checkpoint: Path) -> Certificate:
    """Read a checkpoint's certificate. Raises ConfigError if it has none."""
    try:
        return Certificate(**json.loads((checkpoint / FILE).read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{checkpoint / FILE}: no certificate: {error}; name a run, or a checkpoint of one"
        ) from error
