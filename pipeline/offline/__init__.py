"""Work on stored runs."""
