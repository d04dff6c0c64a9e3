"""Measures how a run spends its time: waiting for a batch, training, publishing, deciding, sampling, idling despite
assigned work.

The driver calls these methods as things happen. They call no actor and decide nothing.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.coordination.commands import Command
from staleflow.pipeline.coordination.events import Event
from staleflow.pipeline.coordination.snapshot import Snapshot
from staleflow.pipeline.processes.clock import RunClock, now_s
from staleflow.pipeline.processes.instance_handle import TOKEN_COUNTS, InstanceHandle
from staleflow.pipeline.profiling.diagnosis import Diagnosis, diagnose, make_job_speed, sum_recent_steps
from staleflow.pipeline.profiling.fit import CostModelFit
from staleflow.pipeline.profiling.step_times import sum_steady_steps
from staleflow.pipeline.profiling.time_breakdown import TimeTracker
from staleflow.stores.trajectory import InstanceId


class Measurements:
    """Measurements of one run. Create it inside the run's event loop. earlier_s: seconds of the run before it was
    resumed."""

    def __init__(self, config: RunConfig, clock: RunClock, earlier_s: float) -> None:
        self._clock = clock
        self._earlier_s = earlier_s
        self._config = config
        self._time_scale = config.rollout.engine.time_scale
        self._speed = make_job_speed(config)
        self._tracker = TimeTracker(
            self._speed.cost_model, config.members_started_per_group, on_pull=config.rollout.on_pull,
            max_draft_length=config.rollout.engine.speculation.num_speculative_tokens,
        )  # fmt: skip
        self._training_started_s = self._idle_started_s = 0.0
        self._counted_until_s = 0.0
        self._staleness_samples: list[tuple[float, float]] = []
        self._decide_s = 0.0
        self._started_cpu_s = 0.0
        self._token_counts: dict[InstanceId, dict[str, int]] = {}
        """Counts of each instance's engine at the end of the last step, by the names TOKEN_COUNTS."""
        self.start()

    def start(self) -> None:
        """Start the run's clock. Starting actors does not count."""
        self._idle_started_s = now_s()
        self._clock.start(self._earlier_s)
        self._counted_until_s = self._earlier_s
        self._started_cpu_s = time.process_time()
        self._tracker.start(self._earlier_s * self._time_scale)

    # -- recording -----------------------------------------------------------------------------------------------

    def count_assigned_time(
        self, num_running: Mapping[InstanceId, int], instances: Mapping[InstanceId, InstanceHandle]
    ) -> None:
        """Count the time since the last call as assigned for each instance that had work. num_running: number of
        trajectories on each instance in that time."""
        now = self._clock.elapsed_s
        for name, count in num_running.items():
            if count and name in instances:
                instances[name].assigned_s += now - self._counted_until_s
        self._counted_until_s = now

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Record an event and the commands that followed. now: seconds of the run."""
        self._tracker.observe(now * self._time_scale, event, commands)

    @contextmanager
    def decision_timer(self) -> Iterator[None]:
        """Context manager: counts the block as time spent on decisions, in real seconds even if the loop's clock is
        virtual."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self._decide_s += time.perf_counter() - started_s

    def start_training(self) -> None:
        """Record that a training step was started."""
        self._training_started_s = now_s()

    def finish_training(
        self, metrics: dict[str, float], instances: Collection[InstanceHandle], kept_tokens: int
    ) -> None:
        """Add the driver's measurements to the metrics of a finished training step.

        Args:
            metrics: Metrics of the step, which are extended.
            instances: All instances of the run, with those that were lost or retired.
            kept_tokens: KV tokens that engines have cached for later turns.
        """
        now = now_s()
        metrics.update(
            **self._take_mean_staleness(),
            **self._take_engine_counts(instances),
            kept_tokens=float(kept_tokens),
            wait_s=self._training_started_s - self._idle_started_s,
            overhead_s=now - self._training_started_s - metrics["train_s"] - metrics["publish_s"],
            elapsed_s=self._clock.elapsed_s,
        )

    def start_waiting(self) -> None:
        """Record that the trainer starts waiting for its next batch."""
        self._idle_started_s = now_s()

    def observe_snapshot(self, snapshot: Snapshot) -> None:
        """Record the current staleness of the work in flight and in the queue."""
        self._staleness_samples.append((snapshot.staleness_in_flight, snapshot.staleness_in_queue))

    # -- summarizing ---------------------------------------------------------------------------------------------

    def seconds_by_activity(
        self, steps: Sequence[Mapping[str, float]], instances: Collection[InstanceHandle]
    ) -> dict[str, float]:
        """Seconds by activity, and `tokens_sampled`. Seconds of instances are averaged, where an instance and its
        replacements count as one. `wall_s` and seconds of steps are of the whole run, all others of its latest start.

        Args:
            steps: Metrics of all training steps.
            instances: All instances of the run, with those that were lost or retired.
        """
        count = max(1, len({instance.index for instance in instances}))
        return {
            "wall_s": self._clock.elapsed_s,
            "train_s": sum(step["train_s"] for step in steps),
            "publish_s": sum(step["publish_s"] for step in steps),
            "trainer_overhead_s": sum(step["overhead_s"] for step in steps),
            "trainer_waits_for_resume_point_s": sum(step.get("resume_wait_s", 0.0) for step in steps),
            "trainer_waits_for_batch_s": sum(step["wait_s"] for step in steps),
            "commit_s": sum(step["commit_s"] for step in steps),
            "fetch_s": sum(step["fetch_s"] for step in steps),
            "decide_s": self._decide_s,
            "driver_cpu_s": time.process_time() - self._started_cpu_s,
            "rollout_busy_s": sum(i.busy_s for i in instances) / count,
            "rollout_assigned_s": sum(i.assigned_s for i in instances) / count,
            "rollout_idle_with_work_s": sum(max(0.0, i.assigned_s - i.busy_s) for i in instances) / count,
            "tokens_sampled": float(sum(i.tokens_sampled for i in instances)),
        }

    @property
    def bottleneck(self) -> Diagnosis | None:
        """The bottleneck of the latest steps; None before the first has ended."""
        return diagnose(sum_recent_steps(self._tracker.finished_steps, self._speed.eta), self._speed)

    def diagnosis_and_fit(self) -> tuple[Diagnosis | None, CostModelFit | None]:
        """The bottleneck of the steady part of the run; and its cost model, None if too little was sampled."""
        fit = self._tracker.fit()
        speed = make_job_speed(self._config, fit, self._tracker.draft_stats)
        return diagnose(sum_steady_steps(self._tracker.finished_steps, self._speed.eta), speed), fit

    def _take_engine_counts(self, instances: Collection[InstanceHandle]) -> dict[str, float]:
        """Engine counts since the previous call, summed over instances."""
        previous_counts, self._token_counts = self._token_counts, {i.id: i.token_counts for i in instances}
        return {
            name: float(
                sum(counts[name] - previous_counts.get(i, {}).get(name, 0) for i, counts in self._token_counts.items())
            )
            for name in TOKEN_COUNTS
        }

    def _take_mean_staleness(self) -> dict[str, float]:
        """Mean staleness in flight and in queue over the ticks since the previous call."""
        samples, self._staleness_samples = self._staleness_samples or [(0.0, 0.0)], []
        return {
            "staleness_in_flight": sum(in_flight for in_flight, _ in samples) / len(samples),
            "staleness_in_queue": sum(in_queue for _, in_queue in samples) / len(samples),
        }
