"""Resumes a stored run: finds the version to continue from, and prepares its folder.

A run is resumed from its newest resume point that the store has reached. Steps committed after it are undone (they stay
readable on a branch), and in-flight work continues (pipeline/coordination/resume_plan.py).
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from staleflow.pipeline.config import actor_settings
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.coordination import journal
from staleflow.pipeline.recovery.run_folder import list_checkpoints, load_job, require_run, write_job
from staleflow.stores.errors import ConfigError, StoreError
from staleflow.stores.files import replace_text
from staleflow.stores.metrics import steps_with_tokens_per_s
from staleflow.stores.trajectories.records import RESUME_CHANGEABLE_KEYS, RunHeader
from staleflow.stores.trajectory import PolicyVersion
from staleflow.stores.weights.resume_points import ResumePoints

REMEDY = "free space or move the run's folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """The point from which a run resumes.

    Args:
        fingerprint: Fingerprint of the weights of `version`, as recorded by its step; empty for the base model.
        version: The version from which training continues.
        step_metrics: Metrics of the earlier steps.
        elapsed_s: Seconds that the run took up to this point.
        num_earlier_starts: Number of earlier starts with a journal, which may be empty.
        drift_limit: Metric probe_limit of the last step; 0 if none is stored.
    """

    version: PolicyVersion
    fingerprint: str = ""
    step_metrics: tuple[dict[str, float], ...] = ()
    elapsed_s: float = 0.0
    num_earlier_starts: int = 0
    drift_limit: float = 0.0


def load(run_dir: Path, overrides: tuple[str, ...] = ()) -> RunConfig:
    """Load the job of a run to resume. Overrides may change only keys in RESUME_CHANGEABLE_KEYS. If the number of steps
    changes, a decaying schedule keeps its length, because the learning rate would jump otherwise. Raises
    ConfigError."""
    require_run(run_dir)
    for override in overrides:
        key = override.partition("=")[0]
        if not key.startswith(RESUME_CHANGEABLE_KEYS):
            raise ConfigError(
                f"override {override}: cannot be changed when resuming; these can: {', '.join(RESUME_CHANGEABLE_KEYS)}"
            )
    if run_dir.resolve().name.startswith("."):
        raise ConfigError(f"{run_dir}: the name of a run's folder must not begin with a dot; rename it")
    config = load_job(run_dir, overrides)
    stored_steps = load_job(run_dir).steps
    if config.training.schedule == "constant" or config.training.schedule_steps or config.steps == stored_steps:
        return config
    if any(override.startswith("training.schedule_steps=") for override in overrides):
        return config
    return load_job(run_dir, (*overrides, f"training.schedule_steps={stored_steps}"))


def schedule_note(config: RunConfig) -> str:
    """Return a note if the schedule of the learning rate ends before the run does; otherwise empty."""
    training = config.training
    if training.schedule == "constant" or not 0 < training.schedule_steps < config.steps:
        return ""
    return (
        f"the {training.schedule} schedule ends after {training.schedule_steps} of {config.steps} steps "
        "(training.schedule_steps); later ones train at a learning rate of "
        f"{training.learning_rate * training.schedule_floor:g}"
    )


def find_resume_version(config: RunConfig) -> PolicyVersion:
    """Find the version from which a run resumes: that of its newest complete resume point which the store has reached.
    It is 0 if nothing is stored, or so few steps that the first resume point may not have been complete.

    Raises:
        ConfigError: There is no such point, the store belongs to another job, or the run is complete. A run that was
            killed after its last step is not complete without its final evaluation.
    """
    from staleflow.stores.trajectories.versioned import VersionedStore

    run_dir = config.run_dir
    if not (run_dir / "store").exists():
        _refuse_lost_store(run_dir)
        return PolicyVersion(0)
    store = VersionedStore.open(run_dir / "store")
    check_header(config, store.header)
    summary = store.summary()
    num_trained = summary.num_steps
    if num_trained > config.steps or (num_trained == config.steps and summary.has_ended):
        raise ConfigError(
            f"{run_dir}: all {num_trained} steps are trained; set steps=N with a larger N to train further"
        )
    points = [v for v in ResumePoints(run_dir / "resume").complete_versions() if v <= num_trained]
    resume_every = config.training.resume_every
    # The trainer writes the second point only after the first one is complete.
    may_lack_points = num_trained <= 2 * resume_every and (run_dir / "resume").is_dir()
    if num_trained and not points and not may_lack_points:
        raise ConfigError(
            f"{run_dir}: {num_trained} steps are stored but there is no complete resume point; "
            f"training.resume_every was {resume_every}"
        )
    return points[-1] if points else PolicyVersion(0)


def _refuse_lost_store(run_dir: Path) -> None:
    """Raise ConfigError if a run's store is missing although the run has trained. A store is created before
    training."""
    store = run_dir / "store"
    traces = (path for pattern in ("resume/v*", "checkpoints/*", "summary.json") for path in run_dir.glob(pattern))
    if store.is_symlink() or any(traces):
        raise ConfigError(
            f"{store}: is missing, but the run has trained; restore or mount it, or train again under another name: "
            "staleflow run ... --set name=..."
        )


def check_header(config: RunConfig, header: RunHeader) -> None:
    """Raise ConfigError if the store was created with another staleness bound or other batch sizes than the job's."""
    job_header = actor_settings.run_header(config)
    fixed_values = (
        ("staleness.eta", job_header.eta, header.eta),
        ("batch.groups_per_step", job_header.groups_per_step, header.groups_per_step),
        ("batch.group_size", job_header.group_size, header.group_size),
        (
            "batch.group_size + batch.extra_members",
            job_header.members_started_per_group,
            header.members_started_per_group,
        ),
    )
    for key, job_value, store_value in fixed_values:
        if job_value != store_value:
            raise ConfigError(
                f"{config.run_dir}: {key} = {job_value} in config.toml, {store_value} in the store, which another job "
                "created; restore that job's config.toml"
            )


