"""Data sets of rows: JSON lines, parquet files, and data sets of the `datasets` package."""

from __future__ import annotations

import collections
import copy
import difflib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from staleflow.stores.errors import ConfigError, raised_as
from staleflow.tasks.rendering.task_source import (
    Prompt,
    Record,
    Task,
    TaskSource,
    held_out_prompts,
    prompt_of,
    require_text,
)
from staleflow.tasks.settings.dataset_columns import Columns, DataUse
from staleflow.tasks.settings.reward_functions import NO_ANSWER

HELD_OUT_SHARE = 0.1
"""Maximum share of a data set's rows, at its end, that is held out for evaluation (but at least one row)."""
DEFAULT_SPLIT = "train"
"""The split that is used unless the options name another, or there is only one."""
SAVED_FOLDER_FILES = ("dataset_info.json", "dataset_dict.json")
"""Files of a folder that save_to_disk wrote: one of them is there."""


class Rows(Protocol):
    """Numbered rows of a data set."""

    @property
    def names(self) -> Collection[str]:
        """Names of all columns."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Record: ...

    def column(self, name: str) -> Iterator[Any]:
        """The values of a column, row by row; None for a row without one."""
        ...

    def location(self, index: int) -> str:
        """Describe the position of a row, for messages."""
        ...


class JsonLines:
    """The rows of a JSON lines file, all in memory."""

    def __init__(self, name: str, options: Mapping[str, Any], label: str) -> None:
        """name: path of the file. label: its key and name in the job file, for messages. Raises ConfigError, which
        names the line."""
        _refuse_options(options, label)
        path = Path(os.path.expanduser(name))
        try:
            # Not splitlines(), which also splits at characters that JSON allows within a text, such as U+2028.
            lines = path.read_text("utf-8-sig").split("\n")
        except OSError as error:
            raise ConfigError(f"{label}: cannot be read: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{label}: cannot be read: {error}") from error
        self._path = path
        self._rows: list[dict[str, Any]] = []
        self._line_numbers: list[int] = []
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            problem = f"{path}, line {number}: not JSON"
            with raised_as(ConfigError, problem, ValueError, RecursionError, describe=_without_line):
                row = json.loads(line)
            if not isinstance(row, dict):
                raise ConfigError(f'{path}, line {number}: must be an object, such as {{"prompt": ..., "answer": ...}}')
            self._rows.append(row)
            self._line_numbers.append(number)
        self.names = tuple(dict.fromkeys(name for row in self._rows for name in row))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Record:
        return self._rows[index]

    def column(self, name: str) -> Iterator[Any]:
        return (row.get(name) for row in self._rows)

    def location(self, index: int) -> str:
        return f"{self._path}, line {self._line_numbers[index]}"


class ParquetRows:
    """The rows of a parquet file, or of all parquet files in a folder."""

    def __init__(self, name: str, options: Mapping[str, Any], label: str) -> None:
        """name: path of the file or folder. label: its key and name in the job file, for messages. Raises
        ConfigError."""
        from pyarrow import ArrowException, parquet

        _refuse_options(options, label)
        path = Path(os.path.expanduser(name))
        with raised_as(ConfigError, f"{label}: cannot be read", OSError, ArrowException, describe=_first_line):
            self._table = parquet.read_table(path, memory_map=True)
        self._path = path
        self.names = tuple(self._table.column_names)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Record:
        row: Record = self._table.slice(index, 1).to_pylist()[0]
        return row

    def column(self, name: str) -> Iterator[Any]:
        return (value.as_py() for value in self._table.column(name))

    def location(self, index: int) -> str:
        return f"{self._path}, row {index}"


class DatasetsPackageRows:
    """The rows of a data set of the `datasets` package: a folder written by save_to_disk, or a name that load_dataset
    accepts."""

    def __init__(self, name: str, options: Mapping[str, Any], label: str) -> None:
        """options: `split`, by default train or the only one, and arguments of load_dataset. label: its key and name in
        the job file, for messages. Raises ConfigError."""
        import datasets

        arguments = dict(options)
        split = arguments.pop("split", None)
        path = os.path.expanduser(name)  # keeps the ./ that distinguishes a folder from a name on the hub
        folder = Path(path)
        if name.startswith((".", "/", "~")) and not folder.exists():
            raise ConfigError(f"{label}: no such folder")
        is_saved = any((folder / file).is_file() for file in SAVED_FOLDER_FILES)
        if is_saved and arguments:
            raise ConfigError(f"{label}: a saved folder has no option {', '.join(arguments)}, only split")
        datasets.disable_progress_bars()  # they would be drawn across the live view
        try:
            dataset = datasets.load_from_disk(str(folder)) if is_saved else datasets.load_dataset(path, **arguments)
            if isinstance(dataset, Mapping):
                split_name = split or (next(iter(dataset)) if len(dataset) == 1 else DEFAULT_SPLIT)
                if split_name not in dataset:
                    raise ConfigError(
                        f"{label}: no split {split_name!r}; set the option split to {' or '.join(dataset)}"
                    )
                dataset = dataset[split_name]
            elif split:
                raise ConfigError(f"{label}: the folder holds a single data set; remove the option split")
        except ConfigError:
            raise
        except Exception as error:  # the package raises many kinds, those of the hub and of arrow too
            raise ConfigError(f"{label}: cannot be loaded: {type(error).__name__}: {_first_line(error)}") from error
        if not hasattr(dataset, "__len__"):
            raise ConfigError(f"{label}: prompts are numbered, and a streamed data set is not; remove option streaming")
        self._name = name
        self._dataset = dataset
        self.names = tuple(dataset.column_names)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Record:
        row: Record = self._dataset[index]
        return row

    def column(self, name: str) -> Iterator[Any]:
        return iter(self._dataset[name])

    def location(self, index: int) -> str:
        return f"{self._name}, row {index}"


class RowSource:
    """A task source whose prompts are rows, in order; after the last row it starts again.

    A record is its row, with the prompt also under `prompt` and the answer under `answer`.
    """

    def __init__(self, rows: Rows, columns: Columns, label: str, use: DataUse = DataUse.BOTH) -> None:
        """label: the data set's key and name in the job file, for messages. A single row is trained on and held out.
        Raises ConfigError for no rows, or a row without a prompt or an answer."""
        count = len(rows)
        self._rows, self._columns, self._label = rows, columns, label
        num_held_out = {
            DataUse.BOTH: max(1, int(count * HELD_OUT_SHARE)),
            DataUse.TRAINING: 0,
            DataUse.EVALUATION: count,
        }[use]
        self._held_out_rows = range(count - num_held_out, count)
        self._training_rows: Sequence[int] = range(count - num_held_out) or range(count)
        self.num_held_out = num_held_out
        self.held_out_notice = ""
        if count:  # all rows are checked before anything is computed
            collections.deque(self._prompts(), maxlen=0)
            collections.deque(self._column(columns.answer, "answer") if columns.answer else (), maxlen=0)
        else:
            raise ConfigError(f"{label}: 0 rows; add some")

    def task(self, index: int, *, held_out: bool = False) -> Task:
        rows = self._held_out_rows if held_out else self._training_rows
        number = rows[index % len(rows)]
        row = self._rows[number]
        prompt = _value_at(row, self._columns.prompt)
        fields = {"prompt": prompt}
        if self._columns.answer:
            fields["answer"] = _value_at(row, self._columns.answer)
        return Task(prompt=require_text(prompt_of(prompt)), record={**row, **fields}, row=number)

    def excluding_held_out(self, num_held_out: int, evaluation: TaskSource | None = None) -> RowSource:
        prompts = held_out_prompts(evaluation or self, num_held_out)
        repeating = {row for row, prompt in enumerate(self._prompts()) if prompt in prompts}
        rows = repeating.intersection(self._training_rows)
        if not rows:
            return self
        if len(rows) == len(self._training_rows):
            if evaluation is None and not num_held_out:
                return self  # no row is evaluated
            theirs, remedy = "task.eval_source", ""
            if evaluation is None:
                theirs = f"a held-out row (the last {self.num_held_out} of {len(self._rows)})"
                remedy = ", or set task.eval_prompts = 0"
            raise ConfigError(
                f"{self._label}: each training row has the prompt of {theirs}; add rows with other prompts{remedy}"
            )
        other = copy.copy(self)
        other._training_rows = [row for row in self._training_rows if row not in rows]
        notice_start = f"{len(rows)} of {len(self._rows)} rows of {self._label} are "
        other.held_out_notice = (
            f"{notice_start}neither trained on nor evaluated: they repeat prompts of the {self.num_held_out} held-out "
            "rows"
            if evaluation is None
            else f"{notice_start}not trained on: they repeat prompts of task.eval_source"
        )
        return other

    def score(self, answer: str, record: Record) -> float:
        """1 if the texts are equal up to white space, else 0."""
        if not self._columns.answer:
            raise ConfigError(NO_ANSWER)
        return float(" ".join(answer.split()) == " ".join(str(record["answer"]).split()))

    def check_text_answers(self) -> None:
        """Raise ConfigError for a row whose answer is no text, or white space only."""
        name = self._columns.answer
        for index, value in enumerate(self._column(name, "answer") if name else ()):
            if not isinstance(value, str) or not value.strip():
                raise ConfigError(f"{self._rows.location(index)}: {name} has no text to learn; add one to this row")

    def _prompts(self) -> Iterator[Prompt]:
        """The prompts of all rows. Raises ConfigError."""
        name = self._columns.prompt
        for index, value in enumerate(self._column(name, "prompt")):
            try:
                yield require_text(prompt_of(value))
            except ValueError as error:
                raise ConfigError(f"{self._rows.location(index)}: {name} {error}") from error

    def _column(self, name: str, key: str) -> Iterator[Any]:
        """Values of a column, or of a field in one. key: of task.columns. Raises ConfigError where there is none."""
        head = name if name in self._rows.names else name.partition(".")[0]
        values = self._rows.column(head) if head in self._rows.names else [None]
        for index, value in enumerate(values):
            if (field := _value_at({head: value}, name)) is None:
                if name in self._rows.names:
                    raise ConfigError(
                        f"{self._rows.location(index)}: no {name!r}, which other rows have; add it to this one"
                    )
                raise ConfigError(
                    f"{self._rows.location(index)}: no {name!r}; set task.columns.{key}, to one of "
                    f"{format_columns(name, self._rows.names)}"
                )
            yield field


def _refuse_options(options: Mapping[str, Any], label: str) -> None:
    if options:
        raise ConfigError(f"{label}: a file has no options; remove {', '.join(options)}")


def _value_at(record: Record, name: str) -> Any:
    """A record's value by its column's name, or by `column.field`; None if it has none."""
    if name in record:
        return record[name]
    head, _, rest = name.partition(".")
    return _value_at(record[head], rest) if rest and isinstance(record.get(head), Mapping) else None


def format_columns(name: str, names: Collection[str]) -> str:
    """The end of an error message about an unknown column: the existing columns, and a similar name if there is one."""
    near = difflib.get_close_matches(name, names, n=1)
    return ", ".join(names) + (f"; did you mean {near[0]}?" if near else "")


def _without_line(error: BaseException) -> str:
    """The message of an error in a JSON text of one line, without the number of the line."""
    return str(error).replace("line 1 ", "")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
