"""Scores stored trajectories again, stores the rewards on a new branch, and compares the rewards of branches.

Workers read, decode and score blocks of rows, and return one number per row. The branch becomes visible atomically at
the end: if the process is killed before that, nothing is left behind.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import pickle
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from staleflow.pipeline.config import actor_settings, user_files
from staleflow.pipeline.config.knob_tree import with_values
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.recovery.run_folder import load_job
from staleflow.pipeline.stored_runs.pool import cache_per_process, open_pool, open_store_at, require_all_rows
from staleflow.pipeline.stored_runs.response_texts import make_detokenizer, make_messages
from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectories import derived_branches
from staleflow.stores.trajectories.columns import FATES
from staleflow.stores.trajectories.reader import UnreadableRow
from staleflow.stores.trajectories.repository import MAIN
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import EndedTrajectory, Fate, GroupId, IntArray, Trajectory
from staleflow.tasks.rendering.task_source import Task, prompt_excerpt
from staleflow.tasks.rendering.turn_params import split_params
from staleflow.tasks.settings.source_kinds import is_environment
from staleflow.tasks.sources.reward_process import ScoredResponse, Scorer
from staleflow.tasks.sources.task_sources import RecordWithOrigin, make_reward

if TYPE_CHECKING:
    from staleflow.tasks.sources.prompts import Prompts
    from staleflow.tasks.sources.reward_process import ScoringSettings

RESCORE_CHANGEABLE_KEYS = ("reward.", "task.answer_pattern=")
"""Prefixes of the keys that may be changed for scoring again."""
REPLACED_KEYS = ("reward.function=", "reward.parts")
"""Prefixes of the keys that another reward replaces."""
RewardItem = tuple[str, Mapping[str, Any]]
"""Arguments of a reward function: the response's text, and the record of its task."""


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
    """Those whose response has a new reward."""
    errors: dict[int, str]
    """Why others have none, by trajectory: the reward function failed, the row cannot be read, or its prompt has
    changed. Those get no gradient."""
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
    changes: tuple[str, ...] = (),
    *,
    client: Any = None,
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> RescoreResult:
    """Score every stored response of a run again.

    Args:
        run_dir: The run's folder.
        reward: task, math_verify, file.py:name or module:name; empty: the job's own.
        branch: Name of the new branch.
        changes: Of keys in RESCORE_CHANGEABLE_KEYS, as KEY=VALUE.
        client: As in `open_pool`.
        workers: As in `open_pool`.
        progress: Called with (0, 0) when the input is checked, then with (rows done, total rows).

    Raises:
        ConfigError: Before anything is computed; or, with nothing stored, if no response could be scored.
    """
    path = (run_dir / "store").resolve()
    store = VersionedStore.open_pinned(path)
    derived_branches.check_branch_name(path, branch)
    config = _changed_job(run_dir, reward, changes)
    progress(0, 0)
    table = store.stored_columns()
    count = len(table["trajectory"])
    rewards, valid = np.zeros(count, np.float32), np.ones(count, bool)
    errors: dict[int, str] = {}
    num_done = 0
    config, code = user_files.collect_code(config, user_files.scoring_code_keys(config))
    settings = pickle.dumps((config, code, store.header))
    with open_pool(client, workers) as pool:
        calls = ((settings, str(path), store.snapshot, start, stop) for start, stop in pool.split_rows(count))
        for start, block in pool.run(score_rows, calls):
            stop = start + len(block.rewards)
            rewards[start:stop], valid[start:stop] = block.rewards, block.valid
            errors |= block.errors
            num_done += len(block.rewards)
            progress(num_done, count)
    require_all_rows(num_done, count)
    has_response = table["response_tokens"] > 0
    num_scored = int((has_response & valid).sum())
    if has_response.any() and not num_scored:
        raise ConfigError(
            f"{config.reward.setting}: scoring failed on all {has_response.sum()} responses, so nothing is stored; on "
            f"trajectory {min(errors)}: {errors[min(errors)]}"
        )
    is_consumed = table["fate"] == FATES.index(Fate.CONSUMED)
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
    snapshot = derived_branches.derive_rewards(store, path, branch, new_rewards, lineage)
    return RescoreResult(
        branch=branch,
        snapshot=snapshot,
        rows=count,
        scored=num_scored,
        errors=errors,
        mean_before=float(table["reward"][trained_before].mean()) if trained_before.any() else 0.0,
        mean_after=float(rewards[is_consumed & valid].mean()) if (is_consumed & valid).any() else 0.0,
    )


