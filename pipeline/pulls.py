"""Which instances should load the published weights now, from what is believed of all of them. Pure: proposes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pipeline.beliefs import Beliefs
from pipeline.fleet import Instance
from pipeline.placing import Placing
from pipeline.strategies.synchronization import LaggingInstance, Synchronization


class Pulls:
    """Shows a synchronization rule each instance that lags, with the work it could be given with and without a pull."""

    def __init__(self, beliefs: Beliefs, rule: Synchronization, placing: Placing) -> None:
        self._beliefs = beliefs
        self._rule = rule
        self._placing = placing

    def due(self, looked_at: Iterable[Instance], now: float) -> Iterator[Instance]:
        """Those of `looked_at` that should pull. What one is fed after its pull, the next ones cannot hope for."""
        published, rule, placing = self._beliefs.ledger.version, self._rule, self._placing
        lagging = [i for i in looked_at if i.version < published and not i.pulling]
        if not lagging:
            return
        if rule.weighs:  # those that are cheapest to interrupt first: they take the work that others hope for
            lagging.sort(key=lambda i: i.kv_tokens)
        demand = placing.demand(published)
        sample = placing.fresh_work(now)
        measured = self._beliefs.measured
        for instance in lagging:
            appetite = placing.appetite(instance, sample)
            fed_if_pulled = min(appetite, demand) if rule.weighs else 0
            view = LaggingInstance(
                lag=published - instance.version,
                num_running=instance.num_running,
                max_running=instance.max_running,
                kv_tokens=instance.kv_tokens,
                fed=min(appetite, placing.demand(instance.version)),
                fed_if_pulled=fed_if_pulled,
                added_kv_tokens=sample.kv_tokens,
                interval_s=measured.interval_s.value,
                pull_s=measured.pull_s.value,
            )
            if rule.should_pull(view):
                demand -= fed_if_pulled
                yield instance
