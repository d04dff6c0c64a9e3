"""The trajectory server: an actor that stores the tokens of live trajectories and is the only committer to the store.

Tokens and texts go directly from worker to worker; the driver and the coordinator see ids, lengths and versions. All
state is changed on the worker's event loop, so no method needs a lock. Commits, prompts and the spool have a thread
each; texts are decoded and batches packed in other threads.

Invariants:
- Acknowledged changes survive this process: each change is an entry of the spool (stores/in_flight/spool.py), and the
  call that made it returns once the entry is written, or the failure to write it is reported. A server created with
  the same settings and `resumed` reads the store and the spool, and so recovers all in-flight work.
- Calls may be repeated: draws are numbered, deliveries name the position of their first token, batches and commits
  their step.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from staleflow.stores.errors import StoreError
from staleflow.stores.in_flight import spool_entries
from staleflow.stores.in_flight.in_flight_state import InFlightState, NewGroup
from staleflow.stores.in_flight.spool import Spool
from staleflow.stores.in_flight.stop_criteria import NO_STOP
from staleflow.stores.staleness.ledger_groups import Ending
from staleflow.stores.trajectories.records import EMPTY_LEDGER, CommitRecord, LedgerState
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import (
    EndedTrajectory,
    Fate,
    GroupId,
    PolicyVersion,
    Trajectory,
    TrajectoryId,
    is_evaluation,
    outcome_key,
)
from staleflow.stores.weights.resume_points import ResumePoints
from staleflow.tasks.actors import in_flight_recovery, server_messages
from staleflow.tasks.actors.actor_calls import remote_methods
from staleflow.tasks.actors.draft_corpus import MAX_STORED_TOKENS, DraftCorpus, NewResponses, ResponseKey
from staleflow.tasks.actors.engine_requests import build_request
from staleflow.tasks.actors.episode_states import episode_state, newest_turn, recorded_score
from staleflow.tasks.actors.evaluation_trajectories import EvaluationTrajectories
from staleflow.tasks.actors.observation_encoder import ObservationEncoder, RenderError, observation_entry
from staleflow.tasks.actors.server_settings import ServerSettings
from staleflow.tasks.actors.step_batches import StepBatches
from staleflow.tasks.actors.store_thread import AsyncSpool, StoreThread
from staleflow.tasks.actors.task_cache import TaskCache
from staleflow.tasks.engines.base import Request, SampledTokens
from staleflow.tasks.rendering.sampled_turn import SampledTurn
from staleflow.tasks.rendering.task_source import Record
from staleflow.tasks.rendering.turn_params import params_of
from staleflow.tasks.sources.evaluation_items import ItemSummary
from staleflow.tasks.sources.prompts import Prompts
from staleflow.tasks.sources.reward_process import ScoredResponse
from staleflow.tasks.training.batches import check_batch
from staleflow.tasks.training.microbatches import BatchMessage, Row

THREAD_SWITCH_S = 0.0005
"""Python's thread switch interval in this process, a tenth of the default: calls of instances are answered without
delay while the store's thread computes."""


