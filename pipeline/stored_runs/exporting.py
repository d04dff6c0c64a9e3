"""Export of stored trajectories to Parquet, JSON lines or a Hugging Face dataset.

Each task writes one file of at most PART_ROWS trajectories; the output appears under its name when it is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from staleflow.pipeline.recovery.run_folder import LOCK_FILE, load_job, lock_folder
from staleflow.pipeline.stored_runs.pool import Pool, cache_per_process, open_pool, open_store_at, require_all_rows
from staleflow.pipeline.stored_runs.response_texts import decode_trajectory, make_detokenizer
from staleflow.pipeline.stored_runs.stored_trajectories import read_windows, select_positions
from staleflow.stores.errors import ConfigError, StaleflowError, StoreError
from staleflow.stores.files import flush_and_rename, require_writable_folder
from staleflow.stores.trajectories import dataframes
from staleflow.stores.trajectories.dataframes import RowTexts
from staleflow.stores.trajectories.reader import UnreadableRow
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import EndedTrajectory

ExportFormat = Literal["parquet", "jsonl", "hf"]
FORMATS: tuple[ExportFormat, ...] = get_args(ExportFormat)
PART_ROWS = 8192
"""Trajectories per file: some 50 MiB at 500 tokens each."""
TEXT_COLUMNS = {
    "parquet": {"prompt": "prompt", "response": "response", "messages": "messages"},
    "hf": {"prompt": "prompt", "response": "completion", "messages": "conversation"},
}
"""Names of the text columns by format. Those for `datasets` are the names that trainers expect; a column `messages`
would replace prompt and completion there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """The result of an export."""

    path: str
    rows: int
    """Trajectories that were written."""
    files: int
    bytes: int
    errors: dict[int, str]
    """Errors of trajectories that cannot be read, by id; they are left out."""


