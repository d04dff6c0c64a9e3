"""Runs a coordinator on a Dask cluster: the driver, its actors, links to rollout instances, evaluations."""
