"""Going on with a stored run: from which version, and what has to be made ready in its folder.

A run is resumed from its newest resume point that the store has reached. Steps that were committed after it are undone
(they stay readable on a branch), and what was in flight is lost; everything else is as it was.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import fields, loading
from pipeline.config.schema import RunConfig
from stores.errors import ConfigError, StoreError
from stores.resume_points import ResumePoints
from stores.trajectory import PolicyVersion

MAY_CHANGE = (
    "steps",
    "rollout.instances",
    "cluster.",
    "deadlines.",
    "training.checkpoint_every",
    "training.resume_every",
)
"""What `staleflow resume --set` may change: where and how long it runs, not what it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """Where a run goes on. fingerprint: of the weights of `version`, as its step recorded it; empty for the base
    model. steps: metrics of the steps before. elapsed_s: seconds the run took up to there. life: how often it was
    started before, as far as anything came of it."""

    version: PolicyVersion
    fingerprint: str = ""
    steps: tuple[dict[str, float], ...] = ()
    elapsed_s: float = 0.0
    life: int = 0


def load(run_dir: Path, overrides: tuple[str, ...] = ()) -> RunConfig:
    """The job that a run folder holds, with overrides that do not change what it is. Raises ConfigError."""
    if not (run_dir / "config.toml").is_file():
        raise ConfigError(f"{run_dir}: no run here; `staleflow store ls` lists the runs there are")
    for override in overrides:
        key = override.partition("=")[0]
        if not key.startswith(MAY_CHANGE):
            raise ConfigError(
                f"--set {override}: a run keeps what it was started with; these can change: {', '.join(MAY_CHANGE)}"
            )
    return loading.load(run_dir / "config.toml", overrides)


def reached(config: RunConfig) -> PolicyVersion:
    """The version a run can go on from: of its newest whole resume point that the store has reached, 0 for one that has
    stored nothing. Raises ConfigError if there is none, or nothing left to do: a run that was killed after its last
    step still has its evaluation before it."""
    from stores.versioned import VersionedStore

    run_dir = config.run_dir
    if not (run_dir / "store").is_dir():
        return PolicyVersion(0)
    store = VersionedStore.open(run_dir / "store")
    records = store.steps()
    trained = sum(r.kind == "step" for r in records)
    if trained > config.steps or (trained == config.steps and records[-1].kind == "end"):
        raise ConfigError(f"{run_dir}: all {trained} steps are trained; --set steps=N with a larger N trains further")
    points = [v for v in ResumePoints(run_dir / "resume").whole() if v <= trained]
    if trained and not points:
        raise ConfigError(
            f"{run_dir}: {trained} steps are stored and no whole resume point; training.resume_every was "
            f"{config.training.resume_every}"
        )
    return points[-1] if points else PolicyVersion(0)


def prepare(config: RunConfig) -> Resumption:
    """Make a run's folder ready to be gone on with, and say where. Undoes steps that no resume point has reached. Only
    while nothing else runs there. Raises as `reached` does."""
    from stores.versioned import VersionedStore

    run_dir, version = config.run_dir, reached(config)
    if not (run_dir / "store").is_dir():
        return Resumption(version=version, life=_last_number(run_dir))
    try:
        VersionedStore.rewind(run_dir / "store", version)
        records = [r for r in VersionedStore.open(run_dir / "store").steps() if r.kind == "step"]
        _set_aside(run_dir)
        part = run_dir / ".config.part"
        part.write_text(fields.to_toml(config))
        part.rename(run_dir / "config.toml")  # a kill in between must not leave half a job
    except OSError as error:
        raise StoreError(f"{run_dir}: cannot be written: {error}") from error
    return Resumption(
        version=version,
        fingerprint=records[-1].weight_fingerprint if records else "",
        steps=tuple({"step": float(r.step), "commit_s": 0.0, **r.metrics} for r in records),
        elapsed_s=records[-1].metrics.get("elapsed_s", 0.0) if records else 0.0,
        life=_last_number(run_dir),
    )


def parts(run_dir: Path) -> list[tuple[Path, Path]]:
    """(job file, recorded events) of each time the run was started, oldest first."""
    numbered = [(run_dir / f"config.{number}.toml", run_dir / f"events.{number}.jsonl") for number in _numbers(run_dir)]
    return [*numbered, (run_dir / "config.toml", run_dir / "events.jsonl")]


def _numbers(run_dir: Path) -> list[int]:
    return sorted(int(p.name.split(".")[1]) for p in run_dir.glob("events.*.jsonl"))


def _last_number(run_dir: Path) -> int:
    """Of the parts that are set aside; 0 if there is none."""
    return max(_numbers(run_dir), default=0)


def _set_aside(run_dir: Path) -> None:
    """Keep the job file and the events of the time before: each part is replayed with its own."""
    if (run_dir / "events.jsonl").is_file():
        number = _last_number(run_dir) + 1
        shutil.copyfile(run_dir / "config.toml", run_dir / f"config.{number}.toml")
        (run_dir / "events.jsonl").rename(run_dir / f"events.{number}.jsonl")
