"""Runs a coordinator on actors: executes its commands as calls, and feeds the results back as events.

It decides nothing itself. One asyncio loop; pipeline/processes/worker_protocol.py hides where the actors run. The main
loop handles events; tasks beside it run the commit queue (commit_queue.py), scoring (scoring.py), environment steps
(environment_hosts.py) and the links to instances (membership.py).

Invariants:
- Every event is journalled with the commands it led to, in the order in which they were carried out.
- Commands to one rollout instance leave in order (see InstanceLink). So do retirements and commits to the trajectory
  server: what a step consumed is queued for commit before its version is announced to the coordinator. A step begins
  only when at most one trained before it is not stored.
- A lost rollout instance or reward worker is an event, not an exception: it is replaced, and its work is sampled or
  scored again. The trainer and the trajectory server are restored (role_recovery.py), and calls to them are retried.
  A failed commit ends the run with one error.
- A stop lets the training step in flight finish; a second stop does not.
- Whatever happens, `close` leaves no task behind and does not raise.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from staleflow.pipeline.config import factories
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.coordination.commands import (
    Abort,
    CloseEnvironment,
    Command,
    Discard,
    FetchPrompts,
    FinishEvaluation,
    Interrupt,
    Pull,
    ReleaseCache,
    Route,
    Score,
    SetDraftLength,
    Sleep,
    StepEnvironment,
    Train,
)
from staleflow.pipeline.coordination.coordinator import Coordinator
from staleflow.pipeline.coordination.events import (
    Event,
    GroupsArrived,
    InstanceReported,
    NewGroup,
    RoutingContinued,
    RunResumed,
    StopRequested,
    Tick,
    VersionPublished,
)
from staleflow.pipeline.coordination.mixture import SourceCounts
from staleflow.pipeline.coordination.resume_plan import plan_resume
from staleflow.pipeline.processes.background import Background
from staleflow.pipeline.processes.clock import now_s
from staleflow.pipeline.recovery.resumption import Resumption
from staleflow.pipeline.recovery.run_journal import RunJournal
from staleflow.pipeline.recovery.source_fingerprints import Fingerprints, changes_of
from staleflow.pipeline.recovery.start_inputs import start_inputs
from staleflow.pipeline.runtime.actors import Actors
from staleflow.pipeline.runtime.commit_queue import CommitQueue
from staleflow.pipeline.runtime.environment_hosts import EnvironmentHosts
from staleflow.pipeline.runtime.evaluation_driver import EvaluationDriver
from staleflow.pipeline.runtime.evaluation_results import after_resuming, not_comparable, read_evaluations
from staleflow.pipeline.runtime.measurements import Measurements
from staleflow.pipeline.runtime.membership import Membership
from staleflow.pipeline.runtime.run_listener import RunListener
from staleflow.pipeline.runtime.run_report import RunReport
from staleflow.pipeline.runtime.scoring import Scoring
from staleflow.pipeline.runtime.training_alarms import TrainingAlarms
from staleflow.stores.errors import RunStuck
from staleflow.stores.metrics import with_rate
from staleflow.stores.trajectories.records import LedgerState, StepRecord
from staleflow.stores.trajectory import InstanceId, PolicyVersion, TrajectoryId, is_evaluation, outcome_key
from staleflow.stores.weights.resume_points import ResumePoints
from staleflow.tasks.actors.server_messages import RecoverableWork, RecoveredWork
from staleflow.tasks.actors.trainer import PublishedStep

logger = logging.getLogger(__name__)

TICK_S = 0.5
"""Seconds between two ticks of the coordinator."""
STARTING_S = 2.0
"""Seconds between two reports on the progress of the start."""
GROUPS_PER_EVENT = 32
"""Groups that arrive in one event, so that many groups do not hold up the event loop."""


class Driver:
    """Drives one run.

    Args:
        config: The job.
        actors: The run's actors, not yet placed.
        run_dir: The run's folder.
        listener: Receives phases, status, steps and evaluations, for display and reports.
        resumption: Where to resume; None for a new run.
        fingerprints: Of rewards, data and prompt templates now.
        changed: Differences of `fingerprints` from those at the run's beginning, a line each.
    """

    def __init__(
        self,
        config: RunConfig,
        actors: Actors,
        run_dir: Path,
        listener: RunListener,
        resumption: Resumption | None = None,
        *,
        fingerprints: Fingerprints | None = None,
        changed: Sequence[str] = (),
    ) -> None:
        self._config = config
        self._fingerprints = fingerprints
        self._changed = tuple(changed)
        self._actors = actors
        self._run_dir = run_dir
        self._listener = listener
        self._resumption = resumption
        self._measurements = Measurements(config, 0.0 if resumption is None else resumption.elapsed_s)
        self._coordinator: Coordinator = factories.make_coordinator(config)
        self._journal = RunJournal(run_dir / "events.jsonl")
        self._inbox: asyncio.Queue[Event | PublishedStep | BaseException] = asyncio.Queue()
        self._background = Background(self._inbox.put_nowait)
        self._commits = CommitQueue(actors, config.deadlines, self._on_commit, self._begin_phase)
        actors.verification.on_refused = self._store_refusal
        self._scoring = Scoring(config, actors, self._inbox.put_nowait, lambda: self._measurements.elapsed_s)
        self._environment_hosts = EnvironmentHosts(
            config, actors, self._inbox.put_nowait, lambda: self._measurements.elapsed_s
        )
        self._num_drawn = 0
        """Groups that the server has drawn; also the number of the next group."""
        self._drawing = asyncio.Lock()
        self._stop_requested = ""
        self.training = False
        """Whether the training loop runs, between the evaluations."""
        self._task: asyncio.Task[Any] | None = None
        self._membership = Membership(
            config,
            actors,
            self._background,
            self._inbox.put_nowait,
            self._coordinator.is_drained,
            lambda: self._measurements.elapsed_s,
        )
        self._training_alarms = TrainingAlarms()
        self._reported: dict[InstanceId, tuple[tuple[TrajectoryId, int], ...]] = {}
        """Each instance's latest report: tokens of the responses it samples."""
        self._bytes_arrived = 0
        self._last_point = PolicyVersion(0) if resumption is None else resumption.version
        self._inputs: dict[str, str] = {}
        """What the weights of this start are computed from."""
        self._stored_inputs: dict[str, str] = {}
        """The same, as the last step has it that stored it."""
        self.outcomes = RunReport(
            losses=actors.loss_messages, alarms=actors.verification.alarms, notes=actors.verification.unverified_notes
        )  # their lists: shown while the run lasts
        self._evaluation_driver = EvaluationDriver(
            config,
            actors,
            run_dir,
            self.outcomes.evaluations,
            self._inbox.put_nowait,
            self._note,
            lambda: self._measurements.elapsed_s,
            lambda name: {} if self._fingerprints is None else self._fingerprints.digests(name),
            lambda name: changes_of(self._changed, name),
        )

    # -- the run -------------------------------------------------------------------------------------------------

    async def run(self) -> RunReport:
        """Run the job: place the actors, train and evaluate, commit the end. Raises StaleflowError."""
        self._task = asyncio.current_task()
        for line in self._changed:
            self._note(line)
        self._begin_phase("starting actors")
        starting = asyncio.ensure_future(self._report_start_progress())
        self._actors.recovery.begin(lambda: self._measurements.elapsed_s)
        try:
            await self._actors.place_all(self._measurements.elapsed_s, self._resumption)
        finally:
            starting.cancel()
        first = self._actors.trained_fingerprints
        self._inputs = start_inputs(self._run_dir, first[max(first)], self._fingerprints)
        resumed = await self._resume()
        self._note(await self._actors.ask("server", "held_out_notice"))
        self._measurements.start()
        await self._actors.ask("server", "keep_time", self._measurements.elapsed_s)
        if resumed is not None:
            self._handle(resumed)
        self._background.spawn(self._commits.work(), "commits")
        self._background.spawn(self._tick(), "clock")
        self._background.spawn(self._actors.recovery.watch(), "watch")
        self._background.spawn(self._membership.grow(), "growth")
        for work in self._scoring.work():
            self._background.spawn(work, "scoring")
        for work in self._environment_hosts.work():
            self._background.spawn(work, "acting")
        self._membership.join_all()
        await self._evaluation_driver.begin(self._coordinator.ledger.version)
        self.training = True
        try:
            await self._main_loop()
            self.training = False
            await self._finish_commits()
        finally:
            self._complete_report()
        self._membership.stop_links()
        self._note(await self._actors.ask("server", "held_out_notice"))
        await self._checkpoint(self._coordinator.ledger.version)
        self._log_resume_points()
        return self.outcomes

    async def _report_start_progress(self) -> None:
        """Report the progress of the start whenever it has changed."""
        announced = ""
        while True:
            await asyncio.sleep(STARTING_S)
            if (now := self._actors.start_progress) != announced:
                announced = now
                self._begin_phase(f"starting actors: {now}")

    def decisions(self, count: int) -> list[tuple[float, int, str, str]]:
        """The coordinator's latest decisions, newest first: (seconds, trajectory, decision, cause)."""
        return self._coordinator.latest_decisions(count)

    def tokens_sampled(self) -> dict[str, int]:
        """Tokens each instance has sampled since it was started."""
        return {str(name): instance.tokens_sampled for name, instance in self._actors.instances.items()}

    def kept_tokens(self) -> dict[str, int]:
        """KV tokens that each instance has cached between turns."""
        return {str(name): instance.kept_tokens for name, instance in self._actors.instances.items()}

    async def _resume(self) -> RunResumed | None:
        """Restore steps, evaluations and in-flight work of a resumed run. Returns the event that reports them; None for
        a new run."""
        if self._resumption is None:
            return None
        self.outcomes.steps += self._resumption.steps
        evaluations = read_evaluations(self._run_dir)
        self.outcomes.evaluations += after_resuming(evaluations, self._resumption.version)
        return await self._recover_in_flight()

    async def _recover_in_flight(self) -> RunResumed:
        """Plan which in-flight work of the stored run continues within the bound, and resume it on the server."""
        in_flight: RecoverableWork = await self._actors.ask("server", "recoverable", deadline="start_s")
        filtering = factories.make_strategies(self._config).filtering
        ledger = factories.make_coordinator(self._config).ledger
        resumed, from_prompt = plan_resume(ledger, filtering, in_flight.ledger, in_flight.groups)
        recovered: RecoveredWork = await self._actors.ask("server", "resume", from_prompt, deadline="start_s")
        self._num_drawn = recovered.ledger.num_started // self._config.oversampled_group_size
        if recovered.responses or recovered.num_restarted:
            self._note(
                f"resumed {recovered.responses:,} in-flight responses ({recovered.tokens:,} tokens); "
                f"{recovered.num_restarted:,} restart from their prompts"
            )
        return replace(resumed, num_ended=tuple(recovered.ledger.num_ended.items()))

    def stop(self, why: str) -> None:
        """Request that the run ends after the training step in flight; at once on a second request, or outside of
        training. Safe in a signal handler."""
        if self._task is not None and (self._stop_requested or not self.training):
            self._task.cancel()
        self.outcomes.stopped = self._stop_requested = self._stop_requested or why
        logger.info("stopping: %s", why)

    def retire(self, worker: str) -> str:
        """Retire the rollout instance on a Dask worker; see Membership.retire."""
        return self._membership.retire(worker)

    def release_worker(self, worker: str) -> None:
        """Release a Dask worker that another job waits for, if it runs only a reward worker or environment host.
        Idempotent. worker: its address."""
        name = self._actors.reward_actor_at(worker)
        if name and self.training:
            move = self._environment_hosts.move(name) if self._config.has_environment else self._scoring.move(name)
            self._background.spawn(move, "give back")

    async def close(self) -> None:
        """Stop all tasks and close all actors. Never raises."""
        while tasks := [t for t in self._tasks() if not t.done()]:  # an ending one may have spawned another
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._evaluation_driver.best.close()
        await self._actors.close()
        self._journal.close()

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [*self._background, *self._membership.tasks()]

    async def _main_loop(self) -> None:
        """Handle events and execute commands until all steps are trained or a stop is requested."""
        last_progress = now_s()
        while not self._coordinator.finished or self._evaluation_driver.pending:
            item = await self._next_item()
            if isinstance(item, BaseException):
                raise item
            if isinstance(item, PublishedStep):
                item = self._after_training(item)
                if self._stop_requested:  # before the version is announced: the next step could begin with it
                    await self._abort_in_flight()
            if self._is_progress(item) or self._has_pending_calls():
                last_progress = now_s()
            self._handle(item)
            if isinstance(item, VersionPublished):
                self._evaluation_driver.published(item.version)
            if self._stop_requested and not self._coordinator.training:
                break
            self._check_progress(now_s() - last_progress)
        await self._abort_in_flight()
        step = self._coordinator.ledger.next_step
        checks = self._actors.verification.take_checks()
        self._commits.put(StepRecord(kind="end", step=step, ledger=self._ledger_state(), weight_checks=checks))

    async def _next_item(self) -> Event | PublishedStep | BaseException:
        """Wait for the next event, published step or error. Ticks arrive even if nothing else does."""
        if self._coordinator.has_more_routes:
            await asyncio.sleep(0)  # calls that wait for the event loop come first
            if self._inbox.empty():
                return RoutingContinued()
        if not self._inbox.empty():
            return self._inbox.get_nowait()
        item = await self._inbox.get()
        self._measurements.count_assigned_time(self._coordinator.num_running_by_instance(), self._actors.instances)
        return item

    def _has_pending_calls(self) -> bool:
        """Return whether calls with deadlines of their own are pending, or weights have arrived since the last call.
        Such waiting is not a stuck run: a call that fails ends by its deadline."""
        arrived, self._bytes_arrived = self._bytes_arrived, self._actors.bytes_arrived
        busy = self._commits.full or self._actors.recovery.busy or self._actors.loading
        return busy or self._bytes_arrived > arrived

    def _is_progress(self, event: Event) -> bool:
        """Return whether an event counts as progress. A report does if a response has grown since the previous one."""
        match event:
            case Tick():
                return False
            case InstanceReported(instance=instance, progress=progress):
                before, self._reported[instance] = self._reported.get(instance, ()), progress
                return progress != before
            case _:
                return True

    async def _abort_in_flight(self) -> None:
        """Abort the work in flight; redundancy may leave some even after the last step. If the run is stopped, all
        sampled tokens are first delivered to the trajectory server, so that a resumed run continues with them."""
        if self._stop_requested and any(self._coordinator.num_running_by_instance().values()):
            await self._membership.flush_all()
        self._handle(StopRequested(why=self.outcomes.stopped or "all steps are trained"))

    def _check_progress(self, idle_s: float) -> None:
        """Raise RunStuck if there was no progress for longer than deadlines.train_s or stuck_s."""
        knob = "train_s" if self._coordinator.training else "stuck_s"
        limit_s: float = getattr(self._config.deadlines, knob)
        if idle_s > limit_s:
            raise RunStuck(f"no progress for {limit_s:g} s (deadlines.{knob}): {self._coordinator.explain_waiting()}")

    def _handle(self, event: Event) -> None:
        now = self._measurements.elapsed_s
        with self._measurements.decision_timer():
            commands = self._coordinator.handle(event, now * self._config.rollout.engine.time_scale)
        self._journal.append(now * self._config.rollout.engine.time_scale, event, commands)
        self._measurements.observe(now, event, commands)
        if (mixture := self._coordinator.mixture) is not None:
            for line in mixture.take_notices():
                self._note(line)
        if isinstance(event, VersionPublished) and (bottleneck := self._measurements.bottleneck) is not None:
            self.outcomes.bottlenecks[event.version - 1] = bottleneck.short
        for command in commands:
            kind = type(command).__name__
            self.outcomes.commands[kind] = self.outcomes.commands.get(kind, 0) + 1
        for command in commands:
            self._execute(command)

    def _execute(self, command: Command) -> None:
        match command:
            case Route() | Abort() | ReleaseCache() | Interrupt() | Pull() | Sleep() | SetDraftLength():
                instance = self._actors.instances.get(command.instance)
                if instance is not None:  # else its loss is already on the way
                    instance.outbox.put_nowait(command)
                if isinstance(command, Route) and is_evaluation(command.trajectory):
                    self._evaluation_driver.best.start_saving(command.version)
            case FetchPrompts():
                self._background.spawn(self._draw(command), "draw")
            case Score():
                self._scoring.put(command.trajectory)
            case StepEnvironment() | CloseEnvironment():
                self._environment_hosts.put(command)
            case Discard():
                self._commits.put(command)
            case FinishEvaluation():
                self._background.spawn(self._finish_evaluation(command), "evaluation")
            case Train():
                self._measurements.start_training()
                self._background.spawn(self._train(command), "train")

    # -- carrying out --------------------------------------------------------------------------------------------

    async def _draw(self, command: FetchPrompts) -> None:
        async with self._drawing:  # groups start in the order of their numbers
            drawn = await self._actors.ask("server", "draw", self._num_drawn, command.num_groups, command.draws)
            self._num_drawn += command.num_groups
            groups = [
                NewGroup(group=g.group, prompt_tokens=g.prompt_tokens, source=g.source, task=g.task) for g in drawn
            ]
            for first in range(0, len(groups), GROUPS_PER_EVENT):
                self._inbox.put_nowait(GroupsArrived(groups=tuple(groups[first : first + GROUPS_PER_EVENT])))
                await asyncio.sleep(0)  # the driver handles them one by one, with other calls between them

    async def _train(self, command: Train) -> None:
        await self._commits.wait_for_room()
        result = await self._actors.train(command.step, command.trajectories, command.versions)
        self._measurements.finish_training(result.metrics, self._actors.instances.values())
        self._inbox.put_nowait(result)

    def _after_training(self, result: PublishedStep) -> Event:
        """Queue the step's commit with the ledger as it is now, then announce the new version."""
        self._actors.publish(result)
        result.metrics["probe_drift"] = max((i.drift for i in self._actors.instances.values()), default=0.0)
        result.metrics["probe_limit"] = self._actors.verification.drift_limit
        if (mixture := self._coordinator.mixture) is not None:
            result.metrics.update(mixture.take_metrics())
        self._measurements.start_waiting()
        for alarm in self._training_alarms.observe(result.version - 1, result.metrics):
            self.outcomes.alarms.append(alarm)
            logger.error(alarm)
        inputs = {**self._inputs, "numerics": result.numerics}
        record = StepRecord(
            kind="step",
            step=result.version - 1,
            ledger=self._ledger_state(),
            metrics=result.metrics,
            weight_fingerprint=result.fingerprint,
            weight_checks=self._actors.verification.take_checks(),
            inputs=inputs if inputs != self._stored_inputs else {},
        )
        self._stored_inputs = inputs
        self._commits.put(record)
        every = self._config.training.checkpoint_every
        if every and result.version % every == 0 and result.version < self._config.steps:
            self._background.spawn(self._checkpoint(result.version), "checkpoint")
        ordered_versions = {PolicyVersion(view.version) for view in self._coordinator.snapshot().instances}
        self._background.spawn(self._actors.prune(ordered_versions), "prune")
        return VersionPublished(version=result.version)

    async def _checkpoint(self, version: PolicyVersion) -> None:
        if not await self._actors.checkpoint(f"step-{version:06d}", version):
            self._note(f"there is no checkpoint of version {version}: its weights went with a lost trainer")

    def _store_refusal(self) -> None:
        """Queue a commit with the refused check of an instance at once: the run may end before the next step's."""
        step = self._coordinator.ledger.next_step
        checks = self._actors.verification.take_checks()
        self._commits.put(StepRecord(kind="refusal", step=step, ledger=self._ledger_state(), weight_checks=checks))

    def _on_commit(self, record: StepRecord, metrics: dict[str, float]) -> None:
        """Report a committed step to the listener. metrics: of its batch, from the trajectory server."""
        if record.kind == "step":
            step_metrics = {"step": float(record.step), **record.metrics, **metrics}
            step = with_rate(step_metrics, next(reversed(self.outcomes.steps), None))
            self.outcomes.steps.append(step)
            self._log_resume_points()
            self._listener.status(self._coordinator.snapshot(), self.outcomes)
            self._listener.step_stored(step, self.outcomes.bottlenecks.get(record.step, ""))

    def _log_resume_points(self) -> None:
        """Log new resume points; the trainer writes them in its own process."""
        for version in ResumePoints(self._run_dir / "resume").versions():
            if version > self._last_point:
                self._last_point = version
                logger.info("resume point of version %d written", version)

    async def _finish_commits(self) -> None:
        """Wait until all commits are stored. Raises the error of one that failed."""
        done = asyncio.ensure_future(self._commits.finished())
        while not done.done():
            await asyncio.wait({done}, timeout=0.1)
            while not self._inbox.empty():
                item = self._inbox.get_nowait()
                if isinstance(item, BaseException):
                    done.cancel()
                    raise item

    async def _tick(self) -> None:
        """Send ticks to the coordinator, update the status, and measure staleness, every TICK_S."""
        while True:
            await asyncio.sleep(TICK_S)
            self._inbox.put_nowait(Tick())
            snapshot = self._coordinator.snapshot()
            self.outcomes.instances = self._membership.line
            self.outcomes.environments = self._environment_hosts.view
            self.outcomes.sources = self._sources()
            self._measurements.observe_snapshot(snapshot)
            self._listener.status(snapshot, self.outcomes)

    async def _finish_evaluation(self, command: FinishEvaluation) -> None:
        results = await self._evaluation_driver.conclude(command)
        self._listener.status(self._coordinator.snapshot(), self.outcomes)
        for result in results:
            self._listener.evaluated(result)
        for line in not_comparable(self.outcomes.evaluations):
            self._note(line)

    # -- summing up ----------------------------------------------------------------------------------------------

    def _ledger_state(self) -> LedgerState:
        ledger, mixture = self._coordinator.ledger, self._coordinator.mixture
        return LedgerState(
            num_started=ledger.num_started,
            num_ended={outcome_key(fate, reason): n for (fate, reason), n in ledger.num_ended.items()},
            live=(),
            next_step=ledger.next_step,
            version=ledger.version,
            sources=() if mixture is None else mixture.states,
            tasks_in_flight=() if mixture is None else mixture.tasks_in_flight,
        )

    def _sources(self) -> list[SourceCounts]:
        """The task sources, if the job has several."""
        mixture = self._coordinator.mixture
        return [] if mixture is None or not self._config.task.sources else list(mixture.counts())

    def _complete_report(self) -> None:
        """Complete the report with what is known only after the run has ended or failed."""
        # First: what follows may take a second, which is none of the run's.
        self.outcomes.phases = self._measurements.phases(self.outcomes.steps, self._actors.instances.values())
        self.outcomes.snapshot = self._coordinator.snapshot()
        self.outcomes.sources = self._sources()
        self.outcomes.diagnosis, self.outcomes.profile = self._measurements.diagnosis_and_profile(str(self._run_dir))

    def _begin_phase(self, phase: str) -> None:
        self._listener.phase(phase)
        self._listener.status(self._coordinator.snapshot(), self.outcomes)

    def _note(self, line: str) -> None:
        """Show a line needed to interpret the run's numbers, once, and keep it for the summary."""
        if line and line not in self.outcomes.notes:
            self.outcomes.notes.append(line)
            self._listener.line(line)
