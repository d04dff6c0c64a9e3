"""Conversion between messages and token ids."""
