"""The strategies of a coordinator. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from staleflow.pipeline.coordination.mixture import Mixture
from staleflow.pipeline.strategies.admission import Admission
from staleflow.pipeline.strategies.affinity import CacheAffinity
from staleflow.pipeline.strategies.filtering import Filtering, StragglerRule
from staleflow.pipeline.strategies.migration import Migration
from staleflow.pipeline.strategies.routing import Routing
from staleflow.pipeline.strategies.synchronization import Synchronization
from staleflow.tasks.emulation.cost_model import StepCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySet:
    """The strategies of a coordinator, and its numeric settings."""

    admission: Admission
    routing: Routing
    synchronization: Synchronization
    filtering: Filtering
    migration: Migration
    costs: StepCosts
    """Of decode steps."""
    stragglers: StragglerRule = StragglerRule()
    max_attempts: int = 3
    """Failures a trajectory survives: of an engine or of its environment, or lost instances."""
    environments: bool = False
    """Whether an environment answers each turn; else a response is one turn, which is scored."""
    evaluation_share: float = 0.25
    """Share of the instances' places that an evaluation has while the run trains."""
    affinity: CacheAffinity | None = None
    """None: where a turn was sampled does not matter for the next."""
    mixture: Mixture | None = None
    """None: the run has one task source, whose tasks are drawn in order."""
    adapters: bool = False
    """Whether an instance serves versions side by side, and a trajectory goes on under the one it began with."""
    turns: bool = False
    """Whether trainer and instances have the same GPUs, in turns."""
