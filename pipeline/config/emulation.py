"""The [simulation] table of a job file: durations and faults of simulated and emulated processes."""

from __future__ import annotations

from dataclasses import dataclass

from staleflow.tasks.emulation.workload import MAX_SECONDS
from staleflow.tasks.settings.knobs import knob


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """Durations of everything except decoding, and injected faults, in `staleflow simulate` and emulated runs."""

    train_s: float = knob(20.0, "seconds per training step", low=0, high=MAX_SECONDS)
    train_s_per_token: float = knob(
        0.0, "seconds per training step for each token of its batch, prompts included; added to train_s", low=0, high=1
    )
    fetch_prompts_s: float = knob(0.0, "seconds until requested prompts arrive", low=0, high=MAX_SECONDS)
    reward_s: float = knob(0.1, "seconds until a response is scored", low=0, high=MAX_SECONDS)
    environment_overhead_s: float = knob(0.0, "seconds of overhead per environment step", low=0, high=MAX_SECONDS)
    pull_s: float = knob(1.0, "seconds an instance takes to load new weights, without prefill", low=0, high=MAX_SECONDS)
    message_s: float = knob(
        0.0, "seconds a message between coordinator and instance takes, each way", low=0, high=MAX_SECONDS
    )
    report_s: float = knob(
        2.0, "seconds between reports of an instance and between ticks of the coordinator", low=0.01, high=MAX_SECONDS
    )
    switch_s: float = knob(
        0.0, 'cluster.layout = "turns": seconds for one side to leave the GPUs', low=0, high=MAX_SECONDS
    )
    mean_loss_interval_s: float = knob(
        0.0, "mean seconds between instance losses, over all instances; 0: none", low=0, high=1e9
    )
    replace_s: float = knob(60.0, "seconds until a lost instance is replaced", low=0, high=MAX_SECONDS)
    straggler_share: float = knob(0.0, "share of the instances that are slow", low=0, high=1)
    straggler_factor: float = knob(3.0, "factor by which slow instances decode slower", low=1, high=1000)
    failed_step_share: float = knob(0.0, "share of the environments' steps that fail", low=0, high=1)
    hung_step_share: float = knob(0.0, "share of the environments' steps that never return", low=0, high=1)
    lock_step: bool = knob(
        False,
        "no environment-level asynchrony: an environment's step counts once those of all of the batch have returned",
    )
    slow_pull_share: float = knob(0.0, "share of pulls that are slow", low=0, high=1)
    slow_pull_factor: float = knob(10.0, "factor by which slow pulls take longer", low=1, high=1000)
