"""Recovery of a run after a crash or stop: its folder, its journal, and actors restored from stored state."""
