"""Scores stored trajectories again, stores the rewards on a new branch, and compares the rewards of branches.

Workers read, decode and score blocks of rows, and return one number per row. The branch becomes visible atomically at
the end: if the process is killed before that, nothing is left behind.
"""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import pickle
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from staleflow.pipeline.config import actor_settings, user_files
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.recovery.run_folder import load_job
from staleflow.pipeline.stored_runs.pool import Pool, cache_per_process, open_store_at, require_all_rows
from staleflow.pipeline.stored_runs.response_texts import make_detokenizer, make_messages
from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectories import derived_branches
from staleflow.stores.trajectories.reader import UnreadableRow
from staleflow.stores.trajectories.repository import MAIN
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import Fate, IntArray, Trajectory

if TYPE_CHECKING:
    from staleflow.tasks.sources.prompts import Prompts, PromptSettings
    from staleflow.tasks.sources.reward_process import Scorer, ScoringSettings
    from staleflow.tasks.sources.task_sources import SourceSettings

CHANGEABLE_KEYS = ("reward.", "task.answer_pattern=")
"""Prefixes of the keys that may be changed for scoring again."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RescoreResult:
    """The result of scoring a run's responses again."""

    branch: str
    """The new branch."""
    snapshot: str
    """Id of its snapshot of the store."""
    rows: int
    """Stored trajectories."""
    scored: int
    """Those with a response."""
    errors: dict[int, str]
    """Of the reward function, or of what cannot be read, by trajectory; those get no gradient."""
    mean_before: float
    """Mean reward over the trajectories that were trained on, without those whose reward failed."""
    mean_after: float

    def __repr__(self) -> str:
        failures = f", {len(self.errors)} failed, first: {next(iter(self.errors.values()))}" if self.errors else ""
        means = f"mean reward {self.mean_before:.3f} -> {self.mean_after:.3f}"
        return f"<RescoreResult branch {self.branch}: {means}, {self.scored} of {self.rows} scored{failures}>"


def rescore(
    run_dir: Path,
    reward: str,
    branch: str,
    pool: Pool,
    progress: Callable[[int, int], None] = lambda *_: None,
    changes: tuple[str, ...] = (),
) -> RescoreResult:
    """Score every stored response of a run again.

    Args:
        run_dir: The run's folder.
        reward: task, math_verify, file.py:name or module:name; empty: the job's own.
        branch: Name of the new branch.
        pool: Workers.
        progress: Called with (rows done, total rows).
        changes: Of keys in CHANGEABLE_KEYS, as KEY=VALUE.

    Raises:
        ConfigError: Before anything is computed; or, with nothing stored, if no response could be scored.
    """
    config = _replace_reward(_apply_changes(run_dir, changes), reward)
    path = (run_dir / "store").resolve()
    store = VersionedStore.at(path, VersionedStore.open(path).snapshot)
    derived_branches.check_branch_name(path, branch)
    table = store.table()
    count = len(table["trajectory"])
    rewards, valid = np.zeros(count, np.float32), np.ones(count, bool)
    errors: dict[int, str] = {}
    num_done = 0
    config, code = user_files.collect_code(config, user_files.scoring_keys(config))
    # From the store's header, since the job might draw other prompts for its groups now.
    prompts = actor_settings.prompt_settings(
        config, held_out=store.header.held_out, longest_prompt=store.header.longest_prompt
    )
    settings = pickle.dumps((prompts, actor_settings.scoring_settings(config), code))
    calls = ((settings, str(path), store.snapshot, start, stop) for start, stop in pool.blocks(count))
    for start, block in pool.run(score_rows, calls):
        stop = start + len(block.rewards)
        rewards[start:stop], valid[start:stop] = block.rewards, block.valid
        errors |= block.errors
        num_done += len(block.rewards)
        progress(num_done, count)
    require_all_rows(num_done, count)
    num_scored = int((table["response_tokens"] > 0).sum())
    if errors and len(errors) >= num_scored:
        raise ConfigError(
            f"{config.reward.setting}: it failed on all {num_scored} responses, so nothing is stored; on trajectory "
            f"{min(errors)}: {errors[min(errors)]}"
        )
    is_consumed = table["fate"] == [f.value for f in Fate].index(Fate.CONSUMED.value)
    estimate = estimate_advantages(config, table, is_consumed, rewards, valid)
    trained_before = is_consumed & (table["loss_mask"] > 0)
    lineage = {
        "reward": "; ".join(filter(None, (reward, *changes))) or config.reward.setting,
        "code": hashlib.sha256("".join(code.values()).encode()).hexdigest() if code else "",
        "advantage": config.training.advantage.name,
        "answer_pattern": config.task.answer_pattern,
        "branch": MAIN,
    }
    new_rewards = derived_branches.BranchRewards(
        rewards=rewards, advantages=estimate, loss_mask=valid & is_consumed, errors=errors
    )
    snapshot = derived_branches.derive(store, path, branch, new_rewards, lineage)
    return RescoreResult(
        branch=branch,
        snapshot=snapshot,
        rows=count,
        scored=num_scored,
        errors=errors,
        mean_before=float(table["reward"][trained_before].mean()) if trained_before.any() else 0.0,
        mean_after=float(rewards[is_consumed & valid].mean()) if (is_consumed & valid).any() else 0.0,
    )


