"""All errors that staleflow raises on purpose, grouped by what the person or code that catches them should do.

All are picklable (Dask carries them between processes) and also inherit the standard class a caller would expect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


class StaleflowError(Exception):
    """Root of all errors raised on purpose."""


class ConfigError(StaleflowError, ValueError):
    """The input is wrong. The message is one line: what, where, the limit and the remedy. Commands exit with 2."""


class ActorLost(StaleflowError, ConnectionError):
    """An actor is lost: replace it and requeue its work. actor: the lost one, which may have been called by the called
    actor."""

    def __init__(self, message: str, actor: str = "") -> None:
        super().__init__(message)
        self.actor = actor


class ActorSilent(ActorLost):
    """An actor did not answer within its deadline, because its process was stopped or is too slow. actor: as in
    ActorLost."""


class WeightsRefused(ActorLost):
    """An instance cannot load the published weights, or has other weights after loading. It samples no further tokens.
    actor: as in ActorLost."""


class ActorFailed(StaleflowError, RuntimeError):
    """An actor raised an error of its own, which the message names. Its process is alive. actor: as in ActorLost."""

    def __init__(self, message: str, actor: str = "") -> None:
        super().__init__(message)
        self.actor = actor


class TransferFailed(StaleflowError, ConnectionError):
    """No source could send the weights; the message names the sources. The requesting host is alive."""


class StoreError(StaleflowError, OSError):
    """A store, or a file of weights, checkpoints or settings, cannot be read or written. Nothing is half-written."""


class StoreUnavailable(StoreError):
    """The bucket of a store does not answer or refuses a request: try again. Nothing is lost; a commit that was applied
    without an answer is recognized when it is repeated."""


class ProtocolViolation(StaleflowError, AssertionError):
    """An invariant would have been broken: a bug in staleflow. The message lists the events that led to it."""


class JobFailed(StaleflowError, RuntimeError):
    """A submitted job failed; the message says why."""


class SuiteFailed(StaleflowError, RuntimeError):
    """lm-eval failed during a benchmark; the message has its reason."""


class TooManyFailedEnvironments(StaleflowError, RuntimeError):
    """Too many environments fail for the run to continue."""


class RunStuck(StaleflowError, TimeoutError):
    """No progress within the deadline. The message says which step waits for which work on which instance."""


@contextlib.contextmanager
def raised_as(
    kind: type[Exception],
    problem: str,
    *errors: type[BaseException],
    remedy: str = "",
    describe: Callable[[Any], str] = str,
) -> Iterator[None]:
    """Context manager that raises these errors as an error of another class, with a one-line message.

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


def type_and_message(error: BaseException) -> str:
    """An error's type and message, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def strerror(error: Exception) -> str:
    """The system's text of an OSError, without its number and path; the whole text of other errors."""
    return str(getattr(error, "strerror", None) or error)
