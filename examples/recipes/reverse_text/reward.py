"""The reward of reverse-text: how much of the reversed text an answer has."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Any


def similarity(answer: str, record: Mapping[str, Any]) -> float:
    """The ratio of difflib between an answer and the prompt read backward; answer: what the tag holds."""
    return SequenceMatcher(None, answer.strip(), record["prompt"][::-1]).ratio()
