"""The coordinator's body on a Dask cluster: driver, actors, workers, recovery."""
