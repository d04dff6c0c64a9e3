"""A server that speaks S3, for soaks and tests: moto's, in a process of its own, and a proxy before it that fails on
demand."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

BUCKET = "staleflow-tests"
ACCESS_KEY = "tests"
STARTS_S = 60.0
Fault = Literal["", "busy", "reset"]


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
                "AWS_ACCESS_KEY_ID": ACCESS_KEY,
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


class FailingProxy:
    """What stands before a server and fails on demand. fault: "busy" answers 503, "reset" resets each connection.
    expired: the access key that is answered as expired. lost_answers: how many further changes of a branch are carried
    out without an answer."""

    def __init__(self, endpoint: str) -> None:
        self.fault: Fault = ""
        self.expired = ""
        self.requests_before = 0
        """Requests that are carried out before credentials expire."""
        self.lost_answers = 0
        self.num_refused = 0
        """Requests that were not carried out, or not answered."""
        self._refused = threading.Condition()
        address = urlsplit(endpoint).netloc
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # headers and body are two packets: the second would wait 40 ms for an ACK

            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError):
                    super().handle_one_request()

            def forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                key = re.search(r"Credential=([^/]+)/", self.headers.get("Authorization", ""))
                if proxy.fault == "reset":
                    self.reset()
                elif proxy.fault == "busy":
                    self.refuse(503, "SlowDown", "Please reduce your request rate.")
                elif key and proxy.expires(key[1]):
                    self.refuse(400, "ExpiredToken", "The provided token has expired.")
                else:
                    connection = http.client.HTTPConnection(address)
                    connection.request(self.command, self.path, body, dict(self.headers))
                    answer = connection.getresponse()
                    content = answer.read()
                    connection.close()
                    if proxy.lost_answers and self.command == "PUT" and "/refs/branch." in self.path:
                        proxy.lost_answers -= 1
                        self.reset()
                    else:
                        self.reply(answer.status, dict(answer.getheaders()), content)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = forward

            def reply(self, status: int, headers: dict[str, str], content: bytes) -> None:
                self.send_response_only(status)
                for name, value in headers.items():
                    if name.lower() not in ("transfer-encoding", "connection") and (
                        name.lower() != "content-length" or self.command == "HEAD"
                    ):
                        self.send_header(name, value)
                if self.command != "HEAD":
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            def refuse(self, status: int, code: str, message: str) -> None:
                proxy.count()
                content = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
                self.reply(status, {"Content-Type": "application/xml"}, content)

            def reset(self) -> None:
                proxy.count()
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
                self.close_connection = True

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def __enter__(self) -> FailingProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def expires(self, key: str) -> bool:
        """Whether a request with this access key is refused."""
        with self._refused:
            if key == self.expired:
                self.requests_before -= 1
            return key == self.expired and self.requests_before < 0

    def count(self) -> None:
        with self._refused:
            self.num_refused += 1
            self._refused.notify_all()

    def wait_refused(self, count: int, within_s: float = 240.0) -> None:
        """Wait until so many requests were refused."""
        with self._refused:
            assert self._refused.wait_for(lambda: self.num_refused >= count, within_s)
