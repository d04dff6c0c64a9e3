"""The environment host: an actor that runs the environments of many episodes, step by step.

Texts go directly between trajectory server and host; the driver sees ids, lengths and rewards. An env step is requested
and its outcome fetched in separate calls, so that no call takes as long as an environment may.

Invariants:
- An observation or a reward reaches the trajectory server before the driver learns of it.
- An env step may be requested twice, even on two hosts. The server keeps the first result, and a step that has a result
  is not run again.
- A failed environment never results in a reward: the server drops all of the trajectory but its prompt before the
  driver learns of the failure.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from staleflow.stores.errors import ActorLost
from staleflow.stores.trajectory import TrajectoryId
from staleflow.tasks.actors.actor_calls import call_actor, remote_methods
from staleflow.tasks.actors.server_messages import (
    EpisodeState,
    ObservationItem,
    ObservationReceipt,
    RewardItem,
    TurnItem,
)
from staleflow.tasks.episodes.step_results import EpisodeKey, HostedStepResult
from staleflow.tasks.rendering.sampled_turn import SampledTurn
from staleflow.tasks.rendering.task_source import Record
from staleflow.tasks.sources.reward_process import ScoredResponse

REPLAY_DIFFERS = "a replay of its earlier turns returned other observations"

FAILED_BEFORE = "the reason of its failure was lost together with its host or the trajectory server"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvStepItem:
    """A request for an env step. truncated: the turn was truncated, so the episode ends."""

    trajectory: TrajectoryId
    route_number: int
    truncated: bool

    def outcome(self, **fields: Any) -> EnvStepOutcome:
        """Create the outcome of this env step."""
        return EnvStepOutcome(trajectory=self.trajectory, route_number=self.route_number, **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvStepOutcome:
    """The outcome of an env step, without texts."""

    trajectory: TrajectoryId
    route_number: int
    num_tokens: int = 0
    """Length of the whole response with the observation, if another turn follows."""
    ended: bool = False
    reward: float = 0.0
    """Reward of an ended episode."""
    reward_error: str = ""
    """Error of the reward function, if the episode has ended."""
    restart_reason: str = ""
    """Why the episode restarts from its prompt; empty if it does not."""
    host_lost: bool = False
    """Whether it restarts because it was lost with its host, and not because its environment failed. Also False if the
    cause is no longer known, because the first report of this outcome was lost with a host or the server."""
    server_lost: bool = False
    """Whether the step must be requested again when the trajectory server is back."""
    seconds: float | None = None
    """Time in the environment and in waiting for a slot; None if the step was done before."""


class Environments(Protocol):
    """The environments of a host's episodes; see tasks/episodes/episode_host.py."""

    @property
    def needs_token_ids(self) -> bool: ...

    async def check(self) -> None: ...

    async def step(
        self,
        key: EpisodeKey,
        record: Record,
        turns: tuple[str, ...],
        *,
        truncated: bool,
        latest_turn: SampledTurn | None = None,
    ) -> HostedStepResult: ...

    async def end(self, key: EpisodeKey, record: Record) -> HostedStepResult: ...

    def cancel(self, keys: Iterable[EpisodeKey]) -> None: ...

    async def close(self) -> None: ...


class EnvironmentSettings(Protocol):
    """Settings from which a host creates its environments. Picklable."""

    def build(self) -> Environments: ...


class ServerBatcher:
    """Calls the trajectory server in batches: all items that are given for one method in one iteration of the event
    loop are sent in one call. A call costs a millisecond on each side, more than a step of many environments. call_s:
    timeout of a call, seconds."""

    def __init__(self, server: Any, call_s: float) -> None:
        self._server, self._call_s = server, call_s
        self._queued_items: dict[str, list[tuple[Any, asyncio.Future[Any]]]] = {}
        """Items of the next call of each method, with the futures of their results."""
        self._send_tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, method: str, item: Any) -> Any:
        """Return the result for one item of a server method that takes a list of them. Raises what the call raises."""
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        is_first = method not in self._queued_items
        self._queued_items.setdefault(method, []).append((item, result))
        if is_first:
            send_task = asyncio.ensure_future(self._send(method))
            self._send_tasks.add(send_task)
            send_task.add_done_callback(self._send_tasks.discard)
        return await result

    async def _send(self, method: str) -> None:
        queued = [(item, result) for item, result in self._queued_items.pop(method) if not result.done()]
        if not queued:
            return
        try:
            items = [item for item, _ in queued]
            results = await call_actor(self._server, method, items, timeout_s=self._call_s, actor_name="server")
        except Exception as error:  # noqa: BLE001  it is raised where each result is awaited
            for _, result in queued:
                if not result.done():
                    result.set_exception(error)
            return
        for index, (_, result) in enumerate(queued):
            if not result.done():
                result.set_result(None if results is None else results[index])


