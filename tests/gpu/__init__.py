"""Tests that need a GPU; those that can run on CPU run there, too."""
