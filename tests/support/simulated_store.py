"""A run folder with config, journal, store and summary, created from a simulation within a second."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from staleflow.pipeline.config import actor_settings, knob_tree, loading
from staleflow.pipeline.coordination.commands import Command, Discard, Train
from staleflow.pipeline.coordination.events import Event, TrajectoryInterrupted, TrajectorySampled, TrajectoryScored
from staleflow.pipeline.coordination.journal import Journal
from staleflow.pipeline.simulator.simulated_run import SimulatedRun
from staleflow.stores.trajectories.records import CommitRecord, LedgerState
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import (
    EndedTrajectory,
    Fate,
    FinishReason,
    GroupId,
    PolicyVersion,
    Trajectory,
    TrajectoryId,
)
from tests.support.segments import sampled_segment

JOB = Path("examples/dryrun.toml")


def stored_simulation(folder: Path, *overrides: str) -> Path:
    """Simulate examples/dryrun.toml with overrides and store it as a run of that name in `folder`."""
    config = loading.load(JOB, (f"runs_dir={folder}", *overrides))
    run_dir = config.run_dir
    run_dir.mkdir(parents=True)
    (run_dir / "config.toml").write_text(knob_tree.to_toml(config))
    store = VersionedStore.create(run_dir / "store", actor_settings.run_header(config))
    workload = actor_settings.make_workload(config)
    book = Journal(run_dir / "events.jsonl")
    tokens: dict[int, int] = {}
    rewards: dict[int, float] = {}
    waiting: list[EndedTrajectory] = []

    def ended(trajectory: int, version: int, **more: Any) -> EndedTrajectory:
        count = tokens.get(trajectory, 0)
        sampled = sampled_segment(np.full(count, 5, np.int32), version=max(0, version), instance="rollout-0")
        group = GroupId(trajectory // config.members_started_per_group)
        made = Trajectory(
            id=TrajectoryId(trajectory), group=group, prompt_tokens=np.full(workload.prompt_tokens(group), 3, np.int32),
            v_traj=PolicyVersion(version), finish=FinishReason.STOP, reward=rewards.get(trajectory, 0.0),
            spans=(sampled,) if count else (),
        )  # fmt: skip
        return EndedTrajectory(trajectory=made, **more)

    def commit(record: CommitRecord) -> None:
        store.commit(record, waiting)
        waiting.clear()

    def observe(now: float, event: Event, commands: list[Command]) -> None:
        book.append(now, event, commands)
        if isinstance(event, TrajectorySampled | TrajectoryInterrupted):
            tokens[event.trajectory] = event.tokens
        if isinstance(event, TrajectoryScored):
            rewards[event.trajectory] = event.reward
        for command in commands:
            if isinstance(command, Discard):
                waiting.extend(
                    ended(e.trajectory, v, fate=e.fate, reason=e.reason, step=e.step, loss_mask=False)
                    for e, v in zip(command.endings, command.versions, strict=True)
                )
            if isinstance(command, Train):
                batch = zip(command.trajectories, command.versions, strict=True)
                waiting[:0] = [ended(t, v, fate=Fate.CONSUMED, step=command.step) for t, v in batch]
                commit(_record("step", command.step))

    trace = SimulatedRun(config, workload, observe=observe).run()
    commit(_record("end", config.steps))
    book.close()
    summary = {
        "steps": len(trace.steps), "seconds": {"wall_s": trace.finished_s}, "staleness_histogram": {},
    }  # fmt: skip
    (run_dir / "summary.json").write_text(json.dumps(summary))
    return run_dir


def _record(kind: str, step: int) -> CommitRecord:
    ledger = LedgerState(num_started=0, num_ended={}, live=(), next_step=step, version=step)
    return dataclasses.replace(CommitRecord(kind=kind, step=step, ledger=ledger), metrics={})