def _changed_job(run_dir: Path, reward: str, changes: tuple[str, ...]) -> RunConfig:
    """The stored job with changes to how it rewards; see `rescore`. Raises ConfigError."""
    for change in changes:
        if not change.startswith(RESCORE_CHANGEABLE_KEYS):
            raise ConfigError(
                f"override {change}: only how responses are scored can change: {', '.join(RESCORE_CHANGEABLE_KEYS)}"
            )
        if reward and change.startswith(REPLACED_KEYS):
            raise ConfigError(f"override {change}: the reward {reward} replaces this key; leave one of the two out")
    config = user_files.with_absolute_paths(load_job(run_dir, changes)) if changes else load_job(run_dir)
    return _replace_reward(config, reward)


def _replace_reward(config: RunConfig, reward: str) -> RunConfig:
    """The stored job with another reward, or with its own if that is empty. Raises ConfigError if it cannot be loaded
    or cannot score stored responses."""
    if config.emulated:
        raise ConfigError(f"{config.run_dir}: an emulated run has no texts to score")
    if reward:
        file, _, name = reward.rpartition(":")
        if file.endswith(".py"):
            reward = f"{Path(file).resolve()}:{name}"
        source_rewards = {f"task.sources.{name}.reward": reward for name in config.task.sources}
        config = with_values(config, {"reward.function": reward, "reward.parts": {}, **source_rewards})
    for job in config.jobs_by_source.values():
        functions = [part.function for part in job.reward.parts.values()] or [job.reward.function]
        if "task" in functions and is_environment(job.task.source, "task.source"):
            raise ConfigError(
                f"the reward of the task: the environment {job.task.source} rewards its episodes while they are "
                "played, and stored ones cannot be played again; name a function of your own, FILE.py:NAME, which gets "
                'the text of the last turn, and all turns as record["turns"]'
            )
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
    """Dask task: score rows start <= row < stop of a snapshot. A row that is unreadable, or whose prompt is no longer
    that of its task, is an error. Objects that are slow to create are cached in the process."""
    prompts, scoring = _load_inputs(settings)
    rows = list(open_store_at(path, snapshot).trajectories_at(range(start, stop)))
    rewards, valid = np.zeros(len(rows), np.float32), np.ones(len(rows), bool)
    errors = {int(row.trajectory): row.error for row in rows if isinstance(row, UnreadableRow)}
    valid[[i for i, row in enumerate(rows) if isinstance(row, UnreadableRow)]] = False
    responses = {
        i: row.trajectory
        for i, row in enumerate(rows)
        if isinstance(row, EndedTrajectory) and row.trajectory.num_sampled
    }
    scores = score_again(prompts, _scorer(scoring), list(responses.values()))
    for (i, trajectory), score in zip(responses.items(), scores, strict=True):
        rewards[i] = score.reward
        if score.error:
            valid[i] = False
            errors[int(trajectory.id)] = score.error
    return start, ScoredBlock(rewards=rewards, valid=valid, errors=errors)


def score_again(prompts: Prompts, scorer: Scorer, trajectories: Sequence[Trajectory]) -> list[ScoredResponse]:
    """Score trajectories with records from the data as it is now. One whose prompt is no longer that of its task gets
    an error."""
    tasks = _draw_tasks(prompts, trajectories)
    have_prompts = [_has_prompt(trajectory, prompts, *tasks[trajectory.group]) for trajectory in trajectories]
    items = [
        _make_reward_item(prompts, trajectory, tasks[trajectory.group][0].record)
        for trajectory, has_prompt in zip(trajectories, have_prompts, strict=True)
        if has_prompt
    ]
    scores, problem = iter(scorer.score(items)), "the prompt of its task is not the stored one any more"
    return [
        next(scores)
        if has_prompt
        else ScoredResponse(reward=0.0, error=f"{problem}: {prompt_excerpt(tasks[trajectory.group][0].prompt)}")
        for trajectory, has_prompt in zip(trajectories, have_prompts, strict=True)
    ]


