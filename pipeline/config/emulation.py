"""The [workload] and [simulation] sections of a job: what stands for models where none are loaded."""

from __future__ import annotations

from dataclasses import dataclass

from staleflow.tasks.settings.choice_names import LATENCY_NAMES, WORKLOAD_NAMES
from staleflow.tasks.settings.knobs import knob

LONGEST_S = 100_000.0
"""Most seconds of anything that is simulated, a day: virtual time passes report by report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """Responses where no model samples them: in `staleflow simulate` and with the emulated engine."""

    kind: str = knob("lognormal", "distribution of response lengths", choices=WORKLOAD_NAMES)
    prompt_tokens: int = knob(512, "tokens per prompt", low=1)
    median: float = knob(2000.0, "median response length, tokens (power_law: shortest length)", low=1)
    sigma: float = knob(1.0, "lognormal, agentic: standard deviation of the log length", low=0, high=10)
    long_share: float = knob(0.15, "bimodal: share of long responses", low=0, high=1)
    long_ratio: float = knob(15.0, "bimodal: factor by which long responses are longer", low=1)
    exponent: float = knob(1.5, "power_law: P(length > x) is proportional to x**-exponent", above=0)
    turns: float = knob(5.0, "agentic: mean number of turns, the last one without a tool call", low=1)
    fixed_turns: bool = knob(False, "agentic: every response has that many turns; else 1 + a Poisson number")
    tool_s: float = knob(
        5.0, "agentic: seconds of a tool call; the median if lognormal, else the mean", low=0, high=LONGEST_S
    )
    tool_latency: str = knob("lognormal", "agentic: distribution of a tool call's seconds", choices=LATENCY_NAMES)
    tool_spread: float = knob(
        1.0,
        "agentic: standard deviation of a tool call's seconds if normal (none is negative), of their log if lognormal",
        low=0,
    )
    reset_s: float = knob(
        0.0, "agentic: seconds to reset an environment, added to its first step", low=0, high=LONGEST_S
    )
    tool_tokens: int = knob(200, "agentic: tokens per tool result", low=0)
    group_correlation: float = knob(
        0.0, "correlation of log lengths within a group; 1: the prompt alone determines them", low=0, high=1
    )
    acceptance_rate: float = knob(
        0.7,
        "probability that a draft token is accepted if those before it were (rollout.engine.speculation)",
        low=0,
        high=1,
    )
    signal_share: float = knob(1.0, "share of groups whose rewards are not all equal", low=0, high=1)
    run: str = knob("", "recorded: folder of a stored run whose lengths, prompts and rewards are used")
    prompts: str = knob(
        "drawn",
        "prompts and rewards of the emulated engine: drawn like the responses, or those of [task] and [reward]",
        choices=("drawn", "task"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """Durations of everything but decoding, and injected faults, in `staleflow simulate`."""

    train_s: float = knob(20.0, "seconds per training step", low=0, high=LONGEST_S)
    train_s_per_token: float = knob(
        0.0, "seconds per training step for each token of its batch, prompts included; added to train_s", low=0, high=1
    )
    fetch_prompts_s: float = knob(0.0, "seconds until requested prompts arrive", low=0, high=LONGEST_S)
    reward_s: float = knob(0.1, "seconds until a response is scored", low=0, high=LONGEST_S)
    environment_overhead_s: float = knob(0.0, "seconds of overhead per environment step", low=0, high=LONGEST_S)
    pull_s: float = knob(1.0, "seconds an instance takes to load new weights, without prefill", low=0, high=LONGEST_S)
    message_s: float = knob(
        0.0, "seconds a message between coordinator and instance takes, each way", low=0, high=LONGEST_S
    )
    report_s: float = knob(
        2.0, "seconds between reports of an instance and between ticks of the coordinator", low=0.01, high=LONGEST_S
    )
    colocated: bool = knob(False, "synchronous only: rollout and training take turns on the same GPUs")
    gpus_per_instance: int = knob(1, "GPUs per rollout instance", low=1)
    trainer_gpus: int = knob(1, "GPUs of the trainer", low=1)
    switch_s: float = knob(
        0.0, "colocated: seconds to switch between rollout and training, twice per step", low=0, high=LONGEST_S
    )
    mean_loss_interval_s: float = knob(
        0.0, "mean seconds between instance losses, over all instances; 0: none", low=0, high=1e9
    )
    replace_s: float = knob(60.0, "seconds until a lost instance is replaced", low=0, high=LONGEST_S)
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
