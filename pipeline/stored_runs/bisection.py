"""Bisection: which change of a training prevents that a policy became worse, found by repeating the training.

Two versions are given, the later of which has a lower reward on held-out prompts. The steps between them are trained
again from the earlier one, each time with one change (training_changes.py): some rows left out, a part of the reward
left out, or settings as they were before a resume. The weights that result answer each held-out prompt several times.

Invariant: only what a change names differs between two trainings. Advantages of other rows are estimated again where
they depended on it (unlearning.py), and each step keeps its learning rate unless the change names a setting of it.

What this cannot show: responses of later steps were sampled by policies that had trained on what is changed. A setting
of prompts or rewards also changes what the held-out prompts measure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from staleflow.pipeline.config import actor_settings
from staleflow.pipeline.config.model_facts import inspect_model
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.recovery.run_folder import load_job
from staleflow.pipeline.runtime.evaluation_results import read_evaluations
from staleflow.pipeline.stored_runs import reward_rescoring, unlearning, verification
from staleflow.pipeline.stored_runs.cause_search import MAX_TRAININGS, P_LIMIT, Rewards, SearchResult, search
from staleflow.pipeline.stored_runs.pool import EventCallback, open_store_at
from staleflow.pipeline.stored_runs.repeated_steps import JobPart, open_policy, read_batch_rows, train_step
from staleflow.pipeline.stored_runs.run_files import format_steps
from staleflow.pipeline.stored_runs.training import OfflinePlan, held_out_scores
from staleflow.pipeline.stored_runs.training_changes import (
    Change,
    changed_settings,
    changes_without_conspicuous_rows,
    restore_settings,
    undo_settings_change,
)
from staleflow.stores.errors import ConfigError, StoreError
from staleflow.stores.files import remove
from staleflow.stores.reward_statistics import (
    MIN_PROMPTS,
    Estimate,
    PairedDifference,
    estimate,
    paired_difference,
)
from staleflow.stores.trajectories.columns import FATES
from staleflow.stores.trajectories.repository import MAIN
from staleflow.stores.trajectories.selection import Selection
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import EndedTrajectory, Fate, PolicyVersion
from staleflow.stores.weights import weight_file
from staleflow.stores.weights.resume_points import ResumePoints
from staleflow.stores.weights.weight_hash import fingerprint
from staleflow.tasks.sources.reward_process import Scorer

if TYPE_CHECKING:
    from staleflow.tasks.training.policy import Policy

NUM_ANSWERS = 4
"""Answers to each held-out prompt."""
REWARD = "reward"
"""The metric that a drop is measured in by default; the others are the names of its parts."""
UNCHANGED = Change(label="unchanged")
WINDOW_COLUMNS = (
    "trajectory", "step", "group", "staleness", "advantage", "response_tokens", "source", "finish",
)  # fmt: skip
"""Columns of the store that changes are chosen by."""
Mask = npt.NDArray[np.bool_]


@dataclass(slots=True, kw_only=True)
class Bisection(SearchResult):
    """The result of a bisection: that of the search, and what was compared."""

    run: str
    """The run's folder."""
    metric: str
    """What is measured: the reward, or one of its parts."""
    since: int
    """The earlier version."""
    at: int
    """The later version."""
    reward_since: Estimate
    """Mean reward on held-out prompts at the earlier version."""
    reward_at: Estimate
    """The same of the unchanged training at the later version."""
    reward_change: PairedDifference | None
    """Later minus earlier reward, over the prompts; None for too few prompts."""
    same_weights: bool
    """Whether the unchanged training gives the weights that the run published, bit for bit."""
    elapsed_s: float = 0.0
    page: str = ""
    """File of the page that shows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BisectionPlan:
    """The steps to repeat."""

    run_dir: str
    offline: OfflinePlan
    """Store, and the job of the later version."""
    former: RunConfig
    """The job of the earlier version."""
    parts: tuple[JobPart, ...]
    """All steps to repeat, from a resume point or from the base model, by the jobs that trained them."""
    resume_point: str
    """The resume point to begin from; empty for the base model."""
    since: int
    at: int
    metric: str = REWARD

    @property
    def window(self) -> list[JobPart]:
        """The steps between the two versions, by their jobs."""
        return [
            dataclasses.replace(part, start=max(part.start, self.since))
            for part in self.parts
            if part.stop > self.since
        ]


def make_plan(run_dir: Path, since: int, at: int, metric: str = REWARD) -> BisectionPlan:
    """Plan a bisection. The run's folder must be locked by the caller. Raises ConfigError."""
    config = load_job(run_dir)
    if config.emulated:
        raise ConfigError(f"{run_dir}: an emulated run has no weights")
    if config.has_environment:
        raise ConfigError("bisect: environments are evaluated by runs only")
    if (count := sum(task.eval_prompts for task in config.task.sources_by_name.values())) < MIN_PROMPTS:
        raise ConfigError(f"bisect: task.eval_prompts = {count}: at least {MIN_PROMPTS} held-out prompts are needed")
    store = VersionedStore.open_pinned((run_dir / "store").resolve())
    records = store.commits()
    num_steps = sum(record.kind == "step" for record in records)
    if not 0 <= since < at <= num_steps:
        raise ConfigError(f"bisect: versions {since} and {at}: need 0 <= since < at <= {num_steps}, the trained steps")
    inputs = [(record.step, record.inputs) for record in records if record.inputs]
    starts = verification.read_starts(run_dir, inputs, num_steps)
    for start in starts:
        if start.problem and start.steps.stop > since and start.steps.start < at:
            raise ConfigError(f"bisect: {format_steps(start.steps)}: {start.problem}")
    origins = verification.find_repeat_versions(run_dir, starts)
    if since not in origins:
        raise ConfigError(f"bisect: version {since}: no resume point of it or before is kept; choose a later --since")
    first = origins[since]
    parts = verification.make_job_parts(starts, first, at)
    jobs_before = [start.job for start in starts if start.steps.start < since and start.job is not None]
    inspect_model(parts[-1].config)
    offline = OfflinePlan(
        config=parts[-1].config,
        store_path=str(store.path),
        snapshot=store.snapshot,
        branch=MAIN,
        where="",
        epochs=1,
        out="",
        is_unchanged=True,
        prompt_seed=config.seed,
    )
    return BisectionPlan(
        run_dir=str(run_dir),
        offline=offline,
        former=jobs_before[-1] if jobs_before else parts[0].config,
        parts=parts,
        resume_point=str(ResumePoints(run_dir / "resume").path(PolicyVersion(first)).resolve()) if first else "",
        since=since,
        at=at,
        metric=metric,
    )


