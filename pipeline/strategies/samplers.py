"""Samplers, which choose the next task of a source. Pure.

A sampler object has only settings. Its state, named lists of numbers, is an argument of its methods and is saved in the
store, so a resumed run draws the same tasks as an uninterrupted one. Random numbers come
from the job's seed and the number of the draw.

Weights are never zero, so a task that has left the window can return to it, except those of stages of a curriculum that
have not begun, and with `review` = 0 of earlier ones. A task counts as seen as soon as a group of
it has ended, even if the group failed.
"""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from staleflow.stores.errors import ConfigError
from staleflow.tasks.settings.knobs import knob
from staleflow.tasks.settings.registry import Registry, RegistryEntry, UserCode
from staleflow.tasks.settings.seeds import Stream, generator
from staleflow.tasks.settings.user_code import error_text

State = dict[str, list[float]]
"""State of a sampler: named lists of numbers. It can be stored as JSON."""
T = TypeVar("T")
UNSEEN = -1.0
"""Value that stands for the mean reward of a task of which no group has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The inputs of one draw."""

    number: int
    """Number of earlier draws of this source."""
    seed: int
    """The job's seed."""
    source: int = 0
    """Number of the source."""
    in_flight: Set[int] = frozenset()
    """Tasks of groups that have not ended."""

    def rng(self) -> np.random.Generator:
        """A random generator for this draw only."""
        return generator(self.seed, Stream.TASKS, self.source, self.number)


class Sampler(RegistryEntry, ABC):
    """A rule for drawing the tasks of one source."""

    __slots__ = ()

    @abstractmethod
    def choose(self, draw: Draw, state: State) -> int:
        """Choose the index of the task to draw. Does not modify the state."""

    def learn(self, task: int, reward: float | None, state: State) -> None:
        """Update the state after a group of `task` has ended. reward: mean over its members; None if it has none,
        because it failed or was not needed."""


