"""Engines, environments, training numerics, and the Dask actors that run them."""
