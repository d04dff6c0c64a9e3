"""Stored data of a run: trajectories, the staleness ledger, the versioned store, weights."""
