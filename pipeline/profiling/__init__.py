"""Where the time of a run goes, and the cost model fitted to it."""
