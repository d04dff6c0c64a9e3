"""A server that speaks S3, for tests: moto's, in a process of its own."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

BUCKET = "staleflow-tests"
STARTS_S = 60.0


@contextlib.contextmanager
def served() -> Iterator[dict[str, str]]:
    """A server with one empty bucket; the environment in which programs find it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            _make_bucket(f"{endpoint}/{BUCKET}")
            yield {
                "AWS_ENDPOINT_URL": endpoint,
                "AWS_ACCESS_KEY_ID": "tests",
                "AWS_SECRET_ACCESS_KEY": "tests",
                "AWS_REGION": "us-east-1",
                "AWS_EC2_METADATA_DISABLED": "true",
            }
        finally:
            server.kill()


def _make_bucket(url: str) -> None:
    """Make the bucket as soon as the server answers."""
    deadline = time.monotonic() + STARTS_S
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="PUT")):
                return
        except urllib.error.URLError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
