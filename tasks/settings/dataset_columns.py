"""Names of the columns that hold a data set's prompts and answers."""

from __future__ import annotations

from dataclasses import dataclass

from staleflow.tasks.settings.knobs import knob


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Columns of a jsonl, parquet or datasets source. `a.b` is field b of column a."""

    prompt: str = knob("prompt", "column of the prompt: a text, or a list of messages with role and content")
    answer: str = knob("answer", "column of the answer; empty: there is none, as reward.function is your own code")
