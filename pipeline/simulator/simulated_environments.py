"""Environments and evaluations in virtual time, within the limits of [environment]. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from staleflow.pipeline.config import factories
from staleflow.pipeline.config.evaluation_settings import EvaluationSchedule
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.coordination.commands import StepEnvironment
from staleflow.pipeline.coordination.events import (
    EnvironmentFailed,
    EnvironmentStepped,
    EvaluationRequested,
    TrajectoryScored,
)
from staleflow.stores.in_flight.in_flight_state import NewGroup
from staleflow.stores.trajectory import GroupId, TrajectoryId
from staleflow.tasks.emulation.emulated_episodes import remaining_tokens
from staleflow.tasks.emulation.workload import Workload

EnvironmentEvent = EnvironmentStepped | EnvironmentFailed | TrajectoryScored


@dataclass(slots=True)
class _Episode:
    """An open episode. num_turns: turns that its environment was asked to answer. awaits_answer: whether the answer to
    the latest is pending. is_stepping: whether the environment runs that step. spent_s: seconds of all its steps."""

    trajectory: TrajectoryId
    num_turns: int = 0
    awaits_answer: bool = False
    is_stepping: bool = False
    spent_s: float = 0.0


class SimulatedEnvironments:
    """The environments of a simulated run.

    schedule_after: schedules a call after a number of seconds. on_result: receives results of steps.
    """

    def __init__(
        self,
        config: RunConfig,
        workload: Workload,
        *,
        schedule_after: Callable[[float, Callable[[], None]], None],
        on_result: Callable[[EnvironmentEvent], None],
    ) -> None:
        self._members_per_group = config.members_started_per_group
        self._workload = workload
        self._episodes = factories.make_episodes(config, workload)
        self._config = config.environment
        self._max_tokens = config.rollout.max_new_tokens
        self._turn_tokens = config.rollout.turn_tokens or config.rollout.max_new_tokens
        self._reward_s, self._overhead_s = config.simulation.reward_s, config.simulation.environment_overhead_s
        self._schedule_after = schedule_after
        self._on_result = on_result
        self._open_episodes: dict[TrajectoryId, _Episode] = {}
        self._failures: Counter[TrajectoryId] = Counter()
        self._num_free_slots = config.environment.hosts * config.environment.concurrency
        self._queue: deque[Callable[[], None]] = deque()
        self._barrier = Barrier(self._release) if config.simulation.lock_step else None

    def remaining_tokens(self, trajectory: TrajectoryId, tokens: int) -> int:
        """Tokens that a trajectory samples until its turn ends. tokens: its length after the prompt, observations
        included."""
        turns = self._workload.turns(*divmod(abs(trajectory), self._members_per_group))
        return max(1, min(remaining_tokens(turns, tokens), self._turn_tokens, self._max_tokens - tokens))

    def begin_turn(self, trajectory: TrajectoryId) -> None:
        """Record that the sampling of a trajectory's turn begins."""
        if self._barrier is not None:
            self._barrier.enter(trajectory)

    def end_episode(self, trajectory: TrajectoryId) -> None:
        """Record that a trajectory has no more turns."""
        if self._barrier is not None:
            self._barrier.leave(trajectory)

    def step(self, command: StepEnvironment, tokens: int) -> None:
        """Start an env step in reply to the turn that ends a response at `tokens` tokens, once there is a free slot."""
        trajectory = command.trajectory
        episode = self._open_episodes.setdefault(trajectory, _Episode(trajectory))
        episode.awaits_answer = True
        self._queue.append(lambda: self._begin(episode, command, tokens))
        self._start_queued()

    def close_environment(self, trajectory: TrajectoryId) -> None:
        """Close an environment. A running step is cancelled."""
        episode = self._open_episodes.pop(trajectory)
        episode.awaits_answer = False
        self._failures.pop(trajectory, None)
        self._free_slot(episode)

    def _start_queued(self) -> None:
        while self._num_free_slots and self._queue:
            self._queue.popleft()()

    def _begin(self, episode: _Episode, command: StepEnvironment, tokens: int) -> None:
        if not episode.awaits_answer:  # closed while it waited for a slot
            return
        self._num_free_slots -= 1
        episode.is_stepping = True
        seconds, event = self._outcome(episode, command, tokens)
        self._schedule_after(seconds, lambda: self._end(episode, event))

    def _outcome(self, episode: _Episode, command: StepEnvironment, tokens: int) -> tuple[float, EnvironmentEvent]:
        trajectory, route_number, config = episode.trajectory, command.route_number, self._config
        group, member = divmod(abs(trajectory), self._members_per_group)
        truncated = command.truncated or tokens >= self._max_tokens or episode.num_turns >= config.max_turns - 1
        attempt = self._failures[trajectory]
        step_result = self._episodes.step_result(group, member, episode.num_turns, attempt=attempt, truncated=truncated)
        episode.num_turns += 1
        allowed_s = min(config.step_timeout_s, config.episode_timeout_s - episode.spent_s)
        if step_result.seconds > allowed_s:
            return allowed_s, EnvironmentFailed(
                trajectory=trajectory, route_number=route_number, error=f"no answer in {allowed_s:g} s"
            )
        episode.spent_s += step_result.seconds
        if step_result.error:
            return step_result.seconds, EnvironmentFailed(
                trajectory=trajectory, route_number=route_number, error=step_result.error
            )
        if step_result.ended or tokens + step_result.tokens >= self._max_tokens:
            reward = self._workload.reward(group, member)
            return step_result.seconds + self._reward_s, TrajectoryScored(trajectory=trajectory, reward=reward)
        return step_result.seconds, EnvironmentStepped(
            trajectory=trajectory, route_number=route_number, tokens=tokens + step_result.tokens
        )

    def _free_slot(self, episode: _Episode) -> None:
        """Free the slot that an episode occupies, if any."""
        self._num_free_slots += episode.is_stepping
        episode.is_stepping = False
        self._start_queued()

    def _end(self, episode: _Episode, event: EnvironmentEvent) -> None:
        self._free_slot(episode)
        if not episode.awaits_answer:
            return
        episode.awaits_answer = False
        match event:
            case TrajectoryScored():
                del self._open_episodes[event.trajectory]
                self._failures.pop(event.trajectory, None)
                self.end_episode(event.trajectory)
            case EnvironmentFailed():
                del self._open_episodes[event.trajectory]
                self._failures[event.trajectory] += 1
        if not isinstance(event, EnvironmentStepped):
            self._on_result(event)
        elif self._barrier is not None:
            self._barrier.hold(event)
        elif self._overhead_s:
            self._schedule_after(self._overhead_s, lambda: self._emit_if_open(event))
        else:
            self._on_result(event)

    def _release(self, events: list[EnvironmentStepped]) -> None:
        def emit_all() -> None:
            for event in events:
                self._emit_if_open(event)

        self._schedule_after(self._overhead_s, emit_all)

    def _emit_if_open(self, event: EnvironmentStepped) -> None:
        """Report a result, unless the trajectory's environment was closed meanwhile."""
        if event.trajectory in self._open_episodes:
            self._on_result(event)


