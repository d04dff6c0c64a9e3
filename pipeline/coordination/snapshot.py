"""What people and displays may see of the coordinator: an immutable picture of one moment. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.coordination.forecast import ForecastError
from stores.staleness import BufferView
from stores.trajectory import InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceView:
    """One rollout instance, as the coordinator believes it is."""

    instance: InstanceId
    version: int
    pulling: bool
    num_running: int
    max_running: int
    kv_tokens: int
    kv_capacity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The run at one moment. Staleness is split because its halves have different cures: what is still being sampled
    ages with slow instances, what is finished ages while it waits for the trainer."""

    version: int
    next_step: int
    training: bool
    num_queued: int
    num_running: int
    num_scoring: int
    num_started: int
    num_live: int
    ended: dict[str, int]
    """Trajectories by "fate" or "fate:reason"."""
    staleness_in_flight: float
    """Mean of published version - v_traj over groups being sampled or scored; 0 if none."""
    staleness_in_queue: float
    """The same over finished groups that wait for the trainer."""
    buffers: tuple[BufferView, ...]
    instances: tuple[InstanceView, ...]
    refusals: dict[str, int]
    """How often routing declined, by reason."""
    forecast: ForecastError
    """How well response lengths were foreseen."""
