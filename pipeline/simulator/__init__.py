"""The coordinator's second body: the same decisions, in virtual time."""
