"""Mutation testing: plants single mistakes in the modules that keep the promises, and runs their tests."""
