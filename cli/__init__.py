"""The staleflow command line."""
