"""The certificate of a checkpoint: its run, its version, and the entry of the step that published it in the run's hash
chain (stores/auditing/chain.py)."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from staleflow.stores.errors import ConfigError, StoreError, raised_as, strerror
from staleflow.stores.files import replace_text
from staleflow.stores.s3_url import is_url
from staleflow.stores.serialization import Codec, parse_json
from staleflow.stores.trajectory import PolicyVersion

FILE = "certificate.json"
"""File name of the certificate in the checkpoint's folder."""
SIGNATURE_FILE = f"{FILE}.sig"
"""File name of the certificate's signature, as ssh-keygen writes it."""
OFFLINE_RECORD_FILE = "offline.json"
"""File name of the record in the folder of an offline training."""
ENTRY_PATTERN = re.compile("[0-9a-f]{64}")
"""Form of a hash chain's entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Origin of a checkpoint. store: URL of the run's store; empty if the store is in the run's folder. entry: entry of
    the run's hash chain, 64 hex digits."""

    run: str
    store: str
    version: PolicyVersion
    entry: str


def write(checkpoint: Path, certificate: Certificate) -> None:
    """Write a checkpoint's certificate atomically. Raises StoreError."""
    text = json.dumps(asdict(certificate), indent=2) + "\n"
    replace_text(checkpoint / FILE, text, "free space or move runs_dir")


def find_run(checkpoint: Path) -> str:
    """Find the run of a checkpoint: the folder of the run or offline training two levels above it, or else the URL of
    its store. Raises ConfigError."""
    certificate, folder = read(checkpoint), checkpoint.resolve().parent.parent
    if (folder / "config.toml").is_file() or (folder / OFFLINE_RECORD_FILE).is_file():
        return str(folder)
    if not is_url(certificate.store):
        raise ConfigError(f"{checkpoint}: not in its run's folder; move it into checkpoints/ of {certificate.run}")
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
        if not ENTRY_PATTERN.fullmatch(certificate.entry):
            raise ValueError(f"entry {certificate.entry!r} must be 64 hex digits")
    return certificate


def verify_signature(checkpoint: Path, allowed_signers: Path) -> str:
    """Verify the signature of a checkpoint's certificate (`ssh-keygen -Y sign -n file`). Returns the signer's
    principal.

    Args:
        checkpoint: The checkpoint's folder, which contains the certificate and its signature.
        allowed_signers: File of principals and public keys in the format of ssh-keygen.

    Raises:
        ConfigError: There is no signature, no such file, or no ssh-keygen.
        StoreError: None of these keys signed this certificate.
    """
    certificate_file, signature = checkpoint / FILE, checkpoint / SIGNATURE_FILE
    sign_remedy = f"sign {FILE} with `ssh-keygen -Y sign -n file -f KEY`"
    for file, remedy in ((certificate_file, ""), (signature, sign_remedy), (allowed_signers, "")):
        if not file.is_file():
            raise ConfigError(f"{file}: no such file" + (f"; {remedy}" if remedy else ""))
    options = ("-f", str(allowed_signers), "-s", str(signature))
    with raised_as(ConfigError, "ssh-keygen", OSError, remedy="install OpenSSH", describe=strerror):
        principals = _ssh_keygen(b"", "find-principals", *options)
        principal = next(iter(principals.stdout.decode(errors="replace").splitlines()), "")
        verification = _ssh_keygen(certificate_file.read_bytes(), "verify", *options, "-n", "file", "-I", principal)
    if not principal or principals.returncode or verification.returncode:
        raise StoreError(f"{signature}: no key of {allowed_signers} signed this {FILE}; it may have been changed")
    return principal


def _ssh_keygen(data: bytes, action: str, *options: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["ssh-keygen", "-Y", action, *options], input=data, capture_output=True, check=False)
