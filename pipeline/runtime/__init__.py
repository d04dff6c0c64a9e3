"""Runs a coordinator on a Dask cluster: driver, actors, workers, recovery."""
