"""The trajectory server: an actor that holds the payloads of live trajectories and is the store's only committer.

Tokens and texts go directly from worker to worker; the driver and the coordinator see ids,
lengths and versions. All its state changes on the worker's event loop, so no method needs a lock; commits run in a
thread, and prompts are drawn and encoded in another, so that neither waits for the other.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from stores.base import LedgerState, RunHeader, StepRecord, batch_fingerprint, id_ranges
from stores.errors import ConfigError, ProtocolViolation
from stores.metrics import REWARD_PART
from stores.rewards import has_signal
from stores.staleness import Ending
from stores.trajectory import (
    AbortReason,
    Ended,
    Fate,
    FinishReason,
    GroupId,
    PolicyVersion,
    Timings,
    Trajectory,
    TrajectoryId,
    ended_as,
)
from stores.versioned import VersionedStore
from tasks.actors.calls import answers_calls
from tasks.engines.base import Sampled
from tasks.prompts import HeldOut, Prompts, PromptSettings
from tasks.scoring import ScoredResponse
from tasks.task_source import Record, Task
from tasks.training.advantage import advantages
from tasks.training.packing import PackedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of the trajectory server; see BatchConfig and RewardConfig. store: the store's folder. reward: the
    reward functions as the job names them, for messages. resumed: whether to continue an existing store."""

    prompts: PromptSettings
    reward: str
    group_size: int
    members_started: int
    advantage: str
    max_error_share: float
    store: str
    header: RunHeader
    resumed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnGroup:
    """A drawn prompt: its group's id and its length in tokens."""

    group: GroupId
    prompt_tokens: int


class Payload(NamedTuple):
    """What a live trajectory consists of so far."""

    prompt: tuple[int, ...]
    sampled: tuple[int, ...]
    finish: FinishReason
    """UNFINISHED if sampling goes on after `sampled`; else it has ended by itself."""


