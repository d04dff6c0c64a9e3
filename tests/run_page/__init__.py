"""Tests of pipeline/run_page/."""