def _draw_tasks(prompts: Prompts, trajectories: Sequence[Trajectory]) -> dict[GroupId, tuple[Task, tuple[int, ...]]]:
    """The tasks of trajectories by group, drawn from the data as it is now, with the token ids of their prompts."""
    tasks: dict[GroupId, tuple[Task, tuple[int, ...]]] = {}
    for source in {t.source for t in trajectories}:
        numbers = {t.group: t.task if t.task >= 0 else int(t.group) for t in trajectories if t.source == source}
        for group, task in zip(numbers, prompts.tasks(list(numbers.values()), source), strict=True):
            tasks[group] = task, prompts.encode(task)
    return tasks


def _has_prompt(trajectory: Trajectory, prompts: Prompts, task: Task, tokens: tuple[int, ...]) -> bool:
    """Whether a trajectory was sampled from a task's prompt. Tokens may differ before its first message, since a chat
    template may put the date there. tokens: those of the task's prompt."""
    stored_tokens = tuple(trajectory.prompt_tokens.tolist())
    if tokens == stored_tokens:
        return True
    pairs = zip(reversed(tokens), reversed(stored_tokens), strict=False)
    num_equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    prompt = split_params(task.prompt)[1]
    first_text = prompt if isinstance(prompt, str) else "".join(message.content for message in prompt[:1])
    # After other equal text: the end of a longer number or word would be found at the start.
    return prompts.text(tokens[len(tokens) - num_equal :]).find(first_text.strip()) > 0


def _make_reward_item(prompts: Prompts, trajectory: Trajectory, record: Mapping[str, Any]) -> RewardItem:
    """The arguments of the reward function: the text of the last turn, and the record, which has all turns as `turns`
    if there are several."""

    def text(tokens: IntArray) -> str:
        return prompts.text(tokens.tolist())

    if trajectory.has_env_steps:
        turns = [{"role": m["role"], "content": m["content"]} for m in make_messages(trajectory, text, text)]
        label = record.origin if isinstance(record, RecordWithOrigin) else ""
        record = RecordWithOrigin.of(label, {**record, "turns": turns})
    return text(trajectory.turns[-1]), record


@cache_per_process(1)
def _load_inputs(settings: bytes) -> tuple[Prompts, ScoringSettings]:
    """The prompts, which decode responses and draw records, and the settings of their scoring."""
    config, code, header = pickle.loads(settings)
    if code:  # user code, sent from the machine that runs the command
        folder = Path(tempfile.mkdtemp(prefix="staleflow-code-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        (folder / "code").mkdir()
        for name, text in code.items():
            user_files.copied_path(folder / "code", name).write_text(text, "utf-8")
        config = user_files.with_code_in(config, folder / "code", code)
    # From the store's header, since the job might draw other prompts for its groups now.
    prompts = actor_settings.prompt_settings(
        config, num_held_out=header.num_held_out, max_prompt_tokens=header.max_prompt_tokens
    )
    return prompts.build(), actor_settings.scoring_settings(config)


_per_thread = threading.local()


def _scorer(scoring: ScoringSettings) -> Scorer:
    """The calling thread's scorer, which has its own process: threads score in parallel."""
    cached_scorer: tuple[ScoringSettings, Scorer] | None = getattr(_per_thread, "scorer", None)
    if cached_scorer is None or cached_scorer[0] != scoring:
        if cached_scorer is not None:
            cached_scorer[1].close()
        _per_thread.scorer = cached_scorer = (scoring, Scorer(scoring))
    return cached_scorer[1]
