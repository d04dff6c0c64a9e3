"""Timing a job's engine alone, in this process, for the cost model of strategies and simulations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from staleflow.pipeline.config import actor_settings
from staleflow.pipeline.config.model_facts import inspect_model
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.profiling import engine_profile as profiling
from staleflow.pipeline.profiling.draft_profile import measure_drafted
from staleflow.pipeline.profiling.fit import fit_verify_share
from staleflow.stores.trajectory import InstanceId
from staleflow.tasks.engines.engine_builder import build_engine


def measure_engine(
    config: RunConfig, steps: int, max_running: int | None, progress: Callable[[str], None]
) -> profiling.Profile:
    """Build a job's engine in this process and time its decode steps.

    Args:
        config: The job.
        steps: Decode steps timed per batch.
        max_running: Requests in the largest batch; None: `rollout.engine.max_running`.
        progress: Receives a line for each batch.
    """
    facts = inspect_model(config)
    rollout = config.rollout
    longest_context = min(rollout.engine.kv_tokens, facts.context) - steps - 16
    max_batch = min(max_running or rollout.engine.max_running, rollout.engine.max_running)
    drafts = rollout.engine.speculation.num_speculative_tokens
    # No id ends a response: a batch must stay complete while it is timed.
    settings = actor_settings.engine_settings(without_drafts(config), 0, ())
    engine = build_engine(settings, InstanceId("profile"), config.cluster.threads)
    try:
        grid = profiling.make_grid(max_batch, max(8, min(longest_context, 4 * rollout.max_new_tokens)), steps)
        fit, points = profiling.profile_engine(engine, grid, rollout.engine.kv_tokens, progress)
        drafted = measure_drafted(engine, grid, drafts, rollout.engine.kv_tokens, progress) if drafts else []
    finally:
        engine.close()
    if drafted:
        verified, _ = fit_verify_share(fit.model, drafted)
        fit = replace(fit, model=replace(fit.model, verify_share=verified))
    return profiling.Profile(
        source=rollout.engine.name,
        fit=fit,
        hardware=profiling.hardware(),
        points=tuple(points),
        drafted=tuple(drafted),
    )


def without_drafts(config: RunConfig) -> RunConfig:
    """The job with an engine that drafts nothing of its own accord, if it drafts at all."""
    engine = config.rollout.engine
    engine = replace(engine, speculation=replace(engine.speculation, disable_above=0))
    return replace(config, rollout=replace(config.rollout, engine=engine))
