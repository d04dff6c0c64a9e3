"""Emulated models and environments, for simulation and dry runs."""
