"""Builds the messages about live episodes for environment hosts: their states, newest turns and rewards."""

from __future__ import annotations

from staleflow.stores.in_flight.in_flight_state import InFlightState
from staleflow.stores.trajectory import FinishReason, Segment, Trajectory, TrajectoryId, is_evaluation
from staleflow.tasks.actors.server_messages import EpisodeState
from staleflow.tasks.rendering.sampled_turn import SampledTurn
from staleflow.tasks.rendering.task_source import Record
from staleflow.tasks.sources.reward_process import ScoredResponse


def episode_state(
    in_flight: InFlightState, t: Trajectory, route_number: int, turns: tuple[str, ...], record: Record, max_tokens: int
) -> EpisodeState:
    """Build the state of an episode whose turn has ended.

    Args:
        route_number: number of the routing that the environment host knows.
        turns: texts of the trajectory's turns, oldest first.
        max_tokens: token limit of its response.
    """
    return EpisodeState(
        group=t.group,
        member=t.id % in_flight.group_size,
        attempt=in_flight.attempt(t.id),
        record=record,
        turns=turns,
        num_tokens=t.num_tokens,
        held_out=is_evaluation(t.id),
        is_full=t.num_tokens >= max_tokens,
        has_observation=bool(t.spans) and not isinstance(t.spans[-1], Segment),
        restarted=not in_flight.accepts(t.id, route_number),
        score=recorded_score(in_flight, t.id),
    )


def recorded_score(in_flight: InFlightState, trajectory: TrajectoryId) -> ScoredResponse | None:
    """Return the reward of a live trajectory; None if it has none."""
    t = in_flight.live.get(trajectory)
    if t is None or trajectory not in in_flight.scored:
        return None
    return ScoredResponse(reward=t.reward, parts=t.reward_parts, error=t.error)


def newest_turn(t: Trajectory, text: str) -> SampledTurn:
    """Return the newest turn of a trajectory for an agent: exactly the tokens and logprobs that will be stored."""
    context = tuple(t.context.tolist())
    turn_start = len(context) - t.num_current_turn_tokens
    return SampledTurn(
        prompt_tokens=context[:turn_start],
        tokens=context[turn_start:],
        logprobs=tuple(t.logprobs[len(t.response_tokens) - t.num_current_turn_tokens :].tolist()),
        text=text,
        truncated=t.finish is FinishReason.LENGTH,
    )
