"""The batch of a training step: its checks, advantages and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from staleflow.stores.errors import ConfigError, ProtocolViolation
from staleflow.stores.metrics import REWARD_PART_PREFIX
from staleflow.stores.reward_statistics import has_signal
from staleflow.stores.trajectory import EndedTrajectory, Fate, FinishReason, Trajectory
from staleflow.tasks.training.advantage import Advantage, OverlongPenalty


def check_batch(
    step: int, batch: Sequence[Trajectory], group_size: int, max_error_share: float, reward_settings: str
) -> None:
    """Raise ConfigError if the scoring of too many responses failed, ProtocolViolation if a group is incomplete
    or not in one block.

    reward_settings: the reward functions as the job file sets them, for the message.
    """
    failed_trajectories = [t for t in batch if t.error]
    if failed_trajectories and len(failed_trajectories) / len(batch) > max_error_share:
        raise ConfigError(
            f"{reward_settings}: failed on {len(failed_trajectories)} of {len(batch)} responses of step {step} (limit: "
            f"reward.max_error_share = {max_error_share:g}); first: {failed_trajectories[0].error}"
        )
    groups = [t.group for t in batch]
    if groups != [group for group in dict.fromkeys(groups) for _ in range(group_size)]:
        raise ProtocolViolation(f"step {step}: the batch does not consist of whole groups")


def rows_with_advantages(
    step: int, batch: Sequence[Trajectory], group_size: int, advantage: Advantage, overlong: OverlongPenalty
) -> list[EndedTrajectory]:
    """Compute the advantages of a batch. Returns its trajectories as they are stored, with their advantages, in the
    same order."""
    rewards, valid = _rewards(batch, group_size)
    response_lengths = np.asarray([t.num_tokens for t in batch], np.int64).reshape(-1, group_size)
    advantages = advantage.advantages(rewards - overlong.penalties(response_lengths), valid).reshape(-1)
    return [
        EndedTrajectory(trajectory=t, fate=Fate.CONSUMED, step=step, advantage=float(a), loss_mask=not t.error)
        for t, a in zip(batch, advantages, strict=True)
    ]


def _rewards(batch: Sequence[Trajectory], group_size: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Rewards by group and member, shape [G, N], and a mask of those that were scored."""
    rewards = np.asarray([t.reward for t in batch], np.float64).reshape(-1, group_size)
    valid = np.asarray([not t.error for t in batch], bool).reshape(-1, group_size)
    return rewards, valid


def batch_metrics(batch: Sequence[EndedTrajectory], group_size: int) -> dict[str, float]:
    """Metrics of a consumed batch, by name (see stores/metrics.py)."""
    rewards, valid = _rewards([e.trajectory for e in batch], group_size)
    sampled_lengths = np.asarray([e.trajectory.num_sampled for e in batch])
    turns = np.asarray([len(e.trajectory.turns) for e in batch])
    staleness = np.asarray([e.staleness for e in batch])
    part_values: dict[str, list[float]] = {}
    for row in batch:
        for name, value in row.trajectory.reward_parts.items() if row.loss_mask else ():
            part_values.setdefault(f"{REWARD_PART_PREFIX}{name}", []).append(value)
    sampling_s = np.asarray([e.trajectory.timings.sampled_s - e.trajectory.timings.routed_s for e in batch])
    return {
        "reward": float(rewards[valid].mean()) if valid.any() else 0.0,
        **{name: float(np.mean(values)) for name, values in sorted(part_values.items())},
        "reward_errors": float((~valid).sum()),
        "advantage_std": float(np.std([e.advantage for e in batch if e.loss_mask] or [0.0])),
        "groups_with_signal": float(has_signal(rewards, valid).mean()),
        "response_tokens": float(sampled_lengths.sum()),
        "response_mean": float(sampled_lengths.mean()),
        "response_max": float(sampled_lengths.max()),
        "turns_mean": float(turns.mean()),
        "turns_max": float(turns.max()),
        "branches": float(sum(len(e.trajectory.branches) for e in batch)),
        "given_tokens": float(sum(e.trajectory.num_given for e in batch)),
        "tool_s": float(np.mean([e.trajectory.environment_s for e in batch])),
        "truncated_share": float(np.mean([e.trajectory.finish is FinishReason.LENGTH for e in batch])),
        "staleness_mean": float(staleness.mean()),
        "staleness_max": float(staleness.max()),
        "sampling_s": float(sampling_s.mean()),
        "mixed_versions": float(np.mean([len({s.version for s in e.trajectory.segments}) > 1 for e in batch])),
    }
