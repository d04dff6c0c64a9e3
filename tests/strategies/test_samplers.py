"""Samplers, and known faults of samplers in other systems: drained pools, and a failing task drawn for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from staleflow.pipeline.strategies.samplers import (
    SAMPLERS,
    Curriculum,
    DifficultyWindow,
    Draw,
    InOrder,
    LearningProgress,
    Sampler,
    State,
    Uniform,
    UserSampler,
)
from staleflow.stores.errors import ConfigError

TASKS = 20


def draw_tasks(
    sampler: Sampler, count: int, reward: Callable[[int], float | None], state: State | None = None
) -> tuple[list[int], State]:
    """Return tasks drawn one at a time, each with a group that ends before the next draw, and the sampler state."""
    state = {} if state is None else state
    tasks = []
    for number in range(count):
        task = sampler.choose(Draw(number=number, seed=1), state)
        tasks.append(task)
        sampler.learn(task, reward(task), state)
    return tasks, state


ALL = [
    InOrder(),
    Uniform(tasks=TASKS),
    DifficultyWindow(tasks=TASKS),
    LearningProgress(tasks=TASKS),
    Curriculum(tasks=TASKS),
]


@pytest.mark.parametrize("sampler", ALL, ids=lambda s: s.name)
def test_a_choice_depends_on_seed_number_and_state_only(sampler: Sampler) -> None:
    tasks, state = draw_tasks(sampler, 50, lambda task: task / TASKS)
    before = {name: list(numbers) for name, numbers in state.items()}
    draw = Draw(number=50, seed=1, in_flight={3, 4})
    assert sampler.choose(draw, state) == sampler.choose(draw, state)
    assert state == before, "choosing changed the state"
    assert draw_tasks(sampler, 50, lambda task: task / TASKS) == (tasks, state)


@pytest.mark.parametrize("sampler", ALL[1:], ids=lambda s: s.name)
@pytest.mark.parametrize("reward", [0.0, 0.5, 1.0, None])
def test_no_set_of_tasks_is_drained(sampler: Sampler, reward: float | None) -> None:
    """For any rewards no task is excluded; a curriculum draws all tasks of its stage."""
    tasks, _ = draw_tasks(sampler, 1000, lambda task: reward)
    expected = range(TASKS // 4) if isinstance(sampler, Curriculum) and reward != 1.0 else range(TASKS)
    assert set(tasks) == set(expected)


@pytest.mark.parametrize("sampler", ALL[1:], ids=lambda s: s.name)
def test_a_task_that_always_fails_does_not_become_the_only_one(sampler: Sampler) -> None:
    """It is no longer new after its first group, although no reward was ever computed."""
    tasks, _ = draw_tasks(sampler, 1000, lambda task: None if task == 0 else 0.5)
    assert 0 < tasks.count(0) < 1000 * 0.3


def test_uniform_draws_each_task_once_per_epoch() -> None:
    tasks, _ = draw_tasks(Uniform(tasks=TASKS), 3 * TASKS, lambda task: 0.0)
    epochs = [tasks[i * TASKS : (i + 1) * TASKS] for i in range(3)]
    assert all(sorted(epoch) == list(range(TASKS)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_difficulty_window_prefers_tasks_within_it_and_readmits_tasks() -> None:
    sampler = DifficultyWindow(tasks=TASKS, outside=0.1)
    tasks, state = draw_tasks(sampler, 2000, lambda task: 0.5 if task < 5 else 1.0)
    late = Counter(tasks[500:])
    inside = sum(late[task] for task in range(5)) / 1500
    assert inside == pytest.approx(5 / (5 + 15 * 0.1), abs=0.05)
    # Mastered tasks are found again once they are difficult again.
    tasks, _ = draw_tasks(sampler, 2000, lambda task: 0.5, state)
    assert Counter(tasks[1000:])[12] == pytest.approx(50, abs=25)


def test_learning_progress_prefers_tasks_that_change() -> None:
    sampler, state = LearningProgress(tasks=TASKS, explore=0.3), State()
    counts: Counter[int] = Counter()
    for number in range(2000):
        task = sampler.choose(Draw(number=number, seed=1), state)
        counts[task] += 1
        sampler.learn(task, min(1.0, counts[task] / 400) if task < 2 else 0.5, state)
    assert counts[0] + counts[1] > 600
    assert min(counts.values()) > 2000 * 0.3 / TASKS / 2


def test_learning_progress_explores_in_the_configured_share_of_draws() -> None:
    sampler = LearningProgress(tasks=10, explore=0.3)
    state = {"fast": [0.5], "slow": [0.1]}  # only the first task changes
    tasks = [sampler.choose(Draw(number=number, seed=1), state) for number in range(2000)]
    assert tasks.count(0) == pytest.approx(2000 * (0.7 + 0.3 / 10), abs=60)


def test_difficulty_window_averages_the_rewards_of_each_task() -> None:
    sampler, state = DifficultyWindow(tasks=2, memory=0.5), State()
    for task, reward in ((0, 0.75), (0, 0.25), (1, None), (1, 1.0), (0, None), (0, -4.0), (2, 1.0), (-1, 1.0)):
        sampler.learn(task, reward, state)
    assert state == {"means": [0.0, 0.5]}
    sampler.learn(0, 0.5, state)
    assert state == {"means": [0.25, 0.5]}


def test_curriculum_advances_when_a_stage_is_learned_or_has_its_groups() -> None:
    sampler = Curriculum(tasks=TASKS, stages=4, reward=0.7, groups=10, review=0.2)
    _, state = draw_tasks(sampler, 9, lambda task: 1.0)
    assert state["stage"] == [0]
    tasks, state = draw_tasks(sampler, 200, lambda task: 1.0 if task < 10 else 0.5)
    assert state["stage"] == [2]
    assert tasks[:10] != tasks[10:20]
    assert max(tasks) == 14
    assert sum(task < 10 for task in tasks[100:]) == pytest.approx(20, abs=12)
    for most_groups, groups, stage in ((1, 1, 1), (50, 49, 0), (50, 120, 2)):
        _, state = draw_tasks(Curriculum(tasks=TASKS, stages=4, most_groups=most_groups), groups, lambda task: 0.0)
        assert state["stage"] == [stage]


def test_a_task_at_an_edge_of_the_window_is_inside() -> None:
    sampler = DifficultyWindow(tasks=4, low=0.25, high=0.75, outside=1e-9)
    state = {"means": [0.25, 0.75, 0.2499, 0.7501]}
    assert {sampler.choose(Draw(number=number, seed=1), state) for number in range(200)} == {0, 1}


def test_a_curriculum_stage_ends_at_just_the_mean_reward_that_is_set() -> None:
    _, state = draw_tasks(Curriculum(tasks=TASKS, stages=4, reward=0.75, groups=4), 4, lambda task: 0.75)
    assert state["stage"] == [1]


def test_a_task_in_flight_is_drawn_again_only_if_all_are() -> None:
    sampler = DifficultyWindow(tasks=3)
    chosen = {sampler.choose(Draw(number=n, seed=1, in_flight={0, 2, 3}), {}) for n in range(20)}
    assert chosen == {1}, "task 3 was in the source before a resume"
    chosen = {sampler.choose(Draw(number=n, seed=1, in_flight={0, 1, 2}), {}) for n in range(40)}
    assert chosen == {0, 1, 2}


def test_a_user_sampler_has_its_knobs_and_its_errors_name_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from staleflow import knob\n"
        "@dataclass\n"
        "class Every:\n"
        "    stride: int = knob(2, 'distance of two tasks', low=1)\n"
        "    def choose(self, draw, state):\n"
        "        return draw.number * self.stride if self.stride < 9 else -1\n"
        "    def learn(self, task, reward, state):\n"
        "        state.setdefault('seen', []).append(task)\n"
    )
    name = f"{tmp_path}/mine.py:Every"
    tasks, state = draw_tasks(SAMPLERS.make(UserSampler(name=name, knobs={"stride": 3})), 3, lambda task: 1.0)
    assert tasks == state["seen"] == [0, 3, 6]
    wrong = SAMPLERS.make(UserSampler(name=name, knobs={"stride": 9}))
    with pytest.raises(ConfigError, match=r"mine.py:Every': choose returned -1; it must return the number of a task"):
        wrong.choose(Draw(number=0, seed=1), {})
    with pytest.raises(ConfigError, match=r"mine.py:Every': learn raised AttributeError: .*no attribute 'setdefault'"):
        wrong.learn(0, 1.0, None)  # type: ignore[arg-type]
