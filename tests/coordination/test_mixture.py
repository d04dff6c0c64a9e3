"""The ratio of task sources is a ratio of trained groups; it holds under filters, failures and resumes."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import asdict, replace

import numpy as np
import pytest

from staleflow.pipeline.coordination.mixture import (
    MAX_USELESS_GROUPS,
    PROBE_PERIOD,
    Mixture,
    MixtureSource,
    count_by_source,
)
from staleflow.pipeline.strategies.samplers import InOrder, State
from staleflow.stores.in_flight.in_flight_state import GroupInFlight
from staleflow.stores.trajectories.records import SourceState
from staleflow.stores.trajectory import AbortReason, Fate, GroupId

FILTERED = (Fate.FILTERED, AbortReason.NO_SIGNAL)
SURPLUS = (Fate.ABORTED, AbortReason.SURPLUS_GROUP)
FAILED = (Fate.ABORTED, AbortReason.ENVIRONMENT_FAILED)


class Run:
    """A run without instances: `in_flight` groups at a time, which end in random order."""

    def __init__(self, ratios: list[float], usable: list[float], *, in_flight: int = 32, seed: int = 0) -> None:
        """usable: share of the groups of each source that can be trained."""
        self.usable, self.room = usable, in_flight
        self.rng = np.random.default_rng(seed)
        self.sources = [MixtureSource(name=f"s{i}", ratio=r, sampler=InOrder()) for i, r in enumerate(ratios)]
        self.mixture = Mixture(self.sources, seed)
        self.live: dict[GroupId, int] = {}
        self.num_groups = 0
        self.trained: list[int] = []
        self.drawn: list[int] = []
        self.lines: list[str] = []
        self.tasks: list[tuple[int, int]] = []

    def step(self, *, surplus: float = 0.0) -> None:
        """Draw as many groups as fit and let one group end."""
        for source, task in self.mixture.draw(self.room - len(self.live)):
            group = GroupId(self.num_groups)
            self.num_groups += 1
            self.mixture.count_arrived(group, source, task)
            self.live[group] = source
            self.drawn.append(source)
            self.tasks.append((source, task))
        group = list(self.live)[int(self.rng.integers(len(self.live)))]
        source = self.live.pop(group)
        if self.rng.random() < surplus:
            self.mixture.count_ended({group: SURPLUS})
        elif self.rng.random() < self.usable[source]:
            self.mixture.record_rewards(group, [0.0, 1.0])
            self.mixture.count_trained([group])
            self.trained.append(source)
        else:
            self.mixture.record_rewards(group, [0.0, 0.0])
            self.mixture.count_ended({group: FILTERED})
        self.lines += self.mixture.take_notices()

    def train(self, num_groups: int, *, surplus: float = 0.0) -> None:
        """Run until this many groups are trained."""
        for _ in range(num_groups * 40):
            if len(self.trained) >= num_groups:
                return
            self.step(surplus=surplus)
        raise AssertionError("the run stands still")

    def shares(self) -> list[float]:
        counts = Counter(self.trained)
        return [counts[i] / len(self.trained) for i in range(len(self.usable))]

    def kill(self, stored: tuple[SourceState, ...], stored_groups: int) -> None:
        """Resume in another process from a stored state and the groups in flight. stored_groups: groups drawn at the
        time of the commit."""
        self.mixture = Mixture(self.sources, 0)
        states = [SourceState(**json.loads(json.dumps(asdict(s)))) for s in stored]
        drawn = [(group, *self.tasks[group]) for group in self.live]
        in_flight = [GroupInFlight(group=g, prompt_tokens=1, members=(), source=s, task=t) for g, s, t in drawn]
        self.mixture.restore(states, stored_groups, in_flight)


@pytest.mark.parametrize(
    ("ratios", "usable", "in_flight", "surplus"),
    [([3, 1], [0.9, 0.2], 256, 0.0), ([0.5, 0.3, 0.15, 0.05], [0.3, 0.9, 0.0, 0.6], 32, 0.2)],
)
def test_the_ratio_holds_within_one_percent_over_ten_thousand_groups(
    ratios: list[float], usable: list[float], in_flight: int, surplus: float
) -> None:
    """With filters, redundant groups and a source that always fails, whose share the others divide."""
    run = Run(ratios, usable, in_flight=in_flight)
    run.train(10_000, surplus=surplus)
    shares = run.shares()
    working = sum(r for r, share in zip(ratios, usable, strict=True) if share)
    expected = [r / working if share else 0.0 for r, share in zip(ratios, usable, strict=True)]
    assert shares == pytest.approx(expected, abs=0.01)
    views = run.mixture.counts()
    assert [v.trained_share for v in views] == pytest.approx(shares)
    drawn = Counter(run.drawn)
    assert [v.drawn_share for v in views] == pytest.approx([drawn[i] / len(run.drawn) for i in range(len(ratios))])


def test_a_source_that_always_fails_is_named_once_and_does_not_stall_the_others() -> None:
    run = Run([1, 1, 2], [1.0, 0.0, 0.5])
    run.train(3000)
    (line,) = run.lines
    assert line == (
        "task 's1' gets one draw in 16 until one of its groups can be trained on; none of its latest 64 could be, the "
        "latest for the reason no_signal"
    )
    run.kill(run.mixture.states, run.num_groups)
    (line,) = run.mixture.take_notices()
    assert line.startswith("task 's1' gets one draw in 16") and line.endswith("could be, before the resume")
    assert run.shares() == pytest.approx([1 / 3, 0, 2 / 3], abs=0.01)
    assert run.drawn.count(1) <= len(run.drawn) / PROBE_PERIOD + 4 * MAX_USELESS_GROUPS


def test_a_source_that_recovers_catches_up_by_a_bounded_number() -> None:
    run = Run([1, 1], [1.0, 0.0])
    run.train(1000)
    run.usable = [1.0, 1.0]
    trained = len(run.trained)
    run.train(trained + 1000)
    assert run.lines[1] == "task 's1': a group of it was trained on again"
    later = run.trained[trained:]
    assert later.count(1) == pytest.approx(500 + MAX_USELESS_GROUPS / 2, abs=20)
    assert run.trained[-200:].count(1) == pytest.approx(100, abs=15)


def test_failing_sources_are_tried_in_turn() -> None:
    run = Run([1.0, 1.0, 1.0], [1.0, 0.0, 0.0])
    run.train(40 * PROBE_PERIOD)
    late = Counter(run.drawn[-20 * PROBE_PERIOD :])
    assert late[1] == late[2] == 10


def test_a_sampler_learns_from_every_group_that_ends() -> None:
    learned: list[tuple[int, float | None]] = []

    class RecordingSampler(InOrder):
        def learn(self, task: int, reward: float | None, state: State) -> None:
            learned.append((task, reward))

    mixture = Mixture([MixtureSource(name="a", ratio=1.0, sampler=RecordingSampler())], 0)
    for group, (source, task) in enumerate(mixture.draw(3)):
        mixture.count_arrived(GroupId(group), source, task)
    mixture.record_rewards(GroupId(2), [1.0, 0.0, 0.5])
    mixture.record_rewards(GroupId(0), [])
    mixture.count_trained([GroupId(2)])
    mixture.count_ended({GroupId(0): FAILED, GroupId(1): SURPLUS})
    assert learned == [(2, 0.5), (0, None), (1, None)]


def test_if_all_sources_fail_all_are_drawn() -> None:
    run = Run([1, 1], [0.0, 0.0])
    for _ in range(1000):
        run.step()
    assert run.drawn[-200:].count(0) == pytest.approx(100, abs=25)
    assert len(run.lines) == 2


def test_failed_environments_count_as_failures_of_a_source() -> None:
    mixture = Mixture([MixtureSource(name=n, ratio=1, sampler=InOrder()) for n in "ab"], 0)
    for group in range(MAX_USELESS_GROUPS):
        mixture.draw(1)
        mixture.count_arrived(GroupId(group), 0, group)
        mixture.count_ended({GroupId(group): FAILED})
    assert "environment_failed" in mixture.take_notices()[0]


def test_the_ratio_holds_over_a_hundred_kills() -> None:
    run = Run([2, 1], [0.4, 0.9])
    for _ in range(100):
        run.train(len(run.trained) + 30)
        stored, groups = run.mixture.states, run.num_groups
        before, trained = set(run.live), len(run.trained)
        for _ in range(7):
            run.step()
        # Killed: groups that ended since the commit are undone, and groups drawn since continue.
        del run.trained[trained:]
        run.live = {GroupId(g): run.drawn[g] for g in sorted({*before, *range(groups, run.num_groups)})}
        run.kill(stored, groups)
    assert run.shares() == pytest.approx([2 / 3, 1 / 3], abs=0.01)
    # In order and without repeated tasks, despite restarts.
    for number in (0, 1):
        tasks = [task for source, task in run.tasks if source == number]
        assert tasks == sorted(set(tasks))


def test_state_is_the_same_after_a_store_and_a_resume() -> None:
    run = Run([2, 1], [0.4, 0.9])
    run.train(200)
    before = run.mixture.states, run.mixture.tasks_in_flight, run.mixture.draw(40)
    run.kill(before[0], run.num_groups)
    assert (run.mixture.states, run.mixture.tasks_in_flight, run.mixture.draw(40)) == before


def test_step_metrics_have_rewards_of_trained_and_of_all_scored_groups() -> None:
    mixture = Mixture([MixtureSource(name=n, ratio=1, sampler=InOrder()) for n in "ab"], 0)
    for group, rewards in enumerate(([1.0, 1.0], [0.0, 1.0])):
        mixture.draw(1)
        mixture.count_arrived(GroupId(group), 0, group)
        mixture.record_rewards(GroupId(group), rewards)
    mixture.count_ended({GroupId(0): FILTERED})
    mixture.count_trained([GroupId(1)])
    shares = {"task/a/trained_share": 1.0, "task/a/drawn_share": 1.0, "task/b/trained_share": 0.0}
    shares["task/b/drawn_share"] = 0.0
    assert mixture.take_metrics() == {"task/a/reward": 0.5, "task/a/reward_scored": 0.75, **shares}
    assert mixture.take_metrics() == shares


def test_counts_and_choices_match_plain_formulas() -> None:  # noqa: PLR0915  one case per event
    """Over random draws, arrivals and endings of three sources, one of which fails for a while."""
    rng = random.Random(1)
    ratios = [5.0, 3.0, 2.0]
    mixture = Mixture([MixtureSource(name=f"s{i}", ratio=r, sampler=InOrder()) for i, r in enumerate(ratios)], 0)
    weights = [ratio / sum(ratios) for ratio in ratios]
    counts = [Counter[str]() for _ in ratios]
    credit, usable, useless = [0.0] * 3, [1.0] * 3, [0] * 3
    requested: list[tuple[int, int]] = []
    live: dict[GroupId, tuple[int, int]] = {}
    num_probes = 0
    for number in range(3000):
        failing = [i for i in range(3) if useless[i] >= MAX_USELESS_GROUPS]
        match rng.randrange(3):
            case 0 if len(requested) < 5:
                total = sum(c["drawn"] for c in counts) + len(requested)
                of_each = [[s for s, _ in requested + list(live.values())].count(i) for i in range(3)]
                coming = [of_each[i] * max(1 / 256, usable[i]) for i in range(3)]
                healthy = [i for i in range(3) if i not in failing]
                if failing and total % PROBE_PERIOD == PROBE_PERIOD - 1:
                    expected = failing[total // PROBE_PERIOD % len(failing)]
                    num_probes += 1
                else:
                    shares = sum(weights[i] for i in healthy)
                    num_coming = 1 + sum(coming[i] for i in healthy)
                    lags = {i: credit[i] + weights[i] / shares * num_coming - coming[i] for i in healthy}
                    expected = max(healthy, key=lambda i: (lags[i], -i))
                ((source, task),) = mixture.draw(1)
                assert source == expected
                assert task == counts[source]["drawn"] + [s for s, _ in requested].count(source)
                requested.append((source, task))
            case 1 if requested:
                source, task = requested.pop(0)
                live[GroupId(number)] = source, task
                counts[source]["drawn"] += 1
                mixture.count_arrived(GroupId(number), source, task)
            case 2 if live:
                group = rng.choice(list(live))
                source, _ = live.pop(group)
                useful = rng.random() < (0.8, 0.5, 0.0 if number < 2000 else 0.9)[source]
                if useful:
                    mixture.count_trained([group])
                    counts[source]["trained"] += 1
                    usable[source] += (1 - usable[source]) / 32
                    useless[source] = 0
                    credit[source] -= 1
                    shares = sum(weights[i] for i in range(3) if useless[i] < MAX_USELESS_GROUPS)
                    for i in range(3):
                        due = credit[i] + weights[i]
                        credit[i] = (
                            min(64.0, due) if useless[i] >= MAX_USELESS_GROUPS else credit[i] + weights[i] / shares
                        )
                else:
                    ending = rng.choice([FILTERED, FAILED, SURPLUS])
                    mixture.count_ended({group: ending, GroupId(-5): SURPLUS})
                    counts[source]["filtered" if ending == FILTERED else "aborted"] += 1
                    usable[source] *= 31 / 32
                    useless[source] += ending != SURPLUS
        for state, count in zip(mixture.states, counts, strict=True):
            numbers = state.num_drawn, state.num_trained, state.num_filtered, state.num_aborted
            assert numbers == tuple(count[name] for name in ("drawn", "trained", "filtered", "aborted"))
        assert [state.credit for state in mixture.states] == pytest.approx(credit)
        assert [state.usable_share for state in mixture.states] == pytest.approx(usable)
        assert [state.num_useless for state in mixture.states] == useless
        assert mixture.tasks_in_flight == tuple(sorted((int(g), *of) for g, of in live.items()))
    assert num_probes > 0
    assert useless[2] < MAX_USELESS_GROUPS, "it has recovered"
    for view, weight, count in zip(mixture.counts(), weights, counts, strict=True):
        assert view.target_share == pytest.approx(weight)
        assert view.drawn_share == pytest.approx(count["drawn"] / sum(c["drawn"] for c in counts))
        assert view.trained_share == pytest.approx(count["trained"] / sum(c["trained"] for c in counts))


def test_all_shares_are_zero_before_the_first_draw() -> None:
    mixture = Mixture([MixtureSource(name=n, ratio=1, sampler=InOrder()) for n in "ab"], 0)
    assert [(view.drawn_share, view.trained_share) for view in mixture.counts()] == [(0.0, 0.0)] * 2
    mixture.draw(1)
    mixture.count_arrived(GroupId(0), 0, 0)
    assert [view.drawn_share for view in mixture.counts()] == [1.0, 0.0]


def test_source_views_describe_each_source_in_a_line() -> None:
    states = [SourceState(num_drawn=6, num_trained=3, num_filtered=2, num_aborted=1), SourceState(num_drawn=2)]
    failing = replace(states[1], num_useless=MAX_USELESS_GROUPS)
    assert [view.line for view in count_by_source({"sums": 3, "letters": 1}, [states[0], failing])] == [
        "task sums: 100.0% of the trained groups (ratio 75.0%), 75.0% of the drawn; 3 trained, 2 filtered, 1 aborted",
        "task letters: 0.0% of the trained groups (ratio 25.0%), 25.0% of the drawn; "
        "0 trained, 0 filtered, 0 aborted, failing",
    ]
