"""Tests of pipeline/profiling/."""
