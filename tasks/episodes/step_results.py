"""The keys of hosted episodes, and the results of their steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from staleflow.tasks.rendering.task_source import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeKey:
    """Identifies an episode by its group, its member number in the group, and the attempt. held_out: whether it is of
    an evaluation."""

    group: int
    held_out: bool = False
    member: int = 0
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedStepResult:
    """Result of one environment step of a hosted episode."""

    messages: tuple[Message, ...] = ()
    """The observation before the model's next turn; roles are user, tool, environment and system. Empty once the
    episode has ended."""
    ended: bool = False
    reward: float = 0.0
    """Reward of the whole episode, once it has ended without an error."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Parts of the reward, by name."""
    error: str = ""
    """One line on a failure: the environment raised, hung, died or returned an invalid value, or scoring failed. The
    episode has then ended, and its reward is not used."""
    lost: bool = False
    """Whether the only error is that this host does not have the episode and cannot repeat it: it must be restarted."""
    environment_s: float = 0.0
    """Seconds of the environment for this step, without the wait for a slot."""
    waited_s: float = 0.0
    """Seconds that the step waited for one of the environment.concurrency slots."""
    replayed: tuple[tuple[Message, ...], ...] = ()
    """Observations of earlier turns that were executed again here. The caller must compare them with the stored ones,
    and restart the episode if they differ."""
