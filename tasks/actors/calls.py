"""Calling an actor: every call has a deadline, and an actor that is gone is one kind of error.

A call to a dead actor can hang for ever, or fail with OSError, RuntimeError or CancelledError, depending on who calls
and when, even before the call leaves; a stopped process only ever shows as silence. Callers see ActorLost for all.
"""

from __future__ import annotations

import asyncio
from typing import Any

from stores.errors import ActorLost, StaleflowError


async def call(actor: Any, method: str, *args: Any, within_s: float, who: str, limit: str = "") -> Any:
    """Call `actor.method(*args)` and return its answer. Raises ActorLost if `who` does not answer in time or is gone;
    a StaleflowError that the method raised passes through. limit: the knob that sets within_s, for the message."""

    async def answer() -> Any:
        return await getattr(actor, method)(*args)

    try:
        return await asyncio.wait_for(answer(), within_s)
    except StaleflowError:
        raise
    except TimeoutError:
        raise ActorLost(f"{who} did not answer within {within_s:g} s" + (f" ({limit})" if limit else "")) from None
    except (OSError, RuntimeError) as error:
        raise ActorLost(f"{who} is gone: {error}") from error
