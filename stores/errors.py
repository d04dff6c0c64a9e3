"""Every error staleflow raises on purpose, grouped by what the person or code that catches it should do.

All are picklable (Dask carries them between processes) and also inherit the standard class a caller would expect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


class StaleflowError(Exception):
    """Root of all errors raised on purpose."""


class ConfigError(StaleflowError, ValueError):
    """The input is wrong: one line saying what, where, the limit and the remedy. The command exits with 2."""


class ActorLost(StaleflowError, ConnectionError):
    """An actor is lost: replace it, requeue its work. actor: the one that failed; it may be one that the called actor
    called."""

    def __init__(self, message: str, actor: str = "") -> None:
        super().__init__(message)
        self.actor = actor


class ActorSilent(ActorLost):
    """An actor did not answer within its deadline: its process was stopped, or is too slow. actor: as of ActorLost."""


class WeightsRefused(ActorLost):
    """An instance cannot take the published weights, or has others than these after a load: it samples no further
    token. actor: as of ActorLost."""


class ActorFailed(StaleflowError, RuntimeError):
    """An actor is there and failed by an error of its own, which the message names. actor: as of ActorLost."""

    def __init__(self, message: str, actor: str = "") -> None:
        super().__init__(message)
        self.actor = actor


class TransferFailed(StaleflowError, ConnectionError):
    """No source could deliver the weights; the message names the sources. The requesting host is alive."""


class StoreError(StaleflowError, OSError):
    """The store cannot be read or written: nothing half-written is kept."""


class StoreUnavailable(StoreError):
    """The bucket of a store does not answer, or refuses: try again. Nothing is lost, and a commit that was applied
    without an answer is recognized when it is repeated."""


class ProtocolViolation(StaleflowError, AssertionError):
    """An invariant was about to be broken: a bug in staleflow. The message lists the events that led to it."""


class JobFailed(StaleflowError, RuntimeError):
    """A job that was submitted to a cluster failed; the message says why."""


class SuiteFailed(StaleflowError, RuntimeError):
    """lm-eval failed while it ran benchmark tasks; the message has its reason."""


class TooManyFailedEnvironments(StaleflowError, RuntimeError):
    """Too many environments fail for the run to continue."""


class RunStuck(StaleflowError, TimeoutError):
    """No progress within the deadline; the message says which step waits for which work on which instance."""


@contextlib.contextmanager
def raised_as(
    kind: type[Exception],
    problem: str,
    *errors: type[BaseException],
    remedy: str = "",
    describe: Callable[[Any], str] = str,
) -> Iterator[None]:
    """Context manager that raises any of these errors as an error of this kind, with a message of one line.

    Args:
        kind: The error to raise.
        problem: What failed; begins the message.
        errors: The errors to catch.
        remedy: What to do about it; ends the message. Empty: none.
        describe: Returns a caught error's own text.
    """
    try:
        yield
    except errors as error:
        raise kind(f"{problem}: {describe(error)}" + (f"; {remedy}" if remedy else "")) from error


def with_type(error: BaseException) -> str:
    """An error's type and message, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def strerror(error: Exception) -> str:
    """What the system says of an OSError, without its number and path."""
    return str(getattr(error, "strerror", error))
