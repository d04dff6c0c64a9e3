"""Builds the engine request of a live trajectory."""

from __future__ import annotations

from staleflow.stores.in_flight.stop_criteria import StopCriteria
from staleflow.stores.trajectory import FinishReason, Trajectory
from staleflow.tasks.actors.server_messages import RouteItem
from staleflow.tasks.actors.server_settings import ServerSettings
from staleflow.tasks.engines.base import Request, SampledTokens
from staleflow.tasks.sources.evaluation_items import EvaluationItem


def build_request(
    t: Trajectory,
    item: RouteItem,
    settings: ServerSettings,
    evaluation_item: EvaluationItem | None,
    max_turn_tokens: int,
    stop: StopCriteria,
) -> Request | SampledTokens:
    """Build the request for a routed trajectory's next tokens. If its turn has ended already, return a delivery without
    tokens instead.

    Args:
        evaluation_item: the item of an evaluation that it answers; None if it is to be trained on.
        max_turn_tokens: token limit of the current turn, if its environment sets one; else 0.
        stop: stop criteria of the current turn.
    """
    prompt, response = (tuple(part.tolist()) for part in (t.prompt_tokens, t.response_tokens))
    if t.finish is not FinishReason.UNFINISHED:
        return SampledTokens(
            trajectory=t.id, route_number=item.route_number, start=len(response), segments=(), finish=t.finish
        )
    config = None if evaluation_item is None else evaluation_item.eval_set.config
    max_new_tokens = settings.prompts.response_tokens(t.source) if config is None else config.max_new_tokens
    return Request(
        trajectory=t.id,
        route_number=item.route_number,
        tokens=tuple(t.context.tolist()) if t.branches else (*prompt, *response),
        max_new_tokens=min(
            max_new_tokens - len(response),
            min(settings.max_turn_tokens, max_turn_tokens or settings.max_turn_tokens) - t.num_current_turn_tokens,
        ),
        num_response_tokens=len(response),
        prompt=prompt if t.branches else None,
        num_current_turn_tokens=t.num_current_turn_tokens,
        stop=stop,
        greedy=evaluation_item is not None and evaluation_item.greedy,
        temperature=None if config is None else config.temperature or None,
        keep_kv=settings.keeps_kv,
        version=item.version,
    )
