"""Which instances should load the published weights now. Pure: proposes, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from staleflow.pipeline.coordination.fleet import Instance
from staleflow.pipeline.coordination.route_planner import RoutePlanner
from staleflow.pipeline.coordination.state import CoordinatorState
from staleflow.pipeline.strategies.synchronization import LaggingInstance, Synchronization


class Pulls:
    """Shows a synchronization rule each instance that lags, with the work it could be given with and without a pull.
    One that samples for an evaluation stays at its version until it has nothing more to sample for it."""

    def __init__(self, state: CoordinatorState, rule: Synchronization, placement: RoutePlanner) -> None:
        self._state = state
        self._rule = rule
        self._placement = placement

    def due(self, looked_at: Iterable[Instance]) -> Iterator[Instance]:
        """Those of `looked_at` that should pull. Work that one gets after its pull is not counted for the next. In
        turns all that sleep pull once the trainer's turn has ended: they have nothing to interrupt."""
        if self._state.turns:
            yield from () if self._state.training else [instance for instance in looked_at if instance.asleep]
            return
        published, rule, placement = self._state.ledger.version, self._rule, self._placement
        pinned = self._state.evaluation.pinned if self._state.evaluation is not None else ()
        lagging = [i for i in looked_at if i.version < published and not i.pulling and i.instance not in pinned]
        if not lagging:
            return
        if rule.needs_added_if_pulled:  # the cheapest to interrupt come first, and get the work that is there
            lagging.sort(key=lambda i: i.kv_tokens)
        num_routable = placement.num_routable(published)
        sample = placement.typical_new_work()
        measured = self._state.measured
        # Beside those it serves, an instance loads a version while it goes on decoding.
        pull_s = 0.0 if self._state.fleet.side_by_side else measured.pull_s.value
        for instance in lagging:
            num_accepted = placement.num_accepted(instance, sample)
            num_added_if_pulled = min(num_accepted, num_routable) if rule.needs_added_if_pulled else 0
            view = LaggingInstance(
                lag=published - instance.version,
                num_running=instance.num_running,
                max_running=instance.max_running,
                kv_tokens=instance.kv_tokens,
                num_added_without_pull=min(num_accepted, placement.num_routable(instance.version)),
                num_added_if_pulled=num_added_if_pulled,
                added_kv_tokens=sample.kv_tokens,
                interval_s=measured.interval_s.value,
                pull_s=pull_s,
            )
            if rule.should_pull(view):
                num_routable -= num_added_if_pulled
                yield instance
