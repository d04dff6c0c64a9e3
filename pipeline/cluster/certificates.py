"""TLS certificates for one Dask cluster, in a folder with the Dask configuration that uses them.

Dask executes any code that is sent to its scheduler or a worker. With these files only processes that can read the
folder can connect: every connection is encrypted, and both ends need a certificate signed by the folder's authority.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from staleflow.stores.errors import ConfigError, StoreError, raised_as

AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE, CONFIGURATION_FILE = "ca.pem", "cert.pem", "key.pem", "dask.yaml"
"""Names of the folder's files. The authority's key is not stored, so that no other certificate can be signed."""
VALID_DAYS = 365


def create_certificates(folder: Path, hosts: Sequence[str], scheduler_address: str) -> None:
    """Create a folder with a certificate authority, one certificate with its key, and a Dask configuration.

    Args:
        folder: Folder for the files; only this user can read it.
        hosts: Names and addresses of the scheduler's host, besides localhost.
        scheduler_address: Address to which clients and workers connect, such as tls://head:8786.

    Raises:
        ConfigError: The folder exists, or the package `cryptography` is missing.
        StoreError: The folder cannot be written.
    """
    files = _create_pem_files(hosts)
    try:
        folder.mkdir(parents=True, mode=0o700)
        files[CONFIGURATION_FILE] = _dask_configuration(folder.resolve(), scheduler_address)
        for name, data in files.items():
            with os.fdopen(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
    except FileExistsError as error:
        raise ConfigError(f"{folder}: exists already; name another folder, or remove it") from error
    except OSError as error:
        raise StoreError(f"{folder}: the certificates cannot be written: {error.strerror}") from error


def has_certificates(folder: Path) -> bool:
    """Whether a folder was written by `create_certificates`."""
    return all((folder / name).is_file() for name in (AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE, CONFIGURATION_FILE))


def check_validity(folder: Path) -> None:
    """Raise ConfigError if the folder's certificate has expired or cannot be read. Checks nothing without the package
    `cryptography`, which an existing folder does not need."""
    try:
        from cryptography import x509
    except ImportError:
        return
    path = folder / CERTIFICATE_FILE
    with raised_as(ConfigError, f"{path}: cannot be read", OSError, ValueError, remedy=f"remove {folder}"):
        end = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    if end <= datetime.datetime.now(datetime.UTC):
        raise ConfigError(f"{path}: expired on {end:%Y-%m-%d}; remove {folder}, which is then created again")


def read_scheduler_address(folder: Path) -> str:
    """Read the scheduler's address in the folder's Dask configuration. Raises ConfigError."""
    for line in (folder / CONFIGURATION_FILE).read_text("utf-8").splitlines():
        key, _, value = line.partition(": ")
        if key == "scheduler-address":
            return value.strip()
    path = folder / CONFIGURATION_FILE
    raise ConfigError(f"{path}: no scheduler-address; name another folder, which is then created")


def _dask_configuration(folder: Path, scheduler_address: str) -> bytes:
    """Return Dask's settings as YAML. Scheduler, workers and clients use the same certificate."""
    paths = (f"        cert: {folder / CERTIFICATE_FILE}", f"        key: {folder / KEY_FILE}")
    role_lines = [line for role in ("scheduler", "worker", "client") for line in (f"      {role}:", *paths)]
    lines = [
        f"scheduler-address: {scheduler_address}",
        "distributed:",
        "  comm:",
        "    default-scheme: tls",
        "    require-encryption: true",
        "    tls:",
        f"      ca-file: {folder / AUTHORITY_FILE}",
        *role_lines,
    ]
    return "\n".join([*lines, ""]).encode()


def _create_pem_files(hosts: Sequence[str]) -> dict[str, bytes]:
    """Create the authority, the certificate and its key. Returns PEM texts by file name. Raises ConfigError."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise ConfigError("certificates need the package cryptography; pip install 'staleflow[tls]'") from error

    now = datetime.datetime.now(datetime.UTC)

    def name(common_name: str) -> Any:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])

    def builder(subject: str, key: Any) -> Any:
        return (
            x509.CertificateBuilder()
            .subject_name(name(subject))
            .issuer_name(name("staleflow cluster authority"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        )

    def alternative_name(host: str) -> Any:
        try:
            return x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            return x509.DNSName(host)

    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = (
        builder("staleflow cluster authority", authority_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    names = dict.fromkeys(("localhost", "127.0.0.1", "::1", *hosts))
    certificate = (
        builder("staleflow cluster", key)
        .add_extension(x509.SubjectAlternativeName([alternative_name(host) for host in names]), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    return {
        AUTHORITY_FILE: authority.public_bytes(pem),
        CERTIFICATE_FILE: certificate.public_bytes(pem),
        KEY_FILE: key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    }
