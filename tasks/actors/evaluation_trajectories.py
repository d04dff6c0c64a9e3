"""The evaluation trajectories on the trajectory server.

An evaluation trajectory starts when it is first routed: its number determines its prompt. It ends with its evaluation,
and is never part of a batch, a count or a commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from staleflow.stores.in_flight.in_flight_state import InFlightState
from staleflow.stores.in_flight.spool_entries import Entry, EvaluationEnded, GroupDrawn
from staleflow.stores.trajectory import GroupId, TrajectoryId, is_evaluation
from staleflow.tasks.actors.episode_states import recorded_score
from staleflow.tasks.actors.server_messages import EvaluatedResponse
from staleflow.tasks.actors.task_cache import TaskCache
from staleflow.tasks.sources.evaluation_items import EvaluationItem, short_digest
from staleflow.tasks.sources.task_sources import extract_answer


class EvaluationTrajectories:
    """The evaluation trajectories of one run. Its methods return spool entries, which the caller writes."""

    def __init__(self, in_flight: InFlightState, task_cache: TaskCache, decode: Callable[[Sequence[int]], str]) -> None:
        """decode: decodes a response; called from several threads."""
        self._in_flight = in_flight
        self._task_cache = task_cache
        self._decode = decode

    async def begin(
        self, routed: Iterable[TrajectoryId], now: float
    ) -> tuple[dict[TrajectoryId, EvaluationItem], list[Entry]]:
        """Add those of the routed trajectories that belong to an evaluation, with their prompts. Returns the evaluation
        item of each, and the spool entries to write."""
        groups = {i: GroupId(i // self._in_flight.group_size) for i in routed if is_evaluation(i)}
        if not groups:
            return {}, []
        items = await self._task_cache.evaluation_items(set(groups.values()))
        entries = [
            GroupDrawn(
                group=group,
                prompt_tokens=np.asarray(item.tokens, np.int32),
                at_s=now,
                source=item.eval_set.task_source_number,
            )
            for group, item in items.items()
        ]
        applied_entries: list[Entry] = [entry for entry in entries if self._in_flight.apply(entry)]
        return {i: items[group] for i, group in groups.items()}, applied_entries

    async def max_new_tokens(self, groups: Iterable[GroupId]) -> dict[GroupId, int]:
        """Return the maximum response length of each group that belongs to an evaluation."""
        evaluation_groups = {group for group in groups if is_evaluation(group)}
        items = await self._task_cache.evaluation_items(evaluation_groups) if evaluation_groups else {}
        return {group: item.eval_set.config.max_new_tokens for group, item in items.items()}

    async def responses(self, groups: Sequence[GroupId]) -> list[EvaluatedResponse]:
        """Return the state of each group's response, with a digest of its answer."""
        responses = [self._evaluated_response(self._only_member(group)) for group in groups]
        # The pattern may fail on a response on which the reward function failed. An episode has turns, not one answer.
        response_tokens = {
            group: trajectory.response_tokens.tolist()
            for group, response in zip(groups, responses, strict=True)
            if response.score and not response.score.error
            if not (trajectory := self._in_flight.live[self._only_member(group)]).has_env_steps
        }
        items = await self._task_cache.evaluation_items(response_tokens)
        answers = await asyncio.to_thread(
            lambda: {group: self._answer_digest(items[group], tokens) for group, tokens in response_tokens.items()}
        )
        return [
            response._replace(answer_digest=answers.get(group, ""))
            for group, response in zip(groups, responses, strict=True)
        ]

    def end(self, now: float) -> tuple[set[GroupId], list[Entry]]:
        """Drop all evaluation trajectories. Returns their groups, and the spool entries to write."""
        groups = {t.group for t in self._in_flight.live.values() if is_evaluation(t.id)}
        entry = EvaluationEnded(at_s=now)
        self._task_cache.forget(groups)
        return groups, [entry] if self._in_flight.apply(entry) else []

    def _answer_digest(self, item: EvaluationItem, tokens: Sequence[int]) -> str:
        return short_digest(extract_answer(item.eval_set.answer_pattern, self._decode(tokens)))

    def _only_member(self, group: GroupId) -> TrajectoryId:
        return TrajectoryId(group * self._in_flight.group_size)

    def _evaluated_response(self, member: TrajectoryId) -> EvaluatedResponse:
        t = self._in_flight.live.get(member)
        if t is None:
            return EvaluatedResponse(0, (), None)
        versions = tuple(sorted({s.version for s in t.segments}))
        return EvaluatedResponse(t.num_sampled, versions, recorded_score(self._in_flight, member))
