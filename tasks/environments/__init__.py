"""Environments of several turns: what an environment is, and how it is loaded."""
