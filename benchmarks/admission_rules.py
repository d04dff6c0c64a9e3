"""Admission rules of other systems that the tables compare with, besides those of `simulate --baselines`.

| rule | in play (reserved and finished, not the batch being trained) | late work | keeps the bound |
|---|---|---|---|
| pipeline_depth | `depth` batches (tinker-cookbook #822) | is waited for | yes |
| windowed_fifo | (1 + ahead) batches, trained in order but for a window (arXiv 2605.26494) | is waited for | yes |
| over_provision | (1 + excess) batches, started between steps (APRIL, arXiv 2509.18521) | is trained late | no |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from staleflow.pipeline.simulator.baselines import Baseline
from staleflow.stores.errors import ConfigError
from staleflow.stores.staleness.ledger import StalenessLedger
from staleflow.stores.trajectory import GroupId, PolicyVersion


@dataclass(frozen=True, slots=True)
class PipelineDepth(Baseline):
    """Sampling runs at most so many batches ahead of training: staleness is kept by pacing, nothing is dropped."""

    depth: float = 1.0
    """Batches that may be sampled or waiting while one is trained, 1 to eta + 1."""

    def check(self, eta: int) -> None:
        if self.depth > eta + 1:
            raise ConfigError(
                f"depth = {self.depth:g} samples further ahead than staleness.eta = {eta} allows "
                f"to train; it must be at most {eta + 1}"
            )

    def max_in_flight(self, ledger: StalenessLedger) -> int:
        return math.ceil(self.depth * ledger.groups_started_per_step)


class WindowedLedger(StalenessLedger):
    """A ledger whose steps take the oldest groups of a window, which begins at the oldest group that is not taken and
    counts those that were. window: number of groups."""

    def __init__(self, window: int, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.window = window

    def _has_batch(self) -> bool:
        return super()._has_batch() and sum(map(len, self._next_batch().values())) == self.groups_per_step

    def _next_batch(self) -> dict[PolicyVersion, list[GroupId]]:
        finished = {(version, group) for version, groups in self._occupied.items() for group in groups}
        in_play = sorted(finished | {(e.version, e.group) for e in self.live_groups.values() if e.is_reserved})
        batch: dict[PolicyVersion, list[GroupId]] = {}
        for _ in range(self.groups_per_step):
            last = in_play[0][1] + self.window if in_play else 0
            version, group = next(((v, g) for v, g in in_play if (v, g) in finished and g < last), (None, None))
            if version is None or group is None:
                break
            batch.setdefault(version, []).append(group)
            in_play.remove((version, group))
        return batch


@dataclass(frozen=True, slots=True)
class WindowedFifo(Baseline):
    """Groups are trained in the order they were drawn, except that a step may pass over unfinished ones within a window
    anchored at the oldest: P groups a step, (S + 1) P in play, the batch being trained included, and a window of
    window_share of these.

    A group is overtaken by at most W - 1 others, so it lags at most S + ceil((W - 1) / P) steps.
    """

    ahead: int = 1
    """S, batches in play beyond the first, >= 0."""
    window_share: float = 0.3
    """Share of the groups in play that a step may choose its batch from, in (0, 1]."""

    def check(self, eta: int) -> None:
        # W - 1 is less than window_share x (S + 1) x P, whatever P is.
        lag = self.ahead + math.ceil(self.window_share * (self.ahead + 1))
        if lag > eta:
            raise ConfigError(
                f"ahead = {self.ahead} with window_share = {self.window_share:g} lets groups lag "
                f"{lag} steps, staleness.eta allows {eta}; lower ahead or raise eta"
            )

    def make_ledger(self, **sizes: Any) -> WindowedLedger:
        window = max(1, int(self.window_share * (self.ahead + 1) * sizes["groups_per_step"]))
        return WindowedLedger(window, **sizes)

    def max_in_flight(self, ledger: StalenessLedger) -> int:
        trained = ledger.next_step - ledger.version  # the batch being trained holds its places until it is published
        return (self.ahead + 1 - trained) * ledger.groups_started_per_step


@dataclass(frozen=True, slots=True)
class OverProvision(Baseline):
    """APRIL: more groups than a step needs are sampled side by side, the first to finish are trained, and the others
    go on in the next round with the tokens they have. New ones start between two steps only."""

    excess: float = 1.0
    """Groups in play beyond those a step needs, as a share of them, >= 0."""

    awaits_due_groups = keeps_bound = False

    def max_in_flight(self, ledger: StalenessLedger) -> int:
        if ledger.version != ledger.next_step:
            return 0
        return math.ceil((1 + self.excess) * ledger.groups_started_per_step)
