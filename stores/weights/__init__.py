"""Weight files, fingerprints and resume points."""
