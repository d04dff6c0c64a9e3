"""Several coordinators with a fixed share of each step, against one coordinator: tokens/s in virtual time.

    python -m benchmarks.shares
    python -m benchmarks.shares --instances 2048 --running 64 --steps 4 --bounds 1 --seeds 1

A share is a coordinator with a ledger, instances and groups of its own; step n trains on the batches that all shares
consumed for it (docs/results.md). Both columns sample the same prompts with the same lengths. In the last column one
coordinator is lost in the middle of the run, with all that its instances have not delivered; a new one resumes its
groups after the seconds of `simulation.replace_s`. It fails (exit 1) if a step broke the bound or took other than its
number of groups, or a trajectory ended twice or was dropped.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from staleflow.pipeline.config import actor_settings, factories, loading
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.coordination import commands
from staleflow.pipeline.coordination.phases import Phase
from staleflow.pipeline.coordination.resume_plan import plan_resume
from staleflow.pipeline.coordination.trajectories import LiveTrajectory
from staleflow.pipeline.simulator.simulated_run import SimulatedRun, train_seconds
from staleflow.pipeline.strategies.filtering import FILTERING
from staleflow.stores.errors import RunStuck
from staleflow.stores.in_flight.in_flight_state import GroupInFlight, MemberInFlight
from staleflow.stores.trajectories.records import LedgerState
from staleflow.stores.trajectory import GroupId, PolicyVersion, TrajectoryId, outcome_key
from staleflow.tasks.emulation.workload import Turn, Workload

JOB = "examples/longtail.toml"
MAX_STEP_S = 3600.0
"""Seconds without a batch of any share after which the run counts as stuck."""


class ShareOfWorkload:
    """Every `count`-th group of a workload, from group `number` on."""

    def __init__(self, workload: Workload, number: int, count: int) -> None:
        self._workload, self._number, self._count = workload, number, count

    def prompt_tokens(self, group: int) -> int:
        return self._workload.prompt_tokens(group * self._count + self._number)

    def turns(self, group: int, member: int) -> tuple[Turn, ...]:
        return self._workload.turns(group * self._count + self._number, member)

    def reward(self, group: int, member: int) -> float:
        return self._workload.reward(group * self._count + self._number, member)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a share consumed for a step. share: its number. sampled, prefilled: tokens."""

    share: int
    command: commands.Train
    sampled: int
    prefilled: int


