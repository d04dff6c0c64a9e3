"""Unlearning: a run's training repeated without some of its rows, from the first step that trained on one of them.

What is trained instead is in a branch of the store: the rows that are left out have no loss mask, and each advantage
that depended on them is estimated again from the rows that remain. Training begins at the run's newest resume point
before the first changed step, or at the base model, and is otherwise offline training (training.py) on that branch.

Invariant: the weights equal those of offline training on the same branch and rows from the base model, bit for bit on
the same kind of machine. Up to the resume point both train on the run's own batches, which gives the run's weights.

What this does not undo: responses of later steps were sampled by policies that had trained on the rows.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.recovery import start_inputs
from staleflow.pipeline.stored_runs import training
from staleflow.pipeline.stored_runs.pool import EventCallback
from staleflow.pipeline.stored_runs.reward_rescoring import estimate_advantages
from staleflow.pipeline.stored_runs.training import OfflinePlan, OfflineTrainingResult
from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectories import derived_branches
from staleflow.stores.trajectories.columns import FATES
from staleflow.stores.trajectories.repository import MAIN
from staleflow.stores.trajectories.selection import Selection
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import Fate, PolicyVersion
from staleflow.stores.weights.resume_points import ResumePoints

UNCHANGED_INPUTS = ("settings", "user_code", "staleflow")
"""Inputs of the run's starts (start_inputs.py) that must not have changed if a resume point is to be used."""
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlearning:
    """Which rows are left out, and what is trained instead."""

    branch: str
    rows: int
    """Trained rows that are left out."""
    never_trained: int
    """Rows that match and that no step trained on: no weights depend on them."""
    recomputed: int
    """Rows that remain and have another advantage."""
    steps_left_out: tuple[int, ...]
    """Steps of the run of which no row remains: they are not trained."""
    first_step: int
    """First step of the run that trained on a row that is left out."""
    start: int
    """Version that training begins with: that of a resume point, or 0, the base model."""
    reason: str
    """Why training begins with the base model; empty if it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnlearningResult(Unlearning):
    """The result of unlearning."""

    training: OfflineTrainingResult
    """The training of all steps that remain; those before `start` are the run's."""


def unlearn(plan: OfflinePlan, unlearning: Unlearning, client: Any, report: EventCallback) -> UnlearningResult:
    """Carry out a plan on a worker. Raises ConfigError, StoreError. client: as in `open_pool`."""
    training_result = training.execute_plan(plan, client, report)
    facts = {field.name: getattr(unlearning, field.name) for field in dataclasses.fields(unlearning)}
    return UnlearningResult(**facts, training=training_result)


def make_plan(run_dir: Path, out: Path, where: str, branch: str) -> tuple[OfflinePlan, Unlearning]:
    """Store the branch, and plan the training on it.

    Repeating the call gives the same plan on the existing branch, so that a killed training continues.

    Args:
        run_dir: The run's folder, locked by the caller.
        out: The folder that the training will create.
        where: Selects the rows to leave out.
        branch: Name of the branch.

    Raises:
        ConfigError: No trained row matches, none remains, the branch's name is taken, or offline training refuses the
            job.
        StoreError: The branch cannot be stored.
    """
    if not where.strip():
        raise ConfigError("unlearn: where must say which trajectories to leave out")
    path = (run_dir / "store").resolve()
    store = VersionedStore.open_pinned(path)
    table = store.stored_columns()
    trained_mask, matching_mask = (
        table["fate"] == FATES.index(Fate.CONSUMED),
        Selection(where).mask(store.displayed_columns()),
    )
    removed_mask, remaining_mask = trained_mask & matching_mask, trained_mask & ~matching_mask
    if not removed_mask.any() or not remaining_mask.any():
        count = "all" if removed_mask.any() else "no"
        raise ConfigError(f"{run_dir}: {count} trajectories that were trained on match where = {where!r}")
    ids = tuple(table["trajectory"][removed_mask].tolist())
    plan = training.make_plan(run_dir, out, ("task.eval_prompts=0",), where=f"trajectory not in {ids}")
    advantages = reestimate_advantages(plan.config, table, trained_mask, removed_mask)
    lineage = {"without": where, "advantage": plan.config.training.advantage.name, "branch": MAIN}
    if not _branch_exists(path, branch, {**lineage, "parent": store.snapshot}):
        loss_mask = (table["loss_mask"] > 0) & ~removed_mask
        new_rewards = derived_branches.BranchRewards(
            rewards=table["reward"], advantages=advantages, loss_mask=loss_mask, errors=None
        )
        derived_branches.derive_rewards(store, path, branch, new_rewards, lineage)
    steps = np.unique(table["step"][remaining_mask])
    first_step = int(table["step"][removed_mask].min())
    start, resume_point, reason = find_start(run_dir, store, first_changed_step=first_step, num_steps=len(steps))
    unlearning = Unlearning(
        branch=branch,
        rows=len(ids),
        never_trained=int((matching_mask & ~trained_mask).sum()),
        recomputed=int(((advantages != table["advantage"]) & remaining_mask).sum()),
        steps_left_out=tuple(np.setdiff1d(table["step"][trained_mask], steps).tolist()),
        first_step=first_step,
        start=start,
        reason=reason,
    )
    snapshot = VersionedStore.open_pinned(path, branch).snapshot
    return dataclasses.replace(
        plan, branch=branch, snapshot=snapshot, start=start, resume_point=resume_point
    ), unlearning


