"""Tests of pipeline/stored_runs/."""
