"""Bisection: which stored trajectories made a policy worse, found by repeating the training without some of them.

Two versions are given, the later of which has a lower reward on held-out prompts. The steps between them are trained
again from the earlier one, each time without one part of their rows, and the weights that result are evaluated on the
same prompts with the same random numbers. A part *prevents* the drop if most of the reward comes back without it, and
the difference from the unchanged training is significant. Parts are halved as long as a half prevents it: steps first,
then groups, those with the largest gradients first. The smallest part is a cause only if random groups with as many
rows do not prevent it: a training differs by chance, too, and what harms in all rows is undone by leaving out any.

Invariant: only the rows that are named differ between two trainings. Advantages of other rows are estimated again where
they depended on them (unlearning.py), and each step keeps its learning rate.

What this cannot show: responses of later steps were sampled by policies that had trained on the rows that are left out.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from staleflow.pipeline.config import user_files
from staleflow.pipeline.config.model_facts import inspect_model
from staleflow.pipeline.recovery.run_folder import load_job
from staleflow.pipeline.runtime.evaluation_results import read_evaluations
from staleflow.pipeline.stored_runs import unlearning
from staleflow.pipeline.stored_runs.pool import Report, open_store_at
from staleflow.pipeline.stored_runs.repeated_steps import open_policy, read_batch_rows, train_step
from staleflow.pipeline.stored_runs.run_files import format_steps
from staleflow.pipeline.stored_runs.training import OfflinePlan, held_out_scores
from staleflow.stores.errors import ConfigError, StoreError
from staleflow.stores.reward_statistics import MIN_PROMPTS, PairedDifference, estimate, paired_difference
from staleflow.stores.trajectories.repository import MAIN
from staleflow.stores.trajectories.selection import Selection
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import EndedTrajectory
from staleflow.stores.weights import weight_file
from staleflow.stores.weights.weight_hash import fingerprint

if TYPE_CHECKING:
    from staleflow.tasks.training.policy import Policy

P_LIMIT = 0.01
"""p-value below which a difference from the unchanged training counts. Some twenty parts are tried."""
MIN_RECOVERED_SHARE = 0.5
"""Share of the lost reward that has to come back without a part for it to count."""
NUM_CONTROLS = 4
"""Random parts left out to test a cause. If half of all parts prevent a drop, a wrong cause is named in one of 16
cases."""
Table = dict[str, npt.NDArray[Any]]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The training between the two versions, repeated without some rows."""

    left_out: str
    """The rows in words."""
    where: str
    """The rows as a selection, for `unlearn` and `store show`."""
    rows: int
    """Number of rows."""
    reward: float
    """Mean reward on held-out prompts of the weights that result."""
    difference: PairedDifference | None
    """From the unchanged training, over the prompts; None for too few prompts."""
    prevents: bool
    """Whether the reward is not lost without these rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisection:
    """The result of a bisection."""

    since: int
    """The earlier version."""
    at: int
    """The later version."""
    reward_since: float
    """Mean reward on held-out prompts at the earlier version."""
    reward_at: float
    """The same of the unchanged training at the later version."""
    reward_change: PairedDifference | None
    """Later minus earlier reward, over the prompts; None for too few prompts."""
    same_weights: bool
    """Whether the unchanged training gives the weights that the run published, bit for bit."""
    trials: tuple[Trial, ...]
    """All parts that were left out, in order."""
    cause: Trial | None
    """Of the parts that prevent the drop, the one with the fewest rows."""
    reason: str
    """Why there is no cause; empty if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BisectionPlan:
    """The steps to repeat. offline: the job and the point to begin from; its `start` is at most `since`."""

    offline: OfflinePlan
    since: int
    at: int


