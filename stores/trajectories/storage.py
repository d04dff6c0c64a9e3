"""Storage of a store's data: in the folder at its path, or in an S3 bucket named by a file at its path.

Whoever has the path can open the store, wherever its data are. Endpoint and credentials of a bucket are those of the
environment, as for every program that speaks S3: AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, or a profile.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import icechunk

from staleflow.stores.files import replace_text
from staleflow.stores.s3_url import split_url

ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
"""Environment variables that name another server than Amazon's; the first that is set counts."""
LISTENS_S = 5.0
"""Seconds within which a server that is not Amazon's must take a connection."""
REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")


def url_of(path: Path) -> str:
    """The URL of a store's data; empty if the data are in the folder at its path."""
    return path.read_text("utf-8").strip() if path.is_file() else ""


def write_url_file(path: Path, url: str) -> None:
    """Write the file at a path that names the URL of a store. Raises StoreError."""
    replace_text(path, f"{url}\n", "free space or move runs_dir")


def storage_at(path: Path) -> Any:
    """Icechunk storage of the store at a path. Raises ConfigError, OSError."""
    return bucket_storage(url) if (url := url_of(path)) else icechunk.local_filesystem_storage(str(path))


def check_endpoint() -> None:
    """Raise OSError if nothing listens at the S3 endpoint in the environment variables; Icechunk would retry for half a
    minute. Does not connect to Amazon's own servers."""
    endpoint = _endpoint()
    if endpoint:
        url = urlsplit(endpoint)
        port = url.port or (443 if url.scheme == "https" else 80)
        socket.create_connection((url.hostname or "", port), LISTENS_S).close()


def bucket_storage(url: str) -> Any:
    """Icechunk storage of a URL in a bucket. Raises ConfigError."""
    bucket, prefix = split_url(url)
    endpoint = _endpoint()
    region = next((os.environ[name] for name in REGIONS if os.environ.get(name)), None)
    return icechunk.s3_storage(
        bucket=bucket,
        prefix=prefix,
        region=region or ("us-east-1" if endpoint else None),  # another server has no regions, but must be given one
        endpoint_url=endpoint or None,
        allow_http=endpoint.startswith("http://"),
        force_path_style=bool(endpoint),
        from_env=True,
    )


def _endpoint() -> str:
    return next((os.environ[name] for name in ENDPOINT_VARIABLES if os.environ.get(name)), "")
