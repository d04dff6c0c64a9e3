"""Calls to actors: each has a deadline, and an actor that is gone always raises ActorLost.

Without this, a call to a dead actor can hang forever, or fail with OSError, RuntimeError or CancelledError, depending
on the caller and the moment, even before the call is sent; a stopped process just never answers.
"""

from __future__ import annotations

import asyncio
from typing import Any

from stores.errors import ActorLost, StaleflowError


async def call(actor: Any, method: str, *args: Any, within_s: float, who: str, limit: str = "") -> Any:
    """Return the result of `actor.method(*args)`. Raises ActorLost if the actor, `who` in messages, is gone or does not
    answer within `within_s` seconds; a StaleflowError of the method itself is passed on. limit: the knob that sets
    within_s, for the message."""
    try:
        async with asyncio.timeout(within_s):  # wait_for may swallow a cancellation that comes with the answer
            return await getattr(actor, method)(*args)
    except StaleflowError:
        raise
    except TimeoutError:
        raise ActorLost(f"{who} did not answer within {within_s:g} s" + (f" ({limit})" if limit else "")) from None
    except (OSError, RuntimeError) as error:
        raise ActorLost(f"{who} is gone: {error}") from error
