"""Tests of the public interface: jobs that are run from Python."""
