"""Measuring an engine and fitting the cost model to it."""
