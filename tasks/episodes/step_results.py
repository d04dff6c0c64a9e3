"""What an environment is asked and what it answers: the values between an environment host and its caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from staleflow.tasks.rendering.task_source import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeKey:
    """Which episode: the task's index among training or held-out tasks, the member of its group, and the attempt. An
    attempt that starts again is another episode."""

    task: int
    held_out: bool = False
    member: int = 0
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedStepResult:
    """What an environment says to a model's turn."""

    messages: tuple[Message, ...] = ()
    """To be given to the model before its next turn: roles user, tool, environment, system. Empty once it has ended."""
    ended: bool = False
    reward: float = 0.0
    """Of the whole episode, once it has ended without an error."""
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    """What went wrong in the environment, on one line: it raised, hung, died or returned a bad value. The episode has
    ended then, and its reward means nothing."""
    lost: bool = False
    """Whether the error is only that this host does not have the episode, which cannot be taken up: start it again."""
    seconds: float = 0.0
    """The environment's time for this answer, without waiting for a place."""
    waited_s: float = 0.0
    """Seconds that it waited for a place, one of environment.concurrency."""
    replayed: tuple[tuple[Message, ...], ...] = ()
    """If earlier turns were taken again here: what the environment said to each. The caller must find it equal to what
    the model was given then, and otherwise start the episode again."""
