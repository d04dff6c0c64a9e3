"""Environments of many turns: what users write, what packages bring, and what runs their episodes."""