def check_request(run_dir: Path, reward: str, branch: str, changes: tuple[str, ...] = ()) -> None:
    """Raise ConfigError for arguments that `rescore` does not accept, before any worker starts."""
    VersionedStore.open(run_dir / "store")  # refuses a store of another layout
    derived_branches.check_branch_name((run_dir / "store").resolve(), branch)
    _replace_reward(_apply_changes(run_dir, changes), reward)


def _apply_changes(run_dir: Path, changes: tuple[str, ...]) -> RunConfig:
    """The stored job with changes to how it rewards. Raises ConfigError."""
    for change in changes:
        if not change.startswith(CHANGEABLE_KEYS):
            raise ConfigError(
                f"override {change}: only how responses are scored can change: {', '.join(CHANGEABLE_KEYS)}"
            )
    return user_files.with_absolute_paths(load_job(run_dir, changes)) if changes else load_job(run_dir)


def _replace_reward(config: RunConfig, reward: str) -> RunConfig:
    """The stored job with another reward, or with its own if that is empty. Raises ConfigError if it cannot be
    loaded."""
    from staleflow.tasks.sources.task_sources import make_reward

    if config.emulated:
        raise ConfigError(f"{config.run_dir}: an emulated run has no texts to score")
    if config.has_environment and (reward or config.reward.function) == "task" and not config.reward.parts:
        raise ConfigError(
            f"the reward of the task: the environment {config.task.source} rewards its episodes while they are "
            "played, and stored ones cannot be played again; name a function of your own, FILE.py:NAME, which gets the "
            'text of the last turn, and all turns as record["turns"]'
        )
    if reward:
        file, _, name = reward.rpartition(":")
        if file.endswith(".py"):
            reward = f"{Path(file).resolve()}:{name}"
        config = dataclasses.replace(config, reward=dataclasses.replace(config.reward, function=reward, parts={}))
    if reward:
        sources = {name: dataclasses.replace(task, reward=reward) for name, task in config.task.sources.items()}
        config = dataclasses.replace(config, task=dataclasses.replace(config.task, sources=sources))
    for job in config.jobs_by_source.values():
        make_reward(job.reward.function, actor_settings.source_settings(job).build(), job.reward.parts)
    make_detokenizer(config)
    return config


def estimate_advantages(
    config: RunConfig,
    table: dict[str, npt.NDArray[Any]],
    is_consumed: npt.NDArray[np.bool_],
    rewards: npt.NDArray[np.float32],
    valid: npt.NDArray[np.bool_],
) -> npt.NDArray[np.float32]:
    """[R] the job's advantage estimate over the rows of whole groups that `is_consumed` marks; 0 elsewhere."""
    estimate = np.zeros(len(rewards), np.float32)
    (positions,) = np.nonzero(is_consumed)
    positions = positions[np.lexsort((table["trajectory"][positions], table["group"][positions]))]
    size = config.batch.group_size
    penalties = actor_settings.overlong_penalty(config).penalties(table["response_tokens"][positions])
    shaped_rewards = rewards[positions].astype(np.float64) - penalties
    groups = shaped_rewards.reshape(-1, size)
    estimate[positions] = config.training.advantage.advantages(groups, valid[positions].reshape(-1, size)).reshape(-1)
    return estimate


