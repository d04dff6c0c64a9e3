"""Chooses the source of the next prompts in a run with several task sources. Pure.

A source's ratio is its share of the groups that are *trained on*, not of the groups that are drawn. If half of a
source's groups are filtered, twice as many are drawn. The only inputs are the numbers of groups that were drawn,
trained on, filtered and aborted, and the groups in flight.

- Each trained group gives every source credit by its ratio, and takes one from its own source. A source's credit is the
  number of groups by which it lags behind.
- The next group is drawn from the source that will lag most once all groups in flight have ended, if the recent share
  of usable groups stays the same for each source. Credit corrects the error of this forecast.
- A source counts as failing once `MAX_USELESS_GROUPS` of its groups in a row were filtered or failed. A notice names
  it, one draw in `PROBE_PERIOD` is from a failing source, and the other sources share the rest by their ratios. After
  one trained group it no longer counts as failing, and catches up by `MAX_USELESS_GROUPS` groups at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from staleflow.pipeline.strategies.samplers import Draw, Sampler
from staleflow.stores.in_flight.in_flight_state import GroupInFlight
from staleflow.stores.metrics import SOURCE_PREFIX
from staleflow.stores.trajectories.records import SourceState
from staleflow.stores.trajectory import AbortReason, Fate, GroupId

MAX_USELESS_GROUPS = 64
"""Number of consecutive groups that cannot be trained on after which a source counts as failing. If one group in ten of
a source can be trained on, that happens once in 8,500 groups."""
PROBE_PERIOD = 16
"""One draw in PROBE_PERIOD is from a failing source, while others are not failing."""
USABLE_SHARE_WEIGHT = 1 / 32
"""Weight of the latest group in a source's `usable_share`."""
MIN_USABLE_SHARE = 1 / 256
"""Lower limit of `usable_share` in forecasts, so that groups in flight always count."""
FAILURES = frozenset({AbortReason.ENGINE_FAILED, AbortReason.ENVIRONMENT_FAILED, AbortReason.GROUP_FAILED})
"""Abort reasons that count as failures of the source. Surplus groups and the run's end do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureSource:
    """Settings of a source of a mixture. ratio: its share of trained groups, relative to the other sources."""

    name: str
    ratio: float
    sampler: Sampler


@dataclass(slots=True, kw_only=True)
class _SourceProgress:
    """Progress of a source: its counts and its groups in flight."""

    source: MixtureSource
    target_share: float
    """Its ratio over the sum of all ratios."""
    state: SourceState = field(default_factory=SourceState)
    tasks_in_flight: dict[GroupId, int] = field(default_factory=dict)
    """Task of each group that has arrived and not ended."""
    requested_tasks: list[int] = field(default_factory=list)
    """Tasks whose prompts have not arrived."""
    mean_rewards: dict[GroupId, float] = field(default_factory=dict)
    """Mean reward of each complete group in flight."""
    scored_rewards: list[float] = field(default_factory=list)
    """Mean rewards of groups that were scored since the latest step's metrics."""
    trained_rewards: list[float] = field(default_factory=list)
    """Mean rewards of groups that were trained on since the latest step's metrics."""

    @property
    def is_failing(self) -> bool:
        """Whether its latest groups could all not be trained on."""
        return self.state.num_useless >= MAX_USELESS_GROUPS

    @property
    def expected_trained(self) -> float:
        """Expected number of groups that will be trained on, of the groups in flight and requested."""
        return (len(self.tasks_in_flight) + len(self.requested_tasks)) * max(MIN_USABLE_SHARE, self.state.usable_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCounts:
    """Counts of a source for display. Shares are of the groups of all sources so far."""

    name: str
    target_share: float
    """Its ratio over the sum of all ratios."""
    drawn_share: float
    trained_share: float
    num_drawn: int
    num_trained: int
    num_filtered: int
    num_aborted: int
    is_failing: bool

    @property
    def line(self) -> str:
        """The counts and shares as a line of text."""
        return (
            f"task {self.name}: {self.trained_share:.1%} of the trained groups (ratio {self.target_share:.1%}), "
            f"{self.drawn_share:.1%} of the drawn; {self.num_trained} trained, {self.num_filtered} filtered, "
            f"{self.num_aborted} aborted" + (", failing" if self.is_failing else "")
        )


def count_by_source(ratios: Mapping[str, float], states: Sequence[SourceState]) -> tuple[SourceCounts, ...]:
    """Counts of each source for display. ratios: by source name. states: stored states of the sources; empty if there
    are none."""
    ratio_sum = sum(ratios.values())
    num_drawn, num_trained = max(1, sum(s.num_drawn for s in states)), max(1, sum(s.num_trained for s in states))
    return tuple(
        SourceCounts(
            name=name,
            target_share=ratio / ratio_sum,
            drawn_share=state.num_drawn / num_drawn,
            trained_share=state.num_trained / num_trained,
            num_drawn=state.num_drawn,
            num_trained=state.num_trained,
            num_filtered=state.num_filtered,
            num_aborted=state.num_aborted,
            is_failing=state.num_useless >= MAX_USELESS_GROUPS,
        )
        for (name, ratio), state in zip(ratios.items(), states, strict=bool(states))
    )


class Mixture:
    """Chooses the source and task of each prompt in one run. seed: the job's."""

    def __init__(self, sources: Sequence[MixtureSource], seed: int) -> None:
        ratio_sum = sum(source.ratio for source in sources)
        self._progress = [_SourceProgress(source=source, target_share=source.ratio / ratio_sum) for source in sources]
        self._seed = seed
        self._progress_by_group: dict[GroupId, _SourceProgress] = {}
        self._notices: list[str] = []

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def states(self) -> tuple[SourceState, ...]:
        """State of each source, as it is stored. Prompts that were requested and have not arrived are not included."""
        return tuple(_copy(s.state) for s in self._progress)

    @property
    def tasks_in_flight(self) -> tuple[tuple[int, int, int], ...]:
        """(group, source, task) of each group in flight."""
        return tuple(
            sorted(
                (int(g), number, task)
                for number, s in enumerate(self._progress)
                for g, task in s.tasks_in_flight.items()
            )
        )

    def counts(self) -> tuple[SourceCounts, ...]:
        """Each source's counts."""
        return count_by_source({s.source.name: s.target_share for s in self._progress}, self.states)

    def take_metrics(self) -> dict[str, float]:
        """Metrics of each source for a step. Rewards are those since the previous call."""
        metrics: dict[str, float] = {}
        for progress, counts in zip(self._progress, self.counts(), strict=True):
            name = f"{SOURCE_PREFIX}{counts.name}/"
            for metric, rewards in (("reward", progress.trained_rewards), ("reward_scored", progress.scored_rewards)):
                if rewards:
                    metrics[name + metric] = sum(rewards) / len(rewards)
            metrics[f"{name}trained_share"], metrics[f"{name}drawn_share"] = counts.trained_share, counts.drawn_share
            progress.scored_rewards, progress.trained_rewards = [], []
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
        for progress, state in zip(self._progress, states, strict=bool(states)):
            progress.state = _copy(state)
            if progress.is_failing:
                self._notices.append(f"{_failing_notice(progress)}, before the resume")
        for group in in_flight:
            self.count_arrived(group.group, group.source, group.task)
            if group.group < num_groups:  # the stored state counts it as drawn
                self._progress[group.source].state.num_drawn -= 1

    def draw(self, num_groups: int) -> tuple[tuple[int, int], ...]:
        """Choose the next prompts: (source, task) of each. They count as requested until they arrive."""
        draws = []
        in_flight = [{*s.tasks_in_flight.values(), *s.requested_tasks} for s in self._progress]
        for _ in range(num_groups):
            number = self._choose_source()
            progress = self._progress[number]
            task = progress.source.sampler.choose(
                Draw(
                    number=progress.state.num_drawn + len(progress.requested_tasks),
                    seed=self._seed,
                    source=number,
                    in_flight=in_flight[number],
                ),
                progress.state.sampler,
            )
            progress.requested_tasks.append(task)
            in_flight[number].add(task)
            draws.append((number, task))
        return tuple(draws)

    def count_arrived(self, group: GroupId, source_number: int, task: int) -> None:
        """Count a group whose prompt has arrived."""
        progress = self._progress[source_number]
        if task in progress.requested_tasks:
            progress.requested_tasks.remove(task)
        progress.tasks_in_flight[group] = task
        self._progress_by_group[group] = progress
        progress.state.num_drawn += 1

    def record_rewards(self, group: GroupId, rewards: Sequence[float]) -> None:
        """Record the rewards of a complete group, without those that could not be computed."""
        if rewards:
            progress, mean = self._progress_by_group[group], sum(rewards) / len(rewards)
            progress.mean_rewards[group] = mean
            progress.scored_rewards.append(mean)

    def count_trained(self, groups: Iterable[GroupId]) -> None:
        """Count groups as trained on."""
        for group in groups:
            if (reward := self._progress_by_group[group].mean_rewards.get(group)) is not None:
                self._progress_by_group[group].trained_rewards.append(reward)
            progress = self._remove_group(group)
            if progress.is_failing:
                self._notices.append(f"task {progress.source.name!r}: a group of it was trained on again")
            progress.state.num_trained += 1
            progress.state.usable_share += USABLE_SHARE_WEIGHT * (1 - progress.state.usable_share)
            progress.state.num_useless = 0
            progress.state.credit -= 1
            self._add_credit()

    def count_ended(self, endings: Mapping[GroupId, tuple[Fate, AbortReason]]) -> None:
        """Count groups that have ended without being trained on."""
        for group, (fate, reason) in endings.items():
            if group not in self._progress_by_group:  # it was trained on; these are its surplus members
                continue
            progress = self._remove_group(group)
            was_failing, is_filtered = progress.is_failing, fate is Fate.FILTERED
            progress.state.num_filtered += is_filtered
            progress.state.num_aborted += not is_filtered
            progress.state.usable_share *= 1 - USABLE_SHARE_WEIGHT
            progress.state.num_useless += is_filtered or reason in FAILURES
            if progress.is_failing and not was_failing:
                self._notices.append(f"{_failing_notice(progress)}, the latest for the reason {reason.value}")

    # -- internal -------------------------------------------------------------------------------------------------

    def _choose_source(self) -> int:
        """The number of the source to draw from."""
        failing_sources = [n for n, s in enumerate(self._progress) if s.is_failing]
        healthy_sources = [n for n, s in enumerate(self._progress) if not s.is_failing] or failing_sources
        total_drawn = sum(s.state.num_drawn + len(s.requested_tasks) for s in self._progress)
        if len(healthy_sources) < len(self._progress) and total_drawn % PROBE_PERIOD == PROBE_PERIOD - 1:
            return failing_sources[total_drawn // PROBE_PERIOD % len(failing_sources)]
        healthy_share = sum(self._progress[n].target_share for n in healthy_sources)
        num_expected = 1 + sum(self._progress[n].expected_trained for n in healthy_sources)

        def lag(number: int) -> float:
            s = self._progress[number]
            return s.state.credit + s.target_share / healthy_share * num_expected - s.expected_trained

        return max(healthy_sources, key=lambda number: (lag(number), -number))

    def _add_credit(self) -> None:
        """Add the share of one trained group to the credit of each source."""
        healthy_share = sum(s.target_share for s in self._progress if not s.is_failing)
        for progress in self._progress:
            if progress.is_failing:
                progress.state.credit = min(float(MAX_USELESS_GROUPS), progress.state.credit + progress.target_share)
            else:
                progress.state.credit += progress.target_share / healthy_share

    def _remove_group(self, group: GroupId) -> _SourceProgress:
        """Remove a group from the groups in flight, and update its sampler. Returns its source."""
        progress = self._progress_by_group.pop(group)
        task, reward = progress.tasks_in_flight.pop(group), progress.mean_rewards.pop(group, None)
        progress.source.sampler.learn(task, reward, progress.state.sampler)
        return progress


def _copy(state: SourceState) -> SourceState:
    return replace(state, sampler={name: list(numbers) for name, numbers in state.sampler.items()})


def _failing_notice(progress: _SourceProgress) -> str:
    """A line that says that a source is failing, and how rarely it is drawn from."""
    return (
        f"task {progress.source.name!r} gets one draw in {PROBE_PERIOD} until one of its groups can be trained on; "
        f"none of its latest {progress.state.num_useless} could be"
    )