def make_plan(run_dir: Path, since: int, at: int) -> BisectionPlan:
    """Plan a bisection. The run's folder must be locked by the caller. Raises ConfigError."""
    config = load_job(run_dir)
    if config.emulated:
        raise ConfigError(f"{run_dir}: an emulated run has no weights")
    if config.has_environment or config.task.sources:
        raise ConfigError("bisect: environments and several task sources are evaluated by runs only")
    if config.task.eval_prompts < MIN_PROMPTS:
        raise ConfigError(
            f"bisect: task.eval_prompts = {config.task.eval_prompts}: at least {MIN_PROMPTS} held-out prompts are "
            "needed"
        )
    store = VersionedStore.open_pinned((run_dir / "store").resolve())
    num_steps = store.summary().num_steps
    if not 0 <= since < at <= num_steps:
        raise ConfigError(f"bisect: versions {since} and {at}: need 0 <= since < at <= {num_steps}, the trained steps")
    start, resume_point, _ = unlearning.find_start(run_dir, store, since)
    inspect_model(config)
    offline = OfflinePlan(
        config=user_files.with_absolute_models(config),
        store_path=str(store.path),
        snapshot=store.snapshot,
        branch=MAIN,
        where="",
        epochs=1,
        out="",
        exact=True,
        prompt_seed=config.seed,
        start=start,
        resume_point=resume_point,
    )
    return BisectionPlan(offline=offline, since=since, at=at)


def best_version_before(run_dir: Path, at: int) -> int:
    """The version before `at` whose evaluation has the highest reward; without one, that of ten steps before."""
    evaluations = [e for e in read_evaluations(run_dir) if e.version < at and e.sampled is not None]
    best = max(evaluations, key=lambda e: e.sampled or 0.0, default=None)
    return max(0, at - 10) if best is None else best.version


# -- search ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowSubset:
    """Rows to leave out, in words and as a selection."""

    label: str
    where: str


def search(
    table: Mapping[str, npt.NDArray[Any]], since: int, at: int, leave_out: Callable[[RowSubset], Trial]
) -> tuple[Trial | None, str]:
    """Try parts of the rows, from large to small, until no smaller one prevents the drop.

    Args:
        table: Columns of the rows that steps since <= step < at trained on.
        since: The first step.
        at: The step after the last.
        leave_out: Repeats the training without a part.

    Returns:
        The smallest part that prevents the drop, and an empty text; or None, and the reason why it is not the cause.
    """
    window = f"step >= {since} and step < {at}"
    preventing_trials: list[Trial] = []

    def prevents(part: RowSubset) -> bool:
        trial = leave_out(part)
        preventing_trials.extend([trial] * trial.prevents)
        return trial.prevents

    def without_steps(steps: Sequence[int]) -> bool:
        return prevents(RowSubset(format_steps(steps), f"step >= {steps[0]} and step <= {steps[-1]}"))

    def without_groups(groups: Sequence[int]) -> bool:
        label = f"group {groups[0]}" if len(groups) == 1 else f"{len(groups)} groups"
        return prevents(_group_part(groups, label))

    if np.unique(table["staleness"]).size > 1:
        prevents(RowSubset("stale trajectories", f"staleness > 0 and {window}"))
    steps = halve(list(range(since, at)), without_steps)
    halve(_groups_by_influence(table, steps), without_groups)
    if not preventing_trials:
        return None, "no part alone prevents the drop, only all steps together"
    cause = min(preventing_trials, key=lambda trial: trial.rows)
    if any(leave_out(part).prevents for part in random_parts(table, cause)):
        return None, f"{cause.left_out} prevents the drop, but so do random groups with as many rows"
    return cause, ""


def halve(items: Sequence[int], prevents: Callable[[Sequence[int]], bool]) -> list[int]:
    """Halve a sequence as long as one of its halves prevents something, which the whole sequence is known to do."""
    items = list(items)
    while len(items) > 1:
        middle = (len(items) + 1) // 2
        for half in (items[:middle], items[middle:]):
            if prevents(half):
                items = half
                break
        else:
            return items
    return items


def _groups_by_influence(table: Mapping[str, npt.NDArray[Any]], steps: Sequence[int]) -> list[int]:
    """The groups of some steps, those with the largest sum of |advantage| x tokens first."""
    rows = np.isin(table["step"], steps)
    groups, index = np.unique(table["group"][rows], return_inverse=True)
    influence = np.bincount(index, np.abs(table["advantage"][rows]) * table["response_tokens"][rows])
    return [int(group) for group in groups[np.argsort(-influence, kind="stable")]]


