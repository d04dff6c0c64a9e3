"""Unfinished trajectories of a run, and the log they are recovered from."""
