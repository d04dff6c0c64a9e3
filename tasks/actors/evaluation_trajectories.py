"""The evaluation trajectories on the trajectory server.

Such a trajectory begins when it is first routed: its number says which prompt it answers. It ends with its evaluation,
and is in no batch, no count and no commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from staleflow.stores.in_flight.in_flight_state import InFlightState
from staleflow.stores.in_flight.spool_entries import Entry, EvaluationEnded, GroupDrawn
from staleflow.stores.trajectory import GroupId, TrajectoryId, is_evaluation
from staleflow.tasks.actors.server_messages import EvaluatedResponse
from staleflow.tasks.actors.task_cache import TaskCache
from staleflow.tasks.sources.evaluation_items import EvaluationItem, short_digest
from staleflow.tasks.sources.reward_process import ScoredResponse
from staleflow.tasks.sources.task_sources import extract_answer


class EvaluationTrajectories:
    """The evaluation trajectories of one run. Its methods return spool entries, which the caller writes."""

    def __init__(self, flight: InFlightState, tasks: TaskCache, text: Callable[[Sequence[int]], str]) -> None:
        """text: decodes a response; called from several threads."""
        self._flight = flight
        self._tasks = tasks
        self._text = text

    async def begin(
        self, routed: Iterable[TrajectoryId], now: float
    ) -> tuple[dict[TrajectoryId, EvaluationItem], list[Entry]]:
        """Add those of the routed trajectories that belong to an evaluation, with their prompts. Returns the evaluation
        item of each, and the spool entries to write."""
        groups = {i: GroupId(i // self._flight.group_size) for i in routed if is_evaluation(i)}
        if not groups:
            return {}, []
        items = await self._tasks.evaluated(set(groups.values()))
        entries = [
            GroupDrawn(
                group=group,
                prompt_tokens=np.asarray(item.tokens, np.int32),
                at_s=now,
                source=item.eval_set.task_source,
            )
            for group, item in items.items()
        ]
        applied: list[Entry] = [entry for entry in entries if self._flight.apply(entry)]
        return {i: items[group] for i, group in groups.items()}, applied

    async def max_new_tokens(self, groups: Iterable[GroupId]) -> dict[GroupId, int]:
        """Return the maximum response length of each group that belongs to an evaluation."""
        evaluated = {group for group in groups if is_evaluation(group)}
        items = await self._tasks.evaluated(evaluated) if evaluated else {}
        return {group: item.eval_set.config.max_new_tokens for group, item in items.items()}

    async def responses(self, groups: Sequence[GroupId]) -> list[EvaluatedResponse]:
        """Return the state of each group's response, with a digest of its answer."""
        responses = [self._response(self._member(group)) for group in groups]
        # The pattern may fail on what the reward has failed on. An episode has turns instead of one answer.
        answered = {
            group: live.response_tokens.tolist()
            for group, response in zip(groups, responses, strict=True)
            if response.score and not response.score.error
            if not (live := self._flight.live[self._member(group)]).has_env_steps
        }
        items = await self._tasks.evaluated(answered)
        answers = await asyncio.to_thread(
            lambda: {group: self._digest(items[group], tokens) for group, tokens in answered.items()}
        )
        return [
            response._replace(answer=answers.get(group, "")) for group, response in zip(groups, responses, strict=True)
        ]

    def end(self, now: float) -> tuple[set[GroupId], list[Entry]]:
        """Drop all evaluation trajectories. Returns their groups, and the spool entries to write."""
        groups = {t.group for t in self._flight.live.values() if is_evaluation(t.id)}
        entry = EvaluationEnded(at_s=now)
        self._tasks.forget(groups)
        return groups, [entry] if self._flight.apply(entry) else []

    def _digest(self, item: EvaluationItem, tokens: Sequence[int]) -> str:
        return short_digest(extract_answer(item.eval_set.answer_pattern, self._text(tokens)))

    def _member(self, group: GroupId) -> TrajectoryId:
        return TrajectoryId(group * self._flight.group_size)

    def _response(self, member: TrajectoryId) -> EvaluatedResponse:
        t = self._flight.live.get(member)
        if t is None:
            return EvaluatedResponse(0, (), None)
        scored = ScoredResponse(reward=t.reward, parts=t.reward_parts, error=t.error)
        versions = tuple(sorted({s.version for s in t.segments}))
        return EvaluatedResponse(t.num_sampled, versions, scored if member in self._flight.scored else None)
