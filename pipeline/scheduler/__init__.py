"""What lives in the Dask scheduler, and how to connect to one."""
