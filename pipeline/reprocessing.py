"""Scoring stored trajectories again, with Dask in parallel and out of core, onto a branch of their own.

Blocks of rows are read, decoded and scored where the workers are; what comes back is a number a row. So memory is
bounded by a block a worker, whatever the store holds. The branch becomes visible with one commit at the end: killed
before it, nothing is left behind.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline import build
from pipeline import config as configuration
from pipeline.config import RunConfig
from stores import branches
from stores.errors import ConfigError
from stores.trajectory import Fate
from stores.versioned import MAIN, VersionedStore
from tasks.advantage import advantages

BLOCK_ROWS = 512
"""Trajectories a task scores: about a MiB of tokens at 500 a trajectory, tenths of a second of work."""
BLOCKS_A_WORKER = 3
"""Tasks that are under way for each worker: enough that none waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reprocessed:
    """What came of it. scored: rows that had a response. errors: of the reward function, by trajectory."""

    branch: str
    snapshot: str
    rows: int
    scored: int
    errors: dict[int, str]
    mean_before: float
    """Mean reward over the trajectories that were trained on."""
    mean_after: float


def reprocess(
    run_dir: Path, reward: str, branch: str, client: Any, progress: Callable[[int, int], None] = lambda *_: None
) -> Reprocessed:
    """Score every stored response of a run by `reward` (task, math_verify, file.py:name, module:name), on a synchronous
    Dask client. progress: (rows done, rows in all). Raises ConfigError before anything is computed."""
    config = _with_reward(configuration.load(run_dir / "config.toml"), reward)
    path = (run_dir / "store").resolve()
    store = VersionedStore.at(path, VersionedStore.open(path).snapshot)
    branches.refuse(path, branch)
    table = store.table()
    count = len(table["trajectory"])
    rewards, valid = np.zeros(count, np.float32), np.ones(count, bool)
    errors: dict[int, str] = {}
    done = 0
    for first, block in _scored(client, config, path, store.snapshot, count):
        last = first + len(block.rewards)
        rewards[first:last], valid[first:last] = block.rewards, block.valid
        errors |= block.errors
        done += len(block.rewards)
        progress(done, count)
    consumed = table["fate"] == [f.value for f in Fate].index(Fate.CONSUMED.value)
    estimate = _advantages(config, table, consumed, rewards, valid)
    code = Path(reward.rpartition(":")[0])
    lineage = {
        "reward": reward,
        "code": hashlib.sha256(code.read_bytes()).hexdigest() if code.suffix == ".py" else "",
        "advantage": config.training.advantage,
        "answer_pattern": config.task.answer_pattern,
        "branch": MAIN,
    }
    new = branches.Rewards(rewards=rewards, advantages=estimate, loss_mask=valid & consumed, errors=errors)
    snapshot = branches.derive(store, path, branch, new, lineage)
    return Reprocessed(
        branch=branch,
        snapshot=snapshot,
        rows=count,
        scored=int((table["response_tokens"] > 0).sum()),
        errors=errors,
        mean_before=float(table["reward"][consumed].mean()) if consumed.any() else 0.0,
        mean_after=float(rewards[consumed & valid].mean()) if (consumed & valid).any() else 0.0,
    )


def _with_reward(config: RunConfig, reward: str) -> RunConfig:
    """The stored job with another reward. Raises ConfigError if it cannot be loaded."""
    from dataclasses import replace

    from tasks.environments import make_reward, make_source

    if config.emulated:
        raise ConfigError(f"{config.run_dir}: an emulated run has no texts to score")
    file, _, name = reward.rpartition(":")
    if file.endswith(".py"):
        reward = f"{Path(file).resolve()}:{name}"
    config = replace(config, reward=replace(config.reward, function=reward))
    settings = build.scoring_settings(config)
    make_reward(reward, make_source(settings.source, settings.options, settings.seed))
    return config


def _advantages(
    config: RunConfig,
    table: dict[str, npt.NDArray[Any]],
    consumed: npt.NDArray[np.bool_],
    rewards: npt.NDArray[np.float32],
    valid: npt.NDArray[np.bool_],
) -> npt.NDArray[np.float32]:
    """[R] the job's advantage estimate over the groups that were trained on; 0 elsewhere."""
    estimate = np.zeros(len(rewards), np.float32)
    (at,) = np.nonzero(consumed)
    at = at[np.lexsort((table["trajectory"][at], table["group"][at]))]
    size = config.batch.group_size
    grouped = rewards[at].astype(np.float64).reshape(-1, size)
    estimate[at] = advantages(config.training.advantage, grouped, valid[at].reshape(-1, size)).reshape(-1)
    return estimate


# -- on the workers --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Scores of some rows, in their order. errors: by trajectory."""

    rewards: npt.NDArray[np.float32]
    valid: npt.NDArray[np.bool_]
    errors: dict[int, str]


