"""Tests of pipeline/strategies/."""