class Share(SimulatedRun):
    """A coordinator with its instances and groups. Its trainer is that of the whole run."""

    def __init__(self, run: SharedRun, number: int, config: RunConfig, workload: Any) -> None:
        super().__init__(config, workload)
        self._run, self._number = run, number
        self._is_lost = False
        self._num_pending = 1  # the trainer of all shares: this one is not stuck if it waits for the others

    @property
    def next_s(self) -> float:
        """Time of the next event, in seconds."""
        return self._heap[0][0] if self._heap else math.inf

    def start(self, attempt: int = 0) -> None:
        """Start the instances and the ticks."""
        for index in range(self._config.rollout.instances):
            self._join(index, attempt)
        self._schedule(self._now + self._simulation.report_s, self._tick, recurring=True)

    def handle_next(self) -> None:
        at_s, _, action, recurring = heapq.heappop(self._heap)
        self._num_pending -= not recurring
        self._now = max(self._now, at_s)
        action()
        self._reschedule()

    def publish_at(self, at_s: float, version: int) -> None:
        """Publish a version. A lost coordinator learns of it when it resumes."""
        self._schedule(at_s, lambda: None if self._is_lost else self._publish(version))

    def _train(self, command: commands.Train) -> None:
        responses = [self._response_cost(t, self._tokens.pop(t)) for t in command.trajectories]
        sampled, prefilled = sum(r.tokens for r in responses), sum(r.min_prefill_tokens for r in responses)
        self._run.add_batch(Batch(share=self._number, command=command, sampled=sampled, prefilled=prefilled))

    def lose_coordinator(self, until_s: float) -> None:
        """Lose the coordinator and its instances while a step is trained. Responses keep the tokens that were
        delivered. until_s: when another coordinator resumes the groups in flight, after the step is published."""
        ledger = self.coordinator.ledger
        in_flight = [self._in_flight(group) for group in sorted({*ledger.live_groups, *ledger.finished_groups()})]
        self._tokens = {m.trajectory: m.tokens for group in in_flight for m in group.members if m.tokens}
        state = LedgerState(
            num_started=ledger.num_started, live=(), next_step=ledger.next_step, version=ledger.next_step,
            num_ended={outcome_key(*ending): count for ending, count in ledger.num_ended.items()},
        )  # fmt: skip
        for instance in tuple(self._instances.values()):
            self._remove_instance(instance)
        self._heap, self._num_pending, self._delivered, self._is_lost = [], 1, {}, True
        self._schedule(until_s, lambda: self._resume(state, in_flight))

    def _in_flight(self, group: GroupId) -> GroupInFlight:
        trajectories = self.coordinator._state.live_trajectories.values()
        members = [_delivered_part(t) for t in trajectories if t.group == group]
        finished_members = ((), ()) if members else self.coordinator.ledger.finished_groups()[group]
        for trajectory, version in zip(*finished_members, strict=True):
            reward = self._workload.reward(*self._workload_index(trajectory))
            members.append(
                MemberInFlight(
                    trajectory=trajectory, version=version, tokens=self._tokens[trajectory], sampled=True,
                    scored=True, reward=reward,
                )
            )  # fmt: skip
        return GroupInFlight(
            group=group,
            prompt_tokens=self._workload.prompt_tokens(group),
            members=tuple(sorted(members, key=lambda member: not member.scored)),
        )

    def _resume(self, state: LedgerState, in_flight: list[GroupInFlight]) -> None:
        trial_ledger = factories.make_coordinator(self._config).ledger
        event, restarted = plan_resume(trial_ledger, FILTERING.make(self._config.batch.filtering), state, in_flight)
        for trajectory in restarted:
            self._tokens.pop(trajectory, None)
        self.coordinator, self._is_lost = factories.make_coordinator(self._config), False
        self._handle(event)
        self.start(attempt=1)


def _delivered_part(trajectory: LiveTrajectory) -> MemberInFlight:
    """What is left of a trajectory without its coordinator and instance."""
    sampled = trajectory.phase in (Phase.SCORING, Phase.DONE)
    tokens = trajectory.tokens if sampled else trajectory.delivered_tokens
    scored = trajectory.phase is Phase.DONE
    return MemberInFlight(
        trajectory=trajectory.id, version=trajectory.v_traj if tokens else PolicyVersion(-1), tokens=tokens,
        sampled=sampled, scored=scored, reward=trajectory.reward if scored else None,
    )  # fmt: skip


