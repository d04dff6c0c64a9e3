"""Tests of pipeline/offline/."""
