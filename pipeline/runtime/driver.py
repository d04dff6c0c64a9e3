"""Runs a coordinator on actors: executes its commands as calls, and feeds the results back as events.

It decides nothing itself. pipeline/processes/worker_protocol.py hides where the actors run. The main loop handles
events; background tasks run the commit queue (commit_queue.py), scoring (scoring.py), teachers (teacher_queue.py),
environment steps (environment_hosts.py) and the links to instances (membership.py).

Invariants:
- Every event is journalled with the commands that followed from it, in the order in which they were executed.
- Commands to one rollout instance are sent in order (see InstanceLink), and so are discards and commits to the
  trajectory server. A step's batch is queued for commit before its version is reported to the coordinator. A step
  begins only when at most one step before it is not stored.
- A lost rollout instance, reward worker or teacher does not end the run: it is replaced, and its work is done again.
  The trainer and the trajectory server are restored (role_recovery.py), and calls to them are retried. A failed commit
  ends the run with one error.
- A stop lets the training step in flight finish; a second stop does not.
- `close` leaves no task behind and does not raise, even after an error.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from staleflow.pipeline.config import actor_settings, factories
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.coordination import commands, events
from staleflow.pipeline.coordination.coordinator import MAX_ROUTES_PER_EVENT, Coordinator
from staleflow.pipeline.coordination.mixture import SourceCounts
from staleflow.pipeline.coordination.resume_plan import plan_resume
from staleflow.pipeline.processes.background import BackgroundTasks
from staleflow.pipeline.recovery.resumption import Resumption
from staleflow.pipeline.recovery.run_journal import RunJournal
from staleflow.pipeline.recovery.source_fingerprints import Fingerprints, select_changes
from staleflow.pipeline.recovery.start_inputs import weight_inputs
from staleflow.pipeline.runtime.actors import Actors
from staleflow.pipeline.runtime.commit_queue import CommitQueue
from staleflow.pipeline.runtime.environment_hosts import EnvironmentHosts
from staleflow.pipeline.runtime.evaluation_driver import EvaluationDriver
from staleflow.pipeline.runtime.evaluation_results import (
    explain_not_comparable,
    remove_evaluations_after,
)
from staleflow.pipeline.runtime.measurements import Measurements
from staleflow.pipeline.runtime.membership import InstanceMembership
from staleflow.pipeline.runtime.progress_watch import ProgressWatch
from staleflow.pipeline.runtime.run_report import RunListener, RunReport
from staleflow.pipeline.runtime.scoring import ScoreQueue
from staleflow.pipeline.runtime.step_records import RecordBuilder
from staleflow.pipeline.runtime.teacher_queue import TeacherQueue
from staleflow.stores.metrics import step_with_tokens_per_s
from staleflow.stores.trajectories.records import CommitRecord
from staleflow.stores.trajectory import PolicyVersion, TrajectoryId, is_evaluation
from staleflow.stores.weights.resume_points import ResumePoints
from staleflow.tasks.actors.server_messages import RecoverableWork, RecoveredWork
from staleflow.tasks.actors.trainer import PublishedStep

logger = logging.getLogger(__name__)

TICK_S = 0.5
"""Seconds between two ticks of the coordinator."""
TICKS_PER_FULL_COLLECTION = 7200
"""Ticks between two garbage collections over all objects, an hour. One takes 0.2 s with 65,536 trajectories in flight;
all others are limited to the objects since the previous tick."""
START_REPORT_S = 2.0
"""Seconds between two reports on the progress of the start."""
LONG_EVENT_COMMANDS = 32
"""Number of commands above which other calls of the event loop run while an event is handled."""


class Driver:
    """Drives one run.

    Args:
        config: The job.
        actors: The run's actors, not yet placed.
        run_dir: The run's folder.
        listener: Receives activities, status, steps and evaluations, for display and reports.
        resumption: Where to resume; None for a new run.
        fingerprints: Current fingerprints of rewards, data and prompt templates.
        input_changes: Differences of `fingerprints` from those at the run's beginning, one line each.
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
        input_changes: Sequence[str] = (),
    ) -> None:
        self._config = config
        self._fingerprints = fingerprints
        self._input_changes = tuple(input_changes)
        self._actors = actors
        self._run_dir = run_dir
        self._listener = listener
        self._resumption = resumption
        self._measurements = Measurements(config, actors.clock, 0.0 if resumption is None else resumption.elapsed_s)
        self._coordinator: Coordinator = factories.make_coordinator(config)
        self._journal = RunJournal(run_dir / "events.jsonl")
        self._inbox: asyncio.Queue[events.Event | PublishedStep | BaseException] = asyncio.Queue()
        self._background = BackgroundTasks(self._inbox.put_nowait)
        self._commit_queue = CommitQueue(actors, config.deadlines, self._on_commit, self._begin_activity)
        actors.verification.on_refused = self._commit_refusal
        self._score_queue = ScoreQueue(config, actors, self._inbox.put_nowait)
        self._teacher_queue = TeacherQueue(config, actors)
        self._environment_hosts = EnvironmentHosts(config, actors, self._inbox.put_nowait)
        self._num_drawn = 0
        """Number of groups that the server has drawn; also the number of the next group."""
        self._draw_lock = asyncio.Lock()
        self._stop_reason = ""
        self.is_in_main_loop = False
        """Whether the run is between its start and its end, when steps are trained."""
        self._main_task: asyncio.Task[Any] | None = None
        self._membership = InstanceMembership(
            config,
            actors,
            self._background,
            self._inbox.put_nowait,
            self._coordinator.is_drained,
        )
        self._progress_watch = ProgressWatch(
            self._coordinator,
            actors,
            self._commit_queue,
            self._score_queue,
            self._teacher_queue,
            self._environment_hosts,
            config.deadlines,
        )
        self._last_resume_point = PolicyVersion(0) if resumption is None else resumption.version
        self.report = RunReport(
            lost_actors=actors.loss_messages,
            alarms=actors.verification.alarms,
            notes=actors.verification.unverified_notes,
        )  # shares these lists, which grow during the run
        self._record_builder = RecordBuilder(self._coordinator, actors, self.report.alarms)
        self._evaluation_driver = EvaluationDriver(
            config,
            actors,
            run_dir,
            self.report.evaluations,
            self._inbox.put_nowait,
            self._note,
            lambda name: {} if self._fingerprints is None else self._fingerprints.digests(name),
            lambda name: select_changes(self._input_changes, name),
        )

    # -- the run -------------------------------------------------------------------------------------------------

    async def run(self) -> RunReport:
        """Run the job: place the actors, train and evaluate, commit the end. Raises StaleflowError."""
        self._main_task = asyncio.current_task()
        if self._resumption is not None:
            self.report.steps += self._resumption.step_metrics
            self.report.evaluations += remove_evaluations_after(self._run_dir, self._resumption.version)
        for line in self._input_changes:
            self._note(line)
        self._begin_activity("starting actors")
        progress_reports = asyncio.ensure_future(self._report_start_progress())
        self._actors.recovery.start()
        try:
            await self._actors.place_all(self._resumption)
        finally:
            progress_reports.cancel()
        weight_fingerprints = self._actors.trained_fingerprints
        newest = weight_fingerprints[max(weight_fingerprints)]
        self._record_builder.weight_inputs = weight_inputs(self._run_dir, newest, self._fingerprints)
        self._background.spawn(self._actors.recovery.watch(), "watch")
        resumed = None if self._resumption is None else await self._restore_in_flight()
        self._note(await self._actors.ask("server", "held_out_notice"))
        self._measurements.start()
        await self._actors.ask("server", "set_clock", self._actors.clock.elapsed_s)
        if resumed is not None:
            await self._handle(resumed)
        self._background.spawn(self._commit_queue.run(), "commits")
        self._background.spawn(self._tick(), "clock")
        self._background.spawn(self._membership.place_optional_instances(), "optional instances")
        for coroutine in self._score_queue.coroutines():
            self._background.spawn(coroutine, "scoring")
        for coroutine in self._teacher_queue.coroutines():
            self._background.spawn(coroutine, "teachers")
        for coroutine in self._environment_hosts.coroutines():
            self._background.spawn(coroutine, "environments")
        self._membership.start_links()
        await self._evaluation_driver.begin(self._coordinator.ledger.version)
        self.is_in_main_loop = True
        try:
            await self._main_loop()
            self.is_in_main_loop = False
            await self._finish_commits()
        finally:
            self._complete_report()
        self._membership.stop_links()
        self._note(await self._actors.ask("server", "held_out_notice"))
        await self._checkpoint(self._coordinator.ledger.version)
        self._log_resume_points()
        return self.report

    async def _report_start_progress(self) -> None:
        """Report the progress of the start whenever it has changed."""
        reported_progress = ""
        while True:
            await asyncio.sleep(START_REPORT_S)
            if (progress := self._actors.start_progress) != reported_progress:
                reported_progress = progress
                self._begin_activity(f"starting actors: {progress}")

    def latest_decisions(self, count: int) -> list[tuple[float, int, str, str]]:
        """The coordinator's latest decisions, newest first: (seconds, trajectory, decision, cause)."""
        return self._coordinator.latest_decisions(count)

    def sampled_tokens_by_instance(self) -> dict[str, int]:
        """Tokens that each instance has sampled since it was started, by its name."""
        return {str(name): instance.tokens_sampled for name, instance in self._actors.instances.items()}

    def kept_tokens_by_instance(self) -> dict[str, int]:
        """KV tokens that each instance has cached between turns, by its name."""
        return {str(name): instance.kept_tokens for name, instance in self._actors.instances.items()}

    async def _restore_in_flight(self) -> events.RunResumed:
        """Plan which in-flight work of the stored run continues within the bound, and resume it on the server. Returns
        the event that reports it."""
        recoverable: RecoverableWork = await self._actors.ask("server", "recoverable", deadline="start_s")
        filtering = factories.make_strategies(self._config).filtering
        ledger = factories.make_coordinator(self._config).ledger
        unrepeatable = actor_settings.unrepeatable_sources(self._config)
        resumed, restarted = plan_resume(ledger, filtering, recoverable.ledger, recoverable.groups, unrepeatable)
        work: RecoveredWork = await self._actors.ask("server", "resume", restarted, deadline="commit_s")
        self._num_drawn = work.ledger.num_started // self._config.members_started_per_group
        if work.num_responses or work.num_restarted:
            self._note(
                f"resumed {work.num_responses:,} in-flight responses ({work.num_tokens:,} tokens); "
                f"{work.num_restarted:,} restart from their prompts"
            )
        return replace(resumed, num_ended=tuple(work.ledger.num_ended.items()))

    def stop(self, reason: str) -> None:
        """Request that the run ends after the training step in flight; at once on a second request, or outside of
        training. Safe in a signal handler."""
        if self._main_task is not None and (self._stop_reason or not self.is_in_main_loop):
            self._main_task.cancel()
        self.report.stop_reason = self._stop_reason = self._stop_reason or reason
        logger.info("stopping: %s", reason)

    def fail(self, error: BaseException) -> None:
        """End the run with an error of a task beside it, once it trains."""
        self._inbox.put_nowait(error)

    def retire(self, worker: str) -> str:
        """Retire the rollout instance on a Dask worker; see InstanceMembership.retire."""
        return self._membership.retire(worker)

    def release_worker(self, worker: str) -> None:
        """Release a Dask worker that another job waits for, if it runs only a reward worker or environment host.
        Idempotent. worker: its address."""
        name = self._actors.reward_actor_at(worker)
        if name and self.is_in_main_loop:
            move = self._environment_hosts.move(name) if self._config.has_environment else self._score_queue.move(name)
            self._background.spawn(move, "give back")

    async def close(self) -> None:
        """Stop all tasks and close all actors. Never raises."""
        while tasks := [t for t in self._tasks() if not t.done()]:  # a task that ends may have started another
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        gc.unfreeze()
        await self._evaluation_driver.best.close()
        await self._actors.close()
        # Another start in this process would rename parts that are still being compressed.
        await asyncio.to_thread(self._journal.close, wait=True)

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [*self._background, *self._membership.tasks()]

    async def _main_loop(self) -> None:
        """Handle events and execute commands until all steps are trained or a stop is requested."""
        self._progress_watch.start()
        while not self._coordinator.is_finished or self._evaluation_driver.is_pending:
            item = await self._next_item()
            if isinstance(item, BaseException):
                raise item
            if isinstance(item, PublishedStep):
                item = self._record_step(item)
                if self._stop_reason:  # before the version is reported: the next step could begin with it
                    await self._abort_in_flight()
            self._progress_watch.observe(item)
            await self._handle(item)
            if isinstance(item, events.VersionPublished):
                self._evaluation_driver.request_if_due(item.version)
            if self._stop_reason and not self._coordinator.is_training:
                break
            self._progress_watch.check()
        await self._abort_in_flight()
        self._commit_queue.put(self._record_builder.make_record("end"))

    async def _next_item(self) -> events.Event | PublishedStep | BaseException:
        """Wait for the next event, published step or error. Ticks arrive even if nothing else does."""
        await asyncio.sleep(0)  # let calls that wait for the event loop run first
        if not self._inbox.empty():
            return self._inbox.get_nowait()
        if self._coordinator.has_more_decisions:
            return events.DecisionsContinued()
        item = await self._inbox.get()
        self._measurements.count_assigned_time(self._coordinator.num_running_by_instance(), self._actors.instances)
        return item

    async def _abort_in_flight(self) -> None:
        """Abort the work in flight; redundancy may leave some even after the last step. If the run is stopped, all
        sampled tokens are first delivered to the trajectory server, so that a resumed run continues with them."""
        if self._stop_reason and any(self._coordinator.num_running_by_instance().values()):
            await self._membership.flush_all()
        await self._handle(events.StopRequested(why=self.report.stop_reason or "all steps are trained"))

    async def _handle(self, event: events.Event) -> None:
        self._teacher_queue.put(_newly_scored(event))
        elapsed_s = self._actors.clock.elapsed_s
        scaled_s = elapsed_s * self._config.rollout.engine.time_scale
        with self._measurements.decision_timer():
            new_commands = self._coordinator.handle(event, scaled_s)
        self._journal.append(scaled_s, event, new_commands)  # in the same call: a step is stored after its events
        # Others run between the parts of an event that has many commands, or whose batch is taken.
        is_long = len(new_commands) > LONG_EVENT_COMMANDS or any(isinstance(c, commands.Train) for c in new_commands)
        if is_long:
            await asyncio.sleep(0)
        self._measurements.observe(elapsed_s, event, new_commands)
        if isinstance(event, events.VersionPublished) and (bottleneck := self._measurements.bottleneck) is not None:
            self.report.bottlenecks[event.version - 1] = bottleneck.short_line
        if (mixture := self._coordinator.mixture) is not None:
            for line in mixture.take_notices():
                self._note(line)
        if is_long:
            await asyncio.sleep(0)
        for command in new_commands:
            kind = type(command).__name__
            self.report.command_counts[kind] = self.report.command_counts.get(kind, 0) + 1
        for command in new_commands:
            self._execute(command)

    def _execute(self, command: commands.Command) -> None:
        match command:
            case _ if isinstance(command, commands.InstanceCommand):
                instance = self._actors.instances.get(command.instance)
                if instance is not None:  # else its InstanceLost event is queued
                    instance.outbox.put_nowait(command)
                if isinstance(command, commands.Route) and is_evaluation(command.trajectory):
                    self._evaluation_driver.best.start_saving(command.version)
            case commands.FetchPrompts():
                self._background.spawn(self._draw_groups(command), "draw")
            case commands.Score():
                self._score_queue.put(command.trajectory, self._coordinator.num_tokens(command.trajectory))
            case commands.StepEnvironment() | commands.CloseEnvironment():
                self._environment_hosts.put(command)
            case commands.Discard():
                self._commit_queue.put(command)
            case commands.FinishEvaluation():
                self._background.spawn(self._finish_evaluation(command), "evaluation")
            case commands.Train():
                self._measurements.start_training()
                self._background.spawn(self._train(command), "train")

    # -- executing commands --------------------------------------------------------------------------------------

    async def _draw_groups(self, command: commands.FetchPrompts) -> None:
        async with self._draw_lock:  # groups start in the order of their numbers
            groups = await self._actors.ask(
                "server", "draw", self._num_drawn, command.num_groups, command.draws,
                deadline="train_s",  # environments are reset for their prompts
            )  # fmt: skip
            self._num_drawn += command.num_groups
            # As many as one event routes: a queue that holds a whole fleet's work holds up the event loop as it grows.
            num_groups = max(1, MAX_ROUTES_PER_EVENT // self._config.members_started_per_group)
            for first in range(0, len(groups), num_groups):
                self._inbox.put_nowait(events.GroupsArrived(groups=tuple(groups[first : first + num_groups])))
                await asyncio.sleep(0)  # so that other calls run between these events

    async def _train(self, command: commands.Train) -> None:
        await self._commit_queue.wait_for_room()
        waited_s = await self._teacher_queue.wait_for(command.trajectories)
        published = await self._actors.train(command.step, command.trajectories, command.versions)
        published.metrics.update({"teacher_wait_s": waited_s} if self._config.teachers else {})
        self._measurements.finish_training(
            published.metrics, self._actors.all_instances, sum(self.kept_tokens_by_instance().values())
        )
        self._inbox.put_nowait(published)

    def _record_step(self, published: PublishedStep) -> events.Event:
        """Queue the step's commit with the ledger as it is now, then announce the new version."""
        self._actors.record_published(published)
        self._measurements.start_waiting()
        self._commit_queue.put(self._record_builder.make_step_record(published))
        checkpoint_every = self._config.training.checkpoint_every
        if checkpoint_every and published.version % checkpoint_every == 0 and published.version < self._config.steps:
            self._background.spawn(self._checkpoint(published.version), "checkpoint")
        self._background.spawn(self._actors.prune(self._coordinator.served_versions()), "prune")
        return events.VersionPublished(version=published.version)

    async def _checkpoint(self, version: PolicyVersion) -> None:
        if not await self._actors.checkpoint(f"step-{version:06d}", version):
            self._note(f"there is no checkpoint of version {version}: its weights were lost with the trainer")

    def _commit_refusal(self) -> None:
        """Queue a commit of an instance's refused weights, since the run may end before the next step. A refusal at the
        run's start is not stored: it ends the run."""
        self._commit_queue.put(self._record_builder.make_record("refusal"))

    def _on_commit(self, record: CommitRecord, metrics: dict[str, float]) -> None:
        """Report a committed step to the listener. metrics: metrics of its batch from the trajectory server."""
        if record.kind == "step":
            step_metrics = {"step": float(record.step), **record.metrics, **metrics}
            step = step_with_tokens_per_s(step_metrics, next(reversed(self.report.steps), None))
            self.report.steps.append(step)
            self._log_resume_points()
            self._measure_activities()
            self._listener.on_status(self._coordinator.snapshot(), self.report)
            self._listener.on_step_stored(step, self.report.bottlenecks.get(record.step, ""))

    def _log_resume_points(self) -> None:
        """Log new resume points; the trainer writes them in its own process."""
        for version in ResumePoints(self._run_dir / "resume").versions():
            if version > self._last_resume_point:
                self._last_resume_point = version
                logger.info("resume point of version %d written", version)

    async def _finish_commits(self) -> None:
        """Wait until all commits are stored. Raises the error of one that failed."""
        all_stored = asyncio.ensure_future(self._commit_queue.wait_until_stored())
        try:
            while not all_stored.done():
                await asyncio.wait({all_stored}, timeout=0.1)
                while not self._inbox.empty():
                    item = self._inbox.get_nowait()
                    if isinstance(item, BaseException):
                        raise item
        finally:
            all_stored.cancel()

    async def _tick(self) -> None:
        """Send ticks to the coordinator, update the status, and measure staleness, every TICK_S."""
        gc.freeze()
        for num_ticks in itertools.count(1):
            await asyncio.sleep(TICK_S)
            if num_ticks % TICKS_PER_FULL_COLLECTION == 0:
                gc.unfreeze()
                gc.collect()
            gc.collect(1)
            gc.freeze()
            self._inbox.put_nowait(events.Tick())
            snapshot = self._coordinator.snapshot()
            self.report.instances_line = self._membership.summary_line
            self.report.environment_hosts = self._environment_hosts.views
            self.report.sources = self._sources()
            self._measurements.observe_snapshot(snapshot)
            self._listener.on_status(snapshot, self.report)

    async def _finish_evaluation(self, command: commands.FinishEvaluation) -> None:
        results = await self._evaluation_driver.finish(command)
        self._listener.on_status(self._coordinator.snapshot(), self.report)
        for result in results:
            self._listener.on_evaluation(result)
        for line in explain_not_comparable(self.report.evaluations):
            self._note(line)

    # -- reporting -----------------------------------------------------------------------------------------------

    def _sources(self) -> list[SourceCounts]:
        """The task sources, if the job has several."""
        mixture = self._coordinator.mixture
        return [] if mixture is None or not self._config.task.sources else list(mixture.counts())

    def _complete_report(self) -> None:
        """Complete the report with what is known only after the run has ended or failed."""
        # First, since the rest may take a second that does not belong to the run.
        self._measure_activities()
        self.report.snapshot = self._coordinator.snapshot()
        self.report.sources = self._sources()
        self.report.diagnosis, self.report.cost_model_fit = self._measurements.diagnosis_and_fit()

    def _measure_activities(self) -> None:
        self.report.seconds_by_activity = self._measurements.seconds_by_activity(
            self.report.steps, self._actors.all_instances
        )

    def _begin_activity(self, activity: str) -> None:
        self._listener.on_activity(activity)
        self._listener.on_status(self._coordinator.snapshot(), self.report)

    def _note(self, line: str) -> None:
        """Show a line that is needed to interpret the run's numbers, once, and add it to the report."""
        if line and line not in self.report.notes:
            self.report.notes.append(line)
            self._listener.on_line(line)


def _newly_scored(event: events.Event) -> list[TrajectoryId]:
    """The trajectories of which an event reports for the first time in this start of the run that they are scored."""
    match event:
        case events.TrajectoryScored(trajectory=trajectory):
            return [trajectory]
        case events.RunResumed(groups=groups):
            return [member.trajectory for group in groups for member in group.members if member.scored]
        case _:
            return []
