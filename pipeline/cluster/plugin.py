"""The Dask scheduler plugin that adds the job registry and its dashboard page."""

from __future__ import annotations

from typing import Any

from staleflow.pipeline.cluster.job_registry import JobRegistry
from staleflow.stores.errors import ConfigError


class JobRegistryPlugin(JobRegistry):
    """The job registry and its dashboard page as a plugin. The first client that needs it registers it."""

    async def start(self, scheduler: Any) -> None:
        await super().start(scheduler)
        try:
            from staleflow.pipeline.cluster import dashboard
        except ImportError:  # without bokeh the scheduler has no dashboard
            return
        dashboard.add_to(scheduler, self)


async def ensure_job_registry(client: Any) -> None:
    """Register the job registry on the scheduler of an asynchronous client, unless it is registered. Raises ConfigError
    if the scheduler cannot import this package."""
    try:
        await client.register_plugin(JobRegistryPlugin())
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the scheduler at {client.scheduler.address} cannot load staleflow ({error}); install this version there"
        ) from error
