"""Worker processes and the Dask actors placed on them."""