def best_version_before(run_dir: Path, at: int) -> int:
    """The version before `at` whose evaluation has the highest reward; without one, that of ten steps before."""
    evaluations = [e for e in read_evaluations(run_dir) if e.version < at and e.sampled is not None]
    best = max(evaluations, key=lambda e: e.sampled or 0.0, default=None)
    return max(0, at - 10) if best is None else best.version


# -- on the worker ---------------------------------------------------------------------------------------------------


def bisect(plan: BisectionPlan, report: EventCallback) -> Bisection:
    """Carry out a plan in this process; with a rank group, this process must be a Dask task."""
    started_s = time.monotonic()
    store = open_store_at(plan.offline.store_path, plan.offline.snapshot)
    seconds = sum(c.metrics.get("train_s", 0.0) for c in store.commits() if plan.since <= c.step < plan.at)
    steps = format_steps(range(plan.since, plan.at))
    cost = f"at most {MAX_TRAININGS} times with a change; the run's trainer took {seconds:.0f} s for them"
    answers = f"Each result answers each held-out prompt {NUM_ANSWERS} times"
    report({"say": f"plan: {steps} are trained again, {cost}. {answers}"})
    with (
        tempfile.TemporaryDirectory(prefix="staleflow-") as folder,
        contextlib.closing(_RepeatedTraining(plan, store, Path(folder))) as training,
    ):
        training.restore_earlier_version()
        rewards_before, trained_s = training.evaluate(plan.former, plan.since), time.monotonic()
        unchanged = training.train(UNCHANGED)
        trained_s = time.monotonic() - trained_s
        reward_change = paired_difference(rewards_before, unchanged)
        outcome = SearchResult()
        if reward_change is None:
            outcome.reason = f"fewer than {MIN_PROMPTS} held-out prompts were scored"
        elif reward_change.mean >= 0 or reward_change.p >= P_LIMIT:
            outcome.reason = f"the {plan.metric} is not significantly lower at version {plan.at} than at {plan.since}"
        else:
            candidates = [*training.setting_changes(), *training.row_changes()]
            names = "; ".join(change.label for change in candidates) or "none"
            cost = f"{trained_s:.1f} s, so {MAX_TRAININGS * trained_s:.0f} s at most"
            report({"say": f"unchanged, with its evaluation: {cost}. Tried first: {names}; then steps and groups"})
            outcome = search(
                training.table, plan.since, plan.at, candidates, training, rewards_before, unchanged,
                lambda line: report({"say": line}),
            )  # fmt: skip
    return Bisection(
        run=plan.run_dir,
        metric=plan.metric,
        since=plan.since,
        at=plan.at,
        reward_since=estimate(list(rewards_before.values())),
        reward_at=estimate(list(unchanged.values())),
        reward_change=reward_change,
        same_weights=training.same_weights,
        elapsed_s=time.monotonic() - started_s,
        **{field.name: getattr(outcome, field.name) for field in dataclasses.fields(outcome)},
    )


