"""A reward from a judge model: calls a server with OpenAI's chat API for each response."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import threading
import time
import urllib.error
import urllib.request
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path

from staleflow.stores.errors import ConfigError, StoreError, raised_as, type_and_message
from staleflow.stores.files import replace_text
from staleflow.tasks.rendering.task_source import Record, prompt_of

RETRY_PAUSE_S = 0.5
"""Seconds between the first two tries of a call; twice as long after each further one."""
NUMBER = r"(?<![\d.])(?<!/)(?<!/ )(-?(?:\d+(?:\.\d+)?|\.\d+))"
"""A number, but not the 10 of 8/10."""


class JudgeError(Exception):
    """The judge did not score a response, whose trajectory gets this error instead of a reward."""


class Judge:
    """Scores responses with a model on another server. An instance is a function for `reward.function`.

    A call that fails is an error of that response, never a reward of 0. Equal questions are asked once for as long as
    replies are kept: in memory until the worker ends, or in the folder `cache`, which all workers and later rescoring
    share.

    Args:
        url: URL of the server's API, such as `http://host:8000/v1`.
        model: The judge's name on that server.
        question: Text of a request, in which `{response}` and keys of the record, such as `{prompt}`, are replaced.
        pattern: Regular expression whose first group is the score; of several matches in a reply the last counts.
        low: The score that gives reward 0.
        high: The score that gives reward 1. A score outside of [low, high] is an error.
        calls_per_minute: Maximum number of calls a minute of each reward worker; 0: no limit.
        cache: Folder of replies; empty: memory only.
        key_variable: Environment variable that has the API key; empty: none is sent.
        max_tokens: Maximum number of tokens of a reply.
        tries: Tries of a call that does not reach the server, or that it refuses for the moment (429, 5xx).
        timeout_s: Seconds that a try waits for the next bytes of a reply. `reward.timeout_s` must allow for all
            tries, and for the limit of calls.

    Raises:
        ConfigError: `url` is none of http, `high` is not above `low`, or `pattern` has no group.
    """

    def __init__(
        self,
        url: str,
        model: str,
        question: str,
        *,
        pattern: str = NUMBER,
        low: float = 0.0,
        high: float = 1.0,
        calls_per_minute: float = 0.0,
        cache: str = "",
        key_variable: str = "",
        max_tokens: int = 512,
        tries: int = 3,
        timeout_s: float = 60.0,
    ) -> None:
        if high <= low:
            raise ConfigError(f"Judge: high = {high:g} is not above low = {low:g}")
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"Judge: url = {url!r} does not begin with http:// or https://")
        with raised_as(ConfigError, f"Judge: pattern = {pattern!r} is no regular expression", re.error):
            num_groups = re.compile(pattern).groups
        if num_groups < 1:
            raise ConfigError(f"Judge: pattern = {pattern!r} has no group; put the score in parentheses")
        self._url, self._model, self._question = url, model, question
        self._pattern, self._low, self._high = pattern, low, high
        self._interval_s = 60.0 / calls_per_minute if calls_per_minute else 0.0
        self._cache = Path(cache) if cache else None
        self._key_variable, self._max_tokens = key_variable, max_tokens
        self._tries, self._timeout_s = max(1, tries), timeout_s
        self._replies: dict[str, str] = {}
        self._next_call_s = 0.0
        self._rate_lock = threading.Lock()

    def __call__(self, answer: str, record: Record) -> tuple[float, dict[str, float]]:
        """Return the reward of a response, from 0 to 1, and its score as the part `score`. Raises JudgeError."""
        problem = "the judge's question cannot be filled in"
        errors = (LookupError, ValueError, TypeError, AttributeError)  # of fields such as {row[key]} and {row.key}
        with raised_as(JudgeError, problem, *errors, describe=type_and_message):
            prompt = prompt_of(record.get("prompt", " "))
            text = prompt if isinstance(prompt, str) else "\n".join(message.content for message in prompt)
            question = self._question.format(**{**record, "prompt": text, "response": answer})
        reply = self._reply(question)
        matches = list(re.finditer(self._pattern, reply))
        try:
            score = float(matches[-1][1])
        except (IndexError, TypeError, ValueError):
            score = math.nan
        if not self._low <= score <= self._high:
            raise JudgeError(f"no score from {self._low:g} to {self._high:g} in the judge's reply {reply[-80:]!r}")
        return (score - self._low) / (self._high - self._low), {"score": score}

    def _reply(self, question: str) -> str:
        """The judge's reply to a question, or its earlier reply to an equal one. Raises JudgeError, StoreError."""
        body = {"model": self._model, "messages": [{"role": "user", "content": question}], "temperature": 0}
        body["max_tokens"] = self._max_tokens
        digest = hashlib.sha256(json.dumps([self._url, body]).encode()).hexdigest()
        file = None if self._cache is None else self._cache / f"{digest}.txt"
        if file is None:
            if digest not in self._replies:
                self._replies[digest] = self._call(body)
            return self._replies[digest]
        if file.is_file():
            return file.read_text("utf-8")
        reply = self._call(body)
        remedy = "free space, or give the judge another cache"
        with raised_as(StoreError, f"{file.parent}: it cannot be created", OSError, remedy=remedy):
            file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, reply, remedy)
        return reply

    def _call(self, body: dict[str, object]) -> str:
        """Call the server, again if it is busy or cannot be reached. Raises JudgeError."""
        headers = {"Content-Type": "application/json"}
        if self._key_variable:
            key = os.environ.get(self._key_variable, "").strip()
            if not (key.isascii() and key.isprintable() and key):  # the library's own message would show the key
                raise JudgeError(f"environment variable {self._key_variable} has no key that a request can have")
            headers["Authorization"] = f"Bearer {key}"
        url = f"{self._url.rstrip('/')}/chat/completions"
        failure = ""
        for number in range(self._tries):
            if number:
                time.sleep(RETRY_PAUSE_S * 2 ** (number - 1))
            self._wait_for_limit()
            request = urllib.request.Request(url, json.dumps(body).encode(), headers)
            try:
                with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                    content = json.load(response)["choices"][0]["message"]["content"]
                    if isinstance(content, str):
                        return content
                    failure = "its message has no text"
            except urllib.error.HTTPError as error:
                failure = f"HTTP {error.code} {error.reason}"
                if error.code != HTTPStatus.TOO_MANY_REQUESTS and error.code < HTTPStatus.INTERNAL_SERVER_ERROR:
                    break
            except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
                failure = f"{type(error).__name__}: {error}"
        raise JudgeError(f"{url}: no reply of {self._model}: {failure}")

    def _wait_for_limit(self) -> None:
        """Wait until another call is within the limit."""
        with self._rate_lock:
            now = time.monotonic()
            start = max(now, self._next_call_s)
            self._next_call_s = start + self._interval_s
        time.sleep(start - now)