def random_parts(table: Mapping[str, npt.NDArray[Any]], cause: Trial) -> list[RowSubset]:
    """Random groups with as many rows as a part, of groups without a row of it where these are enough."""
    is_in_cause = np.isin(table["group"], table["group"][Selection(cause.where).mask(table)])
    other_groups = table["group"][~is_in_cause] if np.sum(~is_in_cause) >= cause.rows else table["group"]
    groups, sizes = np.unique(other_groups, return_counts=True)
    parts, rng = [], np.random.default_rng(0)
    for _ in range(NUM_CONTROLS):
        order = rng.permutation(len(groups))
        count = int(np.searchsorted(np.cumsum(sizes[order]), cause.rows)) + 1
        label = f"{count} random groups" if count > 1 else "a random group"
        parts.append(_group_part(sorted(groups[order[:count]].tolist()), label))
    return parts


def _group_part(groups: Sequence[int], label: str) -> RowSubset:
    where = f"group == {groups[0]}" if len(groups) == 1 else f"group in ({', '.join(map(str, groups))})"
    return RowSubset(label, where)


# -- on the worker ---------------------------------------------------------------------------------------------------


def bisect(plan: BisectionPlan, report: Report, *, shared: bool = False) -> Bisection:
    """Carry out a plan in this process; with a rank group, this process must be a Dask task. shared: as in Pool."""
    offline = plan.offline
    store = open_store_at(offline.store_path, offline.snapshot)
    held_out, config = store.header.held_out, offline.config
    with (
        tempfile.TemporaryDirectory(prefix="staleflow-") as folder,
        open_policy(config, config, config.steps, held_out, shared=shared) as policy,
    ):
        seconds = sum(c.metrics.get("train_s", 0.0) for c in store.commits() if plan.since <= c.step < plan.at)
        steps = format_steps(range(plan.since, plan.at))
        report({"say": f"training {steps} again for each part; the run's trainer took {seconds:.0f} s for them"})
        trainer = _PartialTrainer(plan, store, policy, Path(folder))
        since = trainer.evaluate(plan.since)
        unchanged = trainer.train(np.zeros(len(trainer.table["step"]), bool))
        reward_change = paired_difference(since, unchanged)
        result = Bisection(
            since=plan.since,
            at=plan.at,
            reward_since=_mean(since),
            reward_at=_mean(unchanged),
            reward_change=reward_change,
            same_weights=trainer.same_weights,
            trials=(),
            cause=None,
            reason="",
        )
        if reward_change is None:
            return dataclasses.replace(result, reason=f"fewer than {MIN_PROMPTS} held-out prompts were scored")
        if reward_change.mean >= 0 or reward_change.p >= P_LIMIT:
            reason = f"the reward is not significantly lower at version {plan.at} than at {plan.since}"
            return dataclasses.replace(result, reason=reason)
        runner = _TrialRunner(trainer, unchanged, reward_change, report)
        cause, reason = search(trainer.window, plan.since, plan.at, runner.leave_out)
        return dataclasses.replace(result, trials=tuple(runner.trials), cause=cause, reason=reason)


def _mean(rewards: Mapping[str, Sequence[float]]) -> float:
    return estimate(list(rewards.values())).mean or 0.0


@dataclass(slots=True)
class _TrialRunner:
    """Leaves out parts, and compares each result with the unchanged training."""

    trainer: _PartialTrainer
    unchanged: Mapping[str, Sequence[float]]
    reward_change: PairedDifference
    report: Report
    trials: list[Trial] = field(default_factory=list)

    def leave_out(self, part: RowSubset) -> Trial:
        removed_mask = self.trainer.trained_rows(part.where)
        rewards = self.trainer.train(removed_mask)
        difference = paired_difference(self.unchanged, rewards)
        recovers = difference is not None and difference.mean >= -MIN_RECOVERED_SHARE * self.reward_change.mean
        trial = Trial(
            left_out=part.label,
            where=part.where,
            rows=int(removed_mask.sum()),
            reward=_mean(rewards),
            difference=difference,
            prevents=recovers and difference is not None and difference.p < P_LIMIT,
        )
        self.trials.append(trial)
        self.report({"say": f"without {trial.left_out}: {trial.reward:.3f}" + (", prevents it" * trial.prevents)})
        return trial


