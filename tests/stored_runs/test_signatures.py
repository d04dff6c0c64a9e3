"""Signatures of a checkpoint's certificate by ssh-keygen."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from staleflow.pipeline.recovery import certificate
from staleflow.pipeline.recovery.certificate import Certificate
from staleflow.stores.errors import ConfigError, StoreError
from staleflow.stores.trajectory import PolicyVersion
from tests.commands import command

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")


def new_key(folder: Path, name: str) -> Path:
    key = folder / name
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", key], check=True)
    (folder / f"{name}.allowed").write_text(f"{name}@here {key.with_suffix('.pub').read_text()}")
    return key


def test_only_a_signature_by_a_listed_key_is_accepted(tmp_path: Path) -> None:
    """A forger who makes a new chain needs another entry in the certificate and does not have the key."""
    first, second = new_key(tmp_path, "mine"), new_key(tmp_path, "other")
    checkpoint = tmp_path / "step-000003"
    checkpoint.mkdir()
    named = Certificate(run="job", store="", version=PolicyVersion(3), entry="0" * 64)
    certificate.write(checkpoint, named)
    allowed = tmp_path / "mine.allowed"
    with pytest.raises(ConfigError, match=r"certificate.json.sig: no such file; sign certificate.json"):
        certificate.verify_signature(checkpoint, allowed)

    def sign(key: Path) -> None:
        (checkpoint / certificate.SIGNATURE_FILE).unlink(missing_ok=True)
        words = ["ssh-keygen", "-q", "-Y", "sign", "-n", "file", "-f", str(key), str(checkpoint / certificate.FILE)]
        subprocess.run(words, check=True, capture_output=True)

    sign(first)
    assert certificate.verify_signature(checkpoint, allowed) == "mine@here"
    with pytest.raises(ConfigError, match="none: no such file"):
        certificate.verify_signature(checkpoint, tmp_path / "none")
    certificate.write(checkpoint, replace(named, entry="1" * 64))
    with pytest.raises(StoreError, match=r"no key of .* signed this certificate.json"):
        certificate.verify_signature(checkpoint, allowed)
    result = command("verify", checkpoint, "--signed-by", allowed)
    assert (result.returncode, result.stdout) == (1, "") and "signed this certificate.json" in result.stderr
    sign(second)
    with pytest.raises(StoreError, match="no key of"):
        certificate.verify_signature(checkpoint, allowed)
    (checkpoint / certificate.SIGNATURE_FILE).write_text("no signature")
    with pytest.raises(StoreError, match="no key of"):
        certificate.verify_signature(checkpoint, allowed)
    result = command("verify", tmp_path, "--signed-by", allowed)
    assert result.returncode == 2 and "no checkpoint with certificate.json" in result.stderr
