"""Environments where none is real: what they answer in emulated and simulated episodes, and how long they take. Pure.

An episode is a response of the workload, taken apart: each turn but the last one calls a tool. As the workload, it is a
function of ids; only what fails also depends on how often the episode has begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.workload import Turn, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedAnswer:
    """What an environment does about a turn. seconds: until it has, of the cost model. tokens: given to the model."""

    seconds: float
    tokens: int
    ended: bool
    reward: float = 0.0
    """Of the whole episode, once it has ended."""


class EmulatedEpisodes:
    """The episodes of a job. members: trajectories of a group."""

    def __init__(self, workload: Workload, members: int) -> None:
        self._workload = workload
        self._members = members

    def answer(self, trajectory: int, turn: int, *, cut: bool = False) -> EmulatedAnswer:
        """The answer to a turn, of which the first is 0. cut: the turn was stopped, and ends the episode."""
        group, member = divmod(trajectory, self._members)
        turns = self._workload.turns(group, member)
        if cut or turn >= len(turns) - 1:
            return EmulatedAnswer(seconds=0.0, tokens=0, ended=True, reward=self._workload.reward(group, member))
        return EmulatedAnswer(seconds=turns[turn].tool_s, tokens=turns[turn].tool_tokens, ended=False)

    def left_to_sample(self, trajectory: int, tokens: int) -> int:
        """Tokens that a trajectory of `tokens` after its prompt, given ones included, samples until its turn ends."""
        return left_to_sample(self._workload.turns(*divmod(trajectory, self._members)), tokens)


def left_to_sample(turns: Sequence[Turn], tokens: int) -> int:
    """Tokens left of the turn that a response of `tokens`, given ones included, has come to; at least 1.

    >>> left_to_sample((Turn(5, 3.0, 20), Turn(6)), 2), left_to_sample((Turn(5, 3.0, 20), Turn(6)), 26)
    (3, 5)
    """
    begin = 0
    for number, turn in enumerate(turns):
        end = begin + turn.tokens
        if tokens < end or number == len(turns) - 1:
            return max(1, end - max(begin, tokens))
        begin = end + turn.tool_tokens
    raise AssertionError("a response has at least one turn")
