"""Tests of pipeline/jobs/."""
