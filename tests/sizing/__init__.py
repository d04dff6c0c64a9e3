"""Tests of pipeline/sizing/."""
