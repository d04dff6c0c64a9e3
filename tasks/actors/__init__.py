"""The Dask actors of a run, and how they are called."""
