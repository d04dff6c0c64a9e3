"""The job file, and what is built from it."""
