"""The certificate of a checkpoint: its run, its version, and the entry of the step that published it in the run's chain
(stores/auditing/chain.py)."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from staleflow.stores.errors import ConfigError, raised_as, strerror
from staleflow.stores.files import replace_text
from staleflow.stores.s3_url import is_url
from staleflow.stores.serialization import Codec, parse_json
from staleflow.stores.trajectory import PolicyVersion

FILE = "certificate.json"
"""In the checkpoint's folder."""
OFFLINE = "offline.json"
"""The record of an offline training, in its folder."""
ENTRY = re.compile("[0-9a-f]{64}")


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
    """The folder of a checkpoint's run, or of its offline training, two folders above it, or else the URL of its store.
    Raises ConfigError."""
    certificate, folder = read(checkpoint), checkpoint.resolve().parent.parent
    if (folder / "config.toml").is_file() or (folder / OFFLINE).is_file():
        return str(folder)
    if not is_url(certificate.store):
        raise ConfigError(f"{checkpoint}: it is not in its run's folder; put it into checkpoints/ of {certificate.run}")
    return certificate.store


def read(checkpoint: Path) -> Certificate:
    """Read a checkpoint's certificate. Raises ConfigError if it has none."""
    with raised_as(
        ConfigError,
        f"{checkpoint / FILE}: no certificate",
        OSError,
        ValueError,
        remedy="name a run, or a checkpoint of one",
        describe=strerror,
    ):
        certificate = Codec().decode(parse_json((checkpoint / FILE).read_bytes()), Certificate)
        if certificate.version < 1:
            raise ValueError(f"version {certificate.version} is out of range; it must be >= 1")
        if not ENTRY.fullmatch(certificate.entry):
            raise ValueError(f"entry {certificate.entry!r} must be 64 hex digits")
    return certificate