class _PartialTrainer:
    """Repeats the steps of a plan without some rows, and evaluates the weights that result."""

    def __init__(self, plan: BisectionPlan, store: VersionedStore, policy: Policy, folder: Path) -> None:
        """folder: for the state at the earlier version and for weights to evaluate."""
        self._plan, self._store, self._policy, self._folder = plan, store, policy, folder
        self._context = inspect_model(plan.offline.config).context_length
        self._published_fingerprints = {r.step + 1: r.weight_fingerprint for r in store.commits() if r.kind == "step"}
        self.table: Table = store.table()
        self._trained_mask: Mask = self.table["fate"] == unlearning.CONSUMED_CODE
        self.same_weights = False
        self._is_sharded = plan.offline.config.training.ranks > 1
        self._resume_point = folder / ("point" if self._is_sharded else "point.pt")
        self._restore_earlier_version()

    @property
    def window(self) -> Table:
        """Columns of the rows that the repeated steps trained on."""
        step = self.table["step"]
        rows = self._trained_mask & (step >= self._plan.since) & (step < self._plan.at)
        return {name: self.table[name][rows] for name in ("step", "group", "staleness", "advantage", "response_tokens")}

    def trained_rows(self, where: str) -> Mask:
        """Mask of the trained rows that a selection names."""
        return self._trained_mask & Selection(where).mask(self._store.columns())

    def train(self, removed_mask: Mask) -> dict[str, list[float]]:
        """Train the steps without some rows; returns the rewards of the result by prompt."""
        advantages = self.table["advantage"]
        if removed_mask.any():
            advantages = unlearning.estimate_remaining_advantages(
                self._plan.offline.config, self.table, self._trained_mask, removed_mask
            )
        self._policy.load_state(self._resume_point)
        for step in range(self._plan.since, self._plan.at):
            self._train_step(step, removed_mask, advantages)
        if not removed_mask.any():
            weights = self._policy.apply_to_weights(fingerprint)
            self.same_weights = weights == self._published_fingerprints[self._plan.at]
        return self.evaluate(self._plan.at)

    def evaluate(self, version: int) -> dict[str, list[float]]:
        """Rewards of the present weights on held-out prompts, by prompt."""
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            weights, model = Path(folder) / "weights", Path(folder) / "model"
            self._policy.apply_to_weights(lambda tensors: weight_file.write(weights, tensors))
            self._policy.save(model, weights)
            scores = held_out_scores(
                self._plan.offline, str(model), version, self._context, lambda _: None, greedy_passes=(False,)
            )
        if scores is None:
            raise ConfigError("bisect: every held-out prompt was trained on")
        return {str(i): [s.reward] for i, s in enumerate(scores[False]) if not s.error}

    def _restore_earlier_version(self) -> None:
        """Load the state at the earlier version, and keep a copy. Raises StoreError if its weights are others."""
        offline, since = self._plan.offline, self._plan.since
        if offline.start:
            self._policy.load_state(Path(offline.resume_point))
        else:
            for step in range(offline.config.training.sft.steps):
                self._policy.fine_tune(step)
        no_rows = np.zeros(len(self.table["step"]), bool)
        for step in range(offline.start, since):
            self._train_step(step, no_rows, self.table["advantage"])
        if since and self._policy.apply_to_weights(fingerprint) != self._published_fingerprints[since]:
            raise StoreError(
                f"the weights of version {since}, trained again here, are not those that the run published; "
                "use a machine like the run's (`staleflow verify` compares them)"
            )
        if self._is_sharded:
            self._resume_point.mkdir()
        self._policy.begin_save(self._resume_point)
        self._policy.end_save()

    def _train_step(self, step: int, removed_mask: Mask, advantages: npt.NDArray[np.float32]) -> None:
        (positions,) = np.nonzero(self._trained_mask & (self.table["step"] == step) & ~removed_mask)
        if not len(positions):
            return
        batch = []
        for row, advantage in zip(read_batch_rows(self._store, positions), advantages[positions], strict=True):
            if not isinstance(row, EndedTrajectory):
                raise StoreError(f"step {step}: trajectory {row.trajectory} cannot be read: {row.error}")
            batch.append(dataclasses.replace(row, advantage=float(advantage)))
        train_step(self._policy, step, batch)
