"""Decides and drives: coordinator, strategies, driver, cluster."""
