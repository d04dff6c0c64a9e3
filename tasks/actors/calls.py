"""Calls to actors: each has a deadline, and an actor that is gone always raises ActorLost.

Without this, a call to a dead actor can hang forever, or fail with OSError, RuntimeError or CancelledError, depending
on the caller and the moment, even before the call is sent; a stopped process just never answers. So that an actor's own
OSError or RuntimeError is not taken for its loss, classes of actors are decorated with `fails_by_name`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from typing import Any, TypeVar

from stores.errors import ActorFailed, ActorLost, StaleflowError

logger = logging.getLogger(__name__)

Class = TypeVar("Class", bound=type)


def fails_by_name(cls: Class) -> Class:
    """Class decorator: errors of public coroutine methods that are not ours are raised as ActorFailed."""
    for name, method in list(vars(cls).items()):
        if inspect.iscoroutinefunction(method) and not name.startswith("_"):
            setattr(cls, name, _failing_by_name(method))
    return cls


def _failing_by_name(method: Any) -> Any:
    @functools.wraps(method)
    async def named(*args: Any, **kwargs: Any) -> Any:
        try:
            return await method(*args, **kwargs)
        except StaleflowError:
            raise
        except Exception as error:
            logger.exception("%s failed", method.__qualname__)
            raise ActorFailed(f"{type(error).__name__}: {error}") from error

    return named


async def call(actor: Any, method: str, *args: Any, within_s: float, who: str, limit: str = "") -> Any:
    """Return the result of `actor.method(*args)`. Raises ActorLost if the actor, `who` in messages, is gone or does not
    answer within `within_s` seconds, ActorFailed if the method fails; a StaleflowError of the method itself is passed
    on, and so is the loss or failure of an actor that it called in turn. limit: the knob that sets within_s, for the
    message."""
    try:
        async with asyncio.timeout(within_s):  # wait_for may swallow a cancellation that comes with the answer
            return await getattr(actor, method)(*args)
    except ActorFailed as error:
        if error.who:
            raise
        raise ActorFailed(f"{who} failed: {error}", who) from error
    except ActorLost as error:  # by its own account, or an actor that it called
        error.who = error.who or who
        raise
    except StaleflowError:
        raise
    except TimeoutError:
        raise ActorLost(f"{who} did not answer within {within_s:g} s" + (f" ({limit})" if limit else ""), who) from None
    except (OSError, RuntimeError) as error:
        raise ActorLost(f"{who} is gone: {error}", who) from error
