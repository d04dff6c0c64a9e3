"""Issues the coordinator's commands. Each method records a decision in the state and the log, and appends its commands.
Pure.

Commands count as executed when they are issued, so the state changes in the same call.
"""

from __future__ import annotations

from staleflow.pipeline.coordination import commands
from staleflow.pipeline.coordination.decision_log import DecisionLog
from staleflow.pipeline.coordination.fleet import Instance
from staleflow.pipeline.coordination.forecast import LengthForecast
from staleflow.pipeline.coordination.moves import Move
from staleflow.pipeline.coordination.state import CoordinatorState
from staleflow.pipeline.coordination.trajectories import DiscardedTrajectory, LiveTrajectory
from staleflow.stores.trajectory import InstanceId, TrajectoryId


class CommandIssuer:
    """Collects the commands that follow from one event, and applies them to the coordinator's state."""

    def __init__(self, state: CoordinatorState, forecast: LengthForecast, decision_log: DecisionLog) -> None:
        self._state = state
        self._forecast = forecast
        self._decision_log = decision_log
        self._commands: list[commands.Command] = []
        self._pending_train: commands.Train | None = None
        """The step whose batch is consumed, until all instances sleep."""

    def pop_commands(self) -> list[commands.Command]:
        """Return the commands issued since the previous call."""
        new_commands, self._commands = self._commands, []
        return new_commands

    @property
    def pending_step(self) -> int | None:
        """The training step that waits until all instances sleep; None if there is none."""
        return None if self._pending_train is None else self._pending_train.step

    # -- training ------------------------------------------------------------------------------------------------

    def fetch_prompts(self, num_groups: int) -> None:
        """Request the prompts of new groups."""
        draws = self._state.request_groups(num_groups)
        self._commands.append(commands.FetchPrompts(num_groups=num_groups, draws=draws))

    def consume_batch(self) -> None:
        """Consume the batch of the next step and train on it; if GPUs are shared, once all instances sleep."""
        batch, surplus = self._state.consume()
        self._decision_log.note_all(batch.members, f"consumed by step {batch.step}")
        self._pending_train = commands.Train(step=batch.step, trajectories=batch.members, versions=batch.versions)
        if self._state.shares_gpus:
            self._put_to_sleep(batch.step)
        self.start_pending_step()
        self.discard(surplus)

    def start_pending_step(self) -> None:
        """Start the step whose batch is consumed, once no instance is awake."""
        if self._pending_train is not None and not self._state.pending_sleeps:
            self._commands.append(self._pending_train)
            self._pending_train = None

    def _put_to_sleep(self, step: int) -> None:
        """Put all instances to sleep, interrupting what they run."""
        for instance in self._state.fleet:
            if not instance.is_asleep:
                for trajectory in self._state.start_sleep(instance):
                    self.interrupt(trajectory, instance.id, f"{instance.id} sleeps during step {step}")
                self._commands.append(commands.Sleep(instance=instance.id, step=step))

    # -- instances -----------------------------------------------------------------------------------------------

    def pull(self, instance: Instance) -> None:
        """Have an instance load the published version."""
        self._state.start_pull(instance)
        self._commands.append(commands.Pull(instance=instance.id, version=instance.version))

    # -- trajectories --------------------------------------------------------------------------------------------

    def route(self, trajectory: LiveTrajectory, instance: Instance) -> None:
        """Route a queued trajectory to an instance."""
        # The instance takes over the cached context. A context cached elsewhere stays until it is evicted, in case a
        # later turn returns: releasing it made simulated batches of 21 turns 0.2 % slower.
        self._state.pop_cached_instance(trajectory)
        self._state.route(trajectory, instance)
        self._decision_log.note(trajectory.id, f"routed to {instance.id} at version {instance.version}")
        self._commands.append(
            commands.Route(
                trajectory=trajectory.id,
                route_number=trajectory.route_number,
                instance=instance.id,
                version=trajectory.v_traj,
            )
        )

    def score(self, trajectory: LiveTrajectory, note: str) -> None:
        """Request the reward of a trajectory. note: line for the decision log."""
        self._decision_log.note(trajectory.id, note)
        self._commands.append(commands.Score(trajectory=trajectory.id))

    def step_environment(self, trajectory: LiveTrajectory, note: str, *, truncated: bool = False) -> None:
        """Send the latest turn of a trajectory to its environment. truncated: whether the turn was truncated."""
        self._decision_log.note(trajectory.id, note)
        self._state.count_turn(trajectory)
        self._commands.append(
            commands.StepEnvironment(
                trajectory=trajectory.id, route_number=trajectory.route_number, truncated=truncated
            )
        )

    def move(self, move: Move) -> None:
        """Interrupt a trajectory, to continue on another instance or to be scored with the tokens it has."""
        self._state.start_move(move.trajectory, move.target)
        self.interrupt(move.trajectory, move.source.id, move.note)

    def interrupt(self, trajectory: LiveTrajectory, instance_id: InstanceId, note: str) -> None:
        """Interrupt a running trajectory. note: line for the decision log."""
        self._decision_log.note(trajectory.id, note)
        self._commands.append(commands.Interrupt(trajectory=trajectory.id, instance=instance_id))

    def discard(self, trajectories: tuple[DiscardedTrajectory, ...]) -> None:
        """Stop trajectories that have left the state, and record in the store how they ended."""
        self.stop(trajectories)
        if trajectories:
            endings, versions = tuple(t.ending for t in trajectories), tuple(t.v_traj for t in trajectories)
            self._commands.append(commands.Discard(endings=endings, versions=versions))

    def stop(self, trajectories: tuple[DiscardedTrajectory, ...]) -> None:
        """Stop the sampling and the environments of trajectories that have left the state, and release their caches."""
        for trajectory in trajectories:
            ending = trajectory.ending
            if trajectory.running_instance is not None:
                self._commands.append(
                    commands.Abort(trajectory=ending.trajectory, instance=trajectory.running_instance)
                )
            self.release_cache(ending.trajectory, trajectory.cached_instance)
            if trajectory.has_open_environment:
                self.close_environment(ending.trajectory)
            if not self._state.ledger.is_live(ending.group):
                self._forecast.remove_group(ending.group)
            self._decision_log.note(ending.trajectory, f"{ending.fate.value}: {ending.reason.value}")

    def close_environment(self, trajectory: TrajectoryId) -> None:
        """Close the environment of a trajectory that has ended."""
        self._commands.append(commands.CloseEnvironment(trajectory=trajectory))

    def release_cache(self, trajectory: TrajectoryId, instance_id: InstanceId | None) -> None:
        """Drop the cached context of a trajectory on an instance; None: it has none."""
        if instance_id is not None:
            self._commands.append(commands.ReleaseCache(trajectory=trajectory, instance=instance_id))

    # -- evaluations ---------------------------------------------------------------------------------------------

    def finish_evaluation(self, *, abandoned: bool = False) -> None:
        """End the running evaluation, and have its results summarized unless it is abandoned."""
        evaluation, trajectories = self._state.close_evaluation()
        self.stop(trajectories)
        self._commands.append(
            commands.FinishEvaluation(
                evaluation=evaluation.number,
                version=evaluation.evaluated_version,
                failed=tuple(evaluation.failed_trajectories),
                abandoned=abandoned,
            )
        )
