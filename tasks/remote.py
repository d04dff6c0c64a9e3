"""Calling an actor: every call has a deadline, and an actor that is gone is one kind of error.

A call to a dead actor can hang for ever, or fail with OSError, RuntimeError or CancelledError, depending on who calls
and when; a stopped process only ever shows as silence. Callers see InstanceLost for all of these.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from stores.errors import InstanceLost, StaleflowError


async def call(answer: Awaitable[Any], timeout_s: float, who: str) -> Any:
    """The answer of an actor call. Raises InstanceLost if `who` does not answer in time or is gone; what the method
    itself raised on purpose comes through as it is."""
    try:
        return await asyncio.wait_for(_awaited(answer), timeout_s)
    except StaleflowError:
        raise
    except TimeoutError:
        raise InstanceLost(f"{who} did not answer within {timeout_s:g} s") from None
    except (OSError, RuntimeError) as error:
        raise InstanceLost(f"{who} is gone: {error}") from error


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer
