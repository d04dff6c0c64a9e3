"""The columns and rows of a data set that a run uses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from staleflow.tasks.settings.knobs import knob


class DataUse(Enum):
    """What a data set is used for, which determines the rows that are held out. BOTH: about the last tenth, at least
    one. TRAINING: none. EVALUATION: all."""

    BOTH = "both"
    TRAINING = "training"
    EVALUATION = "evaluation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Columns of a jsonl, parquet or datasets source. `a.b` is field b of column a."""

    prompt: str = knob("prompt", "column of the prompt: a text, or a list of messages with role and content")
    answer: str = knob("answer", "column of the answer; empty: there is none, as reward.function is your own code")
