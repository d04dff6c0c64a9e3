"""How you ask: the staleflow command."""
