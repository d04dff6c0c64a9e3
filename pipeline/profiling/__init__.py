"""Time breakdown of a run, and the cost model fitted to it."""
