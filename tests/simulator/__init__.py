"""Tests of pipeline/simulator/."""
