"""The job file: one frozen tree, read from TOML and checked once. Code that receives it does not check it again.

Every knob carries its meaning, unit and range, which `staleflow config explain` prints. A strategy, a loss or an engine
is an object with the knobs of its own class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

from staleflow.pipeline.config.evaluation_settings import HELD_OUT, EvaluationConfig
from staleflow.pipeline.config.knob_tree import ExplainedValue, explain_values
from staleflow.pipeline.config.task_tables import MixedTaskConfig, SampledTaskConfig, TaskTableConfig
from staleflow.pipeline.strategies.admission import ADMISSION, Admission
from staleflow.pipeline.strategies.filtering import FILTERING, STRAGGLERS, Filtering, StragglerRule
from staleflow.pipeline.strategies.migration import MIGRATION, Migration
from staleflow.pipeline.strategies.routing import ROUTING, Routing
from staleflow.pipeline.strategies.synchronization import SYNCHRONIZATION, Synchronization
from staleflow.stores.errors import ConfigError
from staleflow.tasks.emulation.cost_model import CostModel
from staleflow.tasks.emulation.workload import MAX_EMULATED_S, WorkloadConfig
from staleflow.tasks.engines.engine_settings import ENGINES, REFUSED_SAMPLING_OPTIONS, EngineSettings
from staleflow.tasks.environments.environment_config import EnvironmentConfig
from staleflow.tasks.settings.endpoint_settings import EndpointConfig
from staleflow.tasks.settings.knobs import knob
from staleflow.tasks.settings.registry import choice
from staleflow.tasks.settings.source_kinds import is_environment, kind_of
from staleflow.tasks.settings.task_config import EvaluationSetConfig, RewardConfig
from staleflow.tasks.training.trainer_settings import TrainingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """Durations of everything except decoding, and injected faults, in `staleflow simulate` and emulated runs."""

    train_s: float = knob(20.0, "seconds per training step on training.ranks ranks", low=0, high=MAX_EMULATED_S)
    train_s_per_token: float = knob(
        0.0, "seconds per training step for each token of its batch, prompts included; added to train_s", low=0, high=1
    )
    fetch_prompts_s: float = knob(0.0, "seconds until requested prompts arrive", low=0, high=MAX_EMULATED_S)
    reward_s: float = knob(0.1, "seconds until a response is scored", low=0, high=MAX_EMULATED_S)
    environment_overhead_s: float = knob(0.0, "seconds of overhead per environment step", low=0, high=MAX_EMULATED_S)
    pull_s: float = knob(
        1.0, "seconds an instance takes to load new weights, without prefill", low=0, high=MAX_EMULATED_S
    )
    message_s: float = knob(
        0.0, "seconds a message between coordinator and instance takes, each way", low=0, high=MAX_EMULATED_S
    )
    report_s: float = knob(
        2.0,
        "seconds between reports of an instance and between ticks of the coordinator",
        low=0.01,
        high=MAX_EMULATED_S,
    )
    switch_s: float = knob(
        0.0, 'cluster.layout = "turns": seconds for one side to leave the GPUs', low=0, high=MAX_EMULATED_S
    )
    mean_loss_interval_s: float = knob(
        0.0, "mean seconds between instance losses, over all instances; 0: none", low=0, high=1e9
    )
    cost_error: float = knob(
        0.0,
        "median relative error of rollout.cost on decode steps that its fit left out; `staleflow profile` measures it",
        low=0,
    )
    replace_s: float = knob(60.0, "seconds until a lost instance is replaced", low=0, high=MAX_EMULATED_S)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The policy model."""

    path: str = knob("", "folder of a Hugging Face causal LM with its tokenizer, or a hub name")
    dtype: str = knob("float32", "data type of the weights in trainer and engines", choices=("float32", "bfloat16"))
    device: str = knob("auto", "device that models run on; auto: CUDA if available", choices=("auto", "cpu", "cuda"))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """The batch of one training step."""

    groups_per_step: int = knob(16, "prompts per training step", low=1)
    group_size: int = knob(8, "trajectories per prompt, over which advantages are computed", low=1)
    extra_groups: int = knob(0, "redundancy: groups started per step beyond groups_per_step", low=0)
    extra_members: int = knob(0, "redundancy: trajectories started per group beyond group_size", low=0)
    filtering: Filtering = choice(
        FILTERING, "keep_all", "no_signal drops and replaces groups whose rewards are all equal"
    )
    stragglers: StragglerRule = choice(
        STRAGGLERS,
        "wait",
        "what to do with the last unfinished responses of a stuck step: wait for them, or truncate them",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessConfig:
    """The staleness bound, and the rule that admits work under it."""

    eta: int = knob(
        1,
        "staleness bound: most versions a trajectory's oldest token may lag the step that trains on it",
        low=0,
        high=1000,
    )
    admission: Admission = choice(
        ADMISSION,
        "staleflow",
        "which groups may start: staleflow all that can reserve a place, synchronous one batch while nothing trains",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """Sampling of responses on the rollout instances."""

    REFUSED: ClassVar[Mapping[str, str]] = REFUSED_SAMPLING_OPTIONS

    instances: int = knob(1, "rollout instances, one Dask worker each", low=1, high=4096)
    max_instances: int = knob(
        0,
        "most rollout instances: workers that join while the run goes on, and that no other run waits for, become "
        "further ones; 0: no more than instances",
        low=0,
        high=4096,
    )
    min_instances: int = knob(
        1, "instances with which the run goes on while others that were lost wait for a free worker", low=1, high=4096
    )
    max_new_tokens: int = knob(64, "most tokens in a response, all turns and observations included", low=1)
    turn_tokens: int = knob(0, "most tokens that are sampled in one turn; 0: max_new_tokens", low=0)
    temperature: float = knob(
        1.0, "sampling temperature; the trainer computes logprobs at the same one", above=0, high=10
    )
    routing: Routing = choice(ROUTING, "deadline", "which instance samples a trajectory")
    synchronization: Synchronization = choice(
        SYNCHRONIZATION, "staggered", "how many instances pull new weights once they are published"
    )
    on_pull: str = knob(
        "keep",
        "trajectories running during a pull: keep continues with their KV cache, interrupt computes it again, "
        "adapter (with training.lora) ends them under the version they began with",
        choices=("keep", "interrupt", "adapter"),
    )
    migration: Migration = choice(MIGRATION, "none", "which running trajectories move to less loaded instances")
    logprob_drift_limit: float = knob(
        0.0,
        "nats by which an instance's logprobs of a probe may differ from the trainer's on average before it is taken "
        "out of service; 0: measured at version 0",
        low=0,
    )
    delivery_interval_s: float = knob(
        10.0,
        "seconds between deliveries of running responses' tokens: a lost instance loses no more of them; 0: all",
        low=0,
    )
    max_attempts: int = knob(
        3, "most retries of a trajectory after failures of an engine or its environment, or lost instances", low=0
    )
    cache_affinity: bool = knob(
        True,
        "whether a trajectory's next turn goes to the instance that caches its last one, if that saves more than it "
        "costs",
    )
    engine: EngineSettings = choice(ENGINES, "transformers", "engine that samples responses")
    cost: CostModel = CostModel()
    cost_tolerance: float = knob(
        0.25, "relative error on measured decode steps above which a run reports that the cost model drifted", above=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherConfig:
    """Processes of their own that compute the logprobs of responses under the model training.kl.reference, once each,
    while sampling and training go on. The logprobs are stored."""

    instances: int = knob(
        0,
        "teachers, one Dask worker each; 0: none, each rank of the trainer holds the reference model",
        low=0,
        high=256,
    )
    engine: EngineSettings = choice(ENGINES, "transformers", "engine that computes logprobs under the reference model")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The Dask cluster that the job runs on."""

    kind: str = knob(
        "local", "local processes, a scheduler's address, or a scheduler file", choices=("local", "address", "file")
    )
    address: str = knob("", "scheduler address for kind = address, such as tcp://host:8786")
    scheduler_file: str = knob("", "path of the scheduler file for kind = file")
    layout: str = knob(
        "separate",
        "separate: trainer and rollout instances have GPUs of their own; turns: the same ones, each in its turn, while "
        "the other's weights and caches are not there",
        choices=("separate", "turns"),
    )
    gpus: int = knob(
        0,
        "GPUs that the run may use: of this machine the first in PCI order (kind = local), or of the cluster's "
        "workers; 0: all",
        low=0,
        high=1024,
    )
    threads: int = knob(1, "torch threads per process; more than its cores slows them down", low=1, high=1024)
    dashboard: bool = knob(True, "serve the Dask dashboard and its staleflow page (kind = local)")
    shared_memory: str = knob("/dev/shm", "in-memory folder on each host that weights are published in")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineConfig:
    """Time limits, after which something counts as lost or stuck."""

    start_s: float = knob(
        180.0, "seconds to wait for a free worker, and again for the actor on it to be ready", above=0
    )
    call_s: float = knob(60.0, "seconds for an actor to answer a short call; after that it counts as lost", above=0)
    sample_s: float = knob(
        120.0,
        "seconds an instance with work may sample nothing, or a teacher may compute for one response; after that it is "
        "replaced",
        above=0,
    )
    train_s: float = knob(
        3600.0, "seconds for one training step, with the checkpoint that the trainer may still be writing", above=0
    )
    silent_s: float = knob(
        180.0,
        "seconds in which the process of the trainer or the trajectory server answers nothing, at work or not; after "
        "that it counts as lost",
        above=0,
    )
    commit_s: float = knob(
        3600.0,
        "seconds for the commit of one step, tried again while the store's bucket fails; training goes on meanwhile, "
        "at most two steps ahead",
        above=0,
    )
    stuck_s: float = knob(
        300.0, "seconds without progress before the run stops and reports what it was waiting for", above=0
    )
    wait_s: float = knob(0.0, "seconds a run may wait for workers of a cluster that others use; 0: no limit", low=0)


TRACKERS = ("wandb", "mlflow", "trackio")
"""Trackers that a job names by their package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingConfig:
    """Where metrics are written besides the store."""

    tensorboard: bool = knob(True, "write TensorBoard event files into the run's folder")
    tracker: str = knob(
        "",
        "wandb, mlflow or trackio, if installed, or your own class, path/to/file.py:Name or module:Name; see "
        "pipeline/jobs/tracking.py",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A job."""

    name: str = knob("run", "name of the run's folder")
    runs_dir: str = knob("runs", "folder that run folders are created in")
    store: str = knob(
        "",
        "where the trajectories are stored: empty: in the run's folder; s3://BUCKET/PREFIX: under the run's name there",
    )
    seed: int = knob(0, "random seed of prompts, sampling and minibatch order", low=0, high=2**31)
    steps: int = knob(10, "training steps", low=1)
    profile: str = knob(
        "",
        "file written by `staleflow profile`; replaces rollout.cost and parts of simulation",
    )
    model: ModelConfig = ModelConfig()
    task: TaskTableConfig = TaskTableConfig()
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    endpoint: EndpointConfig = EndpointConfig()
    batch: BatchConfig = BatchConfig()
    staleness: StalenessConfig = StalenessConfig()
    rollout: RolloutConfig = RolloutConfig()
    training: TrainingConfig = TrainingConfig()
    teacher: TeacherConfig = TeacherConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    cluster: ClusterConfig = ClusterConfig()
    deadlines: DeadlineConfig = DeadlineConfig()
    tracking: TrackingConfig = TrackingConfig()
    workload: WorkloadConfig = WorkloadConfig()
    simulation: SimulationConfig = SimulationConfig()

    def __repr__(self) -> str:
        """One line: all settings are thousands of characters, which `staleflow config explain` prints."""
        model = "no model" if self.emulated else self.model.path
        sources = ", ".join(task.source for task in self.task.sources_by_name.values())
        return f"<Job {self.name}: {self.steps} steps, eta {self.staleness.eta}, {model}, {sources}>"

    @property
    def run_dir(self) -> Path:
        return Path(self.runs_dir) / self.name

    @property
    def store_url(self) -> str:
        """URL of the run's store in a bucket; empty if the store is in the run's folder."""
        return f"{self.store.rstrip('/')}/{self.name}" if self.store else ""

    @property
    def trajectories_per_step(self) -> int:
        """groups_per_step x group_size."""
        return self.batch.groups_per_step * self.batch.group_size

    @property
    def groups_started_per_step(self) -> int:
        """groups_per_step + extra_groups."""
        return self.batch.groups_per_step + self.batch.extra_groups

    @property
    def emulated(self) -> bool:
        """Whether responses are random and take emulated time; no model is involved."""
        return self.rollout.engine.emulated

    @property
    def has_texts(self) -> bool:
        """Whether prompts and responses are real texts from task.source, tokenized and scored; otherwise only their
        lengths are drawn."""
        return not self.emulated or self.workload.prompts == "task"

    @property
    def jobs_by_source(self) -> dict[str, RunConfig]:
        """A copy of the job for each of its task sources alone, by the source's name; with a single source the job
        itself, under the empty name."""
        if not self.task.sources:
            return {"": self}
        return {name: self._with_source(task) for name, task in self.task.sources.items()}

    def _with_source(self, task: MixedTaskConfig) -> RunConfig:
        function, environment = task.reward, self.environment
        if _is_multi_turn(task.source):  # it rewards its episodes itself, and has tools of its own
            function, environment = function or "task", replace(environment, tools=[])
        return replace(
            self,
            task=TaskTableConfig(**{f.name: getattr(task, f.name) for f in fields(SampledTaskConfig)}),
            environment=environment,
            reward=replace(self.reward, function=function, parts={}) if function else self.reward,
            rollout=replace(self.rollout, max_new_tokens=task.max_new_tokens or self.rollout.max_new_tokens),
        )

    @property
    def has_environment(self) -> bool:
        """Whether trajectories have several turns, because an environment, an agent or tools reply to the model. With
        task.multi_turn = auto this loads user code named by task.source; False if that cannot be loaded here."""
        if self.task.multi_turn != "auto" or not self.has_texts:
            return self.task.multi_turn == "yes"
        if self.environment.tools:
            return True
        return any(_is_multi_turn(task.source) for task in self.task.sources_by_name.values())

    @property
    def evaluation_sets(self) -> dict[str, EvaluationSetConfig]:
        """The evaluation sets by name; with several task sources, each source's set has the source's name. An emulated
        run is evaluated only if [evaluation] says so."""
        evaluates = not self.emulated or self.evaluation.every > 0
        held_out_sets = {
            name or HELD_OUT: EvaluationSetConfig(
                source=task.eval_source, options=task.eval_options, prompts=task.eval_prompts
            )
            for name, task in self.task.sources_by_name.items()
            if evaluates and task.eval_prompts
        }
        return held_out_sets | self.evaluation.sets

    @property
    def num_held_out_prompts(self) -> int:
        """Number of prompts of task.source, or task.eval_source, that are held out of training."""
        own_sets = (evaluation_set for evaluation_set in self.evaluation.sets.values() if not evaluation_set.source)
        return max([self.task.eval_prompts, *(evaluation_set.prompts for evaluation_set in own_sets)])

    @property
    def reward_actors(self) -> tuple[str, ...]:
        """Names of the actors that return rewards: environment hosts if the job has an environment, else reward
        workers."""
        if self.has_environment:
            return tuple(f"environment-{i}" for i in range(self.environment.hosts))
        return tuple(f"reward-{i}" for i in range(self.reward.workers))

    @property
    def needs_reference(self) -> bool:
        """Whether training compares the policy with a reference model. No model is involved in an emulated run."""
        return not self.emulated and (self.training.kl.coefficient > 0 or self.training.loss.compares_pairs)

    @property
    def teachers(self) -> tuple[str, ...]:
        """Names of the actors that compute logprobs under the reference model; none if the trainer does."""
        return tuple(f"teacher-{i}" for i in range(self.teacher.instances if self.needs_reference else 0))

    @property
    def shares_gpus(self) -> bool:
        """Whether trainer and rollout instances use the same GPUs in turns."""
        return self.cluster.layout == "turns"

    @property
    def num_served_versions(self) -> int:
        """Number of versions that an instance serves side by side: eta + 1 adapters, which are all that the bound
        allows; 0 for full weights."""
        return self.staleness.eta + 1 if self.rollout.on_pull == "adapter" else 0

    @property
    def uses_cost_model(self) -> bool:
        """Whether a strategy uses the cost model's seconds."""
        return self.rollout.routing.weighs_seconds or self.rollout.migration.needs("cost")

    @property
    def members_started_per_group(self) -> int:
        """group_size + extra_members."""
        return self.batch.group_size + self.batch.extra_members

    @property
    def max_response_tokens_per_step(self) -> int:
        """trajectories_per_step x max_new_tokens."""
        return self.trajectories_per_step * self.rollout.max_new_tokens

    @property
    def max_trajectories_in_flight(self) -> int:
        """(eta + 1) x groups_started_per_step x members_started_per_group."""
        return (self.staleness.eta + 1) * self.groups_started_per_step * self.members_started_per_group

    @property
    def max_running_trajectories(self) -> int:
        """Maximum number of trajectories that all instances decode at once."""
        return self.rollout.instances * self.rollout.engine.max_running


def _is_multi_turn(source: str) -> bool:
    """Whether an environment of many turns is behind a source; a user's file is loaded to know it."""
    if (kind := kind_of(source)) is not None:
        return kind.has_turns
    try:
        return is_environment(source, "task.source")
    except ConfigError:
        return False


DERIVED_VALUES = (
    "has_environment",
    "trajectories_per_step",
    "groups_started_per_step",
    "members_started_per_group",
    "max_response_tokens_per_step",
    "max_trajectories_in_flight",
    "max_running_trajectories",
)


def explain_config(config: RunConfig) -> list[ExplainedValue]:
    """All values with their meaning and limits, then the derived numbers."""
    rows = explain_values(config)
    for name in DERIVED_VALUES:
        doc = " ".join((getattr(RunConfig, name).__doc__ or "").split()) or f"{name.replace('_', ' ')}"
        rows.append(ExplainedValue(key=name, value=getattr(config, name), default="", limits="derived", doc=doc))
    return rows