class _RepeatedTraining:
    """Repeats the steps of a plan with a change, and evaluates the weights that result."""

    def __init__(self, plan: BisectionPlan, store: VersionedStore, folder: Path) -> None:
        """folder: for the state at the earlier version and for weights to evaluate."""
        self._plan, self._store, self._folder = plan, store, folder
        self._context = inspect_model(plan.offline.config).context_length
        self._published_fingerprints = {r.step + 1: r.weight_fingerprint for r in store.commits() if r.kind == "step"}
        self._columns = store.stored_columns()
        self._trained_mask: Mask = self._columns["fate"] == FATES.index(Fate.CONSUMED)
        step = self._columns["step"]
        self._window_mask: Mask = self._trained_mask & (step >= plan.since) & (step < plan.at)
        self.table = {name: v[self._window_mask] for name, v in store.displayed_columns(names=WINDOW_COLUMNS).items()}
        """Columns of the rows that the repeated steps trained on."""
        self._part_rewards: dict[str, npt.NDArray[np.float32]] = {}
        """[R] what each part of the reward, times its weight, has added to the reward of each row."""
        self.same_weights = False
        self._policies = contextlib.ExitStack()
        self._policy: Policy | None = None
        self._config: RunConfig | None = None

    def close(self) -> None:
        self._policies.close()

    # -- changes -----------------------------------------------------------------------------------------------------

    def setting_changes(self) -> list[Change]:
        """Settings that were changed by resumes between the two versions, with their values before."""
        configs = [(self._plan.since, self._plan.former), *((p.start, p.config) for p in self._plan.window)]
        return [
            undo_settings_change(before, after, step)
            for (_, before), (step, after) in pairwise(configs)
            if changed_settings(before, after)
        ]

    def row_changes(self) -> list[Change]:
        """Parts of the reward to leave out, and rows that stand out."""
        (positions,) = np.nonzero(self._window_mask)
        config, header = self._plan.offline.config, self._store.header
        prompts = actor_settings.prompt_settings(
            config, num_held_out=header.num_held_out, max_prompt_tokens=header.max_prompt_tokens
        ).build()
        numbers, is_other = dict[bytes, int](), np.zeros(len(self._trained_mask), bool)
        prompt = np.zeros(len(self._trained_mask), np.int64)
        with contextlib.closing(Scorer(actor_settings.scoring_settings(config))) as scorer:
            for part in self._plan.window:
                in_part = positions[np.isin(self._columns["step"][positions], range(part.start, part.stop))]
                rows = [row.trajectory for row in self._read(in_part)]
                scores = reward_rescoring.score_again(prompts, scorer, rows)
                for position, row, score in zip(in_part.tolist(), rows, scores, strict=True):
                    prompt[position] = numbers.setdefault(row.prompt_tokens.tobytes(), len(numbers))
                    is_other[position] = not (score.error or row.error or np.isclose(score.reward, row.reward))
                    for name, reward in part.config.reward.parts.items():
                        added = self._part_rewards.setdefault(name, np.zeros(len(self._trained_mask), np.float32))
                        added[position] = reward.weight * row.reward_parts.get(name, 0.0)
        self.table |= {"prompt": prompt[positions], "differs": is_other[positions]}
        parts = [Change(label=f"without the reward part {name}", reward_part=name) for name in self._part_rewards]
        window = f"step >= {self._plan.since} and step < {self._plan.at}"
        return [
            *(parts if len(parts) > 1 else ()),
            *changes_without_conspicuous_rows(self.table, window, list(config.task.sources)),
        ]

    def num_changed_rows(self, change: Change) -> int:
        """Number of rows of the repeated steps that a change leaves out, or gives another reward."""
        removed, rewards = self._apply(change)
        return int(np.sum(self._window_mask & (removed | (rewards != self._columns["reward"]))))

    def _apply(self, change: Change) -> tuple[Mask, npt.NDArray[np.float32]]:
        """[R] which rows a change leaves out, and [R] the rewards of the others."""
        removed, rewards = np.zeros(len(self._trained_mask), bool), self._columns["reward"]
        if change.where:
            removed = self._trained_mask & Selection(change.where).mask(self._store.displayed_columns())
        if change.reward_part:
            rewards = rewards - self._part_rewards[change.reward_part]
        return removed, rewards

    # -- training ----------------------------------------------------------------------------------------------------

    def train(self, change: Change) -> Rewards:
        """Train the steps with a change; returns the rewards of the result."""
        removed, rewards = self._apply(change)
        point: Path | None = self._folder / "since"
        keys = [key for key, _ in change.settings]
        for part in self._plan.window:
            config, in_part = part.config, self._trained_mask & (self._columns["step"] >= part.start)
            in_part &= self._columns["step"] < part.stop
            if part.start >= change.since:
                config = restore_settings(config, self._former(change.since), keys)
            advantages = unlearning.reestimate_advantages(
                part.config, self._columns, in_part, removed & in_part, rewards, config
            )
            self._open(config, point)
            point = None
            for step in range(part.start, part.stop):
                self._train_step(step, in_part & ~removed, advantages)
        if change == UNCHANGED:
            weights = self._opened.apply_to_weights(fingerprint)
            self.same_weights = weights == self._published_fingerprints[self._plan.at]
        return self.evaluate(config, self._plan.at)

    def _former(self, since: int) -> RunConfig:
        """The job that trained the steps before the job that began with a step."""
        configs = [part.config for part in self._plan.window if part.start < since]
        return configs[-1] if configs else self._plan.former

    def evaluate(self, config: RunConfig, version: int) -> Rewards:
        """Rewards of the present weights on a job's held-out prompts."""
        plan, metric = dataclasses.replace(self._plan.offline, config=config), self._plan.metric
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            weights, model = Path(folder) / "weights", Path(folder) / "model"
            self._opened.apply_to_weights(lambda tensors: weight_file.write(weights, tensors))
            self._opened.save(model, weights)
            scores = held_out_scores(
                plan, str(model), version, self._context, lambda _: None, greedy_passes=(False,) * NUM_ANSWERS
            )
        if scores is None:
            raise ConfigError("bisect: every held-out prompt was trained on")
        rewards: dict[str, list[float]] = {}
        for scores_of_pass in scores:
            for prompt, score in enumerate(scores_of_pass):
                if score.error:
                    continue
                if metric != REWARD and metric not in score.parts:
                    names = ", ".join([REWARD, *score.parts])
                    raise ConfigError(f"--metric {metric}: the reward has no such part; there are {names}")
                rewards.setdefault(str(prompt), []).append(score.reward if metric == REWARD else score.parts[metric])
        return rewards

    def restore_earlier_version(self) -> None:
        """Compute the state at the earlier version, and keep a copy. Raises StoreError if its weights are others."""
        plan, point = self._plan, Path(self._plan.resume_point) if self._plan.resume_point else None
        for part in plan.parts:
            if part is plan.parts[0] or part.start < plan.since:
                self._open(part.config, point)
                if not part.start:
                    for step in range(part.config.training.sft.steps):
                        self._opened.fine_tune(step)
                for step in range(part.start, min(part.stop, plan.since)):
                    self._train_step(step, self._trained_mask, self._columns["advantage"])
            point = None
        if plan.since and self._opened.apply_to_weights(fingerprint) != self._published_fingerprints[plan.since]:
            raise StoreError(
                f"the weights of version {plan.since}, trained again here, are not those that the run published; "
                "use a machine like the run's (`staleflow verify` compares them)"
            )
        self._save(self._folder / "since")

    @property
    def _opened(self) -> Policy:
        assert self._policy is not None
        return self._policy

    def _open(self, config: RunConfig, point: Path | None) -> None:
        """Open the policy of a job, if it is not open, with the state of a resume point, or else with the present one.
        One policy is open at a time."""
        present = self._folder / "present"
        if config != self._config:
            if point is None and self._policy is not None:
                point = present
                self._save(point)
            self._policies.close()
            self._config, self._policy = (
                config,
                self._policies.enter_context(
                    open_policy(config, config, config.steps, self._store.header.num_held_out)
                ),
            )
        if point is not None:
            self._opened.load_state(point)
        remove(present)

    def _save(self, path: Path) -> None:
        if self._config is not None and self._config.training.ranks > 1:
            path.mkdir()
        self._opened.begin_save(path)
        self._opened.end_save()

    def _read(self, positions: npt.NDArray[np.int64]) -> Iterable[EndedTrajectory]:
        for row in read_batch_rows(self._store, positions):
            if not isinstance(row, EndedTrajectory):
                step = self._columns["step"][self._columns["trajectory"] == int(row.trajectory)][0]
                raise StoreError(f"step {step}: trajectory {row.trajectory} cannot be read: {row.error}")
            yield row

    def _train_step(self, step: int, mask: Mask, advantages: npt.NDArray[np.float32]) -> None:
        (positions,) = np.nonzero(mask & self._trained_mask & (self._columns["step"] == step))
        if len(positions):
            rows = zip(self._read(positions), advantages[positions], strict=True)
            batch = [dataclasses.replace(row, advantage=float(advantage)) for row, advantage in rows]
            train_step(self._opened, step, batch)
