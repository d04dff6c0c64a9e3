"""The coordinator's body in virtual time. Pure."""
