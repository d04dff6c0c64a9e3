"""Tests of pipeline/config/."""
