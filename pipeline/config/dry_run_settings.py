"""The settings of a job's dry run: a few small steps with random responses and without training."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from staleflow.pipeline.config.model_files import find_model
from staleflow.pipeline.config.schema import RunConfig
from staleflow.tasks.engines.engine_settings import EmulatedSettings

STEPS, GROUPS, WORKERS = 3, 8, 2
"""Most training steps, groups per step, and rollout instances or reward workers of a dry run."""
RESPONSE_S = 0.5
"""Seconds the longest response should take."""
TOKEN_S = 0.012
"""Seconds a token takes by the default cost model."""
MAX_SCALE = 100.0
"""Largest factor by which a dry run's time is shortened; beyond it, its own messages would count as slow."""


def dry_run(config: RunConfig, runs_dir: Path) -> RunConfig:
    """Build the dry run of a job, in another folder for runs. Prompts, template, tokenizer, reward, strategies and
    store are the job's; engine and trainer are emulated, on this machine. Raises ConfigError if the model is not
    found."""
    rollout, batch, max_new_tokens = config.rollout, config.batch, config.rollout.max_new_tokens
    folder = find_model(config.model.path) if config.model.path else None
    scale = min(max(max_new_tokens * TOKEN_S / RESPONSE_S, 1.0), MAX_SCALE)
    engine = EmulatedSettings.like(rollout.engine, time_scale=scale)
    groups = min(batch.groups_per_step, GROUPS)
    return dataclasses.replace(
        config,
        runs_dir=str(runs_dir),
        steps=min(config.steps, STEPS),
        model=dataclasses.replace(config.model, path=str(folder or config.model.path), device="cpu"),
        batch=dataclasses.replace(batch, groups_per_step=groups, extra_groups=min(batch.extra_groups, groups)),
        rollout=dataclasses.replace(
            rollout, engine=engine, instances=min(rollout.instances, WORKERS), logprob_drift_limit=1e9
        ),
        training=dataclasses.replace(
            config.training, minibatches=min(config.training.minibatches, groups * batch.group_size)
        ),
        # Random answers may fail more often than a model's: failures are counted, and the first is shown.
        reward=dataclasses.replace(config.reward, workers=min(config.reward.workers, WORKERS), max_error_share=1.0),
        cluster=dataclasses.replace(config.cluster, kind="local", address="", scheduler_file="", dashboard=False),
        tracking=dataclasses.replace(config.tracking, tracker="", tensorboard=False),
        workload=dataclasses.replace(
            config.workload, kind="lognormal", median=max(1.0, max_new_tokens / 4), prompts="task"
        ),
        simulation=dataclasses.replace(config.simulation, train_s=1.0, train_s_per_token=0.0, pull_s=0.1),
    )
