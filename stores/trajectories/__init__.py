"""Stored trajectories: layout, writing, reading, branches."""
