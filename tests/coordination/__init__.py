"""Tests of pipeline/coordination/."""
