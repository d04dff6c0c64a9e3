"""Conversion of job files that earlier versions wrote into runs' folders and stores' headers. Pure."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from staleflow.pipeline.strategies.admission import ADMISSION
from staleflow.pipeline.strategies.filtering import FILTERING, STRAGGLERS
from staleflow.pipeline.strategies.migration import MIGRATION
from staleflow.pipeline.strategies.routing import ROUTING
from staleflow.pipeline.strategies.synchronization import SYNCHRONIZATION
from staleflow.tasks.engines.engine_settings import ENGINES
from staleflow.tasks.settings.knobs import keys_of
from staleflow.tasks.settings.registry import Registry
from staleflow.tasks.training.advantage import ADVANTAGES
from staleflow.tasks.training.loss import LOSSES

MOVED = {
    "batch.straggler_patience": "batch.stragglers.patience",
    "batch.straggler_share": "batch.stragglers.share",
    "staleness.depth": "staleness.admission.depth",
    "staleness.ahead": "staleness.admission.ahead",
    "staleness.window_share": "staleness.admission.window_share",
    "staleness.alpha": "staleness.admission.alpha",
    "staleness.excess": "staleness.admission.excess",
    "rollout.mu": "rollout.routing.mu",
    "rollout.load_threshold": "rollout.synchronization.load_threshold",
    "rollout.migration_gain": "rollout.migration.gain",
    "training.loss.aggregation": "training.aggregation",
    "training.loss.entropy_bonus": "training.entropy_bonus",
}
"""Keys that were in the table that selects an entry, and where they are now."""
RENAMED = {
    "task.environment": "task.multi_turn",
    "environment.step_s": "environment.step_timeout_s",
    "environment.tool_s": "environment.tool_timeout_s",
    "environment.episode_s": "environment.episode_timeout_s",
    "evaluation.share": "evaluation.max_slot_share",
    "evaluation.best": "evaluation.best_checkpoint_set",
    "rollout.affinity": "rollout.cache_affinity",
    "rollout.drift_limit": "rollout.logprob_drift_limit",
    "rollout.spool_s": "rollout.delivery_interval_s",
    "rollout.cost.verified": "rollout.cost.verify_share",
    "rollout.engine.speculation.length": "rollout.engine.speculation.num_speculative_tokens",
    "rollout.engine.speculation.most_running": "rollout.engine.speculation.disable_above",
    "workload.acceptance": "workload.acceptance_rate",
    "simulation.act_s": "simulation.environment_overhead_s",
    "simulation.draw_s": "simulation.fetch_prompts_s",
    "simulation.command_s": "simulation.message_s",
    "simulation.lost_every_s": "simulation.mean_loss_interval_s",
}
"""Keys that have had another name in the same table up to commit 9e20fc41, and their names now."""
REMOVED = ("rollout.pace_slack", "evaluation.fill")
"""Keys of settings that are no more."""
REPLACED = {"environment.isolation": {"thread": "auto"}}
"""Values that are no more, by key, and what takes their place."""
CHOICES: tuple[tuple[str, Registry[Any]], ...] = (
    ("batch.filtering", FILTERING),
    ("batch.stragglers", STRAGGLERS),
    ("staleness.admission", ADMISSION),
    ("rollout.routing", ROUTING),
    ("rollout.synchronization", SYNCHRONIZATION),
    ("rollout.migration", MIGRATION),
    ("rollout.engine", ENGINES),
    ("training.advantage", ADVANTAGES),
    ("training.loss", LOSSES),
)
"""Keys that select an entry of a registry."""


def convert_job(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A job as nested plain values, converted from what earlier versions wrote. Knobs of entries that the job does not
    select are dropped: they had no effect. Does not modify `tree`; one that needs no conversion is returned as it is.

    Args:
        tree: All of a job, as commit 976202a or 9e20fc41 wrote it into config.toml or a store's header.
    """
    if not is_earlier_job(tree):
        return dict(tree)
    job = _without_removed(tree)
    if _selects_by_name(tree):
        _move_knobs(job)
    for old, new in RENAMED.items():
        *tables, name = old.split(".")
        section: Any = job
        for table in tables:
            section = section.get(table) if isinstance(section, dict) else None
        if isinstance(section, dict) and name in section:
            section[new.rpartition(".")[2]] = section.pop(name)
    return job


def _move_knobs(job: dict[str, Any]) -> None:
    """Move the knobs of a job that selects registry entries by name alone into the tables of those entries."""
    options = {"rollout.routing": job["rollout"].pop("routing_options", {})}
    for key, _ in CHOICES:
        table, _, field = key.rpartition(".")
        name = _table(job, table).get(field, {})
        _table(job, table)[field] = {"name": name} if isinstance(name, str) else name
    for old, new in MOVED.items():
        table, _, name = old.rpartition(".")
        if name in (values := _table(job, table)):
            place, _, renamed = new.rpartition(".")
            _table(job, place)[renamed] = values.pop(name)
    for key, registry in CHOICES:
        _keep_own_knobs(_table(job, key), registry, options.get(key))


def _without_removed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A stored job without settings that this version no longer has. Does not modify `tree`."""
    job = copy.deepcopy(dict(tree))
    for key in REMOVED:
        table, _, field = key.rpartition(".")
        if isinstance(values := job.get(table), dict):
            values.pop(field, None)
    for key, values in REPLACED.items():
        table, _, field = key.rpartition(".")
        if isinstance(section := job.get(table), dict) and isinstance(value := section.get(field), str):
            section[field] = values.get(value, value)
    return job


def _keep_own_knobs(entry: dict[str, Any], registry: Registry[Any], options: Mapping[str, Any] | None) -> None:
    """Remove the knobs of other entries from a table. options: knobs of user code; by default in its `options`."""
    name = entry.get("name", "")
    if name in registry:
        kept = {knob: entry[knob] for knob in keys_of(registry.find(name)) if knob in entry}
    else:
        kept = dict(entry.get("options", {}) if options is None else options)
    entry.clear()
    entry.update({"name": name} | kept if name else kept)


def is_earlier_job(tree: Mapping[str, Any]) -> bool:
    """Whether all of a job was written by an earlier version: it has keys that moved, were renamed or are no more."""
    return _selects_by_name(tree) or any(_has(tree, key) for key in (*RENAMED, *REMOVED))


def _has(tree: Any, key: str) -> bool:
    """Whether an unchecked tree has a dotted key."""
    for name in key.split("."):
        if not isinstance(tree, Mapping) or name not in tree:
            return False
        tree = tree[name]
    return True


def _selects_by_name(tree: Mapping[str, Any]) -> bool:
    """Whether commit 976202a wrote a job: its routing rule is a name, not a table."""
    rollout = tree.get("rollout")
    return isinstance(rollout, Mapping) and isinstance(rollout.get("routing"), str)


def _table(job: dict[str, Any], key: str) -> dict[str, Any]:
    """The table at a dotted key of a job, which is created if it is not there."""
    for name in key.split("."):
        job = job.setdefault(name, {})
    return job
