"""Simulates a job in virtual time, with the real coordinator. Pure."""
