"""Audits of a stored run, from its data alone."""
