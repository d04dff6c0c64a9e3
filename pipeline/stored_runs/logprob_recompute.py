"""Computes logprobs of stored responses under other weights, and their distance from the sampling policies.

Workers load the model once and return a few sums per trajectory. They return the logprobs themselves only to be stored
on a branch; these are then collected in a file, not in memory.
"""

from __future__ import annotations

import hashlib
import tempfile
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from staleflow.pipeline.config.knob_tree import with_values
from staleflow.pipeline.config.model_facts import inspect_model
from staleflow.pipeline.config.model_files import check_model_files, find_model_folder, read_vocabulary_size
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.recovery.run_folder import load_job
from staleflow.pipeline.stored_runs.pool import cache_per_process, open_pool, open_store_at, require_all_rows
from staleflow.stores.errors import ConfigError, StoreError
from staleflow.stores.trajectories import derived_branches
from staleflow.stores.trajectories.reader import UnreadableRow
from staleflow.stores.trajectories.selection import Selection
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import EndedTrajectory

MAX_CALL_ROWS = 64
"""Trajectories per task: enough that forward passes outweigh the task's overhead."""
TOKEN_BUDGET = 16_384
"""Padded tokens per forward pass."""
MAX_LOG_RATIO = 300.0
"""Largest log ratio that is exponentiated: the square of the ratio is still finite."""
SUM_NAMES = (
    "tokens", "log_ratio", "abs_log_ratio", "max_abs_log_ratio", "kl", "ratio", "ratio_squared", "clipped",
)  # fmt: skip
SUMS_DTYPE = np.dtype([(name, np.float64) for name in SUM_NAMES])
"""What a worker returns per trajectory: sums over its sampled tokens, except for `max_abs_log_ratio`, a maximum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobSettings:
    """Settings for computing logprobs of responses under a model."""

    model: str
    dtype: str
    device: str
    temperature: float
    clip_range: tuple[float, float]
    """Ratios that the job's loss does not clip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobComparison:
    """Comparison of a model with the policies that sampled the trajectories of one staleness."""

    staleness: int
    """Policy versions between sampling and training; -1: trajectories that were never trained on."""
    trajectories: int
    tokens: int
    """Number of sampled tokens."""
    kl: float
    """KL(rollout || model), nats per token, by the k3 estimate mean(ratio - 1 - log ratio)."""
    ess_tokens: float
    """Effective sample size over tokens, (sum r)^2 / (n sum r^2), a share of 1."""
    ess_sequences: float
    """Effective sample size over whole responses, whose weights are the products of their tokens' ratios."""
    clipped: float
    """Share of tokens outside the job's clip range."""
    ratio: float
    """Mean of pi_model / pi_rollout over tokens."""
    mean_abs_log_ratio: float
    """Mean absolute log ratio, nats."""
    max_abs_log_ratio: float
    """Largest absolute log ratio, nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeResult:
    """The result of computing the logprobs of stored responses under another model."""

    model: str
    """Folder or hub name."""
    rows: int
    """Number of responses that were read."""
    by_staleness: tuple[LogprobComparison, ...]
    """In the order of staleness, -1 first: trajectories that were never trained on."""
    errors: dict[int, str]
    """Of trajectories that cannot be read, by id."""
    branch: str = ""
    """The new branch that has the logprobs; empty if they were not stored."""
    snapshot: str = ""
    """Id of its snapshot of the store."""


def recompute_logprobs(
    run_dir: Path,
    model: str,
    *,
    branch: str = "",
    where: str = "",
    client: Any = None,
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> RecomputeResult:
    """Compute the logprobs of a run's responses under a model.

    Args:
        run_dir: The run's folder.
        model: A folder or hub name.
        branch: Name of a new branch to store the logprobs on, which requires all responses.
        where: Selects responses.
        client: As in `open_pool`.
        workers: As in `open_pool`.
        progress: Called with (0, 0) when the input is checked, then with (rows done, total rows).

    Raises:
        ConfigError: Before anything is computed.
    """
    settings, store, mask = _select_rows(run_dir, model, branch, where)
    path, columns = store.path, store.displayed_columns()
    count = len(mask)
    sums = np.zeros(count, SUMS_DTYPE)
    errors: dict[int, str] = {}
    num_done = 0
    progress(0, 0)
    # An unnamed file, so that none is left behind.
    with open_pool(client, workers, for_models=True) as pool, tempfile.TemporaryFile() as file:
        output = _map_file(file, store.array_lengths()["tokens/logprobs"]) if branch else None
        calls = (
            (settings, str(path), store.snapshot, start, stop, mask[start:stop], output is not None)
            for start, stop in pool.split_rows(count, MAX_CALL_ROWS)
            if mask[start:stop].any()
        )
        for block in pool.run(compute_sums_of_block, calls, for_models=True):
            sums[block.start : block.start + len(block.sums)] = block.sums
            errors |= block.errors
            for offset, logprobs in block.logprobs:
                assert output is not None
                output[offset : offset + len(logprobs)] = logprobs
            num_done += block.num_read
            progress(num_done, int(mask.sum()))
        require_all_rows(num_done, int(mask.sum()))
        snapshot = ""
        if output is not None:
            if errors:
                raise StoreError(
                    f"{path}: branch {branch!r} is not made: {len(errors)} responses have no logprobs to store, the "
                    f"first is trajectory {min(errors)}: {errors[min(errors)]}"
                )
            lineage = {"logprobs": model, "weights": _hash_weights(Path(model)), "temperature": settings.temperature}
            snapshot = derived_branches.derive_logprobs(store, path, branch, output, lineage)
    return RecomputeResult(
        model=model,
        rows=int(mask.sum()) - len(errors),
        by_staleness=tuple(_compare_by_staleness(columns["staleness"], sums)),
        errors=errors,
        branch=branch,
        snapshot=snapshot,
    )


def _select_rows(
    run_dir: Path, model: str, branch: str, where: str
) -> tuple[LogprobSettings, VersionedStore, npt.NDArray[np.bool_]]:
    """Settings, the store as it is now, and which of its rows are chosen. Raises ConfigError."""
    config = load_job(run_dir)
    if branch and where:
        raise ConfigError("a branch stores the logprobs of all trajectories; omit where")
    path = (run_dir / "store").resolve()
    store = VersionedStore.at(path, VersionedStore.open(path).snapshot)
    if branch:
        derived_branches.check_branch_name(path, branch)
    columns = store.displayed_columns()
    mask = Selection(where).mask(columns) & (columns["response_tokens"] > 0)
    if not config.emulated:
        _check_model(model, store)
    return logprob_settings(config, model), store, mask


def _check_model(model: str, store: VersionedStore) -> None:
    """Raise ConfigError if a model's files are missing or incomplete, or if it lacks tokens of the first responses."""
    subject = f"--model = {model!r}"
    folder = find_model_folder(model, "--model")
    if folder is None:
        return
    check_model_files(folder, subject)
    count = read_vocabulary_size(str(folder))
    rows = store.trajectories_in_range(0, min(MAX_CALL_ROWS, store.summary().num_rows))
    largest_token = max((int(row.trajectory.response_tokens.max(initial=0)) for row in rows), default=0)
    if 0 < count <= largest_token:
        raise ConfigError(
            f"{subject}: its vocabulary has {count} tokens, the run's responses use token {largest_token}; name a "
            "checkpoint of the run, or of its base model"
        )


