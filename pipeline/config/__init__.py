"""The job file, and the objects built from it."""
