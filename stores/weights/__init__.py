"""Weight files, deltas, fingerprints and resume points."""
