"""The plugin that puts the board, and a page of the dashboard that shows it, on a Dask scheduler."""

from __future__ import annotations

from typing import Any

from pipeline.scheduler.board import Board
from stores.errors import ConfigError


class BoardPlugin(Board):
    """Registered once a scheduler, by the first client that needs it."""

    async def start(self, scheduler: Any) -> None:
        await super().start(scheduler)
        try:
            from pipeline.scheduler import dashboard
        except ImportError:  # no bokeh there: the scheduler has no dashboard either
            return
        dashboard.add_to(scheduler, self)


async def ensure(client: Any) -> None:
    """Put the board on the scheduler of an asynchronous client, if it has none yet. Raises ConfigError if that
    scheduler cannot load this package."""
    try:
        await client.register_plugin(BoardPlugin())
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the scheduler at {client.scheduler.address} cannot load staleflow ({error}); install this version there"
        ) from error
