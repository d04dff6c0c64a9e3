"""Rollout engines behind one contract."""
