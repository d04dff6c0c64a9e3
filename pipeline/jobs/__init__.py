"""A run from start to end: execution, submission, progress, summary."""
