"""Tests of pipeline/scheduler/."""