def prepare(config: RunConfig) -> Resumption:
    """Prepare a run's folder for resuming, and return the point to resume from. Undoes the steps after it. Requires the
    folder's lock. Raises as `find_resume_version` does."""
    from staleflow.stores.trajectories.versioned import VersionedStore

    run_dir, version = config.run_dir, find_resume_version(config)
    if not (run_dir / "store").exists():
        _archive_start(run_dir)
        write_job(config)
        return Resumption(version=version, num_earlier_starts=_latest_start_number(run_dir))
    try:
        # The spool contains the in-flight work that was aborted at the stop, and the resumed run continues it.
        VersionedStore.rewind(run_dir / "store", version, undo_end=(run_dir / "spool").is_dir())
        points = ResumePoints(run_dir / "resume")
        points.claim()  # before points are removed: a trainer of an earlier start may still be writing one
        points.remove_after(version)
        _rename_undone_checkpoints(run_dir, version)
        records = [r for r in VersionedStore.open(run_dir / "store").commits() if r.kind == "step"]
        _archive_start(run_dir)
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"{run_dir}: cannot be written: {error}") from error
    write_job(config)
    return Resumption(
        version=version,
        fingerprint=records[-1].weight_fingerprint if records else "",
        step_metrics=tuple(
            steps_with_tokens_per_s({"step": float(r.step), "commit_s": 0.0, **r.metrics} for r in records)
        ),
        elapsed_s=records[-1].metrics.get("elapsed_s", 0.0) if records else 0.0,
        num_earlier_starts=_latest_start_number(run_dir),
        drift_limit=records[-1].metrics.get("probe_limit", 0.0) if records else 0.0,
    )


def _rename_undone_checkpoints(run_dir: Path, version: PolicyVersion) -> None:
    """Rename the checkpoints of undone steps to step-N-undone, so that none of them counts as the run's newest."""
    for step, folder in list_checkpoints(run_dir).items():
        if step > version:
            undone = folder.with_name(f"{folder.name}-undone")
            shutil.rmtree(undone, ignore_errors=True)
            folder.rename(undone)


def _latest_start_number(run_dir: Path) -> int:
    """Return the number of the latest earlier start; 0 if there is none."""
    return max(journal.earlier_start_numbers(run_dir), default=0)


def _archive_start(run_dir: Path) -> None:
    """Rename the journal of the previous start, and copy its job file, which a replay of that start needs. Safe to
    repeat after an interruption, because the file that determines the start's number is renamed last."""
    events = run_dir / "events.jsonl"
    number = _latest_start_number(run_dir) + 1
    archived_events = run_dir / f"events.{number}.jsonl"
    if not journal.list_files(events) and not journal.list_files(archived_events):
        return
    replace_text(run_dir / f"config.{number}.toml", (run_dir / "config.toml").read_text("utf-8"), REMEDY)
    for part in journal.list_closed_parts(events).values():
        part.rename(run_dir / part.name.replace(events.name, archived_events.name, 1))
    if events.is_file():
        events.rename(archived_events)
    else:  # the run was killed after closing a part and before creating the next one
        archived_events.touch()