@remote_methods
class EnvironmentHost:
    """The environment host's Dask actor. Its state is changed only on the worker's event loop. call_s: timeout of a
    call of the trajectory server, seconds."""

    def __init__(self, settings: EnvironmentSettings, call_s: float) -> None:
        self._environments = settings.build()
        self._call_s = call_s
        self._running_steps: dict[tuple[TrajectoryId, int], asyncio.Task[None]] = {}
        """Running env steps, by trajectory and route number."""
        self._open_episodes: dict[TrajectoryId, EpisodeKey] = {}
        """Episodes with a running step or an open environment, by trajectory."""
        self._outcomes: list[EnvStepOutcome] = []
        self._error: Exception | None = None
        """An error of staleflow or of the job, not of an environment."""
        self._outcome_ready = asyncio.Event()

    async def check(self) -> None:
        """Raise ConfigError if the environment cannot be created."""
        await self._environments.check()

    async def start_steps(self, server: Any, items: tuple[EnvStepItem, ...]) -> None:
        """Start env steps in reply to the latest turns of trajectories. Steps that are already running continue."""
        call_server = ServerBatcher(server, self._call_s)
        for item in items:
            key = item.trajectory, item.route_number
            if key not in self._running_steps:
                self._running_steps[key] = asyncio.create_task(self._run_step(call_server, item))

    async def next_outcomes(self, timeout_s: float) -> list[EnvStepOutcome]:
        """Wait up to `timeout_s` for env steps to end, and return their outcomes. Raises the error of a step if
        it is not one of its environment."""
        if not self._outcomes and self._error is None:
            self._outcome_ready.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._outcome_ready.wait()
        if self._error is not None:
            raise self._error
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    async def close_episodes(self, trajectories: tuple[TrajectoryId, ...]) -> None:
        """Close the environments of trajectories. Running steps are cancelled and have no outcome."""
        ids = set(trajectories)
        for key in [key for key in self._running_steps if key[0] in ids]:
            self._running_steps.pop(key).cancel()
        self._environments.cancel([self._open_episodes.pop(t) for t in ids if t in self._open_episodes])

    async def close(self) -> None:
        for task in self._running_steps.values():
            task.cancel()
        await self._environments.close()

    async def _run_step(self, call_server: ServerBatcher, item: EnvStepItem) -> None:
        try:
            outcome = await self._execute_step(call_server, item)
        except ActorLost:  # only the trajectory server is called here
            outcome = item.outcome(server_lost=True)
        except Exception as error:  # noqa: BLE001  it is raised where outcomes are asked for
            self._error, outcome = error, None
            self._outcome_ready.set()
        self._running_steps.pop((item.trajectory, item.route_number), None)
        if outcome is not None:
            self._outcomes.append(outcome)
            self._outcome_ready.set()

    async def _execute_step(self, call_server: ServerBatcher, item: EnvStepItem) -> EnvStepOutcome | None:
        """Run an env step, or the part of it that is not done yet. Returns None if nobody waits for it any more."""
        trajectory, route_number = item.trajectory, item.route_number
        state, outcome = await self._state_and_outcome(call_server, item)
        if state is None or outcome is not None:
            return outcome
        key = EpisodeKey(group=state.group, held_out=state.held_out, member=state.member, attempt=state.attempt)
        self._open_episodes[trajectory] = key
        turn: SampledTurn | None = None
        if self._environments.needs_token_ids:
            turn_item = TurnItem(trajectory, state.num_tokens, route_number, state.turns[-1] if state.turns else "")
            turn = await call_server("newest_turns", turn_item)
            if turn is None:  # another host has taken over: the agent must not see the turn
                return (await self._state_and_outcome(call_server, item))[1]
        truncated = item.truncated or state.is_full
        result = await self._environments.step(key, state.record, state.turns, truncated=truncated, latest_turn=turn)
        elapsed_s = result.environment_s + result.waited_s
        if not result.ended:
            observation = ObservationItem(
                trajectory=trajectory,
                num_tokens=state.num_tokens,
                route_number=route_number,
                messages=result.messages,
                seconds=result.environment_s,
                replayed=result.replayed,
            )
            receipt: ObservationReceipt = await call_server("add_observations", observation)
            if not receipt.problem:
                return item.outcome(num_tokens=receipt.num_tokens, seconds=elapsed_s)
            if receipt.problem == "late":
                return (await self._state_and_outcome(call_server, item))[1]
            if receipt.problem == "full":
                result = await self._environments.end(key, state.record)
                elapsed_s += result.environment_s + result.waited_s
            else:
                self._environments.cancel([key])
                result = HostedStepResult(
                    ended=True, error=receipt.reason or REPLAY_DIFFERS, lost=not receipt.reason
                )  # such as a tool that prints the time: starting it again is what a lost host costs
        self._open_episodes.pop(trajectory, None)
        if result.error:
            if not await call_server("restart", (trajectory, state.num_tokens, route_number)):
                return (await self._state_and_outcome(call_server, item))[1]
            return item.outcome(restart_reason=result.error, host_lost=result.lost, seconds=elapsed_s)
        score = ScoredResponse(reward=result.reward, parts=dict(result.parts))
        recorded_score: ScoredResponse | None = await call_server(
            "record_rewards", RewardItem(trajectory, state.num_tokens, route_number, score)
        )
        if recorded_score is None:
            return (await self._state_and_outcome(call_server, item))[1]
        return item.outcome(
            ended=True, reward=recorded_score.reward, reward_error=recorded_score.error, seconds=elapsed_s
        )

    async def _state_and_outcome(
        self, call_server: ServerBatcher, item: EnvStepItem
    ) -> tuple[EpisodeState | None, EnvStepOutcome | None]:
        """Return the state of a trajectory from the server, None if it is no longer live, and the outcome of its env
        step, if the server has one from an earlier request or from another host."""
        state: EpisodeState | None = await call_server("episode_states", (item.trajectory, item.route_number))
        if state is None:
            return None, None
        if (score := state.score) is not None:
            return state, item.outcome(ended=True, reward=score.reward, reward_error=score.error)
        if state.restarted:
            return state, item.outcome(restart_reason=FAILED_BEFORE)
        if state.has_observation:
            return state, item.outcome(num_tokens=state.num_tokens)
        return state, None
