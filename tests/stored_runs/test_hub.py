"""Pushing a checkpoint to a hub: a local server that replies as the Hugging Face hub does."""

from __future__ import annotations

import base64
import http.server
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, ModelCardData

from staleflow.pipeline.recovery.run_folder import find_checkpoint, load_job
from staleflow.pipeline.stored_runs.hub import model_card, push_checkpoint
from staleflow.stores.errors import ConfigError


@dataclass
class Hub:
    """A fake hub. url: its address. status: HTTP status of its replies if they are errors. files: uploads by name."""

    url: str = ""
    status: int = 200
    created: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    num_commits: int = 0

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return {"url": f"{self.url}/me/policy", "id": "1", "name": "me/policy"}
        if "/preupload/" in path:
            asked = json.loads(body)["files"]
            return {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]}
        if "/commit/" in path:
            self.num_commits += 1
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return {"success": True, "commitUrl": f"{self.url}/me/policy/commit/1", "commitOid": "1"}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        raise KeyError(path)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            refused = hub.status != 200
            answer = {"error": "Invalid username or password."} if refused else hub.answer(self.path, body)
            text = json.dumps(answer).encode()
            self.send_response(hub.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hub.url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        yield hub
        server.shutdown()


def test_a_checkpoint_is_pushed_with_its_model_card(finished_run: Path, hub: Hub) -> None:
    url = push_checkpoint(finished_run, "me/policy", private=True)
    assert url == f"{hub.url}/me/policy/commit/1"
    assert "private" in json.dumps(hub.created)
    _, checkpoint = find_checkpoint(finished_run)
    uploaded = dict(hub.files)
    card = ModelCard(uploaded.pop("README.md").decode())
    assert uploaded == {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    assert isinstance(card.data, ModelCardData)
    assert card.data.library_name == "transformers"
    assert "audit of the run | holds" in card.text
    assert hub.num_commits == 1, "weights and card come together or not at all"


def test_the_model_card_names_no_local_folder(finished_run: Path) -> None:
    card = model_card(finished_run, title="policy")
    assert str(finished_run) not in card
    assert str(Path(load_job(finished_run).model.path).parent) not in card
    settings = card.partition("```toml\n")[2]
    assert "steps = " in settings
    assert "runs_dir" not in settings


@pytest.mark.parametrize("status", [401, 403, 500])
def test_a_rejected_push_gives_a_one_line_error(finished_run: Path, hub: Hub, status: int) -> None:
    hub.status = status
    with pytest.raises(ConfigError, match=r"me/policy: .* refuses: .*HF_TOKEN") as caught:
        push_checkpoint(finished_run, "me/policy")
    assert "\n" not in str(caught.value)


def test_runs_that_cannot_be_pushed_give_a_one_line_error(finished_run: Path, hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the name of a repository"):
        push_checkpoint(finished_run, "a/b/c")
    with pytest.raises(ConfigError, match="has checkpoints of steps"):
        push_checkpoint(finished_run, "me/policy", step=1000)
    with pytest.raises(ConfigError, match=r"config\.toml"):
        push_checkpoint(tmp_path, "me/policy")
    assert not hub.created


def test_an_unreachable_hub_gives_a_one_line_error(finished_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"the upload to http://127\.0\.0\.1:9 failed: \w+: "):
        push_checkpoint(finished_run, "me/policy")
