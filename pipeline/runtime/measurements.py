"""Measures a run's time: waiting for a batch, training, publishing, deciding, sampling, idling with work assigned.

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
from staleflow.pipeline.processes.clock import now_s
from staleflow.pipeline.processes.instance_handle import COUNTS, InstanceHandle
from staleflow.pipeline.profiling.diagnosis import Diagnosis, diagnose, sizes_of, sum_recent_steps
from staleflow.pipeline.profiling.run_profile import Profile, measured_latencies
from staleflow.pipeline.profiling.step_times import steady
from staleflow.pipeline.profiling.time_breakdown import TimeTracker
from staleflow.stores.trajectory import InstanceId


class Measurements:
    """Measurements of one run. Create it inside the run's event loop. earlier_s: seconds of the run before it was
    resumed."""

    def __init__(self, config: RunConfig, earlier_s: float) -> None:
        self._earlier_s = earlier_s
        self._config = config
        self._scale = config.rollout.engine.time_scale
        self._sizes = sizes_of(config)
        self._tracker = TimeTracker(
            self._sizes.cost, config.oversampled_group_size, on_pull=config.rollout.on_pull,
            first_length=config.rollout.engine.speculation.first_length,
        )  # fmt: skip
        self._begin_s = 0.0
        self._training_since = self._idle_since = 0.0
        self._passed_s = 0.0
        self._staleness: list[tuple[float, float]] = []
        self._decide_s = 0.0
        self._begin_cpu_s = 0.0
        self._counts: dict[InstanceId, dict[str, int]] = {}
        """Counts of each instance's engine at the end of the last step, by the names COUNTS."""
        self.start()

    def start(self) -> None:
        """Start the run's clock. Starting actors, and evaluating before the run, do not count."""
        self._idle_since = now_s()
        self._begin_s = self._idle_since - self._earlier_s
        self._passed_s = self._earlier_s
        self._begin_cpu_s = time.process_time()
        self._tracker.start(self._earlier_s * self._scale)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began, including those before it was resumed."""
        return now_s() - self._begin_s

    # -- what happens --------------------------------------------------------------------------------------------

    def count_assigned_time(
        self, loads: Mapping[InstanceId, int], instances: Mapping[InstanceId, InstanceHandle]
    ) -> None:
        """Count the time since the last call as assigned for each instance that had work. loads: number of trajectories
        on each instance in that time."""
        now = self.elapsed_s
        for name, num_running in loads.items():
            if num_running and name in instances:
                instances[name].assigned_s += now - self._passed_s
        self._passed_s = now

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Record an event and the commands that followed. now: seconds of the run."""
        self._tracker.observe(now * self._scale, event, commands)

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
        self._training_since = now_s()

    def finish_training(self, metrics: dict[str, float], instances: Collection[InstanceHandle]) -> None:
        """Add the driver's measurements to the metrics of a finished training step."""
        now = now_s()
        metrics.update(
            **self._mean_staleness(),
            **self._engine_counts(instances),
            wait_s=self._training_since - self._idle_since,
            overhead_s=now - self._training_since - metrics["train_s"] - metrics["publish_s"],
            elapsed_s=now - self._begin_s,
        )

    def start_waiting(self) -> None:
        """Record that the trainer starts waiting for its next batch."""
        self._idle_since = now_s()

    def observe_snapshot(self, snapshot: Snapshot) -> None:
        """Record the current staleness of the work in flight."""
        self._staleness.append((snapshot.staleness_in_flight, snapshot.staleness_in_queue))

    # -- summing up ----------------------------------------------------------------------------------------------

    def phases(self, steps: Sequence[Mapping[str, float]], instances: Collection[InstanceHandle]) -> dict[str, float]:
        """Seconds by activity; for instances the mean. steps: metrics of all training steps."""
        count = max(1, len(instances))
        return {
            "wall_s": self.elapsed_s,
            "train_s": sum(s["train_s"] for s in steps),
            "publish_s": sum(s["publish_s"] for s in steps),
            "trainer_overhead_s": sum(s["overhead_s"] for s in steps),
            "trainer_waits_for_resume_point_s": sum(s.get("resume_wait_s", 0.0) for s in steps),
            "trainer_waits_for_batch_s": sum(s["wait_s"] for s in steps),
            "commit_s": sum(s["commit_s"] for s in steps),
            "fetch_s": sum(s["fetch_s"] for s in steps),
            "decide_s": self._decide_s,
            "driver_cpu_s": time.process_time() - self._begin_cpu_s,
            "rollout_busy_s": sum(i.busy_s for i in instances) / count,
            "rollout_assigned_s": sum(i.assigned_s for i in instances) / count,
            "rollout_idle_with_work_s": sum(max(0.0, i.assigned_s - i.busy_s) for i in instances) / count,
            "tokens_sampled": float(sum(i.tokens_sampled for i in instances)),
        }

    @property
    def bottleneck(self) -> Diagnosis | None:
        """The bottleneck of the latest steps; None before the first has ended."""
        return diagnose(sum_recent_steps(self._tracker.finished_steps, self._sizes.eta), self._sizes)

    def diagnosis_and_profile(self, source: str) -> tuple[Diagnosis | None, Profile | None]:
        """The bottleneck of the steady part of the run; and its cost model and latencies for simulations, None if too
        little was sampled."""
        fit, drafts = self._tracker.fit(), self._tracker.drafts
        diagnosis = diagnose(steady(self._tracker.finished_steps, self._sizes.eta), sizes_of(self._config, fit, drafts))
        if fit is None:
            return diagnosis, None
        latencies = measured_latencies(self._tracker, fit)
        return diagnosis, Profile(source=source, fit=fit, latencies=latencies, drafts=drafts)

    def _engine_counts(self, instances: Collection[InstanceHandle]) -> dict[str, float]:
        """Engine counts since the end of the last step, summed over instances, and the number of cached tokens."""
        before, self._counts = self._counts, {i.id: i.counts for i in instances}
        since = {
            name: float(sum(now[name] - before.get(i, {}).get(name, 0) for i, now in self._counts.items()))
            for name in COUNTS
        }
        return since | {"kept_tokens": float(sum(i.kept_tokens for i in instances))}

    def _mean_staleness(self) -> dict[str, float]:
        """Mean staleness in flight and in queue over the ticks since the end of the last step."""
        ages, self._staleness = self._staleness or [(0.0, 0.0)], []
        return {
            "staleness_in_flight": sum(a for a, _ in ages) / len(ages),
            "staleness_in_queue": sum(b for _, b in ages) / len(ages),
        }