def logprob_settings(config: RunConfig, model: str) -> LogprobSettings:
    """Settings for computing logprobs of a job's responses under a model. Raises ConfigError if it cannot be loaded."""
    if config.emulated:
        raise ConfigError(f"{config.run_dir}: an emulated run has no texts to compute logprobs of")
    inspect_model(with_values(config, {"model.path": model}), "--model")
    return LogprobSettings(
        model=str(Path(model).resolve()) if Path(model).is_dir() else model,
        dtype=config.model.dtype,
        device=config.model.device,
        temperature=config.rollout.temperature,
        clip_range=config.training.loss.clip_range,
    )


def _compare_by_staleness(staleness: npt.NDArray[Any], sums: npt.NDArray[Any]) -> Iterable[LogprobComparison]:
    for lag in np.unique(staleness):
        lag_sums = sums[(staleness == lag) & (sums["tokens"] > 0)]
        if not len(lag_sums):
            continue
        total = {name: float(lag_sums[name].sum()) for name in SUM_NAMES}
        tokens = total["tokens"]
        # Weights of whole responses span hundreds of orders of magnitude: normalize before exponentiating.
        weights = np.exp(lag_sums["log_ratio"] - lag_sums["log_ratio"].max())
        yield LogprobComparison(
            staleness=int(lag),
            trajectories=len(lag_sums),
            tokens=int(tokens),
            kl=total["kl"] / tokens,
            ess_tokens=total["ratio"] ** 2 / (tokens * total["ratio_squared"]),
            ess_sequences=float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())),
            clipped=total["clipped"] / tokens,
            ratio=total["ratio"] / tokens,
            mean_abs_log_ratio=total["abs_log_ratio"] / tokens,
            max_abs_log_ratio=float(lag_sums["max_abs_log_ratio"].max()),
        )


def _map_file(file: Any, count: int) -> npt.NDArray[np.float32]:
    """[count] zeros, memory-mapped in a file."""
    file.truncate(max(1, count) * 4)
    return np.memmap(file, np.float32, mode="r+", shape=(max(1, count),))[:count]


