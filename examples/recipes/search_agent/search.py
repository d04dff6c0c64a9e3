"""A search engine as a tool, and the reward of questions with several right answers."""

from __future__ import annotations

import json
import os
import re
import string
import urllib.request
from collections.abc import Mapping
from typing import Any

SERVER = "http://127.0.0.1:8000/retrieve"
"""The retrieval server of Search-R1; the variable SEARCH_URL names another."""
PASSAGES = 3
WAIT_S = 30.0


def search(query: str) -> str:
    """Passages of Wikipedia about a query."""
    body = json.dumps({"queries": [query], "topk": PASSAGES, "return_scores": True}).encode()
    request = urllib.request.Request(
        os.environ.get("SEARCH_URL", SERVER), data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        (passages,) = json.load(answer)["result"]
    return "\n\n".join(passage["document"]["contents"] for passage in passages)


def exact_match(answer: str, record: Mapping[str, Any]) -> float:
    """1 if the answer is one of the right ones, but for case, articles, punctuation and white space."""
    return float(_normalized(answer) in map(_normalized, record["golden_answers"]))


def _normalized(text: str) -> str:
    bare = "".join(symbol for symbol in text.lower() if symbol not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())
