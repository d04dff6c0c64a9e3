"""Checks, before benchmark tasks run, that a server of /v1/completions gives the figures of its model.

A server may ignore temperature 0, or return logprobs of sampled tokens only, or of another distribution than the
model's. Tasks would then report chance or other wrong figures, without an error.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PROBE_TEXT = "The days of the week are Monday, Tuesday, Wednesday, Thursday,"
"""Text whose continuations are compared. Any text would do; here a trained model has both sure and unsure tokens."""
NUM_TOKENS = 12
"""Tokens of each continuation."""
LOGPROB_TOLERANCE = 0.1
"""Largest mean difference of logprobs, in nats. Rounding of half precision causes some hundredths."""
TIMEOUT_S = 300.0
"""Seconds for a reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionsServer:
    """A server that continues and scores prompts of token ids, at `url`/completions."""

    url: str
    key: str
    """API key."""
    model: str
    """The model's name there."""
    tokenizer: str
    """Folder, or name on the hub, of the model's tokenizer."""
    context: int
    """Tokens of a prompt and its continuation."""
    concurrency: int
    """Requests sent at a time."""


def model_name(url: str, key: str) -> str:
    """Name of the first model that a server lists. Raises OSError, HTTPException, ValueError, LookupError or TypeError
    if it lists none."""
    return str(_reply(urllib.request.Request(f"{url}/models", headers=_headers(key)))["data"][0]["id"])


def find_problem(server: CompletionsServer, prompt: Sequence[int]) -> str:
    """Find out why figures of a server would be wrong. Returns the reason; empty if nothing is wrong with its
    continuations of a prompt."""
    try:
        return _find_problem(server, list(prompt))
    except urllib.error.HTTPError as error:
        return f"it refuses what lm-eval sends: {error.code} {_message_of(error.read())}"
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"its reply cannot be read: {type(error).__name__}: {error}"


def _find_problem(server: CompletionsServer, prompt: list[int]) -> str:
    greedy, again = _sample(server, prompt, temperature=0), _sample(server, prompt, temperature=0)
    sampled = _sample(server, prompt, temperature=1)
    # Two greedy responses need not be equal: rounding decides between tokens that are about as likely.
    for (ids, sampled_logprobs), is_greedy in ((greedy, True), (again, True), (sampled, False)):
        if not ids:
            return "it returned a response without tokens"
        reply = _request(
            server, prompt=[[*prompt, *ids]], temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True
        )  # as lm-eval sends it
        token_logprobs = reply["logprobs"]["token_logprobs"]
        if len(token_logprobs) != len(prompt) + len(ids) + 1:
            return (
                f"of a prompt of {len(prompt) + len(ids)} tokens with echo = true it returns {len(token_logprobs)} "
                "logprobs: choices would be scored by others than their own"
            )
        logprobs = token_logprobs[len(prompt) : -1]
        top_logprobs = [max(top.values()) for top in reply["logprobs"]["top_logprobs"][len(prompt) : -1]]
        difference = sum(abs(a - b) for a, b in zip(logprobs, sampled_logprobs, strict=True)) / len(ids)
        if not difference <= LOGPROB_TOLERANCE:  # nor NaN
            return (
                f"the logprobs that it returns for a text differ by {difference:.3g} nats on average from those with "
                f"which it sampled the text; {LOGPROB_TOLERANCE:g} are allowed"
            )
        lead = max(top - own for top, own in zip(top_logprobs, logprobs, strict=True))
        if is_greedy and not lead <= LOGPROB_TOLERANCE:
            return f"it does not obey temperature = 0: it sampled a token although another is {lead:.3g} nats likelier"
    return ""


def _sample(server: CompletionsServer, prompt: list[int], temperature: float) -> tuple[list[int], list[float]]:
    """Sample a continuation. Returns its token ids and their logprobs."""
    fields = {"prompt": prompt, "max_tokens": NUM_TOKENS, "logprobs": 0, "return_token_ids": True}
    reply = _request(server, temperature=temperature, **fields)
    return reply["token_ids"], reply["logprobs"]["token_logprobs"]


def _request(server: CompletionsServer, **fields: Any) -> Any:
    """Send a request for one completion, and return it."""
    body = json.dumps({"model": server.model, **fields}).encode()
    return _reply(urllib.request.Request(f"{server.url}/completions", body, _headers(server.key)))["choices"][0]


def _headers(key: str) -> dict[str, str]:
    return {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}


def _reply(request: urllib.request.Request) -> Any:
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        return json.load(response)


def _message_of(body: bytes) -> str:
    """The message of an error's body, or its first characters."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:200].decode(errors="replace")
