"""Emulated environments: results and durations of their steps in emulated and simulated episodes. Pure.

An episode is a response of the workload, step by step: each turn but the last one calls a tool. Like the workload, it
is a function of ids. Failures and durations also depend on the attempt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from staleflow.tasks.emulation.workload import Turn, Workload
from staleflow.tasks.settings.seeds import Stream, generator

ATTEMPT_STRIDE = 2**24
"""Distance of the groups whose durations successive attempts of an episode use. A run has fewer groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFaults:
    """Random faults of environment steps. fail_share, hang_share: shares of steps that fail, and that hang."""

    fail_share: float = 0.0
    hang_share: float = 0.0
    seed: int = 0

    def draw(self, group: int, member: int, attempt: int, turn: int) -> tuple[bool, bool]:
        """Draw whether a step fails, and whether it hangs. attempt: number of earlier attempts at the episode."""
        if not self.fail_share and not self.hang_share:
            return False, False
        fails, hangs = generator(self.seed, Stream.FAULTS, 1, group, member, attempt, turn).random(2)
        return bool(fails < self.fail_share), bool(hangs < self.hang_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedStepResult:
    """Result of an emulated environment step."""

    seconds: float
    """Duration, in the cost model's seconds; infinite if the step hangs."""
    tokens: int
    """Length of the observation."""
    ended: bool
    reward: float = 0.0
    """Reward of the whole episode, once it has ended."""
    error: str = ""
    """Why the environment failed; empty if it did not. The other fields are not used then."""


class EmulatedEpisodes:
    """The emulated episodes of a job."""

    def __init__(self, workload: Workload, faults: StepFaults | None = None) -> None:
        self._workload = workload
        self._faults = faults or StepFaults()

    def step_result(
        self, group: int, member: int, turn: int, *, attempt: int = 0, truncated: bool = False
    ) -> EmulatedStepResult:
        """Return the result of the environment step after a turn.

        Args:
            group: The trajectory's group.
            member: Index of the trajectory in its group.
            turn: Index of the turn.
            attempt: Number of earlier attempts at the episode.
            truncated: Whether the turn was truncated, which ends the episode.
        """
        turns = self._workload.turns(group, member)
        is_last = truncated or turn >= len(turns) - 1
        seconds = 0.0 if is_last else self.step_s(group, member, turn, attempt=attempt)
        tokens = 0 if is_last else turns[turn].tool_tokens
        fails, hangs = (False, False) if truncated else self._faults.draw(group, member, attempt, turn)
        if hangs:
            return EmulatedStepResult(seconds=math.inf, tokens=0, ended=False)
        if fails:
            return EmulatedStepResult(seconds=seconds, tokens=0, ended=False, error="drawn at random")
        reward = self._workload.reward(group, member) if is_last else 0.0
        return EmulatedStepResult(seconds=seconds, tokens=tokens, ended=is_last, reward=reward)

    def step_s(self, group: int, member: int, turn: int, *, attempt: int) -> float:
        """Return the seconds of a tool call, as in `step_result`. A restarted episode gets those of another group. With
        the same ones, a step that took too long once would do so in every attempt."""
        turns = self._workload.turns(group, member)
        if attempt:
            other_turns = self._workload.turns(group + attempt * ATTEMPT_STRIDE, member)
            return other_turns[turn % len(other_turns)].tool_s
        return turns[turn].tool_s


def remaining_tokens(turns: Sequence[Turn], tokens: int) -> int:
    """Tokens left to sample in the current turn of a response of `tokens` tokens, observations included; at least 1.

    >>> remaining_tokens((Turn(5, 3.0, 20), Turn(6)), 2), remaining_tokens((Turn(5, 3.0, 20), Turn(6)), 26)
    (3, 5)
    """
    start = 0
    for number, turn in enumerate(turns):
        end = start + turn.tokens
        if tokens < end or number == len(turns) - 1:
            return max(1, end - max(start, tokens))
        start = end + turn.tool_tokens
    raise AssertionError("a response has at least one turn")
