"""Chooses the source of the next prompts in a run with several task sources. Pure.

A source's ratio is one of what is *trained*, not of what is drawn. If half of a source's groups are filtered, twice as
many are drawn. The only inputs are what was drawn, what of that was trained on and what was not, and what is in
flight.

- Each trained group gives every source credit by its ratio, and takes one from its own source. A source's credit is the
  number of groups by which it lags behind.
- The next group is drawn from the source that will lag most once everything in flight has ended, if of each source as
  large a share can be trained on as lately. That share is only a forecast: credit corrects what it gets wrong.
- A source counts as failing once `PATIENCE` groups of it in a row were filtered or failed. A notice names it, one draw
  in `PROBE` goes to failing sources, and the others share the rest by their ratios. One trained group ends that; the
  source then catches up by `PATIENCE` groups at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from staleflow.pipeline.strategies.samplers import Draw, Sampler
from staleflow.stores.in_flight.in_flight_state import GroupInFlight
from staleflow.stores.metrics import SOURCE_PREFIX
from staleflow.stores.trajectories.records import SourceState
from staleflow.stores.trajectory import AbortReason, Fate, GroupId

PATIENCE = 64
"""Number of consecutive groups that cannot be trained on after which a source counts as failing. If one group in ten of
a source can be trained on, that happens once in 8,500 groups."""
PROBE = 16
"""One draw in PROBE is from a failing source, while others are not failing."""
UPDATE = 1 / 32
"""Weight of the latest group in a source's `usable_share`."""
MIN_USABLE_SHARE = 1 / 256
"""Lower limit of `usable_share` in forecasts, so that groups in flight always count."""
FAILURES = frozenset({AbortReason.ENGINE_FAILED, AbortReason.ENVIRONMENT_FAILED, AbortReason.GROUP_FAILED})
"""Abort reasons that count as failures of the source. Surplus groups and the run's end do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedSource:
    """A source of a mixture. ratio: its share of trained groups, relative to the other sources."""

    name: str
    ratio: float
    sampler: Sampler


@dataclass(slots=True, kw_only=True)
class _Source:
    """A source and its counts; those of `SourceState` mean the same."""

    settings: MixedSource
    weight: float
    """Its ratio over the sum of all."""
    num_drawn: int = 0
    num_trained: int = 0
    num_filtered: int = 0
    num_aborted: int = 0
    credit: float = 0.0
    usable_share: float = 1.0
    num_useless: int = 0
    sampler: dict[str, list[float]] = field(default_factory=dict)
    in_flight: dict[GroupId, int] = field(default_factory=dict)
    """Task of each group that has arrived and not ended."""
    requested: list[int] = field(default_factory=list)
    """Tasks whose prompts have not arrived."""
    rewards: dict[GroupId, float] = field(default_factory=dict)
    """Mean reward of groups in flight that are complete."""
    scored: list[float] = field(default_factory=list)
    trained: list[float] = field(default_factory=list)
    """Rewards of groups that were scored, and that were trained on, since the latest step's metrics."""

    @property
    def failing(self) -> bool:
        return self.num_useless >= PATIENCE

    @property
    def forecast(self) -> float:
        """Groups expected to be trained on of what is drawn and has not ended."""
        return (len(self.in_flight) + len(self.requested)) * max(MIN_USABLE_SHARE, self.usable_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceView:
    """Counts of a source for display. Shares are of all sources' groups so far."""

    name: str
    ratio: float
    """Its ratio over the sum of all."""
    drawn_share: float
    trained_share: float
    num_drawn: int
    num_trained: int
    num_filtered: int
    num_aborted: int
    failing: bool

    @property
    def line(self) -> str:
        """The counts and shares as a line of text."""
        return (
            f"task {self.name}: {self.trained_share:.1%} of the trained groups (ratio {self.ratio:.1%}), "
            f"{self.drawn_share:.1%} of the drawn; {self.num_trained} trained, {self.num_filtered} filtered, "
            f"{self.num_aborted} aborted" + (", failing" if self.failing else "")
        )


def source_views(ratios: Mapping[str, float], states: Sequence[SourceState]) -> tuple[SourceView, ...]:
    """Counts of each source for display. ratios: by source name. states: stored states of the sources; empty if there
    are none."""
    weights = sum(ratios.values())
    drawn, trained = max(1, sum(s.num_drawn for s in states)), max(1, sum(s.num_trained for s in states))
    return tuple(
        SourceView(
            name=name,
            ratio=ratio / weights,
            drawn_share=state.num_drawn / drawn,
            trained_share=state.num_trained / trained,
            num_drawn=state.num_drawn,
            num_trained=state.num_trained,
            num_filtered=state.num_filtered,
            num_aborted=state.num_aborted,
            failing=state.num_useless >= PATIENCE,
        )
        for (name, ratio), state in zip(ratios.items(), states, strict=bool(states))
    )


class Mixture:
    """Chooses the source and task of each prompt in one run. seed: the job's."""

    def __init__(self, sources: Sequence[MixedSource], seed: int) -> None:
        total = sum(source.ratio for source in sources)
        self._sources = [_Source(settings=source, weight=source.ratio / total) for source in sources]
        self._seed = seed
        self._source_of: dict[GroupId, _Source] = {}
        self._notices: list[str] = []

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def states(self) -> tuple[SourceState, ...]:
        """State of each source, as it is stored. Prompts that were requested and have not arrived are not included."""
        return tuple(
            SourceState(
                num_drawn=s.num_drawn,
                num_trained=s.num_trained,
                num_filtered=s.num_filtered,
                num_aborted=s.num_aborted,
                credit=s.credit,
                usable_share=s.usable_share,
                num_useless=s.num_useless,
                sampler={name: list(numbers) for name, numbers in s.sampler.items()},
            )
            for s in self._sources
        )

    @property
    def tasks_in_flight(self) -> tuple[tuple[int, int, int], ...]:
        """(group, source, task) of each group in flight."""
        return tuple(
            sorted((int(g), number, task) for number, s in enumerate(self._sources) for g, task in s.in_flight.items())
        )

    def views(self) -> tuple[SourceView, ...]:
        """Each source's counts."""
        return source_views({s.settings.name: s.weight for s in self._sources}, self.states)

    def take_metrics(self) -> dict[str, float]:
        """Metrics of each source for a step. Rewards are those since the previous call."""
        metrics: dict[str, float] = {}
        for source, view in zip(self._sources, self.views(), strict=True):
            name = f"{SOURCE_PREFIX}{view.name}/"
            for metric, rewards in (("reward", source.trained), ("reward_scored", source.scored)):
                if rewards:
                    metrics[name + metric] = sum(rewards) / len(rewards)
            metrics[f"{name}trained_share"], metrics[f"{name}drawn_share"] = view.trained_share, view.drawn_share
            source.scored, source.trained = [], []
        return metrics

    def take_notices(self) -> list[str]:
        """Lines about sources that started or stopped failing since the previous call."""
        notices, self._notices = self._notices, []
        return notices

    # -- updating -----------------------------------------------------------------------------------------------

    def restore(self, states: Sequence[SourceState], num_groups: int, in_flight: Iterable[GroupInFlight]) -> None:
        """Restore the state of a stored run.

        Args:
            states: States of the sources when `num_groups` groups had been drawn; empty if none were stored.
            in_flight: The run's groups in flight, some of which may have been drawn later.
        """
        for source, state in zip(self._sources, states, strict=bool(states)):
            source.num_drawn, source.num_trained = state.num_drawn, state.num_trained
            source.num_filtered, source.num_aborted = state.num_filtered, state.num_aborted
            source.credit, source.usable_share = state.credit, state.usable_share
            source.num_useless = state.num_useless
            source.sampler = {name: list(numbers) for name, numbers in state.sampler.items()}
            if source.failing:
                self._notices.append(f"{_failing(source)}, before the resume")
        for group in in_flight:
            self.count_arrived(group.group, group.source, group.task)
            if group.group < num_groups:  # which is counted already
                self._sources[group.source].num_drawn -= 1

    def draw(self, num_groups: int) -> tuple[tuple[int, int], ...]:
        """Choose the next prompts: (source, task) of each. They count as requested until they arrive."""
        draws = []
        for _ in range(num_groups):
            number = self._next_source()
            source = self._sources[number]
            task = source.settings.sampler.choose(
                Draw(
                    number=source.num_drawn + len(source.requested),
                    seed=self._seed,
                    source=number,
                    in_flight={*source.in_flight.values(), *source.requested},
                ),
                source.sampler,
            )
            source.requested.append(task)
            draws.append((number, task))
        return tuple(draws)

    def count_arrived(self, group: GroupId, number: int, task: int) -> None:
        """Count a group whose prompt has arrived."""
        source = self._sources[number]
        if task in source.requested:
            source.requested.remove(task)
        source.in_flight[group] = task
        self._source_of[group] = source
        source.num_drawn += 1

    def record_rewards(self, group: GroupId, rewards: Sequence[float]) -> None:
        """Record the rewards of a complete group, without those that could not be computed."""
        if rewards:
            source, mean = self._source_of[group], sum(rewards) / len(rewards)
            source.rewards[group] = mean
            source.scored.append(mean)

    def count_trained(self, groups: Iterable[GroupId]) -> None:
        """Count groups as trained on."""
        for group in groups:
            if (reward := self._source_of[group].rewards.get(group)) is not None:
                self._source_of[group].trained.append(reward)
            source = self._leave(group)
            if source.failing:
                self._notices.append(f"task {source.settings.name!r}: a group of it was trained on again")
            source.num_trained += 1
            source.usable_share += UPDATE * (1 - source.usable_share)
            source.num_useless = 0
            source.credit -= 1
            self._give_credit()

    def count_ended(self, endings: Mapping[GroupId, tuple[Fate, AbortReason]]) -> None:
        """Count groups that have ended without being trained on."""
        for group, (fate, reason) in endings.items():
            if group not in self._source_of:  # it was trained on, and these are its surplus members
                continue
            source = self._leave(group)
            failed, filtered = source.failing, fate is Fate.FILTERED
            source.num_filtered += filtered
            source.num_aborted += not filtered
            source.usable_share *= 1 - UPDATE
            source.num_useless += filtered or reason in FAILURES
            if source.failing and not failed:
                self._notices.append(f"{_failing(source)}, the latest for the reason {reason.value}")

    # -- inside --------------------------------------------------------------------------------------------------

    def _next_source(self) -> int:
        """The source to draw from."""
        failing = [n for n, s in enumerate(self._sources) if s.failing]
        healthy = [n for n, s in enumerate(self._sources) if not s.failing] or failing
        total_drawn = sum(s.num_drawn + len(s.requested) for s in self._sources)
        if len(healthy) < len(self._sources) and total_drawn % PROBE == PROBE - 1:
            return failing[total_drawn // PROBE % len(failing)]
        weights = sum(self._sources[n].weight for n in healthy)
        num_expected = 1 + sum(self._sources[n].forecast for n in healthy)

        def lag(number: int) -> float:
            source = self._sources[number]
            return source.credit + source.weight / weights * num_expected - source.forecast

        return max(healthy, key=lambda number: (lag(number), -number))

    def _give_credit(self) -> None:
        """Give each source its share of a trained group."""
        weights = sum(s.weight for s in self._sources if not s.failing)
        for source in self._sources:
            if source.failing:
                source.credit = min(float(PATIENCE), source.credit + source.weight)
            else:
                source.credit += source.weight / weights

    def _leave(self, group: GroupId) -> _Source:
        """Take a group out of what is in flight; its sampler learns from it."""
        source = self._source_of.pop(group)
        task, reward = source.in_flight.pop(group), source.rewards.pop(group, None)
        source.settings.sampler.learn(task, reward, source.sampler)
        return source


def _failing(source: _Source) -> str:
    """Which source fails, and what follows."""
    return (
        f"task {source.settings.name!r} has one draw in {PROBE} until a group of it can be trained on: none of its "
        f"last {source.num_useless} could"
    )
