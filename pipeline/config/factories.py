"""Creates the coordinator and strategies of a job, for runs, simulations and replays; and the cost models of simulated
and emulated instances. Pure."""

from __future__ import annotations

from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.coordination.coordinator import Coordinator
from staleflow.pipeline.coordination.forecast import LengthForecast
from staleflow.pipeline.coordination.mixture import Mixture, MixtureSource
from staleflow.pipeline.coordination.strategy_set import StrategySet
from staleflow.pipeline.strategies.admission import ADMISSION
from staleflow.pipeline.strategies.filtering import FILTERING, STRAGGLERS
from staleflow.pipeline.strategies.migration import MIGRATION
from staleflow.pipeline.strategies.routing import ROUTING, CacheAffinity
from staleflow.pipeline.strategies.samplers import SAMPLERS, InOrder
from staleflow.pipeline.strategies.synchronization import SYNCHRONIZATION
from staleflow.tasks.emulation.batch_simulator import DraftSettings
from staleflow.tasks.emulation.cost_model import CostModel
from staleflow.tasks.emulation.emulated_episodes import EmulatedEpisodes, StepFaults
from staleflow.tasks.emulation.workload import Workload
from staleflow.tasks.engines.engine_settings import Speculation
from staleflow.tasks.settings.seeds import Stream, generator


def instance_cost_model(config: RunConfig, index: int) -> CostModel:
    """The cost model of a simulated or emulated instance. The first straggler_share of all instances are slower by
    straggler_factor."""
    simulation = config.simulation
    is_straggler = index < simulation.straggler_share * config.rollout.instances
    return config.rollout.cost.scaled(simulation.straggler_factor if is_straggler else 1.0)


def draft_settings(config: RunConfig) -> DraftSettings:
    """The draft settings of simulated and emulated instances."""
    speculation = config.rollout.engine.speculation
    return DraftSettings(
        length=speculation.num_speculative_tokens,
        max_running=speculation.max_running,
        acceptance=config.workload.acceptance_rate,
    )


def job_cost_model_at(config: RunConfig, num_running: int) -> CostModel:
    """The cost model of an instance with this number of requests that drafts as the job says."""
    speculation = config.rollout.engine.speculation
    return cost_model_at(config.rollout.cost, speculation, config.workload.acceptance_rate, num_running)


def cost_model_at(cost: CostModel, speculation: Speculation, acceptance_rate: float, num_running: int) -> CostModel:
    """The cost model of an instance while it runs this number of requests, with drafts if it drafts for so many."""
    num_drafted = speculation.num_speculative_tokens if num_running <= speculation.max_running else 0
    return cost.with_drafts(num_drafted, acceptance_rate)


def make_episodes(config: RunConfig, workload: Workload) -> EmulatedEpisodes:
    """The environments of this job's simulated or emulated episodes."""
    simulation = config.simulation
    faults = StepFaults(
        fail_share=simulation.failed_step_share, hang_share=simulation.hung_step_share, seed=config.seed
    )
    return EmulatedEpisodes(workload, faults)


def make_strategies(config: RunConfig) -> StrategySet:
    """Create the strategies that this job names. Raises ConfigError."""
    rollout = config.rollout
    inputs = {"cost": rollout.cost, "eta": config.staleness.eta, "rng": generator(config.seed, Stream.ROUTING)}
    return StrategySet(
        admission=ADMISSION.make(config.staleness.admission, inputs),
        routing=ROUTING.make(rollout.routing, inputs),
        synchronization=SYNCHRONIZATION.make(
            rollout.synchronization, {"eta": config.staleness.eta, "interrupts": rollout.on_pull == "interrupt"}
        ),
        filtering=FILTERING.make(config.batch.filtering),
        migration=MIGRATION.make(rollout.migration, inputs),
        step_costs=rollout.cost,
        stragglers=STRAGGLERS.make(config.batch.stragglers),
        max_failures=rollout.max_attempts,
        has_environments=config.has_environment,
        evaluation_share=config.evaluation.max_slot_share,
        affinity=CacheAffinity(rollout.cost) if config.has_environment and rollout.cache_affinity else None,
        mixture=_mixture(config),
        serves_many_versions=config.num_served_versions > 0,
        shares_gpus=config.shares_gpus,
    )


def _mixture(config: RunConfig) -> Mixture | None:
    """The job's task sources; None if it has one, whose tasks are drawn in order."""
    task = config.task
    if task.sources:
        sources = [
            MixtureSource(name=name, ratio=source.ratio, sampler=SAMPLERS.make(source.sampler))
            for name, source in task.sources.items()
        ]
    elif isinstance(task.sampler, InOrder):
        return None
    else:
        sources = [MixtureSource(name="task", ratio=1.0, sampler=SAMPLERS.make(task.sampler))]
    return Mixture(sources, config.seed)


def ledger_eta(config: RunConfig) -> int:
    """The staleness bound that the ledger enforces: the job's; or the number of steps, which never binds, for a
    simulated rule that guarantees no bound."""
    staleness = config.staleness
    return staleness.eta if staleness.admission.keeps_bound else config.steps


def make_coordinator(config: RunConfig, *, validate_every_event: bool = False) -> Coordinator:
    """Create the coordinator of this job. validate_every_event: whether to check all invariants after every event."""
    batch, strategies = config.batch, make_strategies(config)
    ledger = strategies.admission.make_ledger(
        eta=ledger_eta(config),
        groups_per_step=batch.groups_per_step,
        group_size=batch.group_size,
        groups_started_per_step=config.groups_started_per_step,
        members_started_per_group=config.members_started_per_group,
        num_steps=config.steps,
    )
    forecast = LengthForecast(config.rollout.max_new_tokens)
    return Coordinator(ledger, strategies, forecast, validate_every_event=validate_every_event)
