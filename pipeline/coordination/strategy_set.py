"""The strategies of a coordinator. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from staleflow.pipeline.coordination.mixture import Mixture
from staleflow.pipeline.strategies.admission import Admission
from staleflow.pipeline.strategies.filtering import Filtering, StragglerRule
from staleflow.pipeline.strategies.migration import Migration
from staleflow.pipeline.strategies.routing import CacheAffinity, Routing
from staleflow.pipeline.strategies.synchronization import Synchronization
from staleflow.tasks.emulation.cost_model import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySet:
    """The strategies of a coordinator, and its numeric settings."""

    admission: Admission
    routing: Routing
    synchronization: Synchronization
    filtering: Filtering
    migration: Migration
    step_costs: CostModel
    """Costs of decode steps."""
    stragglers: StragglerRule = StragglerRule()
    max_failures: int = 3
    """Failures of an engine or an environment, or lost instances, after which a trajectory is still retried."""
    has_environments: bool = False
    """Whether an environment replies to each turn; if not, a response is one turn, which is scored."""
    evaluation_share: float = 0.25
    """Share of the fleet's slots that an evaluation may use while the run trains."""
    affinity: CacheAffinity | None = None
    """None: turns are routed without regard to cached contexts."""
    mixture: Mixture | None = None
    """None: the run has one task source, whose tasks are drawn in order."""
    serves_many_versions: bool = False
    """Whether an instance serves several versions at once, and a trajectory continues under its first one."""
    shares_gpus: bool = False
    """Whether trainer and instances use the same GPUs, in turns."""
