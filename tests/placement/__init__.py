"""Tests of pipeline/placement/."""
