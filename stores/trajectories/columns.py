"""The columns of stored trajectories, with their names, types, units and meanings. Pure.

Each column is an array of its own in a store, `rows/NAME`, with one element per trajectory. A store that was written
before a column existed reads that column's fill value, so a new column needs a line in COLUMNS and nothing else, unless
its value is new to `EndedTrajectory`, which then gets a field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from staleflow.stores.trajectory import (
    NO_VERSION,
    AbortReason,
    EndedTrajectory,
    EnvSpan,
    Fate,
    FinishReason,
    PolicyVersion,
    Span,
)

FINISHES, FATES, REASONS = tuple(FinishReason), tuple(Fate), tuple(AbortReason)
Rows = npt.NDArray[np.void]
"""[R] rows of numbers: a structured array with a field for each column that was read, in the types of COLUMNS."""
Value = int | float | bool | Enum


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of the trajectory table."""

    name: str
    dtype: str
    """The numpy type of its array. A column of members of an enumeration stores their indices."""
    meaning: str
    unit: str = ""
    fill: int | float | bool = 0
    """The value of rows that were stored before the column existed."""
    get_value: Callable[[EndedTrajectory], Value] | None = None
    """Computes the value of a row. None: it is an offset into the store's other arrays, which a commit assigns."""
    get_display_value: Callable[[EndedTrajectory], Value] | None = None
    """Computes the value that tables show, where it is not the stored one."""
    members: tuple[Enum, ...] = ()
    """Members of the enumeration, by stored index."""

    @property
    def array_name(self) -> str:
        """Name of the column's array in a store."""
        return f"rows/{self.name}"

    @property
    def display_dtype(self) -> str:
        """Type of the column in displayed tables, where enumerations are words."""
        return "str" if self.members else self.dtype

    def encode(self, row: EndedTrajectory) -> int | float | bool:
        """Encode a trajectory's value for storage."""
        assert self.get_value is not None
        value = self.get_value(row)
        return self.members.index(value) if isinstance(value, Enum) else value

    def display_value(self, row: EndedTrajectory) -> int | float | bool | str:
        """A trajectory's value as it is displayed, in the type `display_dtype`."""
        compute = self.get_display_value or self.get_value
        assert compute is not None
        value = compute(row)
        cell: int | float | bool | str = value.value if isinstance(value, Enum) else np.dtype(self.dtype).type(value)
        return cell


def _sampled_versions(row: EndedTrajectory) -> list[PolicyVersion]:
    return [segment.version for segment in row.trajectory.segments if len(segment.tokens)]