class SharedRun:
    """Shares on one clock, and their trainer, which begins a step when every share has consumed its batch for it.

    loses_coordinator: whether the first share's coordinator is lost in the middle of the run.
    """

    def __init__(self, overrides: Sequence[str], count: int, *, loses_coordinator: bool = False) -> None:
        self.config = config = loading.load(JOB, overrides)
        self._group_size = config.members_started_per_group
        whole = actor_settings.make_workload(config)
        sizes = (config.rollout.instances // count, config.batch.groups_per_step // count)
        part = loading.load(JOB, [*overrides, f"rollout.instances={sizes[0]}", f"batch.groups_per_step={sizes[1]}"])
        self.shares = [Share(self, number, part, ShareOfWorkload(whole, number, count)) for number in range(count)]
        self._loss_step = config.steps // 2 if loses_coordinator else -1
        self._batches: dict[int, list[Batch]] = defaultdict(list)
        self._published_s: list[float] = []
        self._now = self._batch_s = 0.0
        self.findings: list[str] = []

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per second of the run."""
        return sum(b.sampled for batches in self._batches.values() for b in batches) / self._published_s[-1]

    def run(self) -> SharedRun:
        """Run all steps, and check what they trained on."""
        for share in self.shares:
            share.start()
        while not all(share.coordinator.is_finished for share in self.shares):
            share = min(self.shares, key=lambda share: share.next_s)
            self._now = max(self._now, share.next_s)
            if self._now - self._batch_s > MAX_STEP_S:
                raise RunStuck(share.coordinator.explain_waiting())
            share.handle_next()
        self._check()
        return self

    def add_batch(self, batch: Batch) -> None:
        """Add what a share consumed for a step; train the step if it is the last."""
        step, self._batch_s = batch.command.step, self._now
        self._batches[step].append(batch)
        if len(self._batches[step]) < len(self.shares):
            return
        tokens = sum(batch.sampled + batch.prefilled for batch in self._batches[step])
        published_s = self._now + train_seconds(self.config, tokens)
        self._published_s.append(published_s)
        for share in self.shares:
            share.publish_at(published_s, step + 1)
        if step == self._loss_step:
            self.shares[0].lose_coordinator(published_s + self.config.simulation.replace_s)

    def _check(self) -> None:
        eta, steps = self.config.staleness.eta, self.config.steps
        trained: Counter[tuple[int, TrajectoryId]] = Counter()
        for step in range(steps):
            commands_ = [batch.command for batch in self._batches[step]]
            trained.update((batch.share, t) for batch in self._batches[step] for t in batch.command.trajectories)
            count = sum(len(command.trajectories) for command in commands_)
            if count != self.config.batch.groups_per_step * self.config.batch.group_size:
                self.findings.append(f"step {step} trained on {count} trajectories")
            if any(not step - eta <= version <= step for command in commands_ for version in command.versions):
                self.findings.append(f"step {step} broke the bound")
        if trained and max(trained.values()) > 1:
            self.findings.append("a trajectory was trained on twice")
        for share in self.shares:
            dropped = {
                key: n for key, n in share.trace.ending_counts.items() if key not in ("consumed", "aborted:run_ended")
            }
            if dropped:
                self.findings.append(f"dropped: {dropped}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", type=int, default=4, help="coordinators")
    parser.add_argument("--instances", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--running", type=int, default=256, help="most requests of an instance")
    parser.add_argument("--bounds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--quick", action="store_true", help="one small case")
    args = parser.parse_args()
    if args.quick:
        args.instances, args.bounds, args.seeds, args.steps = [8], [1], [1], 4
    findings = []
    print(f"{JOB}, {args.steps} steps, {args.shares} shares over one coordinator: mean (least, most) of the seeds")
    for instances, eta in itertools.product(args.instances, args.bounds):
        ratios: list[list[float]] = [[], []]
        for seed in args.seeds:
            overrides = [
                f"rollout.instances={instances}", f"batch.groups_per_step={8 * instances}", f"staleness.eta={eta}",
                f"seed={seed}", f"steps={args.steps}", f"rollout.engine.max_running={args.running}",
            ]  # fmt: skip
            whole = SharedRun(overrides, 1).run()
            runs = [SharedRun(overrides, args.shares, loses_coordinator=loses).run() for loses in (False, True)]
            findings += [finding for run in (whole, *runs) for finding in run.findings]
            for kept, run in zip(ratios, runs, strict=True):
                kept.append(run.tokens_per_s / whole.tokens_per_s)
        shown = [f"{statistics.mean(r):.3f} ({min(r):.3f}, {max(r):.3f})" for r in ratios]
        print(f"{instances} instances, eta {eta}: {shown[0]}; with a lost coordinator {shown[1]}", flush=True)
    for finding in findings:
        print(finding, file=sys.stderr)
    if findings:
        sys.exit(1)


if __name__ == "__main__":
    main()