@answers_calls
class TrajectoryServer:
    """The trajectory server's Dask actor. Safe to ask twice: draws are numbered, deliveries carry whole segments."""

    stores: ClassVar[type[VersionedStore]] = VersionedStore
    """What opens and creates the store."""

    def __init__(self, settings: ServerSettings, start_s: float) -> None:
        # Seconds since the run's start, as the driver counts them.
        self._epoch = time.monotonic() - start_s
        path = Path(settings.store)
        stored = self.stores.open(path) if settings.resumed else None
        prompts = settings.prompts
        if stored is not None:
            prompts = replace(prompts, held_out=stored.header.held_out, longest=stored.header.longest_prompt)
        self._settings = settings
        self._prompts: Prompts = prompts.build()
        self._store = self.stores.create(path, settings.header) if stored is None else stored
        self._live: dict[TrajectoryId, Trajectory] = {}
        # Of each one's latest routing: what an instance of an earlier one still delivers is not taken.
        self._epochs: dict[TrajectoryId, int] = {}
        # Of each one's latest delivery: an instance that heard no answer delivers once more.
        self._delivered: dict[TrajectoryId, int] = {}
        self._records: dict[GroupId, Record] = {}
        self._num_drawn = 0
        # Ended since the last commit; the consumed ones under their step, in the trainer's order.
        self._ended: list[Ended] = []
        self._consumed: dict[int, list[Ended]] = {}
        self._fingerprints: dict[int, asyncio.Future[str]] = {}
        self._metrics: dict[int, dict[str, float]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._encoding = ThreadPoolExecutor(1, thread_name_prefix="prompts")

    async def resume(self) -> LedgerState:
        """Continue a stored run: commit what was in flight at its last commit, which is lost, as aborted. Returns the
        ledger state after that. Idempotent."""
        records = self._store.steps(-1)
        if not records:
            return LedgerState(num_started=0, num_ended={}, live=(), next_step=0, version=0)
        state = records[-1].ledger
        members = self._settings.members_started
        self._num_drawn = state.num_started // members
        if not state.live:
            return state
        lost = [i for first, last in state.live for i in range(first, last)]
        key = ended_as(Fate.ABORTED, AbortReason.RUN_ENDED)
        num_ended = {**state.num_ended, key: state.num_ended.get(key, 0) + len(lost)}
        state = replace(state, live=(), num_ended=num_ended)

        def commit_lost() -> None:
            prompts = {g: self._prompts.encode(self._prompts.task(g)) for g in {i // members for i in lost}}
            ended = [
                Ended(
                    trajectory=Trajectory(
                        id=TrajectoryId(i),
                        group=GroupId(i // members),
                        prompt_tokens=np.asarray(prompts[i // members], np.int32),
                    ),
                    fate=Fate.ABORTED,
                    reason=AbortReason.RUN_ENDED,
                    step=state.next_step,
                    loss_mask=False,
                )
                for i in lost
            ]
            self._store.commit(StepRecord(kind="resume", step=state.next_step, ledger=state), ended)

        await asyncio.get_running_loop().run_in_executor(self._thread, commit_lost)
        return state

    async def draw(self, num_groups: int) -> list[DrawnGroup]:
        """Draw the next groups from the task source; returns their ids and lengths."""
        first = self._num_drawn
        self._num_drawn += num_groups
        tasks = await asyncio.get_running_loop().run_in_executor(self._encoding, self._encode, first, num_groups)
        now = self._now()
        for group, (task, tokens) in enumerate(tasks, first):
            self._records[GroupId(group)] = task.record
            prompt = np.asarray(tokens, np.int32)
            for i in range(self._settings.members_started):
                member = TrajectoryId(group * self._settings.members_started + i)
                self._live[member] = Trajectory(
                    id=member, group=GroupId(group), prompt_tokens=prompt, timings=Timings(arrived_s=now)
                )
        return [DrawnGroup(group=GroupId(g), prompt_tokens=len(t[1])) for g, t in enumerate(tasks, first)]

    async def held_out(self, count: int) -> list[HeldOut]:
        """The first `count` held-out prompts without duplicates; fewer if some are equal or the source has fewer."""

        def encode() -> list[HeldOut]:
            return [HeldOut(tokens=self._prompts.encode(t), record=t.record) for t in self._prompts.held_out(count)]

        return await asyncio.get_running_loop().run_in_executor(self._encoding, encode)

    async def held_out_notice(self) -> str:
        """One line on training prompts found to be held out so far; empty if there were none."""
        return self._prompts.held_out_notice

    async def decode(self, responses: list[tuple[int, ...]]) -> list[str]:
        """Decode token ids to texts."""
        return [self._prompts.text(r) for r in responses]

    async def payloads(self, routed: tuple[tuple[TrajectoryId, int], ...]) -> dict[TrajectoryId, Payload]:
        """The payloads of trajectories that are still live. routed: (trajectory, epoch) of each routing; what instances
        of earlier epochs deliver is ignored from now on."""
        now = self._now()
        found = {}
        for member, epoch in routed:
            t = self._live.get(member)
            if t is not None:
                self._epochs[member] = max(epoch, self._epochs.get(member, 0))
                self._live[member] = replace(t, timings=replace(t.timings, routed_s=t.timings.routed_s or now))
                found[member] = Payload(tuple(t.prompt_tokens.tolist()), tuple(t.response_tokens.tolist()), t.finish)
        return found

    async def deliver(self, sampled: list[Sampled]) -> dict[TrajectoryId, int]:
        """Add segments that an instance sampled; returns each trajectory's total tokens. Ignores ended trajectories
        and what an instance delivers after its trajectory was routed anew."""
        now = self._now()
        totals = {}
        for item in sampled:
            t = self._live.get(item.trajectory)
            if t is None or item.epoch < self._epochs.get(item.trajectory, 0):
                continue
            if item.epoch == self._delivered.get(item.trajectory):
                totals[item.trajectory] = t.num_tokens
                continue
            self._delivered[item.trajectory] = item.epoch
            for segment in item.segments:
                t = t.with_segment(segment)
            t = replace(t, finish=item.finish, timings=replace(t.timings, sampled_s=now))
            self._live[item.trajectory] = t
            totals[item.trajectory] = t.num_tokens
        return totals

    async def scoring_items(self, trajectories: tuple[TrajectoryId, ...]) -> list[tuple[TrajectoryId, str, Record]]:
        """(id, response text, record) of each trajectory that is still live."""
        alive = [t for i in trajectories if (t := self._live.get(i)) is not None]
        return [(t.id, self._prompts.text(t.response_tokens.tolist()), self._records[t.group]) for t in alive]

    async def rewarded(self, scored: list[tuple[TrajectoryId, ScoredResponse]]) -> None:
        """Record the rewards of trajectories that are still live."""
        now = self._now()
        for member, score in scored:
            t = self._live.get(member)
            if t is not None:
                self._live[member] = replace(
                    t,
                    reward=score.reward,
                    reward_parts=score.parts,
                    error=score.error,
                    timings=replace(t.timings, rewarded_s=now),
                )

    async def batch(
        self, step: int, trajectories: tuple[TrajectoryId, ...], versions: tuple[PolicyVersion, ...]
    ) -> PackedRows:
        """The rows of training step `step`, group by group; from now on they count as consumed.

        trajectories: none for a step that was trained before and is asked for again, stored or not. versions: each
        trajectory's v_traj, as decided by the ledger.
        """
        if step not in self._consumed and not trajectories:
            return await asyncio.to_thread(lambda: _packed(list(self._store.ended(step))))
        if step not in self._consumed:
            placed = zip(trajectories, versions, strict=True)
            self._consume(step, [replace(self._live[t], v_traj=v) for t, v in placed])
        return _packed(self._consumed[step])

    async def retire(self, endings: tuple[Ending, ...], versions: tuple[PolicyVersion, ...]) -> None:
        """Remove trajectories that ended without being trained on; the next commit stores them with their v_traj."""
        for ending, version in zip(endings, versions, strict=True):
            t = replace(self._live.pop(ending.trajectory), v_traj=version)
            self._epochs.pop(ending.trajectory, None)
            self._delivered.pop(ending.trajectory, None)
            self._ended.append(
                Ended(trajectory=t, fate=ending.fate, reason=ending.reason, step=ending.step, loss_mask=False)
            )

    async def commit(self, record: StepRecord) -> dict[str, float]:
        """Commit a step: what it consumed and what ended since the last commit. Returns metrics of the batch.

        Fills in `record.ledger.live`: trajectories started by then that are neither stored nor in this commit.
        """
        begin = time.monotonic()
        consumed = self._consumed.get(record.step, []) if record.kind == "step" else []
        ended, self._ended = [*consumed, *self._ended], []
        # Groups that are drawn but not yet in the ledger have not been started there.
        started = record.ledger.num_started
        training = {e.trajectory.id for step, rows in self._consumed.items() if rows is not consumed for e in rows}
        live = id_ranges(i for i in (*self._live, *training) if i < started)
        metrics = self._metrics.pop(record.step, {}) if record.kind == "step" else {}
        record = replace(
            record,
            ledger=replace(record.ledger, live=live),
            metrics=metrics | record.metrics,
            batch_fingerprint=await self._fingerprints.pop(record.step) if record.kind == "step" else "",
        )
        await asyncio.get_running_loop().run_in_executor(self._thread, self._store.commit, record, ended)
        if record.kind == "step":
            del self._consumed[record.step]
        for group in {e.trajectory.group for e in ended}:
            first = group * self._settings.members_started
            members = range(first, first + self._settings.members_started)
            if not any(TrajectoryId(m) in self._live for m in members):
                self._records.pop(group, None)
        return metrics | {"commit_s": time.monotonic() - begin}

    async def close(self) -> None:
        self._encoding.shutdown(wait=False, cancel_futures=True)
        self._thread.shutdown(wait=True)

    # -- inside --------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return time.monotonic() - self._epoch

    def _encode(self, first: int, count: int) -> list[tuple[Task, tuple[int, ...]]]:
        tasks = [self._prompts.task(i) for i in range(first, first + count)]
        return [(task, self._prompts.encode(task)) for task in tasks]

    def _consume(self, step: int, batch: list[Trajectory]) -> None:
        errors = [t for t in batch if t.error]
        if len(errors) > self._settings.max_error_share * len(batch):
            raise ConfigError(
                f"{self._settings.reward}: failed on {len(errors)} of {len(batch)} "
                f"responses of step {step} (limit: reward.max_error_share = {self._settings.max_error_share:g}); "
                f"first: {errors[0].error}"
            )
        size = self._settings.group_size
        if len(batch) % size or any(
            len({t.group for t in batch[i : i + size]}) > 1 for i in range(0, len(batch), size)
        ):
            raise ProtocolViolation(f"step {step}: the batch does not consist of whole groups")
        rewards = np.asarray([t.reward for t in batch], np.float64).reshape(-1, size)
        valid = np.asarray([not t.error for t in batch], bool).reshape(-1, size)
        estimate = advantages(self._settings.advantage, rewards, valid).reshape(-1)
        consumed = [
            Ended(trajectory=t, fate=Fate.CONSUMED, step=step, advantage=float(a), loss_mask=not t.error)
            for t, a in zip(batch, estimate, strict=True)
        ]
        for t in batch:
            del self._live[t.id]
            self._epochs.pop(t.id, None)
            self._delivered.pop(t.id, None)
        self._consumed[step] = consumed
        # In the background: the trainer is waiting for the batch.
        self._fingerprints[step] = asyncio.get_running_loop().run_in_executor(
            self._thread, batch_fingerprint, [(e.trajectory, e.advantage) for e in consumed]
        )
        self._metrics[step] = _batch_metrics(consumed, rewards, valid)


def _packed(consumed: list[Ended]) -> PackedRows:
    trajectories = [e.trajectory for e in consumed]
    return PackedRows(
        prompt_tokens=np.concatenate([t.prompt_tokens for t in trajectories]),
        response_tokens=np.concatenate([s.tokens for t in trajectories for s in t.segments]),
        behaviour=np.concatenate([s.logprobs for t in trajectories for s in t.segments]),
        lengths=np.asarray([(len(t.prompt_tokens), t.num_tokens) for t in trajectories], np.int64),
        advantages=np.asarray([e.advantage for e in consumed], np.float32),
        staleness=np.asarray([e.staleness for e in consumed], np.int64),
        trained=np.asarray([e.loss_mask for e in consumed], bool),
    )


def _batch_metrics(
    consumed: list[Ended], rewards: np.ndarray[Any, Any], valid: np.ndarray[Any, Any]
) -> dict[str, float]:
    lengths = np.asarray([e.trajectory.num_tokens for e in consumed])
    staleness = np.asarray([e.staleness for e in consumed])
    parts: dict[str, list[float]] = {}
    for one in consumed:
        for name, value in one.trajectory.reward_parts.items() if one.loss_mask else ():
            parts.setdefault(f"{REWARD_PART}{name}", []).append(value)
    sampling_s = np.asarray([e.trajectory.timings.sampled_s - e.trajectory.timings.routed_s for e in consumed])
    return {
        "reward": float(rewards[valid].mean()) if valid.any() else 0.0,
        **{name: float(np.mean(values)) for name, values in sorted(parts.items())},
        "reward_errors": float((~valid).sum()),
        "groups_with_signal": float(has_signal(rewards, valid).mean()),
        "response_tokens": float(lengths.sum()),
        "response_mean": float(lengths.mean()),
        "response_max": float(lengths.max()),
        "truncated_share": float(np.mean([e.trajectory.finish.value == "length" for e in consumed])),
        "staleness_mean": float(staleness.mean()),
        "staleness_max": float(staleness.max()),
        "sampling_s": float(sampling_s.mean()),
        "mixed_versions": float(np.mean([len({s.version for s in e.trajectory.segments}) > 1 for e in consumed])),
    }
