"""Tests of pipeline/cluster/."""
