"""The coordinator a job file asks for. Pure: both bodies and a replay build it here."""

from __future__ import annotations

import dataclasses

from pipeline.config.schema import RunConfig
from pipeline.coordination.coordinator import Coordinator, Strategies
from pipeline.coordination.forecast import LengthForecast
from pipeline.coordination.pacing import Pacing
from pipeline.strategies.admission import Late, make_admission
from pipeline.strategies.filtering import Stragglers, Straggling, make_filtering
from pipeline.strategies.migration import make_migration
from pipeline.strategies.routing import make_routing
from pipeline.strategies.synchronization import make_synchronization
from stores.staleness import StalenessLedger
from tasks.engines.cost_model import CostModel
from tasks.seeds import Stream, generator


def cost_model(config: RunConfig) -> CostModel:
    cost = config.rollout.cost
    return CostModel(k1=cost.k1, k2=cost.k2, k3=cost.k3, k4=cost.k4, b=cost.b, prefill=cost.prefill)


def make_coordinator(config: RunConfig, *, validate_each: bool = False) -> Coordinator:
    """The coordinator this job asks for. Both bodies, and a replay, build it here."""
    cost, batch, rollout = cost_model(config), config.batch, config.rollout
    admission = make_admission(config.staleness.admission, config.staleness.eta, config.staleness.alpha)
    ledger = StalenessLedger(
        eta=config.bound,
        groups_per_step=batch.groups_per_step,
        group_size=batch.group_size,
        groups_started=config.groups_started,
        members_started=config.members_started,
        num_steps=config.steps,
        waits=admission.late is Late.WAIT,
    )
    strategies = Strategies(
        admission=admission,
        routing=make_routing(rollout.routing, cost, rollout.mu, generator(config.seed, Stream.ROUTING)),
        synchronization=make_synchronization(
            rollout.synchronization,
            rollout.load_threshold,
            cost if rollout.on_pull == "interrupt" else dataclasses.replace(cost, prefill=0.0),
        ),
        filtering=make_filtering(batch.filtering),
        migration=make_migration(rollout.migration, cost, rollout.migration_gain),
        stragglers=Stragglers(
            action=Straggling(batch.stragglers), patience=batch.straggler_patience, share=batch.straggler_share
        ),
        max_attempts=rollout.max_attempts,
    )
    forecast = LengthForecast(rollout.max_new_tokens, rare=1 / config.trajectories_per_step)
    pacing = Pacing(
        cost, forecast, eta=config.bound, trajectories=config.trajectories_per_step, slack=rollout.pace_slack
    )
    return Coordinator(ledger, strategies, forecast, pacing, validate_each=validate_each)
