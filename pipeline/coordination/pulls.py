"""Chooses the instances that should load the published weights now. Pure: proposes, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from staleflow.pipeline.coordination.fleet import Instance
from staleflow.pipeline.coordination.state import CoordinatorState
from staleflow.pipeline.strategies.synchronization import Synchronization


def choose_pulls(
    state: CoordinatorState, synchronization: Synchronization, candidates: Iterable[Instance]
) -> Iterator[Instance]:
    """Choose those of `candidates` that should pull: the ones whose interruption costs least, until as many instances
    serve the published version as the rule says, and all that run nothing. An instance that samples for an evaluation
    keeps its version until it has nothing more to sample for it. With shared GPUs all sleeping instances pull once the
    training step has ended."""
    if state.shares_gpus:
        yield from () if state.is_training else [instance for instance in candidates if instance.is_asleep]
        return
    version, fleet = state.ledger.version, state.fleet
    pinned_ids = state.evaluation.pinned_instances if state.evaluation is not None else ()
    instances = [i for i in candidates if i.version < version and not i.is_pulling and i.id not in pinned_ids]
    if not instances:
        return
    num_missing = synchronization.num_pulling(len(fleet)) - int(np.count_nonzero(fleet.served_versions == version))
    cheapest = sorted(instances, key=lambda instance: instance.kv_tokens)[: max(0, num_missing)]
    cheapest_ids = {instance.id for instance in cheapest}
    for instance in instances:
        if instance.id in cheapest_ids or not instance.num_running:
            yield instance