@remote_methods
class TrajectoryServer:
    """The trajectory server's Dask actor."""

    store_class: ClassVar[type[VersionedStore]] = VersionedStore
    """Class that opens and creates the store."""

    def __init__(self, settings: ServerSettings, elapsed_s: float) -> None:
        """elapsed_s: seconds since the run's start, as the driver counts them."""
        sys.setswitchinterval(THREAD_SWITCH_S)
        self._clock_start_s = time.monotonic() - elapsed_s
        """Start of the run, on this process's monotonic clock."""
        path, prompt_settings = Path(settings.store), settings.prompts
        existing_store = self.store_class.open(path) if settings.resumed else None
        if existing_store is not None:
            prompt_settings = replace(
                prompt_settings,
                num_held_out=existing_store.header.num_held_out,
                max_prompt_tokens=existing_store.header.max_prompt_tokens,
            )
        self._settings = settings
        self._prompts: Prompts = prompt_settings.build()
        self._store = self.store_class.create(path, settings.header) if existing_store is None else existing_store
        self._in_flight = InFlightState(group_size=settings.members_started_per_group)
        self._spool = Spool(path.with_name("spool"), settings.members_started_per_group)
        self._draft_corpus = DraftCorpus(
            self._in_flight, MAX_STORED_TOKENS if settings.serves_drafts else 0, existing_store
        )
        self._resume_points = ResumePoints(path.with_name("resume"))
        self._task_cache = TaskCache(self._prompts, prompt_settings.eval_sets, self._in_flight.tasks_of)
        self._last_record: CommitRecord | None = None
        self._committed = asyncio.Event()
        """Set when the next commit is stored; a new event then takes its place."""
        self._store_thread = StoreThread(self._store, settings.commit_s)
        self._async_spool = AsyncSpool(self._spool)
        self._evaluation_trajectories = EvaluationTrajectories(self._in_flight, self._task_cache, self._prompts.text)
        self._observation_encoder = ObservationEncoder(self._prompts, settings.prompts.agent_sources)
        self._step_batches = StepBatches(self._in_flight, self._store_thread, settings)
        if existing_store is None:
            self._spool.clear()
        else:
            self._recover(existing_store.commits(-1))

    # -- a stored run --------------------------------------------------------------------------------------------

    def _recover(self, records: Sequence[CommitRecord]) -> None:
        """Recover the work that was in flight when the run's previous trajectory server ended."""
        if records:
            self._last_record = records[-1]
        in_flight_recovery.rebuild_in_flight(
            self._in_flight, self._spool, self._last_ledger, self._task_cache, self._now()
        )

    async def recoverable(self) -> server_messages.RecoverableWork:
        """Return the in-flight work that a resumed run can recover after the store's last record. Changes nothing."""
        return server_messages.RecoverableWork(
            ledger=self._last_ledger, groups=self._in_flight.copy_with(self._resume_entry(())).group_summaries()
        )

    async def resume(self, from_prompt: tuple[TrajectoryId, ...]) -> server_messages.RecoveredWork:
        """Recover in-flight work after the store's last record, and commit that the run goes on if that changes the
        ledger. Idempotent. from_prompt: trajectories that restart from their prompts. While the store's bucket fails,
        the commit is retried for deadlines.commit_s. Raises StoreError."""
        previous = in_flight_recovery.trajectories_with_tokens(self._in_flight)
        evaluation_groups = {t.group for t in self._in_flight.live.values() if is_evaluation(t.id)}
        resumed = self._resume_entry(from_prompt)
        self._in_flight.apply(resumed)
        self._step_batches.forget_all()
        if not await self._async_spool.append([resumed]):
            # Otherwise a later resumption would recover entries that this one has undone.
            await self._async_spool.clear()
        await self._async_spool.mark_stored(-1, evaluation_groups)  # evaluations are not resumed
        work = in_flight_recovery.recovered_work(self._in_flight, previous, self._last_ledger)
        record = in_flight_recovery.resume_record(self._in_flight, work)
        if record is None:
            return work
        await self._commit(record, [])
        return replace(work, ledger=record.ledger)

    def _resume_entry(self, from_prompt: tuple[TrajectoryId, ...]) -> spool_entries.InFlightResumed:
        return spool_entries.InFlightResumed(
            version=PolicyVersion(self._last_ledger.next_step), from_prompt=from_prompt, at_s=self._now()
        )

    # -- prompts -------------------------------------------------------------------------------------------------

    async def draw(self, first_group: int, num_groups: int, draws: tuple[tuple[int, int], ...] = ()) -> list[NewGroup]:
        """Draw the prompts of `num_groups` groups, numbered from `first_group` on. Returns the groups, with the
        lengths of their prompts.

        draws: (source, task) of each; empty: the only source's tasks with the groups' numbers.
        """
        source_tasks = list(draws or [(0, -1)] * num_groups)
        prompts = await self._task_cache.draw(first_group, source_tasks)
        now = self._now()
        entries = [
            spool_entries.GroupDrawn(
                group=GroupId(group),
                prompt_tokens=prompt.tokens,
                at_s=now,
                dataset_row=prompt.row,
                source=source,
                task=task,
            )
            for group, (prompt, (source, task)) in enumerate(zip(prompts, source_tasks, strict=True), first_group)
        ]
        await self._async_spool.append([entry for entry in entries if self._in_flight.apply(entry)])
        return [
            NewGroup(group=e.group, prompt_tokens=len(e.prompt_tokens), source=e.source, task=e.task) for e in entries
        ]

    async def held_out(self, count: int) -> list[tuple[int, ...]]:
        """Return the token ids of the first `count` held-out prompts without duplicates; fewer if some are equal or the
        source has fewer."""
        return await self._task_cache.held_out(count)

    async def evaluation_items(self) -> list[ItemSummary]:
        """Return summaries of all evaluations' items, one for each response."""
        return await self._task_cache.item_summaries()

    async def evaluated_responses(self, groups: list[GroupId]) -> list[server_messages.EvaluatedResponse]:
        """Return the state of an evaluation's responses."""
        return await self._evaluation_trajectories.responses(groups)

    async def end_evaluation(self) -> None:
        """Drop all trajectories of evaluations. Idempotent."""
        groups, entries = self._evaluation_trajectories.end(self._now())
        await self._async_spool.append(entries)
        await self._async_spool.mark_stored(-1, groups)

    async def set_clock(self, elapsed_s: float) -> None:
        """Set the run's clock, which starts when all actors are ready, to `elapsed_s` seconds."""
        self._clock_start_s = time.monotonic() - elapsed_s

    async def held_out_notice(self) -> str:
        """Return a message about training prompts that are also held out; empty if there are none so far."""
        return self._prompts.held_out_notice

    # -- trajectories --------------------------------------------------------------------------------------------

    async def record_routes(self, items: tuple[server_messages.RouteItem, ...]) -> list[Request | SampledTokens]:
        """Record the routes of trajectories: deliveries under earlier route numbers are ignored from now on. Returns
        the engine requests of those that are still live; for one whose turn has ended, a delivery without tokens."""
        evaluation_items, applied_entries = await self._evaluation_trajectories.begin(
            (item.trajectory for item in items), self._now()
        )
        await self._async_spool.append(applied_entries)
        records: dict[GroupId, Record] = {}
        if self._settings.prompts.agent_sources:
            trajectories = [
                self._in_flight.live[item.trajectory] for item in items if item.trajectory in self._in_flight.live
            ]
            records = await self._task_cache.records(t.group for t in trajectories)
        items = tuple(item for item in items if item.trajectory in self._in_flight.live)
        entry = spool_entries.TrajectoriesRouted(
            routed=tuple((i.trajectory, i.route_number) for i in items), at_s=self._now()
        )
        has_changed = self._in_flight.apply(entry)
        requests = []
        for item in items:
            t = self._in_flight.live[item.trajectory]
            max_turn_tokens, stop = self._in_flight.turn_limits.get(t.id, (0, NO_STOP))
            if not t.has_env_steps and t.group in records:
                params = params_of(records[t.group])
                max_turn_tokens, stop = params.max_tokens, params.stop
            requests.append(build_request(t, item, self._settings, evaluation_items.get(t.id), max_turn_tokens, stop))
        await self._async_spool.append([entry] if has_changed else [])
        return requests

    async def deliver(self, sampled: list[SampledTokens]) -> dict[TrajectoryId, int]:
        """Add sampled tokens. Returns the number of tokens of each trajectory.

        Ignored are: ended trajectories, deliveries of an earlier route number, tokens that the server already has,
        deliveries that would leave a gap, and deliveries with a logprob that is not finite. For the last two the
        returned number is less than was delivered.
        """
        now = self._now()
        applied_entries: list[spool_entries.Entry] = []
        num_tokens = {}
        for item in sampled:
            entry = spool_entries.TokensDelivered(
                trajectory=item.trajectory,
                route_number=item.route_number,
                start=item.start,
                segments=item.segments,
                finish=item.finish,
                at_s=now,
                attempt=self._in_flight.attempt(item.trajectory),
            )
            if self._in_flight.apply(entry):
                applied_entries.append(entry)
            if self._in_flight.accepts(item.trajectory, item.route_number):
                num_tokens[item.trajectory] = self._in_flight.live[item.trajectory].num_tokens
        await self._async_spool.append(applied_entries)
        return num_tokens

    async def draft_responses(
        self, running: tuple[TrajectoryId, ...], known_keys: frozenset[ResponseKey]
    ) -> NewResponses:
        """Return responses to the prompts of running trajectories, for drafting. known_keys: keys of the responses
        that the instance has already."""
        return self._draft_corpus.new_responses(running, known_keys)

    async def episode_states(
        self, requested: list[tuple[TrajectoryId, int]]
    ) -> list[server_messages.EpisodeState | None]:
        """Return the episode states of trajectories whose turns have ended; None for one that is no longer live.
        requested: (trajectory, route number)."""
        trajectories = [self._in_flight.live.get(trajectory) for trajectory, _ in requested]
        records = await self._task_cache.records(t.group for t in trajectories if t is not None)
        max_new_tokens = await self._evaluation_trajectories.max_new_tokens(
            t.group for t in trajectories if t is not None
        )
        texts = await asyncio.to_thread(
            lambda: [self._texts(u.tolist() for u in t.turns) if t else [] for t in trajectories]
        )
        states: list[server_messages.EpisodeState | None] = []
        for t, (_, route_number), turns in zip(trajectories, requested, texts, strict=True):
            if t is None or t.id not in self._in_flight.live:  # it may have ended while its state was read
                states.append(None)
            else:
                limit = max_new_tokens.get(t.group) or self._settings.prompts.response_tokens(t.source)
                state = episode_state(self._in_flight, t, route_number, tuple(turns), records[t.group], limit)
                states.append(state)
        if any(state is not None and state.has_outcome for state in states):
            await self._async_spool.append([])  # the host reports outcomes, and their entries may not be written yet
        return states

    async def newest_turns(self, items: list[server_messages.TurnItem]) -> list[SampledTurn | None]:
        """Return the newest turns of trajectories, with the tokens and logprobs that are stored; None for a trajectory
        whose turn has been followed by another turn or an observation."""
        flags = [self._in_flight.awaits_reply(item.trajectory, item.num_tokens, item.route_number) for item in items]
        turns = [
            (self._in_flight.live[item.trajectory] if flag else None, item.text)
            for item, flag in zip(items, flags, strict=True)
        ]
        return await asyncio.to_thread(lambda: [None if t is None else newest_turn(t, text) for t, text in turns])

    async def add_observations(
        self, items: list[server_messages.ObservationItem]
    ) -> list[server_messages.ObservationReceipt]:
        """Append observations to the turns that they reply to. An observation is refused if there is no room for
        tokens after it, or if its environment was replayed and replied differently."""
        trajectories = [
            self._in_flight.live[i.trajectory]
            if self._in_flight.awaits_reply(i.trajectory, i.num_tokens, i.route_number)
            else None
            for i in items
        ]
        max_new_tokens = await self._evaluation_trajectories.max_new_tokens(t.group for t in trajectories if t)
        max_tokens_of_source = self._settings.prompts.response_tokens
        observations = await asyncio.to_thread(
            lambda: [
                self._observation_encoder.encode(t, item, max_new_tokens.get(t.group) or max_tokens_of_source(t.source))
                if t
                else None
                for t, item in zip(trajectories, items, strict=True)
            ]
        )
        applied_entries: list[spool_entries.Entry] = []
        receipts: list[server_messages.ObservationReceipt] = []
        for item, result in zip(items, observations, strict=True):
            if result is None or not self._in_flight.awaits_reply(item.trajectory, item.num_tokens, item.route_number):
                receipts.append(server_messages.ObservationReceipt(item.num_tokens, "late"))
            elif isinstance(result, str):
                receipts.append(server_messages.ObservationReceipt(item.num_tokens, result))
            elif isinstance(result, RenderError):
                receipts.append(server_messages.ObservationReceipt(item.num_tokens, "not rendered", result.error))
            else:
                entry = observation_entry(item, result, self._in_flight.attempt(item.trajectory), self._now())
                if self._in_flight.apply(entry):
                    applied_entries.append(entry)
                receipts.append(server_messages.ObservationReceipt(item.num_tokens + len(result.tokens)))
        await self._async_spool.append(applied_entries)
        return receipts

    async def restart(self, episodes: list[tuple[TrajectoryId, int, int]]) -> list[bool]:
        """Restart trajectories whose environments have failed: drop all their tokens but the prompts. Returns whether
        each was restarted; one that has changed since the failure is not. episodes: (trajectory, tokens of its
        response, latest route number)."""
        applied_entries: list[spool_entries.Entry] = []
        restarted: list[bool] = []
        for trajectory, tokens, route_number in episodes:
            entry = spool_entries.EpisodeRestarted(
                trajectory=trajectory,
                num_tokens=tokens,
                route_number=route_number,
                attempt=self._in_flight.attempt(trajectory),
            )
            restarted.append(
                self._in_flight.awaits_reply(trajectory, tokens, route_number) and self._in_flight.apply(entry)
            )
            if restarted[-1]:
                applied_entries.append(entry)
        await self._async_spool.append(applied_entries)
        return restarted

    async def scoring_items(
        self, trajectories: tuple[TrajectoryId, ...], num_tokens: tuple[int, ...]
    ) -> list[server_messages.ScoringItem]:
        """Return the responses to score of the trajectories that are still live. num_tokens: of each response, as the
        driver knows them. Raises StoreError if one has fewer tokens here: they were lost with a server whose spool
        could not be written."""
        for trajectory, count in zip(trajectories, num_tokens, strict=True):
            live = self._in_flight.live.get(trajectory)
            if live is not None and live.num_tokens < count:
                raise self._lost_with_server(
                    f"response {trajectory}", f"it has {live.num_tokens} of {count} tokens, and cannot be scored"
                )
        live_trajectories = [t for i in trajectories if (t := self._in_flight.live.get(i)) is not None]
        lengths_and_routes = [(t.num_tokens, self._in_flight.route_number(t.id)) for t in live_trajectories]
        by_group = await self._task_cache.records(t.group for t in live_trajectories)
        records = [by_group[t.group] for t in live_trajectories]
        texts = await asyncio.to_thread(self._texts, (t.response_tokens.tolist() for t in live_trajectories))
        return [
            server_messages.ScoringItem(t.id, *length_and_route, text, record)
            for t, length_and_route, text, record in zip(
                live_trajectories, lengths_and_routes, texts, records, strict=True
            )
        ]

    async def record_rewards(self, scored: list[server_messages.RewardItem]) -> list[ScoredResponse | None]:
        """Record the rewards of live trajectories whose tokens have not changed since they were scored. Returns the
        recorded reward of each, which is the first one, or None if there is none."""
        now = self._now()
        applied_entries: list[spool_entries.Entry] = []
        rewards: list[ScoredResponse | None] = []
        for item in scored:
            entry = spool_entries.RewardDelivered(
                trajectory=item.trajectory,
                num_tokens=item.num_tokens,
                reward=item.score.reward,
                parts=item.score.parts,
                error=item.score.error,
                at_s=now,
                attempt=self._in_flight.attempt(item.trajectory),
            )
            if self._in_flight.awaits_reply(
                item.trajectory, item.num_tokens, item.route_number
            ) and self._in_flight.apply(entry):
                applied_entries.append(entry)
            rewards.append(recorded_score(self._in_flight, item.trajectory))
        await self._async_spool.append(applied_entries)
        return rewards

    async def teacher_items(self, trajectories: tuple[TrajectoryId, ...]) -> list[server_messages.TeacherItem]:
        """Return the scored responses without a teacher's logprobs, of trajectories that are still live and have
        sampled tokens. Raises StoreError if one has no reward here: it was lost with a server whose spool could not be
        written."""
        live_trajectories = [t for i in trajectories if (t := self._in_flight.live.get(i)) is not None]
        if missing_ids := [t.id for t in live_trajectories if t.id not in self._in_flight.scored]:
            raise self._lost_with_server("rewards", f"a teacher needs responses {missing_ids[:3]}")
        return [
            server_messages.TeacherItem(t.id, Row.of(EndedTrajectory(trajectory=t, fate=Fate.CONSUMED)))
            for t in live_trajectories
            if _needs_teacher(t)
        ]

    async def record_teacher_logprobs(self, items: list[server_messages.TeacherLogprobs]) -> None:
        """Record the logprobs of live trajectories that have their reward and no teacher's logprobs yet."""
        entries = [
            spool_entries.TeacherLogprobsDelivered(
                trajectory=item.trajectory,
                num_tokens=len(item.logprobs),
                logprobs=item.logprobs,
                attempt=self._in_flight.attempt(item.trajectory),
            )
            for item in items
        ]
        await self._async_spool.append([entry for entry in entries if self._in_flight.apply(entry)])

    async def take_batch(
        self, step: int, trajectories: tuple[TrajectoryId, ...], versions: tuple[PolicyVersion, ...], start: int
    ) -> BatchMessage:
        """Consume the trajectories of training step `step`, and return its rows from row `start` on, as many as fit
        into a message.

        Args:
            trajectories: Trajectories of the step, group by group; empty if it is requested again, stored or not.
            versions: The v_traj of each trajectory, as decided by the ledger.

        Raises:
            ConfigError: The scoring of too many of its responses failed (reward.max_error_share).
            ProtocolViolation: The trajectories are not whole groups.
            StoreError: A trajectory has no reward, or no logprobs of the job's teacher. The driver knows of them, so
                they were lost with a server whose spool could not be written.
        """
        applied_entries: list[spool_entries.Entry] = []
        if trajectories and step not in self._in_flight.batches:
            if missing_ids := [t for t in trajectories if t not in self._in_flight.scored]:
                raise self._lost_with_server(f"step {step} needs trajectories", f"{missing_ids[:3]}")
            members, settings = [self._in_flight.live[t] for t in trajectories], self._settings
            if settings.has_teacher and (missing_ids := [t.id for t in members if _needs_teacher(t)]):
                raise self._lost_with_server(f"step {step} needs a teacher's logprobs", f"of {missing_ids[:3]}")
            check_batch(step, members, settings.group_size, settings.max_error_share, settings.reward_settings)
            entry = spool_entries.BatchTaken(step=step, trajectories=trajectories, versions=versions)
            self._in_flight.apply(entry)
            applied_entries.append(entry)
        spool_write = self._async_spool.append(applied_entries)
        message = await self._step_batches.message(step, start)
        await spool_write
        return message

    async def discard(self, endings: tuple[Ending, ...], versions: tuple[PolicyVersion, ...]) -> None:
        """End trajectories without training on them. The next commit stores them. versions: as in take_batch."""
        entry = spool_entries.TrajectoriesDiscarded(endings=endings, versions=versions)
        await self._async_spool.append([entry] if self._in_flight.apply(entry) else [])

    async def commit(self, record: CommitRecord) -> dict[str, float]:
        """Commit a step: the rows it consumed, and all that ended since the last commit. Returns metrics of the batch.

        A refusal is stored without rows and with the ledger of the previous commit, because rows that ended since then
        may belong to a step in training. Fills in `record.ledger.live`: trajectories started by then that are neither
        stored nor in this commit. While the store's bucket fails, the commit is retried for deadlines.commit_s. Raises
        StoreError, also if a batch or an end that the driver knows was lost with a server whose spool could not be
        written.
        """
        started_s = time.monotonic()
        if record.kind == "refusal":
            record = replace(record, step=self._last_ledger.next_step, ledger=self._last_ledger)
        if record.is_repeat_of(last_record := self._last_record):  # the caller did not get the reply and calls again
            return {"commit_s": 0.0, **(last_record.metrics if last_record else {})}
        if record.kind == "refusal":
            await self._commit(record, [])
            return {"commit_s": time.monotonic() - started_s}
        if record.kind == "step" and record.step not in self._in_flight.batches:
            raise self._lost_with_server(f"the batch of step {record.step}", "its commit needs it")
        rows, metrics, record = await self._step_batches.contents(record)
        ended_by_outcome = Counter(self._last_ledger.num_ended) + Counter(outcome_key(e.fate, e.reason) for e in rows)
        if self._settings.resumed and ended_by_outcome != Counter(record.ledger.num_ended):
            raise self._lost_with_server(
                f"ends of trajectories before {record.kind} {record.step}",
                f"the ledger counted {record.ledger.num_ended}, stored would be {dict(ended_by_outcome)}",
            )
        await self._commit(record, rows)
        return metrics | {"commit_s": time.monotonic() - started_s}

    async def chain_entry(self, step: int) -> str:
        """Return a training step's entry in the run's chain of hashes. Waits until the step is stored."""
        while self._last_ledger.next_step <= step:
            await self._committed.wait()
        return await self._store_thread.chain_entry(step)

    async def outage(self) -> str:
        """Return why the store's bucket refuses a commit that is being retried; empty if there is no such commit."""
        return self._store_thread.outage

    async def close(self) -> None:
        self._task_cache.close()
        self._async_spool.close()
        self._store_thread.close()

    # -- internals -----------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return time.monotonic() - self._clock_start_s

    async def _commit(self, record: CommitRecord, rows: list[EndedTrajectory]) -> None:
        await self._store_thread.commit(record, rows)
        self._last_record = record
        self._committed.set()
        self._committed = asyncio.Event()
        self._draft_corpus.add(rows)
        step = record.step if record.kind == "step" else None
        ended_groups = self._in_flight.remove_committed((e.trajectory.id for e in rows), step)
        if step is not None:
            self._step_batches.forget(step)
        self._task_cache.forget(ended_groups)
        first_version = 0 if self._settings.writes_resume_points else None
        await self._async_spool.forget_committed(record.step, ended_groups, self._resume_points, first_version)

    @property
    def _last_ledger(self) -> LedgerState:
        if self._last_record is None:
            return EMPTY_LEDGER
        return self._last_record.ledger

    def _lost_with_server(self, subject: str, details: str) -> StoreError:
        """Create the error for data that the driver was told of, and that this server no longer has."""
        return StoreError(
            f"{self._spool.folder}: {subject}, lost with the trajectory server, since the spool could not be written: "
            f"{details}; free space, then `staleflow resume` continues the run"
        )

    def _texts(self, responses: Iterable[Sequence[int]]) -> list[str]:
        """Decode responses. Takes up to a microsecond a token, so not on the event loop."""
        return [self._prompts.text(r) for r in responses]


def _needs_teacher(trajectory: Trajectory) -> bool:
    """Whether a teacher has yet to compute logprobs of a trajectory's sampled tokens."""
    return trajectory.teacher_logprobs is None and trajectory.num_sampled > 0