# -- on the workers --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredBlock:
    """Scores of a block of rows, in order. errors: by trajectory id."""

    rewards: npt.NDArray[np.float32]
    valid: npt.NDArray[np.bool_]
    errors: dict[int, str]


def score_rows(settings: bytes, path: str, snapshot: str, start: int, stop: int) -> tuple[int, ScoredBlock]:
    """Dask task: score rows start <= row < stop of a snapshot. An unreadable row is an error. Objects that are slow to
    create are cached in the process."""
    prompts, scoring = _prompts(settings)
    rows = list(open_store_at(path, snapshot).readable(start, stop))
    rewards, valid = np.zeros(len(rows), np.float32), np.ones(len(rows), bool)
    errors = {int(row.trajectory): row.error for row in rows if isinstance(row, UnreadableRow)}
    responses: list[tuple[int, Trajectory]] = []
    for i, row in enumerate(rows):
        if isinstance(row, UnreadableRow):
            valid[i] = False
        elif row.trajectory.num_sampled:
            responses.append((i, row.trajectory))
    scores = _scorer(scoring).score([make_reward_item(prompts, t) for _, t in responses])
    for (i, trajectory), score in zip(responses, scores, strict=True):
        rewards[i] = score.reward
        if score.error:
            valid[i] = False
            errors[int(trajectory.id)] = score.error
    return start, ScoredBlock(rewards=rewards, valid=valid, errors=errors)


def make_reward_item(prompts: Prompts, trajectory: Trajectory) -> tuple[str, Mapping[str, Any]]:
    """The arguments of the reward function: the text of the last turn, and the record, which has all turns as `turns`
    if there are several."""

    def text(tokens: IntArray) -> str:
        return prompts.text(tokens.tolist())

    number = trajectory.task if trajectory.task >= 0 else int(trajectory.group)
    record = prompts.tasks([number], trajectory.source)[0].record
    if trajectory.has_env_steps:
        turns = [{"role": m["role"], "content": m["content"]} for m in make_messages(trajectory, text, text)]
        record = {**record, "turns": turns}
    return text(trajectory.turns[-1]), record


@cache_per_process(1)
def _prompts(settings: bytes) -> tuple[Prompts, ScoringSettings]:
    """The prompts, which decode responses and draw records, and the settings of their scoring."""
    prompts: PromptSettings
    scoring: ScoringSettings
    prompts, scoring, code = pickle.loads(settings)
    if code:  # user code, sent from the machine that runs the command
        folder = Path(tempfile.mkdtemp(prefix="staleflow-code-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        for file, text in code.items():
            (folder / file).write_text(text)

        def relocate(reference: str) -> str:
            return f"{folder}/{reference}" if reference.rpartition(":")[0] in code else reference

        def relocate_source(source: SourceSettings) -> SourceSettings:
            task = source.task
            task = dataclasses.replace(task, source=relocate(task.source), eval_source=relocate(task.eval_source))
            return dataclasses.replace(source, task=task)

        reward = scoring.reward
        parts = {
            name: dataclasses.replace(part, function=relocate(part.function)) for name, part in reward.parts.items()
        }
        reward = dataclasses.replace(reward, function=relocate(reward.function), parts=parts)
        scoring = dataclasses.replace(scoring, reward=reward, source=relocate_source(scoring.source))
        prompts = dataclasses.replace(prompts, source=relocate_source(prompts.source))
    return prompts.build(), scoring


_per_thread = threading.local()


def _scorer(scoring: ScoringSettings) -> Scorer:
    """The calling thread's scorer, which has its own process: threads score in parallel."""
    from staleflow.tasks.sources.reward_process import Scorer

    cached_scorer: tuple[ScoringSettings, Scorer] | None = getattr(_per_thread, "scorer", None)
    if cached_scorer is None or cached_scorer[0] != scoring:
        if cached_scorer is not None:
            cached_scorer[1].close()
        _per_thread.scorer = cached_scorer = (scoring, Scorer(scoring))
    return cached_scorer[1]
