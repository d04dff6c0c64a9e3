"""Requests to hosted episodes and their results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from staleflow.tasks.rendering.task_source import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeKey:
    """Identifies an episode: index of the task among training or held-out tasks, member of the group, and attempt."""

    task: int
    held_out: bool = False
    member: int = 0
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedStepResult:
    """Result of one environment step of a hosted episode."""

    messages: tuple[Message, ...] = ()
    """The observation, for the model's next turn: roles user, tool, environment, system. Empty once the episode has
    ended."""
    ended: bool = False
    reward: float = 0.0
    """Of the whole episode, once it has ended without an error."""
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    """What went wrong in the environment, on one line: it raised, hung, died or returned a bad value. The episode has
    ended then, and its reward means nothing."""
    lost: bool = False
    """Whether the error is only that this host does not have the episode, which cannot be recovered: start it again."""
    seconds: float = 0.0
    """The environment's time for this step, without waiting for a slot."""
    waited_s: float = 0.0
    """Seconds that it waited for a slot, one of environment.concurrency."""
    replayed: tuple[tuple[Message, ...], ...] = ()
    """Observations of earlier turns that were executed again here. The caller must compare them with the stored ones,
    and restart the episode if they differ."""