def export(
    run_dir: Path,
    file_format: str,
    out: Path,
    *,
    branch: str = "main",
    where: str = "",
    client: Any = None,
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> ExportResult:
    """Export a run's trajectories to `out`, which is a file for jsonl and a folder for other formats.

    It appears only when complete. Raises ConfigError before anything is written. client, workers: as in `open_pool`.
    """
    store, rows = _select_rows(run_dir, file_format, out, branch, where)
    config = load_job(run_dir)
    make_detokenizer(config)
    progress(0, 0)
    tmp_path = out.with_name(f".{out.name}.part")
    with open_pool(client, workers) as pool:
        try:
            tmp_path.mkdir(parents=True, exist_ok=True)
            with lock_folder(tmp_path), contextlib.ExitStack() as cleanup:
                cleanup.callback(shutil.rmtree, tmp_path, ignore_errors=True)
                _refuse_existing(out)  # another export may have finished meanwhile
                _clear_folder(tmp_path)  # files of a killed export
                data_folder = tmp_path / "data" if file_format == "hf" else tmp_path
                data_folder.mkdir(exist_ok=True)
                num_written, files, errors = _write_parts(
                    run_dir, store, rows, file_format, data_folder, pool, progress
                )
                if file_format == "hf":
                    (tmp_path / "README.md").write_text(_make_card(config.name, num_written, store), "utf-8")
                size = sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
                if file_format == "jsonl":
                    _join_files(files, tmp_path / "whole")
                    flush_and_rename(tmp_path / "whole", out)
                else:
                    flush_and_rename(tmp_path, out)
                    # After the rename: without its lock file a folder can be locked by others.
                    (out / LOCK_FILE).unlink()
        except OSError as error:
            if isinstance(error, StaleflowError):
                raise
            raise StoreError(f"{out}: cannot be written: {error}; choose another place with --out") from error
    count = 1 if file_format == "jsonl" else len(files)
    return ExportResult(path=str(out), rows=num_written, files=count, bytes=size, errors=errors)


def _select_rows(
    run_dir: Path, file_format: str, out: Path, branch: str, where: str
) -> tuple[VersionedStore, npt.NDArray[np.int64]]:
    """The store to export and the positions of its chosen rows. Raises ConfigError."""
    if file_format not in FORMATS:
        raise ConfigError(f"to = {file_format!r}: unknown format; choose one of {', '.join(FORMATS)}")
    _refuse_existing(out)
    if file_format != "jsonl":
        dataframes.import_offline_module("pyarrow.parquet")
    store = VersionedStore.open(run_dir / "store", branch=branch)
    rows = select_positions(store, where)
    if not len(rows):
        problem = f"no trajectory matches where = {where!r}" if where else "no trajectory is stored yet"
        raise ConfigError(f"{run_dir}: {problem}")
    require_writable_folder(out.parent)
    return store, rows


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise ConfigError(f"{out} already exists; choose another place, or remove it")


def _write_parts(
    run_dir: Path,
    store: VersionedStore,
    rows: npt.NDArray[np.int64],
    file_format: str,
    folder: Path,
    pool: Pool,
    progress: Callable[[int, int], None],
) -> tuple[int, list[Path], dict[int, str]]:
    """(number of trajectories written, files in row order, errors of rows left out)."""
    row_ranges = [rows[i : i + PART_ROWS] for i in range(0, len(rows), PART_ROWS)]
    files = [folder.resolve() / _file_name(file_format, number, len(row_ranges)) for number in range(len(row_ranges))]
    store_reference = (str(run_dir.resolve()), str(store.path), store.snapshot)
    num_written, errors = 0, dict[int, str]()
    calls = ((file_format, *store_reference, rows, str(file)) for file, rows in zip(files, row_ranges, strict=True))
    for count, part_errors in pool.run(write_part, calls):
        num_written += count
        errors |= part_errors
        progress(num_written + len(errors), len(rows))
    require_all_rows(num_written + len(errors), len(rows))
    return num_written, files, errors


def _clear_folder(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK_FILE:
            path.unlink()


def _file_name(file_format: str, number: int, count: int) -> str:
    if file_format == "hf":
        return f"train-{number:05d}-of-{count:05d}.parquet"
    return f"part-{number:05d}.{file_format}"


def _join_files(parts: list[Path], target: Path) -> None:
    with target.open("wb") as file:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, file)
            part.unlink()


def _make_card(name: str, rows: int, store: VersionedStore) -> str:
    """A dataset card for the hub, by which `load_dataset(FOLDER)` finds the files."""
    lineage = "".join(f"- {key}: `{value}`\n" for key, value in store.lineage.items() if value)
    return (
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: data/train-*.parquet\n"
        "tags:\n- reinforcement-learning\n- staleflow\n---\n\n"
        f"# Trajectories of the run {name}\n\n"
        f"{rows} responses with their tokens, behaviour logprobs and the policy version of each token. Of many turns, "
        "`conversation` has each with its role; `sampled` marks the model's own tokens. `staleness` is "
        f"the training step's version minus the trajectory's oldest ({store.header.bound_text}), -1 if it was not "
        f"trained on; `fate` and `reason` tell how it ended.\n\nSnapshot `{store.snapshot}`.\n{lineage}"
    )


# -- on the workers --------------------------------------------------------------------------------------------------


def write_part(
    file_format: str, run_dir: str, path: str, snapshot: str, rows: npt.NDArray[np.int64], file: str
) -> tuple[int, dict[int, str]]:
    """Dask task: write rows of a snapshot to `file`. Repeating it writes the same file.

    Returns:
        How many rows were written, and the errors of those left out.
    """
    store = open_store_at(path, snapshot)
    detokenizer = _cached_detokenizer(run_dir)
    errors: dict[int, str] = {}

    def read() -> Iterator[tuple[list[EndedTrajectory], list[RowTexts]]]:
        for window in read_windows(store, rows):
            errors.update({int(row.trajectory): row.error for row in window if isinstance(row, UnreadableRow)})
            readable = [row for row in window if isinstance(row, EndedTrajectory)]
            yield readable, [decode_trajectory(row.trajectory, detokenizer) for row in readable]

    return (_write_lines if file_format == "jsonl" else _write_parquet)(file_format, Path(file), read()), errors


def _write_lines(file_format: str, file: Path, blocks: Iterator[tuple[list[EndedTrajectory], list[RowTexts]]]) -> int:
    num_written = 0
    with file.open("w", encoding="utf-8") as out:
        for rows, texts in blocks:
            for row, text in zip(rows, texts, strict=True):
                record = dataframes.plain_row(row)
                line = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in record.items()}
                line |= {**dataclasses.asdict(text), "reward_parts": row.trajectory.reward_parts}
                out.write(json.dumps(line, separators=(",", ":")) + "\n")
            num_written += len(rows)
    return num_written


def _write_parquet(file_format: str, file: Path, blocks: Iterator[tuple[list[EndedTrajectory], list[RowTexts]]]) -> int:
    parquet = dataframes.import_offline_module("pyarrow.parquet")
    num_written = 0
    with parquet.ParquetWriter(file, dataframes.arrow_schema(TEXT_COLUMNS[file_format]), compression="zstd") as out:
        for rows, texts in blocks:
            out.write_table(dataframes.arrow_table(rows, TEXT_COLUMNS[file_format], texts))
            num_written += len(rows)
    return num_written


@cache_per_process(2)
def _cached_detokenizer(run_dir: str) -> Any:
    return make_detokenizer(load_job(Path(run_dir)))
