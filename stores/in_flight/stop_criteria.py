"""Stop strings and stop tokens, which end a turn in addition to the model's own end tokens. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopCriteria:
    """What ends a turn. strings: the turn ends with the token that completes one of these. token_ids: the turn ends
    with one of these."""

    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()


NO_STOP = StopCriteria()


def find_stop(text: str, strings: Sequence[str]) -> tuple[int, int] | None:
    """Find the first stop string in a text.

    Returns:
        Where it begins and ends, in characters; None without one.

    >>> find_stop("one, two", [" two", ", "])
    (3, 5)
    """
    matches = [(start, start + len(string)) for string in strings if (start := text.find(string)) >= 0]
    return min(matches, default=None)