def _scored(client: Any, config: RunConfig, path: Path, snapshot: str, count: int) -> Iterator[tuple[int, Block]]:
    """(first row, its block) for all rows, in any order; never more under way than the workers can use."""
    from distributed import as_completed

    settings = pickle.dumps(build.server_settings(config, path, context=2**31))
    firsts = iter(range(0, count, BLOCK_ROWS))

    def submit(first: int) -> Any:
        last = min(first + BLOCK_ROWS, count)
        return client.submit(score_rows, settings, str(path), snapshot, first, last, pure=False)

    under_way = max(1, len(client.scheduler_info(n_workers=-1)["workers"])) * BLOCKS_A_WORKER
    futures = as_completed([submit(first) for first, _ in zip(firsts, range(under_way), strict=False)])
    for future in futures:
        first, block = future.result()
        future.release()
        for following in firsts:
            futures.add(submit(following))
            break
        yield first, block


def score_rows(settings: bytes, path: str, snapshot: str, first: int, last: int) -> tuple[int, Block]:
    """Score rows first <= row < last of a snapshot. A task; what is slow to make is kept in its process."""
    prompts, scorer = _tools(settings)
    rows = VersionedStore.at(Path(path), snapshot).rows(first, last)
    answered = [i for i, row in enumerate(rows) if row.trajectory.num_tokens]
    texts = prompts.texts([rows[i].trajectory.response_tokens.tolist() for i in answered])
    records = [prompts.task(int(rows[i].trajectory.group)).record for i in answered]
    rewards, valid = np.zeros(len(rows), np.float32), np.ones(len(rows), bool)
    errors: dict[int, str] = {}
    for i, score in zip(answered, scorer.score(list(zip(texts, records, strict=True))), strict=True):
        rewards[i] = score.reward
        if score.error:
            valid[i] = False
            errors[int(rows[i].trajectory.id)] = score.error
    return first, Block(rewards=rewards, valid=valid, errors=errors)


@functools.lru_cache(maxsize=1)
def _tools(settings: bytes) -> tuple[Any, Any]:
    from tasks.scoring import Scorer
    from tasks.server import TokenizedPrompts

    loaded = pickle.loads(settings)
    return TokenizedPrompts(loaded), Scorer(loaded.scoring)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two branches of a store, over what was trained on. flipped: groups in which a member that was better than another
    is worse now; gained, lost: groups whose rewards differ in the second only, in the first only."""

    trajectories: int
    changed: int
    mean: tuple[float, float]
    histogram: tuple[tuple[float, int, int], ...]
    """(lower edge of the reward, trajectories in the first, in the second)."""
    groups: int
    flipped: tuple[int, ...]
    gained: tuple[int, ...]
    lost: tuple[int, ...]


def difference(run_dir: Path, first: str, second: str) -> Difference:
    """What scoring anew changed."""
    path = run_dir / "store"
    one, two = (VersionedStore.open(path, branch=name) for name in (first, second))
    table, other = one.table(), two.table()
    if len(table["trajectory"]) > len(other["trajectory"]):
        table = {name: column[: len(other["trajectory"])] for name, column in table.items()}
    other = {name: column[: len(table["trajectory"])] for name, column in other.items()}
    (at,) = np.nonzero(table["fate"] == [f.value for f in Fate].index(Fate.CONSUMED.value))
    at = at[np.lexsort((table["trajectory"][at], table["group"][at]))]
    a, b = table["reward"][at], other["reward"][at]
    size = one.header.group_size
    grouped_a, grouped_b = a.reshape(-1, size), b.reshape(-1, size)
    ids = table["group"][at].reshape(-1, size)[:, 0]
    signal_a, signal_b = (np.ptp(g, axis=1) > 1e-9 for g in (grouped_a, grouped_b))
    # A pair of members flips if the one that was better is worse now; equal is neither.
    order_a = np.sign(grouped_a[:, :, None] - grouped_a[:, None, :])
    order_b = np.sign(grouped_b[:, :, None] - grouped_b[:, None, :])
    flipped = ((order_a * order_b) < 0).any(axis=(1, 2))
    edges = np.histogram_bin_edges(np.concatenate([a, b]), bins=10)
    counts = [np.histogram(values, bins=edges)[0] for values in (a, b)]
    return Difference(
        trajectories=len(at),
        changed=int((a != b).sum()),
        mean=(float(a.mean()) if len(a) else 0.0, float(b.mean()) if len(b) else 0.0),
        histogram=tuple(
            (float(edge), int(m), int(n)) for edge, m, n in zip(edges[:-1], counts[0], counts[1], strict=True) if m or n
        ),
        groups=len(ids),
        flipped=tuple(ids[flipped].tolist()),
        gained=tuple(ids[~signal_a & signal_b].tolist()),
        lost=tuple(ids[signal_a & ~signal_b].tolist()),
    )
