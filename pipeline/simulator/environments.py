"""Environments in virtual time: when they answer, and what. Pure."""

from __future__ import annotations

from collections import Counter
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
    """The environments of a simulated run. deadline_s: for an answer. reward_s: that the last answer takes more. after:
    schedules a call so many seconds later. tell: takes an answer."""

    def __init__(
        self,
        episodes: EmulatedEpisodes,
        *,
        deadline_s: float,
        reward_s: float,
        after: Callable[[float, Callable[[], None]], None],
        tell: Callable[[Answered], None],
    ) -> None:
        self._episodes = episodes
        self._deadline_s = deadline_s
        self._reward_s = reward_s
        self._after = after
        self._tell = tell
        self._open: dict[TrajectoryId, _Episode] = {}
        self._failures: Counter[TrajectoryId] = Counter()

    def act(self, command: Act, tokens: int) -> None:
        """Have an environment answer the turn that a trajectory of `tokens` has ended with."""
        trajectory, epoch = command.trajectory, command.epoch
        episode = self._open.setdefault(trajectory, _Episode())
        attempt = self._failures[trajectory]
        answer = self._episodes.answer(trajectory, episode.turns, attempt=attempt, cut=command.cut)
        episode.turns += 1
        episode.waits = True
        seconds = answer.seconds
        event: Answered
        if seconds > self._deadline_s:
            event = EnvironmentFailed(trajectory=trajectory, epoch=epoch, error=f"no answer in {self._deadline_s:g} s")
            seconds = self._deadline_s
        elif answer.error:
            event = EnvironmentFailed(trajectory=trajectory, epoch=epoch, error=answer.error)
        elif answer.ended:
            event = TrajectoryScored(trajectory=trajectory, reward=answer.reward)
            seconds += self._reward_s
        else:
            event = EnvironmentAnswered(trajectory=trajectory, epoch=epoch, tokens=tokens + answer.tokens)
        self._after(seconds, lambda: self._answer(episode, event))

    def dismiss(self, trajectory: TrajectoryId) -> None:
        """Close an environment; a step under way is cancelled."""
        self._open.pop(trajectory).waits = False
        self._failures.pop(trajectory, None)

    def _answer(self, episode: _Episode, event: Answered) -> None:
        if not episode.waits:
            return
        episode.waits = False
        match event:
            case TrajectoryScored():
                del self._open[event.trajectory]
                self._failures.pop(event.trajectory, None)
            case EnvironmentFailed():
                del self._open[event.trajectory]
                self._failures[event.trajectory] += 1
        self._tell(event)
