"""Measurement of an engine, and the fit of the cost model to it."""
