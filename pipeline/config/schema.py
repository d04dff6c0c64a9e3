"""The job file: one frozen tree, read from TOML, checked once. Below this module nothing re-checks it.

Every knob carries its meaning, unit and range, which is also what `staleflow config explain` prints. Those of a
strategy, a loss or an engine are declared with it; the table that chooses one is `composed` of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pipeline.config.fields import Explained, explained
from pipeline.strategies.admission import ADMISSION
from pipeline.strategies.filtering import FILTERING, STRAGGLERS
from pipeline.strategies.migration import MIGRATION
from pipeline.strategies.routing import ROUTING
from pipeline.strategies.synchronization import SYNCHRONIZATION
from tasks.engines.settings import ENGINES, SAMPLING_REFUSED
from tasks.knobs import knob
from tasks.names import WORKLOAD_NAMES
from tasks.registry import choice, composed
from tasks.training.settings import TrainingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The policy."""

    path: str = knob("", "folder of a Hugging Face causal LM with its tokenizer, or a hub name")
    dtype: str = knob("float32", "weights in the trainer and the engines", choices=("float32", "bfloat16"))
    device: str = knob("auto", "where models run; auto takes CUDA when there is one", choices=("auto", "cpu", "cuda"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """Where prompts come from."""

    source: str = knob(
        "reasoning_gym:chain_sum",
        "reasoning_gym:DATASET, jsonl:FILE with prompt and answer fields, or your own, path/to/file.py:NAME",
    )
    options: dict[str, Any] = knob({}, "passed to the reasoning-gym dataset, such as min_terms")
    template: str = knob("{prompt}", "text put around each prompt; must contain {prompt}")
    chat: bool = knob(False, "wrap the prompt in the tokenizer's chat template, as a user turn")
    answer_pattern: str = knob(
        "", "regular expression whose first group is the answer within a response; empty: all of it"
    )
    eval_prompts: int = knob(200, "held-out prompts evaluated before and after, each once; 0 for none", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """How responses are scored."""

    function: str = knob("task", "task (the source's own verifier), math_verify, path/to/file.py:name, or module:name")
    workers: int = knob(1, "reward workers", low=1, high=1024)
    timeout_s: float = knob(
        10.0, "seconds one scoring may take; then its process is killed and an error recorded", above=0
    )
    max_error_share: float = knob(
        0.5, "share of a batch that may fail to be scored before the run stops", low=0, high=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
@composed
class BatchConfig:
    """What one training step consumes."""

    groups_per_step: int = knob(16, "prompts a step", low=1)
    group_size: int = knob(8, "trajectories a prompt that an advantage is taken over", low=1)
    extra_groups: int = knob(0, "redundancy: groups a step started beyond groups_per_step", low=0)
    extra_members: int = knob(0, "redundancy: trajectories a group started beyond group_size", low=0)
    filtering: str = choice(FILTERING, "keep_all", "no_signal drops and replaces groups of equal rewards")
    stragglers: str = choice(
        STRAGGLERS,
        "wait",
        "the last unfinished groups of a step that is stuck: wait, retry on the fastest instance, truncate",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
@composed
class StalenessConfig:
    """The promise."""

    eta: int = knob(
        1, "bound: a trajectory is trained at most this many versions after its oldest token", low=0, high=1000
    )
    admission: str = choice(
        ADMISSION,
        "staleflow",
        "who may start: by reservation, or as another system does; backlog keeps no bound, the store says so",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
@composed
class EngineConfig:
    """What samples."""

    name: str = choice(ENGINES, "transformers", "the engine", knobs_after="max_batch_tokens")
    max_running: int = knob(64, "trajectories an instance decodes at once", low=1)
    kv_tokens: int = knob(16384, "KV cache of an instance, tokens", low=64)
    page_tokens: int = knob(32, "tokens a cache page", low=4)
    max_batch_tokens: int = knob(1024, "tokens one forward pass may hold (prefill and decode together)", low=1)
    time_scale: float = knob(1.0, "emulated: seconds of the cost model that pass in one second", above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostConfig:
    """Decode-step cost: k1 * kv + max(k2, b + k3 * n) + k4 seconds; see tasks/engines/cost_model.py.

    Defaults: a published fit of a 7B model; `staleflow profile` measures yours."""

    k1: float = knob(3.35e-08, "seconds a KV token", low=0)
    k2: float = knob(0.0064, "floor of reading the weights, seconds", low=0)
    k3: float = knob(0.0001231, "seconds a running trajectory", low=0)
    k4: float = knob(0.0028, "seconds every step", low=0)
    b: float = knob(0.0027, "offset of the compute-bound part, seconds", low=0)
    prefill: float = knob(0.0001231, "seconds a token of a prompt, or of a context that is computed again", low=0)
    tolerance: float = knob(
        0.25, "difference from measured steps beyond which a run says that the model drifted", above=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
@composed
class RolloutConfig:
    """Sampling."""

    REFUSED: ClassVar[Mapping[str, str]] = SAMPLING_REFUSED

    instances: int = knob(1, "rollout instances, one Dask worker each", low=1, high=4096)
    max_new_tokens: int = knob(64, "tokens a response may have", low=1)
    temperature: float = knob(
        1.0, "sampling temperature; the trainer recomputes logprobs at the same one", above=0, high=10
    )
    routing: str = choice(ROUTING, "least_requests", "which instance gets a trajectory")
    routing_options: dict[str, Any] = knob({}, "knobs of a routing rule from a file", shown=False)
    synchronization: str = choice(SYNCHRONIZATION, "greedy", "when an instance pulls weights", knobs_after="on_pull")
    on_pull: str = knob(
        "interrupt",
        "what runs while new weights are pulled: interrupt computes its cache again, keep goes on with the old one",
        choices=("interrupt", "keep"),
    )
    pace_slack: float = knob(1.0, "deadline: by how much the plan's seconds may be exceeded", above=0)
    migration: str = choice(MIGRATION, "none", "moving single running trajectories to lighter instances")
    drift_limit: float = knob(
        0.0,
        "nats that an instance's logprobs of a probe may differ from the trainer's before it is named; 0: by dtype",
        low=0,
    )
    max_attempts: int = knob(3, "engine failures or lost instances a trajectory survives", low=0)
    engine: EngineConfig = EngineConfig()
    cost: CostConfig = CostConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Where it runs."""

    kind: str = knob(
        "local", "local processes, a scheduler's address, or a scheduler file", choices=("local", "address", "file")
    )
    address: str = knob("", "of the scheduler, for kind = address, such as tcp://host:8786")
    scheduler_file: str = knob("", "path of the scheduler file, for kind = file")
    threads: int = knob(1, "torch threads a process; more on shared cores makes them spin", low=1, high=1024)
    dashboard: bool = knob(True, "serve the Dask dashboard and its staleflow page (kind = local)")
    shared_memory: str = knob("/dev/shm", "folder in memory that weights are published in, one per host")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineConfig:
    """How long to wait before something counts as lost or stuck."""

    start_s: float = knob(180.0, "for all actors to be ready", above=0)
    call_s: float = knob(60.0, "for an actor to answer a short call; then the instance counts as lost", above=0)
    sample_s: float = knob(
        120.0, "that an instance with work may sample nothing; then its engine hangs, and it is replaced", above=0
    )
    train_s: float = knob(3600.0, "for one training step", above=0)
    stuck_s: float = knob(300.0, "without any progress before the run stops and says what it waits for", above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingConfig:
    """Where metrics go besides the store."""

    tensorboard: bool = knob(True, "write TensorBoard event files into the run's folder")
    tracker: str = knob("", "a class of your own, path/to/file.py:Name or module:Name; see pipeline/jobs/tracking.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """What responses look like where no model samples them: in `staleflow simulate`, and with the emulated engine."""

    kind: str = knob("lognormal", "how response lengths are distributed", choices=WORKLOAD_NAMES)
    prompt_tokens: int = knob(512, "tokens of a prompt", low=1)
    median: float = knob(2000.0, "median response length, tokens (power_law: the shortest)", low=1)
    sigma: float = knob(1.0, "lognormal, agentic: standard deviation of the log length", low=0, high=10)
    long_share: float = knob(0.15, "bimodal: share of long responses", low=0, high=1)
    long_ratio: float = knob(15.0, "bimodal: how much longer they are", low=1)
    exponent: float = knob(1.5, "power_law: P(length > x) falls as x to the minus this", above=0)
    turns: float = knob(5.0, "agentic: mean number of turns, the last without a tool", low=1)
    tool_s: float = knob(5.0, "agentic: median seconds a tool takes (lognormal, sigma 1)", low=0)
    tool_tokens: int = knob(200, "agentic: tokens a tool answers with", low=0)
    group_correlation: float = knob(
        0.0, "correlation of log lengths within a group: how much a prompt decides of them", low=0, high=1
    )
    signal_share: float = knob(1.0, "share of groups whose rewards are not all equal", low=0, high=1)
    run: str = knob("", "recorded: folder of a stored run, whose lengths, prompts and rewards are taken")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """Seconds of everything that is not decoding, and what may go wrong, in `staleflow simulate`."""

    train_s: float = knob(20.0, "seconds a training step takes", low=0)
    train_s_per_token: float = knob(0.0, "and for each token of its batch, prompts included", low=0)
    draw_s: float = knob(0.0, "seconds until prompts that were asked for are there", low=0)
    reward_s: float = knob(0.1, "seconds until a response is scored", low=0)
    pull_s: float = knob(1.0, "seconds an instance takes to load new weights, prefill not counted", low=0)
    command_s: float = knob(0.0, "seconds a command takes to reach an instance, and an answer to come back", low=0)
    report_s: float = knob(2.0, "seconds between reports of an instance, and between ticks", low=0.01)
    colocated: bool = knob(
        False, "synchronous only: rollout and training take turns on all GPUs instead of having their own"
    )
    gpus_per_instance: int = knob(1, "GPUs of a rollout instance", low=1)
    trainer_gpus: int = knob(1, "GPUs of the trainer", low=1)
    switch_s: float = knob(0.0, "colocated: seconds to change between rollout and training, twice a step", low=0)
    lost_every_s: float = knob(0.0, "mean seconds between losses of an instance somewhere; 0 for none", low=0)
    replace_s: float = knob(60.0, "seconds until a lost instance is replaced", low=0)
    straggler_share: float = knob(0.0, "share of the instances that are slow", low=0, high=1)
    straggler_factor: float = knob(3.0, "how much slower they decode", low=1)
    slow_pull_share: float = knob(0.0, "share of pulls that are slow", low=0, high=1)
    slow_pull_factor: float = knob(10.0, "how much longer these take", low=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One job."""

    name: str = knob("run", "name of the run's folder")
    runs_dir: str = knob("runs", "where run folders are made")
    seed: int = knob(0, "of prompts, sampling and minibatch order", low=0, high=2**31)
    steps: int = knob(10, "training steps", low=1)
    profile: str = knob(
        "",
        "file that `staleflow profile` wrote: its numbers take the place of rollout.cost's, a run's also simulation's",
    )
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    reward: RewardConfig = RewardConfig()
    batch: BatchConfig = BatchConfig()
    staleness: StalenessConfig = StalenessConfig()
    rollout: RolloutConfig = RolloutConfig()
    training: TrainingConfig = TrainingConfig()
    cluster: ClusterConfig = ClusterConfig()
    deadlines: DeadlineConfig = DeadlineConfig()
    tracking: TrackingConfig = TrackingConfig()
    workload: WorkloadConfig = WorkloadConfig()
    simulation: SimulationConfig = SimulationConfig()

    @property
    def run_dir(self) -> Path:
        return Path(self.runs_dir) / self.name

    @property
    def trajectories_per_step(self) -> int:
        """groups_per_step x group_size."""
        return self.batch.groups_per_step * self.batch.group_size

    @property
    def groups_started(self) -> int:
        return self.batch.groups_per_step + self.batch.extra_groups

    @property
    def emulated(self) -> bool:
        """Whether no model is involved: responses are drawn, and only their seconds pass."""
        return self.rollout.engine.name == "emulated"

    @property
    def time_scale(self) -> float:
        """Seconds that pass for the coordinator in one second of the clock; 1 but for an emulated engine."""
        return self.rollout.engine.time_scale if self.emulated else 1.0

    @property
    def bound(self) -> int:
        """eta; with admission backlog, which keeps no bound, all steps."""
        return self.steps if self.staleness.admission == "backlog" else self.staleness.eta

    @property
    def drift_limit(self) -> float:
        """rollout.drift_limit; by default what rounding in model.dtype explains, and some."""
        return self.rollout.drift_limit or (1e-3 if self.model.dtype == "float32" else 1.0)

    @property
    def weighs_costs(self) -> bool:
        """Whether one of its strategies goes by the cost model."""
        rollout = self.rollout
        chosen = ((r, getattr(rollout, r.field)) for r in (ROUTING, SYNCHRONIZATION, MIGRATION))
        return any(registry.wants(name, "cost") for registry, name in chosen)

    @property
    def members_started(self) -> int:
        return self.batch.group_size + self.batch.extra_members

    @property
    def max_response_tokens_per_step(self) -> int:
        """trajectories_per_step x max_new_tokens."""
        return self.trajectories_per_step * self.rollout.max_new_tokens

    @property
    def max_trajectories_in_flight(self) -> int:
        """(eta + 1) x groups started a step x members started a group."""
        return (self.staleness.eta + 1) * self.groups_started * self.members_started

    @property
    def concurrency(self) -> int:
        """Trajectories all instances together decode at once."""
        return self.rollout.instances * self.rollout.engine.max_running


DERIVED = (
    "trajectories_per_step",
    "groups_started",
    "members_started",
    "bound",
    "max_response_tokens_per_step",
    "max_trajectories_in_flight",
    "concurrency",
)


def explain(config: RunConfig) -> list[Explained]:
    """Every value with its meaning and limits, then the derived numbers."""
    rows = explained(config)
    for name in DERIVED:
        doc = (getattr(RunConfig, name).__doc__ or "").strip() or f"{name.replace('_', ' ')}"
        rows.append(Explained(key=name, value=getattr(config, name), default="", limits="derived", doc=doc))
    return rows
