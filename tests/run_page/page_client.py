"""Sends requests to the run page's server as a browser does, without a socket."""

from __future__ import annotations

import asyncio
import json
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from staleflow.pipeline.run_page.api import RunApi
from staleflow.pipeline.run_page.page_server import application
from staleflow.pipeline.run_page.run_reader import RunReader


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Page:
    """The page of one run, or of two runs. reader: its run reader."""

    def __init__(self, run_dir: Path, other: Path | None = None) -> None:
        self.reader = RunReader(run_dir)
        beside = None if other is None else RunReader(other)
        self._app = application(RunApi(self.reader, beside), frozenset({"box"}))

    def get(self, path: str, host: str = "127.0.0.1:8799", method: str = "GET", **query: object) -> Answer:
        """Return the response to a request."""
        return asyncio.run(self._get(path, host, method, urllib.parse.urlencode(query)))

    def ask(self, what: str, **query: Any) -> Any:
        """Return the JSON response to a request that must succeed."""
        answer = self.get(f"/api/{what}", **query)
        assert answer.status == 200, answer.body
        return answer.json

    async def _get(self, path: str, host: str, method: str, query: str) -> Answer:
        sent: list[Any] = []

        async def receive() -> Any:  # no request has a body, and nobody disconnects
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "http_version": "1.1", "method": method, "path": path, "raw_path": path.encode(),
            "root_path": "", "scheme": "http", "query_string": query.encode(), "headers": [(b"host", host.encode())],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8799),
        }  # fmt: skip
        await self._app(scope, receive, send)
        headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return Answer(sent[0]["status"], headers, b"".join(m.get("body", b"") for m in sent[1:]))