COLUMNS = (
    Column(name="trajectory", dtype="int64", meaning="id of the trajectory", get_value=lambda row: row.trajectory.id),
    Column(name="group", dtype="int64", meaning="id of its group: the responses to one prompt",
           get_value=lambda row: row.trajectory.group),
    Column(name="step", dtype="int64", get_value=lambda row: row.step,
           meaning="the training step that consumed it; of others, the step that was next when it ended"),
    Column(name="fate", dtype="int8", members=FATES, get_value=lambda row: row.fate,
           meaning="how it ended: consumed, filtered or aborted"),
    Column(name="reason", dtype="int8", members=REASONS, get_value=lambda row: row.reason,
           meaning="why it was filtered or aborted; none if it was consumed"),
    Column(name="finish", dtype="int8", members=FINISHES, get_value=lambda row: row.trajectory.finish,
           meaning="why sampling ended: stop, length or unfinished"),
    Column(name="v_traj", dtype="int64", get_value=lambda row: row.trajectory.v_traj,
           meaning="oldest policy version that its tokens were allowed to come from"),
    Column(name="v_min", dtype="int64", fill=-1, meaning="oldest policy version of its sampled tokens; -1 without any",
           get_value=lambda row: min(_sampled_versions(row), default=NO_VERSION)),
    Column(name="v_max", dtype="int64", fill=-1, meaning="newest policy version of its sampled tokens; -1 without any",
           get_value=lambda row: max(_sampled_versions(row), default=NO_VERSION)),
    Column(name="staleness", dtype="int64", get_value=lambda row: row.staleness,
           meaning="step - v_traj if it was consumed, else -1"),
    Column(name="reward", dtype="float32", meaning="its reward", get_value=lambda row: row.trajectory.reward),
    Column(name="advantage", dtype="float32", meaning="its advantage; 0 if it was not trained on",
           get_value=lambda row: row.advantage),
    Column(name="loss_mask", dtype="bool", meaning="whether it was scored, so that a loss applies to it",
           get_value=lambda row: row.loss_mask),
    Column(name="dataset_row", dtype="int64", fill=-1, get_value=lambda row: row.trajectory.dataset_row,
           meaning="row of the data set, or index of the generated task, that its prompt came from; -1 if unknown"),
    Column(name="source", dtype="int16", get_value=lambda row: row.trajectory.source,
           meaning="number of its task source, in the order of the job"),
    Column(name="task", dtype="int64", fill=-1, get_value=lambda row: row.trajectory.task,
           meaning="number of its task in that source; -1: the group's id"),
    Column(name="prompt_tokens", dtype="int64", unit="tokens", meaning="length of the prompt",
           get_value=lambda row: len(row.trajectory.prompt_tokens)),
    Column(name="response_tokens", dtype="int64", unit="tokens",
           meaning="length of the response; in tables and `--where` without the given tokens",
           get_value=lambda row: row.trajectory.num_tokens, get_display_value=lambda row: row.trajectory.num_sampled),
    Column(name="turns", dtype="int64", meaning="turns of the model", get_value=lambda row: len(row.trajectory.turns)),
    Column(name="given_tokens", dtype="int64", unit="tokens", get_value=lambda row: row.trajectory.num_given,
           meaning="tokens given by the environment between turns, and of auxiliary turns"),
    Column(name="tool_s", dtype="float64", unit="s", meaning="time its environment took",
           get_value=lambda row: sum(span_seconds(span) for span in row.trajectory.spans)),
    Column(name="arrived_s", dtype="float32", unit="s", meaning="when its prompt was drawn, on the run's clock",
           get_value=lambda row: row.trajectory.timings.arrived_s),
    Column(name="routed_s", dtype="float32", unit="s", meaning="when it was first routed to an instance",
           get_value=lambda row: row.trajectory.timings.routed_s),
    Column(name="sampled_s", dtype="float32", unit="s", meaning="when its last token arrived",
           get_value=lambda row: row.trajectory.timings.sampled_s),
    Column(name="rewarded_s", dtype="float32", unit="s", meaning="when it was scored; 0 if it was not",
           get_value=lambda row: row.trajectory.timings.rewarded_s),
    Column(name="offset", dtype="int64", meaning="index of its first token in the token arrays"),
    Column(name="text_offset", dtype="int64", meaning="index of the first byte of its JSON in `text`"),
    Column(name="text_bytes", dtype="int64", unit="bytes", meaning="length of its JSON"),
)  # fmt: skip
"""All columns, in the order in which tables show them. Those without `get_value` are not shown."""


def select_columns(names: Iterable[str] | None = None) -> list[Column]:
    """The columns with these names, all by default, in the order of COLUMNS."""
    name_set = None if names is None else set(names)
    return [column for column in COLUMNS if name_set is None or column.name in name_set]


def select_displayed_columns(names: Iterable[str] | None = None) -> list[Column]:
    """The columns with these names, all by default, that displayed tables and `--where` have."""
    return [column for column in select_columns(names) if column.get_value is not None]


def empty_rows(count: int, columns: Sequence[Column]) -> Rows:
    """Allocate `count` rows of these columns, not initialized."""
    return np.empty(count, np.dtype([(column.name, column.dtype) for column in columns]))


def span_seconds(span: Span) -> float:
    """Rounded seconds of an environment span, as they are stored; 0 for a sampled span."""
    return round(span.seconds, 6) if isinstance(span, EnvSpan) else 0.0


def has_reward(columns: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.bool_]:
    """[R] whether trajectories have a reward, by their columns. One that failed is none if the trajectory was trained;
    of a dropped one the columns do not tell, and it counts as 0."""
    is_consumed = columns["fate"] == Fate.CONSUMED.value
    is_scored = (columns["rewarded_s"] > 0) | (columns["staleness"] >= 0)
    return np.asarray(is_scored & ~(is_consumed & (columns["loss_mask"] == 0)))
