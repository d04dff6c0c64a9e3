"""What works: engines, environments, numerics and the Dask actors around them."""
