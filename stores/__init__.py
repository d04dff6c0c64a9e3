"""What the system remembers: trajectories, the staleness protocol, the versioned store, weights."""
