"""A model served elsewhere as a reward: requests, scores and failures. A real HTTP server returns prepared replies."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from staleflow import ConfigError, Judge
from staleflow.stores.errors import StoreError
from staleflow.tasks.settings.task_config import RewardConfig, TaskConfig
from staleflow.tasks.sources import model_judge
from staleflow.tasks.sources.model_judge import JudgeError
from staleflow.tasks.sources.reward_process import Scorer, ScoringSettings
from staleflow.tasks.sources.task_sources import SourceSettings

QUESTION = "Is {response} the answer to {prompt}?"


class Server:
    """Serves chat completions. replies: for the calls in order, a text, None or an HTTP status; the last one is
    repeated. is_cut_off: whether the connection ends before the reply does."""

    def __init__(self) -> None:
        self.replies: list[str | int | None] = ["1"]
        self.is_cut_off = False
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/chat/completions"
                server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                server.keys.append(self.headers["Authorization"])
                reply = server.replies[0] if len(server.replies) == 1 else server.replies.pop(0)
                self.send_response(reply if isinstance(reply, int) else 200)
                if server.is_cut_off:
                    self.send_header("Content-Length", "500")
                self.end_headers()
                self.wfile.write(json.dumps({"choices": [{"message": {"content": reply}}]}).encode())

            def log_message(self, *args: object) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(model_judge, "RETRY_PAUSE_S", 0.0)
    server = Server()
    yield server
    server.close()


def judge(server: Server, **settings: Any) -> Judge:
    return Judge(server.url, "a-model", QUESTION, **settings)


@pytest.mark.parametrize(
    ("reply", "settings", "expected"),
    [
        ("1", {}, 1.0),
        ("It has 3 faults, so 2.5", {"high": 10}, 0.25),
        ("-1, no: 0", {"low": -1}, 0.5),
        ("Score: 8/10", {"high": 10}, 0.8),
        ("Score: .5 / 1", {}, 0.5),
        ("Score: 7 of 9", {"high": 10, "pattern": r"Score: (\d)"}, 0.7),
    ],
)
def test_the_last_score_of_the_reply_is_the_reward(
    server: Server, reply: str, settings: dict[str, Any], expected: float
) -> None:
    server.replies = [reply]
    reward, parts = judge(server, **settings)("{2}", {"prompt": "1 + 1", "answer": "2"})
    assert reward == pytest.approx(expected)
    assert list(parts) == ["score"]
    (body,) = server.bodies
    assert body["messages"] == [{"role": "user", "content": "Is {2} the answer to 1 + 1?"}]
    assert (body["model"], body["temperature"]) == ("a-model", 0)


def test_a_conversation_is_shown_to_the_judge_as_text(server: Server) -> None:
    messages = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "3"}]
    judge(server)("2", {"prompt": [*messages, {"role": "user", "content": "Sure?"}]})
    assert server.bodies[0]["messages"][0]["content"] == "Is 2 the answer to 1 + 1\n3\nSure??"


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("no idea", "no score from 0 to 1 in the judge's reply 'no idea'"),
        ("11", "no score from 0 to 1 in the judge's reply '11'"),
        (400, "no reply of a-model: HTTP 400 Bad Request"),
        (503, "no reply of a-model: HTTP 503 Service Unavailable"),
        (None, "no reply of a-model: its message has no text"),
    ],
)
def test_a_reply_without_a_score_is_an_error(server: Server, reply: str | int | None, message: str) -> None:
    server.replies = [reply]
    with pytest.raises(JudgeError, match=re.escape(message)):
        judge(server)("2", {"prompt": "1 + 1"})
    assert len(server.bodies) == (3 if reply in (503, None) else 1), "only temporary errors are retried"


@pytest.mark.parametrize("status", [429, 500, 503])
def test_calls_are_retried_while_the_server_is_busy(server: Server, status: int) -> None:
    server.replies = [status, status, "1"]
    assert judge(server)("2", {"prompt": "1 + 1"})[0] == 1.0


def test_a_cut_off_reply_is_retried(server: Server) -> None:
    server.is_cut_off = True
    with pytest.raises(JudgeError, match=r"no reply of a-model: IncompleteRead"):
        judge(server)("2", {"prompt": "1 + 1"})
    assert len(server.bodies) == 3


def test_an_unreachable_server_is_an_error(server: Server) -> None:
    server.close()
    with pytest.raises(JudgeError, match=r"no reply of a-model: .*refused"):
        judge(server)("2", {"prompt": "1 + 1"})


def test_replies_are_cached_and_shared_by_judges_with_one_cache(server: Server, tmp_path: Path) -> None:
    server.replies = ["0", "1"]
    first = judge(server, cache=str(tmp_path / "replies"))
    assert [first(answer, {"prompt": "p"})[0] for answer in ("a", "a", "b")] == [0.0, 0.0, 1.0]
    second = judge(server, cache=str(tmp_path / "replies"))
    assert [second(answer, {"prompt": "p"})[0] for answer in ("a", "b")] == [0.0, 1.0]
    assert len(server.bodies) == 2
    judge(server, cache=str(tmp_path / "replies"), max_tokens=1)("a", {"prompt": "p"})
    assert len(server.bodies) == 3, "another request"


def test_a_failed_call_is_not_cached(server: Server, tmp_path: Path) -> None:
    server.replies = [400, "1"]
    scores = judge(server, cache=str(tmp_path))
    with pytest.raises(JudgeError):
        scores("a", {"prompt": "p"})
    assert scores("a", {"prompt": "p"})[0] == 1.0


def test_calls_respect_the_rate_limit(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    now, starts = [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    scores = judge(server, calls_per_minute=30)
    for answer in "abcd":
        scores(answer, {"prompt": "p"})
        starts.append(now[0])
        now[0] += 0.5
    assert starts == [100.0, 102.0, 104.0, 106.0]


def test_the_key_is_read_from_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    judge(server, key_variable="JUDGE_KEY")("a", {"prompt": "p"})
    judge(server)("a", {"prompt": "p"})
    assert server.keys == ["Bearer secret", None]
    monkeypatch.setenv("JUDGE_KEY", "from-a-file\n")
    judge(server, key_variable="JUDGE_KEY")("a", {"prompt": "p"})
    assert server.keys[-1] == "Bearer from-a-file"


@pytest.mark.parametrize("key", ["", "se\ncret", "sécret"])
def test_a_key_that_cannot_be_sent_is_an_error_that_does_not_show_it(
    server: Server, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("JUDGE_KEY", key)
    with pytest.raises(JudgeError) as raised:
        judge(server, key_variable="JUDGE_KEY")("a", {"prompt": "p"})
    assert str(raised.value) == "environment variable JUDGE_KEY has no key that a request can have"
    assert server.keys == []


@pytest.mark.parametrize("field", ["{row[a]}", "{row.a}", "{row}", "{"])
def test_a_question_that_cannot_be_filled_in_is_an_error(server: Server, field: str) -> None:
    record = {"prompt": "p"} if field == "{row}" else {"prompt": "p", "row": [1]}
    with pytest.raises(JudgeError, match="the judge's question cannot be filled in"):
        Judge(server.url, "a-model", field)("a", record)


def test_a_cache_that_cannot_be_created_is_one_line(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot be created.*; free space, or give the judge another cache"):
        judge(server, cache=str(tmp_path / "file" / "cache"))("a", {"prompt": "p"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"low": 1}, "high = 1 is not above low = 1"),
        ({"pattern": r"\d"}, "has no group; put the score in parentheses"),
        ({"pattern": "("}, "is no regular expression: "),
        ({"url": "judge-host/v1"}, "url = 'judge-host/v1' does not begin with http:// or https://"),
    ],
)
def test_settings_that_cannot_give_a_score_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Judge(**({"url": "http://127.0.0.1:1/v1", "model": "a-model", "question": QUESTION} | settings))


def test_a_judge_failure_in_a_run_is_an_error_of_its_response(server: Server, tmp_path: Path) -> None:
    """In the scoring process of a run, with the example of the docs."""
    page = Path("docs/extending.md").read_text().split("## A judge model as a reward\n")[1]
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    (tmp_path / "mine.py").write_text(code.replace("http://127.0.0.1:8000/v1", server.url))
    server.replies = ["8", "what?", "10"]
    reward = RewardConfig(function=f"{tmp_path}/mine.py:helpful")
    source = SourceSettings(task=TaskConfig(source="reasoning_gym:chain_sum"), seed=0)
    with closing(Scorer(ScoringSettings(source=source, reward=reward))) as scorer:
        scored = scorer.score([(answer, {"prompt": "1 + 1"}) for answer in ("2", "3", "4")])
    assert [s.reward for s in scored] == [0.8, 0.0, 1.0]
    assert [bool(s.error) for s in scored] == [False, True, False]
    assert "JudgeError: no score from 0 to 10" in scored[1].error
