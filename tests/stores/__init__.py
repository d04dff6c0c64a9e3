"""Tests of stores/."""