def reestimate_advantages(
    config: RunConfig,
    table: dict[str, npt.NDArray[Any]],
    trained_mask: Mask,
    removed_mask: Mask,
    rewards: npt.NDArray[np.float32] | None = None,
    new_config: RunConfig | None = None,
) -> npt.NDArray[np.float32]:
    """Advantages of a run's rows, estimated again without some of them, or with other rewards or settings.

    A step's advantages are estimated as they were and as they are now. Where the two differ, the second is taken;
    elsewhere the stored one, as it was trained.

    Args:
        config: The run's job.
        table: Its rows, as they are stored.
        trained_mask: [R] whether a step trained on the row.
        removed_mask: [R] which of these are left out.
        rewards: [R] rewards now; the stored ones by default.
        new_config: The job now; `config` by default.

    Returns:
        [R] advantages; 0 of removed rows.
    """
    advantages: npt.NDArray[np.float32] = table["advantage"].copy()
    has_loss_mask = table["loss_mask"] > 0
    rewards, new_config = table["reward"] if rewards is None else rewards, new_config or config
    is_changed = removed_mask | (rewards != table["reward"]) | (new_config != config)
    for step in np.unique(table["step"][trained_mask & is_changed]):
        batch = trained_mask & (table["step"] == step)
        original = estimate_advantages(config, table, batch, table["reward"], has_loss_mask)
        recomputed = estimate_advantages(new_config, table, batch, rewards, has_loss_mask & ~removed_mask)
        advantages = np.where(batch & (original != recomputed), recomputed, advantages)
    advantages[removed_mask] = 0
    return advantages


def _branch_exists(path: Path, branch: str, lineage: dict[str, str]) -> bool:
    """Whether a branch with this lineage exists."""
    names = VersionedStore.open(path).branches()
    return branch in names and VersionedStore.open(path, branch=branch).lineage == lineage


def find_start(
    run_dir: Path, store: VersionedStore, *, first_changed_step: int, num_steps: int
) -> tuple[int, str, str]:
    """The version to begin with, so that all changed steps and at least one step are trained; the path of its resume
    point; and why there is no resume point.

    There is none if the run was started with other settings or code than there are now: the weights of its resume
    points would not be those of offline training.

    Args:
        run_dir: The run's folder.
        store: Its store.
        first_changed_step: The first step that trained on a row that is left out.
        num_steps: Number of steps of which rows remain.
    """
    resume_points = ResumePoints(run_dir / "resume")
    current = {name: {value} for name, value in start_inputs.weight_inputs(run_dir, "", None).items()}
    current["user_code"].add(start_inputs.user_code_hash(run_dir, includes_branches=False))
    starts = [record.inputs for record in store.commits() if "settings" in record.inputs]
    if not starts:
        return 0, "", "the run did not record its settings and code"
    names = [name for name in UNCHANGED_INPUTS if {start.get(name) for start in starts} - current[name]]
    if names:
        return 0, "", f"the run was not trained with the current {', '.join(names)}"
    latest = min(first_changed_step, num_steps - 1)
    if latest == 0:
        return 0, "", "only one step remains" if first_changed_step else "it is changed in step 0"
    version = max((v for v in resume_points.complete_versions() if v <= latest), default=PolicyVersion(0))
    if not version:
        return 0, "", f"no resume point of version {latest} or before is kept"
    return version, str(resume_points.path(version).resolve()), ""
