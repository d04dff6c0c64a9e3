"""Conversion of job files that commit 9e20fc41 wrote into runs' folders. Pure."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

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
    "rollout.cost.tolerance": "rollout.cost_tolerance",
    "rollout.cost.verified": "rollout.cost.verify_share",
    "rollout.engine.speculation.length": "rollout.engine.speculation.num_speculative_tokens",
    "rollout.engine.speculation.most_running": "rollout.engine.speculation.disable_above",
    "workload.acceptance": "workload.acceptance_rate",
    "simulation.act_s": "simulation.environment_overhead_s",
    "simulation.draw_s": "simulation.fetch_prompts_s",
    "simulation.command_s": "simulation.message_s",
    "simulation.lost_every_s": "simulation.mean_loss_interval_s",
}
"""Keys that had another name up to that commit, and their names now."""
REMOVED = (
    "rollout.pace_slack", "evaluation.fill", "staleness.depth", "staleness.ahead", "staleness.window_share",
    "staleness.alpha", "staleness.excess",
)  # fmt: skip
"""Keys of settings that are no more."""
REPLACED = {"environment.isolation": {"thread": "auto"}}
"""Values that are no more, by key, and what takes their place."""


def convert_job(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A job as nested plain values, under the keys of this version. Does not modify `tree`; one that needs no
    conversion comes back equal.

    >>> convert_job({"rollout": {"pace_slack": 1.0, "cost": {"tolerance": 0.5}}})
    {'rollout': {'cost': {}, 'cost_tolerance': 0.5}}
    """
    job = copy.deepcopy(dict(tree))
    for old, new in RENAMED.items():
        (before, name), (after, renamed) = _table_of(job, old), _table_of(job, new)
        if name in before:
            after[renamed] = before.pop(name)
    for key in REMOVED:
        table, name = _table_of(job, key)
        table.pop(name, None)
    for key, replacements in REPLACED.items():
        table, name = _table_of(job, key)
        if isinstance(value := table.get(name), str):
            table[name] = replacements.get(value, value)
    return job


def is_earlier_job(tree: Mapping[str, Any]) -> bool:
    """Whether all of a job was written by that commit: it has keys that were renamed or are no more."""
    return any(name in table for table, name in (_table_of(tree, key) for key in (*RENAMED, *REMOVED)))


def _table_of(tree: Any, key: str) -> tuple[dict[str, Any], str]:
    """(table, name) of a dotted key in an unchecked tree; the table is an empty one if there is none."""
    *tables, name = key.split(".")
    for table in tables:
        tree = tree.get(table) if isinstance(tree, Mapping) else None
    return tree if isinstance(tree, dict) else {}, name


def admission_of(tree: Mapping[str, Any]) -> str:
    """The name of the admission rule of an unchecked job; empty if it has none."""
    staleness = tree.get("staleness")
    rule = staleness.get("admission") if isinstance(staleness, Mapping) else None
    name = rule.get("name") if isinstance(rule, Mapping) else rule
    return name if isinstance(name, str) else ""