class Barrier:
    """Lock step of a batch of environments: results are held back until all trajectories that take turns have
    theirs."""

    def __init__(self, release: Callable[[list[EnvironmentStepped]], None]) -> None:
        self._release = release
        self._members: set[TrajectoryId] = set()
        self._held_results: dict[TrajectoryId, EnvironmentStepped] = {}

    def enter(self, trajectory: TrajectoryId) -> None:
        self._members.add(trajectory)

    def hold(self, event: EnvironmentStepped) -> None:
        self._held_results[event.trajectory] = event
        self._open_if_all_wait()

    def leave(self, trajectory: TrajectoryId) -> None:
        self._members.discard(trajectory)
        self._held_results.pop(trajectory, None)
        self._open_if_all_wait()

    def _open_if_all_wait(self) -> None:
        if self._held_results and len(self._held_results) == len(self._members):
            results, self._held_results = list(self._held_results.values()), {}
            self._release(results)


class SimulatedEvaluations:
    """The evaluations of one simulated run. Responses are the workload's."""

    def __init__(self, config: RunConfig, workload: Workload) -> None:
        self._workload = workload
        self._schedule = EvaluationSchedule(every=config.evaluation.every, num_steps=config.steps)
        sets = config.evaluation_sets.values() if config.evaluation.every else ()
        self._num_responses = sum(eval_set.prompts * eval_set.responses_per_prompt for eval_set in sets)
        self._number = 0
        self._is_running = self._is_due = False

    @property
    def is_pending(self) -> bool:
        """Whether an evaluation is running or due."""
        return self._is_running or self._is_due

    def request_after_publish(self, version: int) -> EvaluationRequested | None:
        """The request that follows a published version, if it is due and no evaluation is running."""
        self._is_due |= self._num_responses > 0 and self._schedule.is_due(version)
        return self._next()

    def end(self, *, abandoned: bool) -> EvaluationRequested | None:
        """The request that follows the end of an evaluation, if another one is due."""
        self._is_running = False
        self._is_due |= abandoned
        return self._next()

    def _next(self) -> EvaluationRequested | None:
        if self._is_running or not self._is_due:
            return None
        self._is_running, self._is_due = True, False
        groups = [GroupId(-1 - self._number * self._num_responses - i) for i in range(self._num_responses)]
        self._number += 1
        return EvaluationRequested(
            evaluation=self._number - 1,
            groups=tuple(NewGroup(group=g, prompt_tokens=self._workload.prompt_tokens(-g)) for g in groups),
        )
