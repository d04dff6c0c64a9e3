"""Working on stored runs, with Dask: scoring again, comparing, reading under other weights, exporting, training."""