def _hash_weights(folder: Path) -> str:
    """Hash of the weight files in name order; empty for a model of the hub."""
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(1 << 22):
                digest.update(chunk)
    return digest.hexdigest() if files else ""


# -- on the workers --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobBlock:
    """Results of a block of rows. num_read: number of selected rows. sums: [N] SUMS_DTYPE. logprobs: (offset in the
    store's token arrays, [T]) of each response, if they are to be stored."""

    start: int
    num_read: int
    sums: npt.NDArray[Any]
    errors: dict[int, str]
    logprobs: list[tuple[int, npt.NDArray[np.float32]]]


def compute_sums_of_block(
    settings: LogprobSettings,
    path: str,
    snapshot: str,
    start: int,
    stop: int,
    mask: npt.NDArray[np.bool_],
    keep_logprobs: bool,
) -> LogprobBlock:
    """Dask task: compute sums for the selected ones of rows start <= row < stop of a snapshot."""
    rows = list(open_store_at(path, snapshot).trajectories_at(range(start, stop)))
    selected = [(i, row) for i, row in enumerate(rows) if mask[i]]
    errors = {int(row.trajectory): row.error for _, row in selected if isinstance(row, UnreadableRow)}
    readable = [(i, row) for i, row in selected if isinstance(row, EndedTrajectory)]
    results = response_logprobs(settings, [row for _, row in readable])
    sums = np.zeros(len(rows), SUMS_DTYPE)
    logprobs: list[tuple[int, npt.NDArray[np.float32]]] = []
    table = open_store_at(path, snapshot).response_starts(start, stop) if keep_logprobs else None
    for (i, row), logprobs_of_row in zip(readable, results, strict=True):
        sampled = row.trajectory.sampled
        if num_not_finite := int(
            np.count_nonzero(~np.isfinite(row.trajectory.logprobs[sampled] + logprobs_of_row[sampled]))
        ):
            errors[row.trajectory.id] = (
                f"{num_not_finite} of its tokens have a stored or computed logprob that is not finite"
            )
            continue
        sums[i] = _compute_sums(row.trajectory.logprobs[sampled], logprobs_of_row[sampled], settings)
        if table is not None:
            logprobs.append((int(table[i]), logprobs_of_row))
    return LogprobBlock(start=start, num_read=int(mask.sum()), sums=sums, errors=errors, logprobs=logprobs)


def response_logprobs(settings: LogprobSettings, rows: list[EndedTrajectory]) -> list[npt.NDArray[np.float32]]:
    """[T] logprobs of each response under the model, nats; 0 at tokens of environments. One thread at a time."""
    from staleflow.tasks.training.branch_sequences import BranchSequences
    from staleflow.tasks.training.microbatches import Row

    training_rows = [Row.of(row) for row in rows]
    sequences = BranchSequences.of(training_rows)
    with _model_lock:
        values = _logprob_model(settings).row_logprobs(sequences.rows, range(len(sequences.rows)))
    by_row = sequences.merge_by_row(training_rows, values)
    return [np.where(row.sampled, by_row[i], np.float32(0)) for i, row in enumerate(training_rows)]


def _compute_sums(
    rollout_logprobs: npt.NDArray[np.float32], model_logprobs: npt.NDArray[np.float32], settings: LogprobSettings
) -> tuple[float, ...]:
    """The values of SUMS_DTYPE."""
    log_ratio = np.clip(model_logprobs.astype(np.float64) - rollout_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = np.exp(log_ratio)
    low, high = settings.clip_range
    is_clipped = (ratio < low) | (ratio > high)
    abs_log_ratio = np.abs(log_ratio)
    values = {
        "tokens": len(ratio),
        "log_ratio": log_ratio.sum(),
        "abs_log_ratio": abs_log_ratio.sum(),
        "max_abs_log_ratio": abs_log_ratio.max(initial=0.0),
        "kl": (ratio - 1 - log_ratio).sum(),
        "ratio": ratio.sum(),
        "ratio_squared": (ratio**2).sum(),
        "clipped": is_clipped.sum(),
    }
    return tuple(float(values[name]) for name in SUM_NAMES)


_model_lock = threading.Lock()
"""Held while a model is loaded and used: threads share one model, and the memory of one forward pass."""


@cache_per_process(1)
def _logprob_model(settings: LogprobSettings) -> Any:
    from staleflow.tasks.engines.transformers import load_model, resolve_device
    from staleflow.tasks.training.logprobs import LogprobModel

    device = resolve_device(settings.device)
    return LogprobModel(
        model=load_model(settings.model, "float32", device, attention="sdpa"),
        device=device,
        uses_bfloat16=settings.dtype == "bfloat16",
        temperature=settings.temperature,
        token_budget=TOKEN_BUDGET,
    )
