"""The trajectory server: an actor that holds the payloads of live trajectories and is the store's only committer.

Tokens and texts go directly from worker to worker; the driver and the coordinator see ids,
lengths and versions. All its state changes on the worker's event loop, so no method needs a lock; commits, prompts and
the spool have a thread each, and texts are decoded and batches packed beside them.

Invariants:
- What was acknowledged survives this process: each change is an entry of the spool (stores/in_flight/spool.py), and the
  call that brought it is answered once the entry is written. A server made of the same settings with `resumed` begins
  with the store and the spool, and so has all of it again, under the epochs it was delivered in.
- Calls may be repeated: draws are numbered, deliveries name the position of their first token, batches and commits
  their step.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from staleflow.stores.in_flight.in_flight_state import InFlightState
from staleflow.stores.in_flight.spool import Spool
from staleflow.stores.in_flight.spool_entries import (
    BatchTaken,
    Entry,
    EpisodeRestarted,
    FlightResumed,
    GroupDrawn,
    RewardDelivered,
    TokensDelivered,
    TrajectoriesRetired,
    TrajectoriesRouted,
)
from staleflow.stores.in_flight.stop_criteria import NO_STOP
from staleflow.stores.staleness.ledger_entries import Ending
from staleflow.stores.trajectories.records import LedgerState, StepRecord, id_ranges
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import Ended, GroupId, PolicyVersion, Segment, Trajectory, TrajectoryId, is_evaluation
from staleflow.stores.weights.resume_points import ResumePoints
from staleflow.tasks.actors.actor_calls import remote_methods
from staleflow.tasks.actors.async_spool import AsyncSpool
from staleflow.tasks.actors.draft_corpus import MOST_TOKENS, DraftCorpus, NewResponses
from staleflow.tasks.actors.evaluation_trajectories import EvaluationTrajectories
from staleflow.tasks.actors.observation_encoder import ObservationEncoder, RenderError, answer_entry, newest_turn
from staleflow.tasks.actors.server_messages import (
    DrawnGroup,
    EpisodeState,
    EvaluatedResponse,
    ObservationItem,
    ObservationReceipt,
    Payload,
    RecoverableWork,
    RecoveredWork,
    RewardItem,
    ScoringItem,
    TurnItem,
    payload,
)
from staleflow.tasks.actors.server_settings import ServerSettings
from staleflow.tasks.actors.step_batches import StepBatches
from staleflow.tasks.actors.store_thread import StoreThread
from staleflow.tasks.actors.task_cache import TaskCache
from staleflow.tasks.engines.base import SampledTokens
from staleflow.tasks.rendering.sampled_turn import SampledTurn
from staleflow.tasks.rendering.task_source import Record
from staleflow.tasks.rendering.turn_params import directions_of
from staleflow.tasks.sources.evaluation_items import ItemView
from staleflow.tasks.sources.prompts import HeldOut, Prompts
from staleflow.tasks.sources.reward_process import ScoredResponse
from staleflow.tasks.training.batches import check_batch
from staleflow.tasks.training.microbatches import BatchMessage

SWITCH_S = 0.0005
"""Seconds after which a thread lets another run, a tenth of Python's own: while the thread of commits computes, calls
that instances wait for are answered at once."""


@remote_methods
class TrajectoryServer:
    """The trajectory server's Dask actor."""

    stores: ClassVar[type[VersionedStore]] = VersionedStore
    """What opens and creates the store."""

    def __init__(self, settings: ServerSettings, start_s: float) -> None:
        sys.setswitchinterval(SWITCH_S)
        # Seconds since the run's start, as the driver counts them.
        self._epoch = time.monotonic() - start_s
        path, prompts = Path(settings.store), settings.prompts
        stored = self.stores.open(path) if settings.resumed else None
        if stored is not None:
            prompts = replace(prompts, held_out=stored.header.held_out, longest=stored.header.longest_prompt)
        self._settings = settings
        self._prompts: Prompts = prompts.build()
        self._store = self.stores.create(path, settings.header) if stored is None else stored
        self._flight = InFlightState(members=settings.members_started)
        self._spool = Spool(path.with_name("spool"), settings.members_started)
        self._known = DraftCorpus(self._flight, MOST_TOKENS if settings.drafts else 0, stored)
        self._points = ResumePoints(path.with_name("resume"))
        self._tasks = TaskCache(self._prompts, prompts.sets)
        self._last_record: StepRecord | None = None
        self._storing = StoreThread(self._store, settings.commit_s)
        self._writing = AsyncSpool(self._spool)
        self._evaluated = EvaluationTrajectories(self._flight, self._tasks)
        self._answers = ObservationEncoder(self._prompts)
        self._batches = StepBatches(self._flight, self._storing, settings)
        if stored is None:
            self._spool.clear()
        else:
            self._recover(stored.steps(-1))

    # -- a stored run --------------------------------------------------------------------------------------------

    def _recover(self, records: Sequence[StepRecord]) -> None:
        """Have again what was in flight when the server before this one ended."""
        if records:
            self._last_record = records[-1]
        ledger = self._last_ledger
        for entry in self._spool.read():
            self._flight.apply(entry)
        self._flight.forget_stored(ledger)
        for group, members in self._flight.missing(ledger).items():
            self._flight.begin(members, *self._tasks.prompt(group), self._now())
        in_flight = {t.group for t in self._flight.live.values()}
        in_flight |= {t.group for t in self._flight.set_aside()}
        self._spool.stored(ledger.next_step, self._spool.groups - in_flight)

    async def found(self) -> RecoverableWork:
        """What a run that is resumed after the store's last record could take up. Changes nothing."""
        return RecoverableWork(ledger=self._last_ledger, groups=self._flight.after(self._resumed(())).summary_counts())

    async def resume(self, again: tuple[TrajectoryId, ...]) -> RecoveredWork:
        """Go on after the store's last record with what is in flight, but for the tokens of `again`. Returns
        the ledger state after that. Idempotent."""
        alive = [t for t in self._flight.live.values() if not is_evaluation(t.id)]
        begun = {t.id for t in alive if t.timings.routed_s or t.segments}
        begun |= {t.id for t in self._flight.set_aside()}
        resumed = self._resumed(again)
        self._flight.apply(resumed)
        self._batches.forget_all()
        if not await self._writing.append([resumed]):
            # What this run has undone must never be taken for its own by a later one.
            await self._writing.clear()
        kept = [t for t in self._flight.live.values() if t.segments]
        taken = RecoveredWork(
            ledger=self._last_ledger,
            responses=len(kept),
            tokens=sum(t.num_tokens for t in kept),
            again=len(begun) - len(begun & {t.id for t in kept}),
        )
        if not self._flight.live:  # nothing of an evaluation is live by now
            return taken
        ledger = replace(
            self._last_ledger,
            num_started=self._flight.num_drawn * self._settings.members_started,
            live=id_ranges(self._flight.live),
        )
        if ledger != self._last_ledger:
            metrics = {"taken_up": taken.responses, "taken_up_tokens": taken.tokens, "started_again": taken.again}
            record = StepRecord(
                kind="resume", step=ledger.next_step, ledger=ledger, metrics={k: float(v) for k, v in metrics.items()}
            )
            await self._commit(record, [])
        return replace(taken, ledger=ledger)

    def _resumed(self, again: tuple[TrajectoryId, ...]) -> FlightResumed:
        return FlightResumed(version=PolicyVersion(self._last_ledger.next_step), again=again, at_s=self._now())

    # -- prompts -------------------------------------------------------------------------------------------------

    async def draw(self, first: int, num_groups: int) -> list[DrawnGroup]:
        """Draw groups `first`, first + 1, ... from the task source; returns their ids and lengths."""
        prompts = await self._tasks.draw(first, num_groups)
        now = self._now()
        drawn = [
            GroupDrawn(group=GroupId(group), prompt_tokens=prompt.tokens, at_s=now, dataset_row=prompt.row)
            for group, prompt in enumerate(prompts, first)
        ]
        await self._writing.append([entry for entry in drawn if self._flight.apply(entry)])
        return [DrawnGroup(group=entry.group, prompt_tokens=len(entry.prompt_tokens)) for entry in drawn]

    async def held_out(self, count: int) -> list[HeldOut]:
        """The first `count` held-out prompts without duplicates; fewer if some are equal or the source has fewer."""
        return await self._tasks.held_out(count)

    async def evaluation_items(self) -> list[ItemView]:
        """What each evaluation of the run asks for."""
        return await self._tasks.items()

    async def evaluated(self, groups: list[GroupId]) -> list[EvaluatedResponse]:
        """What has become of an evaluation's items."""
        return self._evaluated.responses(groups)

    async def end_evaluation(self) -> None:
        """Drop all that was sampled for evaluations. Idempotent."""
        groups, entries = self._evaluated.end(self._now())
        await self._writing.append(entries)
        await self._writing.stored(-1, groups)

    async def keep_time(self, elapsed_s: float) -> None:
        """The present moment on the run's clock, which begins when all actors are ready."""
        self._epoch = time.monotonic() - elapsed_s

    async def held_out_notice(self) -> str:
        """One line on training prompts found to be held out so far; empty if there were none."""
        return self._prompts.held_out_notice

    # -- trajectories --------------------------------------------------------------------------------------------

    async def payloads(self, routed: tuple[tuple[TrajectoryId, int], ...]) -> dict[TrajectoryId, Payload]:
        """The payloads of trajectories that are still live. routed: (trajectory, epoch) of each routing; what instances
        of earlier epochs deliver is ignored from now on."""
        asked, begun = await self._evaluated.begin((member for member, _ in routed), self._now())
        await self._writing.append(begun)
        records: dict[GroupId, Record] = {}
        if self._settings.prompts.source.is_agent_source:
            live = [self._flight.live[member] for member, _ in routed if member in self._flight.live]
            records = await self._tasks.records(t.group for t in live if not t.has_env_steps)
        alive = tuple((member, epoch) for member, epoch in routed if member in self._flight.live)
        entry = TrajectoriesRouted(routed=alive, at_s=self._now())
        changed = self._flight.apply(entry)
        found = {}
        for member, _ in alive:
            t = self._flight.live[member]
            most, stop = self._flight.turn_tokens.get(member, 0), self._flight.stops.get(member, NO_STOP)
            if not t.has_env_steps and t.group in records:
                first = directions_of(records[t.group])
                most, stop = first.max_tokens, first.stop
            found[member] = payload(t, most, asked.get(member), stop)
        await self._writing.append([entry] if changed else [])
        return found

    async def deliver(self, sampled: list[SampledTokens]) -> dict[TrajectoryId, int]:
        """Add tokens that an instance sampled; returns each trajectory's total. Ignores ended trajectories, what an
        instance delivers after its trajectory was routed anew, tokens that are there already, those that would leave a
        gap, and deliveries with a logprob that is not finite; the total of these two is less than was delivered."""
        now = self._now()
        taken: list[Entry] = []
        totals = {}
        for item in sampled:
            entry = TokensDelivered(
                trajectory=item.trajectory,
                epoch=item.epoch,
                first=item.first,
                segments=item.segments,
                finish=item.finish,
                at_s=now,
                attempt=self._flight.attempt(item.trajectory),
            )
            if self._flight.apply(entry):
                taken.append(entry)
            if self._flight.hears(item.trajectory, item.epoch):
                totals[item.trajectory] = self._flight.live[item.trajectory].num_tokens
        await self._writing.append(taken)
        return totals

    async def other_responses(self, running: tuple[TrajectoryId, ...], told: frozenset[TrajectoryId]) -> NewResponses:
        """Other responses to the prompts of running trajectories, for drafts. told: those that the asker has."""
        return self._known.others(running, told)

    async def episodes(self, asked: list[tuple[TrajectoryId, int]]) -> list[EpisodeState | None]:
        """The states of trajectories whose turns have ended. asked: each with the epoch of that routing. None of those
        that are no longer live."""
        found = [self._flight.live.get(trajectory) for trajectory, _ in asked]
        records = await self._tasks.records(t.group for t in found if t is not None)
        most = await self._evaluated.max_new_tokens(t.group for t in found if t is not None)
        texts = await asyncio.to_thread(lambda: [self._texts(u.tolist() for u in t.turns) if t else [] for t in found])
        return [
            None if t is None else self._episode(t, epoch, tuple(said), records[t.group], most.get(t.group))
            for t, (_, epoch), said in zip(found, asked, texts, strict=True)
        ]

    async def newest_turns(self, asked: list[TurnItem]) -> list[SampledTurn | None]:
        """The newest turns of trajectories, as they are stored; None where that is another turn than the one asked for,
        or one that has been answered."""
        awaited = [self._flight.awaits(item.trajectory, item.tokens, item.epoch) for item in asked]
        found = [(self._flight.live[i.trajectory] if a else None, i.text) for i, a in zip(asked, awaited, strict=True)]
        return await asyncio.to_thread(lambda: [None if t is None else newest_turn(t, text) for t, text in found])

    def _episode(
        self, t: Trajectory, epoch: int, turns: tuple[str, ...], record: Record, most: int | None
    ) -> EpisodeState:
        """most: tokens of its response, if not the run's."""
        return EpisodeState(
            task=t.group,
            member=t.id % self._settings.members_started,
            attempt=self._flight.attempt(t.id),
            record=record,
            turns=turns,
            tokens=t.num_tokens,
            held_out=is_evaluation(t.id),
            full=t.num_tokens >= (most or self._settings.prompts.max_new_tokens),
            answered=bool(t.spans) and not isinstance(t.spans[-1], Segment),
            restarted=not self._flight.hears(t.id, epoch),
            score=self._score(t.id),
        )

    async def give(self, said: list[ObservationItem]) -> list[ObservationReceipt]:
        """Add environments' answers to the turns that they answer. One is not taken if nothing could be sampled after
        it, or if its environment, set back, has spoken otherwise than before."""
        longest = await self._evaluated.max_new_tokens(GroupId(i.trajectory // self._flight.members) for i in said)
        awaited = [self._flight.awaits(item.trajectory, item.tokens, item.epoch) for item in said]
        found = [self._flight.live[i.trajectory] if a else None for i, a in zip(said, awaited, strict=True)]
        most = self._settings.prompts.max_new_tokens
        given = await asyncio.to_thread(
            lambda: [
                self._answers.to_give(t, item, longest.get(t.group, most)) if t else None
                for t, item in zip(found, said, strict=True)
            ]
        )
        taken: list[Entry] = []
        bridged: list[ObservationReceipt] = []
        for item, answer in zip(said, given, strict=True):
            if answer is None or not self._flight.awaits(item.trajectory, item.tokens, item.epoch):
                bridged.append(ObservationReceipt(item.tokens, "late"))
            elif isinstance(answer, str):
                bridged.append(ObservationReceipt(item.tokens, answer))
            elif isinstance(answer, RenderError):
                bridged.append(ObservationReceipt(item.tokens, "not rendered", answer.why))
            else:
                entry = answer_entry(item, answer, self._flight.attempt(item.trajectory), self._now())
                if self._flight.apply(entry):
                    taken.append(entry)
                bridged.append(ObservationReceipt(item.tokens + len(answer.tokens)))
        await self._writing.append(taken)
        return bridged

    async def restart(self, failed: list[tuple[TrajectoryId, int, int]]) -> list[bool]:
        """Drop all but the prompts of trajectories whose environments have failed. failed: (trajectory, tokens of its
        response, epoch of its last routing). One that has gone on since then is not touched; returns which were."""
        taken: list[Entry] = []
        told: list[bool] = []
        for trajectory, tokens, epoch in failed:
            entry = EpisodeRestarted(
                trajectory=trajectory, tokens=tokens, epoch=epoch, attempt=self._flight.attempt(trajectory)
            )
            told.append(self._flight.awaits(trajectory, tokens, epoch) and self._flight.apply(entry))
            if told[-1]:
                taken.append(entry)
        await self._writing.append(taken)
        return told

    async def scoring_items(self, trajectories: tuple[TrajectoryId, ...]) -> list[ScoringItem]:
        """What is to be scored of each trajectory that is still live."""
        alive = [t for i in trajectories if (t := self._flight.live.get(i)) is not None]
        places = [(t.num_tokens, self._flight.epoch(t.id)) for t in alive]
        known = await self._tasks.records(t.group for t in alive)
        records = [known[t.group] for t in alive]
        texts = await asyncio.to_thread(self._texts, (t.response_tokens.tolist() for t in alive))
        return [
            ScoringItem(t.id, *place, text, record)
            for t, place, text, record in zip(alive, places, texts, records, strict=True)
        ]

    async def rewarded(self, scored: list[RewardItem]) -> list[ScoredResponse | None]:
        """Record the rewards of trajectories that are still live and have just the tokens that were scored. Returns
        the reward that each has now, which is the first that it got; None if it has none."""
        now = self._now()
        taken: list[Entry] = []
        held: list[ScoredResponse | None] = []
        for item in scored:
            entry = RewardDelivered(
                trajectory=item.trajectory,
                tokens=item.tokens,
                reward=item.score.reward,
                parts=item.score.parts,
                error=item.score.error,
                at_s=now,
                attempt=self._flight.attempt(item.trajectory),
            )
            if self._flight.awaits(item.trajectory, item.tokens, item.epoch) and self._flight.apply(entry):
                taken.append(entry)
            held.append(self._score(item.trajectory))
        await self._writing.append(taken)
        return held

    def _score(self, trajectory: TrajectoryId) -> ScoredResponse | None:
        """The reward of a trajectory that is live and has one."""
        t = self._flight.live.get(trajectory)
        if t is None or trajectory not in self._flight.scored:
            return None
        return ScoredResponse(reward=t.reward, parts=t.reward_parts, error=t.error)

    async def batch(
        self, step: int, trajectories: tuple[TrajectoryId, ...], versions: tuple[PolicyVersion, ...], first: int
    ) -> BatchMessage:
        """Rows of training step `step` from row `first` on, group by group, as many as fit into a message; from now on
        all of them count as consumed.

        trajectories: none for a step that was trained before and is asked for again, stored or not. versions: each
        trajectory's v_traj, as decided by the ledger.
        """
        written = None
        if trajectories and step not in self._flight.batches:
            asked, settings = [self._flight.live[t] for t in trajectories], self._settings
            check_batch(step, asked, settings.group_size, settings.max_error_share, settings.reward)
            taken = BatchTaken(step=step, trajectories=trajectories, versions=versions)
            self._flight.apply(taken)
            written = self._writing.append([taken])
        part = await self._batches.part(step, first)
        if written is not None:
            await written
        return part

    async def retire(self, endings: tuple[Ending, ...], versions: tuple[PolicyVersion, ...]) -> None:
        """Remove trajectories that ended without being trained on; the next commit stores them with their v_traj."""
        if self._flight.apply(entry := TrajectoriesRetired(endings=endings, versions=versions)):
            await self._writing.append([entry])

    async def commit(self, record: StepRecord) -> dict[str, float]:
        """Commit a step: what it consumed and what ended since the last commit. Returns metrics of the batch.

        Fills in `record.ledger.live`: trajectories started by then that are neither stored nor in this commit. While
        the store's bucket fails, the commit is tried again for deadlines.commit_s. Raises StoreError.
        """
        begin = time.monotonic()
        if record.repeats(last := self._last_record):  # it is asked for again, by one that did not hear of it
            return {"commit_s": 0.0, **(last.metrics if last else {})}
        step = record.step if record.kind == "step" else None
        batch = None if step is None else self._batches.batch(step)
        rows = [*(batch.rows if batch else []), *self._flight.ended]
        live = id_ranges(self._flight.unstored(record.ledger.num_started, (e.trajectory.id for e in rows)))
        metrics = batch.metrics if batch else {}
        record = replace(
            record,
            ledger=replace(record.ledger, live=live),
            metrics=metrics | record.metrics,
            batch_fingerprint=await batch.fingerprint if batch else "",
        )
        await self._commit(record, rows)
        return metrics | {"commit_s": time.monotonic() - begin}

    async def outage(self) -> str:
        """Why the store's bucket does not take a commit that is tried again; empty if none is."""
        return self._storing.outage

    async def close(self) -> None:
        self._tasks.close()
        self._writing.close()
        self._storing.close()

    # -- inside --------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return time.monotonic() - self._epoch

    async def _commit(self, record: StepRecord, rows: list[Ended]) -> None:
        await self._storing.commit(record, rows)
        self._last_record = record
        self._known.add(rows)
        step = record.step if record.kind == "step" else None
        done = self._flight.stored((e.trajectory.id for e in rows), step)
        if step is not None:
            self._batches.forget(step)
        self._tasks.forget(done)
        await self._writing.committed(record.step, done, self._points)

    @property
    def _last_ledger(self) -> LedgerState:
        if self._last_record is None:
            return LedgerState(num_started=0, num_ended={}, live=(), next_step=0, version=0)
        return self._last_record.ledger

    def _texts(self, responses: Iterable[Sequence[int]]) -> list[str]:
        """Decode responses; takes up to a microsecond a token, so not on the event loop."""
        return [self._prompts.text(r) for r in responses]