class UserSampler(UserCode, Sampler):
    """A sampler from a user's file: a class with `choose(draw, state)` and optionally `learn(task, reward, state)`.
    Errors carry its name."""

    def choose(self, draw: Draw, state: State) -> int:
        task = self._call_user_code("choose", lambda: self.code.choose(draw, state))
        try:
            number = operator.index(task)
        except Exception:  # noqa: BLE001  a value of user code may raise anything
            number = -1
        if number < 0:
            raise ConfigError(
                f"{self._error_prefix}: choose returned {task!r}; it must return the number of a task, from 0"
            )
        return number

    def learn(self, task: int, reward: float | None, state: State) -> None:
        if hasattr(self.code, "learn"):
            self._call_user_code("learn", lambda: self.code.learn(task, reward, state))

    @property
    def _error_prefix(self) -> str:
        return f"{SAMPLERS.key} = {self.name!r}"

    def _call_user_code(self, method: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except (Exception, SystemExit) as error:  # user code
            raise ConfigError(
                f"{self._error_prefix}: {method} raised {type(error).__name__}: {error_text(error)}"
            ) from error


SAMPLERS: Registry[Sampler] = Registry("sampler", "task.sampler", Sampler, user_code=UserSampler)


@SAMPLERS.register("in_order")
@dataclass(frozen=True, slots=True)
class InOrder(Sampler):
    """Tasks in the order of their source, starting again after the last row of a data set."""

    def choose(self, draw: Draw, state: State) -> int:
        return draw.number


@SAMPLERS.register("uniform")
@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform(Sampler):
    """The first `tasks` tasks in random order. Each is drawn once before any is drawn again, in a new order."""

    tasks: int = knob(1000, "tasks to choose from, the first of the source", low=1, high=1_000_000)

    def choose(self, draw: Draw, state: State) -> int:
        epoch, position = divmod(draw.number, self.tasks)
        return int(_permutation(self.tasks, draw.seed, draw.source, epoch)[position])


@functools.lru_cache(maxsize=16)
def _permutation(tasks: int, seed: int, source: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order of all tasks in one epoch."""
    return generator(seed, Stream.TASKS, source, epoch, tasks).permutation(tasks)


@SAMPLERS.register("difficulty_window")
@dataclass(frozen=True, slots=True, kw_only=True)
class DifficultyWindow(Sampler):
    """Prefer tasks whose mean reward is within a window, and new tasks."""

    tasks: int = knob(1000, "tasks to choose from, the first of the source", low=1, high=1_000_000)
    low: float = knob(0.2, "lowest mean reward of a task in the window")
    high: float = knob(0.8, "highest mean reward of a task in the window")
    outside: float = knob(
        0.1, "weight of a task outside of the window; one inside, or a new one, has weight 1", above=0, high=1
    )
    memory: float = knob(0.5, "weight of a task's earlier rewards when its mean is updated", low=0, high=0.99)

    def choose(self, draw: Draw, state: State) -> int:
        means = _means(state, "means", self.tasks)
        inside = (means == UNSEEN) | ((means >= self.low) & (means <= self.high))
        return _draw_weighted(np.where(inside, 1.0, self.outside), draw)

    def learn(self, task: int, reward: float | None, state: State) -> None:
        _update_average(state, "means", self.tasks, task, reward, self.memory)


@SAMPLERS.register("learning_progress")
@dataclass(frozen=True, slots=True, kw_only=True)
class LearningProgress(Sampler):
    """Prefer tasks whose reward is changing, measured by the difference of a fast and a slow moving average."""

    tasks: int = knob(1000, "tasks to choose from, the first of the source", low=1, high=1_000_000)
    explore: float = knob(0.3, "share of draws in which all tasks are equally likely", above=0, high=1)
    fast: float = knob(0.5, "weight of earlier rewards in the fast average", low=0, high=0.99)
    slow: float = knob(0.9, "weight of earlier rewards in the slow average", low=0, high=0.999)

    def choose(self, draw: Draw, state: State) -> int:
        fast, slow = _means(state, "fast", self.tasks), _means(state, "slow", self.tasks)
        progress = np.abs(fast - slow)
        uniform = np.full(self.tasks, 1.0 / self.tasks)
        total = float(progress.sum())
        return _draw_weighted(
            self.explore * uniform + (1 - self.explore) * (progress / total if total > 0 else uniform), draw
        )

    def learn(self, task: int, reward: float | None, state: State) -> None:
        _update_average(state, "fast", self.tasks, task, reward, self.fast)
        _update_average(state, "slow", self.tasks, task, reward, self.slow)


@SAMPLERS.register("curriculum")
@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum(Sampler):
    """Stages of uniform size, in the order of the source. The next stage begins once the mean reward of the
    current stage reaches `reward`."""

    tasks: int = knob(1000, "tasks to choose from, the first of the source", low=1, high=1_000_000)
    stages: int = knob(4, "stages that the tasks are divided into", low=1, high=1000)
    reward: float = knob(0.7, "mean reward of a stage's latest groups at which the next stage begins")
    groups: int = knob(32, "latest groups of a stage that the mean is over", low=1, high=10_000)
    review: float = knob(0.1, "share of draws from earlier stages", low=0, high=1)
    most_groups: int = knob(0, "groups after which the next stage begins whatever the reward; 0: no limit", low=0)

    def choose(self, draw: Draw, state: State) -> int:
        stage, rng = int(state.get("stage", [0])[0]), draw.rng()
        first, end = self._tasks_of(stage)
        if stage and rng.random() < self.review:
            first, end = 0, first
        return int(rng.integers(first, end))

    def learn(self, task: int, reward: float | None, state: State) -> None:
        stage = int(state.get("stage", [0])[0])
        first, end = self._tasks_of(stage)
        if not first <= task < end:
            return
        num_ended = int(state.get("ended", [0])[0]) + 1
        rewards = state.get("rewards", [])
        if reward is not None:
            rewards = [*rewards, reward][-self.groups :]
        has_passed = len(rewards) == self.groups and float(np.mean(rewards)) >= self.reward
        if stage + 1 < self._num_stages and (has_passed or 0 < self.most_groups <= num_ended):
            stage, num_ended, rewards = stage + 1, 0, []
        state["stage"], state["ended"], state["rewards"] = [stage], [num_ended], rewards

    @property
    def _num_stages(self) -> int:
        return min(self.stages, self.tasks)

    def _tasks_of(self, stage: int) -> tuple[int, int]:
        """The first task of a stage, and the one after its last."""
        return stage * self.tasks // self._num_stages, (stage + 1) * self.tasks // self._num_stages


def _means(state: State, name: str, tasks: int) -> npt.NDArray[np.float64]:
    """Array with a moving average for each task; UNSEEN for tasks of which no group has ended."""
    means = np.full(tasks, UNSEEN)
    values = state.get(name, [])
    means[: len(values)] = values
    return means


def _update_average(state: State, name: str, tasks: int, task: int, reward: float | None, memory: float) -> None:
    """Update a moving average of one task in the state. A group without a reward does not change the average; if it is
    the task's first group it counts as reward 0."""
    means = state.setdefault(name, [])
    if not 0 <= task < tasks:
        return
    means += [UNSEEN] * (task + 1 - len(means))
    if means[task] == UNSEEN:
        means[task] = max(0.0, reward or 0.0)
    elif reward is not None:
        means[task] = max(0.0, memory * means[task] + (1 - memory) * reward)


def _draw_weighted(weights: npt.NDArray[np.float64], draw: Draw) -> int:
    """Draw a random task with these weights. Tasks in flight are left out, unless all are in flight."""
    available = weights.copy()
    available[[task for task in draw.in_flight if task < len(available)]] = 0.0
    cumulative = np.cumsum(available if available.any() else weights)
    return int(np.searchsorted(cumulative, draw.rng().random() * cumulative[-1], side="right"))  # random() < 1
