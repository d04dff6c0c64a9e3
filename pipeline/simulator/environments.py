"""Environments in virtual time: when they answer, and what. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.coordination.commands import Act
from pipeline.coordination.events import EnvironmentAnswered, EnvironmentFailed, TrajectoryScored
from stores.trajectory import TrajectoryId
from tasks.episodes.emulated import EmulatedEpisodes

Answered = EnvironmentAnswered | EnvironmentFailed | TrajectoryScored


@dataclass(slots=True)
class _Episode:
    """An open episode. turns: that its environment was asked to answer. waits: for the answer to the latest one."""

    turns: int = 0
    waits: bool = False


class SimulatedEnvironments:
    """The environments of a simulated run. after: schedules a call so many seconds later. tell: takes an answer."""

    def __init__(
        self,
        episodes: EmulatedEpisodes,
        *,
        reward_s: float,
        after: Callable[[float, Callable[[], None]], None],
        tell: Callable[[Answered], None],
    ) -> None:
        self._episodes = episodes
        self._reward_s = reward_s
        self._after = after
        self._tell = tell
        self._open: dict[TrajectoryId, _Episode] = {}

    def act(self, command: Act, tokens: int) -> None:
        """Have an environment answer the turn that a trajectory of `tokens` has ended with."""
        trajectory = command.trajectory
        episode = self._open.setdefault(trajectory, _Episode())
        answer = self._episodes.answer(trajectory, episode.turns, cut=command.cut)
        episode.turns += 1
        episode.waits = True
        event: Answered
        if answer.ended:
            event = TrajectoryScored(trajectory=trajectory, reward=answer.reward)
        else:
            event = EnvironmentAnswered(trajectory=trajectory, epoch=command.epoch, tokens=tokens + answer.tokens)
        seconds = answer.seconds + (self._reward_s if answer.ended else 0.0)
        self._after(seconds, lambda: self._answer(episode, event))

    def dismiss(self, trajectory: TrajectoryId) -> None:
        """Close an environment; a step under way is cancelled."""
        self._open.pop(trajectory).waits = False

    def _answer(self, episode: _Episode, event: Answered) -> None:
        if not episode.waits:
            return
        episode.waits = False
        if isinstance(event, TrajectoryScored):
            del self._open[event.trajectory]
        self._tell(event)
