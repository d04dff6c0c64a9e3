"""Jobs on a shared Dask cluster: queue, workers, scheduler plugin, dashboard page."""
